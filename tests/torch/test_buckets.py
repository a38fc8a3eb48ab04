"""Buckets are DDP's affair: results and bytes do not depend on them, nor on when gradients come, on
every rank at other times. And `Averager`, which has none.

torch's `powerSGD_hook` launches collectives from callbacks; on Gloo it hangs or aborts where
gradients come late.
"""

import math
import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradwire import AllReduce, PowerSGD, TwoLevel, WireDtype, plan
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.torch_backend import Averager, PowerSGDState, powerSGD_hook
from gradwire.torch_backend.engine.step import MESSAGE_BYTES
from tests.torch.compare import flat, gradients, relative, same_bits
from tests.torch.everything import Everything
from tests.torch.models import Branches, Layers, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sharded import mesh_of, sharded_mlp
from tests.torch.training import (
    Trace,
    buckets_of,
    collective_payloads,
    distance,
    fit,
    hooked,
    paralleled,
    sgd,
    train,
)

cases = Cases(__file__, ranks=4)

WIDTHS = (64, 48, 40, 32, 32, 24)
SHAPES = {name: tuple(p.shape) for name, p in mlp(*WIDTHS).named_parameters()}
LOSS = loss_on(64)


@cases.each({"one group": MESSAGE_BYTES, "small groups": 2000, "a message each": 0})
def test_what_is_sent_and_remembered_is_counted(world, message_bytes):
    """Of every method, against oracle and plan: tests/parity."""
    algorithm, planned = PowerSGD(rank=2), plan(SHAPES, PowerSGD(rank=2))
    ddp, handle = hooked(mlp(*WIDTHS), algorithm, world.group, message_bytes=message_bytes)
    stats = handle.stats()
    assert (stats.steps, stats.collectives, stats.bytes_sent, stats.dense_bytes) == (0,) * 4
    assert (stats.compression_ratio, handle.local_error_norm()) == (1.0, 0.0)
    with collective_payloads() as sent:
        trace = train(ddp, LOSS, 3)
    assert distance(algorithm, world.everyones(trace)) < 1e-5
    assert buckets_of(ddp) >= 3
    stats = handle.stats()
    assert (
        sum(p.nbytes for p in sent)
        == stats.bytes_sent
        == 3 * planned.wire_bytes
        < 3 * planned.dense_bytes / 4
    )
    assert (stats.steps, stats.collectives, stats.dense_bytes) == (
        3,
        len(sent),
        3 * planned.dense_bytes,
    )
    assert (len(sent) == 3 * planned.collectives) == (message_bytes == MESSAGE_BYTES)
    memory = handle.rank_state_dict()["tensors"]
    norm = math.sqrt(sum(float(m["error"].double().square().sum()) for m in memory.values()))
    assert handle.local_error_norm() == pytest.approx(norm, rel=1e-5)
    # errors are local, they differ between ranks
    assert len(set(world.everyones(norm))) == world.size


LATE_LOSS = loss_on(32, batch=4)
LONGEST_DELAY = 1e-3

VARIANTS = {
    "compressed": PowerSGD(rank=2, half_step=True),
    "uncompressed": AllReduce(),
    "everything that can be asked, in groups": Everything(((2, 1, 3, 0),)),
    "torch's names": None,
}


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        if random.random() < 0.5:
            # the ranks' generators are seeded differently
            time.sleep(LONGEST_DELAY * random.random())
        return gradient


@cases.each(VARIANTS)
def test_random_delays_leave_all_ranks_with_the_same_bits(world, algorithm):
    """A message per bucket. What an algorithm asks for is prepared when it takes the place of
    another, too."""

    def late():
        linear = nn.Linear(32, 32)
        return Layers(lambda self, x: torch.tanh(self.linear(_Late.apply(x))), linear=linear)

    model = nn.Sequential(*(late() for _ in range(3)))
    before = flat(model)
    ddp, handle = hooked(model, algorithm and AllReduce(), world.group, cap=0.004, message_bytes=0)
    if algorithm is None:
        ddp.register_comm_hook(PowerSGDState(world.group, 2, start_powerSGD_iter=0), powerSGD_hook)
    else:
        handle.reconfigure(algorithm)
    fit(ddp, sgd(ddp, lr=0.05), world.rank, range(20), LATE_LOSS)
    assert buckets_of(ddp) >= 3
    assert flat(model).isfinite().all()
    assert (flat(model) - before).norm() > 0.1
    assert world.agree(flat(model))


