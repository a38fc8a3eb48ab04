"""`zero1` against the same optimizer, not sharded: parameters, bytes in memory and on the wire, and
the forms of its state."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import gradwire.jax_backend as gw
from gradwire import AllReduce, Simulator, Spec, WireDtype, plan
from gradwire.core.zero.sharded_step import Zero
from gradwire.core.zero.sharding import shard_by_element
from gradwire.jax_backend.zero import zero1 as zero1_module
from tests.jax.quadratic import SHAPES, assert_close, filled, start, step_of, train, train_plain
from tests.jax.replicas import AXIS, Replicas, equal, mesh_of

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.02, 10, 60)
PARAMS = start()
ADAMW = optax.adamw(SCHEDULE, weight_decay=0.1)


def sharded(inner, replicas, **options):
    """Without a trial: what is refused is tested in `test_zero_refusals.py`."""
    return gw.zero1(inner, axis_name=AXIS, replicas=replicas, elementwise=True, **options)


def by_rank(params):
    return {n: "a" if np.ndim(x) else "b" for n, x in params.items()}


#: What runs inside `zero1`, and without it. (That AdamW and what is clipped train under every map,
#: for many steps, is tested in tests/parity.)
COMPOSED = {
    "masked by name": optax.masked(optax.adam(0.02), {n: n != "bias" for n in SHAPES}),
    "partition": optax.multi_transform({"a": optax.adamw(0.02), "b": optax.sgd(0.1, 0.9)}, by_rank),
    "accumulated": optax.MultiSteps(optax.adamw(0.02), 4),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(
        learning_rate=SCHEDULE, weight_decay=0.2
    ),
    "started at the parameters": optax.contrib.schedule_free_adamw(0.02),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composition(name):
    mode = "shard_map_vma" if name == "accumulated" else "vmap"
    params, state = train(sharded(COMPOSED[name], 3), 3, mode, steps=10)
    expected, plain_state = train_plain(COMPOSED[name], 3, steps=10)
    assert_close(params, expected)
    assert_close(gw.reshard(state, plain_state), plain_state, 3e-4)
    assert all(
        np.abs(params[n] - PARAMS[n]).max(initial=0) > 0.01 for n in SHAPES if n != "nothing"
    )


def sent(tx, replicas, params=PARAMS):
    state = jax.eval_shape(tx.init, params)
    rows = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) if "per_replica" in str(path) else x
        ),
        state,
    )
    return gw.collective_traffic(tx.update, params, rows, params, axis_env=[(AXIS, replicas)])


@pytest.mark.parametrize(
    ("replicas", "bucket_bytes", "clip"), [(2, None, True), (3, 64, True), (3, None, False)]
)
def test_what_is_sent_is_the_plan(replicas, bucket_bytes, clip):
    inner = (
        optax.chain(gw.clip_by_global_norm(1.0, AXIS), optax.adam(0.1)) if clip else optax.adam(0.1)
    )
    shapes = gw.parameter_shapes(PARAMS)
    shards = shard_by_element({name: Spec(shape) for name, shape in shapes.items()}, replicas)
    expected = plan(shapes, Zero(shards, AllReduce(bucket_bytes), max_norm=1.0 if clip else None))
    traffic = sent(sharded(inner, replicas, bucket_bytes=bucket_bytes), replicas)
    assert [gw.total_traffic(traffic)] == list(expected.steps)
    assert {c.kind for c in traffic} == {"reduce_scatter", "all_gather"} | (
        {"all_reduce"} if clip else set()
    )


def test_large_arrays_travel_by_themselves_as_they_lie(monkeypatch):
    """Those whose first axis both replicas can share."""
    monkeypatch.setattr(zero1_module, "LARGE", 1)
    shapes = {"even": (4, 3), "odd": (3, 4), "deep": (2, 3, 5), "small": (6,)}
    params, tx = start(shapes), sharded(ADAMW, 2)
    given = {
        n: np.random.default_rng([*n.encode()]).normal(size=(2, *s)).astype("float32")
        for n, s in shapes.items()
    }
    state, plain_state = tx.init(params), ADAMW.init(params)
    for _ in range(3):
        updates, state = step_of(tx, given, params, state)
        expected, plain_state = jax.jit(ADAMW.update)(
            {n: g.mean(0) for n, g in given.items()}, plain_state, params
        )
        assert_close(updates, expected, 3e-5)
    traffic = [(c.kind, c.nbytes) for c in sent(tx, 2, params)]
    coded = sharded(ADAMW, 2, wire_dtype="int8")
    found, _ = step_of(coded, given, params, coded.init(params))
    assert jax.tree.map(jnp.shape, found) == shapes  # codes travel as vectors
    # The halves of an all-reduce of each, and of the other two together.
    assert sorted(n for kind, n in traffic if kind == "reduce_scatter") == [
        4 * 12,
        4 * (12 + 6),
        4 * 30,
    ]


def test_nothing_is_averaged_twice():
    """Numbers are held in test_composition.py."""
    compress = gw.power_sgd(2, axis_name=AXIS, min_compression_rate=1.0)
    both = (
        optax.chain(compress, optax.adam(0.02)),
        optax.chain(compress, sharded(optax.adam(0.02), 4, averaged=True)),
    )
    plain, found = ([c.kind for c in sent(tx, 4)] for tx in both)
    assert found == [*plain, "all_gather"]


@pytest.mark.parametrize(("dtype", "mode"), [("int8", "pmap"), ("e3m0", "shard_map_vma")])
def test_gradients_travel_in_codes(dtype, mode):
    """The average is the simulator's, in the bytes of the plan."""
    tx = sharded(optax.identity(), 3, wire_dtype=dtype)
    shapes = gw.parameter_shapes(PARAMS)
    given = [
        {n: np.random.default_rng([r, *n.encode()]).normal(size=s) for n, s in shapes.items()}
        for r in range(3)
    ]
    found = Replicas(tx, PARAMS, 3, mode).update([jax.tree.map(np.float32, g) for g in given])
    algorithm = WireDtype(Zero(shard_by_element({n: Spec(s) for n, s in shapes.items()}, 3)), dtype)
    right = Simulator(
        algorithm, shapes, 3, dtype="float32", optimizer=lambda replica, pieces: pieces
    ).step(given)
    assert_close(found, right)
    dense = {n: np.mean([g[n] for g in given], axis=0) for n in shapes}
    assert max(np.abs(right[n] - dense[n]).max(initial=0) for n in shapes) > 1e-3
    assert [gw.total_traffic(sent(tx, 3))] == list(plan(shapes, algorithm).steps)


