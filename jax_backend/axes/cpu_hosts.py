"""Messages between CPU hosts, which JAX sends by Gloo.

Where two hosts exchange long messages, Gloo's answer "ready to receive" waits behind what its host
sends itself: one of them sends, then the other, and a link that could carry both ways at once
carries one. In short pieces the answers come through. Two hosts at 1 Gbit/s that swap 50 MB by an
all-to-all take 0.90 s in one piece and 0.51 s in pieces of 1 MiB (jaxlib 0.10), where the link
allows 0.40; without the limit they take no longer.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.jax_backend.axes.mapped_axis import vary, varying_axes

#: Bytes of an array that go to one host at a time.
SHORT = 1 << 20


def between_cpu_hosts() -> bool:
    """Whether messages go through JAX's Gloo. Its reduce-scatter takes 1.6 times as long as an
    all-to-all of the same bytes and a sum."""
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def in_short_pieces(
    send: Callable[[list[jax.Array]], list[jax.Array]], arrays: list[jax.Array]
) -> list[jax.Array]:
    """`send(arrays)`, between CPU hosts cut along the last axis.

    Args:
        send: sends the array whose last index is i as one whose last index is i, for each i by
            itself.
        arrays: (n,), which goes to every host, or (hosts, n), a row to each.
    """
    long = [
        between_cpu_hosts() and x.ndim < 3 and x.shape[-1] * x.dtype.itemsize > SHORT
        for x in arrays
    ]
    short = iter(
        send([x for x, cut in zip(arrays, long, strict=True) if not cut]) if not all(long) else []
    )
    return [_cut(send, x) if cut else next(short) for x, cut in zip(arrays, long, strict=True)]


def _cut(send: Callable[[list[jax.Array]], list[jax.Array]], x: jax.Array) -> jax.Array:
    length = x.shape[-1]
    pieces = -(-length * x.dtype.itemsize // SHORT)
    size = -(-length // pieces)

    def with_piece(i: jax.Array, received: jax.Array) -> jax.Array:
        # the last piece begins where it fits, and sends some elements again, fewer than there are
        # pieces
        start = i * size
        (piece,) = send([lax.dynamic_slice_in_dim(x, start, size, -1)])
        return lax.dynamic_update_slice_in_dim(received, piece, start, -1)

    (whole,) = jax.eval_shape(lambda: send([x]))
    received = vary(jnp.zeros(whole.shape, whole.dtype), varying_axes(whole))
    result: jax.Array = lax.fori_loop(0, pieces, with_piece, received)
    return result
