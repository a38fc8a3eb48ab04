"""DiLoCo whose averages are taken later, where the host says what is due: messages in no branch, few programs, the numbers of the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import Mesh

from gradwire import PowerSGD, diloco
from gradwire.jax_backend import (
    collective_traffic,
    distribute,
    local_sgd,
    partition_specs,
    stack_replicas,
    this_replica,
)
from tests.core import golden
from tests.parity import local_sgd_cases as table

AXIS = "data"


def trainer(local):
    """A transformation, and a step of the table's problem that is told its turn."""
    tx = local_sgd(optax.sgd(table.RATE), local, axis_name=AXIS)

    def train_step(state, goal, noise, curvature, turn):
        mine = this_replica(state)
        gradients = {n: curvature[0] * (p - goal[n][0]) + noise[n][0] for n, p in mine["params"].items()}
        updates, opt_state = tx.update(gradients, mine["opt_state"], mine["params"])
        params, opt_state = tx.average_params(optax.apply_updates(mine["params"], updates), opt_state, turn=turn)
        return stack_replicas({"params": params, "opt_state": opt_state})

    return tx, train_step


@pytest.mark.parametrize("case", [pytest.param("overlap", marks=pytest.mark.slow), "eager"])
def test_a_turn_that_the_host_tells_changes_no_number(case):
    """As many programs as there are kinds of steps, whatever their number."""
    local = table.CASES[case]
    tx, train_step = trainer(local)
    mesh = Mesh(np.array(jax.devices()[: table.REPLICAS]), (AXIS,))
    params = {n: jnp.asarray(x) for n, x in table.initial().items()}
    with jax.set_mesh(mesh):
        start = stack_replicas({"params": params, "opt_state": tx.init(params)})
    specs, rows = partition_specs(start, AXIS), jax.P(AXIS)

    @functools.partial(jax.jit, static_argnames="turn")
    def step(state, *data, turn):
        body = functools.partial(train_step, turn=turn)
        return jax.shard_map(body, mesh=mesh, in_specs=(specs, rows, rows, rows), out_specs=specs, check_vma=False)(
            state, *data
        )

    def stacked(of):
        return {n: np.stack([of(r)[n] for r in range(table.REPLICAS)]) for n in table.SHAPES}

    goal, curvature = stacked(table.target), np.asarray(table.CURVATURE, np.float32)
    state, seen = distribute(start, mesh, AXIS), []
    for n in range(table.STEPS):
        state = step(state, goal, stacked(lambda r, n=n: table.noise(r, n)), curvature, turn=tx.turn(n))
        now = jax.tree.map(np.asarray, state)
        seen.append([{name: x[r] for name, x in now.per_replica["params"].items()} for r in range(table.REPLICAS)])
    assert step._cache_size() == len({tx.turn(n) for n in range(table.STEPS)}) <= 2 * local.fragments + 3
    expected = table.oracle(case).parameters
    for n in range(table.STEPS):
        for r in range(table.REPLICAS):
            for name in table.SHAPES:
                scale = np.linalg.norm(table.target(0)[name])
                assert np.abs(seen[n][r][name] - expected[n][r][name]).max() <= table.TOLERANCE * scale, (n, r, name)


@pytest.mark.parametrize("compressor", [None, PowerSGD(2)], ids=repr)
def test_no_message_stands_in_a_branch(compressor):
    """It leaves after step 3 and is taken after step 5, whose program alone sends; and it is of what the state holds, not of what the step computes."""
    tx = local_sgd(optax.sgd(0.1), diloco(4, overlap=2, compressor=compressor), axis_name=AXIS)
    ones = {n: jnp.ones(s) for n, s in table.SHAPES.items()}

    def sent(n):
        def step(params, state):
            updates, state = tx.update(params, state, params)
            return tx.average_params(optax.apply_updates(params, updates), state, turn=tx.turn(n))

        state = jax.eval_shape(tx.init, ones)
        state = state._replace(placed=jax.tree.map(lambda x: jax.ShapeDtypeStruct((1,), x.dtype), state.placed))
        return collective_traffic(step, ones, state, axis_env=[(AXIS, 4)])

    assert [n for n in range(4, 12) if sent(n)] == [5, 9]
    assert not any(each.branches for each in sent(5))


@pytest.mark.parametrize("schedule", golden.SCHEDULES)
def test_the_golden_schedule(schedule):
    tx = local_sgd(optax.sgd(0.1), golden.SCHEDULES[schedule], axis_name=AXIS)
    params = {n: jnp.array([1.0, 2.0]) for n in golden.NAMES}
    training = _placed(jax.tree.map(lambda x: jnp.stack([x] * 2), (params, tx.init(params))))

    @functools.partial(jax.jit, static_argnames="turn")
    def step(training, gradient, turn):
        def one(training, gradient):
            return tx.step({n: jnp.full(2, gradient) for n in golden.NAMES}, training, turn=turn)

        return jax.vmap(one, axis_name=AXIS)(training, gradient)

    def memory_after(n):
        nonlocal training
        if n >= 0:
            gradient = jnp.array([golden.gradient(r, n) for r in range(2)])
            training = step(training, gradient, turn=tx.turn(n))
        memory = training[1].averages.memory
        return {name: {key: tree[name][1] for key, tree in memory.items()} for name in golden.NAMES}

    golden.assert_golden(schedule, memory_after)


