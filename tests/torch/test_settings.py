"""A setting that the training loop says anew in each step: a line in the method, and torch, JAX and
the simulator follow."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from gradwire import (
    AllReduce,
    LocalSGD,
    LocalSimulator,
    PowerSGD,
    Simulator,
    TwoLevel,
    Weighted,
    WireDtype,
    diloco,
    plan,
)
from gradwire.core.protocol import setting
from gradwire.jax_backend import average_gradients, local_sgd, zero1
from gradwire.torch_backend import compress_replicas
from gradwire.torch_backend.setup.handle import Handle
from tests.torch import doors
from tests.torch.asked import Scaling
from tests.torch.compare import same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.sharded import mesh_of, shard
from tests.torch.training import hooked, sgd, train

pytestmark = pytest.mark.usefixtures("alone")
LOSS = loss_on(40)


class Unseen(Scaling):
    """Of which nobody knows what it asks for."""

    portable = False


WRAPPED = [
    Scaling(),
    Unseen(),
    WireDtype(Scaling(), "float32"),
    TwoLevel(Scaling(), within=1),
    Weighted(Scaling()),
]


@pytest.mark.parametrize("algorithm", WRAPPED, ids=repr)
def test_torch_hears_it_in_each_step_and_in_groups_of_buckets(algorithm):
    ddp, handle = hooked(mlp(40, 36, 32), algorithm, cap=0.001, message_bytes=0)
    for step, scale in enumerate([None, 0.5, 0.25]):
        if scale is not None:
            handle.set(scale=scale)
        trace = train(ddp, LOSS, [step])
        assert same_bits(trace.given[0], {n: g * (scale or 1.0) for n, g in trace.local[0].items()})


def full(p):
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def sharded(world, model, which):
    mesh = mesh_of(1, 1)
    handle = compress_replicas(shard(model, mesh["shard"]), which, mesh["replicate"])
    return model, sgd(model), handle


def averaging(world, model, which, period=1, **schedule):
    """An outer step after each period: parameters go as far as the averaged difference says."""
    return doors.local(
        world, model, diloco(period, lr=1.0, momentum=0.0, compressor=which, **schedule)
    )


DOORS = {
    "register_comm_hook": doors.algorithm,
    "DataParallel": doors.data_parallel,
    "Averager": doors.averager,
    "compress_replicas": sharded,
    "local_sgd": averaging,
}


def descend(module, optimizer):
    """Of a linear layer, whose gradient is 1 in each element."""
    optimizer.zero_grad()
    module(torch.ones(1, 8)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("door", DOORS)
def test_each_door_hears_it_and_keeps_it_when_it_is_reconfigured(alone, door):
    model = torch.nn.Linear(8, 6)
    module, optimizer, handle = DOORS[door](SimpleNamespace(group=alone), model, Scaling())

    def step():
        """How far the parameters go, of one learning rate."""
        before = [full(p) for p in model.parameters()]
        descend(module, optimizer)
        after = [full(p) for p in model.parameters()]
        return np.concatenate([(b - a).flatten() for b, a in zip(before, after, strict=True)]) / 0.1

    def reconfigure(other):
        handle.reconfigure(
            replace(handle.local, compressor=other) if door == "local_sgd" else other
        )

    assert step() == pytest.approx(1.0, rel=1e-4)
    reconfigure(Scaling(default=0.25))  # of which nothing was said
    assert step() == pytest.approx(0.25, rel=1e-4)
    handle.set(scale=0.5)
    assert step() == pytest.approx(0.5, rel=1e-4)
    reconfigure(Scaling(default=2.0))
    assert step() == pytest.approx(0.5, rel=1e-4)
    with pytest.raises(ValueError, match="does not ask for rate; it asks for scale"):
        handle.set(scale=0.25, rate=1.0)
    assert step() == pytest.approx(0.5, rel=1e-4)


def test_what_has_left_goes_by_what_was_said_then(alone):
    model = torch.nn.Linear(8, 6)
    module, optimizer, handle = averaging(
        SimpleNamespace(group=alone), model, Scaling(), 2, overlap=1
    )
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    handle.set(scale=0.5)
    for _ in range(2):
        descend(module, optimizer)
    handle.set(scale=0.25)
    descend(module, optimizer)
    for name, x in handle.outer_parameters().items():
        torch.testing.assert_close(
            start[name] - x, torch.full_like(x, 0.5 * 2 * 0.1), rtol=1e-4, atol=1e-6
        )


def test_it_survives_reconfigure_as_everything_that_a_loop_sets_does():
    ddp, handle = hooked(mlp(40, 36, 32), Weighted(Scaling()))
    handle.set(scale=0.5)
    handle.weight, handle.replay = 2.0, True
    handle.reconfigure(replace(Weighted(Scaling()), algorithm=Scaling(default=2.0)))
    trace = train(ddp, LOSS, 1)
    assert same_bits(trace.given[0], {n: g * 0.5 for n, g in trace.local[0].items()})
    assert (handle.weight, handle.replay) == (2.0, True)
    # What is new here has to be looked at above.
    assert [name for name, x in vars(Handle).items() if getattr(x, "fset", None)] == [
        "weight",
        "replay",
    ]
    handle.reconfigure(Weighted(AllReduce()))
    with pytest.raises(ValueError, match="does not ask for scale; it asks for no setting"):
        handle.set(scale=0.5)


def test_what_is_not_asked_for_or_no_number_is_refused_and_changes_nothing():
    ddp, handle = hooked(mlp(40, 36, 32), Scaling())
    with pytest.raises(ValueError, match="does not ask for rate; it asks for scale"):
        handle.set(scale=0.5, rate=0.1)
    with pytest.raises(TypeError):
        handle.set(scale=None)
    trace = train(ddp, LOSS, 1)
    assert same_bits(trace.given[0], trace.local[0])


@pytest.mark.parametrize("algorithm", [Scaling(), WireDtype(Scaling(), "float32")], ids=repr)
def test_jax_and_the_simulator_hear_it(algorithm):
    params = {"w": jnp.ones((4, 3))}
    tx = average_gradients(algorithm, axis_name="data")
    state = jax.vmap(lambda _: tx.init(params), axis_name="data")(np.zeros(2))
    given = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)

    def update(scale):
        settings = {} if scale is None else {"settings": {"scale": scale}}
        return jax.vmap(lambda g, s: tx.update(g, s, **settings), axis_name="data")(
            {"w": given}, state
        )[0]["w"][0]

    for scale, said in ((None, {}), (0.5, {"scale": 0.5}), (jnp.asarray(0.25), {"scale": 0.25})):
        simulator = Simulator(algorithm, {"w": (4, 3)}, 2, dtype="float32")
        right = simulator.step([{"w": g} for g in given], settings=said)["w"]
        np.testing.assert_allclose(right, given.mean(0) * said.get("scale", 1.0), rtol=1e-5)
        np.testing.assert_allclose(update(scale), right, rtol=1e-5)
    with pytest.raises(ValueError, match="does not ask for rate"):
        jax.vmap(lambda g, s: tx.update(g, s, settings={"rate": 1.0}), axis_name="data")(
            {"w": given}, state
        )


def test_jax_and_the_simulator_of_local_sgd_hear_it():
    local = LocalSGD(1, compressor=Scaling())
    tx = local_sgd(optax.sgd(1.0), local, axis_name="data")
    given = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    params = {"w": jnp.zeros((4, 3))}

    def after(settings):
        def one(g):
            return tx.step({"w": g}, (params, tx.init(params)), settings=settings)[0]["w"]

        return jax.vmap(one, axis_name="data")(given)[0]

    for settings, scale in (
        (None, 1.0),
        ({"scale": 0.5}, 0.5),
        ({"scale": jnp.asarray(0.25)}, 0.25),
    ):
        simulator = LocalSimulator(local, {"w": np.zeros((4, 3))}, 2, dtype="float32")
        simulator.step(
            [{"w": g} for g in given], lambda _, p, g: {"w": p["w"] - g["w"]}, settings=settings
        )
        right = simulator.parameters[0]["w"]
        np.testing.assert_allclose(right, -scale * given.mean(0), rtol=1e-5)
        np.testing.assert_allclose(after(settings), right, rtol=1e-5)
    with pytest.raises(ValueError, match="does not ask for rate; it asks for scale"):
        after({"rate": 1.0})
    with pytest.raises(ValueError, match="give them to average_params"):
        jax.vmap(
            lambda g: tx.update({"w": g}, tx.init(params), settings={"scale": 1.0})[0],
            axis_name="data",
        )(given)


def test_it_passes_a_chain_with_a_sharded_optimizer():
    tx = optax.chain(
        average_gradients(Scaling(), axis_name="data"),
        zero1(optax.sgd(1.0), axis_name="data", averaged=True),
    )
    given = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)

    def one(g):
        params = {"w": jnp.zeros((4, 3))}
        return tx.update({"w": g}, tx.init(params), params, settings={"scale": 0.5})[0]["w"]

    np.testing.assert_allclose(
        jax.vmap(one, axis_name="data")(given)[0], -0.5 * given.mean(0), rtol=1e-5
    )


def test_it_sends_nothing_and_has_one_default():
    planned = plan({"w": (4, 3)}, Scaling())  # which averages once more in late steps
    of_one_mean = plan({"w": (4, 3)}, AllReduce()).wire_bytes
    assert planned.wire_bytes - planned.optional_bytes == of_one_mean

    class Two(Scaling):
        async def step(self, ops, gradients, state, step):
            await setting(ops, self.name, 2.0)
            return await super().step(ops, gradients, state, step)

    with pytest.raises(ValueError, match="two defaults, 2 and 1"):
        hooked(mlp(40, 36, 32), Two())
    with pytest.raises(ValueError, match="two defaults, 2 and 1"):
        average_gradients(Two(), axis_name="data").init({"w": jnp.ones((4, 3))})
    _, handle = hooked(mlp(40, 36, 32), PowerSGD(2))
    with pytest.raises(ValueError, match="no setting"):
        handle.set(scale=1.0)