@pytest.mark.parametrize("check_vma", [False, True])
def test_the_state_can_be_made_inside_the_map(check_vma):
    tx = sharded(optax.contrib.schedule_free_adamw(0.02), None)
    outside = sharded(optax.contrib.schedule_free_adamw(0.02), 4).init(PARAMS)
    specs = gw.partition_specs(outside, AXIS)
    init = jax.shard_map(
        tx.init, mesh=mesh_of(4), in_specs=P(), out_specs=specs, check_vma=check_vma
    )
    inside = jax.jit(init)(PARAMS)
    assert_close(inside, outside, 0)
    of_three = jax.eval_shape(jax.vmap(lambda _: tx.init(PARAMS), axis_name=AXIS), jnp.arange(3))
    assert {x.shape[0] for x in of_three.pieces.per_replica.values()} == {3}


def test_a_loop_over_steps_can_begin_with_the_state():
    """Where JAX keeps track, zeros that no array was asked for are the same on all replicas, and
    what comes after a step is not."""
    tx = gw.zero1(
        optax.GradientTransformation(
            lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape), params),
            lambda updates, state, params: (updates, jax.tree.map(jnp.add, state, updates)),
        ),
        axis_name=AXIS,
    )

    def body(params):
        def one(state, _):
            return tx.update(gw.mark_varying(params, AXIS), state, params)[1], None

        return jax.lax.scan(one, tx.init(params), length=2)[0].pieces

    mapped = jax.shard_map(body, mesh=mesh_of(4), in_specs=P(), out_specs=P(AXIS))
    assert jax.eval_shape(mapped, PARAMS).per_replica["kernel"].shape == (4, 1, 9)