def test_groups_are_found_in_the_order_of_the_requests():
    dry = dry_run(TwoLevel(AllReduce(), 2), {"w": Spec((4, 4))}, 4)
    assert dry.groups == [((0, 1), (2, 3)), ((0, 2), (1, 3))]


@cases.each({"DDP": hooked, "DataParallel": paralleled})
def test_groups_are_sent_while_the_backward_pass_goes_on(world, wrap):
    """What happens in a step, in order: gradients of layers, from the last to the first, and
    all-reduces."""
    model, real = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), dist.all_reduce
    seen = []
    for i, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: seen.append(i))
    wrapped, _ = wrap(model, PowerSGD(rank=2), world.group, cap=0.004, message_bytes=0)
    for step in range(3):  # buckets are rebuilt after the first
        seen.clear()
        with mock.patch.object(
            dist, "all_reduce", lambda *a, **o: seen.append("all-reduce") or real(*a, **o)
        ):
            LATE_LOSS(wrapped, world.rank, step).backward()
    assert [x for x in seen if x != "all-reduce"] == [3, 2, 1, 0]
    assert seen.count("all-reduce") == 2 * 4  # P and Q of four groups
    assert seen[: seen.index(0)].count("all-reduce") >= 2
    assert "all-reduce" in seen[: seen.index(1)]


# An algorithm without DDP: on the local shards of FSDP2, between its replicas; in a loop written by
# hand.

#: An odd number of rows, so that shards are unequal.
SHARDED_WIDTHS = (40, 37, 36, 28)


@cases.case
def test_replicas_of_a_shard_are_averaged_as_the_simulator_says(world):
    """What docs/averager.md says, on 2 replicas of 2 shards."""
    mesh = mesh_of(2, 2)
    model = sharded_mlp(SHARDED_WIDTHS, mesh["shard"])
    parameters = dict(model.named_parameters())
    averager = Averager(
        PowerSGD(rank=2),
        {n: p.to_local() for n, p in parameters.items()},
        mesh.get_group("replicate"),
    )
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
    assert (
        distance(PowerSGD(rank=2), world.everyones(trace)[mesh.get_local_rank("shard") :: 2]) < 1e-4
    )
    assert world.agree({n: p.full_tensor().detach() for n, p in parameters.items()})
    stats = averager.stats()
    assert (stats.steps, stats.collectives) == (6, 12)
    assert stats.bytes_sent < stats.dense_bytes / 3
    assert averager.local_error_norm() > 0


@cases.case
def test_shards_are_saved_and_loaded_apart(world):
    """Each shard gets its own memory back; that of another has other names."""
    mesh = mesh_of(2, 2)
    shard = mesh.get_local_rank("shard")

    def made(part=shard):
        return Averager(
            PowerSGD(rank=2), {f"shard{part}/w": torch.zeros(24, 20)}, mesh.get_group("replicate")
        )

    def steps(averager, numbers):
        seeds = [torch.Generator().manual_seed(10 * n + world.rank) for n in numbers]
        return [
            averager({f"shard{shard}/w": torch.randn(24, 20, generator=seed)}) for seed in seeds
        ]

    first, second, other = made(), made(), made(1 - shard)
    steps(first, range(3))
    folder = str(world.folder / "shards")
    dcp.save({"averager": first}, checkpoint_id=folder)
    dcp.load({"averager": second}, checkpoint_id=folder)
    saved = first.state_dict()
    with pytest.raises(ValueError, match=rf"another model[^$]*shard{shard}/w"):
        other.load_state_dict(saved)
    assert same_bits(saved, second.state_dict())
    for given, expected in zip(steps(second, range(3, 5)), steps(first, range(3, 5)), strict=True):
        assert relative(given, expected) < 1e-4


