"""What an algorithm will ask for and send, found out before anything runs: its own coroutines, over
arrays that have a shape and no data.

    dry = dry_run(PowerSGD(4), specs, world_size=8)
    dry.cycle[0].messages, dry.requests, dry.summary

There is one such run for each (algorithm, specs, number of replicas), whoever asks for whatever of
it, and as often as they like. Nobody else runs programs on `AbstractOps`: what is no `Algorithm`,
the averaging of local SGD, is `rehearsed`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar
from weakref import ref

from gradwire.core.algorithm import Algorithm, State, innermost, nested, with_inner
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.compressor import Compressor
from gradwire.core.algorithms.two_level import TwoLevel, levels_of, without_levels
from gradwire.core.algorithms.weighted import Weighted
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps, NotPortable, abstract_arrays
from gradwire.core.local_sgd.algorithm import LocalGradients
from gradwire.core.ops import Spec
from gradwire.core.plan.traffic import LevelBytes, Message, Traffic, bytes_by_level, counted
from gradwire.core.protocol import run
from gradwire.core.protocol.groups import Groups, UnknownWorldSize, group_size, require_partition
from gradwire.core.protocol.programs import AT_REST, Program, Request, UnknownRequest, cannot_answer
from gradwire.core.protocol.settings import settings_of

T = TypeVar("T")
OPS = AbstractOps()
#: Runs of one algorithm that are remembered, for other models and numbers of replicas; and where.
REMEMBERED = 8
ATTRIBUTE = "_dry_runs"
#: Algorithms that send the same of tensors of one kind.
BY_KIND = (AllReduce, Compressor, LocalGradients, TwoLevel, Weighted, WireDtype)


@dataclass(frozen=True, eq=False)
class DryStep:
    """One kind of step.

    Attributes:
        requests: in order; of a branch on data, those of both sides.
        traffic: what is sent; of a branch on data, on the side that sends more.
        messages: one by one, of both sides.
        result: what the program returned.
        by_number: it asks for more of the number of the step than whether some step has been
            reached.
    """

    requests: tuple[Request, ...]
    traffic: Traffic
    messages: tuple[Message, ...]
    result: Any
    by_number: bool = False


class DryRun:
    """An algorithm as one replica runs it, without data. Steps are run when something of them is
    first asked for, and raise

        UnknownWorldSize: what is sent depends on the number of replicas, and that is None.
        UnknownRequest: it asks for something that no driver knows.
        NotPortable: it is written for the arrays of one framework, and does not say so.

    What says so, by `portable = False`, is counted as the uncompressed average that it may be at
    most: nobody can look into it.

    Attributes:
        algorithm: as the first replica runs it.
        specs, world_size: what it is run for.
        memory: before the first step.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        specs: Mapping[str, Spec],
        world_size: int | None,
        memory: State[AbstractArray],
    ) -> None:
        self.algorithm, self.specs, self.world_size, self.memory = (
            algorithm,
            dict(specs),
            world_size,
            memory,
        )
        self._parts: dict[frozenset[str], DryRun] = {}
        self._alone: dict[Hashable, DryRun] = {}
        self._positions = {name: i for i, name in enumerate(self.specs)}

    def only(self, names: Iterable[str]) -> DryRun:
        """Steps on some of the gradients, with the memory that the algorithm has for all of
        them."""
        wanted = frozenset(name for name in names if name in self.specs)
        if len(wanted) == len(self.specs):
            return self
        if wanted not in self._parts:
            specs = {
                name: self.specs[name] for name in sorted(wanted, key=self._positions.__getitem__)
            }
            self._parts[wanted] = DryRun(self.algorithm, specs, self.world_size, self.memory)
        return self._parts[wanted]

    def alone(self, name: str) -> DryRun:
        """Steps on one of the gradients: on this, or on one before it of which the same is sent."""
        kind = self._kind(name)
        if kind not in self._alone:
            self._alone[kind] = self.only([name])
        return self._alone[kind]

    def _kind(self, name: str) -> Hashable:
        """What all tensors have in common of which the same is sent. A method decides by name what
        a tensor remembers, and its rank and view; what other algorithms decide by name is not
        known."""
        if not self._sends_by_kind:
            return name
        spec, inner = self.specs[name], innermost(self.algorithm)
        options = [
            getattr(inner, of)(name, spec.shape)
            for of in ("rank_of", "view_of")
            if hasattr(inner, of)
        ]
        memory = self.memory.tensors.get(name)
        kept = (
            None if memory is None else tuple((key, x.shape, x.dtype) for key, x in memory.items())
        )
        return spec, getattr(spec.shape, "stacked", 0), kept, *options

    @cached_property
    def _sends_by_kind(self) -> bool:
        return all(isinstance(each, BY_KIND) for each in nested(self.algorithm))

    @cached_property
    def _tried(self) -> list[DryStep] | None:
        start = self.algorithm.start_step
        kinds = [
            *([(0, 0)] if start else []),
            *((start + phase, phase) for phase in range(self.algorithm.cycle)),
        ]
        try:
            with saying_what_is_not_portable(self.algorithm):
                return [self._step(*kind) for kind in kinds]
        except UnknownWorldSize:
            # an exception that is kept would keep what its callers have at hand: a model's
            # parameters
            return None

    @property
    def steps(self) -> Sequence[DryStep]:
        """The first, if that is dense, and each of a cycle."""
        if self._tried is None:
            raise UnknownWorldSize
        return self._tried

    @property
    def cycle(self) -> Sequence[DryStep]:
        """Those of a cycle, once the algorithm has started."""
        return self.steps[-self.algorithm.cycle :]

    def at(self, step: int) -> DryStep:
        """The kind of a step, of the first in a cycle."""
        return self.steps[0] if step < self.algorithm.start_step else self.cycle[0]

    @property
    def requests(self) -> list[Request]:
        """The requests of all kinds of step."""
        return [request for step in self.steps for request in step.requests]

    @property
    def traffic(self) -> list[Traffic]:
        """That of each step of a cycle."""
        return [step.traffic for step in self.cycle]

    @property
    def stages(self) -> list[LevelBytes]:
        """What a step sends: one before the start, if there is one, and one after it, on average
        over a cycle."""
        levels = levels_of(self.algorithm)
        near = None if levels is None or self.world_size is None else levels.near(self.world_size)
        kinds = [*([[self.steps[0].traffic]] if self.algorithm.start_step else []), self.traffic]
        return [bytes_by_level([(sent, 1) for sent in kind], near) for kind in kinds]

    @cached_property
    def settings(self) -> dict[str, float]:
        """Those that it asks for, on one node too, with their defaults. Raises ValueError for one
        with two defaults."""
        found = settings_of(self.requests)
        if levels_of(self.algorithm) is None:
            return found
        between = dry_run(without_levels(self.algorithm), self.specs, self.world_size)
        return between.settings | found

    @cached_property
    def groups(self) -> list[Groups]:
        """Those in which requests average, each once. Raises ValueError for groups that are no
        partition of the replicas."""
        found = list(
            dict.fromkeys(request.groups for request in self.requests if request.groups is not None)
        )
        if self.world_size is not None:
            for groups in found:
                require_partition(groups, self.world_size)
        return found

    def _step(self, step: int, phase: int) -> DryStep:
        number = StepNumber(step)
        number.settled = step >= self.algorithm.start_step
        gradients = abstract_arrays(self.specs)
        counted = portable_form(self.algorithm)
        program = counted.step(OPS, gradients, self.memory.of(gradients), number)
        tried = rehearsed(program, phase, self.world_size, any_step=self.algorithm.cycle == 1)
        if counted is self.algorithm:
            _require_promised(counted, gradients, tried.result)
        # What nobody can look into may ask for the number of the step.
        return replace(tried, by_number=number.asked or counted is not self.algorithm)


