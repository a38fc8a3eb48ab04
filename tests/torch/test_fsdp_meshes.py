"""Replicas of shards on several meshes: blocks are averaged as the simulator says, and plainly as FSDP does by itself."""

import pytest

from gradwire import AllReduce, PowerSGD, plan
from gradwire.torch_backend import compress_replicas
from tests.torch.compare import relative, same_bits
from tests.torch.models import loss_on
from tests.torch.ranks import Cases, variants
from tests.torch.sharded import local_parts, mesh_of, sharded_mlp, simulated, train_sharded

#: Rows that no number of shards divides, and a last layer of fewer rows than three shards could each have one of.
WIDTHS = (40, 37, 36, 2)
ALGORITHM = PowerSGD(rank=2, min_compression_rate=1)
#: Gradients with many directions, so that rounding does not decide which are sent.
LOSS = loss_on(40, spread=1)

cases = Cases(__file__, ranks=4)

MESHES = {"2x2": (2, 2), "2x3": (2, 3), "3x2": (3, 2)}
#: On six ranks.
SLOW = ["2x3", "3x2"]
meshes = pytest.mark.parametrize("mesh", variants(MESHES, SLOW))


@cases.each(MESHES, slow=SLOW)
def as_the_simulator(world, shape):
    if shape[0] * shape[1] != world.size:
        return None
    mesh = mesh_of(*shape)
    found = {}
    for name, options in {"one message": {}, "unit by unit": {"message_bytes": 0}}.items():
        model, twin = sharded_mlp(WIDTHS, mesh["shard"]), sharded_mlp(WIDTHS, mesh["shard"])
        handle = compress_replicas(model, ALGORITHM, mesh["replicate"], **options)
        trace = train_sharded(model, LOSS, range(5), twin)
        expected = plan({n: tuple(x.shape) for n, x in local_parts(model).items()}, ALGORITHM, world_size=shape[0])
        found[name] = trace, handle.stats(), expected.wire_bytes, handle.error_norm()
    return found


@meshes
@pytest.mark.parametrize("messages", ["one message", "unit by unit"])
def test_blocks_are_averaged_as_the_simulator_says(results_of, mesh, messages):
    shape = MESHES[mesh]
    found = [each[messages] for each in results_of(shape[0] * shape[1])(f"as_the_simulator[{mesh}]")]
    traces = [trace for trace, *_ in found]
    assert all(relative(t.given[0], t.local[0]) > 1e-2 for t in traces)
    assert simulated(ALGORITHM, traces, shape[1]) < 1e-4
    for trace, stats, wire_bytes, error in found:
        assert same_bits(trace.weights, traces[0].weights)
        assert stats.bytes_sent == stats.steps * wire_bytes
        assert stats.bytes_sent < stats.dense_bytes / 2
        assert error > 0
        # Two of the three units are compressed, in two messages each; of the last there are two rows, for as many shards. The first pass does not
        # know in which order units come, and is one message round.
        by_unit = 2 + 2 + (trace.local[0]["4.weight"].numel() > 0)
        assert stats.collectives == (5 * 2 if messages == "one message" else 2 + 4 * by_unit)


@cases.each(MESHES, slow=SLOW)
def as_on_a_mesh_of_both(world, shape):
    if shape[0] * shape[1] != world.size:
        return None
    mesh = mesh_of(*shape)
    ours, theirs = sharded_mlp(WIDTHS, mesh["shard"]), sharded_mlp(WIDTHS, mesh)
    handle = compress_replicas(ours, AllReduce(), mesh["replicate"])
    traces = [train_sharded(model, LOSS, range(3)) for model in (ours, theirs)]
    return traces, handle.stats()


@meshes
def test_plain_averages_are_those_of_fsdp_on_a_mesh_of_both(results_of, mesh):
    shape = MESHES[mesh]
    for (ours, theirs), stats in results_of(shape[0] * shape[1])(f"as_on_a_mesh_of_both[{mesh}]"):
        for given, right in zip(ours.given, theirs.given, strict=True):
            assert relative(given, right) < 1e-5
        assert stats.bytes_sent == stats.dense_bytes