#: By step, what each rank's forward pass takes; in the third, the right branch is taken by nobody.
TAKEN = [
    (("left",), ("right",), (), ("left", "right")),
    (("left", "right"),) * 4,
    (("left",), (), ("left",), ()),
]


@cases.case
def test_parameters_that_some_rank_has_not_used(world):
    model = Branches()
    averager = Averager(PowerSGD(rank=2), dict(model.named_parameters()), world.group, unused=True)
    trace, present, states = Trace(), [], []
    for step, taken in enumerate(TAKEN):
        model.zero_grad()
        loss_on(40)(lambda x, t=taken: model(x, t[world.rank]), world.rank, step).backward()
        trace.local.append(
            {n: torch.zeros_like(p) for n, p in model.named_parameters()} | gradients(model)
        )
        averages = averager({n: p.grad for n, p in model.named_parameters()})
        present.append(sorted({n.split(".")[0] for n in averages}))
        trace.given.append({n: averages[n].clone() for n in averages})
        states.append(averager.gathered_state_dict("all", to=None)["local"])
    assert present == [["left", "right", "trunk"], ["left", "right", "trunk"], ["left", "trunk"]]
    traces = world.everyones(trace)
    assert (
        distance(PowerSGD(rank=2), traces, used=lambda step, name: step != 2 or "right" not in name)
        < 1e-5
    )
    # A parameter that nobody has used keeps its memory.
    assert same_bits(states[2]["right.weight"], states[1]["right.weight"])
    assert not same_bits(states[2]["left.weight"], states[1]["left.weight"])
    assert averager.stats().collectives == 9


def test_buckets_of_the_algorithm_are_messages_here(alone):
    averager = Averager(
        WireDtype(AllReduce(bucket_bytes=64), "bfloat16"), {n: torch.zeros(32) for n in "abc"}
    )
    averager({n: torch.ones(32) for n in "abc"})
    assert averager.stats().collectives == 3 * 2  # parts of a sum are exchanged, and gathered
    averager.reconfigure(AllReduce(bucket_bytes=256))
    averager({n: torch.ones(32) for n in "abc"})
    assert averager.stats().collectives == 3 * 2 + 2


def test_gradients_in_other_strides_are_averaged_in_place(alone):
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


def test_gradients_that_share_memory_are_refused_by_name(alone):
    """Before anything is sent or remembered."""
    averager = Averager(PowerSGD(rank=1), {n: torch.zeros(20, 20) for n in "ab"})
    one = torch.randn(20, 20)
    with pytest.raises(ValueError, match=r"gradients\['b'\] and gradients\['a'\] are one tensor"):
        averager({"a": one, "b": one})
    with pytest.raises(ValueError, match=r"gradients\['b'\] is expanded"):
        averager({"a": one, "b": torch.randn(20, 1).expand(20, 20)})
    assert averager.stats().steps == 0
    averager({"a": one, "b": torch.randn(20, 1).expand(20, 20).clone()})
    row = Averager(AllReduce(), {"r": torch.zeros(1, 4)})
    row({"r": torch.ones(4).expand(1, 4)})  # nothing is shared


@cases.case
def test_tensor_parallel_replicas_are_averaged_by_their_local_parts(world):
    """As the refusal of `compress_replicas` says: between backward and step."""
    mesh = mesh_of(2, 2)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(mlp(40, 36, 32, bias=False), mesh["shard"], plan)
    parts = {n: p.to_local() for n, p in model.named_parameters()}
    averager = Averager(AllReduce(), parts, mesh.get_group("replicate"))
    loss_on(40)(model, world.rank // 2, 0).backward()
    gradients = {n: p.grad.to_local() for n, p in model.named_parameters()}
    everyones = world.everyones(gradients)
    mine, other = everyones[world.rank], everyones[(world.rank + 2) % 4]
    assert relative(averager(gradients), {n: (mine[n] + other[n]) / 2 for n in mine}) < 1e-5
    assert relative(mine, other) > 1e-2
