"""The requests a coroutine may make, and how many coroutines make them together.

An algorithm is an `async def` that computes locally and *asks*:

    p = await mean(p)          # the average over all replicas
    ok = await all_finite()    # was everything that this step averaged finite, on every replica?

There is no event loop. A *driver* (the lock-step simulator, a torch hook, a JAX transformation) calls `.send(None)`, receives a
`Request`, performs it with its own machinery and sends the answers back. `together` runs many coroutines side by side and fuses
their n-th requests into one, which is why an algorithm for one matrix can be written for one matrix.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Generic, TypeVar

from gradwire.core.ops import A, Ops

__all__ = [
    "AllGather",
    "Batched",
    "Branch",
    "Finite",
    "Groups",
    "Mean",
    "Orthonormalize",
    "OwnNorm",
    "Program",
    "ReduceScatter",
    "Replica",
    "Request",
    "Total",
    "UnknownRequest",
    "Update",
    "all_finite",
    "all_gather",
    "ask",
    "branch",
    "branch_on_phase",
    "cannot_answer",
    "mean",
    "means",
    "orthonormalize",
    "own_norm",
    "reduce_scatter",
    "replica",
    "run",
    "together",
    "total",
    "update",
]

T = TypeVar("T")
K = TypeVar("K")

#: A partition of the replicas, by number: `((0, 1), (2, 3))`.
Groups = tuple[tuple[int, ...], ...]

#: A running algorithm: yields requests, is sent a tuple with one answer per array asked about, returns `T`.
Program = Coroutine["Request", tuple[Any, ...], T]


class UnknownRequest(TypeError):
    """A program asks for something that its driver does not know."""


class Request:
    """Something that only a driver can do. Answered with a tuple."""

    #: Of the programs that run side by side, those whose request has the lowest number go first: what is local, messages that fuse, what is
    #: asked one by one, `Finite`.
    turn = 2

    def key(self) -> object:
        """Requests that can be fused are if their keys are equal."""
        return type(self)


class Batched(Request):
    """A request that carries any number of arrays, so that several can be fused into one."""

    turn = 1

    def __len__(self) -> int:
        raise NotImplementedError

    @classmethod
    def fuse(cls, requests: Sequence[Any]) -> Batched:
        """One request for the arrays of all of them, in order."""
        raise NotImplementedError


@dataclass(slots=True)  # not frozen: one is made for every matrix, and that would take three times as long
class Mean(Batched, Generic[A]):
    """The average of each array over all replicas: one all-reduce per dtype, whatever the number of arrays.

    `donated[i]` allows the answer to overwrite `arrays[i]`. With `watched` the driver notes whether the answers were finite
    (see `Finite`); an algorithm with no memory of its own can spare itself that pass over the data.

    `groups` is a partition of the replicas: each group averages by itself, all with one request. None: all replicas together. What
    a group averages cannot be watched, since the groups would come to different answers. Only requests of equal groups fuse.

    `meanwhile` is work that does not need the answers: a driver may do it while the message is on its way, each piece once, or not at all.
    """

    arrays: tuple[A, ...]
    donated: tuple[bool, ...]
    watched: bool = True
    groups: Groups | None = None
    meanwhile: tuple[Callable[[], None], ...] = ()

    def __post_init__(self) -> None:
        if self.groups is not None and self.watched:
            raise ValueError(
                f"an average in groups {self.groups} differs between them and cannot be watched; pass watched=False"
            )

    def __len__(self) -> int:
        return len(self.arrays)

    def key(self) -> object:
        return type(self), self.groups

    @classmethod
    def fuse(cls, requests: Sequence[Mean[Any]]) -> Mean[Any]:
        return Mean(
            tuple(chain.from_iterable([r.arrays for r in requests])),
            tuple(chain.from_iterable([r.donated for r in requests])),
            any(r.watched for r in requests),
            requests[0].groups,
            tuple(chain.from_iterable([r.meanwhile for r in requests])),
        )


@dataclass(slots=True)
class Orthonormalize(Batched, Generic[A]):
    """Local, no communication: orthonormal rows for each (r, n) matrix, or stack of them. A request so that equal shapes share one kernel call.

    `fresh` holds, for each matrix, the rows that replace its negligible ones, or is empty: then those come out as zero.
    """

    turn = 0

    ops: Ops[A]
    arrays: tuple[A, ...]
    fresh: tuple[A, ...]
    epsilon: float

    def __len__(self) -> int:
        return len(self.arrays)

    def key(self) -> object:
        return type(self), bool(self.fresh), self.epsilon

    @classmethod
    def fuse(cls, requests: Sequence[Orthonormalize[Any]]) -> Orthonormalize[Any]:
        return Orthonormalize(
            requests[0].ops,
            tuple(chain.from_iterable([r.arrays for r in requests])),
            tuple(chain.from_iterable([r.fresh for r in requests])),
            requests[0].epsilon,
        )

    def answer(self) -> tuple[A, ...]:
        """The orthonormal rows. Drivers call this."""
        return tuple(self.ops.orthonormalize_each(self.arrays, self.fresh, self.epsilon))


@dataclass(slots=True)
class OwnNorm(Request, Generic[A]):
    """Local, no communication: the 2-norm of this replica's gradients, over all programs of the step where a driver runs several.

    Such a driver answers when all of them have asked or ended, so what a program sends after it goes out when the last gradient is there. A driver
    that knows by what the loss was scaled divides by it.
    """

    ops: Ops[A]
    arrays: tuple[A, ...]


@dataclass(frozen=True)
class Finite(Request):
    """Was every watched average of this step finite? The same answer on all replicas, and no message.

    A driver that runs a step as several programs answers only when all of them have asked or ended, so the answer speaks of the
    whole step: a program commits its memory after it, or not at all.
    """

    turn = 3


@dataclass(frozen=True)
class Branch(Request, Generic[T]):
    """Run one of two coroutines. `predicate` must be equal on all replicas: derive it from a counter or from an average.

    torch and NumPy use `if`; JAX uses `lax.cond`, so both coroutines take and return arrays in the same nested containers.

    `phase` is given where the predicate is whether a counter in the shared state has a value. A driver may know that counter in a quicker
    way than by reading the predicate, and a plan goes through its values, from 0 to the algorithm's `cycle`. Of any other predicate that is an
    array a plan knows nothing: it counts the side that sends more, and says so (`Traffic.optional_bytes`).
    """

    predicate: Any
    then: Callable[..., Program[T]]
    otherwise: Callable[..., Program[T]]
    operands: tuple[Any, ...]
    phase: tuple[Any, int] | None = None


@dataclass(frozen=True)
class ReduceScatter(Batched, Generic[A]):
    """This replica's part of the average of each array: half of an all-reduce.

    Attributes:
        arrays: vectors, donated.
        counts: for each array, how many elements each replica receives, in order; they add up to the array's length. Only parts of
            equal size work in JAX.
    """

    arrays: tuple[A, ...]
    counts: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.arrays)

    @classmethod
    def fuse(cls, requests: Sequence[ReduceScatter[Any]]) -> ReduceScatter[Any]:
        return ReduceScatter(
            tuple(chain.from_iterable([r.arrays for r in requests])),
            tuple(chain.from_iterable([r.counts for r in requests])),
        )


@dataclass(frozen=True)
class AllGather(Batched, Generic[A]):
    """The vectors of all replicas one after the other, on every replica: the other half of an all-reduce.

    Attributes:
        arrays: this replica's vectors, donated.
        counts: for each array, how many elements each replica contributes. Only parts of equal size work in JAX.
        out: for each array, a vector for the answer, donated, in whose place this replica's part may lie already; or None.
    """

    arrays: tuple[A, ...]
    counts: tuple[tuple[int, ...], ...]
    out: tuple[A | None, ...]

    def __len__(self) -> int:
        return len(self.arrays)

    @classmethod
    def fuse(cls, requests: Sequence[AllGather[Any]]) -> AllGather[Any]:
        return AllGather(
            tuple(chain.from_iterable([r.arrays for r in requests])),
            tuple(chain.from_iterable([r.counts for r in requests])),
            tuple(chain.from_iterable([r.out for r in requests])),
        )


@dataclass(frozen=True)
class Replica(Request):
    """Which replica this is, from 0 on: an int in torch and NumPy, a traced int32 scalar in JAX."""

    turn = 0


@dataclass(frozen=True)
class Total(Request, Generic[A]):
    """The sum of a scalar over all replicas, and over all programs of the step where a driver runs several: one message for all of them."""

    array: A


@dataclass(frozen=True)
class Update(Request, Generic[A]):
    """Local: hand gradients to the optimizer and receive what it makes of them. Only drivers that have an optimizer answer it.

    Attributes:
        pieces: parameter name → averaged gradient of what this replica owns of it.
        ok: boolean scalar, equal on all replicas: False skips the step. None: it is never skipped.
    """

    pieces: dict[str, A]
    ok: A | None


@types.coroutine
def _ask(request: Request) -> Generator[Request, tuple[Any, ...], tuple[Any, ...]]:
    if isinstance(request, Batched) and not len(request):
        return ()
    answers = yield request
    if isinstance(request, Batched) and len(answers) != len(request):
        raise _miscounted(request, answers, len(request))
    return answers


@types.coroutine
def _ask_one(request: Request) -> Generator[Request, tuple[Any, ...], Any]:
    """For a request about one thing: the answer itself."""
    answers = yield request
    if len(answers) != 1:
        raise _miscounted(request, answers, 1)
    return answers[0]


def _miscounted(request: Request, answers: tuple[Any, ...], asked: int) -> RuntimeError:
    return RuntimeError(f"the driver answered {type(request).__name__} with {len(answers)} arrays for {asked}")


async def ask(request: Request) -> tuple[Any, ...]:
    """Hand a request to the driver and receive its answers. Algorithms use the named functions below."""
    return await _ask(request)


async def mean(
    x: A,
    *,
    out: A | None = None,
    watched: bool = True,
    groups: Groups | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> A:
    """Average `x` over all replicas; `out=x` lets the answer overwrite it. Every replica receives the same bits.

    With `groups`, a partition of the replicas, over those of this replica's group; that is never watched, see `Mean`. `meanwhile` may be
    called while `x` is on its way.
    """
    work = () if meanwhile is None else (meanwhile,)
    answer: A = await _ask_one(Mean((x,), (out is x,), watched and groups is None, groups, work))
    return answer


async def means(arrays: Mapping[K, A], *, watched: bool = True, groups: Groups | None = None) -> dict[K, A]:
    """Average each of these arrays, all donated, with one request: a coroutine for each would cost more than a small array itself.
    `groups` as for `mean`."""
    if not arrays:
        return {}
    request = Mean(tuple(arrays.values()), (True,) * len(arrays), watched and groups is None, groups)
    answers = await _ask(request)
    return dict(zip(arrays, answers, strict=True))


async def orthonormalize(ops: Ops[A], x: A, *, fresh: A | None = None, epsilon: float = 0.0) -> A:
    """Orthonormal rows spanning the rows of `x` (r, n), or of each matrix of a stack, see `gradwire.core.orthonormal.gram_schmidt`.

    Rows of `x` that are zero, or negligible beside the longest, are first replaced by those of `fresh` (r, n) if it is given.
    """
    answer: A = await _ask_one(Orthonormalize(ops, (x,), () if fresh is None else (fresh,), epsilon))
    return answer


async def own_norm(ops: Ops[A], gradients: Mapping[K, A]) -> A:
    """2-norm of this replica's whole gradient, of which these are a part: a scalar, float32 or wider."""
    answer: A = await _ask_one(OwnNorm(ops, tuple(gradients.values())))
    return answer


