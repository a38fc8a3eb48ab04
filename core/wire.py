"""What crosses the wire: payloads in another dtype, the bytes of a step, and its α-β cost.

Bytes are counted by running the algorithm itself, the very coroutine that the drivers run, on arrays that have a shape and no data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from gradwire.core.algorithm import Algorithm, State, require_algorithm
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec, name_of_dtype
from gradwire.core.programs import Fusable, Groups, Program, Request, ask, cannot_answer, run
from gradwire.core.requests import require_partition

__all__ = [
    "Traffic",
    "WireDtype",
    "counted",
    "requests_of",
    "step_seconds",
    "traffic",
    "traffic_of",
]

T = TypeVar("T")


@dataclass(frozen=True)
class WireDtype:
    """Another algorithm, with its payloads cast for the wire: `WireDtype(PowerSGD(rank=4), "bfloat16")`.

    Local arithmetic and memory keep their dtype. Sums are formed in the wire dtype by the collective library. Averages, reduce-scatters,
    gathers are cast; the sum of a scalar (`sum_scalar`) is not.

    Of a sharded optimizer, `WireDtype(Zero(shards), "bfloat16")`, gradients are cast. What is gathered after the update travels as it is: those
    are the new parameters, and rounded to 8 bits they would lose every update that is smaller than 1/256 of them.

    Args:
        algorithm: any algorithm.
        dtype: "bfloat16" or "float16", or as a framework has it, `torch.bfloat16`; for gradients in float64 "float32" too. Payloads that are
            no wider travel as they are.

    Raises:
        TypeError: `algorithm` is none.
        ValueError: for any other dtype. Sums are formed in it, so integers will not do.
    """

    algorithm: Algorithm
    dtype: Any

    def __post_init__(self) -> None:
        require_algorithm(self.algorithm)
        object.__setattr__(self, "dtype", name_of_dtype(self.dtype))
        if self.dtype not in ITEMSIZE:
            raise ValueError(
                f"dtype={self.dtype!r} is no dtype to send in: give 'bfloat16' or 'float16' ('float32' for gradients in float64). Sums are "
                "formed in it, so integers, which need a scale for each block, are no cast"
            )

    @property
    def per_replica(self) -> frozenset[str]:
        return self.algorithm.per_replica

    @property
    def start_step(self) -> int:
        return self.algorithm.start_step

    @property
    def cycle(self) -> int:
        return self.algorithm.cycle

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        return self.algorithm.init(ops, specs)

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> tuple[dict[str, A], State[A]]:
        return await self._with_cast_payloads(ops, self.algorithm.step(ops, gradients, state, step))

    async def _with_cast_payloads(self, ops: Ops[A], program: Program[T], *, in_branch: bool = False) -> T:
        answers: Any = None
        casts = True
        while True:
            try:
                request = program.send(answers)
            except StopIteration as stop:
                result: T = stop.value
                return result
            if request.updates:
                if in_branch:
                    raise ValueError(
                        f"{self!r} cannot tell whether payloads hold gradients or parameters where the optimizer's update stands in a branch; "
                        "give WireDtype to the algorithm that averages the gradients"
                    )
                casts = False
            if casts and isinstance(request, Fusable) and not request.local:
                answers = await self._ask_cast(ops, request)
            elif casts:
                answers = await ask(request.wrapped(partial(self._with_cast_payloads, ops, in_branch=True)))
            else:
                answers = await ask(request)

    async def _ask_cast(self, ops: Ops[A], request: Fusable[A]) -> tuple[A, ...]:
        dtypes = [ops.dtype_of(x) for x in request.arrays]
        # What is no float is not in the table, and travels as it is.
        wider = [ITEMSIZE.get(dtype, 0) > ITEMSIZE[self.dtype] for dtype in dtypes]
        sent = tuple(ops.cast(x, self.dtype) if w else x for x, w in zip(request.arrays, wider, strict=True))
        answers = await ask(request.carrying(sent, wider))
        return tuple(ops.cast(y, dtype) for y, dtype in zip(answers, dtypes, strict=True))


@dataclass(frozen=True)
class Traffic:
    """What one replica hands to the collective library in one step. `nbytes` counts payloads once: a ring all-reduce of n bytes then
    sends 2(W-1)/W · n over each replica's link. What sends half of that counts n/2: a reduce-scatter or an all-gather of n bytes in all, a gather
    of n/W bytes from each replica, an all-to-all of n bytes on each replica.

    `subgroup_bytes` are those of `nbytes` that are averaged in groups of replicas, and so may never leave a machine.

    `optional_bytes` are those of `nbytes` that may not be sent, where an algorithm branches on data (`branch` on an average): no plan knows
    which side it will take. All else is that of the side that sends more.
    """

    collectives: int
    nbytes: int
    subgroup_bytes: int = 0
    optional_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.collectives + other.collectives,
            self.nbytes + other.nbytes,
            self.subgroup_bytes + other.subgroup_bytes,
            self.optional_bytes + other.optional_bytes,
        )


def traffic(
    algorithm: Algorithm,
    specs: Mapping[str, Spec],
    state: State[AbstractArray],
    step: int,
    phase: int = 0,
    *,
    world_size: int | None = None,
) -> Traffic:
    """Traffic of one step for these tensors, which may be a part of the model."""
    gradients = {name: AbstractArray(spec.shape, spec.dtype) for name, spec in specs.items()}
    return traffic_of(algorithm.step(AbstractOps(), gradients, state.of(gradients), step), phase, world_size=world_size)


def traffic_of(program: Program[Any], phase: int = 0, *, world_size: int | None = None) -> Traffic:
    """What a program over `AbstractArray`s asks to be sent, in the given phase of its algorithm.

    Args:
        program: of one step.
        phase: of its algorithm.
        world_size: number of replicas. None: not known, which is an error where the traffic depends on it.
    """
    return _dry_run(program, phase, world_size).traffic


def requests_of(program: Program[Any], phase: int = 0, *, world_size: int | None = None) -> list[Request]:
    """Everything that a program over `AbstractArray`s asks for, in order, in the given phase of its algorithm. Of a branch on data, what both
    sides ask for. Arguments as for `traffic_of`."""
    return _dry_run(program, phase, world_size).requests


def counted(ops: Ops[A], requests: Sequence[Request], world_size: int | None = None) -> Traffic:
    """The traffic of these requests."""
    total = Traffic(0, 0)
    for request in requests:
        sent = request.payloads(ops, world_size)
        total += Traffic(len(sent), sum(sent), sum(sent) if request.groups else 0)
    return total


def step_seconds(traffic: Traffic, world_size: int, latency: float, bandwidth: float) -> float:
    """α-β time of a step's ring all-reduces: 2(W-1) hops each, 2(W-1)/W of the payload over each link (Thakur et al. 2005, §4).

    Args:
        traffic: of the step.
        world_size: W.
        latency: α, seconds per hop.
        bandwidth: 1/β, bytes per second of one link, each direction.

    Raises:
        ValueError: nobody, or a link that carries nothing.
    """
    if world_size < 1 or latency < 0 or not bandwidth > 0:
        raise ValueError(
            f"world_size={world_size}, latency={latency}, bandwidth={bandwidth}: give replicas, seconds (0 or more) and bytes per second (more than 0)"
        )
    hops = 2 * (world_size - 1)
    return traffic.collectives * hops * latency + hops / world_size * traffic.nbytes / bandwidth


def _dry_run(program: Program[Any], phase: int, world_size: int | None) -> _DryRun:
    dry = _DryRun(phase, world_size)
    run(program, dry.answer)
    return dry


class _DryRun:
    """Answers on `AbstractArray`s, and takes down what was asked for."""

    def __init__(self, phase: int, world_size: int | None) -> None:
        self.phase = phase
        self.world_size = world_size
        self.requests: list[Request] = []
        self.traffic = Traffic(0, 0)

    def answer(self, request: Request) -> tuple[Any, ...]:
        if not isinstance(request, Request):
            raise cannot_answer("a plan", request)
        self.requests.append(request)
        answers = request.abstract(self)
        self.traffic += counted(AbstractOps(), [request], self.world_size)
        return answers

    def replicas(self, groups: Groups | None) -> int:
        if groups is None:
            if self.world_size is None:
                raise ValueError(
                    "what this algorithm sends depends on the number of replicas; say it: plan(…, world_size=8)"
                )
            return self.world_size
        require_partition(groups, self.world_size or sum(map(len, groups)), equal=True)
        return len(groups[0])

    def one_side(self, predicate: Any, phase: tuple[Any, int] | None, side: Callable[[bool], Program[T]]) -> T:
        if phase is not None:
            return run(side(phase[1] == self.phase), self.answer)
        if not isinstance(predicate, AbstractArray):
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
