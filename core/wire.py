"""What crosses the wire: payloads in another dtype, the bytes of a step, and its α-β cost.

Bytes are counted by running the algorithm itself, the very coroutine that the drivers run, on arrays that have a shape and no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gradwire.core.abstract import AbstractArray, AbstractOps
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
    ask,
    cannot_answer,
    run,
)
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec, name_of_dtype

__all__ = [
    "Traffic",
    "WireDtype",
    "counted",
    "payloads",
    "requests_of",
    "step_seconds",
    "traffic",
    "traffic_of",
]

T = TypeVar("T")


@dataclass(frozen=True)
class WireDtype:
    """Another algorithm, with its payloads cast for the wire: `WireDtype(PowerSGD(rank=4), "bfloat16")`.

    Local arithmetic and memory keep their dtype. Sums are formed in the wire dtype by the collective library. Averages, reduce-scatters and
    all-gathers are cast; the sum of a scalar (`total`) is not.

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
            if isinstance(request, Update):
                if in_branch:
                    raise ValueError(
                        f"{self!r} cannot tell whether payloads hold gradients or parameters where the optimizer's update stands in a branch; "
                        "give WireDtype to the algorithm that averages the gradients"
                    )
                casts = False
            if casts and isinstance(request, (Mean, ReduceScatter, AllGather)):
                answers = await self._ask_cast(ops, request)
            elif casts and isinstance(request, Branch):
                answers = await ask(self._branch(ops, request))
            else:
                answers = await ask(request)

    async def _ask_cast(self, ops: Ops[A], request: Mean[A] | ReduceScatter[A] | AllGather[A]) -> tuple[A, ...]:
        dtypes = [ops.dtype_of(x) for x in request.arrays]
        # What is no float is not in the table, and travels as it is.
        wider = [ITEMSIZE.get(dtype, 0) > ITEMSIZE[self.dtype] for dtype in dtypes]
        sent = tuple(ops.cast(x, self.dtype) if w else x for x, w in zip(request.arrays, wider, strict=True))
        cast: Request
        if isinstance(request, Mean):
            donated = tuple(d or w for d, w in zip(request.donated, wider, strict=True))
            cast = replace(request, arrays=sent, donated=donated)
        elif isinstance(request, AllGather):
            out = tuple(None if w else place for place, w in zip(request.out, wider, strict=True))
            cast = replace(request, arrays=sent, out=out)
        else:
            cast = replace(request, arrays=sent)
        answers = await ask(cast)
        return tuple(ops.cast(y, dtype) for y, dtype in zip(answers, dtypes, strict=True))

    def _branch(self, ops: Ops[A], request: Branch[Any]) -> Branch[Any]:
        async def then(*operands: Any) -> Any:
            return await self._with_cast_payloads(ops, request.then(*operands), in_branch=True)

        async def otherwise(*operands: Any) -> Any:
            return await self._with_cast_payloads(ops, request.otherwise(*operands), in_branch=True)

        return replace(request, then=then, otherwise=otherwise)


