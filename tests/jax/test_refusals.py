"""What cannot work is refused, by name and with the fix: at once, in `init`, or while the step is traced."""

import dataclasses
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradwire.jax_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD, Spec, WireDtype, Zero, shard_by_element
from gradwire.core.programs import Request, ask
from gradwire.core.requests import all_gather
from tests.jax.replicas import AXIS, mesh_of, refused, traced

PARAMS = {"w": jnp.ones((32, 24)), "b": jnp.ones(24)}
TX = gw.power_sgd(2, axis_name=AXIS)
MEAN = gw.all_reduce_mean(axis_name=AXIS)
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)


def trace(updates, state, tx=TX):
    jax.make_jaxpr(tx.update, axis_env=[(AXIS, 4)])(updates, state, PARAMS)


def sharded(inner=SGD, **options):
    return gw.zero1(inner, **{"axis_name": AXIS, "replicas": 4} | options)


def local(inner=SGD, schedule=LocalSGD(4), **options):  # noqa: B008
    return gw.local_sgd(inner, schedule, **{"axis_name": AXIS} | options)


def diloco(period=4, **options):
    return gw.diloco(SGD, period, axis_name=AXIS, **options)


def average(algorithm):
    return gw.average_gradients(algorithm, axis_name=AXIS)


def injected(**options):
    return optax.inject_hyperparams(gw.power_sgd, **options)(rank=4, axis_name=AXIS).init(PARAMS)


def average_of(state):
    """Of parameters that were not trained."""
    return on_four(lambda p: LOCAL.average_params(p, state(p)))


def on_four(function):
    return jax.make_jaxpr(function, axis_env=[(AXIS, 4)])(PARAMS)


@jax.tree_util.register_pytree_node_class
class Model:
    """With what is no array in it, as modules of Equinox."""

    def tree_flatten(self):
        return (jnp.ones((32, 24)), jax.nn.relu), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return dataclasses.make_dataclass("Unflattened", [])()