async def reduce_scatter(arrays: Sequence[A], counts: Sequence[tuple[int, ...]]) -> tuple[A, ...]:
    """This replica's part of the average of each array, see `ReduceScatter`."""
    return await ask(ReduceScatter(tuple(arrays), tuple(counts)))


async def all_gather(
    arrays: Sequence[A], counts: Sequence[tuple[int, ...]], *, out: Sequence[A | None] = ()
) -> tuple[A, ...]:
    """The parts of all replicas, joined, see `AllGather`."""
    return await ask(AllGather(tuple(arrays), tuple(counts), tuple(out) or (None,) * len(arrays)))


async def replica() -> Any:
    """The number of this replica, an int or a traced int32 scalar."""
    return await _ask_one(Replica())


async def total(x: A) -> A:
    """The sum of the scalar `x` over all replicas and all programs of the step."""
    answer: A = await _ask_one(Total(x))
    return answer


async def update(pieces: dict[str, A], ok: A | None = None) -> dict[str, A]:
    """What the optimizer makes of the gradients of the owned pieces: new parameters or updates, by the same names."""
    answer: dict[str, A] = await _ask_one(Update(pieces, ok))
    return answer


async def all_finite() -> Any:
    """Boolean scalar array: was everything averaged in this step so far finite (on all replicas, for all tensors)?"""
    return await _ask_one(Finite())


