"""Replicas that are divided among devices by the compiler: FSDP or tensor parallelism inside `jax.shard_map(step, axis_names={"dcn"}, …)`.

The map is manual over the axis of the replicas alone. Devices that differ along the other axes hold one replica together: a *slice*. The code
computes with whole arrays there, XLA divides them, and adds what it must send inside the slice. Two things are left to say. What is equal on
all devices of a slice crosses the slow network once, a part from each of them (`divided`). And what is small, and computed with in many steps,
lies whole on every device (`whole`), or XLA would divide it, and send something in each of these steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType, PartitionSpec

#: Arrays to be sent → what comes of each.
Exchange = Callable[[list[jax.Array]], list[jax.Array]]


def compiler_axes() -> tuple[str, ...]:
    """The mesh axes that are left to the compiler where others are manual, without those of length 1. (): no device shares a replica."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return ()
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return tuple(name for name, size, kind in kinds if kind != AxisType.Manual and size > 1)


def slice_size() -> int:
    """How many devices hold a replica together."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[name] for name in compiler_axes())


def whole(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """These arrays, whole on each device of a slice, whatever they are computed from."""
    if not compiler_axes():
        return list(arrays)
    # What is said of an array is said of the operation that makes it too, unless another one stands between them.
    return [_placed(free(x), PartitionSpec()) for x in arrays]  # type: ignore[no-untyped-call]


def free(x: jax.Array) -> jax.Array:
    """An array that may be cut to fit what it is multiplied with. Else XLA may cut that to fit the array, which is small."""
    if not compiler_axes():
        return x
    return _placed(x, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim))  # type: ignore[no-untyped-call]


def whole_memory(
    tensors: Mapping[str, Mapping[str, jax.Array]], params: Mapping[str, jax.Array]
) -> dict[str, dict[str, jax.Array]]:
    """Memory by parameter name, in which all that has another shape than its parameter is `whole`: so lie states that `init` makes."""

    def lying(name: str, x: jax.Array) -> jax.Array:
        return x if name in params and x.shape == params[name].shape else whole([x])[0]

    return {name: {key: lying(name, x) for key, x in memory.items()} for name, memory in tensors.items()}


def lying_alike(arrays: Mapping[str, jax.Array], like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Arrays by name, each divided as another one of its name and shape is. (A product of factors could lie in any way.)"""
    if not compiler_axes():
        return dict(arrays)
    pairs: Any = shard_alike
    return {name: pairs(x, like[name])[0] for name, x in arrays.items()}


def divided(x: jax.Array, axis: int) -> jax.Array:
    """An array, cut along one of its axes into as many parts as a slice has devices, a part on each."""
    entries: list[Any] = [None] * x.ndim
    entries[axis] = compiler_axes()
    return _placed(x, PartitionSpec(*entries))  # type: ignore[no-untyped-call]


