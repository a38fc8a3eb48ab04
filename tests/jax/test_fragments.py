"""Fragments of pages that begin in the middle of a user's program run in one: in order, with what a reader of the page has by then."""

import re
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
from tests.jax.replicas import mesh_of, mesh_of_two
from tests.pages import expected_output, public_names, run_blocks

PARAMS = {"w": np.ones((64, 32), np.float32), "b": np.zeros(32, np.float32)}


def loss_fn(params, batch):
    return jnp.square(batch @ params["w"] + params["b"]).mean()


def run_page(page, numbers, instead=None, **given):
    """Run these blocks, on four devices; returns the names that are bound then."""
    names = public_names(gradwire, gw) | {"gradwire": gradwire, "jax": jax, "optax": optax, "np": np, "P": P}
    names |= {"NamedSharding": NamedSharding, "TrainState": TrainState}
    names |= {"params": PARAMS, "loss_fn": loss_fn, "mesh": mesh_of(4)} | given
    run_blocks(page, numbers, names, instead)
    return names


def test_a_handle_has_its_like_in_a_state(capsys):
    run_page("handles", [3])
    assert capsys.readouterr().out == expected_output("handles", 3)


def test_local_sgd_in_flax():
    found = run_page("local-sgd", [2], model=SimpleNamespace(apply=None))
    state, loss = found["train_step"](found["state"], np.ones((4, 8, 64), np.float32))
    assert loss.shape == (4,)
    assert int(gw.unreplicate(state).per_replica.step[0]) == 1


def test_local_sgd_in_flax_over_a_mesh():
    of_pmap = {
        'state = replicate(state, axis_name="data")\n': "",
        'train_step = jax.pmap(train_step, axis_name="data", donate_argnums=0)\n': "",
    }
    found = run_page("local-sgd", [2, 3], of_pmap, model=SimpleNamespace(apply=None))
    assert set(jax.tree.leaves(found["specs"])) == {P("data")}
    x = jax.device_put(np.ones((32, 64), np.float32), NamedSharding(found["mesh"], P("data")))
    state, loss = found["train_step"](found["state"], x)
    assert loss.shape == ()
    assert state.per_replica.step.tolist() == [1] * 4


def test_local_sgd_simulated():
    run_page("local-sgd", [5], gradient=lambda replica, parameters: {"w": parameters["w"] + replica})


def test_zero_is_made_placed_and_taken_to_plain_adamw_and_back():
    found = run_page("zero", [1, 3, 4], {"replicas=8": "replicas=4"}, model=SimpleNamespace(apply=None))
    plain = optax.adamw(3e-4).init(PARAMS)
    assert jax.tree.map(jnp.shape, found["whole"]) == jax.tree.map(jnp.shape, plain)


def test_plain_jit_divides_the_state_that_it_is_told_to():
    mesh, tx = mesh_of(4), optax.adamw(3e-4)
    replicated = NamedSharding(mesh, P())

    def step(params, state, x):
        gradients = jax.grad(loss_fn)(params, x)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    found = run_page("zero", [2], mesh=mesh, tx=tx, step=step, replicated=replicated)
    params, state = jax.device_put((PARAMS, tx.init(PARAMS)), (replicated, found["shardings"]))
    params, state = found["step"](params, state, np.ones((8, 64), np.float32))
    assert params["w"].sharding.is_fully_replicated
    assert state[0].mu["w"].addressable_data(0).shape == (16, 32)


def test_two_levels_are_placed_on_their_mesh():
    found = run_page("two-levels", [2, 4], {"make_mesh((2, 4)": "make_mesh((2, 2)"})
    for x, spec in zip(jax.tree.leaves(found["state"]), jax.tree.leaves(found["specs"]), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(found["mesh"], spec), x.ndim)


def test_local_sgd_on_two_levels_is_placed_on_their_mesh():
    mesh = mesh_of_two()
    tx = run_page("two-levels", [6])["tx"]
    with jax.set_mesh(mesh):
        state = gw.distribute(gw.stack_replicas((PARAMS, tx.init(PARAMS))), mesh, ("dcn", "ici"))
    assert len(jax.tree.leaves(state)[0]) == 4


def test_what_compression_does_is_logged(capsys):
    """The page's model, for 100 steps; its gradients are not on the page."""
    shapes = {"a": (256, 512), "b": (256, 512), "c": (512,)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    tx = gw.power_sgd(4, axis_name="data")
    state = gw.replicate(tx.init(params), axis_name="data")
    step = jax.pmap(tx.update, axis_name="data")
    gradients = {n: np.random.default_rng(0).standard_normal((4, *s), np.float32) for n, s in shapes.items()}
    for _ in range(100):
        _, state = jax.block_until_ready(step(gradients, state))  # many at once wait for each other on few cores
    run_page("state-jax", [2], state=SimpleNamespace(opt_state=gw.unreplicate(state)))
    norm = re.compile(r"error_norm=[\d.]+")
    printed, expected = (norm.sub("", text) for text in (capsys.readouterr().out, expected_output("state-jax", 2)))
    assert printed == expected


def test_the_approximation_is_measured_in_a_map():
    compressor = gw.power_sgd(4, axis_name="data")

    def measured(gradients, before):
        names = {"gradients": gradients, "before": before, "compressor": compressor}
        return run_page("state-jax", [3], **names)["error"]

    before = gw.replicate(compressor.init(PARAMS), axis_name="data")
    gradients = {
        "w": np.random.default_rng(0).standard_normal((4, 64, 32), np.float32),
        "b": np.ones((4, 32), np.float32),
    }
    error = jax.pmap(measured, axis_name="data")(gradients, before)
    assert 0.1 < float(error.whole[0]) < 1
    assert error.by_parameter.keys() == PARAMS.keys()
    assert float(error.by_parameter["b"][0]) < 1e-6
