"""Does an optimizer treat every element by itself? Found out by trying it, whatever its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS, PIECES, STEPS = 4, 6, 3, 3


def require_shardable(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Raise ValueError for an optimizer whose step no rank can take for its part of the model, however that is cut."""
    name, why = optimizer_class.__name__, ""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if issubclass(optimizer_class, torch.optim.SparseAdam):
        why = "takes sparse gradients, and a sharded optimizer dense ones. Use Adam, with sparse=False in the embedding"
    elif closure is not None and closure.default is inspect.Parameter.empty:
        why = (
            "evaluates the loss by itself, several times in a step, and measures all parameters together: it cannot be sharded. "
            f"Use {name} itself"
        )
    if why:
        raise ValueError(f"{name} {why}")


def refusal(
    made: Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    dtype: torch.dtype | None = None,
) -> Exception | None:
    """What the optimizer itself raises when it is `made` of groups of parameters with their options; None if it takes them.

    It is made for parameters of one element, in as many dimensions as the real ones have: some optimizers make their state at once. They have
    this dtype; None: that of the real ones.
    """

    def stand_in(p: Tensor) -> Tensor:
        return torch.nn.Parameter(p.detach().new_zeros((1,) * p.ndim, dtype=dtype))

    stand_ins = [{**group, "params": [stand_in(p) for p in group["params"]]} for group in groups]
    try:
        made(stand_ins)
    except Exception as error:
        return error
    return None


def require_elementwise(
    optimizer_class: type[torch.optim.Optimizer], defaults: Mapping[str, Any], device: torch.device
) -> None:
    """Raise ValueError if a matrix and its pieces, optimized apart, come to different numbers: norms over a tensor (LARS, LAMB), factored
    or matrix-valued state (Adafactor, Muon), line search (L-BFGS)."""
    pieces = ROWS * COLUMNS // PIECES
    reason = _difference(
        optimizer_class,
        defaults,
        device,
        lambda x: [x.view(ROWS, COLUMNS).clone()],
        lambda x: [part.view(1, pieces).clone() for part in x.split(pieces)],
        one_by_one=False,
    )
    if reason:
        raise ValueError(
            f"{optimizer_class.__name__} cannot work on pieces of parameters ({reason}); use shard='parameter' or shard='bucket', which "
            "leave parameters whole"
        )


def require_independent_parameters(
    optimizer_class: type[torch.optim.Optimizer], defaults: Mapping[str, Any], device: torch.device
) -> None:
    """Raise ValueError if two parameters, updated in two calls of `step` instead of one, come to different numbers: the optimizer counts
    steps, or measures distances, for all parameters together."""

    def halves(x: Tensor) -> list[Tensor]:
        return [part.view(2, -1).clone() for part in x.chunk(2)]

    reason = _difference(optimizer_class, defaults, device, halves, halves, one_by_one=True)
    if reason:
        raise ValueError(
            f"{optimizer_class.__name__} cannot update parameters at different times ({reason}); use hook_with_zero_step, which updates "
            "all of them at once"
        )


def _difference(
    optimizer_class: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    device: torch.device,
    expected_parts: Any,
    parts: Any,
    *,
    one_by_one: bool,
) -> str:
    generator = torch.Generator().manual_seed(0)  # the program's own random numbers are left alone
    start, *gradients = (torch.randn(ROWS * COLUMNS, generator=generator).to(device) for _ in range(1 + STEPS))
    try:
        expected = _run(optimizer_class, defaults, expected_parts(start), [expected_parts(g) for g in gradients], False)
        got = _run(optimizer_class, defaults, parts(start), [parts(g) for g in gradients], one_by_one)
    except Exception as error:
        return f"tried on a small one, it raised {type(error).__name__}: {error}"
    if not torch.allclose(expected, got, rtol=1e-5, atol=1e-6):
        return f"tried on a small one, the result was off by {float((expected - got).abs().max()):.1e}"
    return ""


def _run(
    optimizer_class: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    start: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    one_by_one: bool,
) -> Tensor:
    parameters = [torch.nn.Parameter(x) for x in start]
    optimizer = optimizer_class(parameters, **defaults)
    for gradient in gradients:
        turns = [[i] for i in range(len(parameters))] if one_by_one else [list(range(len(parameters)))]
        for turn in turns:
            for i in turn:
                parameters[i].grad = gradient[i]
            with torch.no_grad():
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return torch.cat([p.detach().reshape(-1) for p in parameters])
