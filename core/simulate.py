"""N replicas in one process, in lock step, in NumPy: the reference driver, and how to test an algorithm on a laptop.

    sim = Simulator(PowerSGD(rank=2), {"w": (64, 32), "b": (64,)}, replicas=4)
    averages = sim.step([{"w": ..., "b": ...} for each replica])   # one dictionary: all replicas must agree, or it raises

In float64 it is the oracle of the parity tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradwire.core.algorithm import Algorithm, State, require_algorithm
from gradwire.core.collectives import (
    AllGather,
    Branch,
    Finite,
    Mean,
    Orthonormalize,
    OwnNorm,
    Program,
    ReduceScatter,
    Replica,
    Request,
    Total,
    Update,
    cannot_answer,
)
from gradwire.core.numpy_ops import NumpyOps, PoisonOps, name_of
from gradwire.core.ops import ITEMSIZE, Spec, name_of_dtype
from gradwire.core.wire import Traffic, counted

__all__ = ["NumpyOps", "PoisonOps", "ReplicaMismatch", "Simulator", "lock_step"]

T = TypeVar("T")
NDArray = npt.NDArray[Any]

#: A sharded optimizer on all replicas: (replica, gradients of its pieces) → what it makes of them. Where steps may be skipped, a third argument
#: says whether this one counts.
Optimizer = Callable[..., dict[str, NDArray]]


class ReplicaMismatch(RuntimeError):
    """Replicas asked for different things, or came to different results. On a real network this is a hang or silent divergence."""


class Simulator:
    """An algorithm on N replicas.

    Args:
        algorithm: what to run.
        shapes: parameter name → shape.
        replicas: world size, 1 or more.
        dtype: of gradients and memory, by name or as a framework has it.
        ops: kernels; `PoisonOps()` to find uses of donated arrays.
        optimizer: of an algorithm that has one (`Zero`): `optimizer(replica, gradients of its pieces)` returns new pieces; with
            `Zero(skip_non_finite=True)` it is `optimizer(replica, gradients of its pieces, ok)`.

    Attributes:
        states: the state of each replica.
        steps: steps taken.
        traffic: what each replica handed to the network in the last step.
        requests: the requests of the last step (of replica 0), in order.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        shapes: Mapping[str, tuple[int, ...]],
        replicas: int,
        *,
        dtype: Any = "float64",
        ops: NumpyOps | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        require_algorithm(algorithm)
        dtype = name_of_dtype(dtype)
        if replicas < 1:
            raise ValueError(f"replicas={replicas} must be at least 1")
        self.algorithm = algorithm
        self.specs = {name: Spec(tuple(shape), dtype) for name, shape in shapes.items()}
        self.ops = ops or NumpyOps()
        self.optimizer = optimizer
        self.states: list[State[NDArray]] = [algorithm.init(self.ops, self.specs) for _ in range(replicas)]
        self.steps = 0
        self.requests: list[Request] = []

    @property
    def traffic(self) -> Traffic:
        """Of the last step."""
        return counted(self.ops, self.requests)

    def step(self, gradients: Sequence[Mapping[str, npt.ArrayLike]]) -> dict[str, NDArray]:
        """Average one gradient per replica.

        Args:
            gradients: for each replica, parameter name → array. Not modified.

        Returns:
            Parameter name → averaged gradient, identical on all replicas.

        Raises:
            ValueError: gradients that do not fit the shapes.
            ReplicaMismatch: the replicas disagree about a request, a result, or a memory that must be equal.
        """
        if len(gradients) != len(self.states):
            raise ValueError(f"{len(gradients)} gradients for {len(self.states)} replicas")
        local = [self._copy(replica, g) for replica, g in enumerate(gradients)]
        names = list(local[0])
        for replica, g in enumerate(local):
            if g.keys() != local[0].keys():
                raise ReplicaMismatch(f"replica 0 has gradients for {names}, but replica {replica} for {list(g)}")
        states = [
            State(
                {k: v.copy() for k, v in state.shared.items()},
                {n: {k: v.copy() for k, v in m.items()} for n, m in state.of(local[0]).tensors.items()},
            )
            for state in self.states
        ]
        self.requests = []
        results = lock_step(
            [self.algorithm.step(self.ops, g, s, self.steps) for g, s in zip(local, states, strict=True)],
            self.ops,
            self.requests,
            self.optimizer,
        )
        averages = [r[0] for r in results]
        after = [r[1] for r in results]
        for name in names:
            require_equal(f"the averaged gradient of {name!r}", [a[name] for a in averages])
        for key in after[0].shared:
            require_equal(f"the shared state {key!r}", [s.shared[key] for s in after])
        for name, memory in after[0].tensors.items():
            for key in memory.keys() - self.algorithm.per_replica:
                require_equal(f"memory {key!r} of {name!r}", [s.tensors[name][key] for s in after])
        for state, new in zip(self.states, after, strict=True):
            state.shared = new.shared
            state.tensors |= new.tensors
        self.steps += 1
        return averages[0]

    def _copy(self, replica: int, gradients: Mapping[str, npt.ArrayLike]) -> dict[str, NDArray]:
        unknown = gradients.keys() - self.specs.keys()
        if unknown:
            raise ValueError(f"replica {replica} has gradients for unknown parameters {sorted(unknown)}")
        copies = {}
        # In the order of the model, whatever the order of the mapping: what is averaged together is decided by position.
        for name, spec in self.specs.items():
            if name not in gradients:
                continue
            copies[name] = np.array(gradients[name], dtype=spec.dtype)
            if copies[name].shape != spec.shape:
                raise ValueError(
                    f"replica {replica}: gradient of {name!r} has shape {copies[name].shape}, not {spec.shape}"
                )
        return copies


