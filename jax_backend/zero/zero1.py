"""ZeRO in JAX: an optax transformation whose state, and whose work, is divided among the replicas
(Rajbhandari et al. 2020, §5).

    tx = zero1(optax.adamw(3e-4), axis_name="data", replicas=jax.device_count())

takes the place of `optax.chain(all_reduce_mean(axis_name="data"), optax.adamw(3e-4))`: the same
updates for as many bytes, each device with 1/W of the optimizer's state. Parameters stay whole on
every replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import lax
from jax.sharding import NamedSharding

from gradwire.core.algorithm import State
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.codecs.options import WireName
from gradwire.core.ops import Ops, Spec, wide_dtype
from gradwire.core.text.name_patterns import chosen
from gradwire.core.text.options import OWN_CHECK, AtLeast1, Positive, Replicas, checked
from gradwire.core.text.wording import some
from gradwire.core.zero.sharded_step import Zero, clip_by_norm
from gradwire.core.zero.sharding import ElementShards
from gradwire.core.zero.stacks import StackShards
from gradwire.jax_backend.axes.auto_axes import explicit_mesh
from gradwire.jax_backend.axes.mapped_axis import (
    AxisName,
    axes_of,
    check_local,
    is_bound,
    require_axis,
    tracked,
    vary_if_tracked,
    varying_axes,
)
from gradwire.jax_backend.axes.outside_meshes import automatic, outside_meshes, with_axes_like
from gradwire.jax_backend.checks import check_leaves, refuse_slices, transformation
from gradwire.jax_backend.engine.barrier import await_processes
from gradwire.jax_backend.engine.driver import LARGE, drive
from gradwire.jax_backend.engine.self_check import check_here
from gradwire.jax_backend.ops.kernels import JaxOps
from gradwire.jax_backend.ops.packing import columns
from gradwire.jax_backend.state.names import NamedTree, flatten, pure, specs_of
from gradwire.jax_backend.state.types import (
    PerReplica,
    Record,
    by_path,
    layout_of,
    on_devices,
    path_of,
    require_own_row,
    spec,
)
from gradwire.jax_backend.zero.elementwise import divided_leaves, require_elementwise, rows_of
from gradwire.jax_backend.zero.independent import require_independent
from gradwire.jax_backend.zero.owners import Owners
from gradwire.jax_backend.zero.stacked_names import has_owners, keys_of_slots, require_plain
from gradwire.jax_backend.zero.state import (
    ZeroState,
    in_memory_of_parameters,
    joined_state,
    keys_of,
    split_state,
)

OPS = JaxOps()


@dataclass(frozen=True, repr=False)
class _Shards(ElementShards):
    """Shards that are taken apart in JAX's own way. A large array whose first axis all replicas can
    share evenly is a message by itself, in its own shape: to join it with others, or to lay it out
    as a vector, would be a copy. Not if it is `coded`, in vectors."""

    coded: bool = False

    def _is_apart(self, names: Sequence[str]) -> bool:
        spec = self.specs[names[0]]
        even = len(spec.shape) > 1 and spec.shape[0] % self.world_size == 0
        return len(names) == 1 and even and spec.nbytes >= LARGE and not self.coded

    def together(self, names: Sequence[str]) -> list[list[str]]:
        apart = [[name] for name in names if self._is_apart([name])]
        others = [name for name in names if not self._is_apart([name])]
        return [*apart, *super().together(others)]

    def message(self, ops: Ops[jax.Array], arrays: Mapping[str, jax.Array]) -> jax.Array:  # type: ignore[override]
        x, *_ = arrays.values()
        return x if self._is_apart(list(arrays)) else super().message(ops, arrays)

    def shard(  # type: ignore[override]
        self,
        ops: Ops[jax.Array],
        pieces: Mapping[str, jax.Array],
        names: Sequence[str],
        replica: Any,
    ) -> jax.Array:
        if not self._is_apart(names):
            return super().shard(ops, pieces, names, replica)
        first, *rest = self.specs[names[0]].shape
        return pieces[names[0]].reshape((first // self.world_size, *rest))

    def whole(  # type: ignore[override]
        self, ops: Ops[jax.Array], message: jax.Array, names: Sequence[str], out: Any = None
    ) -> dict[str, jax.Array]:
        if self._is_apart(names):
            return {names[0]: message}
        return super().whole(ops, message, names, out)

    def pieces(self, shard: jax.Array, names: Sequence[str], replica: Any) -> dict[str, jax.Array]:  # type: ignore[override]
        if self._is_apart(names):
            return {names[0]: shard.reshape(self.piece_shape(names[0]))}
        row = shard.reshape((1, -1))
        cut = [
            x.reshape(self.piece_shape(name))
            for name, x in zip(
                names, columns(row, [self.length(name) for name in names]), strict=True
            )
        ]
        # Otherwise XLA on CPU writes each cut into the kernel that uses it and has as many to
        # compile as there are parameters, not shapes: 145 parameters took 20 seconds instead of 7.
        cut = lax.optimization_barrier(cut)  # type: ignore[no-untyped-call]
        return dict(zip(names, cut, strict=True))


@checked
def zero1(
    inner: Annotated[optax.GradientTransformation, OWN_CHECK],
    *,
    axis_name: AxisName,
    replicas: Replicas | None = None,
    averaged: bool = False,
    wire_dtype: WireName | None = None,
    bucket_bytes: AtLeast1 | None = None,
    skip_non_finite: bool = False,
    elementwise: bool = False,
    shard: Literal["element", "parameter"] = "element",
    stacked: str | Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Average gradients over replicas and optimize, each replica its part: reduce-scatter, `inner`,
    all-gather of the updates.

        adamw = optax.adamw(schedule, mask=decay_mask)
        tx = zero1(adamw, axis_name="data", replicas=jax.device_count())
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        state = replicate(state, axis_name="data")

    Give it *local* gradients, with no `pmean` before it. `inner` is called with trees like the
    parameters, in which every parameter of n elements is a piece of ⌈n/W⌉ of them with the
    parameter's number of dimensions, so masks by name and by dimensions mean what they mean without
    it. After `average_gradients`, which leaves every replica with the average:

        sharded = zero1(optax.adamw(3e-4), axis_name="data", replicas=…, averaged=True)
        average = average_gradients(WireDtype(PowerSGD(16), "int8"), axis_name="data")
        tx = optax.chain(average, sharded)

    Where `jax.shard_map` leaves axes to the compiler (`axis_names={"dcn"}`) pieces of parameters
    are refused: the optimizer's state is divided along those axes already. `shard="parameter"`
    works there. Each device of a slice sends its part; then matrices are whole on all devices of
    their owner.

    Under plain `jax.jit` no such wrapper is needed: shard the arrays of the optimizer's state
    (`jax.device_put` them with a `NamedSharding`) and XLA does the rest.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from gradwire.jax_backend import zero1
        >>> tx = zero1(optax.adamw(3e-4), axis_name="data", replicas=4)
        >>> state = tx.init({"w": jnp.zeros((10, 3))})    # 30 elements, pieces of 8
        >>> {path: piece.shape for path, piece in state.pieces.per_replica.items()}
        {'0.mu.w': (4, 1, 8), '0.nu.w': (4, 1, 8)}

    Args:
        inner: an optimizer that treats every element by itself, `optax.MultiSteps` round one, or a
            chain of such with `gradwire.jax_backend.clip_by_global_norm`.
        axis_name: the axis of the replicas, see `power_sgd`.
        replicas: how many there are, W. Needed where `init` is called outside the map, as by
            `TrainState.create`.
        averaged: gradients are averages already, equal on all replicas. They are not sent again;
            each replica takes its part.
        wire_dtype: gradients travel to their owners in this dtype, and are summed in float32:
            "int8" and the others of `gradwire.WireDtype`. Updates travel as they are. None: so do
            gradients.
        bucket_bytes: size of the messages, see `all_reduce_mean`. None: one reduce-scatter and one
            all-gather per dtype, besides those of each array of 1 MiB and more whose first axis W
            divides, which is not copied to be sent.
        skip_non_finite: when any replica's gradients hold an inf or NaN, the update is zero and the
            state stays as it is, on all replicas; so if their norm overflows. Costs the sum of one
            scalar.
            (`optax.apply_if_finite` looks at one replica's part, so it cannot stand inside.)
        elementwise: `inner` treats every element by itself. False: `init` finds out, by some
            updates of random numbers on whole parameters and on pieces (no more than two million
            elements of them). True: it is not tried, and what of its state is no piece has to come
            out equal on all replicas.
        shard: "element": every parameter in pieces. "parameter": parameters stay whole, for an
            `inner` that needs them so (`optax.contrib.muon`, Adafactor, …) and treats each by
            itself, which `init` tries out. W of one shape and dtype are a stack, of which each
            replica has one, under the name of the first of the stack; under the other names `inner`
            finds `optax.MaskedNode`. What is left over of a shape fills one more stack, or has
            owners together with what is left over of others, by work; see
            `gradwire.core.zero.stacks`. A single matrix that would be alone so, and less than W/2
            vectors of one length, are updated on every replica, as without `zero1`.
        stacked: with `shard="parameter"`, patterns of the names of arrays whose first axis counts
            layers (`nn.scan`), of which each replica has ⌈L/W⌉. `inner` must treat each layer by
            itself, as `optax.contrib.muon` does if its dimension numbers leave out that axis.

    Returns:
        A transformation whose `update` runs inside a map over `axis_name`, and whose `init` runs
        inside it or outside. The state is a `ZeroState` for `partition_specs`, `distribute`,
        `replicate` and `unreplicate`: `init` makes it in local form inside the map and in global
        form, all pieces on one device, outside. Updates have the dtypes that `inner` gives them.

        `init` raises ValueError for an `inner` that does something else on pieces than on whole
        parameters, naming the first update or state that differs; for parameters that cannot be
        averaged; and where the number of replicas is not known, or not `replicas`. `update` raises
        what that of `average_gradients` does, and ValueError for a state made for another number of
        replicas.

    Raises:
        TypeError: for what is no name of an axis, or no transformation.
        ValueError: for a number of replicas below 1, a size that is not positive, no dtype to send
            in, buckets or a dtype where nothing is reduced, `shard="parameter"` with
            `elementwise=True` or `bucket_bytes`, or `stacked` without it.
    """
    axes_of(axis_name)
    inner = transformation(inner, "zero1(optax.adam(1e-3), axis_name='data')")
    if replicas is not None and replicas < 1:
        raise ValueError(f"replicas={replicas} must be at least 1")
    _require_way(shard, elementwise, bucket_bytes, stacked)
    if averaged:
        _require_nothing_to_reduce(bucket_bytes, wire_dtype, axis_name)
    algorithm = None if averaged else AllReduce(bucket_bytes)
    wire = None if wire_dtype is None else WireDtype(AllReduce(), wire_dtype)
    layers = (stacked,) if isinstance(stacked, str) else tuple(stacked)
    sharded = _Sharded(
        inner,
        axis_name,
        replicas,
        algorithm,
        wire,
        skip_non_finite,
        elementwise,
        shard == "parameter",
        layers,
    )
    return optax.GradientTransformationExtraArgs(sharded.init, sharded.update)


