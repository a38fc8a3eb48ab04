"""Lightning, as `lightning.pytorch` or as `pytorch_lightning`.

trainer = Trainer(strategy="ddp", callbacks=[LightningCompression(WireDtype(PowerSGD(16), "int8"))])
trainer.fit(module, data)                          # or trainer.fit(module, data, ckpt_path=...)
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gradwire.core.algorithm import Algorithm
from gradwire.torch_backend.ddp.hook import CommHook
from gradwire.torch_backend.integrations.compression import Compression

logger = logging.getLogger("gradwire")

#: The same library twice, with classes that are not the same.
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _callbacks() -> list[Any]:
    """The `Callback` of the package that is used; of both if that is not known."""
    loaded = [module for module in PACKAGES.values() if module in sys.modules]
    found = loaded or [module for package, module in PACKAGES.items() if find_spec(package)]
    if not found:
        raise ImportError("LightningCompression needs Lightning: pip install lightning")
    return [import_module(module).Callback for module in found]


class LightningCompression(*_callbacks()):  # type: ignore[misc]
    """A callback: `algorithm` averages the gradients of a Lightning `Trainer` that trains with DDP.

    The hook is registered when training starts, with the scaler of "16-mixed". The memory is saved
    in Lightning's checkpoints, and each process's own beside them, in `….ckpt.rank0`, …, where
    checkpoints are local files. `fit(ckpt_path=...)` restores it: bit for bit on as many processes,
    with the mean error on any other number. What it does goes to the trainer's loggers every
    `log_every_n_steps` steps.

    Args:
        algorithm: what to run, see `register_comm_hook`.
        message_bytes: collect buckets until their payload has so many bytes, see
            `register_comm_hook`.
        strict: False: of memory that another algorithm has left what fits is kept, see
            `CommHook.load_state_dict`.

    Raises:
        TypeError: `algorithm` is no algorithm; when training starts, if several processes train
            without DDP.
        ValueError: when training starts: see `register_comm_hook`.
    """

    def __init__(
        self, algorithm: Algorithm, *, message_bytes: int | None = None, strict: bool = True
    ) -> None:
        super().__init__()
        self._compression = Compression(algorithm, message_bytes=message_bytes, strict=strict)
        self._logged, self._failed = 0, False
        self._strategy: weakref.ref[Any] | None = None

    @property
    def handle(self) -> CommHook | None:
        """The handle of the hook, see docs/handles.md; None before training, and in a run of one
        process."""
        return self._compression.handle

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # Callbacks are told what is saved and not where. These are called on every rank.
        strategy = trainer.strategy
        if stage == "fit":  # what a validation or a test has loaded is not gone on from
            self._compression.forget()
            self._logged, self._failed = 0, False
        if stage == "fit" and (self._strategy is None or self._strategy() is not strategy):
            self._strategy = weakref.ref(strategy)
            strategy.save_checkpoint = _then(strategy.save_checkpoint, self._save_own)
            strategy.remove_checkpoint = _then(strategy.remove_checkpoint, self._remove_own)

    def _save_own(self, checkpoint: Any, filepath: Any, *_: Any, **__: Any) -> None:
        if (
            not self._failed and _is_local(filepath) and "callbacks" in checkpoint
        ):  # else it is of weights only
            self._compression.save_own(filepath)

    def _remove_own(self, filepath: Any) -> None:
        if _is_local(filepath):
            self._compression.remove_own(filepath)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.ckpt_path is not None and _is_local(trainer.ckpt_path):
            self._compression.look_beside(trainer.ckpt_path)
        self._compression.attach(
            trainer.strategy.model, getattr(trainer.precision_plugin, "scaler", None)
        )

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps
        if not trainer.loggers or not every or step == self._logged or step % every:
            return
        self._logged = step
        if trainer.is_global_zero and (figures := self._compression.figures()):
            for each in trainer.loggers:
                each.log_metrics(figures, step=step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # It may be one rank's alone: for a checkpoint that is written now nobody would come.
        self._failed = True

    def state_dict(self) -> dict[str, Any]:
        if self._failed:
            logger.warning("after an exception the compressor's memory is not saved")
            return {}
        return self._compression.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._compression.load_state_dict(state_dict)


def _is_local(path: Any) -> bool:
    """Whether it is a path, and no address."""
    return "://" not in str(path)


def _then(method: Callable[..., Any], also: Callable[..., None]) -> Callable[..., Any]:
    """A method, and then something with the same arguments."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        also(*args, **kwargs)
        return result

    return call