def lock_step(
    programs: Sequence[Program[T]],
    ops: NumpyOps | None = None,
    requests: list[Request] | None = None,
    optimizer: Optimizer | None = None,
) -> list[T]:
    """Drive one program per replica, answering each request for all of them at once.

    Args:
        programs: one coroutine per replica.
        ops: kernels, for the payload dtypes.
        requests: replica 0's requests are appended here.
        optimizer: see `Simulator`.

    Returns:
        What each program returned.

    Raises:
        ReplicaMismatch: naming the replicas that asked for something else than replica 0 did, and what.
    """
    # A gradient may hold inf or NaN, or be zero throughout: that is for the algorithm to handle.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return _LockStep(ops or NumpyOps(), [] if requests is None else requests, optimizer).run(programs)


class _LockStep:
    def __init__(self, ops: NumpyOps, requests: list[Request], optimizer: Optimizer | None) -> None:
        self.ops = ops
        self.optimizer = optimizer
        self.requests = requests
        self.finite = True

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        try:
            answers: list[Any] = [None] * len(programs)
            while True:
                asked, returned = self._advance(programs, answers)
                if returned:
                    return returned
                self.requests.append(asked[0])
                answers = self._answer(asked)
        finally:
            for program in programs:
                program.close()

    def _advance(self, programs: Sequence[Program[T]], answers: Sequence[Any]) -> tuple[list[Request], list[T]]:
        asked: dict[int, Request] = {}
        returned: dict[int, T] = {}
        for replica, (program, answer) in enumerate(zip(programs, answers, strict=True)):
            try:
                asked[replica] = program.send(answer)
            except StopIteration as stop:
                returned[replica] = stop.value
        if asked and returned:
            raise ReplicaMismatch(
                f"replicas {list(returned)} have ended while replicas {list(asked)} ask for {_describe(next(iter(asked.values())))}"
            )
        if asked:
            self._require_same_request(list(asked.values()))
        return list(asked.values()), list(returned.values())

    def _require_same_request(self, asked: Sequence[Request]) -> None:
        if len(asked) == 1:
            return
        kinds = [_kind(r) for r in asked]
        if kinds.count(kinds[0]) == len(kinds):  # the words take longer to find than most requests to answer
            return
        first = _describe(asked[0])
        different = {replica: _describe(r) for replica, r in enumerate(asked) if _describe(r) != first}
        if different:
            others = "; ".join(f"replica {replica} asks for {what}" for replica, what in different.items())
            raise ReplicaMismatch(f"replica 0 asks for {first}, but {others}")

    def _answer(self, asked: Sequence[Request]) -> list[Any]:
        first = asked[0]
        if isinstance(first, Mean):
            return self._mean([r for r in asked if isinstance(r, Mean)])
        if isinstance(first, Orthonormalize):
            return self._orthonormalize([r for r in asked if isinstance(r, Orthonormalize)])
        if isinstance(first, OwnNorm):
            return [(r.ops.norm_of_all(r.arrays),) for r in asked if isinstance(r, OwnNorm)]
        if isinstance(first, Finite):
            return [(np.asarray(self.finite),)] * len(asked)
        if isinstance(first, Branch):
            predicates = [bool(r.predicate) for r in asked if isinstance(r, Branch)]
            if len(set(predicates)) > 1:
                raise ReplicaMismatch(f"the replicas branch differently: {dict(enumerate(predicates))}")
            sides = [(r.then if predicates[0] else r.otherwise)(*r.operands) for r in asked if isinstance(r, Branch)]
            return [(result,) for result in self.run(sides)]
        if isinstance(first, Replica):
            return [(replica,) for replica in range(len(asked))]
        if isinstance(first, ReduceScatter):
            return self._reduce_scatter([r for r in asked if isinstance(r, ReduceScatter)])
        if isinstance(first, AllGather):
            everything = [
                np.concatenate([r.arrays[i] for r in asked if isinstance(r, AllGather)])
                for i in range(len(first.arrays))
            ]
            self._take(x for r in asked if isinstance(r, AllGather) for x in r.arrays)
            return [tuple(x.copy() for x in everything) for _ in asked]
        if isinstance(first, Total):
            total = np.asarray(sum(r.array for r in asked if isinstance(r, Total)))
            return [(total.copy(),) for _ in asked]
        if isinstance(first, Update) and self.optimizer is not None:
            return self._update([r for r in asked if isinstance(r, Update)], self.optimizer)
        raise cannot_answer("the simulator", first)

    def _orthonormalize(self, asked: Sequence[Orthonormalize[NDArray]]) -> list[Any]:
        """Each matrix is treated by itself, so one call serves all replicas; unless they want it done differently."""
        key, ops = asked[0].key(), asked[0].ops
        if len(asked) == 1 or any(r.ops is not ops or r.key() != key for r in asked[1:]):
            return [r.answer() for r in asked]
        rows, n = Orthonormalize.fuse(asked).answer(), len(asked[0])
        return [rows[i * n : (i + 1) * n] for i in range(len(asked))]

    def _update(self, asked: Sequence[Update[NDArray]], optimizer: Optimizer) -> list[Any]:
        ok = [None if r.ok is None else bool(r.ok) for r in asked]
        if len(set(ok)) > 1:
            raise ReplicaMismatch(f"the replicas disagree whether the step counts: {dict(enumerate(ok))}")
        counts = () if ok[0] is None else (ok[0],)
        return [(optimizer(replica, r.pieces, *counts),) for replica, r in enumerate(asked)]

    def _reduce_scatter(self, asked: Sequence[ReduceScatter[NDArray]]) -> list[Any]:
        answers: list[list[NDArray]] = [[] for _ in asked]
        for i, counts in enumerate(asked[0].counts):
            average = np.asarray(sum(r.arrays[i] / len(asked) for r in asked), asked[0].arrays[i].dtype)
            if sum(counts) != average.size:
                raise ReplicaMismatch(f"a reduce-scatter of {average.size} elements into parts of {counts}")
            parts = np.split(average, np.cumsum(counts)[:-1])
            for replica, part in enumerate(parts):
                answers[replica].append(part.copy())
        self._take(x for r in asked for x in r.arrays)
        return [tuple(a) for a in answers]

    def _mean(self, asked: Sequence[Mean[NDArray]]) -> list[Any]:
        answers: list[tuple[NDArray, ...]] = [()] * len(asked)
        # Everything of one dtype as one vector, as on a network.
        n = len(asked[0].arrays)
        parts = [range(n)] if len({a.dtype for a in asked[0].arrays}) == 1 else [range(i, i + 1) for i in range(n)]
        for members in self._groups(asked[0], len(asked)):
            for part in parts:
                like = [asked[0].arrays[i] for i in part]
                vectors = [_joined([asked[m].arrays[i] for i in part]) for m in members]
                average = np.asarray(sum([v / len(members) for v in vectors]), like[0].dtype)
                if asked[0].watched:
                    self.finite = self.finite and bool(self.ops.all_finite(average))
                for m in members:
                    answers[m] += tuple(_cut(average.copy(), like))
        self._take(x for r in asked for x, donated in zip(r.arrays, r.donated, strict=True) if donated)
        for r in asked:
            for work in r.meanwhile:
                work()
        return answers

    def _take(self, donated: Iterable[NDArray]) -> None:
        """Nobody may look at these arrays any more."""
        if isinstance(self.ops, PoisonOps):
            for x in donated:
                x[...] = np.nan

    def _groups(self, request: Mean[NDArray], replicas: int) -> Sequence[Sequence[int]]:
        if request.groups is None:
            return (range(replicas),)
        groups = request.groups
        if sorted(m for members in groups for m in members) != list(range(replicas)):
            raise ValueError(f"groups={groups} is no partition of the replicas 0 to {replicas - 1}")
        return groups


