"""Each rank's own memory in a checkpoint, beside the mean, and which of the two a run goes on from.

The mean of the errors serves any number of ranks, and is all that a linear method needs. Of others (`TopK`, `Sign`, codes) the same mean of other
errors sends something else. So each rank saves its own as well, by itself and without sending it to anybody: as many ranks go on from that, bit for
bit, and another number from the mean.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.files import whole_file
from gradwire.core.wording import some
from gradwire.torch_backend.objects import gathered_by_all

logger = logging.getLogger("gradwire")

#: Keys of each rank's memory, by its number, and of how many ranks have saved.
OWN, RANKS = "own", "ranks"
#: `torch.distributed.checkpoint` refuses to read a key that was not saved, and each rank reads its own. So ranks that may come have empty ones.
SLOTS = 256


class Remembering(Protocol):
    """A driver, or the handle of local SGD."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a state says of itself that is of this very rank, of as many, and of this algorithm."""

    @property
    def per_replica(self) -> Collection[str]:
        """Names of the memories that each rank has for itself."""

    def state_dict(self) -> dict[str, Any]: ...
    def rank_state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


class ShardedState:
    """What `torch.distributed.checkpoint` saves and loads of a compressor: the `sharded_state` of its handle."""

    def __init__(self, source: Remembering) -> None:
        self._source = source

    def state_dict(self) -> dict[str, Any]:
        """What the handle's `state_dict` gives, and under "own" this rank's memory as bytes, by its number. Every rank calls this."""
        whole = self._source.state_dict()
        if not self._source.per_replica:
            return whole
        number, ranks = _number(self._source)
        slots = {str(each): b"" for each in range(number, SLOTS, ranks)}
        return {**whole, RANKS: ranks, OWN: slots | {str(number): _packed(_on_cpu(self._source.rank_state_dict()))}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's own memory if as many ranks have saved it, of this algorithm; else from the mean.

        Raises:
            ValueError: see `Handle.load_state_dict`. Nothing has been changed then.
        """
        whole = {key: value for key, value in state.items() if key not in (OWN, RANKS)}
        number, ranks = _number(self._source)
        packed = state.get(OWN, {}).get(str(number), b"") if state.get(RANKS) == ranks else b""
        own = torch.load(io.BytesIO(packed), weights_only=True) if packed else None
        self._source.load_state_dict(own if own is not None and _belongs(own, whole, self._source) else whole)


def save_beside(path: str | Path, source: Remembering) -> None:
    """Write this rank's own memory beside a checkpoint's file, if it has any. Communicates nothing. Raises OSError."""
    if source.per_replica:
        file = _path_of(path, source)
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as out:
            torch.save(_on_cpu(source.rank_state_dict()), out)


def load_beside(
    path: str | Path | None,
    whole: Mapping[str, Any],
    source: Remembering,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Continue from what `save_beside` wrote, if as many ranks have, of this algorithm; else from `whole`. Every rank calls this, and they tell each other
    whether they have found theirs.

    Raises:
        ValueError: on every rank, if some of them do not find theirs; see also `Handle.load_state_dict`. Nothing has been changed then.
    """
    own, why_not = _read(path, source) if path is not None and source.per_replica else (None, "")
    if own is not None and not _belongs(own, whole, source):
        own, why_not = None, "it is of another number of ranks, another step or another algorithm"
    found = gathered_by_all((own is not None, why_not), group, device)
    without = [rank for rank, (has, _) in enumerate(found) if not has]
    if 0 < len(without) < len(found):
        raise ValueError(
            f"ranks [{some(without)}] have no memory of their own beside {path} ({found[without[0]][1]}), and others have. The mean of some ranks' errors is "
            "not that of all: bring all of these files back; or remove all of them, and every rank begins with the mean"
        )
    if own is None and why_not:
        logger.info("Every rank begins with the mean of the errors in %s: %s", path, why_not)
    source.load_state_dict(whole if own is None else own)


def _number(source: Remembering) -> tuple[int, int]:
    """Of this rank, and how many there are: those of all shards of all replicas."""
    identity = source.identity
    shards = identity.get("shards", 1)
    return identity["rank"] * shards + identity.get("shard", 0), identity["replicas"] * shards


def _belongs(own: Mapping[str, Any], whole: Mapping[str, Any], source: Remembering) -> bool:
    """Whether a state is of this very rank, and was saved together with `whole`."""
    mine = {**source.identity, "step": whole.get("step")}
    return {key: own.get(key) for key in mine} == mine


def _path_of(path: str | Path, source: Remembering) -> Path:
    return Path(f"{os.path.realpath(path)}.rank{_number(source)[0]}")


def remove_beside(path: str | Path, source: Remembering) -> None:
    """Remove what `save_beside` wrote, if it has."""
    _path_of(path, source).unlink(missing_ok=True)


def _read(path: str | Path, source: Remembering) -> tuple[dict[str, Any] | None, str]:
    try:
        state = torch.load(_path_of(path, source), map_location="cpu", weights_only=True)
    except Exception as error:  # it is not there, cut off, or no state
        return None, f"{type(error).__name__}: {error}"
    return (state, "") if isinstance(state, dict) else (None, f"it holds a {type(state).__name__}")


def _on_cpu(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _on_cpu(value) for key, value in state.items()}
    return state.cpu() if isinstance(state, Tensor) else state


def _packed(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