@dataclass(frozen=True, eq=False)
class _Sharded:
    inner: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    replicas: int | None
    algorithm: AllReduce | None
    wire: WireDtype | None
    skip_non_finite: bool
    elementwise: bool
    whole: bool
    layers: tuple[str, ...]
    # trees of shapes: `init` is called again for abstract states
    tried: set[Any] = field(default_factory=set)

    @outside_meshes
    def init(self, params: optax.Params) -> ZeroState:
        named = flatten(params)
        if (
            not named.leaves
            and params is not None
            and not isinstance(params, (Mapping, list, tuple))
        ):
            # `optax.tree.map_params` gives a placeholder, and looks for it in the state.
            return ZeroState(self.inner.init(params), PerReplica(params), params)
        made = self._made(params, named)
        axes = sum(x.ndim for x in made.pieces.per_replica.values())
        place = Record(None, self.axis_name, (), averages=self.algorithm is not None, ordered=True)
        return made._replace(
            layout=layout_of(self._shards(specs_of(named.leaves)).world_size, axes, place)
        )

    def _made(self, params: optax.Params, named: NamedTree) -> ZeroState:
        structure = jax.tree.structure(pure(params))
        check_leaves(named, self.axis_name)
        specs = specs_of(named.leaves)
        if self.wire is not None and not is_bound(self.axis_name):
            check_here(self.wire, specs, params)
        shards = self._shards(specs)

        require_plain(specs)

        def tree(own: Mapping[str, Any]) -> Any:
            return jax.tree.unflatten(
                structure, [own.get(name, optax.MaskedNode()) for name in specs]
            )

        if not (
            self.elementwise
            or (known := (structure, *specs.values(), shards.world_size)) in self.tried
        ):
            if isinstance(shards, StackShards):
                require_independent(self.inner, structure, shards, self.axis_name)
            else:
                require_elementwise(self.inner, structure, shards, self.axis_name)
            self.tried.add(known)
        struct: Any = jax.ShapeDtypeStruct
        shapes = shards.layout(list(specs), 0) | {
            name: specs[name].shape for name in specs if shards.is_kept(name)
        }
        pieces = tree(
            _without_owners(
                shards, {n: struct(shape, specs[n].dtype) for n, shape in shapes.items()}
            )
        )
        keys = self._keys(shards, pieces, tree)
        owners = Owners(self.inner, shards, tree) if isinstance(shards, StackShards) else None
        inside = is_bound(self.axis_name)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in named.leaves.values()):
            count = 1 if inside else shards.world_size
            # of shapes optimizers make arrays, if they read no parameters
            abstract = self.inner.init(pieces)
            state = split_state(
                abstract, keys, lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x)))
            )
            every = {name: struct(spec.shape, spec.dtype) for name, spec in specs.items()}
            return _with(
                state, {key: x[:count] for key, x in owners.init(every).items()} if owners else {}
            )
        await_processes("init of zero1", named.leaves)
        mesh = explicit_mesh(named.leaves)
        arrays = {name: on_devices(x) for name, x in _arrays(named).items()}
        arrays = jax.tree.map(automatic, arrays) if mesh is None else arrays
        if inside:
            place = lax.axis_index(self.axis_name)
            own = _without_owners(shards, shards.own(OPS, arrays, place))
            state = split_state(self.inner.init(tree(own)), keys, self._local_form)
            vectors = owners.init(arrays) if owners else {}
            return _with(state, {key: self._local_form(x[place]) for key, x in vectors.items()})

        def of_all_replicas(arrays: dict[str, jax.Array]) -> ZeroState:
            arrays = {name: arrays[name] for name in specs}  # JAX has sorted them
            kept = {name: x for name, x in arrays.items() if shards.is_kept(name)}

            def leaves(own: dict[str, jax.Array]) -> list[Any]:
                return jax.tree.leaves(self.inner.init(tree(_without_owners(shards, own) | kept)))

            rows = (
                shards.stacked(OPS, {name: x for name, x in arrays.items() if name not in kept})
                if isinstance(shards, StackShards)
                else dict(zip(arrays, rows_of(shards, list(arrays.values())), strict=True))
            )
            stacked = jax.vmap(leaves, axis_size=shards.world_size)(rows)
            each = [x[0] if key is None else x for x, key in zip(stacked, keys, strict=True)]
            state = jax.tree.unflatten(
                jax.tree.structure(jax.eval_shape(self.inner.init, pieces)), each
            )
            return _with(
                split_state(state, keys, lambda x: x), owners.init(arrays) if owners else {}
            )

        made: ZeroState
        plain = jax.eval_shape(
            self.inner.init, tree({name: struct(s.shape, s.dtype) for name, s in specs.items()})
        )
        if mesh is None:
            made = with_axes_like(jax.jit(of_all_replicas)(arrays), named.leaves)
            return in_memory_of_parameters(made, plain, named.leaves)
        whole = {name: struct(x.shape, x.dtype) for name, x in arrays.items()}
        lying = jax.tree.map(
            lambda _: NamedSharding(mesh, spec()), jax.eval_shape(of_all_replicas, whole)
        )
        along = tuple(a for a in axes_of(self.axis_name) if a in mesh.explicit_axes)
        if shards.world_size % math.prod(mesh.shape[a] for a in along) == 0:
            lying = lying._replace(
                pieces=jax.tree.map(lambda _: NamedSharding(mesh, spec(along)), lying.pieces)
            )
        made = jax.sharding.auto_axes(of_all_replicas, axes=mesh.explicit_axes, out_sharding=lying)(
            arrays
        )
        return in_memory_of_parameters(made, plain, named.leaves)

    def _keys(
        self, shards: _Shards | StackShards, pieces: Any, tree: Callable[[Mapping[str, Any]], Any]
    ) -> list[str | None]:
        """The key in `ZeroState.pieces` of each leaf of the inner state on these pieces; None for
        what is equal on all replicas."""
        if isinstance(shards, StackShards):
            return keys_of_slots(self.inner.init, shards, tree, shards.specs)
        state = by_path(jax.eval_shape(self.inner.init, pieces))
        divided = divided_leaves(self.inner, pieces)
        return [path if own else None for (path, _), own in zip(state, divided, strict=True)]

    def update(
        self,
        updates: optax.Updates,
        state: ZeroState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, ZeroState]:
        require_axis(self.axis_name, "zero1")
        told = [f"{key}=" for key in ("weight", "settings") if key in extra]
        if told and self.algorithm is not None:
            raise ValueError(
                f"zero1 averages gradients of replicas that all count alike, without {told[0]}; put"
                " the averages before it: optax.chain(average_gradients(…), zero1(inner,"
                " averaged=True, …))"
            )
        gradients = flatten(updates)
        check_leaves(gradients, self.axis_name)
        (_check_averaged if self.algorithm is None else _check_local)(gradients, self.axis_name)
        named = None if params is None else flatten(params)
        specs = specs_of(gradients.leaves)
        if named is not None:  # divided as `init` has done, by their dtypes
            known = specs_of(named.leaves)
            specs = {name: known.get(name, spec) for name, spec in specs.items()}
        shards = self._shards(specs)
        state, vectors = _apart(state)
        before, keys = _join(state), keys_of(state)
        own = None if named is None else self._own_pieces(named)
        own_params = (
            None if named is None or own is None else _rebuilt(named, _without_owners(shards, own))
        )
        owners = (
            Owners(self.inner, shards, partial(_rebuilt, named or gradients))
            if isinstance(shards, StackShards)
            else None
        )
        after: list[Any] = []
        dtypes: dict[str, Any] = {}

        def optimize(pieces: dict[str, jax.Array], ok: jax.Array | None) -> dict[str, jax.Array]:
            tree = _rebuilt(gradients, _without_owners(shards, pieces))
            _check_pieces(
                self.inner,
                tree if params is None else own_params,
                before,
                self.axis_name,
                strict=self.whole,
            )
            new, new_state = self.inner.update(tree, before, own_params, **extra)
            if len(jax.tree.leaves(new_state)) != len(keys):
                given = set(gradients.leaves)
                gone = [] if named is None else [n for n in named.leaves if n not in given]
                raise ValueError(
                    "zero1: the state of inner has other arrays after this update than before it."
                    f" Parameters without a gradient: {some(gone)}, for which zeros would do"
                )
            leaves = {name: jnp.asarray(x) for name, x in flatten(new).leaves.items()}
            new_vectors: dict[str, jax.Array] = {}
            if owners is not None:
                _check_owners(owners, vectors, self.axis_name)
                ragged = {name: x for name, x in pieces.items() if name in owners.slots}
                updates, new_vectors = owners.update(
                    ragged, vectors, before, own, extra, self.axis_name
                )
                leaves |= updates
            results = leaves, new_state, new_vectors
            if ok is not None:
                unchanged = {name: jnp.zeros_like(x) for name, x in leaves.items()}, before, vectors
                results = jax.tree.map(lambda x, old: jnp.where(ok, x, old), results, unchanged)
            after.extend(results[1:])
            dtypes.update({name: x.dtype for name, x in leaves.items()})
            return results[0]

        zero = Zero(shards, self.algorithm, skip_non_finite=self.skip_non_finite)
        program = zero.step(OPS, _arrays(gradients), State(), 0)
        if self.wire is not None:
            program = self.wire.carried(OPS, program, "", 0)
        results, _ = drive(program, self.axis_name, optimize, given=_arrays(gradients))
        # Pieces of different dtypes that share a message travel in the widest.
        places = shards.places if isinstance(shards, StackShards) else {}
        results = {
            name: x.astype(dtypes[places.get(name, (name,))[0]]) for name, x in results.items()
        }
        new_state, new_vectors = after
        rows = {key: self._local_form(x) for key, x in new_vectors.items()}
        new = split_state(new_state, keys, self._local_form)._replace(layout=state.layout)
        return gradients.rebuild(results), _with(new, rows)

    def _shards(self, specs: Mapping[str, Spec]) -> _Shards | StackShards:
        def kind(specs: Mapping[str, Spec], size: int) -> _Shards | StackShards:
            layers = (
                frozenset(chosen("stacked", self.layers, specs))
                if self.layers and specs
                else frozenset[str]()
            )
            if flat := [name for name in layers if not specs[name].shape]:
                raise ValueError(
                    f"stacked: {flat[0]!r} is a scalar, and has no axis of layers; leave it out of"
                    " the pattern"
                )
            return (
                StackShards(specs, size, layers)
                if self.whole
                else _Shards(specs, size, self.wire is not None)
            )

        if not is_bound(self.axis_name):
            if self.replicas is None:
                raise ValueError(
                    f"zero1: outside a map over {self.axis_name!r} init cannot know the number of"
                    f" replicas: pass it, as in zero1(inner, axis_name={self.axis_name!r},"
                    " replicas=jax.device_count())"
                )
            return kind(specs, self.replicas)
        if not self.whole:
            refuse_slices(self.axis_name)
        size = lax.axis_size(self.axis_name)
        if self.replicas not in (None, size):
            raise ValueError(
                f"zero1: replicas={self.replicas}, but the axis {self.axis_name!r} has {size}"
            )
        return kind(specs, size)

    def _own_pieces(self, named: NamedTree) -> dict[str, jax.Array]:
        shards = self._shards(specs_of(named.leaves))
        return shards.own(OPS, _arrays(named), lax.axis_index(self.axis_name))

    def _local_form(self, x: jax.Array) -> jax.Array:
        # Marked, for a loop over steps inside shard_map: what varies after a step must vary before
        # it.
        return vary_if_tracked(x[None], self.axis_name)