LOCAL, CLIP, ALGORITHMS = local(), gw.clip_by_global_norm, (PowerSGD, optax.sgd(1.0), 4, "powersgd", None)
NOT_BOUND, NO_AXIS = "the axis 'data' is not bound", "must be the name of the mapped axis"
MODEL, NAMED = "eqx.filter(model, eqx.is_inexact_array)", ("jax.pmap(step, axis_name='data')", "shard_map")
#: An update where no axis "data" is.
NOWHERE = (lambda f: f, jax.jit, lambda f: jax.vmap(f, axis_name="batch", in_axes=None, axis_size=2))
CALLS = [
    (lambda: gw.power_sgd(2), TypeError, "axis_name"),
    (lambda: gw.all_reduce_mean(), TypeError, "axis_name"),
    (lambda: gw.average_gradients(AllReduce()), TypeError, "axis_name"),
    *((lambda axis=axis: gw.power_sgd(2, axis_name=axis), TypeError, NO_AXIS) for axis in (None, 0, (), ("data", 1))),
    *((lambda axis=axis: sharded(axis_name=axis), TypeError, NO_AXIS) for axis in (None, (), 3)),
    *((lambda axis=axis: CLIP(1.0, axis), TypeError, NO_AXIS) for axis in (None, (), 3)),
    (lambda: local(axis_name=3), TypeError, "axis_name=3"),
    *((lambda given=given: average(given), TypeError, "no algorithm", "PowerSGD(rank=4)") for given in ALGORITHMS),
    (lambda: gw.power_sgd(0, axis_name=AXIS), ValueError, "rank=0 must be at least 1"),
    (lambda: gw.power_sgd(-3, axis_name=AXIS), ValueError, "rank=-3"),
    (lambda: gw.power_sgd(2, axis_name=AXIS, ranks=3), TypeError, "ranks"),
    (lambda: gw.power_sgd({"v*": 2}, axis_name=AXIS).init(PARAMS), ValueError, "'v*' matches no parameter", "'b', 'w'"),
    (lambda: average(AllReduce(bucket_bytes=0)), ValueError, "bucket_bytes=0 must be more than 0 bytes"),
    (lambda: average(AllReduce(8, -1)), ValueError, "first_bucket_bytes=-1 must be more than 0 bytes"),
    (lambda: average(AllReduce(first_bucket_bytes=8)), ValueError, "first_bucket_bytes=8 needs bucket_bytes"),
    (lambda: sharded(optax.adam), TypeError, "no optax transformation", "zero1(optax.adam(1e-3)"),
    (lambda: sharded(replicas=0), ValueError, "replicas=0 must be at least 1"),
    (lambda: sharded(bucket_bytes=0), ValueError, "bucket_bytes=0"),
    (lambda: sharded(bucket_bytes=8, averaged=True), ValueError, "bucket_bytes=8 with averaged=True"),
    (lambda: sharded(wire_dtype="int8", averaged=True), ValueError, "wire_dtype='int8' with averaged=True"),
    (lambda: sharded(wire_dtype="int7"), ValueError, "dtype='int7'"),
    *((lambda n=n: CLIP(n, AXIS), ValueError, f"max_norm={n} must be more than 0") for n in (0.0, -1.0, float("nan"))),
    (lambda: local(optax.sgd), TypeError, "is no optax transformation"),
    (lambda: local(schedule=4), TypeError, "local is a int; give LocalSGD"),
    (lambda: local(moments="drop"), ValueError, "moments='drop' is not one of"),
    (lambda: diloco(fragments=2, moments="reset"), ValueError, "moments='reset' with fragments=2"),
    (lambda: diloco(0), ValueError, "period=0"),
    (lambda: diloco(lr=optax.constant_schedule(0.7)), TypeError, "lr=", "must be a number", "no schedule"),
    (lambda: LocalSGD(4, outer=SGD), TypeError, "outer is a Gradient", "OuterSGD(lr, momentum, nesterov)"),
    # In `init`.
    (lambda: diloco(9, fragments=3).init(PARAMS), ValueError, "fragments=3 of 2 parameters"),
    (lambda: local(optax.chain(LOCAL, SGD)).init(PARAMS), ValueError, "inner holds a LocalSGDState"),
    (lambda: LOCAL.init({"n": jnp.arange(3)}), ValueError, "parameter 'n' has dtype int32"),
    (lambda: LOCAL.init({"n": jax.ShapeDtypeStruct((3,), "float32")}), TypeError, "jax.eval_shape(tx.init, params)"),
    (lambda: on_four(local(schedule=LocalSGD(4, subgroup=3)).init), ValueError, "4 replicas cannot be divided so"),
    (lambda: sharded(replicas=None).init(PARAMS), ValueError, "outside a map over 'data'", "=jax.device_count()"),
    (lambda: on_four(sharded(replicas=2).init), ValueError, "replicas=2, but the axis 'data' has 4"),
    *((lambda tx=tx: tx.init(Model()), TypeError, "not an array", MODEL) for tx in (TX, diloco(), sharded(ADAM))),
    (lambda: injected(), TypeError, "optax.inject_hyperparams", "Inject into the optimizer behind it"),
    (lambda: injected(static_args=("rank",)), TypeError, "optax.inject_hyperparams", "into the optimizer behind it"),
    # In a step.
    *((lambda at=at: at(TX.update)(PARAMS, TX.init(PARAMS)), NameError, NOT_BOUND, *NAMED) for at in NOWHERE),
    *((lambda at=at: at(MEAN.update)(PARAMS, MEAN.init(PARAMS)), NameError, NOT_BOUND, *NAMED) for at in NOWHERE),
    (lambda: gw.mark_varying(PARAMS, AXIS), NameError, f"mark_varying: {NOT_BOUND}"),
    (lambda: LOCAL.update(PARAMS, LOCAL.init(PARAMS), PARAMS), NameError, NOT_BOUND),
    (lambda: LOCAL.average_params(PARAMS, LOCAL.init(PARAMS)), NameError, NOT_BOUND),
    (lambda: sharded().update(PARAMS, sharded().init(PARAMS)), NameError, f"zero1: {NOT_BOUND}"),
    (lambda: CLIP(1.0, AXIS).update(PARAMS, optax.EmptyState()), NameError, f"clip_by_global_norm: {NOT_BOUND}"),
    (lambda: average_of(lambda p: ()), ValueError, "there are 0 in what it was given"),
    (lambda: average_of(lambda p: (LOCAL.init(p),) * 2), ValueError, "there are 2 in what it was given"),
    (lambda: on_four(lambda p: diloco().average_params({"w": p["w"]}, diloco().init(p))), ValueError, "'b' in one of"),
]  # fmt: skip


