"""`gradwire.compare`: train a user's own model under several methods, on this device, and say how their losses differ."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gradwire.core.advise.advice import PLAIN, name_of
from gradwire.core.advise.compare.comparison import Comparison
from gradwire.core.advise.compare.runs import Runs
from gradwire.core.advise.compare.schedule import evaluated_at
from gradwire.core.algorithm import require_algorithm
from gradwire.core.local_sgd.algorithm import LocalSGD

#: (name of the method, seed, steps done) → None.
Progress = Callable[[str, int, int], object]


def compare(
    make: Callable[..., Any],
    algorithms: Sequence[Any],
    *,
    replicas: int = 4,
    steps: int = 300,
    seeds: int = 3,
    output: str | Path | None = None,
    training: str | None = None,
    progress: Progress = lambda method, seed, step: None,
) -> Comparison:
    """Train under plain averages and under each method, with the same weights, shards and seeds, and compare held-out losses.

        comparison = gradwire.compare(make, [gradwire.PowerSGD(rank=4), gradwire.diloco(30)], steps=300)
        print(comparison)

    R replicas run on one device, one after the other, by the engine that would run them on R. So a run takes the time of R replicas, and says nothing of time.

    Args:
        make: builds the training; it is called anew for each run. In torch it returns a `gradwire.torch_backend.Training`. In JAX it has an argument `wrap`, to be
            called on the optimizer, and returns a `gradwire.jax_backend.Training`. If it has an argument `seed`, it is given that.
        algorithms: what to compare with plain averages.
        replicas: how many train.
        steps: of each run. A learning-rate schedule is followed so far, and not compressed in time.
        seeds: 0 to this number, less one. One seed gives no intervals.
        output: a JSON to which each run is added when it has ended, and from which a comparison that was stopped goes on. None: nothing is kept.
        training: what it is called. None: as `make` is.
        progress: called after each step.

    Raises:
        TypeError: an argument is something else, or `make` returns it, by name.
        ValueError: what a method or the training refuses; seeds that change nothing; a file of another comparison.
    """
    for name, value in (("replicas", replicas), ("steps", steps), ("seeds", seeds)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be an int")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not callable(make):
        raise TypeError(f"make is a {type(make).__name__}; give a function that builds the training")
    others = list({name_of(each): each for each in algorithms if each != PLAIN}.values())
    looks = {name_of(each): _looks(each, replicas, steps) for each in others}
    looks = {name_of(PLAIN): sorted({*evaluated_at(PLAIN, replicas, steps)}.union(*looks.values())), **looks}
    runs = Runs(training or _called(make), replicas, steps)
    if output is not None:
        runs = runs.continued(output)
    for seed in range(seeds):
        for algorithm in (PLAIN, *others):
            name = name_of(algorithm)
            if runs.has(name, seed, looks[name]):
                continue
            run = _engine(make, seed)(
                algorithm, replicas, steps, seed, looks[name], _counted(partial(progress, name, seed))
            )
            runs.add(run)
            _require_seeds_to_matter(runs, seed)
            if output is not None:
                runs.save(output)
    return Comparison(runs, others)


def _looks(algorithm: Any, replicas: int, steps: int) -> list[int]:
    if not isinstance(algorithm, LocalSGD):
        require_algorithm(algorithm, "algorithms")
    if getattr(algorithm, "mentions_nodes", False):
        raise ValueError(
            f"{name_of(algorithm)} says 'node', and here are no nodes; give the number of replicas on each"
        )
    try:
        return evaluated_at(algorithm, replicas, steps)
    except ValueError as error:
        raise ValueError(f"{name_of(algorithm)}: {error}") from error


def _engine(make: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """What runs a training that is made so."""
    known = inspect.signature(make).parameters
    build = partial(make, seed=seed) if "seed" in known else make
    module = "jax_backend.advise.compare" if "wrap" in known else "torch_backend.advise.compare.run"
    run: Callable[..., Any] = importlib.import_module(f"gradwire.{module}").run
    return partial(run, build)


def _counted(told: Callable[[int], object]) -> Callable[[], None]:
    done = 0

    def on_step() -> None:
        nonlocal done
        done += 1
        told(done)

    return on_step


def _require_seeds_to_matter(runs: Runs, seed: int) -> None:
    """Raise ValueError if two seeds give the same losses: then they are one."""
    plain = name_of(PLAIN)
    if seed and (plain, 0) in runs.done and (plain, seed) in runs.done:
        first, this = runs.done[plain, 0], runs.done[plain, seed]
        if list(first.losses) == list(this.losses):
            raise ValueError(
                f"seeds 0 and {seed} give the same losses: make() seeds its generators itself. Give it an argument `seed` to use, or seeds=1"
            )


def _called(make: Callable[..., Any]) -> str:
    return f"{getattr(make, '__module__', '')}:{getattr(make, '__qualname__', type(make).__name__)}"
