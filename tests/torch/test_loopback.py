"""What a method costs on one device: its own program and the messages of its plan, with nobody at the other end."""

import pytest
import torch
import torch.distributed as dist

from gradwire import AllReduce, LocalSGD, PowerSGD, Sign, Spec, TopK, TwoLevel, WireDtype, diloco
from gradwire.torch_backend.advise.method_cost import message_groups, method_cost
from gradwire.torch_backend.advise.step_time import step_compute

SPECS = {"a": Spec((96, 64)), "b": Spec((64,)), "c": Spec((64, 96)), "d": Spec((32, 8, 3, 3))}
REPLICAS = 4
METHODS = [
    AllReduce(),
    PowerSGD(2, start_step=10),
    PowerSGD(2, half_step=True),
    WireDtype(AllReduce(), "int8"),
    TopK(64, per=(32, 32)),
    Sign(),
    TwoLevel(PowerSGD(2), 2),
    diloco(4, compressor=PowerSGD(2)),
    diloco(4, fragments=2),
]


@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_a_method_is_measured(algorithm):
    assert not dist.is_initialized()
    cost = method_cost(algorithm, SPECS, REPLICAS, torch.device("cpu"))
    assert len(cost.steps) == (1 if isinstance(algorithm, LocalSGD) else algorithm.cycle)
    assert all(group.compute > 0 for step in cost.steps for group in step)
    assert cost.messages


def test_gradients_are_averaged_in_the_groups_of_the_hook():
    specs = {str(i): Spec((512, 512)) for i in range(60)}  # 1 MiB each
    cpu = torch.device("cpu")
    assert [len(names) for names in message_groups(AllReduce(), specs, 2, cpu)] == [1, 25, 25, 9]
    assert [len(names) for names in message_groups(PowerSGD(4), specs, 2, cpu)] == [60]
    # Of a model of several groups, in some of which a pattern matches nothing.
    assert method_cost(PowerSGD({"0": 4, "*": 0}), specs, 2, cpu).compute > 0
    cost = method_cost(AllReduce(), specs, 2, cpu)
    assert [group.ready >> 20 for group in cost.steps[0]] == [1, 26, 51, 60]
    assert [group.messages[0].nbytes >> 20 for group in cost.steps[0]] == [1, 25, 25, 9]


def test_when_gradients_are_ready_is_seen():
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
    model[0].bias.requires_grad_(False)
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []

    def train_step():
        steps.append(0)
        optimizer.zero_grad()
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()

    compute = step_compute(train_step)
    times, made = zip(*compute.arrivals, strict=True)
    last = 4 * (32 * 4 + 4)
    assert made[-1] == last + 4 * 16 * 32
    assert len(made) == 3
    assert made[1] <= last + 4 * 16 * 32
    assert list(times) == sorted(times)
    assert 0 < times[-1] < compute.seconds
    before = len(steps)
    train_step()
    assert len(steps) == before + 1
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
