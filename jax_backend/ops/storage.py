"""How XLA lays arrays out, on a TPU above all, and what it wants to be told: see
`gradwire.core.kernels.storage`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradwire.core.kernels.primitives import Primitives
from gradwire.core.kernels.storage import Storage
from gradwire.jax_backend.axes.auto_axes import compiler_axes
from gradwire.jax_backend.ops.packing import LANES, TILE, apart_on_tpu

#: The bits below each byte of a number of 32.
BYTES = (0, 8, 16, 24)
#: Elements from which on codes and scales are stored as a TPU computes with them: that takes time
#: to compile.
WORTH_TILES = 1 << 19
#: Elements of arrays that are copied to be computed with as one.
MOST_JOINED = 1 << 23


class XlaStorage(Storage[jax.Array]):
    """Rows of codes along the tiles of a TPU, and what XLA computes once, stores or reads again."""

    @property
    def max_joined(self) -> int:
        return 0 if compiler_axes() else MOST_JOINED  # which lie as they are divided

    def materialize(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        kept: list[jax.Array] = apart_on_tpu(arrays)
        return kept

    def to_bytes(self, ops: Primitives[jax.Array], x: jax.Array) -> jax.Array:
        # The first byte of each, then the second: side by side, four of a number would lie in four
        # of 128 lanes.
        bits = lax.bitcast_convert_type(x, jnp.int32)
        return jnp.concatenate(
            [((bits >> shift) & 255).astype(jnp.uint8) for shift in BYTES], axis=1
        )

    def from_bytes(self, ops: Primitives[jax.Array], x: jax.Array, dtype: str) -> jax.Array:
        k = x.shape[1] // len(BYTES)
        parts = [
            x[:, i * k : (i + 1) * k].astype(jnp.int32) << shift for i, shift in enumerate(BYTES)
        ]
        return lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, parts), jnp.dtype(dtype))

    def to_blocks(
        self, ops: Primitives[jax.Array], x: jax.Array, rows: int, width: int
    ) -> jax.Array:
        if in_tiles(x.shape, width):  # as they lie: no element is moved
            blocks = (
                x.reshape(-1, TILE, x.shape[-1] // width, width).swapaxes(1, 2).reshape(-1, width)
            )
            missing = rows - blocks.shape[0]
            return jnp.pad(blocks, ((0, missing), (0, 0))) if missing else blocks
        flat, n = x.reshape(-1), rows * width
        return (flat if x.size == n else ops.pad(flat, n)).reshape(rows, width)

    def from_blocks(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if in_tiles(shape, x.shape[1]):
            blocks = x[: math.prod(shape) // x.shape[1]]
            return (
                blocks.reshape(-1, shape[-1] // x.shape[1], TILE, x.shape[1])
                .swapaxes(1, 2)
                .reshape(shape)
            )
        return x.reshape(-1)[: math.prod(shape)].reshape(shape)

    def reuse_sent(
        self, codes: jax.Array, sent: jax.Array, cut: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        def given(codes: jax.Array, sent: jax.Array) -> jax.Array:
            return codes

        def again(codes: jax.Array, sent: jax.Array) -> jax.Array:
            return cut(lax.optimization_barrier(sent))  # type: ignore[no-untyped-call]

        result: jax.Array = lax.platform_dependent(codes, sent, cpu=given, tpu=given, default=again)
        return result

    def with_layout(
        self, codes: jax.Array, scales: jax.Array, shape: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array]:
        if not in_tiles(shape, codes.shape[1]) or codes.size < WORTH_TILES or len(codes) % LANES:
            return codes, scales

        def on_tpu(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
            # In the shape in which floats of rows are a matrix: what is decoded from there is fused
            # with what uses it. Scales lie side by side, not one in each row of lanes.
            tiles = codes.reshape(-1, shape[-1] // LANES, TILE, LANES), scales.reshape(-1, LANES)
            stored = lax.optimization_barrier(tiles)  # type: ignore[no-untyped-call]
            return stored[0].reshape(codes.shape), stored[1].reshape(scales.shape)

        def given(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
            return codes, scales

        fields: tuple[jax.Array, jax.Array] = lax.platform_dependent(
            codes, scales, tpu=on_tpu, default=given
        )
        return fields

    def add_to_slice(
        self,
        ops: Primitives[jax.Array],
        x: jax.Array,
        part: jax.Array,
        n: int,
        i: Any,
        shape: tuple[int, ...],
    ) -> jax.Array:
        """See `Ops.add_to_slice`."""

        # Chosen element by element: to cut out rows that only the device knows would move
        # everything.
        def added(x: jax.Array, part: jax.Array) -> jax.Array:
            replicas = np.arange(n).reshape(n, *[1] * part.ndim)
            return (x.reshape(n, *part.shape) + jnp.where(replicas == i, part, 0)).reshape(x.shape)

        rows, width = x.shape
        of_part = (shape[0] // n, *shape[1:]) if shape and shape[0] % n == 0 else ()
        if in_tiles(shape, width) and in_tiles(of_part, width):
            # In the shape of the array: of rows a TPU would store the part n times.
            return self.to_blocks(
                ops, added(self.from_blocks(x, shape), self.from_blocks(part, of_part)), rows, width
            )
        return added(x, part)


def in_tiles(shape: tuple[int, ...], width: int) -> bool:
    """Whether a TPU's tiles of 8 rows and 128 lanes are blocks of such rows."""
    return width == LANES and len(shape) > 1 and shape[-1] % LANES == 0 and shape[-2] % TILE == 0
