"""Two levels of ranks on Gloo: two nodes of two, against the simulator; checkpoints, other nodes,
steps that do not count."""

import copy
import logging
import os
import sys
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from gradwire import (
    AllReduce,
    LocalSGD,
    PowerSGD,
    Quantize,
    Sign,
    TopK,
    TwoLevel,
    WireDtype,
    diloco,
    plan,
)
from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.plan.dry_run import size_of
from gradwire.core.protocol.reductions import Reduce
from gradwire.torch_backend import local_sgd
from gradwire.torch_backend.advise import probe as probes
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups.nodes import nodes_of
from gradwire.torch_backend.state import rank_memory
from gradwire.torch_backend.torch_internals import number_of_groups
from tests.torch.compare import relative, said, same_bits
from tests.torch.models import Branches, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sockets import connections, peers
from tests.torch.training import distance_of_all, hooked, paralleled, train, try_other_doors

WIDTHS = (40, 36, 36, 28)
#: One matrix is most of the model.
UNEVEN = (40, 300, 8)
LOSS = loss_on(40)

cases = Cases(__file__, ranks=4)


@cases.case
def test_a_probe_of_nodes_of_different_sizes_is_refused_everywhere(world):
    """3 + 1 ranks: each knows of its own node alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1" if world.rank == 3 else "3")
        words = said(probes.probe, world.group)
    assert "nodes have 1 to 3 ranks" in words


def two_nodes(world, algorithm):
    if levels_of(algorithm):
        return algorithm
    return TwoLevel(algorithm, within=world.size // 2)


ALGORITHMS = {
    "a dense start, and half-steps": PowerSGD(2, start_step=2, half_step=True),
    "the norm of the whole model": PowerSGD(2, max_norm=0.5),
    "uncompressed averages": AllReduce(),
    "codes": WireDtype(AllReduce(), "int8"),
    "positions": TopK(8, per=64, mean="senders"),
    "codes with memory": Quantize("int8"),
    "codes on both levels": WireDtype(TwoLevel(AllReduce(), 2), "float16"),
}


@cases.each(ALGORITHMS, slow=("codes with memory", "positions"))
def test_equals_the_simulator_bucket_by_bucket(world, algorithm):
    compare_with_the_simulator(world, algorithm, cap=0.005, message_bytes=0)


def compare_with_the_simulator(world, algorithm, **buckets):
    algorithm = two_nodes(world, algorithm)
    tolerance = 1e-4 if isinstance(algorithm.algorithm, PowerSGD | AllReduce) else 2e-2
    ddp, handle = hooked(mlp(*WIDTHS), algorithm, world.group, **buckets)
    trace = train(ddp, LOSS, 4)
    assert world.agree(trace.weights)
    assert distance_of_all(world, algorithm, trace) < tolerance
    assert handle.stats().skipped_steps == 0


@cases.each(
    {"a large tensor": (UNEVEN, ((0, 1), (2, 3))), "a partition": (WIDTHS, ((0, 2), (1, 3)))}
)
def test_ranks_of_a_node_remember_the_same(world, variant):
    """Of a tensor that is most of the model, each rank of a node sends a part, and has all of the
    memory."""
    widths, nodes = variant
    algorithm = TwoLevel(PowerSGD(2), nodes)
    ddp, handle = hooked(mlp(*widths), algorithm, world.group)
    trace = train(ddp, LOSS, 4)
    assert world.agree(trace.weights)
    assert distance_of_all(world, algorithm, trace) < 1e-4
    kept = world.everyones(handle.rank_state_dict()["tensors"])
    (first, second), (other, last) = nodes
    assert kept[0]["0.weight"]["error"].shape == (widths[1], 40)
    assert same_bits(kept[first], kept[second])
    assert same_bits(kept[other], kept[last])
    assert not same_bits(kept[first], kept[other])


@cases.case
def test_the_other_front_doors(world):
    try_other_doors(
        world, two_nodes(world, PowerSGD(2)), lambda: mlp(*WIDTHS), LOSS, 1e-5, bucket_cap_mb=0.01
    )


def errors(state):
    """The mean error of each parameter."""
    return {name: memory["error"].mean(0) for name, memory in state["local"].items()}


@cases.case
def test_a_run_is_resumed_as_if_it_had_not_been_interrupted(world):
    """From the memory of each rank, from that of all, and from what `torch.distributed.checkpoint`
    has written; on other nodes from the mean."""
    algorithm, folder = two_nodes(world, TopK(8, per=64)), world.folder / "saved"
    ddp, handle = hooked(mlp(*WIDTHS), algorithm, world.group)
    train(ddp, LOSS, 3, local=False)
    model, states = (
        copy.deepcopy(ddp.module),
        [handle.rank_state_dict(), handle.gathered_state_dict("all", to=None)],
    )
    dcp.save({"parts": handle.sharded_state}, checkpoint_id=folder)
    whole, mean = (
        handle.gathered_state_dict("all", to=None),
        errors(handle.gathered_state_dict("mean", to=None)),
    )
    expected = train(ddp, LOSS, range(3, 6), local=False).weights

    loads = [
        *(lambda handle, state=state: handle.load_state_dict(state) for state in states),
        lambda handle: dcp.load({"parts": handle.sharded_state}, checkpoint_id=folder),
    ]
    one_node = TwoLevel(algorithm.algorithm, world.size)
    for load, to in [*((load, algorithm) for load in loads), (loads[-1], one_node)]:
        ddp, handle = hooked(copy.deepcopy(model), to, world.group)
        load(handle)
        assert handle.stats().steps == 3
        now = handle.gathered_state_dict("all", to=None)
        assert relative(errors(now), mean) < 1e-6
        if to is algorithm:
            assert same_bits(now["local"], whole["local"])
            assert same_bits(train(ddp, LOSS, range(3, 6), local=False).weights, expected)


@cases.case
def test_more_ranks_than_a_checkpoint_has_slots_go_on_from_the_mean(world):
    """Whether few ranks have saved it or as many."""
    few, algorithm = dist.new_group([0, 1]), TopK(8, per=64)
    with mock.patch.object(rank_memory, "SLOTS", 2):
        for ranks, group in ((2, few), (4, world.group)):
            mean, folder = None, world.folder / f"by {ranks}"
            if world.rank < ranks:
                ddp, handle = hooked(mlp(*WIDTHS), algorithm, group)
                train(ddp, LOSS, 3, local=False)
                dcp.save({"parts": handle.sharded_state}, checkpoint_id=folder, process_group=group)
                mean = errors(handle.gathered_state_dict("mean", to=None))
            _, handle = hooked(mlp(*WIDTHS), algorithm, world.group)
            dist.barrier(world.group)
            dcp.load({"parts": handle.sharded_state}, checkpoint_id=folder)
            assert handle.stats().steps == 3
            assert (
                relative(
                    errors(handle.gathered_state_dict("mean", to=None)), world.everyones(mean)[0]
                )
                < 1e-6
            )


@cases.case
def test_bytes_are_told_for_each_level_with_its_own_ratio(world):
    """As the plan has them: between nodes those of all ranks of a node, and the ratio is of
    these."""
    algorithm = two_nodes(world, PowerSGD(2))
    ddp, handle = hooked(mlp(*WIDTHS), algorithm, world.group)
    train(ddp, LOSS, 3, local=False)
    stats = handle.stats()
    planned = plan(ddp.module, algorithm, world_size=world.size)
    near, far = planned.levels
    assert (stats.within_bytes, stats.between_bytes) == (3 * near.nbytes, 3 * far.node_bytes)
    assert stats.bytes_sent == stats.within_bytes + stats.between_bytes / near.replicas
    assert (
        stats.compression_ratio
        == stats.scalars()["compression_ratio"]
        == pytest.approx(planned.compression_ratio)
    )
    assert stats.compression_ratio > 2 > stats.within_ratio
    assert f"{size_of(stats.dense_bytes - stats.between_bytes)} saved between nodes" in repr(handle)
    assert f"→ {size_of(far.node_bytes)} ({planned.compression_ratio:.1f}×)" in repr(handle)
    before = errors(handle.state_dict())
    handle.reconfigure(PowerSGD(2))  # one level sends everything between nodes
    assert relative(errors(handle.state_dict()), before) < 1e-6
    assert handle.state_dict()["replicas"] == world.size
    train(ddp, LOSS, [3], local=False)
    later = handle.stats()
    assert later.within_bytes == stats.within_bytes
    assert later.between_bytes - stats.between_bytes == later.bytes_sent - stats.bytes_sent


@cases.each({"a partition": ((2,), (0,), (3,), (1,)), "node": "node"}, slow=["a partition"])
def test_nodes_of_one_rank_are_one_level(world, within):
    """In what is averaged, in what is saved, and to whom it is loaded."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}):
        group = dist.group.WORLD if within == "node" else world.group
        ddp, handle = hooked(mlp(*WIDTHS), TwoLevel(PowerSGD(2), within), group)
        twin, plain = hooked(mlp(*WIDTHS), PowerSGD(2), group)
        local = local_sgd(
            mlp(*WIDTHS),
            None,
            diloco(1, compressor=TwoLevel(PowerSGD(2), within)),
            process_group=group,
        )
        local.step()
    assert same_bits(*(train(each, LOSS, 2, local=False).weights for each in (ddp, twin)))
    for which in ("mean", "all"):
        assert same_bits(*(each.gathered_state_dict(which, to=None) for each in (handle, plain)))
    assert same_bits(handle.state_dict(), plain.state_dict())
    assert not handle.load_state_dict(handle.rank_state_dict())
    assert not handle.load_state_dict(plain.gathered_state_dict("all", to=None))
    assert not plain.reconfigure(TwoLevel(PowerSGD(2), within if within != "node" else 1))
    assert same_bits(*(train(each, LOSS, range(2, 4), local=False).weights for each in (ddp, twin)))
    local.load_state_dict(local.state_dict())


