"""Signs of small tensors, each with one number of its own, packed and added up as those of one
matrix: for XLA bits are many operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradwire.core.kernels import signs
from gradwire.jax_backend.ops.batched_small import LARGE
from gradwire.jax_backend.ops.packing import LANES
from gradwire.jax_backend.ops.storage import MOST_JOINED

Shape = tuple[int, ...]

#: Elements of the largest array that is copied to be one with others.
SMALL = 1 << 19


def joined(ops: Any, shapes: Sequence[Shape], sharing: Sequence[Shape]) -> list[int]:
    """Which of these arrays are rows of one matrix: those of whole rows of lanes to each number,
    and small ones alone, since that is a copy."""
    found, room = list[int](), min(ops.storage.max_joined, MOST_JOINED)
    for i, (shape, numbers) in enumerate(zip(shapes, sharing, strict=True)):
        size, each = math.prod(shape), math.prod(shape) // math.prod(numbers)
        if (
            math.prod(numbers[1:]) == 1
            and each % LANES == 0
            and 0 < each <= LARGE
            and size <= min(room, SMALL)
        ):
            found.append(i)
            room -= size
    return found if len(found) > 1 else []


def pack_signs(ops: Any, xs: Sequence[jax.Array], sharing: Sequence[Shape]) -> list[jax.Array]:
    """`Ops.pack_signs`: the bits of what is joined first."""
    some = joined(ops, [tuple(x.shape) for x in xs], sharing)
    rows = [jnp.concatenate([xs[i].reshape(-1, LANES) for i in some])] if some else []
    beside = set(some)
    return signs.pack_signs(ops, [*rows, *(x for i, x in enumerate(xs) if i not in beside)])


def sum_of_signs(
    ops: Any,
    every: Sequence[jax.Array],
    above: Sequence[jax.Array],
    below: Sequence[jax.Array],
    shapes: Sequence[Shape],
    sharing: Sequence[Shape],
) -> list[jax.Array]:
    """`Ops.sum_of_signs`, of what `pack_signs` packed."""
    some = joined(ops, shapes, sharing)
    replicas = every[0].shape[0]
    numbers = [signs.beside(each, sharing, (replicas,)) for each in (above, below)]
    beside = set(some)
    rest = [i for i in range(len(shapes)) if i not in beside]
    high, low = ([x[i].reshape(replicas, -1) for i in rest] for x in numbers)
    kinds, lies = [sharing[i] for i in rest], [shapes[i] for i in rest]
    if not some:
        return signs.sum_of_signs(ops, every, high, low, lies, kinds)
    counts = [math.prod(shapes[i]) // LANES for i in some]
    rows = sum(counts)
    high_rows, low_rows = (
        jnp.concatenate([_of_rows(x[i], n) for i, n in zip(some, counts, strict=True)], axis=1)
        for x in numbers
    )
    whole, *others = signs.sum_of_signs(
        ops,
        every,
        [high_rows, *high],
        [low_rows, *low],
        [(rows, LANES), *lies],
        [(rows, 1), *kinds],
    )
    parts = ops.from_rows(whole.reshape(1, -1), [shapes[i] for i in some])
    found = dict(zip([*some, *rest], [*parts, *others], strict=True))
    return [found[i] for i in range(len(shapes))]


def _of_rows(numbers: jax.Array, rows: int) -> jax.Array:
    """(W, k, 1, …), of k tensors, as one for each of their rows: (W, rows)."""
    replicas, k = numbers.shape[:2]
    return jnp.broadcast_to(numbers.reshape(replicas, k, 1), (replicas, k, rows // k)).reshape(
        replicas, rows
    )
