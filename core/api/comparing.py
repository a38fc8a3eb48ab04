"""`gradwire.compare`: train a user's own model under several methods, on this device, and say how
their losses differ."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gradwire.core.advise.advice import PLAIN, name_of
from gradwire.core.advise.compare.comparison import Comparison
from gradwire.core.advise.compare.fingerprint import STEPS, Fingerprint, source_of_method
from gradwire.core.advise.compare.runs import Run, Runs
from gradwire.core.advise.compare.schedule import evaluated_at
from gradwire.core.algorithm import require_algorithm
from gradwire.core.local_sgd.algorithm import LocalSGD

#: Of the held-out windows, where learning rates are searched: for the search, and for the verdict.
PARTS = 2
#: (name of the method, seed, steps done) → None.
Progress = Callable[[str, int, int], object]


class Stopped(KeyboardInterrupt):
    """Ctrl-C in a comparison.

    Attributes:
        comparison: what had been trained.
    """

    def __init__(self, comparison: Comparison) -> None:
        super().__init__()
        self.comparison = comparison


def compare(
    make: Callable[..., Any],
    algorithms: Sequence[Any],
    *,
    replicas: int = 4,
    steps: int = 300,
    seeds: int = 3,
    rates: Sequence[float] = (1.0,),
    output: str | Path | None = None,
    training: str | None = None,
    progress: Progress = lambda method, seed, step: None,
) -> Comparison:
    """Train under uncompressed averages and under each method, with the same weights, shards and
    seeds, and compare held-out losses.

        methods = [gradwire.WireDtype(gradwire.PowerSGD(16), "int8"), gradwire.diloco(30)]
        comparison = gradwire.compare(make, methods, steps=300)
        print(comparison)

    R replicas run on one device, one after the other, by the engine that would run them on R. So a
    run takes the time of R replicas, and says nothing of time.

    Args:
        make: builds the training; it is called anew for each run. In torch it returns a
            `gradwire.torch_backend.Training`. In JAX it has an argument `wrap`, to be called on the
            optimizer, and returns a `gradwire.jax_backend.Training`. If it has an argument `seed`,
            it is given that.
        algorithms: what to compare with uncompressed averages.
        replicas: how many train.
        steps: of each run. A learning-rate schedule is followed so far, and not compressed in time.
        seeds: 0 to this number, less one. One seed gives no intervals.
        rates: factors on the training's learning rates. Of several, each method is given that with
            which its held-out loss is least, with seed 0, on every other held-out window; verdicts
            are about the other windows. Rates of DiLoCo's outer optimizer stay as they are.
        output: a JSON to which each run is added when it has ended, and from which a comparison
            that was stopped goes on, or one with a method more. The first steps of the training are
            taken anew to see whether it is still that of the file: runs that are taken from it are
            named, and those of another training are made anew. None: nothing is kept.
        training: what it is called. None: as `make` is.
        progress: called after each step.

    Raises:
        TypeError: an argument is something else, or `make` returns it, by name.
        ValueError: what a method or the training refuses; seeds that change nothing; a file of
            another comparison; fewer than four held-out windows, where rates are searched.
        FileNotFoundError: there is no folder for `output`, before anything is trained.
        Stopped: a `KeyboardInterrupt`, with the comparison so far.
    """
    for name, value in (("replicas", replicas), ("steps", steps), ("seeds", seeds)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be an int")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not callable(make):
        raise TypeError(
            f"make is a {type(make).__name__}; give a function that builds the training"
        )
    if output is not None and not Path(output).parent.is_dir():
        raise FileNotFoundError(f"output={str(output)!r}: there is no folder {Path(output).parent}")
    factors = _factors(rates)
    others = _by_name(each for each in algorithms if each != PLAIN)
    looks = {name_of(each): _looks(each, replicas, steps) for each in others}
    looks = {
        name_of(PLAIN): sorted({*evaluated_at(PLAIN, replicas, steps)}.union(*looks.values())),
        **looks,
    }
    runs = Runs(training or _called(make), replicas, steps, factors)
    runs.sources = {name_of(each): source_of_method(each) for each in others}
    comparison = Comparison(runs, others)

    def train(algorithm: Any, seed: int, factor: float) -> None:
        name = name_of(algorithm)
        shown = f"{name}, rate × {factor:g}" if len(factors) > 1 else name
        on_step = _counted(partial(progress, shown, seed))
        before = runs.done.get((name, seed, factor))  # at whose steps others of the file are judged
        at = sorted({*looks[name], *(before.held_out if before else ())})
        run = _engine(make, seed)(algorithm, replicas, steps, seed, at, on_step, factor)
        _require_windows(run, factors)
        runs.add(run)
        _require_seeds_to_matter(runs, seed, factor)
        if output is not None:
            runs.save(output)

    try:
        if output is not None:
            count = min(STEPS, steps)
            first = _engine(make, 0)(PLAIN, replicas, count, 0, [count], lambda: None, 1.0)
            runs.fingerprint = Fingerprint.of(make, first)
            runs = runs.continued(output, looks)
            comparison = Comparison(runs, others)
        for seed in range(seeds):
            for algorithm in (PLAIN, *others):
                if len(factors) > 1 and not looks[name_of(algorithm)]:
                    continue  # nothing could be said of any of them
                for factor in [comparison.factor(algorithm) or 1.0] if seed else factors:
                    if not runs.has(name_of(algorithm), seed, factor, looks[name_of(algorithm)]):
                        train(algorithm, seed, factor)
    except KeyboardInterrupt as stopped:
        raise Stopped(comparison) from stopped
    if output is not None:
        runs.save(output)  # with the factors that were asked for, also where all runs were there
    return comparison


def _by_name(algorithms: Iterable[Any]) -> list[Any]:
    """Each once. Raises ValueError for two that are not the same and have one name."""
    found: dict[str, Any] = {}
    for each in algorithms:
        other = found.setdefault(name_of(each), each)
        if source_of_method(other) != source_of_method(each):
            raise ValueError(
                f"algorithms: {name_of(each)} is the name of two methods that are written in"
                " different ways; rename one of the classes"
            )
    return list(found.values())


def _factors(rates: Sequence[float]) -> tuple[float, ...]:
    known = isinstance(rates, Sequence) and not isinstance(rates, str)
    if not known or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in rates):
        raise TypeError(f"rates={rates!r} must be numbers: (0.5, 1, 2)")
    if not rates or not all(0 < x < math.inf for x in rates):
        raise ValueError(
            f"rates={rates!r} must be factors on the learning rate, more than 0 and finite: (0.5,"
            " 1, 2)"
        )
    return tuple(sorted({float(x) for x in rates}))


def _require_windows(run: Run, factors: Sequence[float]) -> None:
    """Raise ValueError if a search would leave no two windows, of which an interval is made, for
    the verdict."""
    fewest = min(map(len, run.held_out.values()), default=2 * PARTS)
    if len(factors) > 1 and fewest < 2 * PARTS:
        raise ValueError(
            f"rates={list(factors)} are searched on half of the held-out windows, and evaluate"
            f" gives {fewest}; return {2 * PARTS} or more"
        )


def _looks(algorithm: Any, replicas: int, steps: int) -> list[int]:
    if not isinstance(algorithm, LocalSGD):
        require_algorithm(algorithm, "algorithms")
    if getattr(algorithm, "mentions_nodes", False):
        raise ValueError(
            f"{name_of(algorithm)} says 'node', and here are no nodes; give the number of replicas"
            " on each"
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


def _require_seeds_to_matter(runs: Runs, seed: int, factor: float) -> None:
    """Raise ValueError if two seeds give the same losses: then they are one."""
    plain = name_of(PLAIN)
    if seed and (plain, 0, factor) in runs.done and (plain, seed, factor) in runs.done:
        first, this = runs.done[plain, 0, factor], runs.done[plain, seed, factor]
        if list(first.losses) == list(this.losses):
            raise ValueError(
                f"seeds 0 and {seed} give the same losses: make() seeds its generators itself. Give"
                " it an argument `seed` to use, or seeds=1"
            )


def _called(make: Callable[..., Any]) -> str:
    return f"{getattr(make, '__module__', '')}:{getattr(make, '__qualname__', type(make).__name__)}"
