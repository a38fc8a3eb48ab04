"""Set-ups that would train and be wrong: each is refused, or comes out right."""

import contextlib
import pickle
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax import lax

import gradwire.jax_backend as gw
from gradwire import AllReduce, PowerSGD, WireDtype
from tests.jax.replicas import AXIS, mesh_of, mesh_of_two, refused, traced

PARAMS = {"w": jnp.ones((32, 24)), "b": jnp.ones(24)}
TX = gw.power_sgd(2, axis_name=AXIS)


def loss(params, x):
    return ((x @ params["w"] + params["b"]) ** 2).mean()


def trace(updates, state, tx=TX):
    return jax.make_jaxpr(tx.update, axis_env=[(AXIS, 4)])(updates, state)


# Where a state belongs.


@pytest.mark.parametrize("check_vma", [False, True])
def test_one_spec_for_everything(check_vma):
    def body(params, state, x):
        return TX.update(jax.grad(loss)(gw.mark_varying(params, AXIS), x), state)

    specs = {"in_specs": (jax.P(), jax.P(), jax.P(AXIS)), "out_specs": (jax.P(), jax.P())}
    mapped = jax.shard_map(body, mesh=mesh_of(4), **specs, check_vma=check_vma)
    with refused("its own row", "0 rows", "distribute(state, mesh, axis_name)", "partition_specs"):
        jax.eval_shape(mapped, PARAMS, TX.init(PARAMS), jnp.ones((4, 32)))


def test_in_axes_none_under_nnx_pmap():
    model = nnx.Linear(32, 24, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(TX, optax.sgd(0.1)), wrt=nnx.Param)

    @nnx.pmap(in_axes=(None, None, 0), out_axes=0, axis_name=AXIS)
    def train(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))

    with refused("its own row", "in_axes=0 (not None)"):
        train(model, optimizer, jnp.ones((4, 8, 32)))


@pytest.mark.parametrize(
    ("axes", "spread", "words"),
    [
        ({"in_axes": (0, None), "out_axes": None}, lambda state: state, "in_axes=0 (not None)"),
        ({}, flax.jax_utils.replicate, "in place of flax.jax_utils.replicate"),
    ],
)
def test_a_fresh_state_for_all_under_pmap(axes, spread, words):
    with refused("its own row", words):
        jax.pmap(TX.update, AXIS, **axes)(jax.tree.map(lambda x: jnp.stack([x] * 4), PARAMS), spread(TX.init(PARAMS)))


def test_the_state_of_one_replica_for_all():
    alone = flax.jax_utils.unreplicate(gw.replicate(TX.init(PARAMS)))
    for put in (lambda: gw.replicate(alone), lambda: gw.distribute(alone, mesh_of(4), AXIS)):
        with refused("what one replica alone has", "flax.jax_utils.unreplicate drops", "set_replicas(state, 4)"):
            put()
    gw.replicate(gw.set_replicas(alone, 4))  # of a run of one replica
    assert gw.replicate(alone, jax.devices()[:1]).record.per_replica.shape == (1, 1)


def test_an_axis_that_the_replicas_do_not_stand_on():
    state = {"params": PARAMS, "opt": optax.chain(gw.power_sgd(2, axis_name="dcn"), optax.sgd(0.1)).init(PARAMS)}
    for call in (lambda: gw.partition_specs(state, "ici"), lambda: gw.distribute(state, mesh_of_two(), "ici")):
        with refused("axis_name='ici'", "axis_name='dcn'", "would be lost"):
            call()
    both = optax.chain(gw.all_reduce_mean(axis_name="ici"), gw.power_sgd(2, axis_name="dcn")).init(PARAMS)
    gw.distribute(both, mesh_of_two(), "dcn")
    swapped = gw.power_sgd(2, axis_name=("dcn", "ici")).init(PARAMS)
    gw.distribute(swapped, mesh_of_two(), ("ici", "dcn"))


def test_an_axis_that_jax_knows_to_be_another():
    tx = gw.power_sgd(2, axis_name="dcn")
    state = tx.init(PARAMS)
    # As if the helpers had been told nothing.
    specs = jax.tree.map(lambda x: jax.P("ici") if jnp.ndim(x) == 3 or jnp.shape(x) == (0,) else jax.P(), state)
    placed = jax.tree.map(lambda x, s: jnp.zeros((2, *x.shape[1:]), x.dtype) if s else x, state, specs)

    def body(x, state):
        gradients = jax.tree.map(lambda p: lax.pcast(p, "dcn", to="varying") * x.mean(), PARAMS)
        return tx.update(gradients, state)[0]

    mapped = jax.shard_map(body, mesh=mesh_of_two(), in_specs=(jax.P("dcn"), specs), out_specs=jax.P())
    with refused("divided along 'ici'", "axis_name='dcn'"):
        jax.eval_shape(mapped, jnp.ones(2), placed)