def test_axes_together():
    mesh = jax.make_mesh((2, 2), ("hosts", AXIS), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axes = ("hosts", AXIS)
    inner = optax.chain(gw.clip_by_global_norm(1.0, axes), optax.adam(0.1))
    tx = gw.zero1(inner, axis_name=axes, replicas=4)
    state = tx.init(PARAMS)
    specs = gw.partition_specs(state, axes)
    given = {
        n: np.random.default_rng(0).standard_normal((4, *s)).astype(np.float32)
        for n, s in SHAPES.items()
    }

    def body(gradients, params, state):
        return tx.update(jax.tree.map(lambda g: g[0], gradients), state, params)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(axes), P(), specs), out_specs=(P(), specs))
    updates, _ = jax.jit(mapped)(given, PARAMS, gw.distribute(state, mesh, axes))
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    expected, _ = jax.jit(plain.update)(
        {n: g.mean(0) for n, g in given.items()}, plain.init(PARAMS)
    )
    assert_close(updates, expected, 3e-5)


@pytest.mark.parametrize("shard", ["element", "parameter"])
def test_gradients_of_other_dtypes_than_their_parameters(shard):
    """Which are divided by those of the parameters, in `init` and in each step."""
    halves, inner = ("b", "d", "e"), optax.adam(0.1)
    dtypes = {n: jnp.bfloat16 if n in halves else "float32" for n in "abcdef"}
    params = {n: jnp.full((3, 2), 0.5, dtype) for n, dtype in dtypes.items()}
    tx = gw.zero1(inner, axis_name=AXIS, replicas=2, shard=shard)
    one = {
        n: np.linspace(1, 2, 6, dtype=np.float32).reshape(3, 2) * (1 + i)
        for i, n in enumerate("abcdef")
    }
    for kept in (set(), set("abcdef"), {"a", "b"}):  # in bfloat16
        given = {n: x.astype(jnp.bfloat16 if n in kept else x.dtype) for n, x in one.items()}
        updates, _ = step_of(
            tx, {n: np.stack([x, 3 * x]) for n, x in given.items()}, params, tx.init(params)
        )
        plain, _ = jax.jit(inner.update)(
            {n: 2 * x for n, x in given.items()}, inner.init(params), params
        )
        if len(kept) != 2:  # of one slot, the widest
            assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, plain)
        assert_close(updates, plain, 1e-2)


@pytest.mark.usefixtures("float16_in_jax")
def test_dtypes_side_by_side():
    dtypes = {"a": "float32", "b": jnp.bfloat16, "c": "float16", "d": "float32", "e": jnp.bfloat16}
    host = {
        n: np.ones({"a": (3, 3), "b": 5, "c": 4, "d": 2, "e": 3}[n], dtype)
        for n, dtype in dtypes.items()
    }
    params = jax.tree.map(jnp.asarray, host)
    # The second gives float32 updates to one of two parameters that share a message.
    widen = optax.stateless(
        lambda u, p: {n: x.astype(jnp.float32) if n in ("b", "d") else x for n, x in u.items()}
    )
    for inner in (optax.adam(0.1, mu_dtype=jnp.float32), widen):
        tx = sharded(inner, 2)
        given = {n: np.stack([x, 3 * x]) for n, x in host.items()}
        updates, state = step_of(tx, given, params, tx.init(params))
        plain, plain_state = jax.jit(inner.update)(
            {n: 2 * x for n, x in host.items()}, inner.init(params), params
        )
        assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, plain)
        assert_close(updates, plain, 1e-2)
        assert_close(gw.reshard(state, plain_state), plain_state, 1e-2)
    kinds = [(c.kind, c.dtype) for c in sent(sharded(optax.sgd(0.1), 2), 2, params)]
    halves = itertools.product(("all_gather", "reduce_scatter"), ("bfloat16", "float16", "float32"))
    assert sorted(kinds) == list(halves)
    # Half precision is divided before it is added.
    large, tx = {"x": jnp.zeros(4, jnp.float16)}, sharded(optax.sgd(1.0), 2)
    updates, _ = step_of(tx, {"x": jnp.full((2, 4), 60000.0, jnp.float16)}, large, tx.init(large))
    assert (updates["x"] == -60000.0).all()


@pytest.mark.parametrize("wire_dtype", [None, "int8"])
def test_a_step_with_an_inf_on_one_replica_changes_nothing_anywhere(wire_dtype):
    tx = sharded(ADAMW, 2, skip_non_finite=True, wire_dtype=wire_dtype)
    fine = {n: np.stack([np.asarray(p), 2 * np.asarray(p)]) for n, p in PARAMS.items()}
    step = jax.jit(lambda gradients, state: step_of(tx, gradients, PARAMS, state))
    before = step(fine, tx.init(PARAMS))[1]
    spoiled = fine | {"scale": np.where([False, True], np.float32(np.inf), fine["scale"])}
    updates, after = step(spoiled, before)
    assert not any(x.any() for x in jax.tree.leaves(updates))
    assert_close(after, before, 0)
    updates, after = step(fine, after)
    assert all(x.any() or not x.size for x in jax.tree.leaves(updates))
    assert int(after.common[0].count) == 2


