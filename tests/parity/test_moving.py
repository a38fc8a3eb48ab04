"""A run that begins in torch, goes on in JAX and ends in torch is the run that stayed: updates and
errors, step by step."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist

from gradwire import FlaxNames, PowerSGD, Spec
from gradwire.core.state import checkpoint
from gradwire.jax_backend import average_gradients, from_portable, to_portable
from gradwire.torch_backend.engine.driver import Driver
from tests.bounds import noting
from tests.methods import METHODS
from tests.parity.cases import SHAPES, STEPS, TOLERANCE, gradients, oracle

#: torch has one process in this test, which computes on all examples; JAX has two replicas, which
#: share them.
REPLICAS = 2
#: Steps in torch, in JAX, and in torch again. The first is an odd number, for the half step, and in
#: the dense phase of `start_step`.
MOVES = (3, 8)
#: Of a module with linear maps and a convolution, the shapes in Flax. torch's names are like
#: Flax's.
KERNELS = {"w": (16, 32), "v": (16, 32), "tall": (7, 50), "conv": (3, 3, 4, 16)}
NAMES = {name: f"{name}.weight" if name in KERNELS else f"others.{name}" for name in SHAPES}
FLAX = {
    f"{name}/kernel" if name in KERNELS else f"others/{name}": KERNELS.get(name, x)
    for name, x in SHAPES.items()
}
MOVED = FlaxNames({NAMES[name]: shape for name, shape in SHAPES.items()}, FLAX)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def mean_gradients(case, step):
    both = [gradients(case, step, replica) for replica in range(REPLICAS)]
    return {n: np.mean([np.float64(g[n]) for g in both], axis=0).astype(np.float32) for n in SHAPES}


def in_torch(algorithm, case, steps, group, state=None):
    """Updates, and the portable state in the end."""
    specs = {name: Spec(shape) for name, shape in SHAPES.items()}
    driver = Driver(algorithm, specs, torch.device("cpu"), group)
    if state is not None:
        driver.load_state_dict(state)
    updates = []
    for step in steps:
        given = {name: torch.tensor(g) for name, g in mean_gradients(case, step).items()}
        driver.add(given, first=True, last=True)
        updates.append({name: g.numpy() for name, g in given.items()})
    return updates, driver.memory.portable("all")


def in_jax(algorithm, case, steps, state, begun, *, flax):
    tx = average_gradients(algorithm, axis_name="data")

    def there(arrays):
        return MOVED.to_flax({NAMES[n]: x for n, x in arrays.items()}) if flax else arrays

    def here(arrays):
        moved = MOVED.to_torch(arrays) if flax else arrays
        return {n: moved[NAMES[n] if flax else n] for n in SHAPES}

    if flax:
        state = MOVED.state_to_flax(checkpoint.renamed(state, NAMES), algorithm)
    like = tx.init(there({name: jnp.zeros(shape) for name, shape in SHAPES.items()}))
    mine = from_portable(state, algorithm, like, replicas=REPLICAS)
    axes = jax.tree.map(lambda _: None, mine)._replace(local=jax.tree.map(lambda _: 0, mine.local))
    rows = mine._replace(
        local=jax.tree.map(
            lambda x: jnp.broadcast_to(x, (REPLICAS, *x.shape[1:]))[:, None], mine.local
        )
    )
    # Compiled fast, not well: it is run twenty times.
    options = {"xla_backend_optimization_level": 0}
    mapped = jax.vmap(tx.update, (0, axes), (None, axes), axis_name="data")
    step_fn = jax.jit(mapped, compiler_options=options)
    updates = []
    for step in steps:
        both = [gradients(case, step, replica) for replica in range(REPLICAS)]
        averages, rows = step_fn(jax.tree.map(lambda *x: np.stack(x), *map(there, both)), rows)
        updates.append(here(jax.tree.map(np.asarray, averages)))
    after = to_portable(rows._replace(local=jax.tree.map(lambda x: x[:, 0], rows.local)), algorithm)
    if flax:
        back = {there: here for here, there in NAMES.items()}
        after = checkpoint.renamed(MOVED.state_to_torch(after, begun), back)
    return updates, after


@pytest.mark.parametrize(
    ("case", "flax"),
    [("start_step", False), pytest.param("half_step", True, marks=pytest.mark.slow)],
)
def test_a_run_that_moves_is_the_run_that_stayed(case, flax, alone):
    here = METHODS[case].algorithm
    assert isinstance(here, PowerSGD)
    there = replace(here, transpose=("*/kernel",)) if flax else here
    begin, state = in_torch(here, case, range(MOVES[0]), alone)
    middle, state = in_jax(there, case, range(*MOVES), state, here, flax=flax)
    assert state["step"] == MOVES[1]
    end, state = in_torch(
        here, case, range(MOVES[1], STEPS), alone, state | {"algorithm": repr(here)}
    )

    expected = oracle(case, REPLICAS)
    for step, found in enumerate([*begin, *middle, *end]):
        for name in SHAPES:
            scale = np.linalg.norm(gradients(case, step, 0)[name])
            distance = np.linalg.norm(found[name] - expected.updates[step][name])
            assert noting(float(distance / scale)) <= TOLERANCE, (step, name)
    for name in expected.after[-1][0].tensors:
        mean = np.mean([after.tensors[name]["error"] for after in expected.after[-1]], axis=0)
        scale = np.linalg.norm(gradients(case, 0, 0)[name])
        distance = np.linalg.norm(np.asarray(state["local"][name]["error"][0]) - mean)
        assert noting(float(distance / scale)) <= 2 * TOLERANCE
