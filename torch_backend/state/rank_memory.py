"""Each rank's own memory in a checkpoint, beside the mean, and which of the two a run goes on from.

The mean of the errors serves any number of ranks, and is all that a linear method needs. Of others
(`TopK`, `Sign`, codes) the same mean of other errors sends something else. So each rank saves its
own as well, by itself and without sending it to anybody: as many ranks go on from that, bit for
bit, and another number from the mean.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.core.state.files import whole_file
from gradwire.core.text.wording import some
from gradwire.torch_backend.engine.groups.gathered_objects import gathered_by_all
from gradwire.torch_backend.state.memory import Memory

logger = logging.getLogger("gradwire")

#: Keys of each rank's memory, by its number, and of how many ranks have saved.
OWN, RANKS = "own", "ranks"
#: That of all else, as bytes, where the names of what is saved depend on the method at work.
REST = "rest"
#: `torch.distributed.checkpoint` refuses to read a key that was not saved, and each rank reads its
#: own. So ranks that may come have empty ones. A rank beyond these asks for none, and then none is
#: saved either: it could not tell a checkpoint of as many ranks, which had its own, from one of
#: fewer.
SLOTS = 256


class Remembering(Protocol):
    """A handle, whose state is saved whole, and of this rank alone."""

    def _state_dict(self, *, sliced: bool = False) -> dict[str, Any]: ...
    def rank_state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


class ShardedState:
    """What `torch.distributed.checkpoint` saves and loads of a compressor: the `sharded_state` of
    its handle.

    Args:
        handle: whose it is.
        memory: gives its memory, which may become another.
        changes: the method changes from step to step. `torch.distributed.checkpoint` reads the keys
            that a run gives as it loads, so they are the same for all methods then: the mean error
            is a part of one entry of bytes, and not in slices.
    """

    def __init__(
        self, handle: Remembering, memory: Callable[[], Memory], *, changes: bool = False
    ) -> None:
        self._handle, self._memory_now, self._changes = handle, memory, changes

    @property
    def _memory(self) -> Memory:
        return self._memory_now()

    def state_dict(self) -> dict[str, Any]:
        """What the handle's `state_dict` gives, the mean error in slices, of which each rank has
        one; and under "own" this rank's memory as bytes, by its number, of up to `SLOTS` ranks.
        Every rank calls this."""
        whole = self._handle._state_dict(sliced=not self._changes)
        if self._changes:
            whole = {REST: packed(whole)}
        elif not self._memory.per_replica:
            return whole
        number, ranks = self._memory.placement.place
        slots = {str(each): b"" for each in range(number, SLOTS, ranks)}
        if ranks <= SLOTS:
            slots[str(number)] = packed(on_cpu(self._handle.rank_state_dict()))
        elif number == 0:
            logger.warning(
                "sharded_state of %d ranks has the mean of their compression errors alone: it keeps"
                " each rank's own of up to %d. To go on bit for bit, save rank_state_dict() of"
                " each",
                *(ranks, SLOTS),
            )
        return {**whole, RANKS: ranks} | ({OWN: slots} if slots else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's own memory if as many ranks have saved it, of this algorithm;
        else from the mean.

        Raises:
            ValueError: see `Handle.load_state_dict`. Nothing has been changed then.
        """
        whole = {key: value for key, value in state.items() if key not in (OWN, RANKS)}
        if self._changes and REST in whole:
            whole = torch.load(io.BytesIO(whole[REST]), weights_only=True)
        number, ranks = self._memory.placement.place
        saved = state.get(OWN, {}).get(str(number), b"") if state.get(RANKS) == ranks else b""
        own = torch.load(io.BytesIO(saved), weights_only=True) if saved else None
        belongs = own is not None and _belongs(own, whole, self._memory, self._changes)
        # Together: who goes on from the mean needs the slices of all.
        if self._changes or self._memory.per_replica:
            placement = self._memory.placement
            belongs = all(gathered_by_all(belongs, placement.groups.whole, placement.device))
        self._handle.load_state_dict(own if own is not None and belongs else whole)


def save_beside(path: str | Path, memory: Memory) -> None:
    """Write this rank's own memory beside a checkpoint's file, if it has any. Communicates nothing.
    Raises OSError."""
    if memory.per_replica:
        file = _path_of(path, memory)
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as out:
            torch.save(on_cpu(memory.own()), out)


def load_beside(
    path: str | Path | None,
    whole: Mapping[str, Any],
    memory: Memory,
    load: Callable[[Mapping[str, Any]], object],
) -> None:
    """Continue from what `save_beside` wrote, if as many ranks have, of this algorithm; else from
    `whole`. Every rank calls this, and they tell each other whether they have found theirs.

    Raises:
        ValueError: on every rank, if some of them do not find theirs; see also
            `Handle.load_state_dict`. Nothing has been changed then.
    """
    own, why_not = _read(path, memory) if path is not None and memory.per_replica else (None, "")
    if own is not None and not _belongs(own, whole, memory):
        own, why_not = None, "it is of other ranks or shards, another step or another algorithm"
    found = gathered_by_all(
        (own is not None, why_not), memory.placement.groups.whole, memory.placement.device
    )
    without = [rank for rank, (has, _) in enumerate(found) if not has]
    if 0 < len(without) < len(found):
        raise ValueError(
            f"ranks [{some(without)}] have no memory of their own beside {path}"
            f" ({found[without[0]][1]}), and others have. The mean of some ranks' errors is not"
            " that of all: bring all of these files back; or remove all of them, and every rank"
            " begins with the mean"
        )
    if own is None and why_not:
        logger.info("Every rank begins with the mean of the errors in %s: %s", path, why_not)
    load(whole if own is None else own)


def remove_beside(path: str | Path, memory: Memory) -> None:
    """Remove what `save_beside` wrote, if it has. Of a link nothing is removed: what it leads to is
    kept."""
    folder, name = os.path.split(os.path.abspath(path))
    file = Path(os.path.realpath(folder), f"{name}.rank{memory.placement.place[0]}")
    file.unlink(missing_ok=True)


def packed(state: Mapping[str, Any]) -> bytes:
    """A state as `torch.save` writes it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _belongs(
    own: Mapping[str, Any], whole: Mapping[str, Any], memory: Memory, of_any_method: bool = False
) -> bool:
    """Whether a state is of this very rank, and was saved together with `whole`."""
    mine = {**memory.identity, "step": whole.get("step")}
    if of_any_method:
        del mine["algorithm"]
    if {key: own.get(key) for key in mine} != mine:
        return False
    # As many shards along another axis have blocks of other shapes.
    saved, here = own["tensors"], memory.state.tensors
    return of_any_method or all(
        saved[name][key].shape == x.shape
        for name, kept in here.items()
        for key, x in kept.items()
        if key in saved.get(name, {})
    )


def _path_of(path: str | Path, memory: Memory) -> Path:
    return Path(f"{os.path.realpath(path)}.rank{memory.placement.place[0]}")


def _read(path: str | Path, memory: Memory) -> tuple[dict[str, Any] | None, str]:
    try:
        state = torch.load(_path_of(path, memory), map_location="cpu", weights_only=True)
    except Exception as error:  # it is not there, cut off, or no state
        return None, f"{type(error).__name__}: {error}"
    return (state, "") if isinstance(state, dict) else (None, f"it holds a {type(state).__name__}")


def on_cpu(state: Any) -> Any:
    """A state with its tensors on the CPU."""
    if isinstance(state, Mapping):
        return {key: on_cpu(value) for key, value in state.items()}
    return state.cpu() if isinstance(state, Tensor) else state
