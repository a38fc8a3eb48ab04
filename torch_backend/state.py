"""A driver's memory on its way out and in: of this rank, of all ranks together, and in the units of a loss scale."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core import checkpoint
from gradwire.core.algorithm import State
from gradwire.core.checkpoint import StateMismatch
from gradwire.torch_backend.kernels import TorchOps
from gradwire.torch_backend.meeting import LONGEST, Meeting
from gradwire.torch_backend.pieces import parameter_of, recut

HINT = "Load it with strict=False to keep what fits"


class LossScale:
    """The scale in whose units error memory is; its `value` is a tensor on the device where reading it would make the host wait.

    A `GradScaler` multiplies the loss, so gradients and what compression leaves out of them are multiples of its scale; when that changes,
    what is remembered has to follow.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        self.value: float | Tensor = 1.0

    def follow(self, errors: Collection[Tensor]) -> None:
        """Bring memory to the scaler's scale."""
        if self.scaler is None:
            self._rescale(errors, 1.0)
            return
        scale = scale_of(self.scaler)
        if isinstance(scale, Tensor):
            # On the device and unseen by the host. Where nothing has changed this multiplies by 1.
            if not isinstance(self.value, Tensor):
                self.value = torch.full_like(scale, self.value)
            if errors:  # torch refuses an empty list
                torch._foreach_mul_(list(errors), scale / self.value)
            # In place: steps may run on different streams, and memory belongs to the one that took it.
            self.value.copy_(scale)
        else:
            self._rescale(errors, scale)

    def unscaled(self, x: Tensor) -> Tensor:
        """`x`, which is in units of gradients, as it would be without a scaler."""
        return x if self.scaler is None else x / scale_of(self.scaler)

    def _rescale(self, errors: Collection[Tensor], scale: float) -> None:
        if scale != float(self.value):
            for x in errors:
                x.mul_(scale / float(self.value))
        self.value = scale


def scale_of(scaler: torch.amp.GradScaler) -> float | Tensor:
    """Its scale; a tensor on the device where reading it would make the host wait."""
    scale = getattr(scaler, "_scale", None)
    if isinstance(scale, Tensor) and scale.device.type != "cpu" and scaler.is_enabled():
        return scale
    return scaler.get_scale()


