"""What a message of the JAX backend tells its reader to write, written: a message without a row
fails, and so does advice that does not work."""

import warnings

import equinox
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType

import gradwire.core.protocol as rq
import gradwire.jax_backend as gw
from gradwire import AllReduce, LocalSGD, OuterSGD, PowerSGD, TopK
from gradwire.jax_backend.engine.driver import drive
from tests.jax.replicas import AXIS, mesh_of, mesh_of_two, one_step, power, traced
from tests.told import advice, require_done

PARAMS = {"w": jnp.ones((32, 24)), "b": jnp.ones(24)}
SHAPES = {name: x.shape for name, x in PARAMS.items()}
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
TX = gw.power_sgd(2, axis_name=AXIS)
PAIRS = ((0, 1), (2, 3))


def zero(inner=ADAM, **options):
    return gw.zero1(inner, **{"axis_name": AXIS, "replicas": 4} | options)


def inside_a_map():
    for mode in ("pmap", "shard_map"):
        step, given = one_step(TX, PARAMS, mode, 4)
        jax.eval_shape(step, *given)


def without_vma():
    """Where gradients are sums already under check_vma=True, and for what is gathered."""
    for algorithm in (power(), TopK(8, per=64)):
        step, given = one_step(
            gw.average_gradients(algorithm, axis_name=AXIS), PARAMS, "shard_map", 4
        )
        jax.eval_shape(step, *given)


def of_groups():
    ask = lambda groups, axis: lambda x: drive(rq.mean(x[0], groups=groups), axis)  # noqa: E731
    specs = {"in_specs": jax.P(AXIS), "out_specs": jax.P(AXIS), "check_vma": False}
    jax.eval_shape(jax.shard_map(ask(PAIRS, AXIS), mesh=mesh_of(4), **specs), jnp.ones((4, 12)))
    axes = ("node", AXIS)
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Auto,) * 2)
    specs = {"in_specs": jax.P(axes), "out_specs": jax.P("node")}
    mapped = jax.shard_map(ask(PAIRS, axes), mesh=mesh, **specs)
    assert jax.eval_shape(mapped, jnp.ones((4, 12))).shape == (24,)


def with_that_axis_left_to_the_compiler():
    mesh = mesh_of_two(AxisType.Explicit)
    tx = gw.power_sgd(2, axis_name="dcn")
    arrays = jax.device_put(
        PARAMS, {"w": jax.NamedSharding(mesh, jax.P("ici")), "b": jax.NamedSharding(mesh, jax.P())}
    )
    state = gw.distribute(tx.init(arrays), mesh, "dcn")
    specs = jax.P(), gw.partition_specs(state, "dcn")
    given = mesh.update(axis_types=(AxisType.Explicit, AxisType.Auto))
    mapped = jax.shard_map(
        tx.update, mesh=given, axis_names={"dcn"}, in_specs=specs, out_specs=specs, check_vma=False
    )
    with jax.set_mesh(given), warnings.catch_warnings(action="error"):
        jax.jit(mapped).lower(arrays, state)


def zero1_along_the_other_axis():
    """Of a map that is manual over all axes."""
    tx = gw.zero1(ADAM, axis_name="ici", replicas=2)

    def body(params, state, x):
        mine = gw.mark_varying(params, ("dcn", "ici"))
        of_slices = jax.tree.map(lambda p: lax.pmean(p * x.mean(), "dcn"), mine)
        return tx.update(of_slices, state, gw.mark_varying(params, "ici"))

    traced(body, PARAMS, tx.init(PARAMS), mesh_of_two(), "ici")


def outer_steps():
    for outer in (lambda: optax.adamw(0.1), OuterSGD(0.5, 0.9)):
        gw.diloco(SGD, 2, axis_name=AXIS, outer=outer).init(PARAMS)


def weighted():
    for tx in (
        gw.diloco(SGD, 1, axis_name=AXIS, weighted=True),
        gw.local_sgd(SGD, LocalSGD(1, weighted=True), axis_name=AXIS),
    ):
        step = lambda p, w, tx=tx: tx.step(PARAMS, (p, tx.init(p)), weight=w)[0]  # noqa: E731
        jax.make_jaxpr(step, axis_env=[(AXIS, 4)])(PARAMS, jnp.float32(2))


