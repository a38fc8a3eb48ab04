"""`gradwire.advise`: measure what methods cost on this device, and say which one helps."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradwire.core.advise.advice import PLAIN, Advice, default_methods, weigh
from gradwire.core.advise.compare.comparison import Comparison
from gradwire.core.advise.cost import Cost
from gradwire.core.advise.losses import Losses, limits_of
from gradwire.core.advise.probe import Probe
from gradwire.core.advise.timeline import Compute
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.local_sgd.fragments import fragments_of
from gradwire.core.ops import Spec
from gradwire.core.plan.advice import CompressionWarning
from gradwire.core.plan.parameters import specs_of
from gradwire.core.text.options import Positive, checked


@checked
def advise(
    model: Any,
    probe: Probe | str | Path,
    step: Positive | Compute | Callable[[], Any],
    *,
    algorithms: Sequence[Any] | None = None,
    loss: float | str | None = None,
    costs: Sequence[tuple[Any, Cost]] | None = None,
    comparison: Comparison | str | Path | None = None,
) -> Advice:
    """Whether compression helps here, and which.

        advice = gradwire.advise(model, "probe.json", step=0.18)
        print(advice)

    Each method runs on this device for about a second, on gradients of the model's shapes, with
    messages that come back at once, on as many threads as the replicas of the probe have. What
    messages take is the probe's. A step is predicted from both, and from how much of it messages
    can overlap with.

    Args:
        model: whatever `gradwire.plan` takes, or a tree of JAX.
        probe: of `gradwire.torch_backend.probe`, `gradwire.jax_backend.probe` or `gradwire probe`;
            or the file.
        step: seconds of a step of one replica alone, forward, backward and optimizer, on this
            device; or a function that does one.
        algorithms: what to compare with uncompressed averages. None: those of the `comparison`, or
            `gradwire.core.advise.advice.default_methods()`.
        loss: by how much a method's held-out loss may be higher than that of uncompressed averages,
            in parts of it: "1%", or 0.01. What counts is the bound below which it is with 90 %
            confidence: by the `comparison`; without one by kind, of methods that only round, or on
            one small model (docs/frontier.md), which the advice names. None: one method for each of
            0.5, 2 and 5 %.
        costs: as measured before, by `method_costs`. None: they are measured now.
        comparison: what `gradwire.compare` has found on this model with as many replicas, or its
            file.

    Raises:
        TypeError: `model` has no parameters.
        ValueError: an argument that cannot be used, named; a `step` that builds a model; a
            comparison of another model or number of replicas; or what an algorithm refuses.
        OSError: there is no such file.
    """
    known = probe if isinstance(probe, Probe) else Probe.load(probe)
    specs = model_specs(model, known.framework)
    if not specs:
        raise TypeError("model has no parameters, so nothing is sent")
    try:
        limits, losses = limits_of(loss), None
    except ValueError as error:
        raise ValueError(f"loss={error}") from error
    if comparison is not None:
        found, losses = compared_losses(comparison, specs, known, algorithms or ())
        algorithms = found if algorithms is None else algorithms
    if costs is None:
        costs = method_costs(specs, known, algorithms)
    return weigh(costs, specs, known, step_compute(step, known), limits, losses)


def compared_losses(
    comparison: Comparison | str | Path,
    specs: Mapping[str, Spec],
    probe: Probe,
    own: Sequence[Any] = (),
) -> tuple[Sequence[Any], Losses]:
    """The methods of a comparison, and what it says of them. `own`: methods of one's own, of which
    a file has the names alone. Raises as `advise`."""
    found = comparison if isinstance(comparison, Comparison) else Comparison.load(comparison, own)
    where = "comparison" if isinstance(comparison, Comparison) else f"comparison {comparison}"
    try:
        return found.algorithms, found.losses(specs, probe.replicas)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def method_costs(
    specs: Mapping[str, Spec],
    probe: Probe,
    algorithms: Sequence[Any] | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> list[tuple[Any, Cost]]:
    """What uncompressed averages and these algorithms cost on this device, for gradients of these
    shapes. `progress` goes through them, and shows how far it has come."""
    each = probe.replicas // probe.nodes
    chosen = [
        a for a in default_methods(each if probe.nodes > 1 else 1) if _has_layers_for(a, specs)
    ]
    if algorithms is not None:
        chosen = [PLAIN, *(a for a in algorithms if a != PLAIN)]
    chosen = [a.on_nodes_of(each) if hasattr(a, "on_nodes_of") else a for a in chosen]
    measure = _backend(probe.framework, "advise.method_cost").method_cost
    with warnings.catch_warnings(), _threads_of(probe):
        warnings.simplefilter("ignore", CompressionWarning)
        return [
            (algorithm, measure(algorithm, specs, probe.replicas)) for algorithm in progress(chosen)
        ]


@contextmanager
def _threads_of(probe: Probe) -> Iterator[None]:
    """The number of torch's threads that a replica of the probe has: `torchrun` leaves it one."""
    if not probe.threads:
        yield
        return
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(probe.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _has_layers_for(algorithm: Any, specs: Mapping[str, Spec]) -> bool:
    """Whether a small model has layers for the fragments of a method that nobody has asked for."""
    if not isinstance(algorithm, LocalSGD):
        return True
    try:
        return bool(fragments_of(specs, algorithm.fragments, algorithm.layout))
    except ValueError:
        return False


def step_compute(step: float | Compute | Callable[[], Any], probe: Probe) -> Compute:
    """A step of one replica alone, measured if it is a function."""
    if callable(step):
        with _threads_of(probe):
            measured: Compute = _backend(probe.framework, "advise.step_time").step_compute(step)
        return measured
    return step if isinstance(step, Compute) else Compute(float(step))


def model_specs(model: Any, framework: str) -> dict[str, Spec]:
    """Shape and dtype by name."""
    if framework == "jax" and not isinstance(model, Mapping):
        found: dict[str, Spec] = _backend("jax", "advise.model_shapes").specs_of_parameters(model)
        return found
    return specs_of(model, what="model")


def _backend(framework: str, module: str) -> Any:
    return importlib.import_module(f"gradwire.{framework}_backend.{module}")