def _require_promised(
    algorithm: Algorithm, gradients: Mapping[str, AbstractArray], result: Any
) -> None:
    """Raise ValueError for what a step returns and did not promise: an average of each gradient, in
    its shape."""
    averages = result[0] if isinstance(result, tuple) and len(result) == 2 else None
    if not isinstance(averages, Mapping) or averages.keys() != gradients.keys():
        found = sorted(averages) if isinstance(averages, Mapping) else type(result).__name__
        raise ValueError(
            f"{algorithm!r}: a step must return (averages, state), and returns {found} for the"
            f" gradients {sorted(gradients)}"
        )
    for name, x in averages.items():
        if tuple(x.shape) != tuple(gradients[name].shape):
            raise ValueError(
                f"{algorithm!r}: the average of {name!r} has shape {tuple(x.shape)}, and the"
                f" gradient {tuple(gradients[name].shape)}"
            )


@contextmanager
def saying_what_is_not_portable(algorithm: object) -> Iterator[None]:
    """Raise NotPortable for what arrays without data refuse."""
    try:
        yield
    except UnknownRequest:
        raise
    except (AttributeError, TypeError) as error:
        raise NotPortable(
            f"{algorithm!r} is not portable: {error}. Write it with ops, or say portable = False in"
            " its class: then it runs in its own framework alone, and counts as an uncompressed"
            " average"
        ) from error