def weighted_and_a_train_state():
    tx = gw.local_sgd(SGD, LocalSGD(2, start_step=2, weighted=True), axis_name=AXIS)

    def step(params, weight):
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        updates, opt_state = tx.update(params, state.opt_state, params, weight=weight)
        params, opt_state = tx.average_params(
            optax.apply_updates(params, updates), opt_state, weight=weight
        )
        return state.replace(params=params, opt_state=opt_state).params

    jax.make_jaxpr(step, axis_env=[(AXIS, 4)])(PARAMS, jnp.float32(2))


def average_params():
    tx, mesh = gw.diloco(SGD, 2, axis_name=AXIS), mesh_of(4)
    state = gw.distribute(gw.stack_replicas((PARAMS, tx.init(PARAMS))), mesh, AXIS)
    specs = gw.partition_specs(state, AXIS)

    def body(state):
        params, opt_state = gw.this_replica(state)
        updates, opt_state = tx.update(params, opt_state, params)
        params = optax.apply_updates(params, updates)
        params, opt_state = tx.average_params(params, opt_state)
        return gw.stack_replicas((params, opt_state))

    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=specs))
    for _ in range(3):
        state = step(state)
    assert gw.stats(gw.distribute(state, mesh, AXIS)).steps == 3


def along_its_axis():
    state = gw.power_sgd(2, axis_name="dcn").init(PARAMS)
    gw.distribute(state, mesh_of_two(), "dcn")
    gw.distribute(gw.power_sgd(2, axis_name="ici").init(PARAMS), mesh_of_two(), "ici")


def its_own_row():
    for mode in ("pmap", "shard_map"):
        step, given = one_step(TX, PARAMS, mode, 4)
        step(*given)


def moments_of_all():
    for inner, what in ((optax.adam(0.1), "average"), (optax.flatten(optax.adam(0.1)), "keep")):
        gw.local_sgd(inner, LocalSGD(2), axis_name=AXIS, moments=what).init(PARAMS)


def moments_in_codes():
    codes = optax.GradientTransformation(
        lambda params: {"m": jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int8), params)},
        lambda updates, state, params=None: (updates, state),
    )
    for what in ("reset", "keep"):
        gw.local_sgd(codes, LocalSGD(2), axis_name=AXIS, moments=what).init(PARAMS)


def of_pmap_or_of_members():
    tx = gw.all_reduce_mean(axis_name=AXIS)
    members = jax.vmap(tx.init)(jax.tree.map(lambda x: jnp.stack([x] * 4), PARAMS))
    for state in (
        gw.unreplicate(gw.replicate(tx.init(PARAMS))),
        jax.tree.map(lambda x: x[0], members),
    ):
        gw.to_portable(state, AllReduce())
        gw.stats(state)


def in_pmap_form():
    state = gw.replicate(TX.init(PARAMS), jax.devices()[:4], axis_name=AXIS)
    gw.stats(gw.unreplicate(state))
    jax.eval_shape(jax.pmap(gw.stats, axis_name=AXIS), state)


def of_another_number():
    old, like = zero(replicas=2).init(PARAMS), zero().init(PARAMS)
    gw.distribute(gw.reshard(old, like), mesh_of(4), AXIS)
    step, given = one_step(zero(replicas=2), PARAMS, "pmap", 2)
    jax.eval_shape(lambda g, s: step(g, s), *given)


def what_fits():
    old = gw.power_sgd(4, axis_name=AXIS).init(PARAMS)
    saved = gw.to_portable(old, PowerSGD(4))
    moved = gw.from_portable(saved, PowerSGD(2), TX.init(PARAMS), replicas=4, strict=False)
    gw.distribute(moved, mesh_of(4), AXIS)


class Model(equinox.Module):
    w: jax.Array
    activation: object


def of_an_equinox_model():
    model = Model(PARAMS["w"], jax.nn.relu)
    arrays = equinox.filter(model, equinox.is_inexact_array)
    jax.make_jaxpr(lambda g: TX.update(g, TX.init(arrays))[0].w, axis_env=[(AXIS, 4)])(arrays)


def wide_memory():
    bf16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = gw.power_sgd(2, axis_name=AXIS, state_dtype="float32")
    jax.make_jaxpr(lambda g: tx.update(g, tx.init(bf16))[0], axis_env=[(AXIS, 4)])(PARAMS)