@pytest.mark.parametrize("row", CALLS)
def test_a_call_that_cannot_work(row):
    call, error, *words = row
    with refused(*words, error=error):
        call()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool, jnp.complex64])
@pytest.mark.parametrize("tx", [TX, MEAN, sharded()])
def test_gradients_that_cannot_be_averaged(tx, dtype):
    wrong = PARAMS | {"b": jnp.ones(24, dtype)}
    with refused("'b'", jnp.dtype(dtype).name, "optax.masked"):
        tx.init(wrong)
    if tx in (TX, MEAN):
        with refused("'b'", jnp.dtype(dtype).name, "optax.masked"):
            trace(wrong, tx.init(PARAMS), tx)


def test_gradients_of_integers():
    grads = jax.grad(lambda p: p["w"].sum(), allow_int=True)({"w": jnp.ones((32, 24)), "b": jnp.ones(3, int)})
    with refused("'b'", "float0"):
        trace(grads, TX.init(PARAMS))


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ({"w": PARAMS["w"]}, ["'b' is missing"]),
        ({"w": PARAMS["w"], "bias": PARAMS["b"]}, ["'bias' is new", "'b' is missing"]),
        ({"b": PARAMS["b"]}, ["'w' is missing"]),
        ({"w": {"v": PARAMS["w"]}, "b": PARAMS["b"]}, ["'w/v' is new", "'w' is missing"]),
        ({"w": jnp.ones((24, 32)), "b": PARAMS["b"]}, ["'w' has shape (24, 32)", "(32, 24)"]),
    ],
)
def test_gradients_of_another_model(gradients, words):
    for tx in (TX, gw.power_sgd(2, axis_name=AXIS, error_feedback=False)):
        if tx is TX or "shape" not in words[0]:  # without error memory, the shape is not known
            with refused(*words):
                trace(gradients, tx.init(PARAMS), tx)


def gradient(params, x):
    return jax.grad(lambda p: ((x @ p["w"] + p["b"]) ** 2).mean())(params)


def varying(params, x=None):
    """What differs between replicas: these parameters, or their gradient."""
    mine = gw.mark_varying(params, AXIS)
    return mine if x is None else gradient(mine, x)


SUMMED = ("already summed", "mark_varying(params, 'data')")
AVERAGED = sharded(averaged=True)


@pytest.mark.parametrize(
    ("tx", "given", "words"),
    [
        (TX, gradient, ["'b', 'w'", *SUMMED, "check_vma=False"]),
        (TX, lambda p, x: varying(p, x) | {"b": gradient(p, x)["b"]}, ["gradients of 'b' do not vary"]),
        (TX, lambda p, x: jax.lax.pmean(varying(p, x), AXIS), ["do not vary", "Or a pmean or psum", "take it out"]),
        (TX, varying, None),
        (sharded(), gradient, ["'b', 'w'", *SUMMED]),
        (sharded(), varying, None),
        (AVERAGED, varying, ["averaged=True", "'b' varies over 'data'", "power_sgd"]),
        (AVERAGED, gradient, None),
        (optax.chain(MEAN, AVERAGED), varying, None),
        (optax.chain(MEAN, sharded()), varying, ["If they are averages", "zero1(…, averaged=True)"]),
        (CLIP(1.0, AXIS), gradient, ["inside zero", "optax.clip_by_global_norm"]),
    ],
)  # fmt: skip
def test_what_jax_knows_of_gradients(tx, given, words):
    """Whether autodiff has summed them, whether they are averages, and whether they should be."""

    def body(params, state, x):
        return tx.update(given(params, x), state, params)

    with refused(*words) if words else nullcontext():
        traced(body, PARAMS, tx.init(PARAMS))
    if tx is TX and given in (gradient, varying):
        traced(body, PARAMS, tx.init(PARAMS), check_vma=False)


def test_parameters_that_the_loss_does_not_use_are_no_reason():
    params = PARAMS | {"unused": jnp.ones(3)}
    traced(lambda p, state, x: TX.update(varying(varying(p), x), state), params, TX.init(params))


