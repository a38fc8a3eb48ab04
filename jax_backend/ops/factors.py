"""Orthonormal rows of factors of many shapes, few calls: Gram-Schmidt is a loop, and XLA compiles
each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradwire.core.kernels.arrays import call_key, group_by
from gradwire.core.kernels.gram_schmidt import refresh
from gradwire.jax_backend.ops.packing import unstack

#: Factors of other lengths are filled up with zeros to be one batch, which changes nothing: of so
#: many elements at most, and so many times as many as they have.
PADDED = 1 << 20
TIMES = 2
#: What has so many elements by itself, in rows of so many, is filled up with nothing: a TPU would
#: pass over all of it once more, and there are few of them. Of small matrices that were joined
#: there are more, each a loop to compile, and rows are short.
ALONE = 1 << 13
LONG = 256


class _Alike(NamedTuple):
    """The numbers of factors of one shape, (*batch, r, n), and how many matrices they are."""

    members: list[int]
    shape: tuple[int, ...]
    matrices: int


def orthonormal_each(
    ops: Any, arrays: Sequence[jax.Array], fresh: Sequence[jax.Array], epsilon: float
) -> list[jax.Array]:
    """`Ops.orthonormalize_each` of arrays that vary alike."""
    answers = list(arrays)
    alike = []
    for members in group_by(range(len(arrays)), [call_key(x) for x in arrays]):
        shape = tuple(arrays[members[0]].shape)
        alike.append(_Alike(members, shape, len(members) * math.prod(shape[:-2])))
    for lot in _lots(alike, [arrays[each.members[0]].dtype for each in alike]):
        longest = max(each.shape[-1] for each in lot)
        rows = _joined(arrays, lot, longest)
        if fresh:
            rows = refresh(ops, rows, _joined(fresh, lot, longest))
        rows, start = ops.orthonormalize(rows, epsilon), 0
        for each in lot:
            *_, r, n = each.shape
            own = (
                rows
                if len(lot) == 1
                else lax.slice(rows, (start, 0, 0), (start + each.matrices, r, n))
            )
            start += each.matrices
            parts = unstack(own.reshape(len(each.members), *each.shape))
            for i, x in zip(each.members, parts, strict=True):
                answers[i] = x
    return answers


def _joined(arrays: Sequence[jax.Array], lot: Sequence[_Alike], longest: int) -> jax.Array:
    """All matrices of a lot, (k, r, longest)."""
    batches = []
    for each in lot:
        *_, r, n = each.shape
        members = [arrays[i].reshape(-1, r, n) for i in each.members]
        batch = members[0] if len(members) == 1 else jnp.concatenate(members)
        beside = [(0, 0, 0), (0, 0, 0), (0, longest - n, 0)]
        batches.append(batch if n == longest else lax.pad(batch, np.zeros((), batch.dtype), beside))
    return batches[0] if len(batches) == 1 else jnp.concatenate(batches)


def _lots(alike: Sequence[_Alike], dtypes: Sequence[Any]) -> list[list[_Alike]]:
    """What is one batch: matrices of as many rows, of lengths that are near each other."""
    lots: list[list[_Alike]] = []
    for some in group_by(
        alike, [(each.shape[-2], dtype) for each, dtype in zip(alike, dtypes, strict=True)]
    ):
        room, elements, count = 0, 0, 0
        for each in sorted(some, key=lambda each: each.shape[-1], reverse=True):
            *_, r, n = each.shape
            if math.prod(each.shape) >= ALONE and n >= LONG:
                lots.insert(0, [each])
                continue
            elements, count = elements + each.matrices * r * n, count + each.matrices
            if count * r * room > min(PADDED, TIMES * elements) or not room:
                lots.append([])
                room, elements, count = n, each.matrices * r * n, each.matrices
            lots[-1].append(each)
    return lots
