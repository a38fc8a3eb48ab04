"""What the host does with states that lie on a mesh, whatever types its axes have and whatever mesh
is in context, comes to what it does with arrays of one device."""

import contextlib
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradwire.jax_backend as gw
from gradwire import AllReduce, Spec, diloco
from gradwire.jax_backend.advise import compare
from gradwire.jax_backend.advise.method_cost import method_cost
from tests.jax import on_meshes
from tests.jax.on_meshes import AUTO, EXPLICIT, as_on_no_mesh, on_a_mesh, require_the_same
from tests.launch import jax_processes


@pytest.fixture(scope="module")
def expected():
    return {shape: as_on_no_mesh(shape) for shape in ((4,), (2, 2))}


#: Types of the axes, the mesh in context ("another" has axes that the compiler manages), and
#: whether parameters lie there: sharded if there are two axes. Of axes of both types the mesh in
#: context is one of them each time.
KINDS = [(EXPLICIT,), (EXPLICIT, EXPLICIT)]
CASES = list(itertools.product(KINDS, (None, "it", "another"), (True,)))
CASES += [
    ((EXPLICIT, AUTO), None, True),
    ((EXPLICIT, AUTO), "it", True),
    ((AUTO, EXPLICIT), "it", True),
    ((AUTO, EXPLICIT), "another", True),
    ((EXPLICIT, EXPLICIT), "it", False),
    ((EXPLICIT,), "another", False),
    ((AUTO, AUTO), "it", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "inside", "placed"), CASES)
def test_states_on_meshes_of_any_axes(expected, kinds, inside, placed):
    shape = (4,) if len(kinds) == 1 else (2, 2)
    require_the_same(on_a_mesh(shape, kinds, inside, placed=placed), expected[shape])


@pytest.mark.slow
def test_states_on_one_two_four_and_eight_devices():
    """Of one replica and of eight, of slices of one device and of several; in a process that has
    eight devices."""
    jax_processes(Path(on_meshes.__file__), 1, devices=8)


def training(mesh, wrap):
    """Of one matrix, which may lie on a mesh, divided."""
    w = (
        jnp.ones((4, 4))
        if mesh is None
        else jax.device_put(np.ones((4, 4)), jax.NamedSharding(mesh, jax.P("ici")))
    )
    tx = wrap(optax.sgd(0.1, momentum=0.9))

    def step(state, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.square(x @ w).mean())(state[0])
        updates, opt_state = tx.update(gradient, state[1], state[0])
        return (state[0] + updates, opt_state), loss

    batches = lambda replica, _: [np.full((2, 4), replica + 1, np.float32)]  # noqa: E731
    return gw.Training((w, tx.init(w)), step, batches, lambda state: state[0][0])


@pytest.mark.parametrize("devices", [2, 0], ids=["on their devices", "on one"])
@pytest.mark.parametrize("algorithm", [AllReduce(), diloco(2)], ids=["gradients", "local"])
def test_replicas_that_are_compared_lie_on_no_mesh(algorithm, devices, monkeypatch):
    monkeypatch.setattr(compare, "_devices", lambda replicas: jax.local_devices()[:devices])
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), devices=jax.devices()[:4])
    found = []
    for lies in (None, mesh):
        with contextlib.nullcontext() if lies is None else jax.set_mesh(mesh):
            made = compare.run(
                lambda wrap, lies=lies: training(lies, wrap), algorithm, 2, 3, 0, {3}, lambda: None
            )
            found.append([*made.losses, *made.held_out[3]])
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_what_is_measured_for_an_advice_minds_no_mesh_in_context(monkeypatch):
    monkeypatch.setattr(
        "gradwire.jax_backend.advise.probe.measure", lambda prober, *_: prober(1024, None)
    )
    with jax.set_mesh(jax.make_mesh((2, 2), ("dcn", "ici"), devices=jax.devices()[:4])):
        assert method_cost(AllReduce(), {"w": Spec((4, 4), "float32")}, 2).memory_bytes == 0
        assert gw.probe(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), "data") > 0
