"""What a program is, and how one is run: a coroutine that computes locally and asks for the rest.

There is no event loop. A *driver* (the lock-step simulator, a torch hook, a JAX transformation)
calls `.send(None)`, receives a `Request`, performs it with its own machinery and sends the answers
back. `together` runs many coroutines side by side and fuses their n-th requests into one, which is
why an algorithm for one matrix can be written for one matrix.

The requests themselves, and the functions by which an algorithm asks for them, are in the files
beside this one.
"""

from __future__ import annotations

import gc
import os
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from gradwire.core.ops import WIRE_ITEMSIZE, A, Ops
from gradwire.core.protocol.groups import Groups

T = TypeVar("T")

#: How a message goes between replicas. Each of the last three sends half of what an all-reduce of
#: as many bytes does.
Pattern = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]

#: A running algorithm: yields requests, is sent a tuple with one answer per array asked about,
#: returns `T`.
Program = Coroutine["Request", tuple[Any, ...], T]


class UnknownRequest(TypeError):
    """A program asks for something that its driver does not know."""


class ReplicaMismatch(RuntimeError):
    """Replicas asked for different things, or came to different results. On a real network this is
    a hang or silent divergence."""


class AbstractReplica(Protocol):
    """What answers on arrays without data, as the replica of some index in its group."""

    place: int

    def replicas(self, groups: Groups | None, assumed: int | None = None) -> int:
        """How many replicas there are, in each group; `assumed` where nobody has said. Raises
        ValueError where neither is known."""

    def one_side(
        self, predicate: Any, phase: tuple[Any, int] | None, side: Callable[[bool], Program[T]]
    ) -> T:
        """What a branch returns, of `side(True)` and `side(False)`, with what it sends counted."""


class LockStep(Protocol):
    """What runs N replicas in one process. `finite`: were all watched answers so far? `requests`:
    of replica 0, so far. `optimizer`: see `gradwire.core.simulate.Simulator`."""

    finite: bool
    requests: list[Request]

    @property
    def optimizer(self) -> Callable[..., dict[str, Any]] | None: ...

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """What the replicas' programs return."""

    def give(self, donated: Sequence[Any]) -> None:
        """Nobody may look at these arrays any more."""


class Request:
    """Something that only a driver can do. Answered with a tuple."""

    #: Of programs that run side by side, those whose request has the lowest number go first: local
    #: requests, messages that fuse, requests asked one by one, `StepIsFinite`.
    priority: ClassVar[int] = 2
    #: One answer serves all programs that run side by side.
    shared: ClassVar[bool] = False
    #: Whether `answer()` is all that a driver has to do.
    local: ClassVar[bool] = False
    #: Whether what is sent after it are parameters, and not gradients.
    updates: ClassVar[bool] = False
    #: How each message goes between replicas.
    pattern: ClassVar[Pattern] = "all_reduce"
    #: In which groups of replicas each message stays.
    groups: Groups | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.payloads is not Request.payloads and not issubclass(cls, Collective):
            raise TypeError(
                f"{cls.__name__} has payloads, so it sends: make it a subclass of Collective"
            )

    def key(self) -> object:
        """Requests that can be fused, or share an answer, do if their keys are equal."""
        return type(self), self.groups

    def payloads(self, ops: Ops[Any], world_size: int | None) -> list[int]:
        """Bytes of each message: what this replica sends and receives, in the unit of an
        all-reduce, see `gradwire.core.plan.traffic.Traffic`."""
        return []

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        """The answers on `AbstractArray`s. Raises ValueError for what no driver can do."""
        raise cannot_answer("a plan", self)

    def signature(self) -> object:
        """Equal on all replicas that ask for the same."""
        return type(self), self.groups

    def describe(self) -> str:
        """The signature in words."""
        return type(self).__name__

    @staticmethod
    def simulate(asked: Sequence[Any], world: LockStep) -> list[tuple[Any, ...]]:
        """The answers for each replica, in NumPy, where all of them ask for the same."""
        raise cannot_answer("the simulator", asked[0])

    def answer(self) -> tuple[Any, ...]:
        """The answers of a `local` request."""
        raise NotImplementedError

    def wrapped(self, wrap: Callable[[Program[Any]], Program[Any]]) -> Request:
        """The request with every program in it wrapped."""
        return self

    def among(self, groups: Groups) -> Request:
        """The request of a program for which each of these groups is all replicas there are, as one
        that names the group."""
        names: list[str] = [field.name for field in fields(self)] if is_dataclass(self) else []
        if "groups" not in names:
            raise TypeError(
                f"{type(self).__name__} has no field groups, so it cannot be asked of some replicas"
                " only"
            )
        inner = self.groups
        named = (
            groups
            if inner is None
            else tuple(tuple(own[m] for m in members) for own in groups for members in inner)
        )
        options: dict[str, Any] = {"groups": named}
        if "watched" in names:
            options["watched"] = False
        return replace(self, **options)  # type: ignore[type-var]

    async def between(self, nodes: Any) -> tuple[Any, ...]:
        """The answers, in a program that all replicas of a node run alike, asked for by a
        `gradwire.core.algorithms.two_level.Between`."""
        return await ask(self.wrapped(nodes.run))

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        """The answers, where each replica counts by its weight: asked for by a
        `gradwire.core.algorithms.shared.weighing.Weighing`."""
        return await ask(self.wrapped(weighing.inside))