@cases.case
def test_node_is_what_torchrun_says_or_the_hosts(world):
    everywhere = dist.group.WORLD
    assert nodes_of(everywhere) == world.size  # as tests/launch.py has set it
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(world.size // 2)}):
        assert nodes_of(everywhere) == world.size // 2
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "5"}),
        pytest.raises(ValueError, match="start equally many"),
    ):
        nodes_of(everywhere)
    with (
        mock.patch.dict(os.environ),
        mock.patch("socket.gethostname", return_value=f"host{world.rank % 2}"),
    ):
        del os.environ["LOCAL_WORLD_SIZE"]
        found = nodes_of(everywhere)
        assert found == tuple(tuple(range(i, world.size, 2)) for i in (0, 1))
        _, handle = hooked(mlp(*WIDTHS), TwoLevel(PowerSGD(2)), everywhere)
        assert handle.algorithm == TwoLevel(PowerSGD(2), found)
    with (
        mock.patch.dict(os.environ),
        mock.patch("socket.gethostname", return_value=f"host{world.rank // 2}"),
    ):
        del os.environ["LOCAL_WORLD_SIZE"]
        assert nodes_of(everywhere) == 2  # and no list of all ranks
    with (
        mock.patch.dict(os.environ),
        mock.patch("socket.gethostname", return_value=f"host{world.rank == 0}"),
    ):
        del os.environ["LOCAL_WORLD_SIZE"]
        with pytest.raises(ValueError, match="different numbers of ranks"):
            nodes_of(everywhere)


