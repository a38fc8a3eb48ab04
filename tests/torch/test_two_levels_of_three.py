"""Two nodes of three ranks on Gloo, where there are more places than replicas between which they compress."""

import copy

import pytest
import torch
from torch import nn

from gradwire import PowerSGD, TwoLevel
from tests.torch import test_two_levels as of_two
from tests.torch.compare import flat, relative
from tests.torch.models import mlp
from tests.torch.ranks import Cases
from tests.torch.training import hooked, train

pytestmark = pytest.mark.slow

cases = Cases(__file__, ranks=6)


#: What is cut in three parts: factors, positions and codes, with memory.
ALGORITHMS = ("the norm of the whole model", "positions", "codes with memory", "codes on both levels")


@cases.each({name: of_two.ALGORITHMS[name] for name in ALGORITHMS})
def test_equals_the_simulator_in_one_message(world, algorithm):
    of_two.compare_with_the_simulator(world, algorithm, cap=25)


@cases.case
def test_a_model_of_one_large_tensor_equals_the_simulator(world):
    of_two.compare_a_large_tensor(world)


def continued(world, source, target, to=None):
    """Training that goes on with another algorithm: by a checkpoint of all ranks, and without interruption by `reconfigure`."""
    torch.manual_seed(0)
    ddp, handle = hooked(mlp(*of_two.UNEVEN).double(), source, world.group)

    def loss(model, rank, step):
        return of_two.LOSS(nn.Sequential(of_two.Double(), model), rank, step)

    train(ddp, loss, 2, local=False)
    state = world.everyones(handle.gathered_state_dict("all", to=to))[0 if to is None else to]
    other, second = hooked(copy.deepcopy(ddp.module), target, world.group)
    assert not second.load_state_dict(state)
    assert not handle.reconfigure(target)
    for each in (handle, second):
        assert relative(of_two.errors(each.gathered_state_dict("mean", to=None)), of_two.errors(state)) < 1e-12
    train(ddp, loss, range(2, 4), local=False)
    train(other, loss, range(2, 4), local=False)
    assert world.agree(flat(other.module))
    return flat(ddp.module), flat(other.module), state


@cases.case
def test_a_checkpoint_goes_on_with_other_nodes(world):
    """And with one level."""
    one_node, nodes, flat = TwoLevel(PowerSGD(2), world.size), of_two.two_nodes(world, PowerSGD(2)), PowerSGD(2)
    for source, target in ((nodes, one_node), (one_node, flat), (flat, nodes), (nodes, flat)):
        running, loaded, state = continued(world, source, target, to=1 if target is nodes else None)
        assert relative(running, loaded) < 1e-9
        assert state["algorithm"] == repr(flat)
        assert state["replicas"] == {one_node: 1, nodes: 2, flat: world.size}[source]
        assert {len(memory["error"]) for memory in state["local"].values()} == {state["replicas"]}
