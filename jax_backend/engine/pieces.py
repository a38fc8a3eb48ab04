"""Algorithms on replicas that are divided among devices: each device averages a piece of every
array by itself, where the pieces of an array can be compressed so
(`gradwire.core.algorithms.compressor.Compressor.splittable`).

Codes, signs and the largest elements of blocks are exchanged and gathered. What is exchanged or
gathered XLA would gather first where axes are left to it, and with it the gradients of the whole
model. In a map that is manual over those axes too it has nothing to choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.compressor import Compressor
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.protocol import step_is_finite, watch
from gradwire.jax_backend.axes.auto_axes import (
    along,
    compiler_axes,
    lying_alike,
    on_each_device,
    slice_size,
)
from gradwire.jax_backend.axes.mapped_axis import AxisName, is_manual, tracked
from gradwire.jax_backend.engine.driver import drive
from gradwire.jax_backend.ops.kernels import JaxOps


def in_pieces(algorithm: Algorithm, axis_name: AxisName) -> Algorithm:
    """The algorithm by pieces, if it can be done so and replicas are divided among devices; else
    itself. To be asked inside the map."""
    if isinstance(algorithm, Compressor):
        divides = (
            algorithm.hints.elementwise or type(algorithm).splittable is not Compressor.splittable
        )
    else:
        divides = isinstance(algorithm, WireDtype) and isinstance(algorithm.algorithm, AllReduce)
    return (
        _InPieces(algorithm, axis_name)
        if divides and compiler_axes() and is_manual(axis_name)
        else algorithm
    )


@dataclass(frozen=True)
class _InPieces(Wrapper):
    axis_name: AxisName

    async def step(
        self, ops: Any, gradients: Mapping[str, Any], state: State[Any], step: Any
    ) -> tuple[dict[str, Any], State[Any]]:
        across, whole = compiler_axes(), self._whole(gradients, state)
        if len(whole) == len(gradients):
            return await self.algorithm.step(ops, gradients, state, step)

        def on_device(arrays: Any, tensors: Any, shared: Any, step: Any) -> Any:
            async def program() -> Any:
                results = await self.algorithm.step(
                    JaxOps(across=across), arrays, State(shared, tensors), step
                )
                return results, await step_is_finite()

            (averages, after), finite = drive(program(), self.axis_name, across=across)
            return averages, after.tensors, (after.shared, finite)

        cut = {name: g for name, g in gradients.items() if name not in whole}
        before = {name: own for name, own in state.tensors.items() if name not in whole}
        check_vma = tracked(self.axis_name)
        averages, memory, (shared, finite) = _by_pieces(
            on_device, cut, before, state.shared, step, check_vma=check_vma
        )
        # What is known of the pieces decides about the others too; and what is known of those,
        # about the pieces.
        await watch(jnp.where(finite, 0.0, jnp.nan))
        tensors = {
            name: lying_alike(own, dict.fromkeys(own, gradients[name]))
            for name, own in memory.items()
        }
        arrays: dict[str, jax.Array] = lying_alike(averages, cut)
        if whole:
            rest = {name: gradients[name] for name in whole}
            others = State(state.shared, {name: state.tensors[name] for name in whole})
            means, after = await self.algorithm.step(ops, rest, others, step)
            finite = await step_is_finite()
            coded = {name: jnp.where(finite, arrays[name], jnp.nan) for name in before}
            kept = {
                name: {
                    key: jnp.where(finite, x, before[name][key]) for key, x in tensors[name].items()
                }
                for name in before
            }
            arrays, tensors = arrays | coded | means, kept | after.tensors
        return {name: arrays[name] for name in gradients}, State(
            shared, {name: tensors[name] for name in state.tensors}
        )

    def _whole(self, gradients: Mapping[str, Any], state: State[Any]) -> set[str]:
        """Which gradients are compressed as they are."""
        algorithm, n = self.algorithm, slice_size()
        if not isinstance(algorithm, Compressor):
            return set()
        shapes = {name: tuple(gradients[name].shape) for name in state.tensors}
        whole = {
            name
            for name, s in shapes.items()
            if not algorithm.splittable(name, s, _cut_axis(s, n), n)
        }
        # The norm of a gradient is that of all its tensors.
        return (
            set(gradients)
            if whole and (whole == set(shapes) or algorithm.max_norm is not None)
            else whole
        )


def _by_pieces(
    fn: Callable[..., Any],
    arrays: Mapping[str, jax.Array],
    tensors: Mapping[str, Mapping[str, jax.Array]],
    *rest: Any,
    check_vma: bool,
) -> Any:
    """`fn(arrays, tensors, *rest)`, of arrays that can be averaged by pieces, on each device of a
    slice with a piece of every array.

    Args:
        fn: returns arrays and tensors as it was given them, and a tree of what is equal on all
            devices of a slice.
        arrays: by name. A piece is one of the longest axis, or else of the flat array, filled up
            with zeros.
        tensors: memory by name, each of the shape of its array.
        *rest: equal on all devices of a slice.
        check_vma: of the map round it.
    """
    n, one = slice_size(), along(0)

    def on_device(arrays: Any, tensors: Any, *rest: Any) -> Any:
        own = jax.tree.map(lambda x: x[0], (arrays, tensors))
        *pieces, equal = fn(*own, *rest)
        return *jax.tree.map(lambda x: x[None], pieces), equal

    cut = jax.tree.map(lambda x: _pieces(x, n), (dict(arrays), dict(tensors)))
    everywhere: Any = PartitionSpec()  # type: ignore[no-untyped-call]
    run = on_each_device(
        on_device, (one, one, *[everywhere] * len(rest)), (one, one, everywhere), check_vma
    )
    averages, after, equal = run(*cut, *rest)
    joined = {name: _joined(x, arrays[name].shape) for name, x in averages.items()}
    memory = {
        name: {key: _joined(x, arrays[name].shape) for key, x in own.items()}
        for name, own in after.items()
    }
    return joined, memory, equal


def _cut_axis(shape: tuple[int, ...], n: int) -> int | None:
    """The longest axis that n divides: that by which a parameter is sharded, as a rule."""
    even = [axis for axis, length in enumerate(shape) if length and length % n == 0]
    return max(even, key=lambda axis: shape[axis], default=None)


def _pieces(x: jax.Array, n: int) -> jax.Array:
    """(n, …), pieces of an array."""
    axis = _cut_axis(x.shape, n)
    if axis is None:
        return jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1)
    split = x.reshape(*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


def _joined(pieces: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of this shape of which `_pieces` made these."""
    axis = _cut_axis(shape, pieces.shape[0])
    if axis is None:
        return pieces.reshape(-1)[: math.prod(shape)].reshape(shape)
    return jnp.moveaxis(pieces, 0, axis).reshape(shape)
