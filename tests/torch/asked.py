"""Requests of every kind, with what the core says that each of several ranks is answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.protocol.collective_requests import AllGather, AllToAll, Gather, Reduce, ReduceScatter
from gradwire.core.protocol.local_requests import ReplicaIndex, WorldSize
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.torch.compare import same_bits

#: Of this many ranks: groups of any size, and groups of one size, in an order that is not that of the ranks.
RANKS = 3
UNEVEN = ((2, 0), (1,))
EVEN = ((2, 0, 1),)
EACH = ((2,), (0,), (1,))

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32)
SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)


def tensors(rank, size, dtypes, rows=False):
    """Some tensors of each dtype, one of them empty, one a scalar or a vector, one in another order in memory; other numbers on each rank."""
    draw = torch.Generator().manual_seed(rank)
    shapes = [(size, 3), (size,), (size, 0, 2), (size, 2, 4)] if rows else [(3, 5), (), (0, 4), (2, 1, 4)]
    made = []
    for dtype in dtypes:
        for shape in shapes:
            x = torch.randn(shape[::-1], generator=draw) * 40
            x = x.to(torch.int32).to(dtype) if dtype in INTEGERS else x.to(dtype)
            made.append(x.permute(list(range(len(shape)))[::-1]))
    return tuple(made)


def parts(rank, counts, dtypes, whole):
    draw = torch.Generator().manual_seed(rank)
    return tuple(
        torch.randn(sum(n) if whole else n[rank], generator=draw).to(dtype)
        for n, dtype in zip(counts, dtypes, strict=True)
    )


def counts_of(size):
    return (tuple(range(size)), (2,) * size, (0,) * size, (5, *[0] * (size - 1)))


def reduce(op, dtypes, groups=None):
    def make(rank, size):
        arrays = tensors(rank, size, dtypes)
        return Reduce(arrays, (False,) * len(arrays), False, groups, op=op)

    return make


def gather_(dtypes, groups=None):
    return lambda rank, size: Gather(tensors(rank, size, dtypes), False, groups)


def all_to_all_(dtypes, groups=None):
    def make(rank, size):
        members = len(groups[0]) if groups else size
        return AllToAll(tensors(rank, members, dtypes, rows=True), groups)

    return make


def all_to_all_parts_(groups=None):
    def make(rank, size):
        members = len(groups[0]) if groups else size
        counts = counts_of(members)
        return AllToAll(parts(rank, counts, FLOATS[:2] * 2, whole=True), groups, counts)

    return make


def reduce_scatter_(groups=None):
    def make(rank, size):
        members = len(groups[0]) if groups else size
        counts = counts_of(members)
        return ReduceScatter(parts(rank, counts, FLOATS[:2] * 2, whole=True), counts, groups)

    return make


def all_gather_(groups=None):
    def make(rank, size):
        members = next(m for m in groups if rank in m) if groups else range(size)
        counts = counts_of(len(members))
        own = parts(list(members).index(rank), counts, FLOATS, whole=False)
        return AllGather(own, counts, (None, torch.zeros(2 * len(members), dtype=FLOATS[1]), None, None), groups)

    return make


ASKED = {
    "means": reduce("mean", FLOATS[:2]),
    "means in groups": reduce("mean", FLOATS[:2], UNEVEN),
    "sums": reduce("sum", (*INTEGERS, *FLOATS[:2])),
    "sums in groups": reduce("sum", INTEGERS, UNEVEN),
    "maxima": reduce("max", (*INTEGERS, *FLOATS)),
    "maxima in groups": reduce("max", (torch.int8, torch.float32), UNEVEN),
    "a gather": gather_((*FLOATS, *INTEGERS, *SMALL)),
    "a gather in groups": gather_((torch.float32, *SMALL), EVEN),
    "a gather alone": gather_((torch.float32,), EACH),
    "an all-to-all": all_to_all_((*FLOATS, *INTEGERS, *SMALL)),
    "an all-to-all in groups": all_to_all_((torch.float16, torch.int8), EVEN),
    "an all-to-all alone": all_to_all_((torch.float16,), EACH),
    "an all-to-all of parts": all_to_all_parts_(),
    "an all-to-all of parts in groups": all_to_all_parts_(EVEN),
    "a reduce-scatter": reduce_scatter_(),
    "a reduce-scatter in groups": reduce_scatter_(EVEN),
    "an all-gather": all_gather_(),
    "an all-gather in groups": all_gather_(EVEN),
    "the number of ranks": lambda rank, size: WorldSize(),
    "the number in a group": lambda rank, size: WorldSize(EVEN),
    "the rank": lambda rank, size: ReplicaIndex(),
    "the rank in a group": lambda rank, size: ReplicaIndex(UNEVEN),
}


class Answered:
    """What a rank saw.

    Attributes:
        answers: on the CPU.
        sent, planned: messages and bytes.
        untouched: whether arrays that are not donated hold what they held.
    """

    def __init__(self, answers: tuple[Any, ...], sent: list[int], planned: list[int], untouched: bool) -> None:
        self.answers, self.sent, self.planned, self.untouched = answers, sent, planned, untouched


def answered(name: str, group: dist.ProcessGroup, device: torch.device) -> Answered:
    """Ask on this rank."""
    request = ASKED[name](dist.get_rank(group), dist.get_world_size(group))
    if hasattr(request, "arrays"):
        request.arrays = tuple(x.to(device) for x in request.arrays)
    if hasattr(request, "out"):
        request.out = tuple(None if x is None else x.to(device) for x in request.out)
    before = [x.clone() for x in getattr(request, "arrays", ())]
    ops = TorchOps(device)
    collectives = Collectives(ProcessGroups(group, [request.groups]), ops)
    planned = request.payloads(ops, dist.get_world_size(group))
    answer = collectives.perform(request)
    answers = answer if isinstance(answer, tuple) else answer.wait()
    kept = not isinstance(request, (ReduceScatter, AllGather))
    untouched = not kept or all(
        same_bits(x.cpu(), y.cpu()) for x, y in zip(getattr(request, "arrays", ()), before, strict=True)
    )
    on_the_host = tuple(x.cpu() if isinstance(x, Tensor) else x for x in answers)
    return Answered(on_the_host, [collectives.sent.collectives, collectives.sent.nbytes], planned, untouched)


def expected(make, size):
    """In NumPy, which lacks some dtypes: those are exchanged as bytes, and compared in float32 where a maximum is taken."""
    requests = [make(rank, size) for rank in range(size)]

    for r in requests:
        if hasattr(r, "arrays"):
            exchanged = isinstance(r, (Gather, AllToAll)) and not getattr(r, "counts", ())
            r.arrays = tuple(as_numpy_bytes(x) if exchanged else to_numpy(x) for x in r.arrays)
        if hasattr(r, "out"):
            r.out = (None,) * len(r.arrays)

    class World:
        finite = True

        def give(self, donated):
            pass

    return type(requests[0]).simulate(requests, World())


def to_numpy(x):
    return x.float().numpy() if x.dtype is torch.bfloat16 else x.numpy()


def as_numpy_bytes(x):
    return (
        x.contiguous().unsqueeze(-1).view(torch.uint8).numpy()
        if x.numel()
        else x.new_empty((*x.shape, x.itemsize), dtype=torch.uint8).numpy()
    )


def require_right(name: str, seen: list[Answered]) -> None:
    """Whether each rank was answered what the core says, and has sent what the request says."""
    ranks = len(seen)
    for rank, (own, answers) in enumerate(zip(seen, expected(ASKED[name], ranks), strict=True)):
        assert own.sent == [len(own.planned), sum(own.planned)]
        assert own.untouched
        dtypes = [getattr(x, "dtype", None) for x in getattr(ASKED[name](rank, ranks), "arrays", ())]
        for i, (x, y) in enumerate(zip(own.answers, answers, strict=True)):
            if isinstance(x, int):
                assert (type(x), x) == (int, y)
                continue
            assert x.dtype == dtypes[i]
            if name.startswith(("a gather", "an all-to-all")) and "parts" not in name:
                np.testing.assert_array_equal(as_numpy_bytes(x), y)
            elif name.startswith(("maxima", "an all-gather", "an all-to-all")) or dtypes[i] in INTEGERS:
                np.testing.assert_array_equal(to_numpy(x), y)
            else:
                np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
