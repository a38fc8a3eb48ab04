"""What local SGD in JAX refuses, and says; groups, marks, and `init` as optax calls it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import gradwire.jax_backend as gw
from gradwire import LocalSGD
from tests.jax.replicas import AXIS, mesh_of

SIMPLE = gw.local_sgd(optax.sgd(0.1, momentum=0.9), LocalSGD(4), axis_name=AXIS)
PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}


def body(tx, marked=True):
    """One step, for errors that are found while it is traced."""

    def step(state):
        mine = gw.this_replica(state) if marked else state
        updates, opt_state = tx.update(jax.tree.map(jnp.ones_like, mine["params"]), mine["opt_state"], mine["params"])
        params, opt_state = tx.average_params(optax.apply_updates(mine["params"], updates), opt_state)
        after = {"params": params, "opt_state": opt_state}
        return gw.stack_replicas(after) if marked else after

    return step


def fresh(tx):
    return {"params": PARAMS, "opt_state": tx.init(PARAMS)}


def trace(tx, state, specs, *, marked=True, check_vma=False, mesh=None):
    mesh = mesh or mesh_of(4)
    mapped = jax.shard_map(body(tx, marked), mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=check_vma)
    return jax.eval_shape(mapped, state)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_state_that_is_not_per_replica_is_refused(check_vma):
    state = fresh(SIMPLE)
    replicated, sharded = jax.P(), jax.P(AXIS)
    marked = gw.stack_replicas(state)
    placed = gw.distribute(marked, mesh_of(4), AXIS)
    trace(SIMPLE, placed, gw.partition_specs(marked, AXIS), check_vma=check_vma)
    trace(SIMPLE, placed, sharded, check_vma=check_vma)
    with pytest.raises(ValueError, match=r"own row of parameters and state.*state = stack_replicas\(state\)"):
        trace(SIMPLE, state, replicated, marked=False, check_vma=check_vma)
    with pytest.raises(ValueError, match=r"placed.per_replica has shape \(0,\)"):
        trace(SIMPLE, marked, replicated, check_vma=check_vma)
    with pytest.raises(ValueError, match=r"has shape \(4,.*every replica must be given its own row"):
        trace(SIMPLE, placed, replicated, check_vma=check_vma)
    with pytest.raises(TypeError, match=r"this_replica takes what stack_replicas\(...\) marked, not a dict"):
        trace(SIMPLE, state, replicated, check_vma=check_vma)


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda s: gw.partition_specs(s, AXIS),
        lambda s: gw.distribute(s, mesh_of(4), AXIS),
        lambda s: gw.replicate(s, axis_name=AXIS),
    ],
)
def test_the_helpers_want_all_of_it_marked(lay_out):
    state = fresh(SIMPLE)
    with pytest.raises(ValueError, match=r"opt_state.*placed.*params.b is not marked.*Mark the whole state once"):
        lay_out({"opt_state": gw.stack_replicas(state["opt_state"]), "params": state["params"]})
    with pytest.raises(ValueError, match=r"opt_state.placed.*is not marked as one that does"):
        lay_out(state)
    lay_out(gw.stack_replicas(state))


def test_marks():
    with pytest.raises(TypeError, match="marked already"):
        gw.stack_replicas(gw.stack_replicas({"w": 1.0}))
    inside = gw.stack_replicas({"w": 1.0, "memory": gw.stack_replicas({"e": jnp.ones(3)})})
    assert inside.per_replica["memory"].per_replica["e"].shape == (1, 3)
    assert jax.tree.map(jnp.shape, gw.this_replica(inside)) == {
        "w": (),
        "memory": gw.stack_replicas({"e": jnp.ones(3)})._replace(per_replica={"e": (1, 3)}),
    }
    assert gw.stack_replicas({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}).per_replica["w"].shape == (1, 2)


def test_states_go_from_map_to_map():
    state = gw.unreplicate(gw.replicate(gw.stack_replicas(fresh(SIMPLE)), axis_name=AXIS))
    assert state.per_replica["params"]["w"].shape == (4, 3, 2)
    assert state.per_replica["opt_state"].placed.per_replica.shape == (4,)
    trace(SIMPLE, gw.distribute(state, mesh_of(4), AXIS), jax.P(AXIS))
    again = gw.replicate(state, axis_name=AXIS)
    assert again.per_replica["params"]["w"].shape == (4, 1, 3, 2)
    with pytest.raises(ValueError, match="the memory of 4 replicas and there are 2 now"):
        gw.distribute(state, mesh_of(2), AXIS)


def test_accumulation_outside_has_rows_for_its_gradients():
    tx = optax.MultiSteps(SIMPLE, 2).gradient_transformation()
    specs = gw.partition_specs(gw.stack_replicas(fresh(tx)), AXIS)
    assert all(spec == jax.P(AXIS) for spec in jax.tree.leaves(specs))


def test_groups_under_every_map():
    pairs = gw.local_sgd(optax.sgd(0.1), LocalSGD({((0, 2), (1, 3)): 2, "all": 4}), axis_name=AXIS)
    state = gw.distribute(gw.stack_replicas(fresh(pairs)), mesh_of(4), AXIS)
    trace(pairs, state, jax.P(AXIS))
    words = r"groups \(\(0, 2\), \(1, 3\)\) of the axis 'data'.*check_vma=False.*several axes"
    with pytest.raises(NotImplementedError, match=words):
        trace(pairs, state, jax.P(AXIS), check_vma=True)


@pytest.mark.parametrize(("check_vma", "moments"), [(False, "average"), (True, "average"), (True, "reset")])
def test_a_node_is_what_shares_the_first_of_two_axes(check_vma, moments):
    axes = ("host", "chip")
    mesh = jax.make_mesh((2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    # One remembers the gradient itself, a mask gives a momentum to one parameter, accumulation has branches of its own.
    inner = optax.chain(
        optax.GradientTransformation(lambda params: params, lambda updates, state, params: (updates, updates)),
        optax.masked(optax.MultiSteps(optax.sgd(1.0, momentum=0.5), 1), {"w": True, "v": False}),
    )
    tx = gw.local_sgd(inner, LocalSGD({"node": 1, "all": 50}, subgroup="node"), axis_name=axes, moments=moments)

    def run(x):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update({"w": -params["w"], "v": x}, state, params)
            params, state, extra = tx.average_params({"w": params["w"], "v": x}, state, jnp.float32(3))
            return (params, state), updates | {"extra": extra}

        params = {"w": x, "v": x}
        (params, _), updates = lax.scan(step, (params, tx.init(params)), length=2)
        return params, jax.tree.map(lambda y: y.reshape(2, 1), updates)

    rows = jax.P(axes), jax.P(None, axes)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=jax.P(axes), out_specs=rows, check_vma=check_vma)
    params, updates = jax.jit(mapped)(jnp.array([1.0, 3.0, 10.0, 20.0]))
    means = np.array([2.0, 2.0, 15.0, 15.0])
    assert np.array_equal(params["w"], means)
    assert np.array_equal(params["v"], means)
    # What `inner` made of averaged gradients: the negative mean, with momentum half as much again in the second step.
    assert np.array_equal(updates["w"], [means, (1.0 if moments == "reset" else 1.5) * means])
    assert np.array_equal(updates["v"], [means, means])
    assert np.array_equal(updates["extra"], np.full((2, 4), 3))


def test_unequal_groups_under_pmap():
    tx = gw.local_sgd(optax.sgd(1.0), LocalSGD({((0, 2, 3), (1,)): 1, "all": 50}), axis_name=AXIS)
    mapped = jax.pmap(lambda x: tx.average_params({"w": x}, tx.init({"w": x}))[0]["w"], AXIS)
    params = mapped(jnp.array([1.0, 3.0, 5.0, 6.0]))
    assert params.tolist() == [4.0, 3.0, 4.0, 4.0]


def test_init_under_jit_and_on_shapes():
    tx = gw.diloco(optax.adam(1e-3), 6, axis_name=AXIS, fragments=2)
    state = tx.init(PARAMS)
    for other in (jax.jit(tx.init)(PARAMS), jax.eval_shape(tx.init, PARAMS)):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), other) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert state.placed.per_replica.shape == (0,)
    assert np.array_equal(state.averages.memory["anchor"]["w"], PARAMS["w"])
    marked = optax.tree.map_params(tx, lambda x: x + 7, state)
    assert np.array_equal(marked.inner[0].mu["w"], state.inner[0].mu["w"] + 7)


def test_a_tree_with_nothing_in_it():
    step = jax.make_jaxpr(
        lambda p: SIMPLE.average_params(p, SIMPLE.update(p, SIMPLE.init(p), p)[1]), axis_env=[(AXIS, 4)]
    )
    assert step({"empty": {}}).out_avals


def test_parameters_that_are_the_same_everywhere_are_refused_where_jax_knows():
    def step(p, x):
        _, state = SIMPLE.update(jax.tree.map(lambda y: y * x[0], p), SIMPLE.init(p), p)
        return SIMPLE.average_params(p, state)[0]

    over = jax.shard_map(step, mesh=mesh_of(4), in_specs=(jax.P(), jax.P(AXIS)), out_specs=jax.P(AXIS))
    with pytest.raises(ValueError, match="parameter 'b' does not vary over 'data'"):
        jax.eval_shape(over, PARAMS, jnp.ones(4))
