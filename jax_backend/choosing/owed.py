"""Averages with a place for the compression error of another method, which is added to the next
gradients once.

A training that changes its method goes on with the memory that both have. What else the one before
has not sent yet comes to lie in `OwedState.owed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import lax
from jax.sharding import NamedSharding

from gradwire.core.algorithms.compressor import ERROR
from gradwire.jax_backend.axes.mapped_axis import varying_axes
from gradwire.jax_backend.state.names import filled, flatten
from gradwire.jax_backend.state.trees import by_parameter, rebuilt
from gradwire.jax_backend.state.types import DataParallelState, PerReplica, spec


class OwedState(NamedTuple):
    """State of averages with such a place.

    Attributes:
        inner: of the averages themselves.
        owed: what each replica adds to its next gradients, a tree like the parameters, with
            `optax.MaskedNode` where no other method has an error.
    """

    inner: DataParallelState
    owed: PerReplica


def with_owed(
    average: optax.GradientTransformationExtraArgs, names_of: Callable[[], Collection[str]]
) -> optax.GradientTransformationExtraArgs:
    """The transformation, with a place for what is owed to these parameters: names that are asked
    for when `average` has its own state.

    A step that is not finite keeps what is owed, and so does a replica that counts for nothing.
    """

    def init(params: optax.Params) -> OwedState:
        inner, names, named = average.init(params), names_of(), flatten(params)
        rows = [
            _zero_row(x) if name in names else optax.MaskedNode()
            for name, x in named.leaves.items()
        ]
        return OwedState(inner, PerReplica(filled(params, rows, lambda leaf, x: False)))

    def update(
        updates: optax.Updates, state: OwedState, params: optax.Params | None = None, **others: Any
    ) -> tuple[optax.Updates, OwedState]:
        named, owed = flatten(updates), flatten(state.owed.per_replica)
        given = dict(named.leaves)
        for name in owed.leaves.keys() & given.keys():
            row = owed.leaves[name]
            given[name] = _sum(given[name], row.reshape(row.shape[1:])).astype(given[name].dtype)
        averages, inner = average.update(named.rebuild(given), state.inner, params, **others)
        sent = _is_sent(averages, others.get("weight")) if owed.leaves else True
        rest = {
            name: jnp.where(sent, 0, row) if name in given else row
            for name, row in owed.leaves.items()
        }
        return averages, OwedState(inner, PerReplica(owed.rebuild(rest)))

    return optax.GradientTransformationExtraArgs(init, update)


def continued(old: OwedState, new: OwedState) -> OwedState:
    """`new`, fresh and on the same devices, going on where `old` stands: with its step, the memory
    that both have, and what it owes."""
    own, owed = (
        by_parameter(old.inner.local.per_replica),
        dict(flatten(old.owed.per_replica).leaves),
    )
    for name, memory in own.items():
        if ERROR in memory:
            error = memory[ERROR]
            owed[name] = _sum(error, owed[name]) if name in owed else error

    def row(name: str, key: str, x: Any) -> Any:
        found = owed.pop(name, x) if key == ERROR else own.get(name, {}).get(key, x)
        return found.astype(x.dtype) if found.shape == x.shape else x

    shared = by_parameter(old.inner.memory)

    def kept(name: str, key: str, x: Any) -> Any:
        found = shared.get(name, {}).get(key, x)
        return found if (found.shape, found.dtype) == (x.shape, x.dtype) else x

    inner = new.inner._replace(
        step=old.inner.step,
        shared={key: old.inner.shared.get(key, x) for key, x in new.inner.shared.items()},
        memory=rebuilt(new.inner.memory, kept),
        local=PerReplica(rebuilt(new.inner.local.per_replica, row)),
        account=new.inner.account._replace(skipped=old.inner.account.skipped),
    )
    place = flatten(new.owed.per_replica)
    return OwedState(
        inner,
        PerReplica(
            place.rebuild(
                {n: owed[n].astype(x.dtype) if n in owed else x for n, x in place.leaves.items()}
            )
        ),
    )


def _is_sent(averages: Any, weight: Any) -> jax.Array | bool:
    """Whether what this replica has added to its gradients is in averages that the optimizer takes.

    Plain averages do not count steps that are not finite; any of them says so on all replicas.
    Parts of a parameter that is divided over another axis have to decide alike.
    """
    leaves = jax.tree.leaves(averages)
    if not leaves:
        return False
    finite = jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()
    if others := tuple(sorted(varying_axes(finite))):
        finite = lax.psum((~finite).astype(jnp.int32), others) == 0  # type: ignore[no-untyped-call]
    return finite if weight is None else finite & (jnp.asarray(weight).reshape(()) > 0)


def _sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """The sum in the wider dtype of both, also where the user has forbidden what is implicit."""
    with jax.numpy_dtype_promotion("standard"):
        return x + y


def _zero_row(x: Any) -> jax.Array:
    """Zeros of the shape of a parameter, with an axis for the replicas, lying as it does."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    lies = (
        NamedSharding(sharding.mesh, spec(None, *sharding.spec))
        if isinstance(sharding, NamedSharding)
        else None
    )
    return jnp.zeros((1, *jnp.shape(x)), jnp.result_type(x), device=lies)
