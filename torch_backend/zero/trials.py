"""What a sharded optimizer has to be, found out by trying it, whatever its class: the parts that
ranks step alone come to what one step of all of them comes to, and what it remembers can be
saved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradwire.torch_backend.setup.optimizer_state import has_two_modes, uncopied

#: Parts of a trial are so large, one beside the other: what is a sum over all of them is that of
#: one of them.
SCALES = (1e-3, 1.0, 1e3)
ROWS, COLUMNS, STEPS = 4, 8, 50
#: Names begin so of optimizers that find one step size for all parameters, and some of them slowly.
KNOWN = ("DAdapt", "DoG", "Mechanic", "Prodigy")

#: (class, options, device, how) → what came of the trial.
_tried: dict[tuple[type, str, torch.device, str], str] = {}


def require_shardable(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Raise ValueError for an optimizer whose step no rank can take for its part of the model,
    however that is cut."""
    name, why = optimizer_class.__name__, ""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if issubclass(optimizer_class, torch.optim.SparseAdam):
        why = (
            "takes sparse gradients, and a sharded optimizer dense ones. Use Adam, with"
            " sparse=False in the embedding"
        )
    elif closure is not None and closure.default is inspect.Parameter.empty:
        why = (
            "evaluates the loss by itself, several times in a step, and measures all parameters"
            f" together: it cannot be sharded. Use {name} itself"
        )
    elif any(base.__name__.startswith(KNOWN) for base in optimizer_class.__mro__):
        why = (
            "finds one step size for all parameters, and each rank would find one for its part: it"
            f" cannot be sharded. Use {name} itself"
        )
    elif has_two_modes(optimizer_class):
        why = (
            "has train() and eval(), which put other weights into the parameters, and here would"
            f" do so on this rank's part alone: it cannot be sharded. Use {name} itself"
        )
    if why:
        raise ValueError(f"{name} {why}")


def refusal(
    made: Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    dtype: torch.dtype | None = None,
) -> Exception | None:
    """What the optimizer itself raises when it is `made` of groups of parameters with their
    options; None if it takes them.

    It is made for parameters of one element, in as many dimensions as the real ones have: some
    optimizers make their state at once. They have this dtype; None: that of the real ones.
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
    optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device
) -> None:
    """Raise ValueError if a matrix and its pieces, each with an optimizer of its own, come to
    different numbers: norms over a tensor (LARS, LAMB) or over all of them, factored or
    matrix-valued state (Adafactor, Muon)."""
    if reason := _difference(optimizer_class, options, device, "pieces"):
        raise ValueError(
            f"{optimizer_class.__name__} cannot work on pieces of parameters ({reason}); use"
            " shard='parameter' or shard='bucket', which leave parameters whole, if it treats each"
            " parameter by itself"
        )


def require_parameterwise(
    optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device
) -> None:
    """Raise ValueError if parameters that have an optimizer each come to other numbers than under
    one together: the norm of all gradients, one step size for all."""
    if reason := _difference(optimizer_class, options, device, "parameters"):
        name = optimizer_class.__name__
        raise ValueError(
            f"{name} takes a step that depends on all parameters together ({reason}), and a rank"
            f" has a part of them: it cannot be sharded. Use {name} itself; to clip by the norm of"
            " all gradients there is max_grad_norm="
        )


def require_independent_parameters(
    optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device
) -> None:
    """Raise ValueError if parameters, updated in several calls of `step` instead of one, come to
    different numbers: the optimizer counts steps for all of them together."""
    if reason := _difference(optimizer_class, options, device, "calls"):
        raise ValueError(
            f"{optimizer_class.__name__} cannot update parameters at different times ({reason});"
            " use hook_with_zero_step, which updates all of them at once"
        )


def require_savable(
    optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device
) -> None:
    """Raise ValueError if what the optimizer remembers of a large parameter knows too few
    operations to be copied and put together: after hours there would be no checkpoint. What else is
    wrong with the optimizer, other trials say."""
    key = optimizer_class, repr(options), device, "saved"
    if key not in _tried:
        with _own_random_numbers(device):
            _tried[key] = uncopied(optimizer_class, options, device)
    if reason := _tried[key]:
        raise ValueError(
            f"{optimizer_class.__name__} {reason}: its shards could not be saved. Use"
            f" {optimizer_class.__name__} itself, or one whose state is plain tensors"
        )


def _difference(
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    device: torch.device,
    how: str,
) -> str:
    """How far parts, stepped apart, come from where they come together; "" if nowhere else. They
    are pieces of a parameter, or parameters, with an optimizer each; or parameters of one
    optimizer, in calls of their own."""
    key = optimizer_class, repr(sorted(options.items())), device, how
    if key not in _tried:
        try:
            _tried[key] = _tried_in(torch.float64, optimizer_class, options, device, how)
        except Exception:  # some know no float64
            try:
                _tried[key] = _tried_in(torch.float32, optimizer_class, options, device, how)
            except Exception as error:
                _tried[key] = f"tried on a small one, it raised {type(error).__name__}: {error}"
    return _tried[key]


def _tried_in(
    dtype: torch.dtype,
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    device: torch.device,
    how: str,
) -> str:
    trial = _Trial(optimizer_class, options, device, dtype, in_pieces=how == "pieces")
    bound = 1e-6 if dtype == torch.float64 else 1e-3
    for downhill in (True, False):
        expected = trial.run(trial.together, downhill)
        if all(float(moved.abs().max()) == 0 for moved in expected) and options.get("lr") == 0:
            trial.options["lr"] = 1e-3  # to be set later
            expected = trial.run(trial.together, downhill)
        got = trial.run(trial.in_calls if how == "calls" else trial.apart, downhill)
        for way, other in zip(expected, got, strict=True):
            off, length = float((way - other).norm()), float(way.norm())
            if not way.isfinite().all() or off <= bound * length:
                continue
            if how == "parameters" and not _same(
                expected, trial.run(trial.together, downhill, seed=1)
            ):
                return ""  # it draws random numbers, other ones for other parts
            return (
                f"tried on small ones, one was off by {off / length if length else off:.1e} of the"
                " way that it goes"
            )
    return ""


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether all are equal."""
    return all(map(torch.equal, some, others))


