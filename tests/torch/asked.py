"""Requests of every kind, with what the core says that each of several ranks is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import State
from gradwire.core.protocol import branch, mean, setting
from gradwire.core.protocol.exchanges import AllToAll, Gather
from gradwire.core.protocol.halves import AllGather, ReduceScatter
from gradwire.core.protocol.local_requests import ReplicaIndex, WorldSize
from gradwire.core.protocol.reductions import Reduce
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.torch.compare import same_bits

#: Of this many ranks: groups of any size, and groups of one size, in an order that is not that of
#: the ranks.
RANKS = 3
UNEVEN = ((2, 0), (1,))
EVEN = ((2, 0, 1),)
EACH = ((2,), (0,), (1,))

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32)
SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)


def tensors(rank, size, dtypes, rows=False):
    """Some tensors of each dtype, one of them empty, one a scalar or a vector, one in another order
    in memory; other numbers on each rank."""
    draw = torch.Generator().manual_seed(rank)
    shapes = (
        [(size, 3), (size,), (size, 0, 2), (size, 2, 4)]
        if rows
        else [(3, 5), (), (0, 4), (2, 1, 4)]
    )
    made = []
    for dtype in dtypes:
        for shape in shapes:
            x = torch.randn(shape[::-1], generator=draw) * 40
            x = x.to(torch.int32).to(dtype) if dtype in INTEGERS else x.to(dtype)
            made.append(x.permute(list(range(len(shape)))[::-1]))
    return tuple(made)


def parts(rank, counts, dtypes, whole):
    """Vectors of all their parts, or of this rank's."""
    draw = torch.Generator().manual_seed(rank)
    return tuple(
        torch.randn(sum(n) if whole else n[rank], generator=draw).to(dtype)
        for n, dtype in zip(counts, dtypes, strict=True)
    )


COUNTS = (tuple(range(RANKS)), (2,) * RANKS, (0,) * RANKS, (5, *[0] * (RANKS - 1)))
TWICE = FLOATS[:2] * 2


def reduce(op, dtypes, groups=None):
    def make(rank):
        arrays = tensors(rank, RANKS, dtypes)
        return Reduce(arrays, (False,) * len(arrays), False, groups, op=op)

    return make


def exchange(dtypes, groups=None):
    members = len(groups[0]) if groups else RANKS
    return lambda rank: AllToAll(tensors(rank, members, dtypes, rows=True), groups)


def all_gather_(groups=None):
    def make(rank):
        own = parts(groups[0].index(rank) if groups else rank, COUNTS, FLOATS, whole=False)
        return AllGather(
            own, COUNTS, (None, torch.zeros(2 * RANKS, dtype=FLOATS[1]), None, None), groups
        )

    return make


def of_any(what, dtypes, groups=None):
    return lambda rank: what(tensors(rank, RANKS, dtypes), False, groups)


#: What a rank asks.
ASKED = {
    "means": reduce("mean", FLOATS[:2]),
    "means in groups": reduce("mean", FLOATS[:2], UNEVEN),
    "sums": reduce("sum", (*INTEGERS, *FLOATS[:2])),
    "sums in groups": reduce("sum", INTEGERS, UNEVEN),
    "maxima": reduce("max", (*INTEGERS, *FLOATS)),
    "maxima in groups": reduce("max", (torch.int8, torch.float32), UNEVEN),
    "a gather": of_any(Gather, (*FLOATS, *INTEGERS, *SMALL)),
    "a gather in groups": of_any(Gather, (torch.float32, *SMALL), EVEN),
    "a gather alone": of_any(Gather, (torch.float32,), EACH),
    "an all-to-all": exchange((*FLOATS, *INTEGERS, *SMALL)),
    "an all-to-all in groups": exchange((torch.float16, torch.int8), EVEN),
    "an all-to-all alone": exchange((torch.float16,), EACH),
    "an all-to-all of parts": lambda rank: AllToAll(
        parts(rank, COUNTS, TWICE, whole=True), None, COUNTS
    ),
    "an all-to-all of parts in groups": lambda rank: AllToAll(
        parts(rank, COUNTS, TWICE, whole=True), EVEN, COUNTS
    ),
    "a reduce-scatter": lambda rank: ReduceScatter(
        parts(rank, COUNTS, TWICE, whole=True), COUNTS, None
    ),
    "a reduce-scatter in groups": lambda rank: ReduceScatter(
        parts(rank, COUNTS, TWICE, whole=True), COUNTS, EVEN
    ),
    "an all-gather": all_gather_(),
    "an all-gather in groups": all_gather_(EVEN),
    "the number of ranks": lambda rank: WorldSize(),
    "the number in a group": lambda rank: WorldSize(EVEN),
    "the rank": lambda rank: ReplicaIndex(),
    "the rank in a group": lambda rank: ReplicaIndex(UNEVEN),
}


