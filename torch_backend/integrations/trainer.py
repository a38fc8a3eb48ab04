"""Hugging Face's Trainer.

trainer = Trainer(model, args, train_dataset=data)
trainer.add_callback(TrainerCompression(trainer, WireDtype(PowerSGD(16), "int8")))
trainer.train()                                   # or trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from gradwire.core.algorithm import Algorithm
from gradwire.core.state.files import whole_file
from gradwire.torch_backend.ddp.hook import CommHook
from gradwire.torch_backend.integrations.compression import Compression

logger = logging.getLogger("gradwire")

#: In a checkpoint's folder, beside `optimizer.pt`.
FILE = "compressor.pt"

_Callback: Any = import_module("transformers").TrainerCallback


class TrainerCompression(_Callback):  # type: ignore[misc]
    """A callback: `algorithm` averages the gradients of a `transformers.Trainer` that trains with
    DDP.

    The hook is registered when training begins, with the scaler of fp16. The memory is saved with
    the optimizer, in `compressor.pt` (not with `save_only_model=True`), and each process's own in
    `compressor.pt.rank0`, …. It comes back where the optimizer does: bit for bit on as many
    processes, with the mean error on any other number. What it does is logged whenever the loss is.

    Args:
        trainer: to which this is added: a callback is not told whose it is.
        algorithm: what to run, see `register_comm_hook`.
        message_bytes: collect buckets until their payload has so many bytes, see
            `register_comm_hook`.
        strict: False: of memory that another algorithm has left what fits is kept, see
            `CommHook.load_state_dict`.

    Raises:
        TypeError: `algorithm` is no algorithm; when training begins, if several processes train
            without DDP.
        ValueError: when training begins: see `register_comm_hook`.
    """

    def __init__(
        self,
        trainer: Any,
        algorithm: Algorithm,
        *,
        message_bytes: int | None = None,
        strict: bool = True,
    ) -> None:
        self._compression = Compression(algorithm, message_bytes=message_bytes, strict=strict)
        self._trainer = trainer
        # Events tell of a checkpoint after it was written, and of none that is read. Both of these
        # are called on every rank. Ranks meet before the first of them writes what takes long.
        trainer._save_optimizer_and_scheduler = _both(
            self._save, trainer._save_optimizer_and_scheduler
        )
        trainer._load_optimizer_and_scheduler = _both(
            trainer._load_optimizer_and_scheduler, self._load
        )

    @property
    def handle(self) -> CommHook | None:
        """The handle of the hook, see docs/handles.md; None before training, and in a run of one
        process."""
        return self._compression.handle

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        self._compression.attach(trainer.model_wrapped, trainer.accelerator.scaler)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # Callbacks are called one after the other, and trackers come first: so this is an entry of
        # its own.
        if logs and "loss" in logs and (figures := self._compression.figures()):
            self._trainer.log(figures)

    def _save(self, folder: str) -> None:
        state = self._compression.state_dict()
        if state and self._trainer.args.should_save:
            with whole_file(Path(folder, FILE)) as file:
                torch.save(state, file)
        self._compression.save_own(Path(folder, FILE))

    def _load(self, folder: str | None) -> None:
        if folder is None:
            return
        file = Path(folder, FILE)
        if file.exists():
            self._compression.load_state_dict(
                torch.load(file, map_location="cpu", weights_only=True)
            )
            self._compression.look_beside(file)
        else:
            logger.warning("%s has no %s: the compressor's memory begins anew", folder, FILE)


def _both(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """Two functions, with the same argument, neither of which returns anything."""

    @functools.wraps(then)
    def call(folder: Any) -> None:
        first(folder)
        then(folder)

    return call
