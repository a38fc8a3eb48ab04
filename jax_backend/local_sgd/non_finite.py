"""What is not finite on one replica: a replica that has come back to the outer parameters loses
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax

from gradwire.jax_backend.axes.mapped_axis import AxisName, vary_if_tracked

T = TypeVar("T")


def all_finite(arrays: Iterable[Any]) -> Any:
    """Whether the floating arrays among these are: a bool scalar, True of none."""
    ok: Any = jnp.asarray(True)
    for x in arrays:
        if jnp.issubdtype(jnp.result_type(x), jnp.floating):
            ok &= jnp.isfinite(x).all()
    return ok


def chosen(acts: Any, then: Callable[[], T], otherwise: Callable[[], T], axis_name: AxisName) -> T:
    """One of two trees of one structure: by a bool, or in the program by a traced one."""
    if isinstance(acts, bool):
        return then() if acts else otherwise()
    found: T = lax.cond(
        acts, *(lambda f=f: vary_if_tracked(f(), axis_name) for f in (then, otherwise))
    )
    return found