@dataclass
class Answered:
    """What a rank saw.

    Attributes:
        answers: on the CPU.
        sent, planned: messages and bytes.
        untouched: whether arrays that are not donated hold what they held.
    """

    answers: tuple[Any, ...]
    sent: list[int]
    planned: list[int]
    untouched: bool


def answered(name: str, group: dist.ProcessGroup, device: torch.device) -> Answered:
    """Ask on this rank."""
    request = ASKED[name](dist.get_rank(group))
    if hasattr(request, "arrays"):
        request.arrays = tuple(x.to(device) for x in request.arrays)
    if hasattr(request, "out"):
        request.out = tuple(None if x is None else x.to(device) for x in request.out)
    arrays = getattr(request, "arrays", ())
    before = [x.clone() for x in arrays]
    ops = TorchOps(device)
    collectives = Collectives(ProcessGroups(group, [request.groups]), ops)
    planned = request.payloads(ops, RANKS)
    answer = collectives.perform(request)
    answers = answer if isinstance(answer, tuple) else answer.wait()
    untouched = isinstance(request, (ReduceScatter, AllGather)) or all(
        same_bits(x.cpu(), y.cpu()) for x, y in zip(arrays, before, strict=True)
    )
    on_the_host = tuple(x.cpu() if isinstance(x, Tensor) else x for x in answers)
    return Answered(
        on_the_host, [collectives.sent.collectives, collectives.sent.nbytes], planned, untouched
    )


class World:
    finite = True

    def give(self, donated):
        pass


def expected(make):
    """In NumPy, which lacks some dtypes: those are exchanged as bytes, and compared in float32
    where a maximum is taken."""
    requests = [make(rank) for rank in range(RANKS)]
    for r in requests:
        if hasattr(r, "arrays"):
            exchanged = isinstance(r, (Gather, AllToAll)) and not getattr(r, "counts", ())
            r.arrays = tuple(as_numpy_bytes(x) if exchanged else to_numpy(x) for x in r.arrays)
        if hasattr(r, "out"):
            r.out = (None,) * len(r.arrays)
    return type(requests[0]).simulate(requests, World())


def to_numpy(x):
    return x.float().numpy() if x.dtype is torch.bfloat16 else x.numpy()


def as_numpy_bytes(x):
    if not x.numel():
        return x.new_empty((*x.shape, x.itemsize), dtype=torch.uint8).numpy()
    return x.contiguous().unsqueeze(-1).view(torch.uint8).numpy()


def require_right(name: str, seen: list[Answered]) -> None:
    """Whether each rank was answered what the core says, and has sent what the request says."""
    for rank, (own, answers) in enumerate(zip(seen, expected(ASKED[name]), strict=True)):
        assert own.sent == [len(own.planned), sum(own.planned)]
        assert own.untouched
        dtypes = [getattr(x, "dtype", None) for x in getattr(ASKED[name](rank), "arrays", ())]
        for i, (x, y) in enumerate(zip(own.answers, answers, strict=True)):
            if isinstance(x, int):
                assert (type(x), x) == (int, y)
                continue
            assert x.dtype == dtypes[i]
            if name.startswith(("a gather", "an all-to-all")) and "parts" not in name:
                np.testing.assert_array_equal(as_numpy_bytes(x), y)
            elif (
                name.startswith(("maxima", "an all-gather", "an all-to-all"))
                or dtypes[i] in INTEGERS
            ):
                np.testing.assert_array_equal(to_numpy(x), y)
            else:
                np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5)


@dataclass(frozen=True)
class Scaling:
    """The mean times what is said of the step; in a branch too."""

    name: str = "scale"
    default: float = 1.0
    per_replica = frozenset()
    start_step = 0
    cycle = 1

    def init(self, ops, specs):
        return State()

    async def step(self, ops, gradients, state, step):
        async def scaled(x):
            return x * ops.cast(await setting(ops, self.name, self.default), ops.dtype_of(x))

        return {
            n: await branch(step < 100, scaled, mean, await mean(g)) for n, g in gradients.items()
        }, state