class Fusable(Request, Generic[A]):
    """A request about any number of arrays, so that several can be fused into one."""

    priority = 1
    #: The fields that hold something for each array.
    per_array: ClassVar[tuple[str, ...]] = ("arrays",)
    #: What is asked is local and about arrays of the memory, which stay as they are until the step
    #: is known to be finite; and it is asked in every step, or in every few. So a driver may answer
    #: all programs of a step when the first of them asks.
    lasting = False
    arrays: tuple[A, ...]

    def __len__(self) -> int:
        return len(self.arrays)

    @classmethod
    def fuse(cls, requests: Sequence[Self]) -> Self:
        """One request for the arrays of all of them, in order."""
        joined: dict[str, Any] = {
            field: tuple(chain.from_iterable(map(attrgetter(field), requests)))
            for field in cls.per_array
        }
        if hasattr(requests[0], "watched"):
            joined["watched"] = any(getattr(r, "watched", False) for r in requests)
        return replace(requests[0], **joined)  # type: ignore[type-var]

    def carrying(self, arrays: tuple[A, ...], new: Sequence[bool]) -> Request:
        """The same request about other arrays: where `new`, arrays that nobody else knows."""
        return replace(self, arrays=arrays)  # type: ignore[type-var]

    def about_parts(self, parts: tuple[A, ...], ours: tuple[bool, ...]) -> Request:
        """The same request about a part of each message. `ours`: nobody else looks at it."""
        return replace(self, arrays=parts)  # type: ignore[type-var]

    def signature(self) -> object:
        return (type(self), self.groups, *[(x.dtype, x.shape) for x in self.arrays])

    def describe(self) -> str:
        arrays = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in self.arrays)
        return (
            f"{type(self).__name__} of"
            f" {arrays}{'' if self.groups is None else f' in groups {self.groups}'}"
        )

    def bytes_by_dtype(self, ops: Ops[A]) -> list[int]:
        """The bytes to send of each dtype: one message each."""
        sizes: dict[str, int] = {}
        for x in self.arrays:
            dtype = ops.dtype_of(x)
            if dtype not in WIRE_ITEMSIZE:
                raise ValueError(
                    f"{dtype} arrays cannot be sent; cast them to one of {', '.join(WIRE_ITEMSIZE)}"
                )
            size = WIRE_ITEMSIZE[dtype]
            for n in x.shape:
                size *= n
            sizes[dtype] = sizes.get(dtype, 0) + size
        return [size for size in sizes.values() if size]


#: What each collective request says itself. A default would send what it does not know, and give
#: wrong numbers.
STATED = ("between", "weighed", "coded", "payloads", "among")


