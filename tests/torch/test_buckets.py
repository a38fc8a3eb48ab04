"""Buckets are DDP's affair: results do not depend on them, and what is sent is what the plan and the statistics say."""

import math

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD, WireDtype, plan
from gradwire.torch_backend import register_comm_hook
from gradwire.torch_backend.drive import MESSAGE_BYTES
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, collective_payloads, loss_on, mlp, oracle, relative, same_bits, train

cases = Cases(__file__, ranks=3)
results = cases.fixture()

WIDTHS = (64, 48, 40, 32, 32, 24)
SHAPES = {name: tuple(p.shape) for name, p in mlp(*WIDTHS).named_parameters()}
LOSS = loss_on(64)

#: bucket_cap_mb (25 is DDP's default) and message_bytes
LAYOUTS = {
    "one bucket": (25, MESSAGE_BYTES),
    "small buckets, one message": (0.006, MESSAGE_BYTES),
    "small buckets, small groups": (0.006, 2000),
    "small buckets, a message each": (0.006, 0),
    "tiny buckets, a message each": (0.001, 0),
}

ALGORITHMS = {
    "PowerSGD": PowerSGD(rank=2),
    "half step": PowerSGD(rank=2, half_step=True),
    "square": PowerSGD(rank=2, square=True),
    "no memory": PowerSGD(rank=2, warm_start=False, error_feedback=False),
    "bfloat16 on the wire": WireDtype(PowerSGD(rank=2), "bfloat16"),
    "dense start": PowerSGD(rank=2, start_step=3),
    "uncompressed": AllReduce(),
}


@cases.each(LAYOUTS)
def layout(world, variant):
    cap, message_bytes = variant
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=cap)
    handle = register_comm_hook(ddp, PowerSGD(rank=2), message_bytes=message_bytes)
    with collective_payloads() as sent:
        trace = train(ddp, LOSS, 8)
    return {
        "trace": trace,
        "buckets": buckets_of(ddp),
        "state": handle.rank_state_dict(),
        "sent": sent,
        "stats": handle.stats(),
    }


@pytest.mark.parametrize("variant", LAYOUTS)
def test_the_simulator_agrees_from_the_first_step_on(results, variant):
    ranks = results(f"layout[{variant}]")
    expected = oracle(PowerSGD(rank=2), [r["trace"] for r in ranks])
    for rank in ranks:
        for given, right in zip(rank["trace"].given, expected, strict=True):
            assert relative(given, right) < 1e-5


@pytest.mark.parametrize("variant", LAYOUTS)
def test_weights_and_memory_do_not_depend_on_buckets_and_groups(results, variant):
    one = results("layout[one bucket]")
    for mine, theirs in zip(results(f"layout[{variant}]"), one, strict=True):
        assert relative(mine["trace"].weights, theirs["trace"].weights) < 1e-6
        for name, memory in theirs["state"]["tensors"].items():
            assert relative(mine["state"]["tensors"][name], memory) < 1e-5


def test_the_layouts_are_different(results):
    buckets = {variant: results(f"layout[{variant}]")[0]["buckets"] for variant in LAYOUTS}
    messages = {variant: len(results(f"layout[{variant}]")[0]["sent"]) for variant in LAYOUTS}
    assert buckets["one bucket"] == 1
    assert 3 <= buckets["small buckets, one message"] < buckets["tiny buckets, a message each"]
    assert messages["one bucket"] == messages["small buckets, one message"]
    assert messages["small buckets, one message"] < messages["small buckets, small groups"]
    assert messages["small buckets, small groups"] < messages["small buckets, a message each"]


@pytest.mark.parametrize("variant", LAYOUTS)
def test_the_same_bytes_are_sent_in_any_layout(results, variant):
    planned = plan(SHAPES, PowerSGD(rank=2))
    for rank in results(f"layout[{variant}]"):
        assert sum(p.nbytes for p in rank["sent"]) == 8 * planned.wire_bytes < 8 * planned.dense_bytes / 4
        assert rank["stats"].bytes_sent == 8 * planned.wire_bytes
        assert rank["stats"].collectives == len(rank["sent"])
        assert rank["stats"].dense_bytes == 8 * planned.dense_bytes
        assert rank["stats"].steps == 8


