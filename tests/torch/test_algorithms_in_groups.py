"""An algorithm that averages in groups of replicas: full precision inside each node, compressed between them."""

from dataclasses import dataclass
from typing import Any

from gradwire import AllReduce, PowerSGD, WireDtype
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol import mean_each
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import distance, hooked, train

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
    "a dense start, and half-steps": WithinNodes(PowerSGD(rank=2, start_step=2, half_step=True), ((0, 2), (1, 3))),
    "of unequal size": WithinNodes(PowerSGD(rank=2), ((0, 1, 2), (3,))),
    "two levels, cast": WireDtype(WithinNodes(WithinNodes(AllReduce(), ((0, 3), (1, 2)))), "float16"),
}


@cases.each(ALGORITHMS)
def test_groups_are_made_and_average_as_in_the_simulator(world, algorithm):
    """At registration, or when the algorithm of a running job is changed."""
    tolerance = 2e-2 if isinstance(algorithm, WireDtype) else 1e-5
    for changed in (False, True):
        ddp, handle = hooked(mlp(*WIDTHS), AllReduce() if changed else algorithm, world.group, message_bytes=1000)
        if changed:
            handle.reconfigure(algorithm)
        trace = train(ddp, LOSS, 4)
        assert world.agree(trace.weights)
        assert distance(algorithm, world.everyones(trace)) < tolerance


def test_groups_are_found_in_the_order_of_the_requests():
    algorithm = WithinNodes(WithinNodes(AllReduce(), ((0, 3), (1, 2))))
    dry = dry_run(algorithm, {"w": Spec((4, 4))}, 4)
    assert dry.groups == [NODES, ((0, 3), (1, 2))]