class Collective(Request):
    """A request that sends. Its class says how: no class is made that lacks a method of `STATED`.

    Raises:
        TypeError: when the class is made; the message names the missing methods.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        missing = [name for name in STATED if getattr(cls, name) is getattr(Collective, name)]
        if missing:
            raise TypeError(
                f"the collective request {cls.__name__} lacks {', '.join(missing)}: it must say how"
                " it is asked between nodes (between), with weights (weighed), with a shorter"
                " dtype (coded) and among some replicas (among), and how many bytes it sends"
                " (payloads)"
            )

    async def coded(self, coder: Any) -> tuple[Any, ...]:
        """The answers, of a payload that a `gradwire.core.codecs.coder.Coder` has made shorter."""
        raise NotImplementedError


@types.coroutine
def ask(request: Request) -> Generator[Request, tuple[Any, ...], tuple[Any, ...]]:
    """Hand a request to the driver and receive its answers. Algorithms use the named functions of
    `gradwire.core.protocol`."""
    if isinstance(request, Fusable) and not len(request):
        return ()
    answers = yield request
    if isinstance(request, Fusable) and len(answers) != len(request):
        raise _miscounted(request, answers, len(request))
    return answers


@types.coroutine
def ask_one(request: Request) -> Generator[Request, tuple[Any, ...], T]:
    """The answer itself, of a request about one thing."""
    answers = yield request
    if len(answers) != 1:
        raise _miscounted(request, answers, 1)
    answer: T = answers[0]
    return answer


def _miscounted(request: Request, answers: tuple[Any, ...], asked: int) -> RuntimeError:
    return RuntimeError(
        f"the driver answered {type(request).__name__} with {len(answers)} arrays for {asked}"
    )


def cannot_answer(driver: str, request: object) -> UnknownRequest:
    """What a driver raises."""
    asked = type(request).__name__ if isinstance(request, Request) else repr(request)
    return UnknownRequest(f"{driver} cannot answer {asked}")


def run(program: Program[T], answer: Callable[[Request], tuple[Any, ...]]) -> T:
    """Run a program to its end, and return what it returns: the loop of a driver that can answer
    each request at once."""
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


async def relay(program: Program[T], answer: Callable[[Request], Awaitable[tuple[Any, ...]]]) -> T:
    """Run a program inside another one, which answers its requests by asking in turn. Returns what
    it returns."""
    answers: Any = None
    try:
        while True:
            try:
                request = program.send(answers)
            except StopIteration as stop:
                result: T = stop.value
                return result
            answers = await answer(request)
    finally:
        program.close()


async def together(programs: Iterable[Program[T]]) -> list[T]:
    """Run coroutines side by side; their n-th collectives become one request each. Returns their
    results in order.

    Local requests are answered first, so that a program that orthonormalizes before it sends still
    shares the message of one that sends at once. What does not fuse is asked one by one after the
    messages, in the order of the programs. `StepIsFinite` is asked last, when nobody has anything
    more to send.
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
        # After an exception in one of them: also those that have not begun, or Python warns that
        # they were forgotten.
        for program in coroutines:
            program.close()
    return [results[i] for i in range(len(coroutines))]


async def _one_round(pending: dict[int, Request]) -> list[tuple[int, Any]]:
    """Ask for those whose turn it is. Returns who may go on, and their answers; nothing if nobody
    waits."""
    if not pending:
        return []
    if len(pending) == 1:
        ((i, request),) = pending.items()
        return [(i, await ask(request))]
    whose, requests = list(pending), list(pending.values())
    kinds: set[Any] = set(map(type, requests))
    if len(kinds) > 1:
        first = min([kind.priority for kind in kinds])
        whose = [i for i, request in pending.items() if request.priority == first]
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
    if requests[0].shared:
        answers = await ask(requests[0])
        return [(i, answers) for i in whose]
    if len(requests) == 1 or not isinstance(requests[0], Fusable):
        return [(i, await ask(request)) for i, request in zip(whose, requests, strict=True)]
    answers = await ask(type(requests[0]).fuse(requests))
    return list(zip(whose, parted(requests, answers), strict=True))


def parted(requests: Sequence[Fusable[Any]], answers: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The answers to each of these requests, which were asked as one."""
    # each has asked about one array, since none asks about nothing
    if len(answers) == len(requests):
        return list(zip(answers, strict=True))
    ends = list(accumulate([len(request) for request in requests]))
    return [answers[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


# ---- the collector of cycles, while programs run


class _AtRest:
    """A context in which Python's collector of cycles does not run, in any thread; they may lie in
    each other and beside each other. After the last of them it is as it was before the first.

    Thousands of tensors are as many coroutines that are alive at once. The collector would go
    through all of them again and again, and through everything else that the process holds: of
    10,000 tensors that is a third of a step. Nothing within makes cycles that it would have to
    find.
    """

    def __init__(self) -> None:
        self.began_again()

    def began_again(self) -> None:
        """Nothing is within: what a process begins with."""
        self._lock, self._within, self._ran = threading.RLock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                self._ran = gc.isenabled()
                gc.disable()
            self._within += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within and self._ran:
                gc.enable()

    def forked(self) -> None:
        """The child of a fork begins anew: only the thread that forked goes on in it, and nobody
        would leave what others were within."""
        ran = self._within and self._ran
        self.began_again()
        if ran:
            gc.enable()


#: Where programs run, of this process.
AT_REST = _AtRest()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=AT_REST.forked)
