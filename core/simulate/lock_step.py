"""Programs of N replicas in one process, in lock step: every request is answered for all of them at
once, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradwire.core.algorithm import State
from gradwire.core.kernels.numpy import NumpyOps, name_of
from gradwire.core.ops import ITEMSIZE
from gradwire.core.protocol.programs import (
    Fusable,
    Program,
    ReplicaMismatch,
    Request,
    cannot_answer,
)
from gradwire.core.simulate.poison import PoisonOps, poison

T = TypeVar("T")
NDArray = npt.NDArray[Any]

#: A sharded optimizer on all replicas: (replica, gradients of its pieces) → what it makes of them.
#: Where steps may be skipped, a third argument says whether this one counts.
Optimizer = Callable[..., dict[str, NDArray]]


def lock_step(
    programs: Sequence[Program[T]],
    ops: NumpyOps | None = None,
    requests: list[Request] | None = None,
    optimizer: Optimizer | None = None,
) -> list[T]:
    """Drive one program per replica, answering each request for all of them at once. Returns what
    each program returned. Replica 0's requests are appended to `requests`; for the optimizer see
    `Simulator`.

    Raises:
        ReplicaMismatch: naming the replicas that asked for something else than replica 0 did, and
            what.
    """
    # A gradient may hold inf or NaN, or be zero throughout: that is for the algorithm to handle.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return _LockStep(ops or NumpyOps(), [] if requests is None else requests, optimizer).run(
            programs
        )


def lock_step_of(
    programs: Sequence[Program[T]],
    to_numpy: Callable[[Any], NDArray],
    from_numpy: Callable[[NDArray, Any], Any],
) -> list[T]:
    """`lock_step` of programs over the arrays of another framework, which are brought to NumPy and
    back where replicas meet.

    Args:
        programs: one per replica.
        to_numpy: an array; of a float that NumPy lacks, one that is wide enough.
        from_numpy: an array in the dtype of the framework's array that is its second argument;
            None: in its own.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return _Elsewhere(to_numpy, from_numpy).run(programs)


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
                answers = self.answers(asked)
        finally:
            for program in programs:
                program.close()

    def answers(self, asked: Sequence[Any]) -> list[Any]:
        """What each replica is answered."""
        return list(type(asked[0]).simulate(asked, self))

    def _advance(
        self, programs: Sequence[Program[T]], answers: Sequence[Any]
    ) -> tuple[list[Request], list[T]]:
        asked: dict[int, Request] = {}
        returned: dict[int, T] = {}
        for replica, (program, answer) in enumerate(zip(programs, answers, strict=True)):
            try:
                asked[replica] = program.send(answer)
                if not isinstance(asked[replica], Request):
                    raise cannot_answer("the simulator", asked[replica])
            except StopIteration as stop:
                returned[replica] = stop.value
        if asked and returned:
            raise ReplicaMismatch(
                f"replicas {list(returned)} have ended while replicas {list(asked)} ask for"
                f" {next(iter(asked.values())).describe()}"
            )
        if asked:
            self._require_same_request(list(asked.values()))
        return list(asked.values()), list(returned.values())

    def _require_same_request(self, asked: Sequence[Request]) -> None:
        if len(asked) == 1:
            return
        signatures = [r.signature() for r in asked]
        # words take longer to find than most requests to answer
        if signatures.count(signatures[0]) == len(signatures):
            return
        first = asked[0].describe()
        others = "; ".join(
            f"replica {replica} asks for {r.describe()}"
            for replica, r in enumerate(asked)
            if signatures[replica] != signatures[0]
        )
        raise ReplicaMismatch(f"replica 0 asks for {first}, but {others}")

    def give(self, donated: Sequence[Any]) -> None:
        if isinstance(self.ops, PoisonOps):
            for x in donated:
                poison(x)


class _Elsewhere(_LockStep):
    def __init__(
        self, to_numpy: Callable[[Any], NDArray], from_numpy: Callable[[NDArray, Any], Any]
    ) -> None:
        super().__init__(NumpyOps(), [], None)
        self._to_numpy, self._from_numpy = to_numpy, from_numpy

    def answers(self, asked: Sequence[Any]) -> list[Any]:
        first = asked[0]
        field = (
            None
            if first.local
            else (
                "arrays"
                if isinstance(first, Fusable)
                else "array"
                if hasattr(first, "array")
                else None
            )
        )
        if field is None:
            return [self._brought_back(own, [None] * len(own)) for own in super().answers(asked)]
        likes = first.arrays if field == "arrays" else (first.array,)
        here = [replace(r, **{field: self._brought(getattr(r, field))}) for r in asked]
        return [self._brought_back(own, likes) for own in super().answers(here)]

    def _brought(self, x: Any) -> Any:
        return tuple(map(self._to_numpy, x)) if isinstance(x, tuple) else self._to_numpy(x)

    def _brought_back(self, answers: Sequence[Any], likes: Sequence[Any]) -> tuple[Any, ...]:
        pairs = zip(answers, likes, strict=True)
        return tuple(
            self._from_numpy(x, like) if isinstance(x, np.ndarray) else x for x, like in pairs
        )


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


def require_same_memory(states: Sequence[State[NDArray]], per_replica: Collection[str]) -> None:
    """Raise ReplicaMismatch unless memory is the same on all replicas, but for what each has for
    itself."""
    for key in states[0].shared:
        require_equal(f"the shared state {key!r}", [s.shared[key] for s in states])
    for name, memory in states[0].tensors.items():
        for key in memory.keys() - set(per_replica):
            require_equal(f"memory {key!r} of {name!r}", [s.tensors[name][key] for s in states])
