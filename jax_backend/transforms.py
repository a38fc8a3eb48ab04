"""Optax transformations that average gradients over replicas: any algorithm of gradwire, as the
first link of an `optax.chain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import lax

from gradwire.core.algorithm import Algorithm, State, require_algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.algorithms.two_level import TwoLevel, Within, levels_of, without_levels
from gradwire.core.algorithms.weighted import weighted
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.ops import Spec
from gradwire.core.plan.advice import warn
from gradwire.core.plan.dry_run import DryRun, dry_run
from gradwire.core.plan.traffic import LevelBytes
from gradwire.core.protocol.groups import UnknownWorldSize
from gradwire.core.protocol.settings import require_settings, with_settings
from gradwire.core.protocol.weights import weight_of
from gradwire.jax_backend.axes.auto_axes import left_to_the_compiler, lying_alike, whole_memory
from gradwire.jax_backend.axes.mapped_axis import (
    AxisName,
    agreed,
    axes_of,
    is_bound,
    require_axis,
    vary,
    vary_if_tracked,
    varying_axes,
)
from gradwire.jax_backend.axes.two_levels import with_near_axis, with_numbers
from gradwire.jax_backend.checks import (
    check_axes,
    check_configuration,
    check_leaves,
    check_placed,
    check_requests,
    configuration_of,
    of_one_dtype,
    scalar_weight,
    warn_of_gathers,
    warn_of_one_vector,
)
from gradwire.jax_backend.engine.driver import drive_watched
from gradwire.jax_backend.engine.pieces import in_pieces
from gradwire.jax_backend.engine.self_check import check_here
from gradwire.jax_backend.ops.kernels import JaxOps
from gradwire.jax_backend.state.names import NamedTree, flatten, specs_of, stacks_of
from gradwire.jax_backend.state.trees import check_gradients, pack, repack, shardings_like, unpack
from gradwire.jax_backend.state.types import (
    UNSAID,
    Account,
    DataParallelState,
    PerReplica,
    Record,
    place_mark,
)

OPS = JaxOps()


def power_sgd(
    rank: int | Mapping[str, int],
    *,
    axis_name: AxisName,
    within: Within | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Average gradients over replicas as low-rank factors (Vogels, Karimireddy and Jaggi 2019,
    arXiv 1905.13727).

        tx = optax.chain(power_sgd(16, axis_name="data"), optax.adamw(3e-4))

    A step is two all-reduces for the whole model; with `half_step=True` it is one.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from gradwire.jax_backend import distribute, partition_specs, power_sgd, stats
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> tx = power_sgd(16, axis_name="data")
        >>> state = distribute(tx.init({"w": jnp.zeros((512, 512))}), mesh, "data")
        >>> specs = partition_specs(state, "data")
        >>> places = {"in_specs": (P(), specs), "out_specs": (P(), specs)}
        >>> update = jax.shard_map(tx.update, mesh=mesh, **places, check_vma=False)
        >>> averages, state = jax.jit(update)({"w": jnp.ones((512, 512))}, state)
        >>> int(stats(state).wire_bytes), int(stats(state).compression_ratio)
        (65536, 16)

    Args:
        rank: of the approximation; or a mapping from patterns of parameter names to ranks, 0 to
            leave those uncompressed. Names are paths joined by "/": `{"*/Embed_0/*": 0, "*": 4}`.
            `parameter_shapes(params)` lists them.
        axis_name: the axis of the replicas, as given to `jax.pmap` or as it is called in the mesh
            of `jax.shard_map`. A tuple of names averages over all of them together.
        within: replicas that are near each other average as they are, and each sends a part of what
            is compressed: see `gradwire.TwoLevel`. The name of a mesh axis; or how many consecutive
            replicas along `axis_name`, or a partition of them. None: there is one level.
        **options: of `gradwire.PowerSGD`. What is stacked (`nn.scan`, `nn.vmap`, experts) has to be
            said: `stacked={"layers/*": 1}`. It is known without that where Flax has named the axes
            of a parameter, and the first is called as a stack is
            (`gradwire.jax_backend.state.names.STACK_AXES`): with `nn.with_partitioning` and
            `nn.scan(metadata_params={nn.PARTITION_NAME: "layers"})`, or
            `nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})`.

    Returns:
        See `average_gradients`.

    Raises:
        TypeError: inside `optax.inject_hyperparams`.
        ValueError: see `gradwire.PowerSGD`.
    """
    given: Any = rank
    if "options" in options or isinstance(given, jax.Array):
        raise TypeError(
            "power_sgd cannot be inside optax.inject_hyperparams: its options decide shapes and"
            " messages, and cannot change from step to step. Inject into the optimizer behind it:"
            " optax.chain(power_sgd(4, axis_name=…), optax.inject_hyperparams(optax.adamw)(…))"
        )
    algorithm = PowerSGD(rank, **options)
    return average_gradients(
        algorithm if within is None else TwoLevel(algorithm, within), axis_name=axis_name
    )


