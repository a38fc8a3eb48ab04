"""What crosses the wire: payloads in another dtype, the plan of a step in bytes, and its α-β cost.

    print(gradwire.plan({"layers.0.weight": (2048, 512), "layers.0.bias": (2048,)}, PowerSGD(rank=4)))

A plan runs the algorithm itself, the very coroutine that the drivers run, on arrays that have a shape and no data, and counts what it
asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gradwire.core.abstract import AbstractArray, AbstractOps
from gradwire.core.algorithm import Algorithm, State
from gradwire.core.buckets import assign_buckets, bucket_limits
from gradwire.core.collectives import (
    AllGather,
    Branch,
    Finite,
    Mean,
    Orthonormalize,
    Program,
    ReduceScatter,
    Replica,
    Request,
    Total,
    Update,
    ask,
)
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec

__all__ = ["BucketPlan", "Plan", "TensorPlan", "Traffic", "WireDtype", "plan", "step_seconds"]

T = TypeVar("T")


@dataclass(frozen=True)
class WireDtype:
    """Another algorithm, with every payload cast for the wire: `WireDtype(PowerSGD(rank=4), "bfloat16")`.

    Local arithmetic and memory keep their dtype. Sums are formed in the wire dtype by the collective library.

    Args:
        algorithm: any algorithm.
        dtype: "bfloat16" or "float16". Payloads that are no wider travel as they are.
    """

    algorithm: Algorithm
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(ITEMSIZE)}")

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

    async def _with_cast_payloads(self, ops: Ops[A], program: Program[T]) -> T:
        answers: Any = None
        while True:
            try:
                request = program.send(answers)
            except StopIteration as stop:
                result: T = stop.value
                return result
            if isinstance(request, Mean):
                answers = await self._mean(ops, request)
            elif isinstance(request, Branch):
                answers = await ask(self._branch(ops, request))
            else:
                answers = await ask(request)

    async def _mean(self, ops: Ops[A], request: Mean[A]) -> tuple[A, ...]:
        dtypes = [ops.dtype_of(x) for x in request.arrays]
        sent = tuple(
            ops.cast(x, self.dtype) if ITEMSIZE[dtype] > ITEMSIZE[self.dtype] else x
            for x, dtype in zip(request.arrays, dtypes, strict=True)
        )
        donated = tuple(d or y is not x for d, x, y in zip(request.donated, request.arrays, sent, strict=True))
        answers = await ask(Mean(sent, donated, request.watched, request.groups))
        return tuple(ops.cast(y, dtype) for y, dtype in zip(answers, dtypes, strict=True))

    def _branch(self, ops: Ops[A], request: Branch[Any]) -> Branch[Any]:
        async def then(*operands: Any) -> Any:
            return await self._with_cast_payloads(ops, request.then(*operands))

        async def otherwise(*operands: Any) -> Any:
            return await self._with_cast_payloads(ops, request.otherwise(*operands))

        return Branch(request.predicate, then, otherwise, request.operands)


@dataclass(frozen=True)
class Traffic:
    """What one replica hands to the collective library in one step. `nbytes` counts payloads once: a ring all-reduce of n bytes then
    sends 2(W-1)/W · n over each replica's link. A reduce-scatter or an all-gather of n bytes sends half of that and counts n/2."""

    collectives: int
    nbytes: int


@dataclass(frozen=True)
class TensorPlan:
    """One tensor in a plan: `rank` is that of its factors, if it has any."""

    name: str
    shape: tuple[int, ...]
    compressed: bool
    rank: int | None
    dense_bytes: int
    wire_bytes: float


