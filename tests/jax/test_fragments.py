"""Fragments of pages that begin in the middle of a user's program run in one: in order, with what a reader of the page has by then."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradwire
import gradwire.jax_backend as gw
from tests.jax.replicas import mesh_of
from tests.pages import public_names, run_blocks

PARAMS = {"w": np.ones((64, 32), np.float32), "b": np.zeros(32, np.float32)}


def loss_fn(params, batch):
    return jnp.square(batch @ params["w"] + params["b"]).mean()


def run(page, numbers, **given):
    """These blocks of a page, on four devices; returns what there is then."""
    names = public_names(gradwire, gw) | {"gradwire": gradwire, "jax": jax, "optax": optax, "np": np, "P": P}
    names |= {"NamedSharding": NamedSharding, "TrainState": TrainState}
    names |= {"params": PARAMS, "loss_fn": loss_fn, "mesh": mesh_of(4)} | given
    run_blocks(page, numbers, names, {"make_mesh((2, 4)": "make_mesh((2, 2)", "replicas=8": "replicas=4"})
    return names


def test_local_sgd_in_flax():
    found = run("local-sgd", [2], model=SimpleNamespace(apply=None))
    state, loss = found["train_step"](found["state"], np.ones((4, 8, 64), np.float32))
    assert loss.shape == (4,)
    assert int(gw.unreplicate(state).per_replica.step[0]) == 1


def test_local_sgd_simulated():
    run("local-sgd", [4], gradient=lambda replica, parameters: {"w": parameters["w"] + replica})


def test_zero_is_made_placed_and_taken_to_plain_adamw_and_back():
    found = run("zero", [1, 3, 4], model=SimpleNamespace(apply=None))
    plain = optax.adamw(3e-4).init(PARAMS)
    assert jax.tree.map(jnp.shape, found["whole"]) == jax.tree.map(jnp.shape, plain)


def test_two_levels_are_placed_on_their_mesh():
    found = run("two-levels", [2, 4])
    for x, spec in zip(jax.tree.leaves(found["state"]), jax.tree.leaves(found["specs"]), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(found["mesh"], spec), x.ndim)
