"""`init` and `update` as Optax and its users call them: trees, names, dtypes, composition, and what
is said of it."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gradwire import AllReduce, PowerSGD, TopK, WireDtype
from gradwire.core.kernels import random
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.jax_backend import (
    all_reduce_mean,
    average_gradients,
    diloco,
    distribute,
    mark_varying,
    parameter_shapes,
    partition_specs,
    power_sgd,
    replicate,
    reshard,
    set_replicas,
    stack_replicas,
    stats,
    to_portable,
    unreplicate,
    zero1,
)
from tests.bounds import relative
from tests.jax.replicas import AXIS, Replicas, gradients, mesh_of, power, traced
from tests.methods import METHODS, TWO_LEVELS

PARAMS = {"w": jnp.ones((32, 24)), "b": jnp.ones(24)}


def trace(tx, params, updates=None):
    """Types of what `update` returns on 4 replicas: everything but arithmetic."""
    step = jax.make_jaxpr(tx.update, axis_env=[(AXIS, 4)], return_shape=True)
    return step(params if updates is None else updates, jax.eval_shape(tx.init, params))[1]


def types(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


ALGORITHMS = [
    power(),
    power(half_step=True, start_step=5),
    power(warm_start=False, error_feedback=False),
    AllReduce(),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_types_of_gradients_and_state_are_kept_and_init_runs_on_shapes_alone_and_under_jit(
    algorithm,
):
    params = {
        "kernel": jnp.ones((32, 24)),
        "again": jnp.ones((40, 8)),
        "b": jnp.ones(24),
        "s": jnp.ones(()),
    }
    tx = average_gradients(algorithm, axis_name=AXIS)
    updates, after = trace(tx, params)
    state = tx.init(params)
    assert types(updates) == types(params)
    assert types(after) == types(jax.eval_shape(tx.init, params)) == types(state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for other in (tx.init(abstract), jax.jit(tx.init)(params)):
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, state, other)))


class Layer(NamedTuple):
    kernel: Any
    rest: Any


def test_names_are_paths():
    tree = {"a": Layer(jnp.ones((3, 2)), (jnp.ones(4), None)), "m": optax.MaskedNode()}
    assert parameter_shapes(tree) == {"a/kernel": (3, 2), "a/rest/0": (4,)}
    assert parameter_shapes(jnp.ones((5, 2))) == {"params": (5, 2)}
    assert parameter_shapes({"x": 1.0, "y": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}) == {
        "x": (),
        "y": (2, 3),
    }
    # Of variables of nnx those of their arrays, by which factors are drawn.
    state = nnx.state(
        nnx.List([nnx.Linear(32, 24, rngs=nnx.Rngs(0)), nnx.Linear(24, 32, rngs=nnx.Rngs(0))]),
        nnx.Param,
    )
    names = {"0/bias", "0/kernel", "1/bias", "1/kernel"}
    assert parameter_shapes(state).keys() == parameter_shapes(nnx.as_pure(state)).keys() == names
    memory = power_sgd({"0/*": 2}, axis_name=AXIS, seed=3).init(state).memory["q"]
    drawn = random.uniform(NumpyOps(), random.key(3, "0/kernel/q"), (2, 24))
    assert np.array_equal(memory[0]["kernel"], drawn)
    assert memory[1]["kernel"] == optax.MaskedNode()


@pytest.mark.parametrize(
    "params", [{}, {"a": {}}, None, (), {"none": jnp.ones((0, 3))}, {"z": jnp.ones((4, 0))}]
)
@pytest.mark.parametrize(
    "algorithm", [PowerSGD(2, half_step=True, start_step=2), AllReduce(), AllReduce(100)], ids=repr
)
def test_trees_with_nothing_in_them(algorithm, params):
    updates, state = trace(average_gradients(algorithm, axis_name=AXIS), params)
    assert types(updates) == types(params)
    assert jax.tree.structure(state) == jax.tree.structure(
        average_gradients(algorithm, axis_name=AXIS).init(params)
    )


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("inner", [AllReduce(), power()], ids=repr)
def test_means_of_nothing_are_the_same_on_all_replicas(inner, dtype):
    """As of a LoRA of rank 0, where JAX keeps track of what differs."""
    params = PARAMS | {"none": jnp.ones((32, 0))}
    tx = average_gradients(WireDtype(inner, dtype), axis_name=AXIS)
    updates, _ = traced(
        lambda p, s, x: tx.update(mark_varying(p, AXIS), s), params, tx.init(params)
    )
    assert types(updates) == types(params)


def test_a_bare_array_and_a_scalar():
    run = Replicas(power_sgd(1, axis_name=AXIS), jnp.ones(()))
    assert run.update([np.float32(i) for i in range(4)]) == 1.5
    tx = power_sgd(2, axis_name=AXIS)
    assert types(trace(tx, jnp.ones((32, 24)))[0]) == ((32, 24), jnp.float32)


@pytest.mark.usefixtures("float16_in_jax")
@pytest.mark.filterwarnings("ignore:the gradient of:gradwire.CompressionWarning")
def test_dtypes_live_side_by_side():
    # One of them is as large as what is not added to its error before it is multiplied.
    params = {
        "f32": jnp.ones((32, 24)),
        "bf16": jnp.ones((512, 256), jnp.bfloat16),
        "f16": jnp.ones(8, jnp.float16),
    }
    tx = power_sgd(2, axis_name=AXIS)
    state = tx.init(params)
    assert [state.memory["q"][k].dtype for k in ("f32", "bf16")] == [jnp.float32, jnp.bfloat16]
    assert types(trace(tx, params)[0]) == types(params)
    # Memory keeps its dtype when gradients come in another, narrower or wider; updates have that of
    # the gradients, or of memory that is wider by itself.
    for other in (jnp.bfloat16, jnp.float32):
        given = optax.tree.cast(params, other)
        for options in ({}, {"start_step": 1}, {"state_dtype": "float32"}):
            tx = power_sgd(2, axis_name=AXIS, **options)
            updates, after = trace(tx, params, given)
            wide = (
                jnp.dtype(other)
                if options.get("state_dtype")
                else jnp.promote_types(other, jnp.float32)
            )
            assert {name: x.dtype for name, x in updates.items()} == dict.fromkeys(
                params, jnp.dtype(other)
            ) | {"f32": wide}
            assert types(after) == types(tx.init(params))


def test_parameters_without_a_gradient_keep_their_memory():
    shapes = {"w": (32, 24), "v": (32, 24), "b": (24,)}
    run = Replicas(power_sgd(2, axis_name=AXIS), {k: jnp.zeros(s) for k, s in shapes.items()})
    run.update(gradients(shapes, 0))
    before = run.global_state()
    updates = run.update([g | {"v": None, "b": None} for g in gradients(shapes, 1)])
    after = run.global_state()
    assert updates["v"] is None
    for memory in (lambda s: s.memory["q"], lambda s: s.local.per_replica["error"]):
        assert np.array_equal(memory(after)["v"], memory(before)["v"])
        assert not np.array_equal(memory(after)["w"], memory(before)["w"])


def test_multi_steps_updates_with_the_mean_of_its_gradients():
    shapes = {"w": (32, 24), "b": (24,)}
    tx = optax.MultiSteps(power_sgd(2, axis_name=AXIS), 3).gradient_transformation()
    run = Replicas(tx, PARAMS, mode="pmap")
    single = Replicas(power_sgd(2, axis_name=AXIS), PARAMS)
    for outer in range(2):
        given = [gradients(shapes, 3 * outer + i) for i in range(3)]
        for i in range(2):
            assert all((x == 0).all() for x in run.update(given[i]).values())
        updates = run.update(given[2])
        means = [{k: np.mean([g[r][k] for g in given], axis=0) for k in shapes} for r in range(4)]
        expected = single.update(means)
        for name in shapes:
            assert relative(updates[name], expected[name]) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"half_step": True},
        {"error_feedback": False},
        {"warm_start": False, "error_feedback": False},
    ],
)
def test_map_params_takes_a_second_tree(options):
    """As for specs of parameters: https://optax.readthedocs.io, `tree_map_params`. What is not
    compressed has no memory, as under `optax.masked`."""
    tx = optax.chain(power_sgd(2, axis_name=AXIS, **options), optax.adam(1e-3))
    state, names = tx.init(PARAMS), {name: name for name in PARAMS}

    def hole(x):
        return isinstance(x, optax.MaskedNode)

    marked = optax.tree.map_params(
        tx, lambda x, name: x if hole(x) else name, state, names, is_leaf=hole
    )
    found = jax.tree_util.tree_flatten_with_path(marked)[0]
    assert [str(path[-1].key) for path, x in found if isinstance(x, str)] == [
        x for _, x in found if isinstance(x, str)
    ]
    assert len([x for _, x in found if x == "b"]) == 2  # the moments
    assert len([x for _, x in found if x == "w"]) == 2 + len(
        jax.tree.leaves([state[0].memory, state[0].local.per_replica])
    )


def test_a_loop_over_steps_may_make_the_state():
    """What varies after a step must vary before it."""
    tx, params = (
        power_sgd(2, axis_name=AXIS, half_step=True, start_step=1),
        {"w": jnp.zeros((32, 24))},
    )

    def loop(stacked):
        return jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], tx.init(params), stacked)[0]

    specs = partition_specs(tx.init(params), AXIS)
    mapped = jax.shard_map(loop, mesh=mesh_of(4), in_specs=jax.P(None, AXIS), out_specs=specs)
    final = jax.eval_shape(mapped, {"w": jnp.zeros((4, 4 * 32, 24))})
    assert final.local.per_replica["error"]["w"].shape == (4, 32, 24)


def test_under_vmap_one_phase_is_sent_in_a_step():
    """Also where every replica has a count of steps of its own, as a state has that was broadcast
    by hand."""
    tx = power_sgd(2, axis_name=AXIS, half_step=True)
    shapes = {"w": (32, 24)}
    states = jax.vmap(tx.init, None, axis_name=AXIS, axis_size=4)({"w": jnp.zeros((32, 24))})
    rows = jax.NamedSharding(mesh_of(4), jax.P(AXIS))
    states = jax.device_put(states, rows)
    step = jax.jit(jax.vmap(tx.update, axis_name=AXIS, spmd_axis_name=AXIS))
    stacked = [
        jax.device_put(jax.tree.map(lambda *x: jnp.stack(x), *gradients(shapes, t)), rows)
        for t in range(3)
    ]
    text = step.lower(stacked[0], states).compile().as_text()
    in_every_step = [
        line for line in text[text.index("ENTRY") :].splitlines() if " all-reduce(" in line
    ]
    assert not any("f32[" in line.split(" all-reduce(")[0] for line in in_every_step), in_every_step
    assert re.search(r"f32\[\d+.* all-reduce\(", text)
    one = Replicas(tx, {"w": jnp.zeros((32, 24))})
    for t, given in enumerate(stacked):
        updates, states = step(given, states)
        expected = one.update(gradients(shapes, t))
        assert np.allclose(
            updates["w"], np.broadcast_to(expected["w"], (4, 32, 24)), rtol=1e-4, atol=1e-4
        )


KERNELS = (
    "half_step",
    "cold_start",
    "by_chance",
    "two_bits",
    "wire_e3m0",
    "wire_float8",
    "wire_factors_int8",
)
SPARSE = ("top_k_tiles", "top_k_bits", "sign", "one_bit", "two_levels")


@pytest.mark.parametrize("name", KERNELS + SPARSE)
def test_no_operand_is_given_more_axes_in_silence(name):
    """What JAX can be told to refuse, and some projects tell it."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        trace(average_gradients((METHODS | TWO_LEVELS)[name].algorithm, axis_name=AXIS), PARAMS)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["quantize", "sign", "top_k", "wire_int8", "rank_2", "two_bits"])