async def branch(
    predicate: Any,
    then: Callable[..., Program[T]],
    otherwise: Callable[..., Program[T]],
    *operands: Any,
) -> T:
    """`await then(*operands)` if `predicate`, else `await otherwise(*operands)`.

    A Python bool decides at once; an array is left to the driver, and to a plan both sides are possible. Where a counter of phases decides,
    take `branch_on_phase`.
    """
    if isinstance(predicate, bool):
        return await (then if predicate else otherwise)(*operands)
    answer: T = await _ask_one(Branch(predicate, then, otherwise, operands))
    return answer


async def branch_on_phase(
    counter: Any, value: int, then: Callable[..., Program[T]], otherwise: Callable[..., Program[T]], *operands: Any
) -> T:
    """`branch` on `counter == value`, for a counter in the shared state: which of its phases an algorithm is in."""
    answer: T = await _ask_one(Branch(counter == value, then, otherwise, operands, (counter, value)))
    return answer


def cannot_answer(driver: str, request: object) -> UnknownRequest:
    """What a driver raises."""
    asked = type(request).__name__ if isinstance(request, Request) else repr(request)
    return UnknownRequest(f"{driver} cannot answer {asked}")


def run(program: Program[T], answer: Callable[[Request], tuple[Any, ...]]) -> T:
    """Run a program to its end, and return what it returns: the loop of a driver that can answer each request at once."""
    answers: Any = None
    try:
        while True:
            try:
                request = program.send(answers)
            except StopIteration as stop:
                result: T = stop.value
                return result
            answers = answer(request)
    finally:
        program.close()


