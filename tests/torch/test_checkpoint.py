"""A checkpoint taken in the middle, loaded into fresh processes: they go on bit for bit like those that were not interrupted."""

import torch
from torch import nn

from gradwire import AllReduce, PowerSGD, WireDtype
from tests.torch.compare import same_bits, weights
from tests.torch.models import Layers, loss_on, mlp
from tests.torch.ranks import Cases, Results
from tests.torch.training import buckets_of, fit, hooked, train

cases = Cases(__file__, ranks=2)

WIDTHS = (48, 40, 32, 24)
STEPS = 8

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
#: Steps before the checkpoint: before and after buckets are rebuilt, in odd and even halves of a half step, in and after the dense start; and right
#: after buckets were rebuilt, and before the first compressed step.
TAKEN_AFTER = dict.fromkeys(ALGORITHMS, (4,)) | {
    "PowerSGD": (1, 4),
    "half step": (1, 4, 5),
    "dense start": (1, 2, 4, 5, 6),
}
VARIANTS = {f"{name}, after {n}": (ALGORITHMS[name], n) for name, steps in TAKEN_AFTER.items() for n in steps}


def shuffled():
    """The layers are used in another order than the one in which they are registered: rebuilding shuffles the buckets."""
    forward = lambda self, x: self.layers(torch.tanh(self.first(x)))  # noqa: E731
    return Layers(forward, layers=mlp(*WIDTHS), first=nn.Linear(WIDTHS[0], WIDTHS[0]))


def wrapped(world, algorithm):
    ddp, handle = hooked(shuffled(), algorithm, world.group, message_bytes=1500)
    return ddp, handle, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)


def file_of(world, name):
    return world.folder / f"checkpoint {name} {world.rank}.pt"


@cases.each(VARIANTS.keys())
def saved(world, name):
    """Where training was in the middle, which the file has too, and in the end."""
    algorithm, n = VARIANTS[name]
    ddp, handle, optimizer = wrapped(world, algorithm)
    fit(ddp, optimizer, world.rank, range(n), loss_on(WIDTHS[0]))
    memory = handle.rank_state_dict()
    whole = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "memory": memory}
    torch.save(whole, file_of(world, name))
    fit(ddp, optimizer, world.rank, range(n, STEPS), loss_on(WIDTHS[0]))
    assert buckets_of(ddp) >= 2
    return memory, weights(ddp.module), handle.rank_state_dict()


@cases.each(VARIANTS.keys(), launch=1)
def test_fresh_processes_go_on_bit_for_bit(world, name):
    algorithm, n = VARIANTS[name]
    ddp, handle, optimizer = wrapped(world, algorithm)
    checkpoint = torch.load(file_of(world, name), weights_only=True)
    ddp.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    handle.load_state_dict(checkpoint["memory"])
    memory, trained, state = Results(world.folder, world.size)(f"saved[{name}]")[world.rank]
    assert same_bits(handle.rank_state_dict(), memory)
    fit(ddp, optimizer, world.rank, range(n, STEPS), loss_on(WIDTHS[0]))
    # With two ranks a sum has only one order, whatever the buckets are at the moment.
    assert same_bits(weights(ddp.module), trained)
    assert same_bits(handle.rank_state_dict(), state)
    assert world.agree(weights(ddp.module))


def test_the_checkpoints_are_where_they_matter(results):
    """Their phases differ, and the dense start is still on in one of them."""
    states = {n: results(f"saved[half step, after {n}]")[0][0] for n in TAKEN_AFTER["half step"]}
    assert {int(s["shared"]["phase"]) for s in states.values()} == {0, 1}
    dense, compressed = (results(f"saved[dense start, after {n}]")[0][0] for n in (4, 6))
    assert not any(memory["error"].any() for memory in dense["tensors"].values())
    assert all(memory["error"].any() for memory in compressed["tensors"].values())


def test_a_state_is_a_copy_and_so_is_what_is_loaded(alone):
    (ddp, handle), (other, source) = (hooked(mlp(*WIDTHS), PowerSGD(rank=2), alone) for _ in range(2))
    train(other, loss_on(48), 3, local=False)
    state, same = source.rank_state_dict(), source.rank_state_dict()
    train(other, loss_on(48), 1, local=False)
    assert same_bits(state, same)
    handle.load_state_dict(state)
    train(ddp, loss_on(48), 2, local=False)
    assert same_bits(state, same)
    assert handle.rank_state_dict()["step"] == 5