def test_a_state_that_was_not_divided_among_the_replicas():
    state = jax.tree.map(jnp.asarray, gw.unreplicate(gw.replicate(TX.init(PARAMS))))
    with refused("'error' of parameter 'w' has shape (4, 32, 24)", "partition_specs"):
        trace(PARAMS, state)
    with refused("'0.mu.b' of the state has shape (4, 6)", "partition_specs", "replicate"):
        trace(PARAMS, sharded(ADAM).init(PARAMS), sharded(ADAM))


def test_memory_of_another_number_of_replicas():
    state = gw.unreplicate(gw.replicate(TX.init(PARAMS)))
    for put in (lambda: gw.distribute(state, mesh_of(2), AXIS), lambda: gw.replicate(state, jax.devices()[:3])):
        with refused("local.per_replica.error.w is the memory of 4 replicas", "jax_backend.set_replicas(state, "):
            put()
    tx, state = sharded(ADAM, replicas=None), sharded(ADAM, replicas=2).init(PARAMS)
    with refused("'0.mu.b'", "(12,)", "on 4 replicas", "(6,)", "reshard"):
        trace(PARAMS, jax.tree.map(lambda x: x[:1] if x.ndim else x, state), tx)
    with refused("pieces.per_replica.0.mu.b", "sharded state of 2 replicas", "4 now", "reshard"):
        gw.distribute(state, mesh_of(4), AXIS)
    with refused("sharded state of 1 replicas"):
        gw.replicate(sharded(ADAM, replicas=1).init(PARAMS))


def test_unreplicate_of_what_is_not_in_pmap_form():
    with refused("step has no device axis"):
        gw.unreplicate(TX.init(PARAMS))
    with refused("local.per_replica.error.w has shape (1, 32, 24)"):
        gw.unreplicate(TX.init(PARAMS)._replace(step=jnp.zeros(1), memory={}))


def test_apply_if_finite_around_it():
    for tx in (optax.apply_if_finite(TX, 3), optax.apply_if_finite(optax.chain(TX, ADAM), 3)):
        state = {"opt": tx.init(PARAMS)}
        for use in (lambda s: gw.partition_specs(s, AXIS), lambda s: gw.distribute(s, mesh_of(4), AXIS), gw.replicate):
            with refused("opt.inner_state", "inside optax.apply_if_finite", "chain(power_sgd(...), optax.apply_if_fin"):
                use(state)
    gw.replicate(optax.chain(TX, optax.apply_if_finite(ADAM, 3)).init(PARAMS))
    with refused("inside optax.apply_if_finite", "skip_non_finite=True"):
        gw.partition_specs(optax.apply_if_finite(sharded(ADAM), 3).init(PARAMS), AXIS)
    gw.partition_specs(sharded(optax.MultiSteps(ADAM, 2)).init(PARAMS), AXIS)


#: Transformations without any memory.
BARE = {
    "all_reduce_mean": MEAN,
    "no error feedback": gw.power_sgd(2, axis_name=AXIS, error_feedback=False),
    "nothing compressed": gw.power_sgd({"none": 4, "*": 0}, axis_name=AXIS),
    "zero": sharded(),
}


@pytest.mark.filterwarnings("ignore::gradwire.CompressionWarning")
@pytest.mark.parametrize("name", BARE)
def test_without_memory_it_is_refused_inside_the_same_wrappers(name):
    params = {"w": jnp.zeros((32, 24)), "none": jnp.zeros((32, 24))}
    skipping = optax.MultiSteps(BARE[name], 2, should_skip_update_fn=optax.transforms.skip_not_finite)
    finite = optax.apply_if_finite(BARE[name], 3)
    for around, what in ((finite, "apply_if_finite"), (skipping, "should_skip_update_fn")):
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
    gw.partition_specs(optax.chain(TX, optax.MultiSteps(ADAM, 2)).init(PARAMS), AXIS)


def test_half_accumulated_gradients_are_not_dropped():
    whole = gw.replicate(optax.MultiSteps(TX, 2).init(PARAMS))
    gw.unreplicate(whole)
    with refused("mini_step is not 0", "whole number of accumulations"):
        gw.unreplicate(whole._replace(mini_step=np.ones(4)))
    behind = gw.replicate(optax.chain(TX, optax.MultiSteps(ADAM, 2)).init(PARAMS))
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