@pytest.mark.parametrize("make", [lambda: TX.init(PARAMS), lambda: gw.stack_replicas(SIMPLE.init(PARAMS))])
def test_pmap_form_where_another_is_wanted(make):
    spread = gw.replicate(make())
    for call in (
        lambda: gw.replicate(spread),
        lambda: gw.distribute(spread, mesh_of(4), AXIS),
        lambda: gw.set_replicas(spread, 2),
        lambda: gw.partition_specs(spread, AXIS),
    ):
        with refused("form of jax.pmap", "unreplicate(state)"):
            call()


def test_a_mesh_without_the_axis():
    with refused("axis_name='data'", "no axis 'data'", "'dcn', 'ici'"):
        gw.distribute(TX.init(PARAMS), mesh_of_two(), AXIS)


def test_inside_vmap_nothing_has_to_be_placed():
    """It refuses by itself what differs and has no axis."""
    given = jax.tree.map(lambda x: np.stack([np.asarray(x) * i for i in range(4)]), PARAMS)
    with pytest.raises(ValueError, match=r"vmap has mapped output.* but out_axes is None"):
        jax.eval_shape(jax.vmap(TX.update, (0, None), None, axis_name=AXIS), given, TX.init(PARAMS))
    states = jax.jit(jax.vmap(TX.init, None, axis_name=AXIS, axis_size=4))(PARAMS)
    _, states = jax.jit(jax.vmap(TX.update, axis_name=AXIS))(given, states)
    assert gw.unreplicate(states).local.per_replica["error"]["w"].shape == (4, 32, 24)


# Of which options a state is.

OPTIONS = [
    {},
    {"rank": 3},
    {"half_step": True},
    {"square": True},
    {"transpose": ("*w",)},
    {"error_feedback": False},
    {"warm_start": False},
    {"state_dtype": "bfloat16"},
]


def of(options):
    return gw.power_sgd(**{"rank": 2, "axis_name": AXIS} | options)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=repr)
def test_a_state_of_other_options(options):
    for a, b in ((options, {}), ({}, options)):
        with refused("the state is of PowerSGD(", "and the transformation is PowerSGD(", "from_portable(to_portable("):
            trace(PARAMS, of(a).init(PARAMS), of(b))
        stored = serialization.to_bytes(of(a).init(PARAMS))
        with refused("do not match", "PowerSGD(rank=", "configuration"):
            serialization.from_bytes(of(b).init(PARAMS), stored)


def test_a_state_of_the_same_options_comes_back():
    for options in OPTIONS:
        state = of(options).init(PARAMS)
        again = serialization.from_bytes(of(options).init(PARAMS), serialization.to_bytes(state))
        assert jax.tree.structure(again) == jax.tree.structure(state)
        assert jax.tree.structure(pickle.loads(pickle.dumps(state))) == jax.tree.structure(state)
        trace(PARAMS, again, of(options))


def test_what_no_memory_depends_on_may_change():
    one, other = (gw.all_reduce_mean(axis_name=AXIS, bucket_bytes=n) for n in (None, 64))
    trace(PARAMS, one.init(PARAMS), other)
    trace(PARAMS, gw.average_gradients(WireDtype(AllReduce(), "bfloat16"), axis_name=AXIS).init(PARAMS), other)
    trace(PARAMS, gw.average_gradients(WireDtype(PowerSGD(2), "bfloat16"), axis_name=AXIS).init(PARAMS), TX)
    with refused("the state is of AllReduce()", "PowerSGD(rank=2)"):
        trace(PARAMS, one.init(PARAMS), TX)


