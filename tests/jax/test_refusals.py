"""What cannot work is refused while it is traced, by name and with the fix, before anything has changed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradwire.jax_backend as gw
from gradwire import AllReduce, PowerSGD, Spec, WireDtype, Zero, shard_by_element
from gradwire.core.programs import Request, ask
from gradwire.core.requests import all_gather
from tests.jax.replicas import AXIS, mesh_of, refused

PARAMS = {"w": jnp.ones((32, 24)), "b": jnp.ones(24)}
TX = gw.power_sgd(2, axis_name=AXIS)


def trace(updates, state, tx=TX):
    jax.make_jaxpr(tx.update, axis_env=[(AXIS, 4)])(updates, state)


@pytest.mark.parametrize("tx", [TX, gw.all_reduce_mean(axis_name=AXIS)])
def test_an_axis_that_is_not_bound(tx):
    for call in (tx.update, jax.jit(tx.update)):
        with pytest.raises(NameError, match=r"axis 'data' is not bound.*jax.pmap\(step, axis_name='data'\).*shard_map"):
            call(PARAMS, tx.init(PARAMS))
    with pytest.raises(NameError, match="'data' is not bound"):
        jax.vmap(tx.update, axis_name="batch")(*jax.tree.map(lambda x: x[None], (PARAMS, tx.init(PARAMS))))
    with pytest.raises(NameError, match="mark_varying: the axis 'data' is not bound"):
        gw.mark_varying(PARAMS, AXIS)


@pytest.mark.parametrize("axis_name", [None, 0, (), ("data", 1)])
def test_an_axis_without_a_name(axis_name):
    with pytest.raises(TypeError, match="must be the name of the mapped axis"):
        gw.power_sgd(2, axis_name=axis_name)


def test_axis_name_is_required():
    for make in (lambda: gw.power_sgd(2), lambda: gw.all_reduce_mean(), lambda: gw.average_gradients(AllReduce())):
        with pytest.raises(TypeError, match="axis_name"):
            make()


@pytest.mark.parametrize("algorithm", [PowerSGD, optax.sgd(1.0), 4, "powersgd", None])
def test_what_is_no_algorithm(algorithm):
    with pytest.raises(TypeError, match=r"no algorithm.*PowerSGD\(rank=4\)"):
        gw.average_gradients(algorithm, axis_name=AXIS)


def test_options_of_the_algorithm():
    with refused("rank=0 must be at least 1"):
        gw.power_sgd(0, axis_name=AXIS)
    with refused("rank=-3"):
        gw.power_sgd(-3, axis_name=AXIS)
    with pytest.raises(TypeError, match="ranks"):
        gw.power_sgd(2, axis_name=AXIS, ranks=3)
    with refused("rank pattern 'v*' matches no parameter", "'b', 'w'"):
        gw.power_sgd({"v*": 2}, axis_name=AXIS).init(PARAMS)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool, jnp.complex64])
@pytest.mark.parametrize("tx", [TX, gw.all_reduce_mean(axis_name=AXIS)])
def test_gradients_that_cannot_be_averaged(tx, dtype):
    wrong = PARAMS | {"b": jnp.ones(24, dtype)}
    with refused("'b'", jnp.dtype(dtype).name, "optax.masked"):
        tx.init(wrong)
    with refused("'b'", jnp.dtype(dtype).name, "optax.masked"):
        trace(wrong, tx.init(PARAMS), tx)


def test_gradients_of_integers():
    grads = jax.grad(lambda p: p["w"].sum(), allow_int=True)({"w": jnp.ones((32, 24)), "b": jnp.ones(3, int)})
    with refused("'b'", "float0"):
        trace(grads, TX.init(PARAMS))


@pytest.mark.parametrize(
    ("gradients", "parts"),
    [
        ({"w": PARAMS["w"]}, ["'b' is missing"]),
        ({"w": PARAMS["w"], "bias": PARAMS["b"]}, ["'bias' is new", "'b' is missing"]),
        ({"b": PARAMS["b"]}, ["'w' is missing"]),
        ({"w": {"v": PARAMS["w"]}, "b": PARAMS["b"]}, ["'w/v' is new", "'w' is missing"]),
        ({"w": jnp.ones((24, 32)), "b": PARAMS["b"]}, ["'w' has shape (24, 32)", "(32, 24)"]),
    ],
)
def test_gradients_of_another_model(gradients, parts):
    for tx in (TX, gw.power_sgd(2, axis_name=AXIS, error_feedback=False)):
        if "shape" in parts[0] and tx is not TX:
            continue  # without error memory, the shape is not known
        with refused(*parts):
            trace(gradients, tx.init(PARAMS), tx)


def shard_mapped(params, state, body, **options):
    specs = gw.partition_specs(state, AXIS)
    mapped = jax.shard_map(
        body, mesh=mesh_of(4), in_specs=(jax.P(), specs, jax.P(AXIS)), out_specs=(jax.P(), specs), **options
    )
    return jax.eval_shape(mapped, params, gw.distribute(state, mesh_of(4), AXIS), jnp.ones((4, 32)))


def loss(params, x):
    return ((x @ params["w"] + params["b"]) ** 2).mean()


def test_gradients_that_autodiff_has_summed():
    def wrong(params, state, x):
        return TX.update(jax.grad(loss)(params, x), state)

    def right(params, state, x):
        return TX.update(jax.grad(loss)(gw.mark_varying(params, AXIS), x), state)

    state = TX.init(PARAMS)
    with refused("'b', 'w'", "already summed", "mark_varying(params, 'data')", "check_vma=False"):
        shard_mapped(PARAMS, state, wrong)
    shard_mapped(PARAMS, state, wrong, check_vma=False)
    for options in ({}, {"check_vma": False}):
        shard_mapped(PARAMS, state, right, **options)


def test_one_gradient_that_autodiff_has_summed():
    def mixed(params, state, x):
        gradients = jax.grad(loss)(gw.mark_varying(params, AXIS), x)
        return TX.update(gradients | {"b": jax.grad(loss)(params, x)["b"]}, state)

    with refused("gradients of 'b' do not vary"):
        shard_mapped(PARAMS, TX.init(PARAMS), mixed)


def test_parameters_that_the_loss_does_not_use_are_no_reason():
    params = PARAMS | {"unused": jnp.ones(3)}

    def body(p, state, x):
        return TX.update(jax.grad(loss)(gw.mark_varying(gw.mark_varying(p, AXIS), AXIS), x), state)

    shard_mapped(params, TX.init(params), body)


def test_a_state_that_was_not_divided_among_the_replicas():
    state = jax.tree.map(jnp.asarray, gw.unreplicate(gw.replicate(TX.init(PARAMS))))
    with refused("'error' of parameter 'w' has shape (4, 32, 24)", "partition_specs"):
        trace(PARAMS, state)


def test_memory_of_another_number_of_replicas():
    state = gw.unreplicate(gw.replicate(TX.init(PARAMS)))
    for put in (lambda: gw.distribute(state, mesh_of(2), AXIS), lambda: gw.replicate(state, jax.devices()[:3])):
        with refused(
            "local.per_replica.error.w is the memory of 4 replicas", "gradwire.jax_backend.set_replicas(state, "
        ):
            put()


def test_unreplicate_of_what_is_not_in_pmap_form():
    with refused("step has no device axis"):
        gw.unreplicate(TX.init(PARAMS))
    with refused("local.per_replica.error.w has shape (1, 32, 24)"):
        gw.unreplicate(TX.init(PARAMS)._replace(step=jnp.zeros(1), memory={}))


def test_apply_if_finite_around_it():
    for tx in (optax.apply_if_finite(TX, 3), optax.apply_if_finite(optax.chain(TX, optax.adam(1e-3)), 3)):
        state = {"opt": tx.init(PARAMS)}
        for use in (lambda s: gw.partition_specs(s, AXIS), lambda s: gw.distribute(s, mesh_of(4), AXIS), gw.replicate):
            with refused(
                "opt.inner_state", "inside optax.apply_if_finite", "chain(power_sgd(...), optax.apply_if_finite"
            ):
                use(state)
    gw.replicate(optax.chain(TX, optax.apply_if_finite(optax.adam(1e-3), 3)).init(PARAMS))


#: Transformations without any memory.
BARE = {
    "all_reduce_mean": gw.all_reduce_mean(axis_name=AXIS),
    "no error feedback": gw.power_sgd(2, axis_name=AXIS, error_feedback=False),
    "nothing compressed": gw.power_sgd({"none": 4, "*": 0}, axis_name=AXIS),
    "zero": gw.zero1(optax.sgd(0.1), axis_name=AXIS, replicas=4),
}


@pytest.mark.filterwarnings("ignore::gradwire.CompressionWarning")
@pytest.mark.parametrize("name", BARE)
def test_without_memory_it_is_refused_inside_the_same_wrappers(name):
    params = {"w": jnp.zeros((32, 24)), "none": jnp.zeros((32, 24))}
    skipping = optax.MultiSteps(BARE[name], 2, should_skip_update_fn=optax.transforms.skip_not_finite)
    for around, what in (
        (optax.apply_if_finite(BARE[name], 3), "apply_if_finite"),
        (skipping, "should_skip_update_fn"),
    ):
        with refused("inside optax", what):
            gw.replicate(around.init(params))
    accumulating = optax.MultiSteps(BARE[name], 2)
    with refused("inside optax.MultiSteps", "jax.lax.scan"):
        gw.partition_specs(accumulating.init(params), AXIS)
    whole = gw.replicate(accumulating.init(params), jax.local_devices()[:4])
    with refused("mini_step is not 0"):
        gw.unreplicate(whole._replace(mini_step=np.ones(4)))


def test_multi_steps_around_it_has_no_specs():
    state = optax.MultiSteps(optax.chain(TX, optax.adam(1e-3)), 2).init(PARAMS)
    with refused("inner_opt_state.0.local.per_replica", "inside optax.MultiSteps", "jax.lax.scan"):
        gw.partition_specs(state, AXIS)
    gw.partition_specs(optax.chain(TX, optax.MultiSteps(optax.adam(1e-3), 2)).init(PARAMS), AXIS)


def test_half_accumulated_gradients_are_not_dropped():
    whole = gw.replicate(optax.MultiSteps(TX, 2).init(PARAMS))
    gw.unreplicate(whole)
    with refused("mini_step is not 0", "whole number of accumulations"):
        gw.unreplicate(whole._replace(mini_step=np.ones(4)))
    behind = gw.replicate(optax.chain(TX, optax.MultiSteps(optax.adam(1e-3), 2)).init(PARAMS))
    gw.unreplicate((behind[0], behind[1]._replace(mini_step=np.ones(4))))


class Wish(Request):
    pass


class Wishes(AllReduce):
    async def step(self, ops, gradients, state, step):
        await ask(Wish())
        return dict(gradients), state


class Uneven(AllReduce):
    async def step(self, ops, gradients, state, step):
        await all_gather([gradients["b"][:10]], [(10, 14)])
        return dict(gradients), state


class Even(Uneven):
    async def step(self, ops, gradients, state, step):
        await all_gather([gradients["b"]], [(24, 24)])
        return dict(gradients), state


SPECS = {"w": Spec((32, 24)), "b": Spec((24,))}
ASKING = {
    "an update": (
        Zero(shard_by_element(SPECS, 1)),
        "asks for what the JAX driver cannot answer: OptimizerStep where no optimizer is given to it",
        "jax_backend.zero1",
    ),
    "unequal parts": (Uneven(), "cannot answer: AllGather in parts of (10, 14)", "fill them up with zeros"),
    "something else": (Wishes(), "cannot answer Wish", ""),
}


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("wrap", ["data_parallel", "local_sgd"])
def test_what_the_driver_cannot_answer_is_refused_by_init(wrap, name):
    algorithm, *said = ASKING[name]
    for each in (algorithm, WireDtype(algorithm, "bfloat16")):
        tx = (
            gw.average_gradients(each, axis_name=AXIS)
            if wrap == "data_parallel"
            else gw.diloco(optax.sgd(0.1), 4, axis_name=AXIS, compressor=each)
        )
        with refused(*said):
            tx.init(PARAMS)
    gw.average_gradients(Even(), axis_name=AXIS).init(PARAMS)