@dataclass(frozen=True)
class BucketPlan:
    """Tensors that travel together, in the order in which they lie in the bucket, and the bytes of their gradients."""

    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What an algorithm sends per step, on average over its cycle, after its dense start.

    Attributes:
        tensors: one entry per parameter; bytes of a tensor sent by itself.
        steps: the traffic of each step of a cycle.
        dense_bytes: what an uncompressed step sends.
        buckets: of the gradients, in the order in which they are sent; () if none were asked for.
    """

    algorithm: Algorithm
    tensors: tuple[TensorPlan, ...]
    steps: tuple[Traffic, ...]
    dense_bytes: int
    buckets: tuple[BucketPlan, ...] = ()

    @property
    def wire_bytes(self) -> float:
        """Bytes per step."""
        return _average([t.nbytes for t in self.steps])

    @property
    def collectives(self) -> float:
        """Messages per step."""
        return _average([t.collectives for t in self.steps])

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest step."""
        return max(t.nbytes for t in self.steps)

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than uncompressed."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def seconds(self, world_size: int, latency: float, bandwidth: float) -> float:
        """Communication time of a step by the α-β model, see `step_seconds`."""
        return _average([step_seconds(t, world_size, latency, bandwidth) for t in self.steps])

    def __str__(self) -> str:
        width = max([len("tensor"), *(len(t.name) for t in self.tensors)])
        shapes = {t.name: "×".join(map(str, t.shape)) or "scalar" for t in self.tensors}
        tall = max([len("shape"), *(len(s) for s in shapes.values())])
        lines = [
            repr(self.algorithm),
            f"{'tensor':<{width}}  {'shape':<{tall}}  {'rank':>5}  {'dense B':>13}  {'wire B':>13}",
        ]
        for t in self.tensors:
            rank = "-" if not t.compressed else "yes" if t.rank is None else str(t.rank)
            lines.append(
                f"{t.name:<{width}}  {shapes[t.name]:<{tall}}  {rank:>5}  {t.dense_bytes:>13,}  {t.wire_bytes:>13,.0f}"
            )
        for number, bucket in enumerate(self.buckets):
            first, last, n = bucket.names[0], bucket.names[-1], len(bucket.names)
            members = first if n == 1 else f"{first} … {last}, {n} tensors"
            lines.append(f"bucket {number}: {bucket.nbytes:,} bytes: {members}")
        lines.append(
            f"per step: {self.wire_bytes:,.0f} bytes of {self.dense_bytes:,} ({self.ratio:.1f}x fewer) in {self.collectives:g} collectives"
        )
        return "\n".join(lines)


def plan(
    shapes: Mapping[str, tuple[int, ...]],
    algorithm: Algorithm,
    *,
    itemsize: int = 4,
    dtype: str | None = None,
    bucket_cap_mb: float | None = None,
    first_bucket_mb: float = 1,
) -> Plan:
    """What one step of `algorithm` sends for a model.

        print(plan(shapes, AllReduce(), bucket_cap_mb=25))          # DDP's buckets
        print(plan(shapes, AllReduce(bucket_bytes=25 << 20)))       # those of `all_reduce_mean(bucket_bytes=…)`

    Args:
        shapes: parameter name → shape.
        algorithm: any algorithm.
        itemsize: bytes per element: 8 (float64), 4 (float32) or 2 (float16).
        dtype: the dtype by name instead, for "bfloat16".
        bucket_cap_mb: size in MiB of the buckets in which DDP or `DataParallel` hand their gradients over, to see them: those from the
            second step on, if gradients arrive in reverse order of the parameters. How many messages become of them is up to the group
            (`group_bytes`), so `collectives` counts the whole model as one. None: only the buckets that the algorithm makes itself.
        first_bucket_mb: size of the first of those. (DDP takes 1 MiB unless it is told `bucket_cap_mb`, which then holds for it too.)

    Raises:
        ValueError: for an unknown itemsize or dtype, a size of buckets that is not positive or given twice, or whatever the algorithm's
            `init` refuses.
    """
    if dtype is None:
        by_size = {8: "float64", 4: "float32", 2: "float16"}
        if itemsize not in by_size:
            raise ValueError(f"itemsize={itemsize} is not one of 8, 4, 2 bytes")
        dtype = by_size[itemsize]
    specs = {name: Spec(tuple(shape), dtype) for name, shape in shapes.items()}
    ops = AbstractOps()
    state = algorithm.init(ops, specs)
    start = algorithm.start_step
    steps = [traffic(algorithm, specs, state, start, phase) for phase in range(algorithm.cycle)]
    inner: Any = algorithm
    while getattr(inner, "algorithm", None) is not None:  # `WireDtype`, `Zero`
        inner = inner.algorithm
    tensors = []
    for name, spec in specs.items():
        memory = state.tensors.get(name)
        alone = {name: spec}
        sent = [traffic(algorithm, alone, state.of(alone), start, phase).nbytes for phase in range(algorithm.cycle)]
        rank_of = getattr(inner, "rank_of", None)
        rank = rank_of(name, spec.shape) if rank_of and memory is not None else None
        tensors.append(TensorPlan(name, spec.shape, memory is not None, rank, spec.nbytes, _average(sent)))
    buckets: list[list[str]] = inner.buckets(specs) if hasattr(inner, "buckets") else []
    if bucket_cap_mb is not None:
        if buckets:
            raise ValueError(
                f"bucket_cap_mb={bucket_cap_mb}, but {algorithm!r} makes its own buckets; give one of them"
            )
        names = list(specs)[::-1]
        limits = bucket_limits(bucket_cap_mb, first_bucket_mb)
        buckets = [[names[i] for i in bucket] for bucket in assign_buckets([specs[n].nbytes for n in names], limits)]
    return Plan(
        algorithm,
        tuple(tensors),
        tuple(steps),
        sum(s.nbytes for s in specs.values()),
        tuple(BucketPlan(tuple(names), sum(specs[n].nbytes for n in names)) for names in buckets),
    )


