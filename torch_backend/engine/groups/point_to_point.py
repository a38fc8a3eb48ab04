"""How ranks send each other parts of a vector, with the library that they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.torch_backend.torch_internals import (
    all_gather_single,
    reduce_scatter_single,
    store_of,
)

T = TypeVar("T")

#: The library that has all collectives.
NCCL = "nccl"
#: Tags of messages between two ranks, apart from those that a program may use itself.
FIRST_TAG = 0x67720000
#: Bytes that a rank of a chain hands on while it receives the next.
SLICE_BYTES = 1 << 18


class Exchange:
    """The exchanges within a group. The same calls in the same order on all of its ranks; each
    returns what to wait for.

    NCCL has all of them. Gloo's reduce-scatter sums everything everywhere and throws most of it
    away, and its all-gather takes as long as an all-reduce; so on the CPU ranks send each other
    their parts directly, from where they lie to where they belong. The same bytes as half of a ring
    all-reduce, in half the time. A part that is much larger than those of the others would leave
    its owner once for each of them: it goes along a chain of all ranks, of which each sends it
    once. Gloo cannot do that with CUDA tensors, for which all-to-all and broadcasts serve.

    Args:
        rank: of this rank in the group, where that does not know it; torchft's say 0 always.
        numbers: torch's numbers of the group's ranks, in the order in which they are counted here.
            None: that is torch's order.

    Attributes:
        group, size, rank: of this rank.
        native: the library sums the parts for their owners. Otherwise the addends are exchanged.
        direct: ranks send each other their parts by themselves.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        rank: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        own = group.rank() if rank is None else rank
        self.rank = own if numbers is None else numbers.index(own)
        self._numbers = range(self.size) if numbers is None else numbers
        #: Where parts lie in torch's order. It is given to libraries by itself where it is the
        #: same.
        self._sorted = (
            None if numbers is None else sorted(range(self.size), key=numbers.__getitem__)
        )
        self.direct = device.type == "cpu"
        # Not `dist.get_backend`: a group may have one library for each kind of device
        # ("cpu:gloo,cuda:nccl"). One whose members come and go is not registered.
        self._registered = store_of(group) is not None
        self.native = self._registered and f"{device.type}:{NCCL}" in dist.get_backend_config(
            group
        ).split(",")
        self._tags = count()

    def gather(self, whole: Tensor, counts: Sequence[int]) -> list[Any]:
        """The part of each rank, of so many elements, to all others. Parts lie in `whole`, a
        vector, where this rank's is already."""
        parts = torch.split(whole, list(counts))
        own = parts[self.rank]
        if self.direct:
            chained = self.find_chained(counts)
            received = {r: part for r, part in self._others(parts).items() if r not in chained}
            others = {} if self.rank in chained else self._others(parts)
            works = self._messages(dict.fromkeys(others, own), received)
            return works + [self._chain(parts[owner], owner) for owner in chained]
        if len(set(counts)) == 1 and self._registered and self._sorted is None:
            return [
                all_gather_single(as_bytes(whole), as_bytes(own), group=self.group, async_op=True)
            ]
        if len(set(counts)) == 1:  # torchft's groups have no gather into one tensor
            into = [as_bytes(x) for x in self._in_torchs_order(parts)]
            return [dist.all_gather(into, as_bytes(own), group=self.group, async_op=True)]
        return [
            dist.broadcast(
                as_bytes(part), group_src=self._numbers[source], group=self.group, async_op=True
            )
            for source, part in enumerate(parts)
            if part.numel()
        ]

    def swap(
        self, given: Tensor, sent: Sequence[int], received: Tensor, counts: Sequence[int]
    ) -> list[Any]:
        """Send to each rank its part of the vector `given`, of `sent` elements, and receive from
        each `counts` elements of the vector `received`. Where that is `direct`, this rank may
        expect nothing of itself."""
        if self.direct:
            to, fro = torch.split(given, list(sent)), torch.split(received, list(counts))
            if counts[self.rank]:
                fro[self.rank].copy_(to[self.rank])
            return self._messages(self._others(to), self._others(fro))
        if self._sorted is None:
            return [self._all_to_all(given, sent, received, counts)]
        leaves, arrives = (
            torch.cat(self._in_torchs_order(torch.split(given, list(sent)))),
            torch.empty_like(received),
        )
        work = self._all_to_all(
            leaves, self._in_torchs_order(sent), arrives, self._in_torchs_order(counts)
        )
        return [
            _Copying(
                work, leaves, arrives, self._in_torchs_order(torch.split(received, list(counts)))
            )
        ]

    def _all_to_all(
        self, given: Tensor, sent: Sequence[int], received: Tensor, counts: Sequence[int]
    ) -> Any:
        size = given.element_size()
        to, fro = [n * size for n in sent], [n * size for n in counts]
        return dist.all_to_all_single(
            as_bytes(received), as_bytes(given), fro, to, group=self.group, async_op=True
        )

    def sum_for_owners(self, x: Tensor, counts: Sequence[int]) -> list[Any]:
        """The parts of `x` summed over all ranks, each where it lies on the rank that owns it. Only
        where that is `native`."""
        parts = torch.split(x, list(counts))
        if len(set(counts)) == 1 and self._sorted is None:
            return [reduce_scatter_single(parts[self.rank], x, group=self.group, async_op=True)]
        # One by one, and not by all-to-all: who owns much would need room for everybody's addends.
        return [
            dist.reduce(part, group_dst=self._numbers[owner], group=self.group, async_op=True)
            for owner, part in enumerate(parts)
            if part.numel()
        ]

    def find_chained(self, counts: Sequence[int]) -> list[int]:
        """The owners of parts, of so many elements, that go along a chain: those of more than twice
        the mean."""
        return [r for r, n in enumerate(counts) if self.direct and n * self.size > 2 * sum(counts)]

    def mean_for_owner(self, part: Tensor, owner: int) -> Any:
        """The mean of a `part` over all ranks, where it lies on the rank that owns it: a chain that
        ends there, whose ranks add theirs. The part of the others is written over."""
        factor, first = 1.0 / self.size, (owner + 1) % self.size
        part_of = torch.split(part, _slice_elements(part))
        if self.rank == first:
            part.mul_(factor)
            return self._chain(part, first)
        received = torch.empty_like(part)
        sums = torch.split(received, _slice_elements(part))

        def add(i: int) -> None:
            # Each addend is divided, and not the sum: a sum of large float16 gradients would
            # overflow.
            own, total = part_of[i].mul_(factor), sums[i]
            if self.rank == owner:
                own.add_(total)
            else:
                total.add_(own)

        return self._chain(received, first, add)

    def _chain(
        self, vector: Tensor, first: int, change: Callable[[int], None] | None = None
    ) -> Any:
        """A vector from the `first` rank to the next and so on, through all. Each may `change` a
        slice, by its number, before it hands that on."""
        place = (self.rank - first) % self.size
        before = self._numbers[self.rank - 1] if place else None
        after = self._numbers[(self.rank + 1) % self.size] if place < self.size - 1 else None
        slices = [as_bytes(x) for x in torch.split(vector, _slice_elements(vector))]
        tags = [FIRST_TAG + next(self._tags) % 0x8000 for _ in slices]
        return _Chain(self.group, slices, tags, before, after, change)

    def _others(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        return {r: part for r, part in enumerate(parts) if r != self.rank}

    def _messages(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[Any]:
        """Start to send and receive, each by the other's rank. Empty messages are not sent."""
        tag, group = FIRST_TAG + next(self._tags) % 0x8000, self.group
        numbers = self._numbers
        works = [
            group.recv([as_bytes(x)], numbers[r], tag) for r, x in received.items() if x.numel()
        ]
        return works + [
            group.send([as_bytes(x)], numbers[r], tag) for r, x in sent.items() if x.numel()
        ]

    def _in_torchs_order(self, parts: Sequence[T]) -> list[T]:
        return list(parts) if self._sorted is None else [parts[i] for i in self._sorted]


class _Copying:
    """Work whose parts arrive in another order than they are wanted in: a vector of them, and where
    they belong."""

    def __init__(
        self, work: Any, leaves: Tensor, arrives: Tensor, places: Sequence[Tensor]
    ) -> None:
        self._work, self._leaves, self._arrives, self._places = work, leaves, arrives, places

    def wait(self) -> None:
        self._work.wait()
        for place, part in zip(
            self._places, torch.split(self._arrives, [x.numel() for x in self._places]), strict=True
        ):
            place.copy_(part)


class _Chain:
    """Slices that this rank receives from the one before it, if there is one, and sends to the one
    after it, while it is waited for. All ranks wait for their messages in one order."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        slices: Sequence[Tensor],
        tags: Sequence[int],
        before: int | None,
        after: int | None,
        change: Callable[[int], None] | None,
    ) -> None:
        self._group, self._after, self._change = group, after, change
        arrives = [
            None if before is None else group.recv([x], before, tag)
            for x, tag in zip(slices, tags, strict=True)
        ]
        self._due = list(zip(slices, tags, arrives, strict=True))[::-1]
        self._sent: list[Any] = []
        if before is None:
            self._hand_on()

    def _hand_on(self) -> None:
        slices = len(self._due)
        while self._due:
            x, tag, arrives = self._due.pop()
            if arrives is not None:
                arrives.wait()
            if self._change is not None:
                self._change(slices - len(self._due) - 1)
            if self._after is not None:
                self._sent.append(self._group.send([x], self._after, tag))

    def wait(self) -> None:
        self._hand_on()
        for work in self._sent:
            work.wait()


def _slice_elements(x: Tensor) -> int:
    return max(1, SLICE_BYTES // x.element_size())


def as_bytes(x: Tensor) -> Tensor:
    """The same memory: libraries do not know all dtypes that may be sent."""
    return x.view(torch.uint8)