def _joined(arrays: Sequence[NDArray]) -> NDArray:
    return arrays[0].reshape(-1) if len(arrays) == 1 else np.concatenate([x.reshape(-1) for x in arrays])


def _cut(vector: NDArray, like: Sequence[NDArray]) -> list[NDArray]:
    """Arrays of the shapes of those, in the vector's memory."""
    if len(like) == 1:
        return [vector.reshape(like[0].shape)]
    arrays, start = [], 0
    for x in like:
        end = start + x.size
        arrays.append(vector[start:end].reshape(x.shape))
        start = end
    return arrays


def _kind(request: Request) -> tuple[Any, ...]:
    """Equal for requests of which `_describe` says the same."""
    if isinstance(request, Mean):
        return (Mean, request.groups, *[(a.dtype, a.shape) for a in request.arrays])
    if isinstance(request, Orthonormalize):
        return (Orthonormalize, *[(a.dtype, a.shape) for a in request.arrays])
    if isinstance(request, (ReduceScatter, AllGather)):
        return (type(request), request.counts, *[a.dtype for a in request.arrays])
    return (type(request),)


def _describe(request: Request) -> str:
    if isinstance(request, (Mean, Orthonormalize)):
        arrays = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in request.arrays)
        groups = f" in groups {request.groups}" if isinstance(request, Mean) and request.groups else ""
        return f"{type(request).__name__} of {arrays}{groups}"
    if isinstance(request, (ReduceScatter, AllGather)):
        dtypes = [name_of(a.dtype) for a in request.arrays]
        return f"{type(request).__name__} of {dtypes} in parts of {list(request.counts)}"
    return type(request).__name__


def require_equal(what: str, arrays: Sequence[NDArray]) -> None:
    """Raise ReplicaMismatch unless all of them hold the same bits."""
    if len(arrays) == 1:
        return
    first = arrays[0]
    bits = first.tobytes()
    different = [
        i
        for i, a in enumerate(arrays)
        # Almost always the same bits, which is quick to see. Zeros may have different signs.
        if not (a.dtype == first.dtype and a.shape == first.shape and a.tobytes() == bits)
        and not np.array_equal(a, first, equal_nan=name_of(a.dtype) in ITEMSIZE)
    ]
    if different:
        raise ReplicaMismatch(f"{what} differs: replicas {different} disagree with replica 0")