@pytest.mark.parametrize("told", [True, False])
def test_a_replica_that_breaks_comes_back_with_all_its_fragments(told):
    """A gradient depends on all parameters: what has not come back breaks what has."""
    tx = local_sgd(optax.sgd(0.1), diloco(6, fragments=3, overlap=2), axis_name=AXIS)
    params = {n: jnp.ones(2) for n in "abc"}
    start = jax.tree.map(lambda x: jnp.stack([x] * 2), (params, tx.init(params)))
    start[0]["a"] = jnp.array([[np.nan, 1.0], [1.0, 1.0]])

    def step(training, turn=None):
        gradient = jax.grad(lambda p: jnp.square(sum(p.values())).sum())(training[0])
        training = tx.step(gradient, training, turn=turn)
        return training, jnp.isfinite(jnp.stack(list(training[0].values()))).all()

    def run(training):
        if not told:
            return jax.lax.scan(lambda training, _: step(training), training, length=6)[1]
        finite = []
        for n in range(6):
            training, each = step(training, tx.turn(n))
            finite.append(each)
        return jnp.stack(finite)

    # The first fragment has its turn after step 1.
    assert jax.jit(jax.vmap(run, axis_name=AXIS))(_placed(start)).tolist() == [[False] + [True] * 5, [True] * 6]


def test_outer_params_are_those_of_the_state():
    tx, params = local_sgd(optax.sgd(0.1), diloco(4, overlap=2), axis_name=AXIS), {"w": jnp.ones(3)}
    assert (tx.outer_params(tx.init(params))["w"] == 1).all()


#: Where training starts, and the parameters of it.
LOOPS = {
    "plain": (lambda params, tx: (params, tx.init(params)), lambda training: training[0]),
    "linen": (
        lambda params, tx: train_state.TrainState.create(
            apply_fn=None, params=params, tx=optax.chain(optax.identity(), tx)
        ),
        lambda training: training.params,
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_both_halves_of_a_step_in_one_call(loop):
    """Two replicas whose gradients differ: after every second step they agree, and extras with them."""
    tx = local_sgd(optax.sgd(0.5), diloco(2, lr=1.0, momentum=0.0), axis_name=AXIS)
    begun, params_of = LOOPS[loop]
    start = jax.tree.map(lambda x: jnp.stack([x] * 2), begun({"w": jnp.arange(6.0).reshape(3, 2)}, tx))

    def run(training, gradient):
        seen = []
        for n in range(4):
            training, stats = tx.step({"w": gradient}, training, {"mean": gradient.sum()}, turn=tx.turn(n))
            seen.append((params_of(training)["w"], stats["mean"]))
        return seen

    seen = jax.jit(jax.vmap(run, axis_name=AXIS))(_placed(start), jnp.stack([jnp.ones((3, 2)), jnp.full((3, 2), 3.0)]))
    expected = np.arange(6.0).reshape(3, 2)
    for n, (w, mean) in enumerate(seen):
        alone = np.stack([expected - 0.5 * (n % 2 + 1) * g for g in (1.0, 3.0)])
        if n % 2:
            expected = alone.mean(0)
            alone = np.stack([expected] * 2)
        np.testing.assert_allclose(w, alone, rtol=1e-6)
        np.testing.assert_allclose(mean, [12.0, 12.0] if n % 2 else [6.0, 18.0])


def _placed(state):
    """As `stack_replicas` and `replicate` would: one row of `placed` on each replica."""
    return jax.tree.map(lambda x: jnp.zeros((len(x), 1), bool) if x.shape == (2, 0) else x, state)


def test_of_nnx_as_well():
    tx = local_sgd(optax.sgd(0.5), diloco(1, lr=1.0, momentum=0.0), axis_name=AXIS)

    def run(gradient):
        model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        before = model.kernel[...]
        tx.step(nnx.State({"kernel": nnx.Param(gradient)}), (model, optimizer), turn=tx.turn(0))
        return before - model.kernel[...], optimizer.step[...]

    moved, steps = jax.jit(jax.vmap(run, axis_name=AXIS))(jnp.stack([jnp.ones((2, 2)), jnp.full((2, 2), 3.0)]))
    np.testing.assert_allclose(moved, np.ones((2, 2, 2)), rtol=1e-6)
    assert steps.tolist() == [1, 1]


def test_what_is_no_training_is_refused():
    tx = local_sgd(optax.sgd(0.5), diloco(2), axis_name=AXIS)
    with pytest.raises(TypeError, match="training"):
        tx.step({}, {"params": 1})
