"""Keys in the store that all ranks of a group share: many read at once, and what one finds out for
all.

The store is one process with one thread, which the launcher and NCCL ask as well. What every rank
asks about every other rank are W² requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count

import torch.distributed as dist

from gradwire.torch_backend.torch_internals import reads_many

#: Whoever has claimed to find something out, and has not said it after so long, is taken for dead.
CLAIMED = timedelta(seconds=2)


def read_all(store: dist.Store, keys: Sequence[str]) -> list[bytes | None]:
    """The values of keys, in one request where the store can; None for one that nobody has set."""
    there = set(keys) - {keys[i] for i in missing(store, keys)}
    wanted = [key for key in keys if key in there]
    if not wanted:
        values: list[bytes] = []
    elif reads_many(store):
        values = store.multi_get(wanted)
    else:
        values = [store.get(key) for key in wanted]
    found = dict(zip(wanted, values, strict=True))
    return [found.get(key) for key in keys]


def missing(store: dist.Store, keys: Sequence[str]) -> list[int]:
    """The positions of the keys that nobody has set, in requests that grow with their number and
    not with that of `keys`."""

    def within(first: int, stop: int) -> Iterator[int]:
        if first == stop or store.check(list(keys[first:stop])):
            return
        if stop - first == 1:
            yield first
            return
        middle = (first + stop) // 2
        yield from within(first, middle)
        yield from within(middle, stop)

    return list(within(0, len(keys)))


def claimed(store: dist.Store, key: str, rank: int) -> bool:
    """Whether this rank is the first to claim a key."""
    return bool(store.compare_set(key, "", str(rank)) == str(rank).encode())


def found_by_one(store: dist.Store, key: str, rank: int, find: Callable[[], str]) -> str:
    """What one rank finds out, for all: the first that asks. If it dies meanwhile, the next
    does."""
    for attempt in count():
        if claimed(store, f"{key}/claimed/{attempt}", rank):
            found = find()
            store.set(key, found)
            return found
        try:
            store.wait([key], CLAIMED)
        except RuntimeError:  # it has not come; a store that is gone says so to the next request
            continue
        return store.get(key).decode()
    raise AssertionError