@checked
def clip_by_global_norm(max_norm: Positive, axis_name: AxisName) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` for pieces of gradients, inside `zero1`: the norm is that of all
    pieces of all replicas.

        inner = optax.chain(clip_by_global_norm(1.0, "data"), optax.adamw(3e-4))
        tx = zero1(inner, axis_name="data", replicas=…)

    Anywhere else it would count every gradient W times. Costs the sum of one scalar over the
    replicas.

    Args:
        max_norm: scale gradients down to this 2-norm.
        axis_name: as given to `zero1`.

    Returns:
        A stateless transformation whose `update` runs inside a map over `axis_name`; there it
        raises ValueError, where JAX knows, for gradients that are the same on all replicas.

    Raises:
        TypeError: for what is no name of an axis.
        ValueError: for a norm that is not positive.
    """
    axes_of(axis_name)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        require_axis(axis_name, "clip_by_global_norm")
        named = flatten(updates)
        if not named.leaves:
            return updates, state
        pieces = _arrays(named)
        if tracked(axis_name) and not all(
            frozenset(axes_of(axis_name)) <= varying_axes(x) for x in pieces.values()
        ):
            raise ValueError(
                "clip_by_global_norm of gradwire adds up pieces, inside zero(...). These gradients"
                " are the same on all replicas: use optax.clip_by_global_norm."
            )
        summed = wide_dtype(*(x.dtype.name for x in pieces.values()))
        program = clip_by_norm(OPS, pieces, max_norm, summed)
        clipped, _ = drive(program, axis_name)
        return named.rebuild(clipped), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _require_way(
    shard: str, elementwise: bool, bucket_bytes: int | None, stacked: str | Sequence[str]
) -> None:
    if shard not in ("element", "parameter"):
        raise ValueError(f"shard={shard!r} is not one of 'element', 'parameter'")
    if shard == "parameter" and (elementwise or bucket_bytes is not None):
        given = "elementwise=True" if elementwise else f"bucket_bytes={bucket_bytes}"
        raise ValueError(
            f"{given} is for pieces of parameters; leave it out, or leave out shard='parameter'"
        )
    if shard == "element" and stacked:
        raise ValueError(
            f"stacked={stacked!r} says what is divided by layers, and needs shard='parameter'"
        )


def _require_nothing_to_reduce(
    bucket_bytes: int | None, wire_dtype: Any, axis_name: AxisName
) -> None:
    if bucket_bytes is not None:
        raise ValueError(
            f"bucket_bytes={bucket_bytes} with averaged=True: there is nothing left to reduce in"
            " buckets"
        )
    if wire_dtype is not None:
        raise ValueError(
            f"wire_dtype={wire_dtype!r} with averaged=True: there is nothing left to reduce. Code"
            f" what averages: average_gradients(WireDtype(algorithm, {wire_dtype!r}),"
            f" axis_name={axis_name!r})"
        )


def _arrays(named: NamedTree) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x) for name, x in named.leaves.items()}


def _rebuilt(named: NamedTree, own: Mapping[str, Any]) -> Any:
    """The tree of what a replica has; without what it has under the name of another. Bare, as the
    one that `init` shows `inner`: parameters and gradients may come in variables of nnx, both or
    one of them."""
    return pure(named.rebuild(dict.fromkeys(named.leaves, optax.MaskedNode()) | dict(own)))


def _without_owners(shards: _Shards | StackShards, own: Mapping[str, Any]) -> dict[str, Any]:
    """What `inner` updates in one call on all replicas."""
    ragged = shards.ragged if isinstance(shards, StackShards) else ()
    return {name: x for name, x in own.items() if name not in ragged}


def _apart(state: ZeroState) -> tuple[ZeroState, dict[str, jax.Array]]:
    """The state without what has owners, and that, of this replica."""
    rows = state.pieces.per_replica if jax.tree.leaves(state.pieces) else {}
    for name, x in rows.items():
        require_own_row(f"the piece {name!r} of the state", x)
    others = {key: x for key, x in rows.items() if not has_owners(key)}
    return state._replace(pieces=PerReplica(others)), {
        key: x[0] for key, x in rows.items() if has_owners(key)
    }


def _with(state: ZeroState, vectors: Mapping[str, jax.Array]) -> ZeroState:
    return state._replace(pieces=PerReplica(state.pieces.per_replica | vectors))


def _check_owners(owners: Owners, vectors: Mapping[str, jax.Array], axis_name: AxisName) -> None:
    if {key: array.length for key, array in owners.arrays.items()} != {
        key: x.size for key, x in vectors.items()
    }:
        raise ValueError(_other_stacks(axis_name))


def _other_stacks(axis_name: AxisName) -> str:
    return (
        f"zero1: the parameters and gradients on {lax.axis_size(axis_name)} replicas do not come to"
        " the stacks that the state was made for: it is of another number of replicas, or of other"
        " parameters, or a gradient is None. Convert the state with"
        " gradwire.jax_backend.reshard(state, like), and give every parameter a gradient."
    )


def _join(state: ZeroState) -> Any:
    """The inner state of this replica."""
    pieces = state.pieces.per_replica if jax.tree.leaves(state.pieces) else {}
    return joined_state(state, {key: x[0] for key, x in pieces.items()})


def _check_pieces(
    inner: optax.GradientTransformationExtraArgs,
    tree: Any,
    state: Any,
    axis_name: AxisName,
    *,
    strict: bool,
) -> None:
    """Raise ValueError if these pieces are not those that the state was made for; `strict`: not
    even in their names."""
    expected = jax.eval_shape(inner.init, tree)
    structures: list[Any] = [jax.tree.structure(expected), jax.tree.structure(state)]
    if strict and structures[0] != structures[1]:
        raise ValueError(_other_stacks(axis_name))
    if structures[0] != structures[1]:
        # A parameter without a gradient, or other parameters: `inner` has its own ways with that.
        return
    for (path, x), y in zip(
        jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(expected), strict=True
    ):
        if jnp.shape(x) != y.shape:
            raise ValueError(
                f"the piece {path_of(path)!r} of the state has shape {jnp.shape(x)}, and on"
                f" {lax.axis_size(axis_name)} replicas it would have {y.shape}: the state was made"
                " for another number of replicas, or for other parameters. Give zero the right"
                " replicas=, or convert the state with gradwire.jax_backend.reshard(state, like)."
            )


def _check_local(gradients: NamedTree, axis_name: AxisName) -> None:
    try:
        check_local(gradients.leaves, axis_name)
    except ValueError as error:
        raise ValueError(
            f"{error} If they are averages, from power_sgd before this in a chain, say so: zero1(…,"
            " averaged=True)."
        ) from None


def _check_averaged(gradients: NamedTree, axis_name: AxisName) -> None:
    """Raise ValueError for gradients that JAX knows to differ between replicas."""
    axes = frozenset(axes_of(axis_name))
    different = (
        [name for name, g in gradients.leaves.items() if axes & varying_axes(g)]
        if tracked(axis_name)
        else []
    )
    if different:
        raise ValueError(
            f"zero1 was told that gradients are averaged=True, but that of {different[0]!r} varies"
            f" over {axis_name!r}. Put power_sgd or all_reduce_mean before it in the chain, or"
            " leave averaged out."
        )
