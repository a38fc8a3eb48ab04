"""Small matrices of one shape, computed with as one stack.

XLA takes time for every operation of a program, whatever it computes: four products for each of 300 matrices are most of what a step of PowerSGD
takes to compile. Here 60 of them share one. A stack is joined where it is multiplied, in a branch (`gradwire.jax_backend.ops.packing.within_a_branch`),
and never stored beyond it; and the products that are as large as gradients wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from gradwire.core.algorithms.compressor import ERROR
from gradwire.jax_backend.axes.mapped_axis import varying_axes
from gradwire.jax_backend.ops.lazy_sum import Sum
from gradwire.jax_backend.ops.packing import Starts, always, taken, unstack
from gradwire.jax_backend.ops.products import product
from gradwire.jax_backend.ops.short_floats import converted

#: A stack has at most this part of the gradients of a model's small matrices, so that what is stored of it is little beside a gradient,
PART = 8
#: or so many bytes, below which it is little anyway.
STACK_BYTES = 1 << 18


class Turns:
    """Lets products wait for each other. What varies along a mapped axis, and what does not, stay apart."""

    def __init__(self) -> None:
        self._decisions: dict[frozenset[str], jax.Array] = {}
        self.starts: Starts = {}

    def take(self, operand: jax.Array, make: Callable[[], jax.Array]) -> jax.Array:
        """`make()`, after what was made before it."""
        axes = varying_axes(operand)
        decision = self._decisions.get(axes)
        if decision is None:
            decision = always(operand)
        # What the branch decides comes out of it again: there is no other sign of its end that costs nothing to read.
        made, self._decisions[axes] = taken(decision, lambda: (make(), decision))
        return made


class Step:
    """What the stacks of a step share. `own` are the turns of what is this replica's, `common` those of what is equal on all of them: under
    `jax.vmap` all that waits for the first differs as it does."""

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


class StackedSum(Sum):
    """Gradients and their errors, not added up and not joined: for stacks what `Sum` is for one large matrix."""

    gradient: Any
    error: Any

    def __init__(
        self, gradient: Members, error: Members, rows: tuple[int, ...] | None = None, transposed: bool = False
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
            raise TypeError("nothing was subtracted from a stack of gradients and errors that is to be stored")
        step: Step = self.gradient.step
        product = self._product(step.own, self._sent[0].mT, self._sent[1]).reshape(self.gradient.shape)
        parts = zip(self.gradient.arrays, unstack(product, step.own.starts), self.error.arrays, strict=True)
        return Members([Sum(g - part, error).added(ok, limit) for g, part, error in parts], step)

    def replaced_by(self, thick: jax.Array, q: jax.Array) -> jax.Array:
        """`thick @ q`, which is equal on all replicas."""
        return self._product(self.gradient.step.common, thick, q)

    def _product(self, turns: Turns, thick: jax.Array, q: jax.Array) -> jax.Array:
        """As large as this, in its turn."""

        def in_turn() -> jax.Array:
            batch = tuple(range(q.ndim - 2))
            numbers = (((thick.ndim - 1,), (q.ndim - 2,)), (batch, batch))
            return converted(product(thick, q, numbers), self.dtype)

        return turns.take(q, in_turn)


class Bundles:
    """`gradwire.core.ops.Bundled`."""

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
        self.gradients: dict[str, Any] = {name: g for name, g in gradients.items() if name not in members}
        self.tensors: dict[str, dict[str, Any]] = {n: dict(own) for n, own in tensors.items() if n not in members}
        for first, names in self.names.items():
            self.gradients[first] = Members([gradients[name] for name in names], self._step)
            together = {key: Members([tensors[name][key] for name in names], self._step) for key in tensors[first]}
            self.tensors[first] = {key: own if key == ERROR else own.joined() for key, own in together.items()}

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
        return stack.arrays if isinstance(stack, Members) else unstack(stack, self._step.common.starts)


def bundles_of(
    gradients: dict[str, jax.Array],
    tensors: Mapping[str, Mapping[str, jax.Array]],
    alike: Callable[[str], Hashable | None],
    large: int,
) -> Bundles | None:
    """See `gradwire.core.ops.Ops.bundle`. `large`: elements from which on a matrix is computed with by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    left = [n for n, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if kind != AxisType.Manual]
    if math.prod(left) > 1:
        return None  # What the compiler has divided among devices it would gather to join.
    groups: dict[Hashable, list[str]] = {}
    for name, own in tensors.items():
        g = gradients.get(name)
        if g is None or g.ndim < 2 or not 0 < g.size < large or own[ERROR].dtype != g.dtype:
            continue
        kind = alike(name)
        if kind is not None:
            arrays = {"": g, **own}
            axes = tuple((key, x.shape, x.dtype.name, varying_axes(x)) for key, x in arrays.items())
            groups.setdefault((kind, axes), []).append(name)
    limit = max(STACK_BYTES, sum(gradients[n].nbytes for names in groups.values() for n in names) // PART)
    stacks = [tuple(stack) for names in groups.values() for stack in _divided(names, gradients[names[0]].nbytes, limit)]
    stacks = [stack for stack in stacks if len(stack) > 1]
    return Bundles(gradients, tensors, stacks) if stacks else None


def _divided(names: list[str], nbytes: int, limit: int) -> list[list[str]]:
    """Into stacks of at most `limit` bytes, as equal as can be: those of one size share what is compiled."""
    count = -(-len(names) * nbytes // limit)
    size = -(-len(names) // count)
    return [names[i : i + size] for i in range(0, len(names), size)]
