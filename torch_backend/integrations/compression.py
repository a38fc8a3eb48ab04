"""What all integrations do: an algorithm on the DDP that a tool has made, its memory for the tool's
checkpoints, its figures for trackers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.algorithm import Algorithm, require_algorithm
from gradwire.core.text.options import AtLeast0, checked
from gradwire.torch_backend.ddp.hook import CommHook, register_comm_hook
from gradwire.torch_backend.state.rank_memory import load_beside, remove_beside, save_beside
from gradwire.torch_backend.torch_internals import before_compile

logger = logging.getLogger("gradwire")


class Compression:
    """An algorithm that waits for a DDP.

    One process averages nothing, and tools then make no DDP: there is no handle, and memory that a
    checkpoint brings is handed on to the next one as it is, for more processes.

    Args:
        algorithm, message_bytes: see `register_comm_hook`.
        strict: of what is loaded, see `CommHook.load_state_dict`.

    Attributes:
        handle: of the hook; None before training, and in a run of one process.

    Raises:
        TypeError: `algorithm` is no algorithm.
    """

    @checked
    def __init__(
        self,
        algorithm: Annotated[Algorithm, require_algorithm],
        *,
        message_bytes: AtLeast0 | None = None,
        strict: bool = True,
    ) -> None:
        self.algorithm, self.strict = algorithm, strict
        self.handle: CommHook | None = None
        self._message_bytes = message_bytes
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._held: dict[str, Any] = {}
        self._beside: str | Path | None = None

    def attach(self, model: Any, grad_scaler: torch.amp.GradScaler | None) -> None:
        """Register the hook on what the tool trains, unless it has been; and give it the memory
        that was loaded. Every rank calls this.

        Raises:
            TypeError: several processes train, and it is no DDP.
            ValueError: see `register_comm_hook` and `CommHook.load_state_dict`.
        """
        ddp = before_compile(model)
        if self._ddp is None or self._ddp() is not ddp:
            self.handle = self._ddp = None
            if not isinstance(ddp, DistributedDataParallel) and not _several():
                logger.info("%r: one process trains, and averages nothing", self.algorithm)
                return
            self.handle = register_comm_hook(
                ddp, self.algorithm, message_bytes=self._message_bytes, grad_scaler=grad_scaler
            )
            self._ddp = weakref.ref(ddp)
        self.restore()

    def state_dict(self) -> dict[str, Any]:
        """The memory of all ranks with the mean error, see `CommHook.state_dict`; empty if there is
        none. Every rank calls this."""
        return dict(self._held) if self.handle is None else self.handle.state_dict()

    def save_own(self, path: str | Path) -> None:
        """Write this rank's own memory beside the file with the memory of all, by itself. Raises
        OSError."""
        if self.handle is not None:
            save_beside(path, self.handle._driver.memory)

    def remove_own(self, path: str | Path) -> None:
        """Remove what `save_own` wrote."""
        if self.handle is not None:
            remove_beside(path, self.handle._driver.memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, of any number of ranks, at the next `attach` or `restore`:
        tools load before they make their DDP."""
        self._held = dict(state)

    def look_beside(self, path: str | Path) -> None:
        """Go on from what `save_own` wrote beside this file, if as many ranks have: at the next
        `attach` or `restore` as well."""
        self._beside = path

    def restore(self) -> None:
        """Give the hook the memory that was loaded. Every rank calls this.

        Raises:
            ValueError: see `CommHook.load_state_dict`; or some ranks have no memory of their own
                beside the file, and others have.
        """
        if self.handle is not None and self._held:
            held, beside = self._held, self._beside
            self._held, self._beside = {}, None  # what is refused now is not tried again
            load = partial(self.handle.load_state_dict, strict=self.strict)
            load_beside(beside, held, self.handle._driver.memory, load)

    def forget(self) -> None:
        """Begin anew, at the next `attach`: with no handle, and nothing loaded."""
        self.handle = self._ddp = None
        self._held, self._beside = {}, None

    def figures(self) -> dict[str, float]:
        """What trackers draw: `Stats.scalars`, each name after "gradwire/"; nothing if there is no
        hook."""
        if self.handle is None:
            return {}
        return {f"gradwire/{name}": value for name, value in self.handle.stats().scalars().items()}


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