INT8 = WireDtype(AllReduce(), "int8")
SENDERS = [
    AllReduce(),
    PowerSGD(16),
    INT8,
    WireDtype(PowerSGD(16), "int8"),
    Quantize("int4"),
    TopK(8, per=64),
    Sign(),
]
SENDERS += [TwoLevel(method, 2) for method in (AllReduce(), INT8, PowerSGD(16))]


@cases.case
def test_what_leaves_a_node_is_what_the_plan_says(world):
    """By what the kernel has sent to each rank of the other node. Headers of messages, and who
    waits for whom, come on top."""
    for algorithm in SENDERS if sys.platform == "linux" else ():
        ddp, _ = hooked(mlp(256, 768, 256), algorithm, world.group)
        train(ddp, loss_on(256), 3, local=False)
        planned = plan(ddp.module, algorithm, world_size=4).link_bytes(4, nodes=2, library="gloo")
        # a busy kernel may count what was sent before; what is always sent is there every time
        for _ in range(3):
            dist.barrier(world.group)
            rank_at, before = peers(world), connections()
            dist.barrier(world.group)
            train(ddp, loss_on(256), range(3, 6), local=False)
            dist.barrier(world.group)
            after = connections()
            leaving = [  # groups of cases before may be closed meanwhile
                (after[ends] - before[ends])
                for ends, rank in rank_at.items()
                if rank // 2 != world.rank // 2 and ends in before and ends in after
            ]
            nodes = world.everyones(sum(leaving))
            measured = max(sum(nodes[:2]), sum(nodes[2:])) / 3
            if measured <= 1.05 * planned:
                break
        assert planned <= measured <= 1.05 * planned, (
            f"{algorithm!r}: {measured / planned:.3f} of the plan"
        )


@cases.case
def test_registration_says_once_that_two_levels_would_send_less(world):
    logger, lines, handler = logging.getLogger("gradwire"), [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
            for algorithm in (INT8, TwoLevel(INT8, 2)):
                ddp, _ = hooked(mlp(*WIDTHS), algorithm, dist.group.WORLD)
        with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}):
            hooked(mlp(*WIDTHS), INT8, dist.group.WORLD)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    plans = (plan(ddp.module, algorithm, world_size=4) for algorithm in (INT8, TwoLevel(INT8, 2)))
    now, then = (size_of(each.link_bytes(4, nodes=2, library="gloo")) for each in plans)
    said = (
        f"A node of 2 replicas sends {now} to others in a step; with TwoLevel({INT8!r}) it would send {then}, "
        "and average whole gradients inside"
    )
    assert [line for line in lines if "would send" in line] == ([said] if world.rank == 0 else [])