def portable_form(algorithm: Any) -> Any:
    """The algorithm, with an uncompressed average in place of what says that it is not portable;
    itself, if nothing says so."""
    return (
        AllReduce()
        if not getattr(algorithm, "portable", True)
        else with_inner(algorithm, portable_form)
    )


def dry_run(
    algorithm: Algorithm, specs: Mapping[str, Spec], world_size: int | None = None
) -> DryRun:
    """The dry run of an algorithm. `world_size` None: not known, which is an error where the
    requests depend on it. Raises what its `init` raises."""
    runs = _Runs.of(algorithm)
    # A shape may know that its first axes are a stack, and is equal to one that does not.
    key = (
        tuple((name, spec, getattr(spec.shape, "stacked", 0)) for name, spec in specs.items()),
        world_size,
    )
    if key not in runs:
        made = DryRun(algorithm, specs, world_size, algorithm.init(OPS, specs))
        if len(runs) == REMEMBERED:
            del runs[next(iter(runs))]
        runs[key] = made
    return runs[key]


class _Runs(dict[Hashable, DryRun]):
    """The dry runs of one algorithm, which live as long as it does: among its attributes, since
    options may be mappings or arrays, by which it cannot be looked up. Of no copy, and no pickle,
    of the algorithm."""

    whose: Callable[[], object] = staticmethod(lambda: None)

    @classmethod
    def of(cls, algorithm: Algorithm) -> _Runs:
        attributes = getattr(algorithm, "__dict__", None)
        if not isinstance(attributes, dict):  # it has slots, and each run is made anew
            return cls()
        runs = attributes.get(ATTRIBUTE)
        if runs is None or runs.whose() is not algorithm:
            runs = attributes[ATTRIBUTE] = cls()
            runs.whose = ref(algorithm)
        return runs

    def __reduce__(self) -> tuple[Any, ...]:
        return _Runs, ()


def rehearsed(
    program: Program[Any],
    phase: int = 0,
    world_size: int | None = None,
    *,
    any_step: bool = False,
) -> DryStep:
    """A program over `AbstractArray`s, as the replica of some index in its group runs it.
    `any_step`: what it decides by the number of the step is decided in other ways in others."""
    dry = _Answers(phase, world_size, any_step=any_step)
    with AT_REST:
        result = run(program, dry.answer)
    return DryStep(tuple(dry.requests), dry.traffic, tuple(dry.messages), result)


class _Answers:
    """Answers on `AbstractArray`s, and takes down what was asked for."""

    place = 0

    def __init__(self, phase: int, world_size: int | None, *, any_step: bool) -> None:
        self.phase, self.world_size, self.any_step = phase, world_size, any_step
        self.requests: list[Request] = []
        self.messages: list[Message] = []
        self.traffic = Traffic(0, 0)

    def answer(self, request: Request) -> tuple[Any, ...]:
        if not isinstance(request, Request):
            raise cannot_answer("a plan", request)
        self.requests.append(request)
        answers = request.abstract(self)
        if payloads := request.payloads(OPS, self.world_size):
            self.traffic += counted(request, payloads)
            self.messages += [
                Message(nbytes, request.pattern, request.groups) for nbytes in payloads
            ]
        return answers

    def replicas(self, groups: Groups | None, assumed: int | None = None) -> int:
        if groups is not None:
            require_partition(groups, self.world_size or sum(map(len, groups)))
        return group_size(groups, self.world_size or assumed)

    def one_side(
        self, predicate: Any, phase: tuple[Any, int] | None, side: Callable[[bool], Program[T]]
    ) -> T:
        if phase is not None:
            return run(side(phase[1] == self.phase), self.answer)
        if not isinstance(predicate, (AbstractArray, ByNumber) if self.any_step else AbstractArray):
            return run(side(bool(predicate)), self.answer)
        before = self.traffic
        sides: list[tuple[Traffic, T]] = []
        for truth in (True, False):
            self.traffic = Traffic(0, 0)
            result = run(side(truth), self.answer)
            sides.append((self.traffic, result))
        larger, result = max(sides, key=lambda sent: (sent[0].nbytes, sent[0].collectives))
        least = min(sent.nbytes - sent.optional_bytes for sent, _ in sides)
        self.traffic = before + replace(larger, optional_bytes=larger.nbytes - least)
        return result


class ByNumber(int):
    """What was found out from the number of a step, and may be another answer in another step. A
    truth is 0 or 1."""


