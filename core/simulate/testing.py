"""Whether an algorithm keeps the promises that every driver relies on: one call, on a laptop, in
NumPy.

    >>> from gradwire import PowerSGD
    >>> from gradwire.testing import check
    >>> print("\\n".join(check(PowerSGD(rank=2))))
    donation: nothing is used after it was given away
    agreement: all replicas receive the same bits
    plan: a step sends what the plan says
    non-finite step: an inf or a NaN on one replica reaches all, and leaves no trace
    conservation: what is not sent now is remembered
    warm-up: uncompressed averages before `start_step`
    half precision: float16 in, float16 out
    resumed state: a run goes on as if it had not been interrupted

An algorithm that passes runs on every backend. What a check needs from the algorithm it finds by
itself: an algorithm without memory has nothing to resume. A method whose average is not the mean of
what the replicas sent, as a vote is, says so by `biased = True`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any

import numpy as np

from gradwire.core.algorithm import Algorithm, State, require_algorithm
from gradwire.core.algorithms.compressor import ERROR, Compressor
from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.plan.plan import plan
from gradwire.core.protocol.programs import ReplicaMismatch
from gradwire.core.simulate.lock_step import NDArray
from gradwire.core.simulate.poison import PoisonOps
from gradwire.core.simulate.simulator import Simulator
from gradwire.core.state.checkpoint import fit, head
from gradwire.core.text.options import AtLeast0, Replicas, checked

#: Matrices and a stack that any method compresses, a tiny one, a vector, a scalar and an empty
#: tensor.
SHAPES = {
    "weight": (24, 16),
    "tiny": (1, 3),
    "conv": (12, 4, 3, 3),
    "stack": (3, 8, 10),
    "bias": (24,),
    "scale": (),
    "none": (0, 4),
}
STEPS = 6


class ConformanceError(AssertionError):
    """An algorithm breaks a promise: which, of what configuration, with how many replicas, and
    where."""


@checked
def check(
    algorithm: Annotated[Algorithm, require_algorithm],
    shapes: Mapping[str, tuple[AtLeast0, ...]] = SHAPES,
    *,
    world_sizes: Sequence[Replicas] = (1, 2, 3),
    seed: AtLeast0 = 0,
) -> list[str]:
    """Run an algorithm on random gradients with several numbers of replicas, and compare it with
    what every algorithm promises.

    Examples:
        >>> from gradwire import TopK
        >>> from gradwire.testing import check
        >>> print(check(TopK(2, per=16), {"w": (8, 8)}, world_sizes=(2,))[0])
        donation: nothing is used after it was given away

    Args:
        algorithm: any. (A sharded optimizer, `Zero`, returns no averages; check the algorithm
            inside it.)
        shapes: parameter name → shape. Some tensor must be large enough to be compressed.
        world_sizes: numbers of replicas; of `TwoLevel`, of nodes.
        seed: of the gradients.

    Returns:
        What was checked, a line each.

    Raises:
        ConformanceError: the first promise that is broken.
        TypeError: `algorithm` is none.
        ValueError: shapes of which a `Compressor` compresses none; no numbers of replicas.
    """
    numbers = _numbers_of_replicas(algorithm, world_sizes)
    compresses = bool(
        algorithm.init(NumpyOps(), Simulator(algorithm, shapes, numbers[0]).specs).tensors
    )
    if isinstance(algorithm, Compressor) and not compresses:
        raise ValueError(
            f"{algorithm!r} compresses none of the shapes {dict(shapes)}; give larger ones"
        )
    done: dict[str, None] = {}
    for replicas in numbers:
        trial = _Trial(algorithm, dict(shapes), replicas)
        for number, (line, promise) in enumerate(PROMISES.items()):
            if promise(trial, np.random.default_rng([seed, number, replicas])):
                done[line] = None
    return list(done)


@dataclass
class _Trial:
    """An algorithm on some replicas."""

    algorithm: Algorithm
    shapes: dict[str, tuple[int, ...]]
    replicas: int

    @property
    def start(self) -> int:
        return self.algorithm.start_step

    @property
    def steps(self) -> range:
        return range(self.start + STEPS * self.algorithm.cycle)

    def simulator(self, ops: NumpyOps | None = None, dtype: str = "float64") -> Simulator:
        return Simulator(self.algorithm, self.shapes, self.replicas, dtype=dtype, ops=ops)

    def gradients(self, rng: np.random.Generator) -> list[dict[str, NDArray]]:
        return [
            {name: rng.normal(size=s) for name, s in self.shapes.items()}
            for _ in range(self.replicas)
        ]

    def step(
        self, simulator: Simulator, gradients: Sequence[Mapping[str, NDArray]]
    ) -> dict[str, NDArray]:
        try:
            return simulator.step(gradients)
        except ReplicaMismatch as error:
            raise self.broken("agreement", str(error)) from error

    def broken(self, promise: str, what: str) -> ConformanceError:
        return ConformanceError(
            f"{self.algorithm!r} with {self.replicas} replicas breaks its promise of {promise}:"
            f" {what}"
        )

    def require_equal(self, promise: str, what: str, found: Any, right: Any) -> None:
        if not np.array_equal(found, right, equal_nan=True):
            worst = np.nanmax(
                np.abs(np.asarray(found, np.float64) - np.asarray(right, np.float64)), initial=0
            )
            raise self.broken(promise, f"{what} differs, by up to {worst:.3g}")


Promise = Callable[[_Trial, np.random.Generator], bool]


def _donation(trial: _Trial, rng: np.random.Generator) -> bool:
    """Kernels that overwrite what they may, and kernels that return something new and poison it,
    come to the same."""
    usual, poisoned = trial.simulator(), trial.simulator(PoisonOps())
    for step in trial.steps:
        gradients = trial.gradients(rng)
        others, averages = trial.step(poisoned, gradients), trial.step(usual, gradients)
        for name in trial.shapes:
            what = (
                f"is something used after `out=`? With poisoned donations, step {step}'s average of"
                f" {name!r}"
            )
            trial.require_equal("donation", what, others[name], averages[name])
        when = "is something used after `out=`? With poisoned donations, the"
        _same_states(trial, "donation", when, poisoned.states, usual.states)
    return True


def _agreement(trial: _Trial, rng: np.random.Generator) -> bool:
    """The simulator compares all replicas: here also where one of them has nothing to say, and
    where gradients are huge."""
    simulator = trial.simulator()
    for step in trial.steps:
        gradients = trial.gradients(rng)
        gradients[0] = {name: x * (0.0, 1e4)[step % 2] for name, x in gradients[0].items()}
        averages = trial.step(simulator, gradients)
        for name, x in averages.items():
            if x.shape != trial.shapes[name] or not np.isfinite(x).all():
                raise trial.broken(
                    "agreement", f"step {step}: the average of {name!r} is {x}, of finite gradients"
                )
    return True


def _plan(trial: _Trial, rng: np.random.Generator) -> bool:
    """Bytes and messages, once started, step by step over the cycle."""
    planned = plan(trial.shapes, trial.algorithm, dtype="float64", world_size=trial.replicas)
    simulator = trial.simulator()
    for step in trial.steps:
        trial.step(simulator, trial.gradients(rng))
        expected = planned.steps[(step - trial.start) % len(planned.steps)]
        sent = simulator.traffic
        spare = expected.optional_bytes
        if step >= trial.start and not expected.nbytes - spare <= sent.nbytes <= expected.nbytes:
            raise trial.broken(
                "the plan", f"step {step} sends {sent.nbytes} bytes and not {expected.nbytes}"
            )
        if step >= trial.start and not spare and sent.collectives != expected.collectives:
            raise trial.broken(
                "the plan",
                f"step {step} takes {sent.collectives} messages and not {expected.collectives}",
            )
    return True


def _non_finite(trial: _Trial, rng: np.random.Generator) -> bool:
    """Nobody gets a finite average of a gradient that is none, and the step might as well not have
    been."""
    simulator = trial.simulator()
    for _ in trial.steps:
        trial.step(simulator, trial.gradients(rng))
    names = dict.fromkeys(name for state in simulator.states for name in state.tensors)
    # One after the other in the same run: what is checked is that each leaves the run as it was.
    for bad, name in itertools.product((math.inf, -math.inf, math.nan), names):
        before = [state.map(np.array) for state in simulator.states]
        gradients = trial.gradients(rng)
        gradients[-1][name].reshape(-1)[-1] = bad
        averages = trial.step(simulator, gradients)
        if np.isfinite(averages[name]).all():
            raise trial.broken(
                "a non-finite step",
                f"{bad} in {name!r} on one replica comes out finite: it was swallowed",
            )
        _same_states(
            trial, "a non-finite step", f"after {bad} in {name!r}, the", simulator.states, before
        )
    for name in names:
        _overflow(trial, name, rng)
    return bool(names)


def _overflow(trial: _Trial, name: str, rng: np.random.Generator) -> None:
    """A step whose average overflows is such a step, though all gradients are finite."""
    simulator = trial.simulator(dtype="float32")
    simulator.steps = trial.start
    trial.step(simulator, trial.gradients(rng))
    before, gradients = [state.map(np.array) for state in simulator.states], trial.gradients(rng)
    for g in gradients:
        g[name].reshape(-1)[-1] = 0.98 * np.finfo(np.float32).max
    with np.errstate(over="ignore", invalid="ignore"):
        averages = trial.step(simulator, gradients)
    if not np.isfinite(averages[name]).all():
        when = f"after an average of {name!r} that overflowed, the"
        _same_states(trial, "a non-finite step", when, simulator.states, before)


def _conservation(trial: _Trial, rng: np.random.Generator) -> bool:
    """The sum of all averages, the mean of what is still remembered, and what an error with a decay
    has lost in each step, is the sum of the mean gradients."""
    options: Any = trial.algorithm
    decays = isinstance(options, Compressor) and 0 < options.error_feedback < 1
    if getattr(replace(options, error_feedback=True) if decays else options, "biased", False):
        return False
    faded = 1 / options.error_feedback - 1 if decays else 0.0
    simulator = trial.simulator()
    received = {name: np.zeros(s) for name, s in trial.shapes.items()}
    given = {name: np.zeros(s) for name, s in trial.shapes.items()}
    for _ in trial.steps:
        gradients = trial.gradients(rng)
        averages = trial.step(simulator, gradients)
        for name in trial.shapes:
            received[name] += averages[name] + faded * _mean_error(simulator, name)
            given[name] += np.mean([g[name] for g in gradients], axis=0)
    for name, total in given.items():
        errors = [
            s.tensors[name][ERROR] for s in simulator.states if ERROR in s.tensors.get(name, {})
        ]
        lost = np.abs(received[name] + _mean_error(simulator, name) - total).max(initial=0)
        rounding = max([1e-12, *map(_epsilon, errors)]) * 10 * len(trial.steps)
        if lost > rounding * max(1.0, np.abs(total).max(initial=0)):
            raise trial.broken(
                "conservation",
                f"of {name!r}, {lost:.3g} is neither averaged nor remembered: `received` must be"
                " the mean of the replicas' `sent`. A method that is not so says biased = True",
            )
    return True


def _epsilon(x: NDArray) -> float:
    # which NumPy does not know
    return 2.0**-7 if x.dtype.name == "bfloat16" else float(np.finfo(x.dtype).eps)


def _mean_error(simulator: Simulator, name: str) -> NDArray:
    """The mean of what all replicas remember of a parameter."""
    errors: list[Any] = [s.tensors.get(name, {}).get(ERROR, 0.0) for s in simulator.states]
    return np.asarray(np.mean(errors, axis=0))


def _numbers_of_replicas(algorithm: Algorithm, world_sizes: Sequence[int]) -> list[int]:
    """So many replicas; of an algorithm with two levels so many nodes, or those that it names.
    Raises ValueError for no number."""
    if not world_sizes:
        raise ValueError("world_sizes is empty, and nothing would be checked; give (1, 2, 3)")
    levels = levels_of(algorithm)
    within = 1 if levels is None else levels.within
    if isinstance(within, tuple):
        return [sum(map(len, within))]
    return [n * within for n in world_sizes] if isinstance(within, int) else list(world_sizes)


def _dense_start(trial: _Trial, rng: np.random.Generator) -> bool:
    """Check uncompressed averages before `start_step`, where there is one, and no memory."""
    options: Any = trial.algorithm
    if "start_step" not in {
        option.name for option in (fields(options) if is_dataclass(options) else ())
    }:
        return False
    delayed = _Trial(replace(options, start_step=2), trial.shapes, trial.replicas)
    simulator = delayed.simulator()
    before = [state.map(np.array) for state in simulator.states]
    for step in range(2):
        gradients = delayed.gradients(rng)
        averages = delayed.step(simulator, gradients)
        for name in delayed.shapes:
            mean = np.mean([g[name] for g in gradients], axis=0)
            if not np.allclose(averages[name], mean, rtol=1e-12, atol=1e-12):
                raise delayed.broken(
                    "a warm-up", f"step {step}: {name!r} is not the uncompressed average"
                )
        _same_states(delayed, "a warm-up", f"in step {step}, the", simulator.states, before)
    delayed.step(simulator, delayed.gradients(rng))
    return True


def _half_precision(trial: _Trial, rng: np.random.Generator) -> bool:
    """Gradients of 16 bits stay so, and finite."""
    simulator = trial.simulator(dtype="float16")
    for step in trial.steps:
        gradients = [
            {name: x.astype(np.float16) for name, x in g.items()} for g in trial.gradients(rng)
        ]
        for name, x in trial.step(simulator, gradients).items():
            if x.dtype != np.float16 or not np.isfinite(x).all():
                raise trial.broken(
                    "half precision", f"step {step}: {name!r} comes out as {x.dtype}, {x}"
                )
    return True


def _resumed(trial: _Trial, rng: np.random.Generator) -> bool:
    """A new run that is given the state of another goes on to the same bits."""
    first, second = trial.simulator(), trial.simulator()
    for _ in trial.steps:
        trial.step(first, trial.gradients(rng))
    for replica, state in enumerate(first.states):
        saved = head("compressor", repr(trial.algorithm), first.steps)
        saved |= {"shared": state.shared, "tensors": state.tensors}
        loaded, difference = fit(saved, repr(trial.algorithm), second.states[replica])
        if difference:
            raise trial.broken(
                "a resumed state",
                f"`init` makes another memory than the steps leave behind: {difference}",
            )
        second.states[replica] = loaded.map(np.array)
    second.steps = first.steps
    for _ in trial.steps:
        gradients = trial.gradients(rng)
        averages, others = trial.step(first, gradients), trial.step(second, gradients)
        for name in trial.shapes:
            trial.require_equal(
                "a resumed state",
                f"the average of {name!r} after resuming",
                others[name],
                averages[name],
            )
    return bool(first.states[0].tensors or first.states[0].shared)


PROMISES: dict[str, Promise] = {
    "donation: nothing is used after it was given away": _donation,
    "agreement: all replicas receive the same bits": _agreement,
    "plan: a step sends what the plan says": _plan,
    "non-finite step: an inf or a NaN on one replica reaches all, and leaves no trace": _non_finite,
    "conservation: what is not sent now is remembered": _conservation,
    "warm-up: uncompressed averages before `start_step`": _dense_start,
    "half precision: float16 in, float16 out": _half_precision,
    "resumed state: a run goes on as if it had not been interrupted": _resumed,
}


def _same_states(
    trial: _Trial,
    promise: str,
    when: str,
    found: Sequence[State[NDArray]],
    right: Sequence[State[NDArray]],
) -> None:
    for mine, theirs in zip(found, right, strict=True):
        for key, x in theirs.shared.items():
            trial.require_equal(promise, f"{when} shared state {key!r}", mine.shared[key], x)
        for name, memory in theirs.tensors.items():
            for key, x in memory.items():
                trial.require_equal(
                    promise, f"{when} memory {key!r} of {name!r}", mine.tensors[name][key], x
                )
