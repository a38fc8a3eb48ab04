"""A run that begins in torch, goes on in JAX and ends in torch is the run that stayed: updates and errors, step by step."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist

from gradwire import PowerSGD, Spec
from gradwire.core import checkpoint
from gradwire.jax_backend import average_gradients, from_portable, to_portable
from gradwire.torch_backend.drive import Driver
from tests.methods import METHODS
from tests.parity.cases import SHAPES, STEPS, TOLERANCE, gradients, oracle

#: torch has one process in this test, which computes on all examples; JAX has two replicas, which share them.
REPLICAS = 2
#: Steps in torch, in JAX, and in torch again. The first is an odd number, for the half step, and in the dense phase of `start_step`.
MOVES = (3, 8)
#: What a Flax module with Dense layers and a convolution would have called its parameters, and how they would lie: (in, out), and
#: (height, width, in, out) where torch has (out, in, height, width).
KERNELS = {"w": "Dense_0/kernel", "v": "Dense_1/kernel", "tall": "Dense_2/kernel", "conv": "Conv_0/kernel"}
NAMES = KERNELS | {name: f"Others_0/{name}" for name in SHAPES if name not in KERNELS}


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


def lies_in_flax(name, x):
    """torch's parameter, or a batch of them, as it lies in Flax."""
    if name == "conv":
        return np.ascontiguousarray(np.moveaxis(x, (-4, -3), (-1, -2)))
    return np.ascontiguousarray(np.swapaxes(x, -1, -2)) if name in KERNELS else x


def lies_in_torch(name, x):
    if name == "conv":
        return np.ascontiguousarray(np.moveaxis(x, (-1, -2), (-4, -3)))
    return np.ascontiguousarray(np.swapaxes(x, -1, -2)) if name in KERNELS else x


def memory_in_flax(name, key, x):
    """Errors lie as their parameters do. Of a convolution's factors, q is of the columns in·height·width, height·width·in in Flax."""
    x = np.asarray(x)
    if key == "error":
        return lies_in_flax(name, x)
    if key == "q" and name == "conv":
        _, *inner = SHAPES["conv"]
        return np.moveaxis(x.reshape(-1, *inner), 1, -1).reshape(x.shape)
    return x


def memory_in_torch(path, key, x):
    name = next(here for here, there in NAMES.items() if there == path)
    x = np.asarray(x)
    if key == "error":
        return lies_in_torch(name, x)
    if key == "q" and name == "conv":
        _, channels, height, width = SHAPES["conv"]
        return np.moveaxis(x.reshape(-1, height, width, channels), -1, 1).reshape(x.shape)
    return x


def in_jax(algorithm, case, steps, state, *, flax):
    tx = average_gradients(algorithm, axis_name="data")

    def there(name, x):
        return lies_in_flax(name, x) if flax else x

    def here(name, x):
        return lies_in_torch(name, x) if flax else x

    def renamed(tree):
        return {NAMES[n] if flax else n: there(n, x) for n, x in tree.items()}

    if flax:
        state = checkpoint.renamed(state, NAMES, algorithm=repr(algorithm), tensor=memory_in_flax)
    like = tx.init(renamed({name: jnp.zeros(shape) for name, shape in SHAPES.items()}))
    mine = from_portable(state, algorithm, like, replicas=REPLICAS)
    axes = jax.tree.map(lambda _: None, mine)._replace(local=jax.tree.map(lambda _: 0, mine.local))
    rows = mine._replace(
        local=jax.tree.map(lambda x: jnp.broadcast_to(x, (REPLICAS, *x.shape[1:]))[:, None], mine.local)
    )
    # Compiled fast, not well: it is run twenty times.
    options = {"xla_backend_optimization_level": 0}
    mapped = jax.vmap(tx.update, (0, axes), (None, axes), axis_name="data")
    step_fn = jax.jit(mapped, compiler_options=options)
    updates = []
    for step in steps:
        both = [gradients(case, step, replica) for replica in range(REPLICAS)]
        stacked = {NAMES[n] if flax else n: np.stack([there(n, g[n]) for g in both]) for n in SHAPES}
        averages, rows = step_fn(stacked, rows)
        updates.append({n: here(n, np.asarray(averages[NAMES[n] if flax else n])) for n in SHAPES})
    after = to_portable(rows._replace(local=jax.tree.map(lambda x: x[:, 0], rows.local)), algorithm)
    if flax:
        back = {there: here for here, there in NAMES.items()}
        after = checkpoint.renamed(after, back, algorithm=state["algorithm"], tensor=memory_in_torch)
    return updates, after


@pytest.mark.parametrize(
    ("case", "flax"), [("rank_2", False), ("half_step", True), pytest.param("start_step", True, marks=pytest.mark.slow)]
)
def test_a_run_that_moves_is_the_run_that_stayed(case, flax, alone):
    here = METHODS[case].algorithm
    assert isinstance(here, PowerSGD)
    there = replace(here, transpose=("*/kernel",)) if flax else here
    begin, state = in_torch(here, case, range(MOVES[0]), alone)
    middle, state = in_jax(there, case, range(*MOVES), state, flax=flax)
    assert state["step"] == MOVES[1]
    end, state = in_torch(here, case, range(MOVES[1], STEPS), alone, state | {"algorithm": repr(here)})

    expected = oracle(case, REPLICAS)
    for step, found in enumerate([*begin, *middle, *end]):
        for name in SHAPES:
            scale = np.linalg.norm(gradients(case, step, 0)[name])
            distance = np.linalg.norm(found[name] - expected.updates[step][name])
            assert distance <= TOLERANCE * scale, (step, name)
    for name in expected.after[-1][0].tensors:
        mean = np.mean([after.tensors[name]["error"] for after in expected.after[-1]], axis=0)
        scale = np.linalg.norm(gradients(case, 0, 0)[name])
        assert np.linalg.norm(np.asarray(state["local"][name]["error"][0]) - mean) <= 2 * TOLERANCE * scale


def test_a_transposed_kernel_is_another_matrix():
    """Without `transpose` the other side would be projected, and the state would not even fit."""
    driver = functools.partial(average_gradients, axis_name="data")
    like = driver(PowerSGD(2)).init({"kernel": jnp.zeros((16, 32))})
    kept = driver(PowerSGD(2, transpose=("*kernel",))).init({"kernel": jnp.zeros((16, 32))})
    assert like.memory["q"]["kernel"].shape == (2, 32)
    assert kept.memory["q"]["kernel"].shape == (2, 16)
