"""Replicas of an FSDP2 model on the emulated accelerator: what the hook's stream does races with
nothing, nobody waits, no memory is used again too early, and Gloo's results come out.

Each of two replicas is two shards, so FSDP gathers, reduces and scatters on streams of its own, and
gives memory back while they run.
"""

import os
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from gradwire import PowerSGD
from gradwire.torch_backend import compress_replicas
from gradwire.torch_backend.engine import replays
from tests.torch.compare import relative, same_bits
from tests.torch.defaults import other_defaults
from tests.torch.logs import logged
from tests.torch.models import mlp
from tests.torch.ranks import Cases

pytestmark = pytest.mark.slow

if "RANK" in os.environ:
    from tests.emulated.device import DEVICE, core, stream, watched
    from tests.emulated.graphs import with_graphs
    from tests.emulated.process_group import BACKEND, EmulatedNCCL

WIDTHS = (40, 37, 36, 20)
SHARDS = 2

cases = Cases(__file__, ranks=4)


@contextmanager
def fsdp_on_emulated_streams():
    """What FSDP asks of `torch.emu`."""
    numbers, module = count(40), torch.emu

    class Stream:
        def __init__(self, device=None, priority=0, number=None):
            self.device = DEVICE
            self.number = next(numbers) if number is None else number

        def __eq__(self, other):
            return self.number == other.number

        def __hash__(self):
            return self.number

        def wait_stream(self, other):
            core.wait_for(self.number, other.number)

        wait_event = wait_stream

        def record_event(self):
            """A point on this stream: a stream of its own, which nothing follows on."""
            event = Stream()
            event.record(self)
            return event

        def record(self, other=None):
            self.wait_stream(other or module.current_stream())

        def synchronize(self):
            event = torch.Event(DEVICE)
            with stream(self.number):
                event.record()
            event.synchronize()

    module.Stream = module.Event = Stream
    module.current_stream = lambda device=None: Stream(number=core.current_stream())
    module.stream = lambda chosen: stream(chosen.number)
    core.set_device(DEVICE.index)
    try:
        yield
    finally:
        core.set_device(0)


def trained(
    replicas,
    shards,
    device,
    after_step=lambda step: None,
    defaults=nullcontext,
    *,
    steps=4,
    replay=False,
    set_to_none=True,
    **options,
):
    replicas_on = "cpu" if "offload_policy" in options else device.type
    meshes = [
        DeviceMesh.from_group(group, on, mesh_dim_names=(name,))
        for group, on, name in (
            (replicas, replicas_on, "replicate"),
            (shards, device.type, "shard"),
        )
    ]
    model = mlp(*WIDTHS).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=meshes[1], **options)
    fully_shard(model, mesh=meshes[1], **options)
    generators = [
        torch.Generator().manual_seed(10 * step + dist.get_rank()) for step in range(steps)
    ]
    batches = [torch.randn(8, 40, generator=generator).to(device) for generator in generators]
    kept = []
    with defaults():
        handle = compress_replicas(model, PowerSGD(rank=2), meshes[0], message_bytes=0)
        handle.replay = replay
        for step, x in enumerate(batches):
            model.zero_grad(set_to_none=set_to_none)
            model(x).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
            if replay:  # so that no gradient lies where another has lain
                kept.append([p.grad for p in model.parameters()])
            after_step(step)
    return model, handle


POLICIES = {
    "plain": {},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}


@cases.case
def test_replays_have_the_bits_of_eager_steps(world):
    """Gradients that stay are replayed. Those that always lie elsewhere are not: then steps stay
    eager, and the logger says so once."""
    group = {"backend": BACKEND}
    replicas = [dist.new_group([r, r + SHARDS], **group) for r in range(SHARDS)]
    shards = [
        dist.new_group([SHARDS * r, SHARDS * r + 1], **group) for r in range(world.size // SHARDS)
    ]
    own = replicas[world.rank % SHARDS], shards[world.rank // SHARDS]

    def weights(replay, set_to_none=False):
        model, handle = trained(*own, DEVICE, steps=8, replay=replay, set_to_none=set_to_none)
        return (
            [p.detach().to_local().cpu() for p in model.parameters()],
            handle.stats(),
            handle.replay,
        )

    with fsdp_on_emulated_streams(), pytest.MonkeyPatch.context() as patch, logged() as said:
        patch.setattr(replays, "TRIES", 4)
        with_graphs()
        eager, sent, _ = weights(False)
        replayed, also, _ = weights(True)
        given_up, same, wanted = weights(True, set_to_none=True)
    assert same_bits(eager, replayed)
    assert same_bits(eager, given_up)
    assert sent == also == same
    # The first step learns the order of units.
    assert (sent.replayed_steps, also.replayed_steps, same.replayed_steps) == (
        0,
        8 - 1 - replays.EQUAL,
        0,
    )
    assert not wanted
    (line,) = [line for line in said if "not replayed" in line]
    assert "zero_grad(set_to_none=False)" in line


@cases.each(POLICIES)
def test_unit_by_unit_on_a_stream_of_its_own(world, options):
    offloaded = "offload_policy" in options

    def groups(backend):
        between = "gloo" if offloaded else backend
        replicas = [dist.new_group([r, r + SHARDS], backend=between) for r in range(SHARDS)]
        shards = [
            dist.new_group([SHARDS * r, SHARDS * r + 1], backend=backend)
            for r in range(world.size // SHARDS)
        ]
        return replicas[world.rank % SHARDS], shards[world.rank // SHARDS]

    def after_step(step):
        if step < 1:  # in which the units' order is learned, and what is kept is made
            watched.waits.clear()

    right, _ = trained(*groups("gloo"), torch.device("cpu"), **({} if offloaded else options))
    watched.clear()
    with fsdp_on_emulated_streams(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedNCCL, "with_gloo", offloaded)
        model, handle = trained(*groups(BACKEND), DEVICE, after_step, **options)
        seen = watched.own_waits(), list(watched.problems)
        same, _ = trained(
            *groups(BACKEND), DEVICE, defaults=partial(other_defaults, DEVICE), **options
        )
    assert seen == ([], [])
    assert same_bits(
        *([p.detach().to_local().cpu() for p in each.parameters()] for each in (model, same))
    )
    weights, expected = (
        [p.detach().to_local().cpu() for p in each.parameters()] for each in (model, right)
    )
    assert all(relative(*pair) < 1e-4 for pair in zip(weights, expected, strict=True))
    everyones = world.everyones(weights)
    assert all(same_bits(of_shard, everyones[r % SHARDS]) for r, of_shard in enumerate(everyones))
    # Of the first step all units are one; then three units of two messages each. Offloaded
    # gradients are there when the pass is over.
    assert handle.stats().collectives == (4 * 2 if offloaded else 2 + 3 * 6)