@pytest.mark.parametrize("params", [{}, None, {"z": jnp.ones((4, 0))}, jnp.ones(5), jnp.ones(())])
def test_trees_of_every_kind(params):
    tx = sharded(optax.adam(0.1), 3)
    given = jax.tree.map(lambda p: np.stack([np.asarray(p)] * 3), params)
    updates, _ = step_of(tx, given, params, tx.init(params), 3)
    expected, _ = jax.jit(optax.adam(0.1).update)(params, optax.adam(0.1).init(params))
    assert_close(updates, expected)


def test_a_parameter_without_a_gradient():
    tx, params = sharded(optax.sgd(0.1), 2), {"a": jnp.ones(3), "b": jnp.ones(4)}
    updates, _ = step_of(tx, {"a": jnp.ones((2, 3)), "b": None}, params, tx.init(params))
    assert_close(updates, {"a": -0.1 * jnp.ones(3), "b": None})


def test_outside_masked_and_with_extra_arguments():
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    mask, rest = ({n: (n == "bias") == own for n in SHAPES} for own in (True, False))
    tx = optax.chain(
        optax.masked(sharded(inner, 2), mask),
        optax.masked(gw.all_reduce_mean(axis_name=AXIS), rest),
    )
    state, scales = tx.init(PARAMS), []
    given = jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
    step = jax.jit(lambda state: step_of(tx, given, PARAMS, state, value=1.0))
    for _ in range(4):
        updates, state = step(state)
        scales.append(float(-updates["bias"][0] / PARAMS["bias"][0]))
        assert_close(updates["kernel"], PARAMS["kernel"])
    assert scales[0] == 1.0
    assert scales[-1] <= 0.5


def test_counters_and_rates_are_found_where_optax_finds_them():
    tx = optax.chain(sharded(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), 2))
    state = tx.init(PARAMS)
    assert float(optax.tree.get(state, "learning_rate")) == pytest.approx(0.1)
    state = optax.tree.set(state, learning_rate=jnp.asarray(0.5))
    given = jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
    updates, state = step_of(tx, given, PARAMS, state)
    assert_close(updates, jax.tree.map(lambda p: -0.5 * p, PARAMS))
    assert int(optax.tree.get(state, "count")) == 1


# The state: its forms, consolidated and back, on another number of replicas, in checkpoints.


def test_what_init_makes_of_arrays_and_of_shapes():
    tx = sharded(ADAMW, 4)
    state = tx.init(PARAMS)
    shapes = {n: x.shape for n, x in state.pieces.per_replica.items() if ".mu." in n}
    of_mu = {"bias": (4, 2), "kernel": (4, 1, 9), "nothing": (4, 1, 0), "scale": (4,)}
    assert shapes == {f"0.mu.{n}": shape for n, shape in of_mu.items()}
    assert [int(c.count) for c in (state.common[0], state.common[2])] == [0, 0]
    marked = optax.tree.map_params(
        tx, lambda x: x + 100, state, transform_non_params=lambda x: x - 100
    )
    assert equal(marked.pieces, jax.tree.map(lambda x: x + 100, state.pieces))
    assert equal(marked.common, jax.tree.map(lambda x: x - 100, state.common))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    assert equal(tx.init(abstract), state)
    assert equal(sharded(optax.sgd(0.1), 4).init(abstract), sharded(optax.sgd(0.1), 4).init(PARAMS))