@cases.case
def test_what_travels_inside_a_node_closes_groups_as_well(world):
    algorithm, model = two_nodes(world, PowerSGD(2)), mlp(8, 300, 300, 8)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    between = int(plan(shapes, algorithm, world_size=world.size).levels[1].nbytes)
    messages = []
    for message_bytes in (1 << 30, between + 1):
        wrapped, handle = paralleled(
            copy.deepcopy(model), algorithm, world.group, message_bytes=message_bytes
        )
        # buckets are as gradients have arrived, from the second step on
        train(wrapped, loss_on(8), 2)
        messages.append(handle.stats().collectives)
    assert messages[0] < messages[1]


@cases.case
def test_a_group_is_on_its_way_between_nodes_before_the_last_gradients_are_there(world):
    wrapped, _ = paralleled(
        mlp(40, 36, 36, 36, 36, 36, 28), two_nodes(world, PowerSGD(2)), world.group, message_bytes=0
    )
    train(wrapped, LOSS, 1)  # buckets are as gradients have arrived, from the second step on
    asked, perform = [], Collectives.perform
    near = levels_of(two_nodes(world, PowerSGD(2))).near(world.size)

    def noted(self, request):
        if isinstance(request, Reduce):
            asked.append(request.groups == near)
        return perform(self, request)

    with mock.patch.object(Collectives, "perform", noted):
        train(wrapped, LOSS, 1)
    last = len(asked) - asked[::-1].index(True)  # inside a node
    groups = asked.count(True)
    assert groups > 2
    assert asked[:last].count(False) == groups - 2


@cases.case
def test_a_step_is_measured_against_a_full_average(world):
    """Of gradients and errors, where the ranks of a node have the same error."""
    ddp, handle = hooked(mlp(*WIDTHS), two_nodes(world, PowerSGD(2)), world.group)
    train(ddp, LOSS, 2, local=False)
    before = errors(handle.gathered_state_dict("mean", to=None))
    with handle.measured() as found:
        trace = train(ddp, LOSS, [2])
    assert found.by_parameter.keys() == trace.given[0].keys()
    for name, average in trace.given[0].items():
        mean = sum(world.everyones(trace.local[0][name])) / world.size + before.get(name, 0)
        expected = float((average - mean).norm() / mean.norm())
        assert found.by_parameter[name] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert found.relative_error > 0.1


@cases.case
def test_parameters_that_no_rank_used_keep_their_memory(world):
    ddp, handle = hooked(
        Branches(), two_nodes(world, PowerSGD(2)), world.group, find_unused_parameters=True
    )
    memories = []
    for taken in (("left", "right"), ("left",)):
        ddp.zero_grad()
        LOSS(lambda x, taken=taken: ddp(x, taken), world.rank, 0).backward()
        memories.append(handle.rank_state_dict()["tensors"])
    before, after = memories
    for name in before:
        assert same_bits(before[name], after[name]) == name.startswith("right")


@cases.case
def test_a_coded_plain_step_with_a_nan_is_counted(world):
    """Before the start as where nothing is ever remembered: codes of a part of the ranks differ
    between parts."""
    algorithm = WireDtype(TwoLevel(PowerSGD(2, start_step=2), world.size // 2), "int8")
    ddp, handle = hooked(mlp(*WIDTHS), algorithm, world.group)
    for poisoned in (False, True, False):  # the last is compressed
        ddp.zero_grad()
        loss = LOSS(ddp, world.rank, 0)
        (loss * float("nan") if poisoned and world.rank == 2 else loss).backward()
    assert (handle.stats().steps, handle.stats().skipped_steps) == (3, 1)


@cases.case
def test_groups_of_nodes_are_made_once(world):
    """A sweep has many registrations, and torch keeps groups for ever: with sockets and threads."""
    algorithm, made = TwoLevel(PowerSGD(2), world.size // 2), []
    for turn in range(3):
        ddp, handle = hooked(mlp(*WIDTHS), algorithm, world.group)
        LOSS(ddp, world.rank, turn).backward()
        if turn:
            handle.unregister()
        del ddp, handle
        local_sgd(
            mlp(*WIDTHS), None, LocalSGD({((0, 1), (2, 3)): 1, "all": 2}), process_group=world.group
        )
        with mock.patch.object(probes, "measure"):  # which takes a while
            probes.probe(world.group, nodes=2)
        made.append(number_of_groups())
    assert made == made[:1] * 3
