"""An algorithm without DDP: on the local shards of FSDP2, between its replicas; in a loop written by hand."""

import pytest
import torch

from gradwire import AllReduce, PowerSGD, WireDtype
from gradwire.torch_backend import Averager
from tests.torch.compare import gradients, relative, same_bits
from tests.torch.models import Branches, loss_on
from tests.torch.ranks import Cases
from tests.torch.sharded import mesh_of, sharded_mlp
from tests.torch.training import Trace, distance, sgd

#: An odd number of rows, so that shards are unequal.
WIDTHS = (40, 37, 36, 28)
ALGORITHM = PowerSGD(rank=2)

pytestmark = pytest.mark.usefixtures("alone")

cases = Cases(__file__, ranks=4)


@cases.case
def test_replicas_of_a_shard_are_averaged_as_the_simulator_says(world):
    """What docs/averager.md says, on 2 replicas of 2 shards."""
    mesh = mesh_of(2, 2)
    model = sharded_mlp(WIDTHS, mesh["shard"])
    parameters = dict(model.named_parameters())
    averager = Averager(ALGORITHM, {n: p.to_local() for n, p in parameters.items()}, mesh.get_group("replicate"))
    optimizer = sgd(model)
    trace = Trace()
    for step in range(6):
        optimizer.zero_grad()
        loss_on(40)(model, world.rank, step).backward()
        local = {n: p.grad.to_local() for n, p in parameters.items()}
        trace.local.append({n: g.clone() for n, g in local.items()})
        averager(local)
        trace.given.append({n: p.grad.to_local().clone() for n, p in parameters.items()})
        optimizer.step()
        assert relative(trace.local[-1], trace.given[-1]) > 1e-3
    assert distance(ALGORITHM, world.everyones(trace)[mesh.get_local_rank("shard") :: 2]) < 1e-4
    assert world.agree({n: p.full_tensor().detach() for n, p in parameters.items()})
    stats = averager.stats()
    assert (stats.steps, stats.collectives) == (6, 12)
    assert stats.bytes_sent < stats.dense_bytes / 3
    assert averager.error_norm() > 0


#: By step, what each rank's forward pass takes; in the third, the right branch is taken by nobody.
TAKEN = [(("left",), ("right",), (), ("left", "right")), (("left", "right"),) * 4, (("left",), (), ("left",), ())]


@cases.case
def test_parameters_that_some_rank_has_not_used(world):
    model = Branches()
    averager = Averager(ALGORITHM, dict(model.named_parameters()), world.group, unused=True)
    trace, present, states = Trace(), [], []
    for step, taken in enumerate(TAKEN):
        model.zero_grad()
        loss_on(40)(lambda x, t=taken: model(x, t[world.rank]), world.rank, step).backward()
        trace.local.append({n: torch.zeros_like(p) for n, p in model.named_parameters()} | gradients(model))
        averages = averager({n: p.grad for n, p in model.named_parameters()})
        present.append(sorted({n.split(".")[0] for n in averages}))
        trace.given.append({n: averages[n].clone() for n in averages})
        states.append(averager.gathered_state_dict("all", to=None)["local"])
    assert present == [["left", "right", "trunk"], ["left", "right", "trunk"], ["left", "trunk"]]
    traces = world.everyones(trace)
    assert distance(ALGORITHM, traces, used=lambda step, name: step != 2 or "right" not in name) < 1e-5
    # A parameter that nobody has used keeps its memory.
    assert same_bits(states[2]["right.weight"], states[1]["right.weight"])
    assert not same_bits(states[2]["left.weight"], states[1]["left.weight"])
    assert averager.stats().collectives == 9


def test_buckets_of_the_algorithm_are_messages_here():
    averager = Averager(WireDtype(AllReduce(bucket_bytes=64), "bfloat16"), {n: torch.zeros(32) for n in "abc"})
    averager({n: torch.ones(32) for n in "abc"})
    assert averager.stats().collectives == 3 * 2  # parts of a sum are exchanged, and gathered
    averager.reconfigure(AllReduce(bucket_bytes=256))
    averager({n: torch.ones(32) for n in "abc"})
    assert averager.stats().collectives == 3 * 2 + 2


def test_gradients_in_other_strides_are_averaged_in_place():
    made = {
        "w": lambda: torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        "v": lambda: torch.randn(20, 20).T,
    }
    averager = Averager(PowerSGD(rank=1), {name: make() for name, make in made.items()})
    gradients = {name: make() for name, make in made.items()}
    before = {n: g.clone() for n, g in gradients.items()}
    for name, average in averager(gradients).items():
        assert average is gradients[name]
        assert average.stride() == before[name].stride()
        assert 0 < relative(average, before[name]) < 1