def all_reduce_mean(
    *, axis_name: AxisName, bucket_bytes: int | None = None, first_bucket_bytes: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Average gradients over replicas as they are, in one all-reduce per dtype, or in one for each
    bucket.

    Gradients are not copied: this costs what `lax.pmean` does. Buckets are what this function hands
    to XLA, one `psum` of a list for each. XLA joins all-reduces up to a threshold of its own, on
    GPU `--xla_gpu_all_reduce_combine_threshold_bytes`, whatever the bucket.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gradwire.jax_backend import all_reduce_mean
        >>> tx = all_reduce_mean(axis_name="data")
        >>> gradients = {"w": jnp.array([[1.0], [3.0]])}    # a row for each replica
        >>> update = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data"))
        >>> update(gradients)["w"].tolist()
        [[2.0], [2.0]]

    Args:
        axis_name: see `power_sgd`.
        bucket_bytes: size of a bucket; it exceeds it by less than one parameter. Buckets hold one
            dtype and are filled in reverse order of the parameters, as the backward pass finds
            gradients, so that the first all-reduce can overlap with the rest of it. None: all
            parameters of a dtype share one all-reduce, which waits for the last gradient.
        first_bucket_bytes: size of the first bucket of each dtype. None: as the others.

    Returns:
        See `average_gradients`.

    Raises:
        ValueError: a size that is not positive, or `first_bucket_bytes` alone.
    """
    return average_gradients(AllReduce(bucket_bytes, first_bucket_bytes), axis_name=axis_name)


def average_gradients(
    algorithm: Algorithm, *, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """Any algorithm as an Optax transformation: `PowerSGD`, `AllReduce`, `WireDtype(...)`, or a
    `Compressor` of your own.

    It turns the gradients of one replica into what the optimizer is given on every replica, the
    same bits on all of them. Give it *local* gradients, with no `pmean` before it. It must not be
    inside `optax.apply_if_finite`; put that after it. A step in which any replica's gradient holds
    an inf or NaN gives non-finite updates on all replicas and leaves the memory as it was.

    To accumulate gradients, scan over micro-batches inside the training step: `optax.MultiSteps`
    runs what it wraps at every micro-step, collectives included, and throws all results but the
    last away.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gradwire import TopK
        >>> from gradwire.jax_backend import average_gradients
        >>> tx = average_gradients(TopK(1, per=4), axis_name="data")
        >>> update = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data"))
        >>> gradients = {"w": jnp.array([[1.0, 4.0, 2.0, 3.0] * 4, [8.0, 0.0, 0.0, 0.0] * 4])}
        >>> update(gradients)["w"][0, :4].tolist()
        [4.0, 2.0, 0.0, 0.0]

    Args:
        algorithm: what to do. Products are at full float32 precision, on a TPU those with gradients
            to about 2⁻¹⁶.
        axis_name: the axis of the replicas, as given to `jax.pmap` or as it is called in the mesh
            of `jax.shard_map`. A tuple of names averages over all of them together.

    Returns:
        A transformation whose `init` runs anywhere, on arrays or `jax.ShapeDtypeStruct`s, and whose
        `update` runs inside a map over `axis_name`. The state is a `DataParallelState`; memory that
        differs between replicas is marked in it, see `partition_specs`, `distribute`, `replicate`
        and `unreplicate`. A parameter may have no gradient (None) in a step, the same on all
        replicas; its memory then stays as it is.

        `init` warns (`gradwire.CompressionWarning`) where much stays uncompressed, or a tensor
        looks like a stack. It raises ValueError for parameters that the algorithm cannot serve, and
        for an algorithm that asks for what is not answered here. `update` raises, while it is
        traced: NameError if the axis is not bound; ValueError for gradients that autodiff has
        already summed over the replicas (see `mark_varying`), that cannot be averaged (integers),
        or that are not those of the parameters given to `init`.

    Raises:
        TypeError: for what is no algorithm, or no name of an axis.

    Replicas count by their weights where these are given, `tx.update(gradients, state, params,
    weight=tokens)`, also through an `optax.chain`: a number or a scalar array, 0 for a replica that
    is absent. See `gradwire.Weighted`. If all are 0, updates are NaN and the memory stays as it
    was.

    `tx.update(…, settings={"threshold": 0.05})` tells the algorithm what it asks for with `await
    setting(ops, "threshold", …)`, in this step:
    numbers or scalar arrays, the same on every replica.
    """
    require_algorithm(algorithm)
    axes_of(axis_name)
    both = _Averaging(algorithm, with_near_axis(algorithm, axis_name), configuration_of(algorithm))
    return optax.GradientTransformationExtraArgs(both.init, both.update)


@dataclass(frozen=True, eq=False)
class _Averaging:
    """Both halves of the transformation."""

    algorithm: Algorithm
    axis_name: AxisName
    configuration: str

    def init(self, params: optax.Params) -> DataParallelState:
        named = flatten(params)
        check_leaves(named, self.axis_name)
        specs = specs_of(named.leaves, stacks_of(params))
        inside = is_bound(self.axis_name)
        replicas: int | None = lax.axis_size(self.axis_name) if inside else None
        algorithm = (
            with_numbers(self.algorithm, self.axis_name)
            if inside
            else without_levels(self.algorithm)
        )
        check_requests(algorithm, specs, replicas)
        warn(algorithm, specs)
        if not inside:
            check_here(algorithm, specs, params)
        rows = place_mark(placed=inside) if algorithm.per_replica else None
        stages = tuple(sorted({0, algorithm.start_step}))
        sent = _sent(algorithm if inside else self.algorithm, specs, replicas)
        record = Record(rows, self.axis_name, stages, ordered=levels_of(self.algorithm) is not None)
        account = [UNSAID] * len(stages) if sent is None else sent
        dense_bytes = sum(s.nbytes for s in specs.values())

        def make() -> DataParallelState:
            made: State[jax.Array] = algorithm.init(OPS, specs)
            # Made inside the map, memory is divided along other axes as its parameter is.
            for name, memory in made.tensors.items():
                along = varying_axes(named.leaves[name]) - frozenset(axes_of(self.axis_name))
                made.tensors[name] = {key: vary(x, along) for key, x in memory.items()}
            if algorithm.per_replica:
                warn_of_one_vector(named, bool(made.tensors))
            memories = getattr(algorithm, "memories", None)
            return pack(
                params,
                made,
                algorithm.per_replica,
                self.configuration,
                record,
                account,
                dense_bytes,
                memories,
            )

        shardings = shardings_like(params, make)
        # Compiled as a whole: op by op, every shape of a large model would compile its own little
        # kernels.
        return self._own(jax.jit(make, out_shardings=shardings)())

    def update(
        self,
        updates: optax.Updates,
        state: DataParallelState,
        params: optax.Params | None = None,
        *,
        weight: Any = None,
        settings: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> tuple[optax.Updates, DataParallelState]:
        require_axis(self.axis_name, type(self.algorithm).__name__)
        warn_of_gathers(self.axis_name)
        gradients = self._checked(updates, state, params)
        arrays = {name: jnp.asarray(g) for name, g in gradients.leaves.items()}
        state = self._own(state)
        before, step = unpack(state), agreed(state.step, self.axis_name)
        before.shared = agreed(before.shared, self.axis_name)
        arrays, before.tensors = of_one_dtype(self.algorithm, arrays, before.tensors)
        mine = before.of(arrays)
        algorithm = with_numbers(self.algorithm, self.axis_name)
        if weight is not None:
            algorithm, weight = weighted(algorithm), scalar_weight(weight)
        if settings:
            asked = dry_run(algorithm, specs_of(arrays), lax.axis_size(self.axis_name)).settings
            require_settings(self.algorithm, settings, asked)
        values = {name: weight_of(OPS, value) for name, value in (settings or {}).items()}
        given = arrays, mine.shared, mine.tensors
        averages, shared, tensors, finite = left_to_the_compiler(
            partial(self._exchange, algorithm), *given, step, weight, values, like=(*given, None)
        )
        after = repack(state, State(shared, tensors), finite)
        if after.account is not None:
            abstract = mine.map(lambda x: AbstractArray(tuple(x.shape), x.dtype.name))
            specs = specs_of(arrays)
            sent = DryRun(algorithm, specs, lax.axis_size(self.axis_name), abstract).stages
            account = _accounted(after.account, sent, specs, _counted(updates, arrays, params))
            after = after._replace(account=account)
        return gradients.rebuild(averages), after

    def _checked(
        self, updates: optax.Updates, state: Any, params: optax.Params | None
    ) -> NamedTree:
        """The gradients by name. Raises what `average_gradients` says."""
        check_configuration(state, self.configuration)
        check_placed(state, self.axis_name)
        gradients = flatten(updates)
        check_leaves(gradients, self.axis_name)
        check_axes(gradients, state, params, self.axis_name)
        check_gradients(gradients, state)
        return gradients

    def _exchange(
        self,
        algorithm: Algorithm,
        arrays: Any,
        shared: Any,
        tensors: Any,
        step: Any,
        weight: Any,
        settings: Any,
    ) -> Any:
        """The step itself, with all axes but those of the replicas left to the compiler: averages,
        memory, whether all was finite."""
        memory = State(shared, whole_memory(tensors, arrays))
        if weight is None:
            program = in_pieces(algorithm, self.axis_name).step(OPS, arrays, memory, step)
        else:
            program = weighted(algorithm).step(OPS, arrays, memory, step, weight)
        (averages, after), finite = drive_watched(
            with_settings(program, settings), self.axis_name, given=arrays
        )
        return (
            lying_alike(averages, arrays),
            after.shared,
            whole_memory(after.tensors, arrays),
            finite,
        )

    def _own(self, state: DataParallelState) -> DataParallelState:
        # A loop over steps inside shard_map wants memory that varies after a step to vary before
        # it.
        return state._replace(
            local=PerReplica(vary_if_tracked(state.local.per_replica, self.axis_name))
        )


def _counted(
    updates: optax.Updates, arrays: Mapping[str, jax.Array], params: optax.Params | None
) -> int | None:
    """The bytes of all parameters, as `init` has counted them; without `params` as if these were
    float32. None if some have no gradient."""
    if params is None:
        whole = all(x is not None for x in jax.tree.leaves(updates, is_leaf=lambda x: x is None))
        return sum(4 * x.size for x in arrays.values()) if whole else None
    named = {n: x for n, x in flatten(params).leaves.items() if hasattr(x, "dtype")}
    whole = named.keys() <= arrays.keys()
    return sum(x.dtype.itemsize * arrays[n].size for n, x in named.items()) if whole else None


def _accounted(
    account: Account, sent: Sequence[LevelBytes], specs: Mapping[str, Spec], counted: int | None
) -> Account:
    """The account with the bytes of steps as they are from now on: in one of `init`, or of a
    checkpoint, they may be those of another number of replicas, another wire dtype or wider
    gradients. A step in which parameters have no gradient says nothing of others."""
    now = jnp.asarray(sent, jnp.float32)
    if counted is None:
        return account._replace(sent=jnp.where(account.sent < 0, now, account.sent))
    dense_bytes = sum(s.nbytes for s in specs.values())
    return account._replace(
        sent=now,
        dense_bytes=account.dense_bytes
        if dense_bytes == counted
        else jnp.asarray(dense_bytes, jnp.float32),
    )


def _sent(
    algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int | None
) -> list[LevelBytes] | None:
    """Bytes of a step in each stage. None where they depend on the number of replicas, and nobody
    has said it."""
    if replicas is None and levels_of(algorithm) is not None:
        return None
    try:
        return dry_run(algorithm, specs, replicas).stages
    except UnknownWorldSize:
        return None
