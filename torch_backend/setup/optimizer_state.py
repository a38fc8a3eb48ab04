"""What optimizers keep in their state beside moments: weights, and tensors that know few
operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.torch_backend.setup.sharded_models import is_dtensor

#: Elements of a parameter of which an optimizer that codes its state codes it; smaller ones it
#: leaves as they are.
CODED = 4096
#: Under which schedule-free optimizers keep the weights that they step, where the parameters are in
#: between (Defazio et al. 2024).
STEPPED = "z"


def is_plain(x: Tensor) -> bool:
    """Whether it is a tensor as any other, or a distributed one of those."""
    return type(x) in (Tensor, torch.nn.Parameter) or is_dtensor(x)


def uncopied(
    optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device
) -> str:
    """What the optimizer remembers of a large parameter that cannot be copied, joined and moved,
    found out by trying it with zeros; "" if nothing. What else is wrong with the optimizer is not
    said."""
    p = torch.nn.Parameter(torch.zeros(CODED // 64, 64, dtype=torch.float32, device=device))
    p.grad = torch.zeros_like(p)
    try:
        optimizer = optimizer_class([p], **options)
        with torch.no_grad():
            optimizer.step()
        remembered = dict(optimizer.state[p])
    except Exception:
        return ""
    for name, x in remembered.items():
        if isinstance(x, Tensor):
            try:
                torch.cat([x.clone().reshape(-1)] * 2).cpu()
            except Exception as error:
                return (
                    f"remembers {name!r} as a {type(x).__name__}, which cannot be copied and joined"
                    f" ({type(error).__name__}: {error})"
                )
    return ""


def has_two_modes(optimizer: object) -> bool:
    """Whether it, or such a class, puts other weights into the parameters for an evaluation, as
    schedule-free ones do."""
    return callable(getattr(optimizer, "train", None)) and callable(
        getattr(optimizer, "eval", None)
    )


@dataclass(frozen=True)
class MayBeWeights:
    """What an optimizer keeps of some parameters, in their shapes.

    Attributes:
        names: of it.
        flags: two booleans for each name, on the device: whether it is the parameters, rounded to
            their dtypes, in every element; and whether any of these is not zero. None:
            there are no names.
        two_modes: the optimizer has them.
    """

    names: tuple[str, ...]
    flags: Tensor | None
    two_modes: bool

    def weights(self, told: Tensor | None) -> tuple[set[str], set[str]]:
        """The names of weights: masters, of which the parameters are the rounded values; and
        others, which the optimizer steps and puts into the parameters by its own rule. `told`: the
        flags, on the host, or where the host waits for them."""
        flags = [] if told is None else told.tolist()
        masters = {
            n
            for n, equal, some in zip(self.names, flags[::2], flags[1::2], strict=True)
            if equal and some
        }
        return masters, {STEPPED} & {*self.names} - masters if self.two_modes else set()


def weights_in(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]
) -> tuple[set[str], set[str]]:
    """The names under which an optimizer keeps weights of these parameters now, see
    `MayBeWeights.weights`. On CUDA the host waits once."""
    seen = may_be_weights(optimizer, parameters)
    return seen.weights(seen.flags)


def names_in(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> tuple[str, ...]:
    """The names that `may_be_weights` finds, where nothing is asked of the device."""
    return tuple(_in_their_shapes(optimizer, parameters))


def may_be_weights(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> MayBeWeights:
    """What an optimizer keeps of these parameters now. The host waits for nothing."""
    tensors = _in_their_shapes(optimizer, parameters)
    flags = []
    for pairs in tensors.values():
        equal = torch.stack([_whole((x.to(p.dtype) == p).all()) for p, x in pairs]).all()
        flags += [equal, torch.stack([_whole(p.any()) for p, _ in pairs]).any()]
    together = torch.stack([flag.to(flags[0].device) for flag in flags]) if flags else None
    return MayBeWeights(tuple(tensors), together, has_two_modes(optimizer))


def _in_their_shapes(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Name → each parameter, and what the optimizer keeps of it under this name."""
    tensors: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for p in parameters:
        for key, x in optimizer.state.get(p, {}).items():
            if (
                isinstance(x, Tensor)
                and x.is_floating_point()
                and x.shape == p.shape
                and is_plain(x)
            ):
                tensors.setdefault(key, []).append((p.detach(), x))
    return tensors


def _whole(flag: Tensor) -> Tensor:
    """A scalar, of a distributed tensor that of all its parts."""
    whole: Tensor = flag.full_tensor() if is_dtensor(flag) else flag  # type: ignore[attr-defined]
    return whole
