"""Local SGD as Flax users call it, and what it does to the state of an optimizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax import lax

import gradwire.jax_backend as gw
from gradwire import LocalSGD
from tests.jax.replicas import AXIS, mesh_of, training

STEPS = 12
PERIOD = 4


class WithStatistics(linen.Module):
    @linen.compact
    def __call__(self, x):
        # No bias before BatchNorm: its gradient would be zero but for rounding, which Adam would make into whole steps.
        x = linen.Dense(16, use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        return linen.Dense(8)(linen.tanh(x))


LINEN_TX = gw.diloco(optax.adamw(5e-3), PERIOD, axis_name=AXIS, start_step=1)


class LocalState(TrainState):
    batch_stats: Any
    key: jax.Array


@cache
def linen_start():
    model = WithStatistics()
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((2, 12), np.float32))
    tx = optax.chain(optax.clip(1.0), LINEN_TX)
    more = {"batch_stats": variables["batch_stats"], "key": jax.random.key(1)}
    return LocalState.create(apply_fn=model.apply, params=variables["params"], tx=tx, **more)


def linen_step(state, x, y):
    mine = gw.this_replica(state)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": mine.batch_stats}
        out, changed = mine.apply_fn(variables, x, mutable=["batch_stats"])
        return ((out - y) ** 2).mean(), changed["batch_stats"]

    (loss, batch_stats), gradients = jax.value_and_grad(loss_fn, has_aux=True)(mine.params)
    mine = mine.apply_gradients(grads=gradients)
    params, opt_state, batch_stats = LINEN_TX.average_params(mine.params, mine.opt_state, batch_stats)
    mine = mine.replace(params=params, opt_state=opt_state, batch_stats=batch_stats)
    return gw.stack_replicas(mine), lax.pmean(loss, AXIS)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(12, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.tanh(self.hidden(x))))


NNX_TX = gw.local_sgd(optax.adam(5e-3), LocalSGD(PERIOD, start_step=1), axis_name=AXIS, moments="average")


@cache
def nnx_parts():
    """The graph, and the state."""
    model = Nnx(nnx.Rngs(0))
    return nnx.split((model, nnx.Optimizer(model, NNX_TX, wrt=nnx.Param)))


def nnx_start():
    return nnx_parts()[1]


def nnx_step(state, x, y):
    model, optimizer = nnx.merge(nnx_parts()[0], gw.this_replica(state))
    loss, gradients = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(model, gradients)
    params, opt_state = NNX_TX.average_params(nnx.state(model, nnx.Param), optimizer.opt_state)
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    return gw.stack_replicas(nnx.state((model, optimizer))), lax.pmean(loss, AXIS)


def batches():
    """32 examples a step, 8 for each replica."""
    random = np.random.default_rng(0)
    truth = random.standard_normal((12, 8)).astype(np.float32)
    inputs = random.standard_normal((STEPS, 32, 12)).astype(np.float32)
    return [(x, np.tanh(x @ truth)) for x in inputs]


def rows_of(tree):
    """For each array, the different rows of it."""
    return [{np.asarray(row).tobytes() for row in np.asarray(x)} for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("start", "step", "mode", "part"),
    [
        (linen_start, linen_step, "vma", lambda s: (s.per_replica.params, s.per_replica.batch_stats)),
        (nnx_start, nnx_step, "pmap", lambda s: nnx.filter_state(s.per_replica, nnx.Param)),
    ],
    ids=["linen", "nnx"],
)
def test_flax_training(start, step, mode, part):
    losses, different = [], []  # how many different replicas there were after each step
    for state, loss in training(step, gw.stack_replicas(start()), batches(), mode):
        losses.append(loss)
        different.append(max(map(len, rows_of(part(state)))))
    assert losses[-1] < 0.9 * losses[0]
    # One step together (but for statistics), then three apart before each average.
    assert different[1:] == [4, 4, 4, 1] * 2 + [4, 4, 4]
    assert all(x.shape[0] == 4 for x in jax.tree.leaves(gw.unreplicate(state) if mode == "pmap" else state))


TARGET = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
SLOPE = np.array([1.0, 1.7], np.float32)


def gradient(w, replica, step, sin=jnp.sin):
    """Of two replicas that want to go to different places, which move."""
    return SLOPE_OF[sin][replica] * (w - TARGET_OF[sin][replica] - sin(0.3 * step))


SLOPE_OF = {jnp.sin: jnp.asarray(SLOPE), np.sin: SLOPE.astype(np.float64)}
TARGET_OF = {jnp.sin: jnp.asarray(TARGET), np.sin: TARGET.astype(np.float64)}


def train_two(txs, steps):
    """For each transformation: the parameter after every step and the state in the end, a row for each of two replicas."""

    def run(state):
        results = {}
        for name, tx in txs.items():

            def one(carry, step, tx=tx):
                params, opt_state = carry
                gradients = {"w": gradient(params["w"], lax.axis_index(AXIS), step)}
                updates, opt_state = tx.update(gradients, opt_state, params)
                params, opt_state = tx.average_params(optax.apply_updates(params, updates), opt_state)
                return (params, opt_state), params["w"]

            (_, after), trace = lax.scan(one, gw.this_replica(state)[name], jnp.arange(steps))
            results[name] = trace, gw.stack_replicas(after)
        return results

    params = {"w": jnp.zeros((3, 4))}
    start = gw.stack_replicas({name: (params, tx.init(params)) for name, tx in txs.items()})
    devices = jax.devices()[:2]
    after = jax.pmap(run, AXIS, devices=devices)(gw.replicate(start, devices))
    return {name: (np.asarray(w), gw.unreplicate(state).per_replica) for name, (w, state) in after.items()}


def test_moments_are_kept_averaged_or_begun_anew():
    inner = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda step: -0.1 / (1 + step)))
    choices = ("keep", "average", "reset")
    after = train_two({what: gw.local_sgd(inner, LocalSGD(4), axis_name=AXIS, moments=what) for what in choices}, 6)
    trace = after["keep"][0]
    assert all(np.array_equal(trace[:, :4], after[what][0][:, :4]) for what in choices)

    def alone(state, replica, trace, steps):
        """The state of a replica's optimizer after these steps, of which all but the fourth lead where they led here."""
        for step in steps:
            before = trace[replica, step - 1] if step else np.zeros((3, 4), np.float32)
            update, state = inner.update({"w": gradient(before, replica, step)}, state)
            assert step == 3 or np.allclose(trace[replica, step], before + update["w"], rtol=1e-4, atol=1e-6)
        return state

    fresh = inner.init({"w": jnp.zeros((3, 4))})
    kept = [alone(fresh, replica, trace, range(4)) for replica in range(2)]
    mean = jax.tree.map(lambda *x: jnp.stack(x).mean(0).astype(x[0].dtype), *kept)
    for what, begin in (("keep", kept), ("average", [mean] * 2), ("reset", [(fresh[0], kept[0][1])] * 2)):
        trace, state = after[what]  # where a schedule goes on
        for replica in range(2):
            mine = jax.tree.map(lambda x, replica=replica: x[replica], state.inner)
            for x, y in zip(*map(jax.tree.leaves, (mine, alone(begin[replica], replica, trace, (4, 5)))), strict=True):
                assert np.allclose(x, y, rtol=1e-4, atol=1e-6)


