"""Three replicas of two shards, and two of three, as the simulator says: rows that no number of shards divides, a last layer with less of them than shards."""

import pytest

from gradwire import PowerSGD, plan
from gradwire.torch_backend import compress_replicas
from tests.torch.compare import relative
from tests.torch.models import loss_on
from tests.torch.ranks import Cases
from tests.torch.sharded import local_parts, mesh_of, sharded_mlp, simulated, train_sharded

pytestmark = pytest.mark.slow

WIDTHS = (40, 37, 36, 2)
ALGORITHM = PowerSGD(rank=2, min_compression_rate=1)
#: Gradients with many directions, so that rounding does not decide which are sent.
LOSS = loss_on(40, spread=1)

cases = Cases(__file__, ranks=6)


@cases.each({"2x3": (2, 3), "3x2": (3, 2)})
def test_blocks_are_averaged_unit_by_unit(world, shape):
    mesh = mesh_of(*shape)
    model, twin = (sharded_mlp(WIDTHS, mesh["shard"]) for _ in range(2))
    handle = compress_replicas(model, ALGORITHM, mesh["replicate"], message_bytes=0)
    trace = train_sharded(model, LOSS, range(5), twin)
    assert simulated(world, ALGORITHM, trace, shape[1]) < 1e-4
    assert relative(trace.given[0], trace.local[0]) > 1e-2
    assert world.agree(trace.weights)
    planned = plan({n: tuple(x.shape) for n, x in local_parts(model).items()}, ALGORITHM, world_size=shape[0])
    assert handle.stats().bytes_sent == 5 * planned.wire_bytes < handle.stats().dense_bytes / 2
