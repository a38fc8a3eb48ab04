"""What memory that is saved and loaded needs besides: the units of a loss scale, other libraries'
arrays, and all ranks at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.torch_backend.engine.groups.barrier import LONGEST, Meeting
from gradwire.torch_backend.torch_internals import foreach_mul_, tensor_of_scale

#: The largest number of a float16.
FLOAT16_MAX = 65504.0


class LossScale:
    """The scale in whose units error memory is; its `value` is a tensor on the device where reading
    it would make the host wait.

    A `GradScaler` multiplies the loss, so gradients and the compression error are multiples of its
    scale; when that changes, what is remembered has to follow.
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
                foreach_mul_(list(errors), scale / self.value)
                _keep_finite(errors)
            # In place: steps may run on different streams, and memory belongs to the one that took
            # it.
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
            _keep_finite(errors)
        self.value = scale


def _keep_finite(errors: Collection[Tensor]) -> None:
    """An error of float16 stays finite when its scale grows: an inf would stay one for ever, where
    a step that is skipped makes the scale fall back."""
    for x in errors:
        if x.dtype == torch.float16:
            x.clamp_(-FLOAT16_MAX, FLOAT16_MAX)


def scale_of(scaler: torch.amp.GradScaler) -> float | Tensor:
    """Its scale; a tensor on the device where reading it would make the host wait."""
    scale = tensor_of_scale(scaler)
    if isinstance(scale, Tensor) and scale.device.type != "cpu" and scaler.is_enabled():
        return scale
    return scaler.get_scale()


def to_tensors(state: Any) -> Any:
    """A state with tensors in place of NumPy's and JAX's arrays, which checkpoint libraries and the
    other backend give."""
    if isinstance(state, Mapping):
        return {key: to_tensors(value) for key, value in state.items()}
    if isinstance(state, (Tensor, bool, int, float, str)) or not hasattr(state, "__array__"):
        return state
    array = state.__array__()
    if array.dtype.name == "bfloat16":  # known to NumPy by its name only
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def require_all_ranks(meeting: Meeting, subject: str, instead: str) -> None:
    """Raise RuntimeError if some ranks do not come to a collective call, which would keep the
    others waiting."""
    reason = (
        f"{subject} communicates, so every rank calls it, before anything that only one of them"
        f" does (`if rank == 0:`). {instead} communicates nothing"
    )
    meeting.come(subject, reason, longest=LONGEST)


def require_receiver(to: int | None, size: int) -> None:
    """Raise ValueError if `to` is neither a rank of so many nor None, all of them."""
    if to is not None and not 0 <= to < size:
        raise ValueError(
            f"to={to} is no rank of the {size} in the process group; None sends to all"
        )