def test_forms():
    specs = gw.partition_specs({"params": PARAMS, "opt": sharded(ADAMW, 4).init(PARAMS)}, AXIS)
    assert set(jax.tree.leaves(specs["opt"].pieces)) == {P(AXIS)}
    assert set(jax.tree.leaves((specs["opt"].common, specs["params"]))) == {P()}
    plain = filled(ADAMW.init(PARAMS))
    state = gw.reshard(plain, jax.eval_shape(sharded(ADAMW, 4).init, PARAMS))
    # A piece is a run of the flattened parameter, padded with zeros.
    rows = state.pieces.per_replica["0.nu.kernel"].reshape(-1)
    np.testing.assert_array_equal(rows, [*plain[0].nu["kernel"].reshape(-1), 0])
    spread = gw.replicate(state, axis_name=AXIS)
    kernel = spread.pieces.per_replica["0.mu.kernel"]
    assert kernel.shape == (4, 1, 1, 9)
    assert [s.data.shape for s in kernel.addressable_shards] == [(1, 1, 1, 9)] * 4
    assert equal(gw.unreplicate(spread), state)
    placed = gw.distribute(state, mesh_of(4), AXIS)
    for i, s in enumerate(placed.pieces.per_replica["0.mu.kernel"].addressable_shards):
        np.testing.assert_array_equal(s.data, state.pieces.per_replica["0.mu.kernel"][i : i + 1])
    assert equal(jax.tree.map(np.asarray, placed), state)


@pytest.mark.parametrize("name", ["partition", "accumulated", "hyperparameters"])
def test_every_number_of_replicas_and_back_to_the_bit(name):
    inner = COMPOSED[name]
    state = plain = filled(inner.init(PARAMS))
    for replicas in (3, 4, 1, 50, 2):
        state = gw.reshard(state, jax.eval_shape(sharded(inner, replicas).init, PARAMS))
        assert isinstance(state, gw.ZeroState)
        assert all(x.shape[0] == replicas for x in state.pieces.per_replica.values())
        assert equal(gw.reshard(state, plain), plain)


def test_a_training_state_is_converted_where_it_holds_sharded_state():
    compress, adam = gw.power_sgd(2, axis_name=AXIS, min_compression_rate=1.0), optax.adam(0.05)

    def flax_state(last):
        return TrainState.create(apply_fn=None, params=PARAMS, tx=optax.chain(compress, last))

    pieces, whole = flax_state(sharded(adam, 4, averaged=True)), flax_state(adam)
    inner = gw.reshard(filled(adam.init(PARAMS)), pieces.opt_state[1])
    state = pieces.replace(opt_state=(pieces.opt_state[0], inner), step=7)
    plain = gw.reshard(state, whole)
    assert isinstance(plain, TrainState)
    assert plain.step == 7
    assert equal(plain.opt_state[1], filled(adam.init(PARAMS)))
    assert equal(plain.opt_state[0], state.opt_state[0])
    assert plain.tx is whole.tx  # the one that goes with the state
    assert equal(gw.reshard(plain, pieces).opt_state, state.opt_state)
    assert equal(
        serialization.from_bytes(pieces, serialization.to_bytes(state)).opt_state, state.opt_state
    )


@pytest.mark.parametrize("shard", ["element", "parameter"])
@pytest.mark.parametrize("averaged", [False, True])
def test_variables_of_nnx_are_parameters_and_gradients(averaged, shard):
    """The inner optimizer sees what `init` has shown it, whether variables or bare arrays come;
    updates are as gradients are."""
    params = nnx.split(nnx.Linear(6, 5, rngs=nnx.Rngs(0)))[1]
    head = [gw.power_sgd(2, axis_name=AXIS, min_compression_rate=1.0)] if averaged else []
    zero = gw.zero1(optax.adamw(0.1), axis_name=AXIS, replicas=2, averaged=averaged, shard=shard)
    tx, devices = optax.chain(*head, zero), jax.devices()[:2]

    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    found = []
    for given in (params, nnx.as_pure(params)):
        now, state = gw.replicate((given, tx.init(given)), devices, axis_name=AXIS)
        for _ in range(2):
            now, state = jax.pmap(step, AXIS, devices=devices)(now, state, now)
        assert jax.tree.structure(now) == jax.tree.structure(given)
        found.append(nnx.as_pure(now))
    assert equal(*found)
    assert not equal(found[0], nnx.as_pure(gw.replicate(params, devices, axis_name=AXIS)))


def test_the_state_of_an_nnx_optimizer():
    model = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
    sharded_one, plain = (
        nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state for tx in (sharded(ADAMW, 2), ADAMW)
    )
    whole = filled(nnx.as_pure(plain))
    pieces = gw.reshard(whole, sharded_one)
    assert pieces.pieces.per_replica["0.mu.kernel"].shape == (2, 1, 15)
    assert equal(gw.reshard(pieces, plain), whole)
