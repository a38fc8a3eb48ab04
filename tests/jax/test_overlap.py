"""DiLoCo whose averages are taken later, where the host says what is due: messages in no branch, few programs, the numbers of the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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


@pytest.mark.parametrize("case", ["overlap", "eager"])
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


def test_the_outer_parameters_are_the_anchors():
    tx, params = local_sgd(optax.sgd(0.1), diloco(4, overlap=2), axis_name=AXIS), {"w": jnp.ones(3)}
    assert (tx.outer_params(tx.init(params))["w"] == 1).all()
