"""The process groups of R replicas in one process: real drivers, real messages, nobody to send them
to.

    world = World(4)
    drivers = world.on_each(lambda rank: Driver(algorithm, specs, device, world.groups(rank)))
    world.on_each(lambda rank: drivers[rank].add(gradients[rank], first=True, last=True))

Each replica is a thread, of which one runs at a time: it runs until it waits for a message that
another has not sent, and then the next one does. Current device and stream, autocast and default
device are those of who starts them. Sums have the bits of Gloo's all-reduce on the CPU.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.protocol.groups import Groups
from gradwire.torch_backend.advise.compare.of_a_thread import settings_of_this_thread
from gradwire.torch_backend.engine.groups.point_to_point import Exchange
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups

T = TypeVar("T")

#: Gloo sends no larger pieces of a vector.
PIECE = 1 << 20


class OtherReplicaFailed(RuntimeError):
    """Another replica has raised, so this one waits in vain."""


class World:
    """A world of so many replicas. `groups(rank)` is what a driver of this replica is given.

    Args:
        size: how many.
        enter, leave: called with the number of a replica when it begins to run, and when it has
            run, until it waits or has ended.
    """

    def __init__(
        self,
        size: int,
        enter: Callable[[int], object] = lambda rank: None,
        leave: Callable[[int], object] = lambda rank: None,
    ) -> None:
        self.size, self._enter, self._leave = size, enter, leave
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._ended = threading.Semaphore(0)
        self._running = [False] * size
        self._errors: list[BaseException] = []
        self._posted: dict[Any, dict[int, Any]] = {}
        self._in_vain = 0

    def groups(self, rank: int) -> ProcessGroups:
        """The process groups of one replica."""
        return _Groups(self, rank)

    def on_each(self, function: Callable[[int], T]) -> list[T]:
        """What the function returns for each replica. Raises what the first that fails raises."""
        results: list[Any] = [None] * self.size
        self._running, self._errors, self._in_vain = [True] * self.size, [], 0
        self._posted = {}
        as_here = settings_of_this_thread()

        def run(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                with as_here():
                    self._enter(rank)
                    results[rank] = function(rank)
                    self._leave(rank)
            except BaseException as error:  # of which there is one thread to tell
                self._errors.append(error)
            self._running[rank] = False
            self._in_vain = 0
            following = self._after(rank)
            (self._ended if following is None else self._turns[following]).release()

        for rank in range(self.size):
            threading.Thread(target=run, args=(rank,), daemon=True, name=f"replica {rank}").start()
        self._turns[0].release()
        try:
            self._ended.acquire()
        except BaseException as stopped:  # ctrl-C: no replica may go on in what is done next
            self._errors.append(stopped)
            self._ended.acquire()
            raise
        if self._errors:
            raise self._errors[0]
        return results

    def pause(self, rank: int) -> None:
        """Let the others run. Raises RuntimeError if none of them can."""
        self._require_no_error()
        following = self._after(rank)
        self._in_vain += 1
        if following is None or self._in_vain > self.size:
            raise RuntimeError(f"replica {rank} waits for a message that no other sends")
        self._leave(rank)
        self._turns[following].release()
        self._turns[rank].acquire()
        self._require_no_error()
        self._enter(rank)

    def post(
        self,
        key: Any,
        members: Sequence[int],
        place: int,
        what: Any,
        deliver: Callable[[list[Any]], None],
    ) -> _Work:
        """Send something; who sends last delivers what all members have sent, in their order."""
        self._in_vain = 0
        posted = self._posted.setdefault(key, {})
        posted[place] = what
        if len(posted) == len(members):
            del self._posted[key]
            deliver([posted[i] for i in range(len(members))])
            posted.clear()
        return _Work(self, members[place], posted)

    def _after(self, rank: int) -> int | None:
        others = [(rank + k) % self.size for k in range(1, self.size)]
        return next((other for other in others if self._running[other]), None)

    def _require_no_error(self) -> None:
        if self._errors:
            raise OtherReplicaFailed("another replica has raised") from self._errors[0]


class _Work:
    """A message. It has arrived when nothing waits to be delivered."""

    def __init__(self, world: World, rank: int, posted: dict[int, Any]) -> None:
        self._world, self._rank, self._posted = world, rank, posted

    def wait(self) -> bool:
        while self._posted:
            self._world.pause(self._rank)
        return True


class _Group:
    """What `torch.distributed` is given in place of a process group. No message waits behind
    another."""

    def __init__(self, world: World, members: tuple[int, ...], rank: int) -> None:
        self.world, self.members, self.place = world, members, members.index(rank)
        self._sent = 0

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self.place

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        reduced = _largest if options.reduceOp == dist.ReduceOp.MAX else ring_sum

        def deliver(everyones: list[Tensor]) -> None:
            result = reduced([x.view(-1) for x in everyones])
            for x in everyones:
                x.view(-1).copy_(result)

        return self.post(tensors[0], deliver)

    def post(self, what: Any, deliver: Callable[[list[Any]], None]) -> _Work:
        """Send something to all members."""
        self._sent += 1
        return self.world.post((self.members, self._sent), self.members, self.place, what, deliver)


class _Groups(ProcessGroups):
    """Any partition of the replicas, for one of them."""

    in_one_process = True

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._made: dict[tuple[int, ...], _Group] = {}
        self.whole: Any = self[None]

    @property
    def rank(self) -> int:
        return self._rank

    def anew(self) -> ProcessGroups:
        return self

    def __getitem__(self, groups: Groups | None) -> Any:
        everybody = (tuple(range(self._world.size)),)
        (members,) = [tuple(each) for each in groups or everybody if self._rank in each]
        if members not in self._made:
            self._made[members] = _Group(self._world, members, self._rank)
        return self._made[members]

    def exchange(self, groups: Groups | None, device: torch.device) -> Exchange:
        return _Exchange(self[groups])


class _Exchange(Exchange):
    """Parts of tensors are copied from where they lie to where they belong."""

    def __init__(self, group: Any) -> None:
        self.group, self._members = group, group
        self.size, self.rank = group.size(), group.rank()
        self.native, self.direct = False, True

    def chained(self, counts: Sequence[int]) -> list[int]:
        return []  # nobody sends anything

    def gather(self, whole: Tensor, counts: Sequence[int]) -> list[Any]:
        def deliver(everyones: list[Tensor]) -> None:
            parts = [torch.split(each, list(counts)) for each in everyones]
            for rank, mine in enumerate(parts):
                for other, part in enumerate(mine):
                    if other != rank:
                        part.copy_(parts[other][other])

        return [self._members.post(whole, deliver)]

    def swap(
        self, given: Tensor, sent: Sequence[int], received: Tensor, counts: Sequence[int]
    ) -> list[Any]:
        def deliver(everyones: list[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
            for rank, (_, mine) in enumerate(everyones):
                for part, (theirs, _) in zip(mine, everyones, strict=True):
                    if part.numel():
                        part.copy_(theirs[rank])

        return [
            self._members.post(
                (torch.split(given, list(sent)), torch.split(received, list(counts))), deliver
            )
        ]


def ring_sum(vectors: Sequence[Tensor]) -> Tensor:
    """The sum of one vector of each rank, with the bits of Gloo's ring: in a chunk of its own each
    rank comes last, after those below it from the one before the first, downwards."""
    ranks, n, itemsize = len(vectors), vectors[0].numel(), vectors[0].element_size()
    if ranks == 1:
        return vectors[0].clone()
    segments = math.ceil(max(math.ceil(n * itemsize / PIECE), 2 * ranks) / ranks) * ranks
    chunk = segments // ranks * math.ceil(math.ceil(n * itemsize / segments) / itemsize)
    total = torch.empty_like(vectors[0])
    for c in range(ranks):
        part = slice(min(c * chunk, n), min((c + 1) * chunk, n))
        torch.add(vectors[(c - 1) % ranks][part], vectors[(c - 2) % ranks][part], out=total[part])
        for k in range(3, ranks + 1):
            total[part].add_(vectors[(c - k) % ranks][part])
    return total


def _largest(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).amax(0)
