"""Set-ups that would run and be wrong, found while a step is traced, or by `init`.

The state says of what options it is and whether it has come to its replicas; the map says which
axes there are; and under `jax.shard_map(check_vma=True)` every array says along which of them it
differs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.compressor import ERROR
from gradwire.core.algorithms.two_level import TwoLevel
from gradwire.core.algorithms.weighted import Weighted
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.kernels.abstract import NotPortable
from gradwire.core.ops import ITEMSIZE, Spec
from gradwire.core.plan.advice import CompressionWarning, outside
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol.groups import NoPartition, UnknownWorldSize
from gradwire.core.protocol.programs import Request, UnknownRequest
from gradwire.core.protocol.settings import settings_of
from gradwire.core.protocol.weights import LARGEST, SMALLEST, require_weight
from gradwire.core.text.options import short
from gradwire.jax_backend.axes.auto_axes import compiler_axes
from gradwire.jax_backend.axes.mapped_axis import (
    AxisName,
    axes_of,
    check_local,
    is_manual,
    tracked,
    varying_axes,
)
from gradwire.jax_backend.engine.driver import why_not
from gradwire.jax_backend.state.names import BARE, NamedTree, flatten, specs_of
from gradwire.jax_backend.state.types import MARK, DataParallelState, is_placed


def configuration_of(algorithm: Algorithm) -> str:
    """The options that memory depends on: what every state is marked with. A wire dtype, weights
    and the size of buckets may change any time."""
    algorithm = _remembering(algorithm)
    if isinstance(algorithm, TwoLevel):
        algorithm = replace(algorithm, algorithm=_remembering(algorithm.algorithm))
    described = (
        type(algorithm).__qualname__
        if type(algorithm).__repr__ is object.__repr__
        else repr(algorithm)
    )
    # A function among the options lies elsewhere in every process.
    return re.sub(r" at 0x[0-9a-f]+", "", described)


def _remembering(algorithm: Algorithm) -> Algorithm:
    """The algorithm without what memory does not depend on."""
    while isinstance(algorithm, (WireDtype, Weighted)):
        algorithm = algorithm.algorithm
    return AllReduce() if isinstance(algorithm, AllReduce) else algorithm


def scalar_weight(weight: Any) -> jax.Array:
    """What a replica counts for, as a scalar array of float32; NaN for a traced one that is no
    weight, so that its average is refused. Raises TypeError, ValueError for what is no weight, as
    far as that is known."""
    if not isinstance(weight, jax.Array):
        return jnp.asarray(require_weight(weight), jnp.float32)
    if weight.size != 1:
        raise ValueError(
            f"weight has shape {weight.shape}; give a scalar, what this replica itself counts for"
        )
    given = weight.astype(jnp.float32).reshape(())
    counts = (given == 0) | ((given >= SMALLEST) & (given <= LARGEST))
    return jnp.where(counts, given, jnp.nan)


def transformation(inner: Any, example: str) -> optax.GradientTransformationExtraArgs:
    """An optimizer as a transformation. Raises TypeError, with an example, for what is none."""
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(f"inner={short(inner)} is no optax transformation, as in {example}")
    return optax.with_extra_args_support(inner)


def check_configuration(state: Any, wanted: str) -> None:
    """Raise ValueError for a state of other options (TypeError for none of ours)."""
    if not isinstance(state, DataParallelState):
        raise TypeError(
            f"the state is a {type(state).__name__}, not the DataParallelState that init of this"
            " transformation makes"
        )
    if wanted not in state.configuration:
        raise ValueError(
            f"the state is of {', '.join(state.configuration)}, and the transformation is {wanted}."
            " Go on with the options of the state, or take over what fits:"
            " from_portable(to_portable(state, its_algorithm), algorithm, tx.init(params),"
            " replicas=…, strict=False)"
        )


def of_one_dtype(
    algorithm: Algorithm,
    arrays: Mapping[str, jax.Array],
    tensors: Mapping[str, Mapping[str, jax.Array]],
) -> tuple[dict[str, jax.Array], dict[str, dict[str, jax.Array]]]:
    """Gradients and memory by name, where no `state_dtype` was given both in the wider dtype of
    both: memory has that of the parameter given to `init`, and what an average in fewer bits would
    lose is then not lost. Warns of an error that is kept in fewer bits than its gradient has."""
    while isinstance(algorithm, (Wrapper, WireDtype)):
        algorithm = algorithm.algorithm
    gradients, memory, narrow = dict(arrays), {name: dict(own) for name, own in tensors.items()}, []
    if getattr(algorithm, "state_dtype", None) is not None:
        return gradients, memory
    for name, x in arrays.items():
        floats = {
            key: m
            for key, m in tensors.get(name, {}).items()
            if jnp.issubdtype(m.dtype, jnp.floating)
        }
        if not floats or not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        kept = next(iter(floats.values())).dtype
        with jax.numpy_dtype_promotion("standard"):  # the user may have forbidden what is implicit
            dtype = jnp.promote_types(x.dtype, kept)
        if dtype != kept and ERROR in floats:
            narrow.append(
                f"the gradient of {name!r} is of {x.dtype}, and its compression error is kept in"
                f" {kept}"
            )
        gradients[name] = x.astype(dtype)
        memory[name] |= {key: m.astype(dtype) for key, m in floats.items()}
    if narrow:
        warnings.warn(
            f"{narrow[0]}, the dtype of the parameter given to init. What rounding takes from the"
            ' error in each step is lost: give state_dtype="float32"',
            CompressionWarning,
            stacklevel=outside(),
        )
    return gradients, memory


def check_placed(state: DataParallelState, axis_name: AxisName) -> None:
    """Raise ValueError for memory that differs between replicas and has not been given to them row
    by row.

    Under `jax.vmap` there is nothing to check: it refuses by itself what differs and has no axis.
    """
    record = state.record
    if record.per_replica is None or not is_manual(axis_name):
        return
    shape = jnp.shape(record.per_replica) if is_placed(record.per_replica) else ()
    if shape != (1,):
        raise ValueError(
            "every replica must be given its own row of the error memory, and the state has not"
            " been divided among them: it says so in `record`, which has"
            f" {shape[0] if shape else 'no'} rows. Replicas would write different errors into an"
            " array that JAX takes to be the same on all. Before training: state ="
            " distribute(state, mesh, axis_name), with partition_specs(state, axis_name) as the"
            " specs of jax.shard_map; or state = replicate(state, axis_name=…) for jax.pmap, with"
            " in_axes=0 (not None), in place of flax.jax_utils.replicate. Or call init inside"
            " the map"
        )
    if tracked(axis_name):
        along = varying_axes(record.per_replica)
        if along and not frozenset(axes_of(axis_name)) <= along:
            raise ValueError(
                f"the error memory was divided along {', '.join(map(repr, sorted(along)))}, and the"
                f" transformation has axis_name={axis_name!r}: give that to partition_specs and"
                " distribute"
            )


def check_axes(
    gradients: NamedTree, state: DataParallelState, params: Any, axis_name: AxisName
) -> None:
    """Raise ValueError for gradients that are not this replica's own, or that differ along more
    axes than their parameter does."""
    if not tracked(axis_name):
        return
    check_local(gradients.leaves, axis_name)
    known = flatten(params).leaves if params is not None else {}
    memory: dict[str, frozenset[str]] = {}
    for trees in (state.memory, state.local.per_replica):
        for tree in trees.values() if isinstance(trees, Mapping) else ():
            for name, x in flatten(tree).leaves.items():
                memory[name] = memory.get(name, frozenset()) | varying_axes(x)
    for name, g in gradients.leaves.items():
        if name not in memory and name not in known:
            continue
        of_parameter = memory.get(name, frozenset()) | (
            varying_axes(known[name]) if name in known else frozenset()
        )
        more = sorted(varying_axes(g) - of_parameter - frozenset(axes_of(axis_name)))
        if more:
            others = ", ".join(map(repr, more))
            raise ValueError(
                f"the gradient of {name!r} varies over {others} as well as over {axis_name!r}, and"
                f" its {'memory' if name in memory else 'parameter'} does not. Average it over"
                f" {others} first, jax.lax.pmean(gradients, {more[0]!r}), or let the replicas span"
                f" these axes too: axis_name={(*axes_of(axis_name), *more)!r}. (If the parameter is"
                f" sharded over {others}, give its memory a spec that says so)"
            )


def check_leaves(named: NamedTree, axis_name: AxisName) -> None:
    """Raise TypeError for leaves that are no arrays, ValueError for dtypes that cannot be averaged,
    with what to do in JAX, and for a name that is a mark in states."""
    for name, x in named.leaves.items():
        if MARK in name.split("/"):
            raise ValueError(
                f"parameter {name!r}: the key {MARK!r} marks in a training state what differs"
                " between replicas, by its name alone, and the parameter would be cut into rows."
                " Give it another name"
            )
        if not (hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))):
            raise TypeError(
                f"parameter {name!r} is a {type(x).__name__}, not an array. Give the transformation"
                " arrays only: of an equinox model, tx.init(eqx.filter(model,"
                " eqx.is_inexact_array)), and gradients of the same"
            )
    for name, s in specs_of(named.leaves).items():
        if s.dtype in ITEMSIZE:
            continue
        if s.dtype.startswith("complex"):
            advice = (
                "Let it be averaged beside the others, as it is:"
                " optax.chain(optax.masked(power_sgd(...), real),"
                f" optax.masked(optax.stateless(lambda g, params: jax.lax.pmean(g, {axis_name!r})),"
                " not_real)), where `real` is a tree like the parameters, False here"
            )
        elif s.dtype.startswith("float") and s.dtype != "float0":
            advice = (
                "Train it in bfloat16, params = optax.tree.cast(params, jax.numpy.bfloat16) before"
                f" init, and cast it to {s.dtype} where the loss takes it"
            )
        else:
            advice = (
                "It has no gradient to average, so leave it out of the tree that is differentiated,"
                " and given to init and update: a collection of its own in Flax,"
                " equinox.partition(model, equinox.is_inexact_array) in equinox"
            )
        raise ValueError(
            f"parameter {name!r} has dtype {s.dtype}; only {', '.join(ITEMSIZE)} gradients can be"
            f" averaged. {advice}. (optax.masked alone would leave each replica a gradient of its"
            " own, and their parameters would drift apart.)"
        )


def check_requests(
    algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int | None = None
) -> None:
    """Raise ValueError for an algorithm that asks for what the JAX driver of averages cannot
    answer, by running it without data.

    `replicas`: how many there are. None: `init` runs outside the map, where nobody knows.
    """
    try:
        requests = _requests(algorithm, specs, replicas)
    except UnknownRequest as error:
        raise ValueError(f"{algorithm!r} cannot be run: {error}") from error
    except NotPortable as error:
        raise ValueError(str(error)) from error
    settings_of(requests)
    for request in requests:
        if refusal := why_not(request):
            raise ValueError(f"{algorithm!r} asks for what the JAX driver cannot answer: {refusal}")


def _requests(
    algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int | None
) -> list[Request]:
    def of(replicas: int | None) -> list[Request]:
        dry = dry_run(algorithm, specs, replicas)
        assert dry.groups is not None  # which raises for no partition
        return dry.requests

    try:
        return of(replicas)
    except UnknownWorldSize:
        pass
    # Which kinds of requests there are, and in which dtypes, is the same for any number of
    # replicas, and more is not asked here: so two of them, the fewest that have something to
    # exchange; or as many as the algorithm itself divides into groups. The step is traced where it
    # is known.
    try:
        return of(2)
    except NoPartition as error:
        return of(error.members)


def warn_of_gathers(axis_name: AxisName) -> None:
    """Say that JAX gathers what is sharded over explicit mesh axes, before the step and after it,
    where the map is not manual over them."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = [name for name in getattr(mesh, "explicit_axes", ()) if mesh.shape[name] > 1]
    if not axes or not is_manual(axis_name):
        return
    warnings.warn(
        f"the mesh axis {axes[0]!r} is of AxisType.Explicit, and jax.shard_map is manual over"
        f" {axis_name!r} alone. At the borders of such a map JAX 0.10 gathers every array that is"
        f" sharded over {axes[0]!r}. Give jax.shard_map the same mesh with that axis left to the"
        " compiler: mesh=mesh.update(axis_types=…), of AxisType.Auto there. Or, with the mesh in"
        f" context, jax.sharding.auto_axes(jax.shard_map(…), axes={tuple(axes)!r}, out_sharding=…)",
        stacklevel=3,
    )


