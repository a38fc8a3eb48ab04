"""What is not finite on one replica, and what becomes of it: averages leave it out, and a replica
that has come back to the outer parameters loses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.jax_backend.axes.mapped_axis import AxisName, vary_if_tracked

T = TypeVar("T")

#: Beside what is averaged along with parameters: the share of the replicas whose own is not finite.
LEFT_OUT = "left out"

Owned = Mapping[str, Mapping[str, jax.Array]]


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


def sent(owned: Owned, acts: Any, axis_name: AxisName) -> dict[str, dict[str, jax.Array]]:
    """What a replica sends of these, owner → name → array, in a step in which something is
    averaged, `acts`: zeros of an owner whose arrays are not all finite, and whether they are left
    out. `averaged` takes the averages."""

    def of(owner: str, finite: bool) -> dict[str, jax.Array]:
        arrays = owned[owner]
        ok = all_finite(arrays.values()) if finite else jnp.asarray(True)
        dtype = max((x.dtype for x in arrays.values()), key=lambda x: x.itemsize)
        seen = (
            {key: jnp.where(ok, x, jnp.zeros((), x.dtype)) for key, x in arrays.items()}
            if finite
            else dict(arrays)
        )
        return seen | {LEFT_OUT: jnp.where(ok, jnp.zeros((), dtype), jnp.ones((), dtype))}

    return chosen(
        acts,
        lambda: {o: of(o, True) for o in owned},
        lambda: {o: of(o, False) for o in owned},
        axis_name,
    )


def averaged(averages: Owned, owned: Owned) -> dict[str, dict[str, jax.Array]]:
    """The averages of the replicas that are not left out; `owned` as it is where there are none, or
    no finite ones. The bits are those of the averages where nobody is left out."""
    found = {}
    for owner, own in owned.items():
        counted = 1 - averages[owner][LEFT_OUT]
        means = {
            key: (averages[owner][key].astype(counted.dtype) / counted).astype(x.dtype)
            for key, x in own.items()
        }
        ok = all_finite(means.values())
        found[owner] = {key: jnp.where(ok, means[key], x) for key, x in own.items()}
    return found
