"""A checkpoint taken in the middle, loaded into fresh processes: they go on bit for bit like those that were not interrupted."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD, WireDtype
from gradwire.torch_backend import register_comm_hook
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, loss_on, mlp, same_bits, train

cases = Cases(__file__, ranks=2)
results = cases.fixture(launches=2)

WIDTHS = (48, 40, 32, 24)
STEPS = 9

ALGORITHMS = {
    "PowerSGD": PowerSGD(rank=2),
    "half step": PowerSGD(rank=2, half_step=True),
    "dense start": PowerSGD(rank=2, start_step=5),
    "no warm start": PowerSGD(rank=2, warm_start=False),
    "square": PowerSGD(rank=2, square=True),
    "bfloat16 memory": PowerSGD(rank=2, state_dtype="bfloat16"),
    "bfloat16 on the wire": WireDtype(PowerSGD(rank=2, half_step=True), "bfloat16"),
    "several ranks": PowerSGD(rank={"layers.0.*": 4, "layers.4.*": 0, "*": 1}),
    "uncompressed": AllReduce(),
}
#: Steps before the checkpoint: before and after buckets are rebuilt, in odd and even halves of a half step, in and after the dense start.
TAKEN_AFTER = [1, 4, 6]
VARIANTS = {f"{name}, after {n}": (ALGORITHMS[name], n) for name, n in itertools.product(ALGORITHMS, TAKEN_AFTER)}
#: And right after buckets were rebuilt, and before the first compressed step.
VARIANTS |= {f"dense start, after {n}": (ALGORITHMS["dense start"], n) for n in (2, 5)}


class Shuffled(nn.Module):
    """The layers are used in another order than the one in which they are registered: rebuilding shuffles the buckets."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(*WIDTHS)
        self.first = nn.Linear(WIDTHS[0], WIDTHS[0])

    def forward(self, x):
        return self.layers(torch.tanh(self.first(x)))


def wrapped(world, algorithm):
    torch.manual_seed(5)
    ddp = DistributedDataParallel(Shuffled(), process_group=world.group, bucket_cap_mb=0.006)
    handle = register_comm_hook(ddp, algorithm, message_bytes=1500)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    return ddp, handle, optimizer


def steps(world, ddp, optimizer, numbers):
    for number in numbers:
        optimizer.zero_grad()
        loss_on(WIDTHS[0])(ddp, world.rank, number).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


def file_of(world, name):
    return world.folder / f"checkpoint {name} {world.rank}.pt"


@cases.each({name: (name, *value) for name, value in VARIANTS.items()})
def saved(world, variant):
    name, algorithm, n = variant
    ddp, handle, optimizer = wrapped(world, algorithm)
    steps(world, ddp, optimizer, range(n))
    torch.save(
        {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "compressor": handle.rank_state_dict()},
        file_of(world, name),
    )
    memory = handle.rank_state_dict()
    weights = steps(world, ddp, optimizer, range(n, STEPS))
    return {"weights": weights, "state": handle.rank_state_dict(), "saved": memory, "buckets": buckets_of(ddp)}


@cases.each({name: (name, *value) for name, value in VARIANTS.items()})
def launch1_resumed(world, variant):
    name, algorithm, n = variant
    ddp, handle, optimizer = wrapped(world, algorithm)
    checkpoint = torch.load(file_of(world, name), weights_only=True)
    ddp.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    handle.load_state_dict(checkpoint["compressor"])
    loaded = handle.rank_state_dict()
    weights = steps(world, ddp, optimizer, range(n, STEPS))
    return {"weights": weights, "state": handle.rank_state_dict(), "loaded": loaded}


@pytest.mark.parametrize("variant", VARIANTS)
def test_fresh_processes_go_on_bit_for_bit(results, variant):
    uninterrupted, resumed = results(f"saved[{variant}]"), results(f"launch1_resumed[{variant}]")
    for before, after in zip(uninterrupted, resumed, strict=True):
        assert before["buckets"] >= 2
        assert same_bits(after["loaded"], before["saved"])
        # With two ranks a sum has only one order, whatever the buckets are at the moment.
        assert same_bits(after["weights"], before["weights"])
        assert same_bits(after["state"], before["state"])
    assert same_bits(resumed[0]["weights"], resumed[1]["weights"])


def test_the_checkpoints_are_where_they_matter(results):
    """Their phases differ, and the dense start is still on in one of them."""
    states = {n: results(f"saved[half step, after {n}]")[0]["saved"] for n in TAKEN_AFTER}
    assert {int(s["shared"]["phase"]) for s in states.values()} == {0, 1}
    dense, compressed = (results(f"saved[dense start, after {n}]")[0]["saved"] for n in (4, 6))
    assert not any(memory["error"].any() for memory in dense["tensors"].values())
    assert all(memory["error"].any() for memory in compressed["tensors"].values())


def test_a_state_is_a_copy_and_so_is_what_is_loaded(alone):
    def make():
        ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=alone)
        return ddp, register_comm_hook(ddp, PowerSGD(rank=2))

    (ddp, handle), (other, source) = make(), make()
    train(other, loss_on(48), 3, local=False)
    state, same = source.rank_state_dict(), source.rank_state_dict()
    train(other, loss_on(48), 1, local=False)
    assert same_bits(state, same)
    handle.load_state_dict(state)
    train(ddp, loss_on(48), 2, local=False)
    assert same_bits(state, same)
    assert handle.rank_state_dict()["step"] == 5


if __name__ == "__main__":
    cases.main()
