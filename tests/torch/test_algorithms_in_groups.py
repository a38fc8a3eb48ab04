"""An algorithm that averages in groups of replicas: full precision inside each node, compressed between them, through every front door."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD, WireDtype
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import partitions, requests_by_step
from gradwire.core.requests import mean_each
from gradwire.torch_backend import Averager, DataParallel, register_comm_hook
from tests.torch.ranks import Cases
from tests.torch.training import flat, loss_on, mlp, oracle, relative, same_bits, train

RANKS = 4
NODES = ((0, 1), (2, 3))
WIDTHS = (40, 36, 36, 28)

cases = Cases(__file__, ranks=RANKS)
results = cases.fixture()


@dataclass(frozen=True)
class WithinNodes:
    """Average as they are the gradients of each node, then let another algorithm average the nodes."""

    algorithm: Any
    nodes: Any = NODES

    @property
    def per_replica(self):
        return self.algorithm.per_replica

    @property
    def start_step(self):
        return self.algorithm.start_step

    @property
    def cycle(self):
        return self.algorithm.cycle

    def init(self, ops, specs):
        return self.algorithm.init(ops, specs)

    async def step(self, ops, gradients, state, step):
        gradients = await mean_each(gradients, groups=self.nodes)
        return await self.algorithm.step(ops, gradients, state, step)


ALGORITHMS = {
    "PowerSGD": WithinNodes(PowerSGD(rank=2)),
    "a dense start, and half-steps": WithinNodes(PowerSGD(rank=2, start_step=2, half_step=True)),
    "other nodes": WithinNodes(PowerSGD(rank=2), ((0, 2), (1, 3))),
    "of unequal size": WithinNodes(PowerSGD(rank=2), ((0, 1, 2), (3,))),
    "two levels, cast": WireDtype(WithinNodes(WithinNodes(AllReduce(), ((0, 3), (1, 2)))), "float16"),
}


@cases.each(ALGORITHMS)
def hook(world, algorithm):
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=0.006)
    handle = register_comm_hook(ddp, algorithm, message_bytes=1000)
    return train(ddp, loss_on(40), 6), handle.stats()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_groups_are_made_and_average_as_in_the_simulator(results, name):
    traces = [trace for trace, _ in results(f"hook[{name}]")]
    for trace in traces[1:]:
        assert same_bits(trace.weights, traces[0].weights)
    tolerance = 2e-2 if "cast" in name else 1e-5
    for step, right in enumerate(oracle(ALGORITHMS[name], traces)):
        assert relative(traces[0].given[step], right) < tolerance


@cases.case
def other_doors(world):
    algorithm = ALGORITHMS["PowerSGD"]
    model = DataParallel(mlp(*WIDTHS), algorithm, process_group=world.group)
    trained = train(model, loss_on(40), 4)
    by_hand = mlp(*WIDTHS)
    averager = Averager(algorithm, dict(by_hand.named_parameters()), world.group)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_on(40)(by_hand, world.rank, step).backward()
        averager({n: p.grad for n, p in by_hand.named_parameters()})
        optimizer.step()
    return trained, flat(model.module), flat(by_hand)


def test_the_other_front_doors_make_them_too(results):
    traces = [trace for trace, *_ in results("other_doors")]
    for step, right in enumerate(oracle(ALGORITHMS["PowerSGD"], traces)):
        assert relative(traces[0].given[step], right) < 1e-5
    first = results("other_doors")[0]
    for _, wrapped, by_hand in results("other_doors"):
        assert same_bits(wrapped, first[1])
        assert same_bits(by_hand, first[2])
        assert relative(wrapped, by_hand) < 1e-6


@cases.case
def changed_in_a_running_job(world):
    """Into an algorithm with groups, and back."""
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
    handle = register_comm_hook(ddp, PowerSGD(rank=2))
    train(ddp, loss_on(40), 2, local=False)
    handle.reconfigure(ALGORITHMS["PowerSGD"])
    train(ddp, loss_on(40), 2, local=False)
    handle.reconfigure(PowerSGD(rank=2))
    train(ddp, loss_on(40), 2, local=False)
    return flat(ddp.module), handle.stats().steps


def test_groups_are_made_when_an_algorithm_is_changed(results):
    (first, steps), *others = results("changed_in_a_running_job")
    assert steps == 6
    for weights, _ in others:
        assert same_bits(weights, first)


@cases.case
def groups_of_other_replicas(world):
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
    with pytest.raises(ValueError, match="no partition of the replicas 0 to 3") as refused:
        register_comm_hook(ddp, WithinNodes(AllReduce(), ((0, 1), (2, 3), (4, 5))))
    return str(refused.value), len(ddp._comm_hooks)


def test_groups_of_other_replicas_are_refused(results):
    for said, hooks in results("groups_of_other_replicas"):
        assert said == "groups=((0, 1), (2, 3), (4, 5)) are no partition of the replicas 0 to 3"
        assert hooks == 0


def test_groups_are_found_in_the_order_of_the_requests():
    algorithm = WithinNodes(WithinNodes(AllReduce(), ((0, 3), (1, 2))))
    (requests,) = requests_by_step(algorithm, {"w": Spec((4, 4))})
    assert partitions(requests, 4) == [NODES, ((0, 3), (1, 2))]


if __name__ == "__main__":
    cases.main()