def refuse_slices(axis_name: AxisName) -> None:
    """Raise ValueError for replicas that are divided among devices by the compiler, which `zero1`
    would have them gather."""
    if not (axes := compiler_axes()) or not is_manual(axis_name):
        return
    others = ", ".join(map(repr, axes))
    raise ValueError(
        f"zero1(axis_name={axis_name!r}) where jax.shard_map leaves {others} to the compiler: it"
        " cuts every parameter into as many runs of elements as there are replicas, and for that"
        " XLA would gather what is sharded. The optimizer's state is divided already, along"
        f" {others} as the parameters are: put the optimizer itself behind all_reduce_mean or"
        " power_sgd. Or make the map manual over all axes, with no axis_names=, and give"
        f" zero1(axis_name={axes[0]!r})"
    )


def warn_of_one_vector(named: NamedTree, compressed: bool) -> None:
    """Say that a model in one vector is not compressed."""
    if compressed or list(named.leaves) != [BARE]:
        return
    shape = jnp.shape(named.leaves[BARE])
    if len(shape) == 1 and shape[0] > 1:
        warnings.warn(
            f"the parameters are one vector of {shape[0]} elements, of which nothing is compressed:"
            " a vector is no matrix. optax.flatten makes such a vector; put the compressing"
            " transformation before it: optax.chain(power_sgd(...), optax.flatten(optimizer))",
            stacklevel=3,
        )
