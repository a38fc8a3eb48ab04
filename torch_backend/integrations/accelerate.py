"""accelerate.

model, optimizer, data = accelerator.prepare(model, optimizer, data)
compression = AcceleratorCompression(accelerator, model, WireDtype(PowerSGD(16), "int8"))
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from gradwire.core.algorithm import Algorithm
from gradwire.torch_backend.integrations.compression import Compression

#: Of an accelerator's compressors, by which their files differ.
_numbers: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()


class AcceleratorCompression(Compression):
    """`algorithm` averages the gradients of a model that accelerate trains with DDP.

    Registers the hook, with the scaler of fp16, and itself with the accelerator: `save_state` saves
    the memory, each process its own besides, and `load_state` restores it: bit for bit on as many
    processes, with the mean error on any other number.

        compression.log(step)      # to the accelerator's trackers

    Args:
        accelerator: the `accelerate.Accelerator`.
        model: what `prepare` returned.
        algorithm: what to run, see `register_comm_hook`.
        message_bytes: collect buckets until their payload has so many bytes, see
            `register_comm_hook`.
        strict: False: of memory that another algorithm has left what fits is kept, see
            `CommHook.load_state_dict`.

    Attributes:
        handle: of the hook, see docs/handles.md; None in a run of one process.

    Raises:
        TypeError, ValueError: see `register_comm_hook`. Nothing is registered then.
    """

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        algorithm: Algorithm,
        *,
        message_bytes: int | None = None,
        strict: bool = True,
    ) -> None:
        super().__init__(algorithm, message_bytes=message_bytes, strict=strict)
        self._accelerator = accelerator
        self._saved: tuple[int, dict[str, Any]] | None = None
        self.attach(model, accelerator.scaler)
        accelerator.register_for_checkpointing(self)
        number = next(_numbers.setdefault(accelerator, itertools.count()))
        file = f"compressor_{number}.pt" if number else "compressor.pt"

        # Called on every process, with the folder: before the first of them writes what takes long,
        # and before `load_state_dict`.
        def save(models: Any, weights: Any, folder: Any) -> None:
            self.save_own(Path(folder, file))
            self._saved = self._steps(), super(AcceleratorCompression, self).state_dict()

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(
            lambda models, folder: self.look_beside(Path(folder, file))
        )

    def state_dict(self) -> dict[str, Any]:
        saved, self._saved = self._saved, None
        known = saved is not None and saved[0] == self._steps()
        return saved[1] if saved is not None and known else super().state_dict()

    def _steps(self) -> int:
        return 0 if self.handle is None else self.handle.stats().steps

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.restore()

    def log(self, step: int | None = None) -> None:
        """Send what compression does to the trackers. On a GPU the main process waits for the
        device."""
        if self._accelerator.is_main_process and (figures := self.figures()):
            self._accelerator.log(figures, step=step)
