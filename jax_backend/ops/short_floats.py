"""Conversions to shorter floats, rounded whatever a compiler makes of them.

XLA may leave out a conversion to a shorter float and back, and does so on GPUs
(`xla_allow_excess_precision`): what is sent is rounded then, and what is remembered as sent is not,
so that error feedback sees no error. Numbers that are rounded before lose nothing by the
conversion, nor without it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.core.ops import LARGEST_E4M3

_finfo: Any = jnp.finfo


def converted(x: jax.Array, dtype: Any) -> jax.Array:
    """`x.astype(dtype)`, of floats rounded by an operation that no compiler leaves out."""
    dtype = jnp.dtype(dtype)
    floats = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(x.dtype, jnp.floating)
    shorter = floats and _finfo(dtype).nmant < _finfo(x.dtype).nmant
    return (rounded(x, dtype) if shorter else x).astype(dtype)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """The nearest numbers of a shorter float, in the dtype that `x` has; of what lies beyond them
    inf, or NaN in "float8_e4m3fn"."""
    to, of = _finfo(dtype), _finfo(x.dtype)
    y = lax.reduce_precision(x, exponent_bits=of.nexp, mantissa_bits=to.nmant)
    if to.nexp >= of.nexp:
        return y
    least = float(to.smallest_subnormal)
    y = jnp.where(jnp.abs(x) < float(to.smallest_normal), jnp.round(x * (1.0 / least)) * least, y)
    if jnp.dtype(dtype).name == "float8_e4m3fn":
        return jnp.where(jnp.abs(y) > LARGEST_E4M3, jnp.nan, y)  # some devices saturate
    return jnp.where(jnp.abs(y) > float(to.max), x * jnp.inf, y)
