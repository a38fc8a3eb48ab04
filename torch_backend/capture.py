"""CUDA graphs: what may be captured (`torch.cuda.graph`), and what is refused because a graph repeats kernels and not Python.

A captured step is replayed with the memory it was captured with: gradients, error and factors, all updated in place. What the host knows stands
still: the number of the step, a schedule, the loss scale, which parameters took part. A step that rests on any of it would go on with what was
true at capture, unnoticed; so it is refused in the first captured backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.ops import Spec
from gradwire.core.plan.traffic import traffic

OUTSIDE = "Leave it out of the graph: capture the forward pass alone (torch.cuda.make_graphed_callables before DDP wraps the model)"


def capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def refuse_capture(what: str) -> None:
    """Raise RuntimeError if a graph is being captured, for something that rests on the host in every step: `what` and why."""
    if capturing():
        raise RuntimeError(f"{what} cannot be captured in a CUDA graph. {OUTSIDE}")


def require_capturable(
    algorithm: Algorithm,
    specs: Mapping[str, Spec],
    memory: State[AbstractArray],
    steps: int,
    *,
    grad_scaler: bool,
    usage: bool,
) -> None:
    """Raise RuntimeError, naming the option and the fix, unless every replay of a step after so many is a step. Nothing is computed.

    `grad_scaler`: memory follows the scale of a loss scaler. `usage`: parameters that took no part in the forward pass are told apart.
    """
    if steps <= algorithm.start_step:
        raise RuntimeError(
            f"{algorithm!r} is captured in a CUDA graph as step {steps}, and memory that lasts is made in the first one that is not dense: take "
            f"at least {algorithm.start_step + 1} steps before the capture (torch asks for 11 of DDP)"
        )
    if algorithm.cycle > 1:
        raise RuntimeError(
            f"{algorithm!r} alternates between {algorithm.cycle} kinds of step, and the host has to know whose turn it is; a CUDA graph repeats "
            f"one. Leave half_step out, or do not capture the backward pass"
        )
    if grad_scaler:
        raise RuntimeError(
            "grad_scaler= lets memory follow the loss scale, which the host reads; a CUDA graph would keep the scale of its capture. Train in "
            "bfloat16 without a GradScaler, or do not capture the backward pass"
        )
    if usage:
        raise RuntimeError(
            "find_unused_parameters=True tells parameters apart by what the host has seen; a CUDA graph would repeat what it saw at capture. "
            "Leave it out, since a graph always uses the same parameters, or do not capture the backward pass"
        )
    try:
        traffic(algorithm, specs, memory, _Number(steps), world_size=2)
    except _Asked:
        raise RuntimeError(
            f"{algorithm!r} does something else in each step, by the step's number (warm_start=False draws a matrix anew), and a CUDA graph "
            "repeats one. Use warm_start=True, or do not capture the backward pass"
        ) from None


class _Asked(Exception):
    """What an algorithm does depends on the number of the step."""


class _Number(int):
    """The number of a step, of which an algorithm may only ask what is so in all later ones too: whether it has reached another."""

    def __ge__(self, other: Any) -> bool:
        return _for_good(int.__ge__(self, other), True)

    def __gt__(self, other: Any) -> bool:
        return _for_good(int.__gt__(self, other), True)

    def __lt__(self, other: Any) -> bool:
        return _for_good(int.__lt__(self, other), False)

    def __le__(self, other: Any) -> bool:
        return _for_good(int.__le__(self, other), False)

    def _asked(self, *_: Any) -> NoReturn:
        raise _Asked

    __eq__ = __ne__ = __hash__ = __bool__ = __int__ = __index__ = __float__ = __neg__ = _asked
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _asked
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _asked
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _asked
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _asked


def _for_good(answer: bool, wanted: bool) -> bool:
    if answer is not wanted:
        raise _Asked
    return answer