@cases.each(ALGORITHMS)
def traffic(world, algorithm):
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=0.006)
    handle = register_comm_hook(ddp, algorithm)
    steps = []
    for step in range(6):
        with collective_payloads() as sent:
            trace = train(ddp, LOSS, [step], local=False)
        steps.append((sent, handle.stats()))
    errors = [m["error"] for m in handle.rank_state_dict()["tensors"].values() if "error" in m]
    return {"steps": steps, "weights": trace.weights, "errors": errors, "error_norm": handle.error_norm()}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_step_sends_what_was_planned_and_counts_what_was_sent(results, name):
    algorithm = ALGORITHMS[name]
    planned = plan(SHAPES, algorithm)
    for rank in results(f"traffic[{name}]"):
        collectives = nbytes = 0
        for step, (sent, stats) in enumerate(rank["steps"]):
            if step < algorithm.start_step:
                assert (len(sent), sum(p.nbytes for p in sent)) == (1, planned.dense_bytes)
            else:
                expected = planned.steps[(step - algorithm.start_step) % algorithm.cycle]
                assert (len(sent), sum(p.nbytes for p in sent)) == (expected.collectives, expected.nbytes)
            collectives += len(sent)
            nbytes += sum(p.nbytes for p in sent)
            assert (stats.collectives, stats.bytes_sent) == (collectives, nbytes)
            assert stats.dense_bytes == (step + 1) * planned.dense_bytes
            assert (stats.steps, stats.skipped_steps) == (step + 1, 0)
            assert stats.compression_ratio == stats.dense_bytes / stats.bytes_sent


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_end_with_the_same_bits_in_many_buckets(results, name):
    first, *others = results(f"traffic[{name}]")
    assert all(same_bits(other["weights"], first["weights"]) for other in others)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_error_norm_is_that_of_the_error_memory(results, name):
    norms = set()
    for rank in results(f"traffic[{name}]"):
        expected = math.sqrt(sum(float(e.double().square().sum()) for e in rank["errors"]))
        assert rank["error_norm"] == pytest.approx(expected, rel=1e-6)
        norms.add(rank["error_norm"])
    remembers = getattr(getattr(ALGORITHMS[name], "algorithm", ALGORITHMS[name]), "error_feedback", False)
    assert len(norms) == (3 if remembers else 1)  # errors are local, they differ between ranks
    assert bool(max(norms)) is remembers


@cases.case
def some_ranks(world):
    """Ranks 0 and 2 train together, in a group of their own; rank 1 does something else."""
    group = dist.new_group([0, 2])
    if world.rank == 1:
        return None
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=group, bucket_cap_mb=0.006)
    handle = register_comm_hook(ddp, PowerSGD(rank=2))
    return train(ddp, LOSS, 4), handle.stats()


def test_a_group_of_some_ranks_averages_over_these(results):
    (first, stats), nobody, (second, _) = results("some_ranks")
    assert nobody is None
    assert same_bits(first.weights, second.weights)
    for given, right in zip(first.given, oracle(PowerSGD(rank=2), [first, second]), strict=True):
        assert relative(given, right) < 1e-5
    assert stats.bytes_sent == 4 * plan(SHAPES, PowerSGD(rank=2)).wire_bytes


@pytest.mark.usefixtures("alone")
def test_a_handle_that_took_no_step_has_counted_nothing():
    handle = register_comm_hook(DistributedDataParallel(mlp(32, 32)), PowerSGD(rank=2))
    stats = handle.stats()
    assert (stats.steps, stats.skipped_steps, stats.collectives, stats.bytes_sent, stats.dense_bytes) == (0,) * 5
    assert stats.compression_ratio == 1.0
    assert handle.error_norm() == 0.0


if __name__ == "__main__":
    cases.main()
