"""Optax transformations as outer optimizers of local SGD: against the very transformation in a loop by hand, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from gradwire import LocalSGD, LocalSimulator, OuterSGD, diloco, plan
from gradwire.jax_backend import local_sgd

AXIS = "data"
SHAPES = {"block1/w": (4, 3), "block2/w": (3, 2), "b": (3,)}
ADAMW = functools.partial(optax.adamw, 0.05, weight_decay=0.1)


def gradient(replica, step):
    return {
        n: np.random.default_rng([replica, step, *n.encode()]).standard_normal(s).astype(np.float32)
        for n, s in SHAPES.items()
    }


def test_adamw_is_that_of_a_loop_by_hand_and_goes_on_with_fewer_replicas():
    """In two fragments, whose counts of steps are their own. Three replicas, then two."""
    local = diloco(4, fragments=2, layout=("block*", "*"), outer=ADAMW)
    tx = local_sgd(optax.sgd(0.1), local, axis_name=AXIS)
    start = {n: jnp.ones(s) for n, s in SHAPES.items()}

    @functools.partial(jax.vmap, axis_name=AXIS)
    def step(training, gradients):
        return tx.step(gradients, training)

    def placed(training):
        """As `stack_replicas` and `replicate` would: one row of `placed` on each replica."""
        params, state = training
        return params, state._replace(placed=jax.tree.map(lambda x: jnp.zeros((len(x), 1), bool), state.placed))

    rows = placed(jax.tree.map(lambda x: jnp.stack([x] * 3), (start, tx.init(start))))
    by_hand, parts = ADAMW(), [["block1/w", "block2/w"], ["b"]]
    outer = [{n: start[n] for n in part} for part in parts]
    memory = [by_hand.init(each) for each in outer]
    mine, compiled = [dict(start)] * 3, jax.jit(step)
    for n in range(16):
        if n == 10:  # two go on from the mean of three
            rows = jax.tree.map(lambda x: np.repeat(np.asarray(x).mean(0, keepdims=True), 2, 0).astype(x.dtype), rows)
            mine = [{name: sum(p[name] for p in mine) / 3 for name in SHAPES}] * 2
        gradients = [gradient(r, n) for r in range(len(mine))]
        rows = compiled(rows, {name: np.stack([g[name] for g in gradients]) for name in SHAPES})
        mine = [{name: p[name] - 0.1 * g[name] for name in SHAPES} for p, g in zip(mine, gradients, strict=True)]
        for number, part in enumerate(parts):
            if (n + 1 - 2 * (number + 1)) % 4 == 0:
                average = {name: sum(outer[number][name] - p[name] for p in mine) / len(mine) for name in part}
                updates, memory[number] = by_hand.update(average, memory[number], outer[number])
                outer[number] = optax.apply_updates(outer[number], updates)
                mine = [p | outer[number] for p in mine]
        for r, p in enumerate(mine):
            for name in SHAPES:
                np.testing.assert_allclose(rows[0][name][r], p[name], rtol=2e-4, atol=2e-5)
    counts = rows[1].averages.memory["outer.0.count"]
    assert (counts["block1/w"].tolist(), counts["b"].tolist()) == ([4, 4], [4, 4])


def test_another_optimizers_memory_is_refused_by_name():
    params = {n: jnp.ones(s) for n, s in SHAPES.items()}
    adamw, sgd = (
        local_sgd(optax.sgd(0.1), diloco(4, outer=outer), axis_name=AXIS)
        for outer in (ADAMW, functools.partial(optax.sgd, 0.7, 0.9))
    )
    assert sorted(adamw.init(params).averages.memory) == ["outer", "outer.0.count", "outer.0.mu", "outer.0.nu"]
    state = jax.tree.map(lambda x: x[None], adamw.init(params))

    def average(params, state):
        state = state._replace(placed=jax.tree.map(lambda x: jnp.zeros((1,), bool), state.placed))
        return sgd.average_params(params, state)

    with pytest.raises(ValueError, match="adamw"):
        jax.vmap(average, axis_name=AXIS)(jax.tree.map(lambda x: x[None], params), state)


@pytest.mark.parametrize(
    "outer",
    [
        functools.partial(torch.optim.AdamW, lr=0.1),
        torch.optim.AdamW,
        lambda: 3,
        functools.partial(optax.sgd, momentum=0.9),
    ],
    ids=["torch", "torch's class", "no transformation", "an argument too few"],
)
def test_what_makes_no_transformation_is_refused(outer):
    with pytest.raises(TypeError, match=r"^outer="):
        local_sgd(optax.sgd(0.1), diloco(4, outer=outer), axis_name=AXIS)


def test_the_simulator_has_its_own_alone_and_a_plan_needs_none():
    local = diloco(4, outer=ADAMW)
    with pytest.raises(TypeError, match=r"^outer=optax.*adamw"):
        LocalSimulator(local, {"w": [1.0]}, 2)
    assert plan({"w": (8, 8)}, local).wire_bytes == plan({"w": (8, 8)}, diloco(4)).wire_bytes
    assert LocalSGD(4, outer=OuterSGD(0.5)) == diloco(4, outer=OuterSGD(0.5))
    for wrong, error in ((optax.adam(0.1), TypeError), (3, TypeError)):
        with pytest.raises(error, match=r"^outer="):
            diloco(4, outer=wrong)
    with pytest.raises(TypeError, match="lr="):
        diloco(4, outer=ADAMW, lr=0.5)