class StepNumber(int):
    """The number of a step, which notes whether it was `asked` for anything that is not so in all
    later steps too, as having reached another is. `settled`: the algorithm has started."""

    asked = settled = False


#: Conversions, of which Python wants its own types.
_CONVERSIONS = tuple(f"__{name}__" for name in ("hash", "bool", "int", "index", "float"))


def _noting(name: str, lasting: bool | None) -> Callable[..., Any]:
    own, is_found = getattr(int, name), name not in _CONVERSIONS

    def method(self: StepNumber, *others: Any) -> Any:
        answer = own(self, *others)
        if answer is lasting:
            return answer
        self.asked = True
        found = is_found and self.settled and type(answer) in (bool, int)
        return ByNumber(answer) if found else answer

    return method


def _goes_on(name: str) -> Callable[..., Any]:
    own = getattr(int, name)

    def method(self: ByNumber, *others: Any) -> Any:
        answer = own(self, *others)
        return ByNumber(answer) if type(answer) in (bool, int) else answer

    return method


_BINARY = "add sub mul truediv floordiv mod divmod pow and or xor lshift rshift"
_FOUND = f"eq ne neg {_BINARY} r{_BINARY.replace(' ', ' r')}".split()
for _name in (*_CONVERSIONS, *(f"__{name}__" for name in _FOUND)):
    setattr(StepNumber, _name, _noting(_name, None))
for _name in (f"__{name}__" for name in (*_FOUND, "ge", "gt", "lt", "le")):
    setattr(ByNumber, _name, _goes_on(_name))
for _name, _lasting in (("ge", True), ("gt", True), ("lt", False), ("le", False)):
    setattr(StepNumber, f"__{_name}__", _noting(f"__{_name}__", _lasting))


@dataclass(frozen=True)
class Summary:
    """A plan in one line: `PowerSGD(rank=4): 26 of 74 tensors, 101.3 MB → 1.2 MB (87×), 2 messages;
    error memory 99.0 MB`.

    Attributes:
        algorithm: its `repr`.
        compressed, tensors: how many tensors have factors or a memory, of how many.
        dense_bytes, wire_bytes: of an uncompressed step, and of one after the start, on average
            over a cycle; see `Plan.wire_bytes`. With two levels between nodes, of all replicas of a
            node.
        messages: of such a step, for a model whose gradients come all at once.
        error_bytes: of what each replica remembers for itself.
        start_step: the first step that is compressed.
    """

    algorithm: str
    compressed: int
    tensors: int
    dense_bytes: int
    wire_bytes: float
    messages: float
    error_bytes: int
    start_step: int

    def __str__(self) -> str:
        ratio = self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0
        fewer = f"{ratio:.1f}" if ratio < 10 else f"{ratio:,.0f}"
        of = f"{self.compressed} of {self.tensors}" if self.compressed else f"{self.tensors}"
        return "".join(
            [
                (
                    f"{self.algorithm}: {of} tensors, {size_of(self.dense_bytes)} →"
                    f" {size_of(self.wire_bytes)} ({fewer}×), "
                ),
                f"{self.messages:g} message{'' if self.messages == 1 else 's'}",
                f" from step {self.start_step} on" if self.start_step else "",
                f"; error memory {size_of(self.error_bytes)}" if self.error_bytes else "",
            ]
        )


def summary(
    algorithm: Algorithm, specs: Mapping[str, Spec], world_size: int | None = None
) -> Summary:
    """What an algorithm does with these parameters. Raises as `DryRun` does."""
    dry = dry_run(algorithm, specs, world_size)
    return Summary(
        repr(algorithm),
        len(dry.memory.tensors),
        len(specs),
        sum(spec.nbytes for spec in specs.values()),
        dry.stages[-1].between,
        sum(sent.collectives for sent in dry.traffic) / len(dry.traffic),
        state_bytes(dry.memory, dry.algorithm.per_replica),
        dry.algorithm.start_step,
    )


def state_bytes(state: State[AbstractArray], of: Iterable[str] | None = None) -> int:
    """Bytes of all memories of tensors; or `of` those with these names alone."""
    wanted = None if of is None else set(of)
    return sum(
        x.nbytes
        for memory in state.tensors.values()
        for key, x in memory.items()
        if wanted is None or key in wanted
    )


def size_of(nbytes: float) -> str:
    """Bytes as one reads them, in powers of 1000: "101.3 MB"."""
    for unit, worth in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= worth:
            return f"{nbytes / worth:,.1f} {unit}"
    return f"{nbytes:.0f} bytes"