def test_options_of_local_sgd():
    def step_of(before, now):
        def step(state):
            params, opt_state = gw.this_replica(state)
            return now.average_params(*now.update(params, opt_state, params))

        mapped = jax.pmap(step, AXIS)
        jax.eval_shape(mapped, gw.replicate(gw.stack_replicas((PARAMS, before.init(PARAMS)))))

    def make(period=4, **options):
        return gw.diloco(optax.sgd(0.1), period, axis_name=AXIS, **options)

    step_of(make(), make(8, lr=0.5, start_step=2))
    others = ({"fragments": 2}, {"momentum": 0.0, "nesterov": False}, {"compressor": PowerSGD(2)})
    for options in (*others, {"state_dtype": "bfloat16"}):
        for a, b in ((make(), make(**options)), (make(**options), make())):
            with refused("the state is of LocalSGD(", "and the transformation is LocalSGD("):
                step_of(a, b)


# What is left out, and what is averaged twice or never.


def test_complex_parameters_and_what_is_advised():
    """The advice is followed, and all replicas have the same."""
    params = {"w": jnp.zeros((32, 24)), "c": jnp.zeros(24, jnp.complex64)}
    with refused("'c'", "complex64", "optax.masked(optax.stateless(", "drift apart"):
        TX.init(params)
    real = {"w": True, "c": False}
    average = optax.stateless(lambda g, params: lax.pmean(g, AXIS))
    tx = optax.chain(optax.masked(TX, real), optax.masked(average, jax.tree.map(lambda x: not x, real)), optax.sgd(0.1))

    def step(state, x):
        params, opt_state = state
        g = jax.grad(lambda p: ((x @ p["w"] + jnp.real(p["c"] * 1j) - 1.0) ** 2).mean())(params)
        updates, opt_state = tx.update(g, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    x = np.random.default_rng(0).standard_normal((4, 8, 32)).astype(np.float32)
    after, _ = jax.pmap(step, AXIS)(gw.replicate((params, tx.init(params)), axis_name=AXIS), x)
    for value in jax.tree.leaves(after):
        assert len({row.tobytes() for row in np.asarray(value)}) == 1
    assert np.any(np.asarray(after["w"]))


def test_integer_parameters_and_what_is_advised():
    params = {"w": jnp.zeros((32, 24)), "n": jnp.ones(24, jnp.int32)}
    with refused("'n'", "int32", "optax.set_to_zero()"):
        TX.init(params)
    labels = {"w": "train", "n": "keep"}
    tx = optax.partition({"train": optax.chain(TX, optax.sgd(0.1)), "keep": optax.set_to_zero()}, labels)
    state, stacked = gw.replicate(tx.init(params), axis_name=AXIS), jax.tree.map(lambda x: jnp.stack([x] * 4), params)
    updates, _ = jax.eval_shape(jax.pmap(tx.update, AXIS), stacked, state)
    assert {name: x.shape for name, x in updates.items()} == {"w": (4, 32, 24), "n": (4, 24)}


def test_one_vector_is_not_compressed():
    with pytest.warns(UserWarning, match=r"one vector of 792 elements.*optax.chain\(power_sgd\(...\), optax.flatten"):
        optax.flatten(optax.chain(TX, optax.sgd(0.1))).init(PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optax.chain(TX, optax.flatten(optax.sgd(0.1))).init(PARAMS)
        optax.flatten(gw.all_reduce_mean(axis_name=AXIS)).init(PARAMS)


@pytest.mark.parametrize("options", [{}, {"start_step": 2}, {"half_step": True}], ids=repr)
def test_gradients_that_vary_over_another_axis(options):
    tx = gw.power_sgd(2, axis_name="dcn", **options)

    def update(over=()):
        def body(params, state, x):
            gradients = jax.grad(loss)(gw.mark_varying(params, ("dcn", "ici")), x)
            return tx.update(lax.pmean(gradients, over), state, params)

        traced(body, PARAMS, tx.init(PARAMS), mesh_of_two(), "dcn")

    with refused("gradient of 'b' varies over 'ici' as well", "pmean(gradients, 'ici')", "axis_name=('dcn', 'ici')"):
        update()
    update("ici")


SIMPLE = gw.diloco(optax.sgd(0.1), 4, axis_name=AXIS)


@pytest.mark.parametrize("averages", [0, 1, 2])
def test_an_average_that_was_forgotten_or_is_one_too_many(averages):
    def step(state):
        params, opt_state = gw.this_replica(state)
        updates, opt_state = SIMPLE.update(params, opt_state, params)
        params = optax.apply_updates(params, updates)
        for _ in range(averages):
            params, opt_state = SIMPLE.average_params(params, opt_state)
        return gw.stack_replicas((params, opt_state))

    state = gw.replicate(gw.stack_replicas((PARAMS, SIMPLE.init(PARAMS))), axis_name=AXIS)
    mapped = jax.pmap(step, AXIS)
    for _ in range(3):
        state = mapped(state)
    said = "update of local SGD was called 3 times", f"average_params {3 * averages} times", "updates to"
    if averages == 1:
        whole = gw.unreplicate(state)
        gw.distribute(whole, mesh_of(4), AXIS)
    else:
        with refused(*said):
            gw.unreplicate(state)
        whole = jax.tree.map(lambda x: x[:, 0], state)
    for call in (lambda s: gw.set_replicas(s, 4), lambda s: gw.distribute(s, mesh_of(4), AXIS), gw.replicate):
        with refused(*said) if averages != 1 else contextlib.nullcontext():
            call(whole)


def test_averages_of_micro_steps():
    """`optax.MultiSteps` updates once for several calls, each with its average."""
    tx = optax.MultiSteps(SIMPLE, 2)

    def step(state):
        params, opt_state = gw.this_replica(state)
        updates, opt_state = tx.update(params, opt_state, params)
        return gw.stack_replicas(SIMPLE.average_params(optax.apply_updates(params, updates), opt_state))

    state = gw.replicate(gw.stack_replicas((PARAMS, tx.init(PARAMS))), axis_name=AXIS)
    for _ in range(2):
        state = jax.pmap(step, AXIS)(state)
    gw.unreplicate(state)


# What the state of a chain tells.

MASK = {"w": True, "b": False}
REST = jax.tree.map(lambda x: not x, MASK)
MEAN = gw.all_reduce_mean(axis_name=AXIS)
CHAINS = {
    "adam before": (optax.chain(optax.adam(0.1), TX), "ScaleByAdamState"),
    "momentum before": (optax.chain(optax.clip(1.0), optax.trace(0.9), MEAN), "TraceState"),
    "adam before a mask": (
        optax.chain(optax.adam(0.1), optax.masked(TX, MASK), optax.masked(MEAN, REST)),
        "ScaleByAdamState",
    ),
    "injected before": (optax.chain(optax.inject_hyperparams(optax.adam)(0.1), MEAN), "InjectStatefulHyperparamsState"),
    "a mask alone": (optax.chain(optax.masked(TX, MASK), optax.sgd(0.1)), "optax.masked"),
    "right": (optax.chain(TX, optax.adam(0.1)), None),
    "clipped and decayed before": (
        optax.chain(optax.clip(1.0), optax.add_decayed_weights(0.1), TX, optax.adam(0.1)),
        None,
    ),
    "counted before": (optax.chain(optax.scale_by_schedule(lambda count: 1.0), TX), None),
    "two axes": (optax.chain(MEAN, TX, optax.adam(0.1)), None),
    "a mask and the rest": (optax.chain(optax.masked(TX, MASK), optax.masked(MEAN, REST), optax.adam(0.1)), None),
    "the rest first": (optax.chain(optax.masked(MEAN, REST), optax.masked(TX, MASK), optax.adam(0.1)), None),
    "labels": (
        optax.partition({"a": optax.chain(TX, optax.sgd(0.1, 0.9)), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
        None,
    ),
    "zero1 behind": (optax.chain(TX, gw.zero1(optax.adam(0.1), axis_name=AXIS, replicas=4, averaged=True)), None),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_the_state_of_a_chain_tells(name):
    tx, said = CHAINS[name]
    calls = (lambda s: gw.partition_specs(s, AXIS), lambda s: gw.distribute(s, mesh_of(4), AXIS), gw.replicate)
    for state in (tx.init(PARAMS), (PARAMS, tx.init(PARAMS)), (tuple(PARAMS.values()), {"opt": tx.init(PARAMS)})):
        for call in calls:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(state)
            assert [said in str(w.message) for w in caught] == ([] if said is None else [True])


@pytest.mark.parametrize(
    "make", [lambda: TX, lambda: SIMPLE, lambda: gw.zero1(optax.sgd(0.1), axis_name=AXIS, replicas=4)]
)
def test_a_parameter_with_the_name_of_the_mark(make):
    for params in ({"per_replica": jnp.ones((4, 3))}, {"layer": {"per_replica": {"w": jnp.ones(4)}}}):
        with refused("per_replica", "Give it another name"):
            make().init(params)
    make().init({"per_replica_scale": jnp.ones(4)})


def test_an_axis_that_is_named_twice():
    with refused("axis_name=('data', 'data')", "twice"):
        gw.power_sgd(2, axis_name=("data", "data"))