def skipping():
    """On all replicas alike."""
    for tx in (zero(skip_non_finite=True), optax.chain(TX, optax.apply_if_finite(ADAM, 3))):
        gw.replicate(tx.init(PARAMS), jax.devices()[:4], axis_name=AXIS)


def on_pieces():
    """With a norm of all pieces, or of whole parameters."""
    zero(optax.chain(gw.clip_by_global_norm(1.0, AXIS), ADAM)).init(PARAMS)
    zero(optax.adafactor(0.1), shard="parameter").init(PARAMS)


TWO = "tests/jax/test_processes.py::test_two_processes_are_two_devices"
#: What a message tells → the same, done, or the test that does it.
ROWS = {
    "Call it inside jax.pmap(step, axis_name={}), or inside jax.shard_map over a mesh with that axis": inside_a_map,
    "Call params, opt_state = tx.average_params(params, opt_state) in every training step, once, after optax.apply_updates": average_params,
    "Give all the same Auto(…), and the same files": TWO,
    "Give axis_name={} here, or make the state anew for another axis": along_its_axis,
    "Take optax.flatten out of inner, or use moments='keep'": moments_of_all,
    "Use moments='reset' or 'keep'": moments_in_codes,
    "Give it unreplicate(state)": of_pmap_or_of_members,
    "Give it unreplicate(state), or call it in the training step": in_pmap_form,
    "Give jax.shard_map the same mesh with that axis left to the compiler: mesh=mesh.update(axis_types=…), of AxisType.Auto there": with_that_axis_left_to_the_compiler,
    "Give the transformation arrays only: of an equinox model, tx.init(eqx.filter(model, eqx.is_inexact_array)), and gradients of the same": of_an_equinox_model,
    "Give zero the right replicas=, or convert the state with gradwire.jax_backend.reshard(state, like).": of_another_number,
    "Pass check_vma=False to jax.shard_map, or let the replicas span several axes along which the groups lie, as in axis_name=('node', 'data')": of_groups,
    "Pass the state through jax.shard_map with the specs of gradwire.jax_backend.partition_specs(state, axis_name), after distribute(state, mesh, axis_name), and through jax.pmap after gradwire.jax_backend.replicate(state).": its_own_row,
    "call tx.update(…, weight=…) and tx.average_params(…, weight=…)": weighted_and_a_train_state,
    "call {}, and not only those of `if jax.process_index() == 0`": TWO,
    "give it weighted=True": weighted,
    "give nnx.merge(graphdef, state)[1].opt_state[…]": "tests/jax/test_refusals.py::test_accepted",
    'give state_dtype="float32"': wide_memory,
    "give the state of zero1(…, replicas={}), whose pieces have the sizes of those in the checkpoint": lambda: (
        gw.abstract_state(zero(replicas=2).init(PARAMS), 2, mesh_of(2), AXIS)
    ),
    "Give what keeps whole arrays, such as optax.adamw, or OuterSGD(…)": outer_steps,
    "Give one that draws none, such as optax.adamw, or OuterSGD(…)": outer_steps,
    "give what makes an Optax transformation, or OuterSGD(…)": outer_steps,
    "give zero(...) skip_non_finite=True": skipping,
    "give zero1(axis_name={})": zero1_along_the_other_axis,
    "pass check_vma=False to jax.shard_map": without_vma,
    "pass it, as in zero1(inner, axis_name={}, replicas=jax.device_count())": lambda: zero(
        replicas=jax.device_count()
    ).init(PARAMS),
    "take an elementwise optimizer, and for optax.clip_by_global_norm(max_norm) that of gradwire.jax_backend, clip_by_global_norm(max_norm, axis_name={})": on_pieces,
    "pass shard='parameter'": on_pieces,
    "take it apart in the training step: mine = this_replica(state)": average_params,
    "take over what fits: from_portable(to_portable(state, its_algorithm), algorithm, tx.init(params), replicas=…, strict=False)": what_fits,
    "use jax.eval_shape(tx.init, params)": lambda: jax.eval_shape(
        gw.diloco(SGD, 4, axis_name=AXIS).init, jax.eval_shape(lambda: PARAMS)
    ),
}


def test_every_advice_has_a_row():
    assert advice("jax_backend") == set(ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("told", ROWS)
def test_advice_works(told):
    require_done(ROWS[told])