class _Trial:
    """Three parts of different scales: rows of a matrix, or matrices."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        *,
        in_pieces: bool,
    ) -> None:
        self.optimizer_class, self.options, self.device, self.in_pieces = (
            optimizer_class,
            dict(options),
            device,
            in_pieces,
        )
        generator = torch.Generator().manual_seed(0)
        shape = (1, COLUMNS) if in_pieces else (ROWS, COLUMNS)
        size = len(SCALES), 2 + STEPS, *shape
        drawn = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
        self.starts = [
            (scale * x[0]).to(device, dtype) for scale, x in zip(SCALES, drawn, strict=True)
        ]
        #: So far away that none of them arrives.
        self.targets = [
            (scale * (x[0] + 100 * x[1])).to(device, dtype)
            for scale, x in zip(SCALES, drawn, strict=True)
        ]
        self.noise = [
            (scale * x[2:]).to(device, dtype) for scale, x in zip(SCALES[::-1], drawn, strict=True)
        ]

    def run(
        self, optimizers: Callable[[list[torch.nn.Parameter]], Any], downhill: bool, seed: int = 0
    ) -> list[Tensor]:
        """How far each part has moved, flat."""
        whole = torch.nn.Parameter(torch.cat(self.starts)) if self.in_pieces else None
        together = optimizers == self.together and whole is not None
        parts = [whole] if together else [torch.nn.Parameter(x.clone()) for x in self.starts]
        with torch.no_grad(), _own_random_numbers(self.device, seed):
            step = optimizers(parts)  # type: ignore[arg-type]
            for i in range(STEPS):
                now = parts[0].split(1) if together else parts  # type: ignore[union-attr]
                gradients = [
                    1e-2 * (p - t) if downhill else noise[i]
                    for p, t, noise in zip(now, self.targets, self.noise, strict=True)
                ]
                step([torch.cat(gradients)] if together else gradients)
        ends = parts[0].detach().split(1) if together else [p.detach() for p in parts]  # type: ignore[union-attr]
        return [(end - start).reshape(-1) for end, start in zip(ends, self.starts, strict=True)]

    def together(self, parts: list[torch.nn.Parameter]) -> Callable[[list[Tensor]], None]:
        """One optimizer, one call."""
        return self._stepping([(self._made(parts), parts)])

    def apart(self, parts: list[torch.nn.Parameter]) -> Callable[[list[Tensor]], None]:
        """An optimizer for each."""
        return self._stepping([(self._made([p]), [p]) for p in parts])

    def in_calls(self, parts: list[torch.nn.Parameter]) -> Callable[[list[Tensor]], None]:
        """One optimizer, a call for each."""
        optimizer = self._made(parts)
        return self._stepping([(optimizer, [p]) for p in parts])

    def _made(self, parts: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return self.optimizer_class(parts, **self.options)

    @staticmethod
    def _stepping(
        calls: list[tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]],
    ) -> Callable[[list[Tensor]], None]:
        def step(gradients: list[Tensor]) -> None:
            given = iter(gradients)
            for optimizer, parts in calls:
                for p in parts:
                    p.grad = next(given).clone()
                optimizer.step()
                for p in parts:
                    p.grad = None

        return step


@contextmanager
def _own_random_numbers(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Leave the program's random numbers alone, within."""
    others = {} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**(others or {"devices": []})):
        torch.manual_seed(seed)
        yield
