"""Known answers of an algorithm: some steps on fixed gradients, what NumPy makes of each, and how
far rounding may lead away from it.

    for step in known_steps(PowerSGD(rank=4), known_specs(PowerSGD(rank=4), "float32"), replicas=2):
        averages, after = ...           # of what is to be checked, from step.gradients, step.before
        assert not step.wrong(averages, after)

Each step begins in the state of the reference, so that a difference is found in the step that makes
it, and none grows. How much a method may differ is measured, and not said by hand: the reference
runs again on gradients and errors that are a little changed, by some hundred times what rounding
does. A code that lies between two values, an element that is just among the largest, a factor that
is quantized come out differently there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.core.algorithm import Algorithm, State, innermost
from gradwire.core.algorithms.compressor import Compressor
from gradwire.core.kernels.numpy import NumpyOps, dtype_named
from gradwire.core.ops import Spec
from gradwire.core.protocol.programs import Request
from gradwire.core.simulate.lock_step import NDArray, lock_step
from gradwire.core.text.name_patterns import UnmatchedPattern, matches, one_name

#: A matrix that compilers cut into tiles; one that fits no tile and no block, twice, since what is
#: alike may be computed as one; one of rows that are zero, large, small and all alike; a vector.
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (256, 512),
    "ragged.0": (67, 129),
    "ragged.1": (67, 129),
    "hostile": (40, 96),
    "vector": (515,),
}
#: Elements of a tensor that stands for one of the user's, at most.
LARGEST = 1 << 17
#: So many times as long and as wide are the matrices of a method that compresses none of `SHAPES`:
#: its rank is high.
ENLARGED = (1, 2, 4, 8)
#: How many times as large, or as small, rows are.
LOUD = 32.0
#: What the reference's gradients are changed by, and what is allowed beside what comes of that:
#: relative to a norm.
NOISE, ROUNDING = 2.0**-16, 1e-4
#: Allowed where something shorter than the gradients is sent: a factor of which one element is
#: rounded to the next code is off by so much.
CODED = 1e-2
#: The same in units of the last place of a short float.
SHORT_NOISE, SHORT_ROUNDING = 8, 8
#: Units in the last place of short floats. The reference computes in float32, of numbers that are
#: theirs.
SHORT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
#: Allowed of the norm of what comes in, where what comes out ought to be nothing.
OF_INPUT = 0.1
#: How many times as far as the changed reference.
MARGIN = 3.0
#: Elements that may be anywhere, as the last ones between two codes: so many, and one in so many.
STRAYS, STRAY = 2, 1 << 13
SEED = 20_261_126

Tensors = dict[str, NDArray]


def known_specs(
    algorithm: Algorithm, dtype: str, named: Mapping[str, Spec] | None = None
) -> dict[str, Spec]:
    """The parameters of the steps: `SHAPES`, larger where the algorithm compresses none of them;
    and for each pattern of names in its options the first of the `named` parameters that it
    matches, no larger than `LARGEST`. None: a matrix under a name that is made of the pattern.

    Raises:
        ValueError: the algorithm cannot serve them.
    """
    small = {name: Spec(shape, _wide(dtype)) for name, shape in SHAPES.items()}
    compresses = isinstance(innermost(algorithm), Compressor)
    for times in ENLARGED:
        specs = {
            name: Spec(tuple(n * times for n in spec.shape), spec.dtype)
            for name, spec in small.items()
        }
        state = _begun(algorithm, specs, named)
        if state.tensors or not compresses:
            break
    return {name: Spec(spec.shape, dtype) for name, spec in specs.items()}


def _begun(
    algorithm: Algorithm, specs: dict[str, Spec], named: Mapping[str, Spec] | None
) -> State[NDArray]:
    """The algorithm's memory of these parameters, to which those are added that its patterns ask
    for."""
    while True:
        try:
            return algorithm.init(NumpyOps(), specs)
        except UnmatchedPattern as unmatched:
            pattern, (first, *_) = unmatched.pattern, specs.values()
            others = {one_name(pattern): first} if named is None else named
            found = [name for name in others if matches(name, pattern) and name not in specs]
            if not found:
                raise
            specs[found[0]] = Spec(_at_most(others[found[0]].shape), first.dtype)


def _at_most(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of as many axes with no more elements than `LARGEST`."""
    shape = tuple(shape)
    while Spec(shape).size > LARGEST:
        longest = shape.index(max(shape))
        shape = (*shape[:longest], -(-shape[longest] // 2), *shape[longest + 1 :])
    return shape


@dataclass(frozen=True)
class KnownStep:
    """A step, from given gradients and a given state.

    Attributes:
        number: of the step, as the algorithm is told it.
        gradients, before: of each replica. Of short floats these are float32 arrays of numbers that
            are theirs; memory may lie between those.
        averages: by name; of all replicas.
        after: the state of each replica.
        changed: what comes of gradients that are a little changed, likewise.
        dtype: of the gradients.
        coded: messages hold integers, or floats that are shorter than the gradients.
        bad: a replica's gradient holds inf or NaN.
    """

    number: int
    gradients: Sequence[Tensors]
    before: Sequence[State[NDArray]]
    averages: Tensors
    after: Sequence[State[NDArray]]
    changed: tuple[Tensors, Sequence[State[NDArray]]]
    dtype: str
    coded: bool
    bad: bool

    def wrong(self, averages: Sequence[Mapping[str, Any]], after: Sequence[State[Any]]) -> str:
        """What is wrong with the averages and the memory that each replica has come to, in words;
        "" if nothing is. NumPy arrays, of short floats as float32."""
        both = enumerate(zip(averages, after, strict=True))
        return next(
            filter(None, (self.wrong_on(replica, mine, state) for replica, (mine, state) in both)),
            "",
        )

    def wrong_on(self, replica: int, averages: Mapping[str, Any], after: State[Any]) -> str:
        """The same of one replica."""
        for name, right in self.averages.items():
            if self.bad and np.isfinite(right).all():
                continue
            found = self._apart(replica, name, averages.get(name), right, self.changed[0][name])
            if found:
                return self._said(f"the average of {name!r}", name, replica, found)
        memory = self._wrong_memory(replica, after, self.after[replica], self.changed[1][replica])
        return next(filter(None, memory), "")

    def wrong_start(self, memory: State[Any]) -> str:
        """What is wrong with memory that was made anew, of the first step; "" if nothing is."""
        return next(
            filter(None, (self._wrong_memory(0, memory, self.before[0], self.before[0]))), ""
        )

    def _wrong_memory(
        self, replica: int, found: State[Any], right: State[NDArray], changed: State[NDArray]
    ) -> Iterator[str]:
        for name, memory in right.tensors.items():
            for key, x in memory.items():
                mine = found.tensors.get(name, {}).get(key)
                apart = self._apart(replica, name, mine, x, changed.tensors[name][key])
                yield apart and self._said(f"the memory {key!r} of {name!r}", name, replica, apart)
        for key, x in right.shared.items():
            if not np.array_equal(np.asarray(found.shared.get(key)), x):
                yield (
                    f"the shared state {key!r} in step {self.number} is {found.shared.get(key)} and"
                    f" not {x}"
                )

    def _said(self, what: str, name: str, replica: int, found: str) -> str:
        shape = list(self.gradients[0][name].shape)
        return (
            f"{what}, {self.dtype}{shape}, in step {self.number}, on replica {replica} of"
            f" {len(self.gradients)}, {found}"
        )

    def _apart(self, replica: int, name: str, mine: Any, right: NDArray, changed: NDArray) -> str:
        """How one array is not what it ought to be; "" if it is."""
        if mine is None or np.shape(mine) != right.shape:
            return f"has shape {None if mine is None else np.shape(mine)} and not {right.shape}"
        mine, expected = np.asarray(mine, np.float64), np.asarray(right, np.float64)
        finite = np.isfinite(mine)
        if not np.isfinite(expected).all():
            return (
                ""
                if not finite.all()
                else "is finite, where an inf or NaN came in: it was swallowed"
            )
        if not finite.all():
            return f"is not finite in {np.count_nonzero(~finite)} of {mine.size} elements"
        x = [np.asarray(self.gradients[replica][name], np.float64)]
        x += [
            np.asarray(e, np.float64)
            for e in self.before[replica].tensors.get(name, {}).values()
            if e.shape == x[0].shape
        ]
        x = [each[np.isfinite(each)] for each in x]
        difference = np.abs(mine - expected).reshape(-1)
        largest = 4 * max(
            [np.abs(expected).max(initial=0), *(np.abs(each).max(initial=0) for each in x)]
        )
        strays = min(STRAYS + difference.size // STRAY, difference.size // 64)
        rest = (
            np.partition(difference, difference.size - strays)[: difference.size - strays]
            if strays
            else difference
        )
        rounding = SHORT_ROUNDING * SHORT[self.dtype] if self.dtype in SHORT else ROUNDING
        rounding = max(rounding, CODED) if self.coded else rounding
        norm, of_input = np.linalg.norm(expected), sum(np.linalg.norm(each) for each in x)
        explained = MARGIN * np.linalg.norm(
            (np.asarray(changed, np.float64) - expected)[np.isfinite(changed)]
        )
        allowed = max(rounding * norm, OF_INPUT * rounding * of_input, explained)
        off = np.linalg.norm(rest)
        if off <= allowed and difference.max(initial=0) <= largest:
            return ""
        whole = norm or of_input or 1.0
        return (
            f"is {np.linalg.norm(difference) / whole:.2g} of its norm off, where rounding explains"
            f" {allowed / whole:.1g}"
        )


def known_steps(
    algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int
) -> Iterator[KnownStep]:
    """The steps of some replicas: a dense one if the algorithm begins with such, then each kind of
    step twice, so that there is an error to be fed back; then one with a NaN in the gradient of the
    last replica, and one with an inf.

    Args:
        algorithm: any that has an average.
        specs: from `known_specs`, all of one dtype.
        replicas: how many.

    Raises:
        ImportError: NumPy needs ml_dtypes for what is sent.
    """
    reference = _Reference(algorithm, specs, replicas)
    start = algorithm.start_step
    numbers = [*([0] if start else []), *range(start, start + 2 * algorithm.cycle)]
    yield from (reference.step(number) for number in numbers)
    yield from (reference.step(numbers[-1] + 1, bad) for bad in (np.nan, np.inf))


class _Reference:
    def __init__(self, algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int) -> None:
        self.algorithm, self.ops = algorithm, NumpyOps()
        self.dtype = next(iter(specs.values())).dtype
        self.specs = {name: Spec(spec.shape, _wide(self.dtype)) for name, spec in specs.items()}
        self.rng = np.random.default_rng(SEED)
        self.coded = False
        self.states = [algorithm.init(self.ops, self.specs) for _ in range(replicas)]

    def step(self, number: int, bad: float | None = None) -> KnownStep:
        gradients = [
            {name: self._gradient(name, spec) for name, spec in self.specs.items()}
            for _ in self.states
        ]
        if bad is not None:
            gradients[-1]["matrix"][-1, -1] = bad
        before = [state.map(np.array) for state in self.states]
        averages, after = self._run(gradients, before, number)
        changed = averages, after  # of a step that is not finite only that is looked at
        if bad is None:
            noisy = [{name: self._changed(x) for name, x in g.items()} for g in gradients]
            changed = self._run(noisy, self._changed_memory(before), number)
        self.states = [state.map(np.array) for state in after]
        return KnownStep(
            number,
            gradients,
            before,
            averages,
            after,
            changed,
            self.dtype,
            self.coded,
            bad is not None,
        )

    def _run(
        self, gradients: Sequence[Tensors], states: Sequence[State[NDArray]], number: int
    ) -> tuple[Tensors, list[State[NDArray]]]:
        programs = [
            self.algorithm.step(
                self.ops, {name: x.copy() for name, x in g.items()}, state.map(np.array), number
            )
            for g, state in zip(gradients, states, strict=True)
        ]
        requests: list[Request] = []
        results = lock_step(programs, self.ops, requests)
        sent = [x.dtype for request in requests for x in getattr(request, "arrays", ())]
        shortest = dtype_named(_wide(self.dtype)).itemsize
        self.coded = self.coded or any(
            dtype.kind in "iu" or dtype.itemsize < shortest for dtype in sent
        )
        return results[0][0], [state for _, state in results]

    def _gradient(self, name: str, spec: Spec) -> NDArray:
        x = self.rng.standard_normal(spec.shape)
        if name == "hostile":
            x[:4] = 0
            x[4:8] *= LOUD
            x[8:12] /= LOUD
            x[12:16] = np.sign(x[12:16])
        return _nearest(x, self.dtype)

    def _changed(self, x: NDArray) -> NDArray:
        if x.dtype.kind != "f":
            return x
        size = SHORT_NOISE * SHORT[self.dtype] if self.dtype in SHORT else NOISE
        return np.asarray(x * (1 + size * self.rng.standard_normal(x.shape)), x.dtype)

    def _changed_memory(self, states: Sequence[State[NDArray]]) -> list[State[NDArray]]:
        """What differs between replicas changed on each by itself, and what is equal alike."""
        own = self.algorithm.per_replica
        equal = {
            name: {key: self._changed(x) for key, x in memory.items() if key not in own}
            for name, memory in states[0].tensors.items()
        }
        return [
            State(
                state.shared,
                {
                    name: {
                        key: self._changed(x) if key in own else equal[name][key]
                        for key, x in memory.items()
                    }
                    for name, memory in state.tensors.items()
                },
            )
            for state in states
        ]


def _wide(dtype: str) -> str:
    """The dtype in which the reference computes."""
    return "float32" if dtype in SHORT else dtype


def _nearest(x: NDArray, dtype: str) -> NDArray:
    """The nearest numbers of a dtype, as floats of at least 32 bits."""
    if dtype == "bfloat16":  # without ml_dtypes
        bits = x.astype(np.float32).view(np.uint32)
        return (
            ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        )
    return x.astype(dtype_named(dtype)).astype(dtype_named(_wide(dtype)))
