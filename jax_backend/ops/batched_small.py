"""Small tensors of one shape, computed with as one stack.

XLA takes time for every operation of a program, whatever it computes: four products for each of 300
matrices are most of what a step of PowerSGD takes to compile. Here 60 of them share one. What is
only multiplied, and stored nowhere, is joined where it is multiplied, in a branch
(`gradwire.jax_backend.ops.packing.within_a_branch`), and never stored beyond it; and the products
that are as large as gradients wait for each other. What is coded is joined as it is added to its
error, once, and what is left of it is cut apart where errors are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from gradwire.core.algorithms.compressor import ERROR
from gradwire.jax_backend.axes.mapped_axis import varying_axes
from gradwire.jax_backend.ops.lazy_sum import Sum, limited
from gradwire.jax_backend.ops.packing import Starts, always, taken, unstack
from gradwire.jax_backend.ops.products import product
from gradwire.jax_backend.ops.short_floats import converted

#: Elements from which on a matrix is computed with by itself.
LARGE = 1 << 16
#: A stack has at most this part of the gradients of a model's small matrices, so that what is
#: stored of it is little beside a gradient,
PART = 12
#: or so many bytes, below which it is little anyway.
STACK_BYTES = 1 << 17


class Turns:
    """Lets products wait for each other. What varies along a mapped axis, and what does not, stay
    apart."""

    def __init__(self) -> None:
        self._decisions: dict[frozenset[str], jax.Array] = {}
        self._firsts: dict[frozenset[str], jax.Array] = {}
        self._starts: Starts = {}

    def take(self, operand: jax.Array, make: Callable[[], jax.Array]) -> jax.Array:
        """`make()`, after what was made before it."""
        axes = varying_axes(operand)
        decision = self._decisions[axes] if axes in self._decisions else self._first(operand)
        # What the branch decides comes out of it again: there is no other sign of its end that
        # costs nothing to read.
        made, self._decisions[axes] = taken(decision, lambda: (make(), decision))
        return made

    def unstack(self, batch: jax.Array) -> list[jax.Array]:
        """The members of a batch, cut out as soon as it is there: by where they begin, which waits
        for no turn."""
        return unstack(batch, self._starts, self._first)

    def _first(self, operand: jax.Array) -> jax.Array:
        """The decision before all turns."""
        axes = varying_axes(operand)
        if axes not in self._firsts:
            self._firsts[axes] = always(operand)
        return self._firsts[axes]


class Step:
    """What the stacks of a step share. `own` are the turns of what is this replica's, `common`
    those of what is equal on all of them: under `jax.vmap` all that waits for the first differs as
    it does."""

    def __init__(self, gradient: jax.Array) -> None:
        self.own = Turns()
        self.common = Turns()
        self._any = always(gradient)

    def soon(self, make: Callable[[], jax.Array]) -> jax.Array:
        """`make()`, of gradients, in a branch that waits for nothing."""
        return taken(self._any, make)


class Members:
    """Arrays of one shape, seen as one with a leading axis."""

    def __init__(self, arrays: Sequence[jax.Array], step: Step) -> None:
        self.arrays = tuple(arrays)
        self.step = step

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.arrays), *self.arrays[0].shape)

    @property
    def dtype(self) -> Any:
        return self.arrays[0].dtype

    def joined(self) -> jax.Array:
        joined: jax.Array = jnp.concatenate(self.arrays).reshape(self.shape)
        return joined

    def plus(self, others: Members, ok: jax.Array | None = None) -> jax.Array:
        """The sums, or where `ok` is false the others, joined: added up as they are joined, in one
        loop, since a stack of each would be as much memory again."""
        pairs = zip(self.arrays, others.arrays, strict=True)
        sums = [g + e if ok is None else lax.select(ok, g + e, e) for g, e in pairs]
        return Members(sums, self.step).joined()

    def replaced(self, ok: jax.Array, stack: jax.Array, limit: float) -> Members:
        """The members of a stack where `ok` holds, else these, `limited`."""
        pairs = zip(self.step.own.unstack(stack), self.arrays, strict=True)
        return Members(
            [lax.select(ok, jnp.asarray(x, y.dtype), limited(y, limit)) for x, y in pairs],
            self.step,
        )


class StackedSum(Sum):
    """Gradients and their errors, not added up and not joined: for stacks what `Sum` is for one
    large matrix."""

    gradient: Any
    error: Any

    def __init__(
        self,
        gradient: Members,
        error: Members,
        rows: tuple[int, ...] | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__(gradient, error, rows, transposed)  # type: ignore[arg-type]
        self._sent: tuple[jax.Array, jax.Array] | None = None

    def _seen(self, rows: tuple[int, ...], transposed: bool) -> StackedSum:
        seen = StackedSum(self.gradient, self.error, rows, transposed)
        seen._sent = self._sent
        return seen

    def _joined(self) -> Sum:
        return Sum(self.gradient.joined(), self.error.joined(), self._rows, self._transposed)

    @property
    def mT(self) -> StackedSum:  # noqa: N802
        return self._seen(self._rows, not self._transposed)

    def reshape(self, shape: tuple[int, ...], /) -> Any:
        if self._transposed or -1 in shape:
            return self.value().reshape(shape)
        return self._seen(tuple(shape), False)

    def value(self) -> jax.Array:
        return self._joined().value()

    def multiplied_by(self, thin: jax.Array) -> jax.Array:
        step: Step = self.gradient.step
        return step.soon(lambda: self._joined().multiplied_by(thin))

    def less(self, p: jax.Array, q: jax.Array) -> StackedSum:
        """What `p.mT @ q` leaves of it; not computed before it is `added`."""
        left = self._seen(self._rows, self._transposed)
        left._sent = p, q
        return left

    def added(self, ok: jax.Array, limit: float) -> Any:
        """The sum of `Sum.added` for each member."""
        if self._sent is None:
            raise TypeError(
                "nothing was subtracted from a stack of gradients and errors that is to be stored"
            )
        step: Step = self.gradient.step
        p, q = self._sent

        def in_turn() -> jax.Array:
            sums = self.gradient.plus(self.error, ok)
            product = self._product(p.mT, q).reshape(sums.shape)
            return lax.select(ok, sums - product, limited(sums, limit, stacked=1))

        return Members(step.own.unstack(step.own.take(q, in_turn)), step)

    def replaced_by(self, thick: jax.Array, q: jax.Array) -> jax.Array:
        """`thick @ q`, which is equal on all replicas."""
        step: Step = self.gradient.step
        return step.common.take(q, lambda: self._product(thick, q))

    def _product(self, thick: jax.Array, q: jax.Array) -> jax.Array:
        batch = tuple(range(q.ndim - 2))
        numbers = (((thick.ndim - 1,), (q.ndim - 2,)), (batch, batch))
        return converted(product(thick, q, numbers), self.dtype)


class Bundles:
    """`gradwire.core.ops.Bundled`. Gradients and errors are `Members` of their stacks, which are
    joined where they are added."""

    def __init__(
        self,
        gradients: dict[str, jax.Array],
        tensors: Mapping[str, Mapping[str, jax.Array]],
        stacks: Sequence[tuple[str, ...]],
    ) -> None:
        self._order = tuple(gradients)
        self._step = Step(gradients[stacks[0][0]])
        self.names = {names[0]: names for names in stacks}
        members = {name for names in stacks for name in names}
        self.gradients: dict[str, Any] = {
            name: g for name, g in gradients.items() if name not in members
        }
        self.tensors: dict[str, dict[str, Any]] = {
            n: dict(own) for n, own in tensors.items() if n not in members
        }
        for first, names in self.names.items():
            g = Members([gradients[name] for name in names], self._step)
            together = {
                key: Members([tensors[name][key] for name in names], self._step)
                for key in tensors[first]
            }
            self.gradients[first] = g if ERROR in together else g.joined()
            self.tensors[first] = {
                key: own if key == ERROR else own.joined() for key, own in together.items()
            }

    def apart(
        self, averages: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, dict[str, jax.Array]]]:
        single = {name: x for name, x in averages.items() if name not in self.names}
        memory = {name: dict(own) for name, own in tensors.items() if name not in self.names}
        for first, names in self.names.items():
            single.update(zip(names, self._members(averages[first]), strict=True))
            parts = {key: self._members(stack) for key, stack in tensors[first].items()}
            for i, name in enumerate(names):
                memory[name] = {key: members[i] for key, members in parts.items()}
        return {name: single[name] for name in self._order}, memory

    def _members(self, stack: Any) -> Sequence[jax.Array]:
        return stack.arrays if isinstance(stack, Members) else self._step.common.unstack(stack)


def bundles_of(
    gradients: dict[str, jax.Array],
    tensors: Mapping[str, Mapping[str, jax.Array]],
    alike: Callable[[str], Hashable | None],
    *,
    multiplied: bool,
) -> Bundles | None:
    """See `gradwire.core.ops.Ops.bundle`."""
    mesh = jax.sharding.get_abstract_mesh()
    left = [
        n
        for n, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
        if kind != AxisType.Manual
    ]
    if math.prod(left) > 1:
        return None  # What the compiler has divided among devices it would gather to join.
    groups: dict[Hashable, list[str]] = {}
    for name, own in tensors.items():
        g = gradients.get(name)
        if g is None or not _is_small(g, own.get(ERROR, g), multiplied):
            continue
        kind = alike(name)
        if kind is not None:
            arrays = {"": g, **own}
            axes = tuple((key, x.shape, x.dtype.name, varying_axes(x)) for key, x in arrays.items())
            groups.setdefault((kind, axes), []).append(name)
    total = sum(gradients[n].nbytes for names in groups.values() for n in names)
    limit = max(STACK_BYTES, total // PART) if multiplied else total
    stacks = [
        tuple(stack)
        for names in groups.values()
        for stack in _divided(names, gradients[names[0]].nbytes, limit)
    ]
    stacks = [stack for stack in stacks if len(stack) > 1]
    return Bundles(gradients, tensors, stacks) if stacks else None


def _is_small(g: jax.Array, error: jax.Array, multiplied: bool) -> bool:
    """Whether a gradient may be part of a stack."""
    if error.dtype != g.dtype:
        return False
    if multiplied:
        return g.ndim > 1 and 0 < g.size < LARGE
    # How large an error of float16 may be its norm decides, of each tensor by itself.
    return 0 < g.size <= LARGE and error.dtype != jnp.float16


def _divided(names: list[str], nbytes: int, limit: int) -> list[list[str]]:
    """Stacks of at most `limit` bytes, as equal as can be: those of one size share what is
    compiled."""
    count = -(-len(names) * nbytes // limit)
    size = -(-len(names) // count)
    return [names[i : i + size] for i in range(0, len(names), size)]
