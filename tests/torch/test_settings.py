"""A setting that the training loop says anew in each step: a line in the method, and torch, JAX and the simulator follow."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradwire import AllReduce, PowerSGD, Simulator, State, TwoLevel, Weighted, WireDtype, plan
from gradwire.core.protocol import branch, mean, setting
from gradwire.jax_backend import average_gradients
from gradwire.torch_backend.setup.handle import Handle
from tests.torch.compare import same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.training import hooked, train

pytestmark = pytest.mark.usefixtures("alone")
LOSS = loss_on(40)


@dataclass(frozen=True)
class Scaling:
    """The mean times what is said of the step; in a branch too."""

    name: str = "scale"
    default: float = 1.0
    per_replica = frozenset()
    start_step = 0
    cycle = 1

    def init(self, ops, specs):
        return State()

    async def step(self, ops, gradients, state, step):
        async def scaled(x):
            return x * ops.cast(await setting(ops, self.name, self.default), ops.dtype_of(x))

        return {n: await branch(step < 100, scaled, mean, await mean(g)) for n, g in gradients.items()}, state


WRAPPED = [Scaling(), WireDtype(Scaling(), "float32"), TwoLevel(Scaling(), within=1), Weighted(Scaling())]


@pytest.mark.parametrize("algorithm", WRAPPED, ids=repr)
def test_torch_hears_it_in_each_step_and_in_groups_of_buckets(algorithm):
    ddp, handle = hooked(mlp(40, 36, 32), algorithm, cap=0.001, message_bytes=0)
    for step, scale in enumerate([None, 0.5, 0.25]):
        if scale is not None:
            handle.set(scale=scale)
        trace = train(ddp, LOSS, [step])
        assert same_bits(trace.given[0], {n: g * (scale or 1.0) for n, g in trace.local[0].items()})


def test_it_survives_reconfigure_as_everything_that_a_loop_sets_does():
    ddp, handle = hooked(mlp(40, 36, 32), Weighted(Scaling()))
    handle.set(scale=0.5)
    handle.weight = 2.0
    handle.reconfigure(replace(Weighted(Scaling()), algorithm=Scaling(default=2.0)))
    trace = train(ddp, LOSS, 1)
    assert same_bits(trace.given[0], {n: g * 0.5 for n, g in trace.local[0].items()})
    assert handle.weight == 2.0
    # What is new here has to be looked at above.
    assert [name for name, x in vars(Handle).items() if getattr(x, "fset", None)] == ["weight"]
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


@pytest.mark.parametrize("algorithm", WRAPPED[:2], ids=repr)
def test_jax_and_the_simulator_hear_it(algorithm):
    params = {"w": jnp.ones((4, 3))}
    tx = average_gradients(algorithm, axis_name="data")
    state = jax.vmap(lambda _: tx.init(params), axis_name="data")(np.zeros(2))
    given = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)

    def update(scale):
        settings = {} if scale is None else {"settings": {"scale": scale}}
        return jax.vmap(lambda g, s: tx.update(g, s, **settings), axis_name="data")({"w": given}, state)[0]["w"][0]

    for scale, said in ((None, {}), (0.5, {"scale": 0.5}), (jnp.asarray(0.25), {"scale": 0.25})):
        simulator = Simulator(algorithm, {"w": (4, 3)}, 2, dtype="float32")
        right = simulator.step([{"w": g} for g in given], settings=said)["w"]
        np.testing.assert_allclose(right, given.mean(0) * said.get("scale", 1.0), rtol=1e-5)
        np.testing.assert_allclose(update(scale), right, rtol=1e-5)
    with pytest.raises(ValueError, match="does not ask for rate"):
        jax.vmap(lambda g, s: tx.update(g, s, settings={"rate": 1.0}), axis_name="data")({"w": given}, state)


def test_it_sends_nothing_and_has_one_default():
    assert plan({"w": (4, 3)}, Scaling()).wire_bytes == plan({"w": (4, 3)}, AllReduce()).wire_bytes

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
