"""A checkpoint taken in the middle and loaded into fresh objects, which go on bit for bit. Of every method: tests/composition; in other processes:
test_tools_checkpoints.py."""

import torch
from torch import nn

from gradwire import PowerSGD, WireDtype
from tests.torch.compare import same_bits, weights
from tests.torch.models import Layers, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, fit, hooked, train

cases = Cases(__file__, ranks=2)

WIDTHS = (48, 40, 32, 24)
STEPS = 8
#: Steps before the checkpoint: before and after buckets are rebuilt, in odd and even halves of a half step, in and after the dense start; and right
#: after buckets were rebuilt, and before the first compressed step.
TAKEN = {
    "half step": (PowerSGD(rank=2, half_step=True), (1, 4, 5)),
    "dense start": (PowerSGD(rank=2, start_step=5), (1, 2, 5, 6)),
    "bfloat16 memory": (PowerSGD({"layers.0.*": 4, "layers.4.*": 0, "*": 1}, state_dtype="bfloat16"), (4,)),
    "bfloat16 on the wire": (WireDtype(PowerSGD(rank=2, half_step=True), "bfloat16"), (4,)),
}


def shuffled():
    """The layers are used in another order than the one in which they are registered: rebuilding shuffles the buckets."""
    forward = lambda self, x: self.layers(torch.tanh(self.first(x)))  # noqa: E731
    return Layers(forward, layers=mlp(*WIDTHS), first=nn.Linear(WIDTHS[0], WIDTHS[0]))


@cases.each(TAKEN)
def test_a_run_goes_on_bit_for_bit(world, variant):
    algorithm, taken = variant

    def made():
        ddp, handle = hooked(shuffled(), algorithm, world.group, message_bytes=1500)
        return ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9), handle

    def go_on(parts, steps):
        fit(*parts[:2], world.rank, steps, loss_on(WIDTHS[0]))

    whole, saved = made(), {}
    for step in range(STEPS):
        go_on(whole, [step])
        if step + 1 in taken:
            states = whole[0].module.state_dict(), whole[1].state_dict(), whole[2].rank_state_dict()
            torch.save(states, file := world.folder / f"checkpoint of {world.rank}.pt")
            saved[step + 1] = torch.load(file, weights_only=True)
    assert buckets_of(whole[0]) >= 2
    for step, (model, optimizer, memory) in saved.items():
        ddp, stepping, handle = again = made()
        ddp.module.load_state_dict(model)
        stepping.load_state_dict(optimizer)
        handle.load_state_dict(memory)
        assert same_bits(handle.rank_state_dict(), memory)
        go_on(again, range(step, STEPS))
        # With two ranks a sum has only one order, whatever the buckets are at the moment.
        assert same_bits(weights(ddp.module), weights(whole[0].module))
        assert same_bits(handle.rank_state_dict(), whole[2].rank_state_dict())
    assert world.agree(weights(whole[0].module))
    errors = [any(m["error"].any() for m in memory["tensors"].values()) for *_, memory in saved.values()]
    assert errors == [step > algorithm.start_step for step in saved]  # the dense start is still on in some of them


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