def to_tensors(state: Any) -> Any:
    """A state with tensors in place of NumPy's and JAX's arrays, which checkpoint libraries and the other backend give."""
    if isinstance(state, Mapping):
        return {key: to_tensors(value) for key, value in state.items()}
    if isinstance(state, (Tensor, bool, int, float, str)) or not hasattr(state, "__array__"):
        return state
    array = state.__array__()
    if array.dtype.name == "bfloat16":  # known to NumPy by its name only
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def of_this_rank(state: Mapping[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """A state of one replica, marked with whose it is."""
    return {**state, "rank": group.rank(), "replicas": group.size()}


def load(
    state: Mapping[str, Any],
    algorithm: str,
    current: State[Tensor],
    group: dist.ProcessGroup,
    *,
    strict: bool,
    kind: str = "compressor",
    row: tuple[int, int],
) -> tuple[State[Tensor], StateMismatch]:
    """What of a state of this `kind`, of this rank or portable, has a place in the memory here; what has none is logged. `row`: which replica of how
    many this is in a portable state.
    Raises ValueError for another rank's, and, if `strict`, for one that does not fit."""
    checkpoint.require_kind(state, kind, checkpoint.COMMON)
    state = to_tensors(state)
    rank, replicas = group.rank(), group.size()
    if "rank" in state:
        if (state["rank"], state.get("replicas")) != (rank, replicas):
            raise ValueError(
                f"the state is that of rank {state['rank']} of {state.get('replicas')}, with the error of that rank; this is rank {rank} of "
                f"{replicas}. Load what state_dict() gives, which serves every rank of any number of ranks; of the states of all ranks, "
                "gradwire.core.checkpoint.gather makes one"
            )
    elif "replicas" in state:
        if any(name not in current.tensors and parameter_of(name)[1] for name in state.get("tensors", ())):
            state = recut(state, {}, current)
        state = checkpoint.of_replica(TorchOps(torch.device("cpu")), state, *row)
    loaded, difference = checkpoint.fit(state, algorithm, current, kind)
    if difference and strict:
        raise ValueError(f"{difference}. {HINT}")
    return loaded, difference


def digest(loaded: State[Tensor], current: State[Tensor], per_replica: Collection[str]) -> str:
    """Of what has to be the same on all ranks in a state that is about to be loaded: everything but per-replica memory, in the dtypes here."""
    found = hashlib.sha256()

    def note(name: str, x: Tensor, here: Tensor) -> None:
        found.update(name.encode())
        found.update(x.detach().to("cpu", here.dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data)

    for key in sorted(loaded.shared):
        note(key, loaded.shared[key], current.shared[key])
    for name in sorted(loaded.tensors):
        for key in sorted(loaded.tensors[name].keys() - set(per_replica)):
            note(f"{name}/{key}", loaded.tensors[name][key], current.tensors[name][key])
    return found.hexdigest()[:16]


def require_all_ranks(meeting: Meeting, subject: str, instead: str) -> None:
    """Raise RuntimeError if some ranks do not come to a collective call, which would keep the others waiting."""
    reason = (
        f"{subject} communicates, so every rank calls it, before anything that only one of them does (`if rank == 0:`). {instead} "
        "communicates nothing"
    )
    meeting.come(subject, reason, longest=LONGEST)


def require_receiver(to: int | None, size: int) -> None:
    """Raise ValueError if `to` is neither a rank of so many nor None, all of them."""
    if to is not None and not 0 <= to < size:
        raise ValueError(f"to={to} is no rank of the {size} in the process group; None sends to all")


def require_form(errors: str, to: int | None, size: int) -> None:
    """Raise ValueError for what is no form of the errors, or no receiver among so many ranks."""
    if errors not in ("mean", "all"):
        raise ValueError(f"errors={errors!r} must be 'mean', one copy, or 'all', one of each rank")
    require_receiver(to, size)


def gathered(
    state: Mapping[str, Any],
    per_replica: Collection[str],
    group: dist.ProcessGroup,
    device: torch.device,
    errors: str,
    to: int | None,
) -> dict[str, Any] | None:
    """The portable form of the states of all ranks, on the CPU of rank `to`, or of all.

    One tensor at a time: the device needs no memory for more. In mean form it is summed in float64, on the way.
    """
    size = dist.get_world_size(group)
    require_form(errors, to, size)
    receives = to is None or to == dist.get_rank(group)
    tensors, local = {}, {}
    for name, memory in state["tensors"].items():
        tensors[name] = {k: x.to("cpu", copy=True) for k, x in memory.items() if k not in per_replica}
        own = {k: x for k, x in memory.items() if k in per_replica}
        rows = {k: _mean(x, group, to) if errors == "mean" else _rows(x, group, to, receives) for k, x in own.items()}
        if rows:
            local[name] = rows
    if not receives:
        return None
    shared = {k: x.to("cpu", copy=True) for k, x in state["shared"].items()}
    return {**state, "replicas": size, "shared": shared, "tensors": tensors, "local": local}


def _mean(x: Tensor, group: dist.ProcessGroup, to: int | None) -> Tensor:
    total = x.to(torch.float64, copy=True)  # memory of float64 too: it is added up in place
    if to is None:
        dist.all_reduce(total, group=group)
    else:
        dist.reduce(total, dist.get_global_rank(group, to), group=group)
    return (total / dist.get_world_size(group)).to(x.dtype).cpu()[None]


def _rows(x: Tensor, group: dist.ProcessGroup, to: int | None, receives: bool) -> Tensor:
    # As bytes: libraries do not know all dtypes. In C order: all ranks must mean the same.
    own = x.contiguous().reshape(-1).view(torch.uint8)
    size = dist.get_world_size(group)
    received = [torch.empty_like(own) for _ in range(size)] if receives else None
    if to is None:
        assert received is not None
        dist.all_gather(received, own, group=group)
    else:
        dist.gather(own, received, dist.get_global_rank(group, to), group=group)
    if received is None:
        return x
    return torch.stack([r.view(x.dtype).reshape(x.shape).cpu() for r in received])
