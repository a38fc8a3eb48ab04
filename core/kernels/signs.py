"""Signs of many arrays at once: their bits, and what those of all replicas stand for.

Each array shares two numbers, `above` for elements above 0 and `below` for the others, along the
axes in which they have length 1: all of an array does, or each of its rows, or each column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradwire.core.kernels.arrays import A
from gradwire.core.kernels.bits import bytes_of_rows
from gradwire.core.kernels.primitives import Primitives

Shape = tuple[int, ...]


def pack_signs(ops: Primitives[A], xs: Sequence[A]) -> list[A]:
    """`Ops.pack_signs`: the bits of each array by themselves, in rows of which none is moved to
    send it."""
    packed = [ops.pack_bits(x > 0, of=x) for x in xs]
    shapes = [tuple(x.shape) for x in xs]
    return [
        own if bytes_of_rows(shape)[1] else own.reshape((-1, shape[-1]))
        for own, shape in zip(packed, shapes, strict=True)
    ]


def signed(
    ops: Primitives[A],
    xs: Sequence[A],
    above: Sequence[A],
    below: Sequence[A],
    sharing: Sequence[Shape],
) -> list[A]:
    """`Ops.signed`: each array by itself."""
    both = zip(beside(above, sharing), beside(below, sharing), strict=True)
    return [ops.where(x > 0, high, low) for x, (high, low) in zip(xs, both, strict=True)]


def sum_of_signs(
    ops: Primitives[A],
    every: Sequence[A],
    above: Sequence[A],
    below: Sequence[A],
    shapes: Sequence[Shape],
    sharing: Sequence[Shape],
) -> list[A]:
    """`Ops.sum_of_signs`: each array by itself."""
    replicas = every[0].shape[0]

    def total(bits: A, above: A, below: A, shape: Shape) -> A:
        def add(replica: int, so_far: A) -> A:
            positive = ops.unpack_bits(bits[replica].reshape((-1,)), shape)
            return ops.add(so_far, ops.where(positive, above[replica], below[replica]), out=so_far)

        return ops.loop(replicas, add, ops.zeros(shape, ops.dtype_of(above)), fused=True)

    both = beside(above, sharing, (replicas,)), beside(below, sharing, (replicas,))
    return [total(*own) for own in zip(every, *both, shapes, strict=True)]


def beside(numbers: Sequence[A], sharing: Sequence[Shape], lead: Shape = ()) -> list[A]:
    """The numbers of each array, (*lead, *shape), where those of all lie one after the other in one
    array, (*lead, N), or of each in one."""
    if len(numbers) == len(sharing):
        return [own.reshape((*lead, *shape)) for own, shape in zip(numbers, sharing, strict=True)]
    (whole,), answers, end = numbers, [], 0
    for shape in sharing:
        start, end = end, end + math.prod(shape)
        own = whole[:, start:end] if lead else whole[start:end]
        answers.append(own.reshape((*lead, *shape)))
    return answers