@dataclass(frozen=True)
class Traffic:
    """What one replica hands to the collective library in one step. `nbytes` counts payloads once: a ring all-reduce of n bytes then
    sends 2(W-1)/W · n over each replica's link. A reduce-scatter or an all-gather of n bytes sends half of that and counts n/2.

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
    algorithm: Algorithm, specs: Mapping[str, Spec], state: State[AbstractArray], step: int, phase: int = 0
) -> Traffic:
    """Traffic of one step for these tensors, which may be a part of the model."""
    gradients = {name: AbstractArray(spec.shape, spec.dtype) for name, spec in specs.items()}
    return traffic_of(algorithm.step(AbstractOps(), gradients, state.of(gradients), step), phase)


def traffic_of(program: Program[Any], phase: int = 0) -> Traffic:
    """What a program over `AbstractArray`s asks to be sent, in the given phase of its algorithm."""
    return _dry_run(program, phase).traffic


def requests_of(program: Program[Any], phase: int = 0) -> list[Request]:
    """Everything that a program over `AbstractArray`s asks for, in order, in the given phase of its algorithm. Of a branch on data, what both
    sides ask for."""
    return _dry_run(program, phase).requests


def counted(ops: Ops[A], requests: Sequence[Request]) -> Traffic:
    """The traffic of these requests."""
    total = Traffic(0, 0)
    for request in requests:
        sent = payloads(ops, request)
        within = sum(sent) if isinstance(request, Mean) and request.groups else 0
        total += Traffic(len(sent), sum(sent), within)
    return total


def payloads(ops: Ops[A], request: Request) -> list[int]:
    """Bytes of each message that a request becomes, as `Traffic` counts them. Empty messages are not sent."""
    if isinstance(request, Mean):
        sizes = list(_mean_bytes(ops, request).values())
    elif isinstance(request, (ReduceScatter, AllGather)):
        sizes = [
            -(-sum(counts) * ITEMSIZE[ops.dtype_of(x)] // 2)
            for x, counts in zip(request.arrays, request.counts, strict=True)
        ]
    elif isinstance(request, Total):
        sizes = [ITEMSIZE[ops.dtype_of(request.array)]]
    else:
        sizes = []
    return [size for size in sizes if size]


def _mean_bytes(ops: Ops[A], request: Mean[A]) -> dict[str, int]:
    """One message per dtype."""
    messages: dict[str, int] = {}
    for x in request.arrays:
        dtype = ops.dtype_of(x)
        messages[dtype] = messages.get(dtype, 0) + Spec(tuple(x.shape), dtype).nbytes
    return messages


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


def _dry_run(program: Program[Any], phase: int) -> _DryRun:
    dry = _DryRun(phase)
    run(program, dry.answer)
    return dry


class _DryRun:
    """Answers on `AbstractArray`s, and takes down what was asked for."""

    def __init__(self, phase: int) -> None:
        self.phase = phase
        self.requests: list[Request] = []
        self.traffic = Traffic(0, 0)

    def answer(self, request: Request) -> tuple[Any, ...]:
        self.requests.append(request)
        self.traffic += counted(AbstractOps(), [request])
        if isinstance(request, (Mean, Orthonormalize)):
            return request.arrays
        if isinstance(request, ReduceScatter):
            return tuple(AbstractArray((n[0],), x.dtype) for x, n in zip(request.arrays, request.counts, strict=True))
        if isinstance(request, AllGather):
            return tuple(AbstractArray((sum(n),), x.dtype) for x, n in zip(request.arrays, request.counts, strict=True))
        if isinstance(request, OwnNorm):
            return (request.ops.norm_of_all(request.arrays),)
        if isinstance(request, Replica):
            return (0,)
        if isinstance(request, Total):
            return (request.array,)
        if isinstance(request, Update):
            return (request.pieces,)
        if isinstance(request, Finite):
            return (AbstractArray((), "bool"),)
        if isinstance(request, Branch):
            return (self._branch(request),)
        raise cannot_answer("a plan", request)

    def _branch(self, request: Branch[T]) -> T:
        if request.phase is not None:
            return self._side(request, request.phase[1] == self.phase)
        if not isinstance(request.predicate, AbstractArray):
            return self._side(request, bool(request.predicate))
        before = self.traffic
        sides: list[tuple[Traffic, T]] = []
        for truth in (True, False):
            self.traffic = Traffic(0, 0)
            result = self._side(request, truth)
            sides.append((self.traffic, result))
        larger, result = max(sides, key=lambda side: (side[0].nbytes, side[0].collectives))
        least = min(sent.nbytes - sent.optional_bytes for sent, _ in sides)
        self.traffic = before + replace(larger, optional_bytes=larger.nbytes - least)
        return result

    def _side(self, request: Branch[T], truth: bool) -> T:
        return run((request.then if truth else request.otherwise)(*request.operands), self.answer)
