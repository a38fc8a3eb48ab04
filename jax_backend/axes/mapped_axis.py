"""The mapped axis of the replicas, and what JAX knows about values that differ along it.

Under `jax.shard_map(check_vma=True)`, its default, every value carries the axes along which it
*varies*. Elsewhere (`pmap`, `vmap`, `check_vma=False`) it carries nothing, and the functions here
change nothing.

Two kinds of map bind the axis: `jax.shard_map` (and `jax.pmap`, which is one), or `jax.vmap`. Under
`jax.vmap(step, axis_name="data", spmd_axis_name="data")` XLA divides the replicas among devices, as
DrJAX and MaxText have it. There a branch whose predicate has an axis for the replicas becomes a
selection: both sides are computed, and their collectives sent, in every step. `agreed` takes the
axis away.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.core.text.options import short
from gradwire.core.text.wording import some

#: The name of a mapped axis, or of several that the replicas span together.
AxisName = str | tuple[str, ...]

T = TypeVar("T")

#: The name of the function that is left out of what a step sends: under `jax.vmap` alone it is
#: there, and 4 bytes.
AGREED = "_agreed_under_vmap"

_pvary: Any = getattr(lax, "pvary", None)


def axes_of(axis_name: AxisName) -> tuple[str, ...]:
    """The names as a tuple. Raises TypeError for what is no name, ValueError for one that is given
    twice."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not axes or not all(isinstance(a, str) for a in axes):
        raise TypeError(
            f"axis_name={short(axis_name)} must be the name of the mapped axis, as in"
            " jax.pmap(step, axis_name='data')"
        )
    if len(set(axes)) < len(axes):
        raise ValueError(
            f"axis_name={axis_name!r} names an axis twice; name each axis that the replicas span"
            " once"
        )
    return axes


def is_bound(axis_name: AxisName) -> bool:
    """Whether the code runs inside a map over `axis_name`. Raises as `axes_of`."""
    try:
        lax.axis_size(axes_of(axis_name))
    except NameError:
        return False
    return True


def require_axis(axis_name: AxisName, who: str) -> None:
    """Raise NameError if the code is not running inside a map over `axis_name`."""
    if not is_bound(axis_name):
        raise NameError(
            f"{who}: the axis {axis_name!r} is not bound here, so there are no replicas to average"
            f" over. Call it inside jax.pmap(step, axis_name={axis_name!r}), or inside"
            " jax.shard_map over a mesh with that axis. Under plain jax.jit gradients are global"
            " already and nothing has to be averaged."
        )


def is_manual(axis_name: AxisName) -> bool:
    """Whether each device runs the code for itself along this axis: inside `jax.shard_map` and
    `jax.pmap`, not inside `jax.vmap`."""
    return frozenset(axes_of(axis_name)) <= frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def agreed(x: T, axis_name: AxisName) -> T:
    """Integers that are equal on all replicas, known to be: `lax.cond` on them stays a branch under
    `jax.vmap`. A tree of scalars."""
    if is_manual(axis_name):
        return x

    def _agreed_under_vmap(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: (
                lax.pmax(leaf, axis_name)  # type: ignore[no-untyped-call]
                if jnp.issubdtype(jnp.result_type(leaf), jnp.integer)
                else leaf
            ),
            tree,
        )

    same: T = jax.jit(_agreed_under_vmap)(x)
    return same


def varying_axes(x: Any) -> frozenset[str]:
    """The axes along which JAX knows an array (or its type) to differ."""
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    # JAX 0.10 moved the set into `manual_axis_type`; before, it stood on the type itself.
    return frozenset(manual.varying if manual is not None else getattr(kind, "vma", None) or ())


def vary(x: T, axes: Iterable[str]) -> T:
    """Every array of a tree, marked as differing along these axes; those that are marked already
    stay as they are."""

    wanted = frozenset(axes)
    if not wanted:
        return x

    def mark(leaf: Any) -> Any:
        missing = tuple(sorted(wanted - varying_axes(leaf)))
        if not missing:
            return leaf
        # JAX 0.8 has no `pcast`.
        return (
            lax.pcast(leaf, missing, to="varying")
            if hasattr(lax, "pcast")
            else _pvary(leaf, missing)
        )

    marked: T = jax.tree.map(mark, x)
    return marked


def tracked(axis_name: AxisName) -> bool:
    """Whether JAX keeps track of what varies over the axis: then its own index does."""
    return frozenset(axes_of(axis_name)) <= varying_axes(lax.axis_index(axis_name))


def vary_if_tracked(x: T, axis_name: AxisName) -> T:
    """`vary` over the replicas, where that means anything."""
    return vary(x, axes_of(axis_name)) if is_bound(axis_name) and tracked(axis_name) else x


def mark_varying(params: T, axis_name: AxisName) -> T:
    """Parameters with respect to which gradients are this replica's own.

    Under `jax.shard_map(check_vma=True)` the gradient with respect to replicated parameters arrives
    already *summed* over the replicas. Differentiate with respect to these instead:

        loss, gradients = jax.value_and_grad(loss_fn)(mark_varying(state.params, "data"), batch)

    Elsewhere (`pmap`, `check_vma=False`) gradients are local anyway and this changes nothing.

    The loss has to be the replica's own: of one that is averaged by `jax.lax.pmean` inside the
    function that is differentiated, gradients are 1/W of the right ones, under `check_vma=True`
    alone, and nothing says so.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gradwire.jax_backend import mark_varying
        >>> gradient = jax.grad(lambda w, x: (mark_varying(w, "data") * x).sum())
        >>> jax.vmap(gradient, (None, 0), axis_name="data")(1.0, jnp.array([2.0, 4.0])).tolist()
        [2.0, 4.0]

    Args:
        params: any tree of arrays, replicated or not.
        axis_name: the axis of the replicas.

    Raises:
        NameError: outside any map over `axis_name`.
        TypeError, ValueError: `axis_name` is no name of axes.
    """
    require_axis(axis_name, "mark_varying")
    return vary_if_tracked(params, axis_name)


def check_local(gradients: dict[str, jax.Array], axis_name: AxisName) -> None:
    """Raise ValueError for gradients that autodiff has already summed over the replicas."""
    if not tracked(axis_name):
        return
    axes = frozenset(axes_of(axis_name))
    summed = [name for name, g in gradients.items() if not axes <= varying_axes(g)]
    if summed:
        raise ValueError(
            f"the gradients of {some(summed)} do not vary over {axis_name!r}: they are the same on"
            " all replicas already. Either autodiff has already summed them, as it does under"
            " jax.shard_map(check_vma=True): differentiate with respect to"
            f" gradwire.jax_backend.mark_varying(params, {axis_name!r}), or pass check_vma=False to"
            " jax.shard_map. Or a pmean or psum precedes this transformation: take it out. (Flax's"
            " DynamicScale(…).value_and_grad(axis_name=…) has one: leave axis_name out, and decide"
            " by the averages, jax.numpy.isfinite of updates, whether to step.)"
        )
