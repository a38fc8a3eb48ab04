"""Which mesh axes the compiler owns: FSDP or tensor parallelism inside `jax.shard_map(step,
axis_names={"dcn"}, …)`.

The map is manual over the axis of the replicas alone. Devices that differ along the other axes hold
one replica together: a *slice*. The code computes with whole arrays there, XLA divides them, and
adds what it must send inside the slice. Two things are left to say. What is equal on all devices of
a slice crosses the slow network once, a part from each of them (`divided`). And what is small, and
computed with in many steps, lies whole on every device (`whole`), or XLA would divide it, and send
something in each of these steps.

Axes of `jax.sharding.AxisType.Explicit`, which `jax.make_mesh` makes, are the compiler's here too
(`left_to_the_compiler`). There every operation must say how its result is sharded, and messages
that are packed and factors that are orthonormalized have nothing to say.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

T = TypeVar("T")

#: Arrays to be sent → what comes of each.
Exchange = Callable[[list[jax.Array]], list[jax.Array]]


def compiler_axes() -> tuple[str, ...]:
    """The mesh axes that are left to the compiler where others are manual, without those of length
    1. (): no device shares a replica."""
    return _compiler_axes(jax.sharding.get_abstract_mesh())


@functools.cache  # one for each mesh: it is asked about for every array of a trace
def _compiler_axes(mesh: AbstractMesh) -> tuple[str, ...]:
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
    # What is said of an array is said of the operation that makes it too, unless another one stands
    # between them.
    return [_placed(free(x), PartitionSpec()) for x in arrays]  # type: ignore[no-untyped-call]


def free(x: jax.Array) -> jax.Array:
    """An array that may be cut to fit what it is multiplied with. Else XLA may cut that to fit the
    array, which is small."""
    if not compiler_axes():
        return x
    return _placed(x, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim))  # type: ignore[no-untyped-call]


def whole_memory(
    tensors: Mapping[str, Mapping[str, jax.Array]], params: Mapping[str, jax.Array]
) -> dict[str, dict[str, jax.Array]]:
    """Memory by parameter name, in which all that has another shape than its parameter is `whole`:
    so lie states that `init` makes."""

    def lying(name: str, x: jax.Array) -> jax.Array:
        return x if name in params and x.shape == params[name].shape else whole([x])[0]

    return {
        name: {key: lying(name, x) for key, x in memory.items()} for name, memory in tensors.items()
    }


def lying_alike(
    arrays: Mapping[str, jax.Array], like: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Arrays by name, each divided as another one of its name and shape is. (A product of factors
    could lie in any way.)

    Raises NotImplementedError on a JAX that cannot be told so: newer ones have no `shard_alike`.
    """
    if not compiler_axes():
        return dict(arrays)
    try:
        pairs: Any = importlib.import_module("jax.experimental.shard_alike").shard_alike
    except ModuleNotFoundError as error:
        raise NotImplementedError(
            f"JAX {jax.__version__} has no jax.experimental.shard_alike, by which gradients lie as"
            " the compiler has divided the parameters. Make the map manual over all axes, or take"
            " an older JAX: 0.10 has it"
        ) from error
    return {name: pairs(x, like[name])[0] for name, x in arrays.items()}


def divided(x: jax.Array, axis: int) -> jax.Array:
    """An array, cut along one of its axes into as many parts as a slice has devices, a part on
    each."""
    return _placed(x, along(axis))


def _placed(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    placed: jax.Array = lax.with_sharding_constraint(x, spec)  # type: ignore[no-untyped-call]
    return placed


def parted(send: Exchange, kept: int, added: int, *, check_vma: bool) -> Exchange:
    """`send`, which leaves so many axes of arrays `kept` and puts so many before them, done to
    another part of what lies behind on each device.

    XLA divides sums by itself; but what is exchanged or gathered it gathers first, unless the map
    is manual over all axes.
    """

    def in_parts(arrays: list[jax.Array]) -> list[jax.Array]:
        n = slice_size()
        flat = [x.reshape(*x.shape[:kept], -1) for x in whole(arrays)]
        filled = [jnp.pad(x, [(0, 0)] * kept + [(0, -x.shape[-1] % n)]) for x in flat]
        answers = whole(on_each_device(send, along(kept), along(kept + added), check_vma)(filled))
        cut = [y[..., : x.shape[-1]] for x, y in zip(flat, answers, strict=True)]
        return [y.reshape(*y.shape[:-1], *x.shape[kept:]) for x, y in zip(arrays, cut, strict=True)]

    return in_parts


def on_each_device(
    fn: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool
) -> Callable[..., Any]:
    """`fn` in a map that is manual over the axes that were the compiler's, too. `check_vma`: as in
    the map round it."""
    axes = set(compiler_axes())
    return jax.shard_map(
        fn, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=check_vma
    )


def along(axis: int) -> Any:
    """The spec of an array that is cut along this axis, a part on each device of a slice."""
    spec: Any = PartitionSpec
    return spec(*[None] * axis, compiler_axes())


def wide_on_cpu(collective: Exchange, arrays: list[jax.Array]) -> list[jax.Array]:
    """`collective(arrays)`, a reduction of arrays of one dtype. Of bfloat16 it is done in float32
    on CPU, where XLA would do so itself, but ends the process where axes are left to it (jaxlib
    0.10: "Invalid binary instruction opcode copy")."""
    mesh = jax.sharding.get_abstract_mesh()
    if (
        arrays[0].dtype != jnp.bfloat16
        or not mesh.manual_axes
        or len(mesh.manual_axes) == len(mesh.axis_names)
    ):
        return collective(arrays)

    def wide(xs: list[jax.Array]) -> list[jax.Array]:
        return [y.astype(jnp.bfloat16) for y in collective([x.astype(jnp.float32) for x in xs])]

    results: list[jax.Array] = lax.platform_dependent(arrays, cpu=wide, default=collective)
    return results


def explicit_mesh(arrays: Mapping[str, Any]) -> AbstractMesh | None:
    """The mesh with explicit axes on which a program that computes with these arrays is traced, if
    there is one: that in context, or that of the arrays."""
    types = (jax.typeof(x) for x in arrays.values() if isinstance(x, jax.core.Tracer))
    meshes = [jax.sharding.get_abstract_mesh(), *(x.sharding.mesh for x in types)]
    return next((mesh for mesh in meshes if getattr(mesh, "explicit_axes", ())), None)


def left_to_the_compiler(fn: Callable[..., T], *args: Any, like: Any) -> T:
    """`fn(*args)`, of trees of arrays, with explicit mesh axes made automatic, and results sharded
    as what they were made of.

    `like` is a tree like its result: each leaf an array that is sharded as the result should be, or
    None for one that is on all devices whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(getattr(mesh, "explicit_axes", ()))
    if not axes:
        # Outside `jax.jit` a map runs its operations one by one, and what it divided is forgotten
        # between them.
        result: T = jax.jit(fn)(*args) if compiler_axes() else fn(*args)
        return result

    def spec_of(x: Any) -> Any:
        return PartitionSpec() if x is None else jax.typeof(x).sharding.spec  # type: ignore[no-untyped-call]

    specs = jax.tree.map(spec_of, like, is_leaf=lambda x: x is None)
    within: T = jax.jit(jax.sharding.auto_axes(fn, axes=axes, out_sharding=specs))(*args)
    return within