def test_numbers_of_64_bits_are_taken(name, dtype):
    """Where JAX has them, numbers of Python have 64 bits as well."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.ones(x.shape, dtype), PARAMS)
        found = trace(average_gradients(METHODS[name].algorithm, axis_name=AXIS), params)
        assert {x.dtype for x in jax.tree.leaves(found[0])} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("name", ["quantize", "sign", "top_k", "wire_int8", "rank_2", "two_bits"])
def test_nor_where_replicas_have_weights(name):
    tx = average_gradients(METHODS[name].algorithm, axis_name=AXIS)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        weighed = optax.GradientTransformation(
            tx.init, lambda g, s: tx.update(g, s, weight=jnp.float32(2))
        )
        trace(weighed, PARAMS)


MOMENTUM = optax.sgd(jnp.float32(0.1), momentum=0.9)
OF_OTHER_KINDS = {
    "zero1": zero1(MOMENTUM, axis_name=AXIS, replicas=4, skip_non_finite=True),
    "zero1 int8": zero1(MOMENTUM, axis_name=AXIS, replicas=4, wire_dtype="int8"),
    "diloco": diloco(MOMENTUM, 4, axis_name=AXIS, fragments=2, start_step=1),
    "overlap": diloco(MOMENTUM, 4, axis_name=AXIS, overlap=2, weighted=True, moments="average"),
    "eager": diloco(MOMENTUM, 4, axis_name=AXIS, eager=True, weighted=True, compressor=PowerSGD(2)),
}


@pytest.mark.parametrize("name", OF_OTHER_KINDS)
def test_nor_by_whole_optimizers(name):
    tx = OF_OTHER_KINDS[name]

    def step(params):
        if not hasattr(tx, "average_params"):
            return tx.update(params, tx.init(params), params)
        return [
            tx.step(params, (params, tx.init(params)), turn=turn)
            for turn in (None, tx.turn(3), tx.turn(5))
        ]

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.make_jaxpr(step, axis_env=[(AXIS, 4)])(PARAMS)


def test_nor_by_what_the_host_asks_of_a_state():
    tx, local = OF_OTHER_KINDS["zero1"], OF_OTHER_KINDS["diloco"]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for state in (
            power_sgd(2, axis_name=AXIS).init(PARAMS),
            stack_replicas((PARAMS, local.init(PARAMS))),
        ):
            stats(state)
            jax.eval_shape(stats, state)
            whole = unreplicate(replicate(state, jax.devices()[:4]))
            set_replicas(whole, 2)
        assert to_portable(power_sgd(2, axis_name=AXIS).init(PARAMS), PowerSGD(2))["step"] == 0
        reshard(reshard(tx.init(PARAMS), MOMENTUM.init(PARAMS)), tx.init(PARAMS))


# Set-ups that look wrong and come out right, and what is said of those that may be wrong. What is
# refused stands in `test_refusals.py`.

TX = power_sgd(2, axis_name=AXIS)


LEAK = {
    "half steps": average_gradients(power(half_step=True), axis_name=AXIS),
    "codes": average_gradients(WireDtype(PowerSGD(2, start_step=3), "int8"), axis_name=AXIS),
    "largest": average_gradients(METHODS["top_k"].algorithm, axis_name=AXIS),
    "two levels": average_gradients(TWO_LEVELS["two_levels"].algorithm, axis_name=AXIS),
    "sharded": zero1(optax.adam(0.1), axis_name=AXIS, replicas=4),
    "averages": diloco(optax.adam(0.1), 4, axis_name=AXIS, compressor=power(half_step=True)),
}


@pytest.mark.parametrize("name", LEAK)
def test_nothing_traced_outlives_its_trace(name):
    """As `jax.checking_leaks` finds what does. Nor do the parameters that were traced, in an
    exception that was caught."""
    tx = LEAK[name]

    def step(params):
        state = tx.init(params)
        updates, state = tx.update(params, state, params)
        return tx.average_params(updates, state) if name == "averages" else updates

    with jax.checking_leaks():
        if name != "averages":  # which begins on its replicas
            jax.eval_shape(tx.init, PARAMS)
        jax.make_jaxpr(step, axis_env=[(AXIS, 4)])(PARAMS)


def test_inside_vmap_nothing_has_to_be_placed():
    """It refuses by itself what differs and has no axis."""
    given = jax.tree.map(lambda x: np.stack([np.asarray(x) * i for i in range(4)]), PARAMS)
    with pytest.raises(ValueError, match=r"vmap has mapped output.* but out_axes is None"):
        jax.eval_shape(jax.vmap(TX.update, (0, None), None, axis_name=AXIS), given, TX.init(PARAMS))
    states = jax.jit(jax.vmap(TX.init, None, axis_name=AXIS, axis_size=4))(PARAMS)
    _, states = jax.jit(jax.vmap(TX.update, axis_name=AXIS))(given, states)
    assert unreplicate(states).local.per_replica["error"]["w"].shape == (4, 32, 24)


def test_one_vector_is_not_compressed():
    with pytest.warns(
        UserWarning,
        match=r"one vector of 792 elements.*optax.chain\(power_sgd\(...\), optax.flatten",
    ):
        optax.flatten(optax.chain(TX, optax.sgd(0.1))).init(PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optax.chain(TX, optax.flatten(optax.sgd(0.1))).init(PARAMS)
        optax.flatten(all_reduce_mean(axis_name=AXIS)).init(PARAMS)


@pytest.mark.parametrize(
    "tx",
    [
        optax.multi_transform(
            {"a": TX, "b": all_reduce_mean(axis_name=AXIS)}, {"w": "a", "b": "a"}
        ),
        optax.chain(
            optax.masked(TX, dict.fromkeys(PARAMS, True)),
            optax.masked(all_reduce_mean(axis_name=AXIS), dict.fromkeys(PARAMS, False)),
        ),
    ],
    ids=["multi_transform", "masked"],
)
def test_a_part_that_no_parameter_is_in(tx):
    updates, state = trace(tx, PARAMS)
    assert types(updates) == types(PARAMS)
    made = tx.init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(made)
    assert jax.tree.structure(optax.tree.map_params(tx, lambda x: x, made)) == jax.tree.structure(
        made
    )


# What the state of a chain tells.

MASK = {"w": True, "b": False}
REST = jax.tree.map(lambda x: not x, MASK)
MEAN = all_reduce_mean(axis_name=AXIS)
CHAINS = {
    "adam before": (optax.chain(optax.adam(0.1), TX), "ScaleByAdamState"),
    "momentum before": (optax.chain(optax.clip(1.0), optax.trace(0.9), MEAN), "TraceState"),
    "adam before a mask": (
        optax.chain(optax.adam(0.1), optax.masked(TX, MASK), optax.masked(MEAN, REST)),
        "ScaleByAdamState",
    ),
    "injected before": (
        optax.chain(optax.inject_hyperparams(optax.adam)(0.1), MEAN),
        "InjectStatefulHyperparamsState",
    ),
    "a mask alone": (optax.chain(optax.masked(TX, MASK), optax.sgd(0.1)), "optax.masked"),
    "right": (optax.chain(TX, optax.adam(0.1)), None),
    "clipped and decayed before": (
        optax.chain(optax.clip(1.0), optax.add_decayed_weights(0.1), TX, optax.adam(0.1)),
        None,
    ),
    "counted before": (optax.chain(optax.scale_by_schedule(lambda count: 1.0), TX), None),
    "two axes": (optax.chain(MEAN, TX, optax.adam(0.1)), None),
    "a mask and the rest": (
        optax.chain(optax.masked(TX, MASK), optax.masked(MEAN, REST), optax.adam(0.1)),
        None,
    ),
    "the rest first": (
        optax.chain(optax.masked(MEAN, REST), optax.masked(TX, MASK), optax.adam(0.1)),
        None,
    ),
    "labels": (
        optax.partition(
            {"a": optax.chain(TX, optax.sgd(0.1, 0.9)), "b": optax.set_to_zero()},
            {"w": "a", "b": "b"},
        ),
        None,
    ),
    "zero1 behind": (
        optax.chain(TX, zero1(optax.adam(0.1), axis_name=AXIS, replicas=4, averaged=True)),
        None,
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_the_state_of_a_chain_tells(name):
    tx, said = CHAINS[name]
    calls = (
        lambda s: partition_specs(s, AXIS),
        lambda s: distribute(s, mesh_of(4), AXIS),
        replicate,
    )
    for state in (
        tx.init(PARAMS),
        (PARAMS, tx.init(PARAMS)),
        (tuple(PARAMS.values()), {"opt": tx.init(PARAMS)}),
    ):
        for call in calls:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(state)
            assert [said in str(w.message) for w in caught] == ([] if said is None else [True])


def test_a_state_is_kept_by_arithmetic():
    """Of two states `optax.contrib.sam` takes one by multiplying with 0 and 1, which makes integers
    of booleans."""
    averaging = average_gradients(TopK(2, per=16), axis_name=AXIS)
    tx = optax.contrib.sam(
        optax.chain(averaging, optax.sgd(0.1)),
        optax.chain(all_reduce_mean(axis_name=AXIS), optax.sgd(0.05)),
        sync_period=2,
    )
    params = {"w": jnp.ones((16, 12))}
    state = replicate((params, tx.init(params)), axis_name=AXIS)

    @partial(jax.pmap, axis_name=AXIS)
    def step(gradients, state):
        updates, after = tx.update(gradients, state[1], state[0])
        return optax.apply_updates(state[0], updates), after

    for i in range(4):
        gradients = np.random.default_rng(i).standard_normal((4, 16, 12), np.float32)
        state = step({"w": gradients}, state)
    found = np.asarray(state[0]["w"])
    assert all(np.array_equal(each, found[0]) for each in found)
    assert stats(unreplicate(state)).steps