def test_accumulation_inside_counts_micro_steps():
    """Two gradients per update, four of them per average: as with twice the batch and half the period."""
    tx = gw.local_sgd(optax.MultiSteps(optax.sgd(0.1), 2), LocalSGD(4), axis_name=AXIS)
    (trace, _), w = train_two({"it": tx}, 8)["it"], [np.zeros((3, 4))] * 2
    for step in range(0, 8, 2):
        w = [x - 0.05 * (gradient(x, r, step, np.sin) + gradient(x, r, step + 1, np.sin)) for r, x in enumerate(w)]
        w = [(w[0] + w[1]) / 2] * 2 if step % 4 == 2 else w
        for r in range(2):
            assert np.allclose(trace[r, step + 1], w[r], rtol=1e-5, atol=1e-6)


def test_under_vmap_an_average_is_sent_only_when_it_is_due():
    """As DrJAX maps replicas, with `jax.jit` inside too. A branch on a number that has an axis for the replicas would become a selection, and be taken always."""
    period, steps = 3, 7
    tx = gw.diloco(optax.sgd(0.1), period, axis_name=AXIS, start_step=1)
    params = {"w": jnp.zeros((3, 4))}
    mesh = mesh_of(2)
    state = gw.replicate(gw.stack_replicas((params, tx.init(params))), jax.devices()[:2], axis_name=AXIS)

    def step(state, replica):
        params, opt_state = gw.this_replica(state)
        gradients = {"w": gradient(params["w"], replica, opt_state.averages.step)}
        updates, opt_state = tx.update(gradients, opt_state, params)
        return gw.stack_replicas(tx.average_params(optax.apply_updates(params, updates), opt_state))

    numbers = jax.device_put(jnp.arange(2), jax.NamedSharding(mesh, jax.P(AXIS)))
    mapped = jax.jit(jax.vmap(jax.jit(step), axis_name=AXIS, spmd_axis_name=AXIS))
    text = mapped.lower(state, numbers).compile().as_text()
    always = text[text.index("ENTRY") :]
    assert "conditional(" in always
    sent_always = [line for line in always.splitlines() if " all-reduce(" in line]
    assert not any("f32[" in line.split(" all-reduce(")[0] for line in sent_always), sent_always
    other = jax.pmap(step, AXIS, devices=jax.devices()[:2])
    expected = state
    for _ in range(steps):
        state, expected = mapped(state, numbers), other(expected, jnp.arange(2))
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert np.allclose(x, y, rtol=1e-5, atol=1e-6)


PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
SIMPLE = gw.local_sgd(optax.sgd(0.1, momentum=0.9), LocalSGD(4), axis_name=AXIS)


def fresh(tx):
    return gw.stack_replicas({"params": PARAMS, "opt_state": tx.init(PARAMS)})


def test_marks():
    inside = gw.stack_replicas({"w": 1.0, "memory": gw.stack_replicas({"e": jnp.ones(3)})})
    assert inside.per_replica["memory"].per_replica["e"].shape == (1, 3)
    assert jax.tree.map(jnp.shape, gw.this_replica(inside)) == {
        "w": (),
        "memory": gw.stack_replicas({"e": jnp.ones(3)})._replace(per_replica={"e": (1, 3)}),
    }
    assert gw.stack_replicas({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}).per_replica["w"].shape == (1, 2)


def test_accumulation_outside_has_rows_for_its_gradients():
    tx = optax.MultiSteps(SIMPLE, 2).gradient_transformation()
    specs = gw.partition_specs(fresh(tx), AXIS)
    assert all(spec == jax.P(AXIS) for spec in jax.tree.leaves(specs))


@pytest.mark.parametrize(("check_vma", "moments"), [(False, "average"), (True, "reset")])
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
    assert np.array_equal(state.averages.memory["outer"]["w"], PARAMS["w"])
    marked = optax.tree.map_params(tx, lambda x: x + 7, state)
    assert np.array_equal(marked.inner[0].mu["w"], state.inner[0].mu["w"] + 7)


def test_a_tree_with_nothing_in_it():
    step = jax.make_jaxpr(
        lambda p: SIMPLE.average_params(p, SIMPLE.update(p, SIMPLE.init(p), p)[1]), axis_env=[(AXIS, 4)]
    )
    assert step({"empty": {}}).out_avals
