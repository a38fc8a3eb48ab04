"""Products with matrices as large as gradients, and how exact they are.

By default a TPU multiplies float32 in bfloat16, 8 bits, and a recent GPU in TF32, 11 bits: of a
gradient that is nearly of low rank the small directions would drown in the rounding of the large
ones. On a TPU "highest" is six products of bfloat16, which take most of the time to compile a step,
and twice the time to compute it; three of them, x₁y₁ + x₁y₂ + x₂y₁ for x = x₁ + x₂ + …, miss the
exact product by about 2⁻¹⁶ |x| |y|. For a factor of PowerSGD that is enough. The rows that it is
projected on are made orthonormal at "highest", from a factor that is equal on all replicas whatever
its rounding. What a replica sends is the factor as it was computed, the error is what is left of
the gradient without that, and so what a product misses is sent later, as all else that a
compression leaves out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

#: As `lax.dot_general` takes them: axes that are summed over, and axes of the batch.
Numbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def on_tpu(dtype: jnp.dtype) -> lax.Precision:
    """That of products as large as gradients on a TPU. To a GPU "high" is TF32, and of float64 it
    would lose half."""
    return lax.Precision.HIGHEST if dtype == jnp.float64 else lax.Precision.HIGH


def product(x: jax.Array, y: jax.Array, numbers: Numbers, *, exact: bool = False) -> jax.Array:
    """`lax.dot_general`: three products of bfloat16 on a TPU unless it is to be `exact`; to the
    precision of the dtype elsewhere."""
    if exact:
        return lax.dot_general(x, y, numbers, precision=lax.Precision.HIGHEST)
    result: jax.Array = _by_platform(x, y, numbers)
    return result


@functools.partial(jax.jit, static_argnums=2)  # which traces it once for each shape
def _by_platform(x: jax.Array, y: jax.Array, numbers: Numbers) -> jax.Array:
    def at(precision: lax.Precision) -> Callable[[jax.Array, jax.Array], jax.Array]:
        return lambda x, y: lax.dot_general(x, y, numbers, precision=precision)

    result: jax.Array = lax.platform_dependent(
        x, y, tpu=at(on_tpu(x.dtype)), default=at(lax.Precision.HIGHEST)
    )
    return result
