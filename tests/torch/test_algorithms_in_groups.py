"""An algorithm that averages in groups of replicas: full precision inside each node, compressed between them, through every front door."""

from dataclasses import dataclass
from typing import Any

from gradwire import AllReduce, PowerSGD, WireDtype
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol import mean_each
from tests.torch.compare import flat
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import distance, hooked, train, try_other_doors

NODES = ((0, 1), (2, 3))
WIDTHS = (40, 36, 36, 28)
LOSS = loss_on(40)

cases = Cases(__file__, ranks=4)


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
def test_groups_are_made_and_average_as_in_the_simulator(world, algorithm):
    ddp, _ = hooked(mlp(*WIDTHS), algorithm, world.group, message_bytes=1000)
    trace = train(ddp, LOSS, 6)
    assert world.agree(trace.weights)
    tolerance = 2e-2 if isinstance(algorithm, WireDtype) else 1e-5
    assert distance(algorithm, world.everyones(trace)) < tolerance


@cases.case
def test_the_other_front_doors_make_them_too(world):
    try_other_doors(world, ALGORITHMS["PowerSGD"], lambda: mlp(*WIDTHS), LOSS, 1e-6)


@cases.case
def test_groups_are_made_when_an_algorithm_is_changed(world):
    """Into an algorithm with groups, and back, in a running job."""
    ddp, handle = hooked(mlp(*WIDTHS), PowerSGD(rank=2), world.group)
    train(ddp, LOSS, 2, local=False)
    for algorithm in (ALGORITHMS["PowerSGD"], PowerSGD(rank=2)):
        handle.reconfigure(algorithm)
        train(ddp, LOSS, 2, local=False)
    assert handle.stats().steps == 6
    assert world.agree(flat(ddp.module))


def test_groups_are_found_in_the_order_of_the_requests():
    algorithm = WithinNodes(WithinNodes(AllReduce(), ((0, 3), (1, 2))))
    dry = dry_run(algorithm, {"w": Spec((4, 4))}, 4)
    assert dry.groups == [NODES, ((0, 3), (1, 2))]