async def together(programs: Iterable[Program[T]]) -> list[T]:
    """Run coroutines side by side; their n-th collectives become one request each. Returns their results in order.

    Local requests are answered first, so that a program that orthonormalizes before it sends still shares the message of one
    that sends at once. What does not fuse is asked one by one after the messages, in the order of the programs. `Finite` is asked last, when
    nobody has anything more to send.
    """
    coroutines = list(programs)
    if len(coroutines) == 1:
        return [await coroutines[0]]
    pending: dict[int, Request] = {}
    results: dict[int, T] = {}
    sends = [program.send for program in coroutines]
    try:
        answered: list[tuple[int, Any]] = [(i, None) for i in range(len(coroutines))]
        while answered:
            for i, answers in answered:
                try:
                    pending[i] = sends[i](answers)
                except StopIteration as stop:
                    pending.pop(i, None)
                    results[i] = stop.value
            answered = await _one_round(pending)
    finally:
        # After an exception in one of them: also those that have not begun, or Python warns that they were forgotten.
        for program in coroutines:
            program.close()
    return [results[i] for i in range(len(coroutines))]


async def _one_round(pending: dict[int, Request]) -> list[tuple[int, Any]]:
    """Ask for those whose turn it is. Returns who may go on, and their answers; nothing if nobody waits."""
    if not pending:
        return []
    if len(pending) == 1:
        ((i, request),) = pending.items()
        return [(i, await _ask(request))]
    turn = min([request.turn for request in pending.values()])
    if turn == Finite.turn:
        answers = await _ask(Finite())
        return [(i, answers) for i in pending]
    whose = [i for i, request in pending.items() if request.turn == turn]
    requests = [pending[i] for i in whose]
    keys = [request.key() for request in requests]
    if keys.count(keys[0]) == len(keys):  # as a rule
        return await _ask_alike(whose, requests)
    answered: list[tuple[int, Any]] = []
    for key in dict.fromkeys(keys):
        members = [k for k, own in enumerate(keys) if own == key]
        answered += await _ask_alike([whose[k] for k in members], [requests[k] for k in members])
    return answered


async def _ask_alike(whose: list[int], requests: list[Any]) -> list[tuple[int, Any]]:
    """Requests of one key as one, or one by one if they do not fuse."""
    if len(requests) == 1 or not isinstance(requests[0], Batched):
        return [(i, await _ask(request)) for i, request in zip(whose, requests, strict=True)]
    answers = await _ask(type(requests[0]).fuse(requests))
    if len(answers) == len(requests):  # each has asked about one array, since none asks about nothing
        return [(i, (answer,)) for i, answer in zip(whose, answers, strict=True)]
    ends = list(accumulate([len(request) for request in requests]))
    return [(i, answers[begin:end]) for i, begin, end in zip(whose, [0, *ends], ends, strict=False)]