def traffic(
    algorithm: Algorithm, specs: Mapping[str, Spec], state: State[AbstractArray], step: int, phase: int = 0
) -> Traffic:
    """Traffic of one step for these tensors, which may be a part of the model."""
    gradients = {name: AbstractArray(spec.shape, spec.dtype) for name, spec in specs.items()}
    program = algorithm.step(AbstractOps(), gradients, state.of(gradients), step)
    requests: list[Request] = []
    _run(program, requests, phase)
    sent = [p for r in requests for p in payloads(AbstractOps(), r)]
    return Traffic(len(sent), sum(sent))


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
    """
    hops = 2 * (world_size - 1)
    return traffic.collectives * hops * latency + hops / world_size * traffic.nbytes / bandwidth


def _run(program: Program[T], requests: list[Request], phase: int) -> T:
    answers: Any = None
    while True:
        try:
            request: Request = program.send(answers)
        except StopIteration as stop:
            result: T = stop.value
            return result
        requests.append(request)
        if isinstance(request, Mean):
            answers = request.arrays
        elif isinstance(request, ReduceScatter):
            answers = tuple(
                AbstractArray((counts[0],), x.dtype) for x, counts in zip(request.arrays, request.counts, strict=True)
            )
        elif isinstance(request, AllGather):
            answers = tuple(
                AbstractArray((sum(counts),), x.dtype) for x, counts in zip(request.arrays, request.counts, strict=True)
            )
        elif isinstance(request, Replica):
            answers = (0,)
        elif isinstance(request, Total):
            answers = (request.array,)
        elif isinstance(request, Update):
            answers = (request.pieces,)
        elif isinstance(request, Orthonormalize):
            answers = request.arrays
        elif isinstance(request, Finite):
            answers = (AbstractArray((), "bool"),)
        elif isinstance(request, Branch):
            # The only predicates without data are those on the phase: the first `then` belongs to phase 0, and so on.
            side, phase = (request.then, 0) if phase == 0 else (request.otherwise, phase - 1)
            answers = (_run(side(*request.operands), requests, phase),)
        else:
            raise TypeError(f"a plan cannot answer {request!r}")


def _average(numbers: list[Any]) -> float:
    average = sum(numbers) / len(numbers)
    return int(average) if average == int(average) else float(average)
