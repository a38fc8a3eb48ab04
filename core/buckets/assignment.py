"""Which tensors share a message.

Many small tensors are sent as a few flat *buckets*, so that latency is a small part of a
collective, and several of them, so that the first can be on its way while the last gradients are
still being computed (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", §3.2).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated

from gradwire.core.ops import Spec
from gradwire.core.text.options import AtLeast0, checked, more_than

MIB = 1 << 20
#: A size in MiB.
Mebibytes = Annotated[float, more_than(0, 1 << 20)]


@checked
def assign_buckets(
    sizes: Sequence[AtLeast0],
    limits: Sequence[AtLeast0],
    keys: Sequence[Hashable] | None = None,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split tensors into buckets as DDP does (c10d's `compute_bucket_assignment_by_size`).

    Walk the tensors in order. Each key fills a bucket of its own, which is closed by the tensor
    that brings it to the key's current limit; the key's next bucket has the next limit, and the
    last limit repeats. So a bucket exceeds its limit by less than its last tensor.

        >>> assign_buckets([40, 40, 40, 40], limits=[40, 80])
        [[0], [1, 2], [3]]

    Args:
        sizes: of each tensor, in bytes. Zero is allowed.
        limits: in bytes, one for each bucket of a key, the last one for all further ones. DDP's are
            [1 MiB, 25 MiB].
        keys: of each tensor; only tensors of equal keys share a bucket. Usually its (dtype,
            device). None: all are alike.
        order: in which to walk the tensors, if not as they are numbered: the order in which
            gradients arrived.

    Returns:
        The indices of the tensors in each bucket. Without `order`, buckets are sorted by their
        first index; with it, they come in the order in which they were closed, and those that no
        tensor closed come last.

    Raises:
        ValueError: no limits, something negative, a number of keys that is not that of sizes, or an
            `order` that is not a permutation.
    """
    if not limits:
        raise ValueError("limits=[] says no size; give at least one, in bytes")
    if keys is not None and len(keys) != len(sizes):
        raise ValueError(f"{len(keys)} keys for {len(sizes)} sizes; give one for each tensor")
    if order is not None and sorted(order) != list(range(len(sizes))):
        raise ValueError(f"order={list(order)} does not name each of the {len(sizes)} tensors once")
    closed: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    turn: dict[Hashable, int] = {}
    for i in range(len(sizes)) if order is None else order:
        key = None if keys is None else keys[i]
        open_.setdefault(key, []).append(i)
        filled[key] = filled.get(key, 0) + sizes[i]
        limit = turn.setdefault(key, 0)
        if filled[key] >= limits[limit]:
            closed.append(open_.pop(key))
            filled[key] = 0
            turn[key] = min(limit + 1, len(limits) - 1)
    closed.extend(open_.values())
    return closed if order is not None else sorted(closed, key=min)


@checked
def bucket_limits(bucket_cap_mb: Mebibytes, first_bucket_mb: Mebibytes) -> list[int]:
    """`limits` in bytes for buckets of so many MiB, the first one of a dtype closed earlier. Raises
    ValueError for a size that is not positive."""
    return [int(min(first_bucket_mb, bucket_cap_mb) * MIB), int(bucket_cap_mb * MIB)]


def ddp_buckets(
    specs: Mapping[str, Spec], bucket_cap_mb: Mebibytes = 25, first_bucket_mb: Mebibytes = 1
) -> list[list[str]]:
    """The buckets in which DDP hands gradients over, if they arrive in reverse order of the
    parameters: names, those of one dtype together. Raises ValueError as `bucket_limits`."""
    names = list(specs)[::-1]
    assigned = assign_buckets(
        [specs[n].nbytes for n in names],
        bucket_limits(bucket_cap_mb, first_bucket_mb),
        keys=[specs[n].dtype for n in names],
    )
    return [[names[i] for i in bucket] for bucket in assigned]