def _placed(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    placed: jax.Array = lax.with_sharding_constraint(x, spec)  # type: ignore[no-untyped-call]
    return placed


def parted(send: Exchange, kept: int, added: int, *, check_vma: bool) -> Exchange:
    """`send`, which leaves so many axes of arrays `kept` and puts so many before them, done to another part of what lies behind on each device.

    XLA divides sums by itself; but what is exchanged or gathered it gathers first, unless the map is manual over all axes.
    """

    def in_parts(arrays: list[jax.Array]) -> list[jax.Array]:
        n = slice_size()
        flat = [x.reshape(*x.shape[:kept], -1) for x in whole(arrays)]
        filled = [jnp.pad(x, [(0, 0)] * kept + [(0, -x.shape[-1] % n)]) for x in flat]
        answers = whole(_on_each_device(send, _along(kept), _along(kept + added), check_vma)(filled))
        cut = [y[..., : x.shape[-1]] for x, y in zip(flat, answers, strict=True)]
        return [y.reshape(*y.shape[:-1], *x.shape[kept:]) for x, y in zip(arrays, cut, strict=True)]

    return in_parts


def by_pieces(
    fn: Callable[..., Any],
    arrays: Mapping[str, jax.Array],
    tensors: Mapping[str, Mapping[str, jax.Array]],
    *rest: Any,
    check_vma: bool,
) -> Any:
    """`fn(arrays, tensors, *rest)`, which treats every element alike, on each device of a slice with a piece of every array.

    Args:
        fn: returns arrays and tensors as it was given them, and a tree of what is equal on all devices of a slice.
        arrays: by name. A piece is one of the longest axis, or else of the flat array, filled up with zeros.
        tensors: memory by name, each of the shape of its array.
        *rest: equal on all devices of a slice.
        check_vma: of the map round it.
    """
    n, one = slice_size(), _along(0)

    def on_device(arrays: Any, tensors: Any, *rest: Any) -> Any:
        own = jax.tree.map(lambda x: x[0], (arrays, tensors))
        *pieces, equal = fn(*own, *rest)
        return *jax.tree.map(lambda x: x[None], pieces), equal

    cut = jax.tree.map(lambda x: _pieces(x, n), (dict(arrays), dict(tensors)))
    everywhere: Any = PartitionSpec()  # type: ignore[no-untyped-call]
    run = _on_each_device(on_device, (one, one, *[everywhere] * len(rest)), (one, one, everywhere), check_vma)
    averages, after, equal = run(*cut, *rest)
    joined = {name: _joined(x, arrays[name].shape) for name, x in averages.items()}
    memory = {name: {key: _joined(x, arrays[name].shape) for key, x in own.items()} for name, own in after.items()}
    return joined, memory, equal


def _on_each_device(fn: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool) -> Callable[..., Any]:
    axes = set(compiler_axes())
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=check_vma)


def _along(axis: int) -> Any:
    spec: Any = PartitionSpec
    return spec(*[None] * axis, compiler_axes())


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


def wide_on_cpu(collective: Callable[[list[jax.Array]], list[jax.Array]], arrays: list[jax.Array]) -> list[jax.Array]:
    """`collective(arrays)`, a reduction of arrays of one dtype. Of bfloat16 it is done in float32 on CPU, where XLA would do so itself, but ends the
    process where axes are left to it (jaxlib 0.10: "Invalid binary instruction opcode copy")."""
    mesh = jax.sharding.get_abstract_mesh()
    if arrays[0].dtype != jnp.bfloat16 or not mesh.manual_axes or len(mesh.manual_axes) == len(mesh.axis_names):
        return collective(arrays)

    def wide(xs: list[jax.Array]) -> list[jax.Array]:
        return [y.astype(jnp.bfloat16) for y in collective([x.astype(jnp.float32) for x in xs])]

    results: list[jax.Array] = lax.platform_dependent(arrays, cpu=wide, default=collective)
    return results


def to_rows(arrays: Sequence[jax.Array], n: int) -> jax.Array:
    """Arrays of one dtype as n rows, (n, k), filled up with zeros.

    Where n divides the last axis of an array, each row has a piece of that axis. A factor (r, n) of a parameter that is sharded by rows, or
    by columns, lies in such pieces, and nothing has to move.
    """
    even = [i for i, x in enumerate(arrays) if _is_even(x.shape, n)]
    rows = [jnp.moveaxis(_split(arrays[i], n), -2, 0).reshape(n, -1) for i in even]
    rest = [x.reshape(-1) for i, x in enumerate(arrays) if i not in even]
    if rest:
        flat = jnp.concatenate(rest)
        rows += whole([jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)])
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)


def from_rows(rows: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """What `to_rows` made of arrays of these shapes."""
    n, start = rows.shape[0], 0
    arrays: dict[int, jax.Array] = {}
    for i, shape in enumerate(shapes):
        if _is_even(shape, n):
            width = math.prod(shape) // n
            piece = rows[:, start : start + width].reshape(n, *shape[:-1], shape[-1] // n)
            arrays[i] = jnp.moveaxis(piece, 0, -2).reshape(shape)
            start += width
    flat, start = rows[:, start:].reshape(-1), 0
    for i, shape in enumerate(shapes):
        if i not in arrays:
            size = math.prod(shape)
            arrays[i] = flat[start : start + size].reshape(shape)
            start += size
    return [arrays[i] for i in range(len(shapes))]


def _is_even(shape: tuple[int, ...], n: int) -> bool:
    return bool(shape) and shape[-1] % n == 0


def _split(x: jax.Array, n: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], n, x.shape[-1] // n)
