"""The batches of a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def endless(batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Batches, begun again where they end; a `DistributedSampler` is told the epoch. Raises
    ValueError if there are none."""
    loader, epoch, fresh = batches(), 0, True
    while True:
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        count = 0
        for batch in loader:
            count += 1
            yield batch
        if count:
            epoch, fresh = epoch + 1, False
        elif fresh:
            raise ValueError(
                "batches(replica, replicas) gives no batch; give a DataLoader, or another iterable"
            )
        else:  # an iterator, which has come to its end
            loader, fresh = batches(), True
