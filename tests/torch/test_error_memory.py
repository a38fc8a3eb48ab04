"""What the error remembers: backward passes that leave no trace, error that is forgotten. Clipping: "max_norm" of tests/parity."""

import copy
from contextlib import nullcontext

import pytest
import torch

from gradwire import PowerSGD, WireDtype
from gradwire.torch_backend import PowerSGDState, powerSGD_hook
from tests.torch.compare import gradients, same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import hooked, paralleled

WIDTHS = (40, 36, 32, 28)
CLIPPED = PowerSGD(2, max_norm=0.1)
LOSS = loss_on(40)

cases = Cases(__file__, ranks=2)


def torchs(model, algorithm, group, **options):
    """Under torch's names."""
    ddp, _ = hooked(model, None, group)
    state = PowerSGDState(group, algorithm.rank, start_powerSGD_iter=0)
    ddp.register_comm_hook(state, powerSGD_hook)
    return ddp, state


def made(world, door=hooked, algorithm=CLIPPED, **options):
    """With several buckets, each of which is a message of its own."""
    return door(mlp(*WIDTHS), algorithm, world.group, message_bytes=0, **options)


def backward(module, rank, step, factor=1.0):
    module.zero_grad()
    (factor * LOSS(module, rank, step)).backward()
    return gradients(module.module)


def memory_of(handle):
    return handle.state_dict()["memory"] if isinstance(handle, PowerSGDState) else handle.rank_state_dict()


VARIANTS = {
    "half-step": (hooked, PowerSGD(2, half_step=True)),
    "clipped": (hooked, CLIPPED),
    "bfloat16 on the wire": (hooked, WireDtype(PowerSGD(2), "bfloat16")),
    "DataParallel": (paralleled, PowerSGD(2)),
}


@cases.each(VARIANTS)
def test_a_discarded_pass_leaves_no_trace(world, variant):
    """After one step and after two, so at both phases of a half-step; and whether it is finite or not."""
    (module, handle), (other, twin) = (made(world, *variant) for _ in range(2))
    limit = 0.1 * 1.001 if variant[1] == CLIPPED else float("inf")
    for step in range(3):
        for each in (module, other):
            backward(each, world.rank, step)
        before, stats = memory_of(handle), handle.stats()
        with handle.discarded():
            given = backward(module, world.rank, 50 + step, factor=1000.0)
            bad = backward(module, world.rank, 60, float("inf") if world.rank == 1 else 1.0)
        assert same_bits(memory_of(handle), before)
        after = handle.stats()
        assert (after.steps, after.skipped_steps) == (stats.steps, stats.skipped_steps)
        assert after.bytes_sent > stats.bytes_sent  # it was averaged
        assert world.agree(given)
        assert 0 < torch.cat([g.flatten() for g in given.values()]).norm() <= limit
        assert not any(g.isfinite().all() for name, g in bad.items() if name.endswith("weight"))
    # Nor does what comes later know of it.
    assert same_bits(*(backward(each, world.rank, 9) for each in (module, other)))
    # It is compressed like any other, as if nothing had been left out before.
    twin.forget()
    with handle.discarded():
        dropped = backward(module, world.rank, 20)
    assert same_bits(dropped, backward(other, world.rank, 20))


@cases.case
def test_of_two_models_in_one_backward_pass_one_may_be_discarded(world):
    """A generator's step goes through the discriminator, whose gradients are dropped."""
    models = (paralleled(mlp(*widths), PowerSGD(2), world.group) for widths in ((8, 32, 40), (40, 32, 1)))
    (g, ours), (d, theirs) = models
    noise = torch.randn(6, 8, generator=torch.Generator().manual_seed(world.rank))
    d(g(noise).detach()).mean().backward()
    before = theirs.rank_state_dict()
    d.zero_grad()
    with theirs.discarded():
        (-d(g(noise)).mean()).backward()
    assert same_bits(theirs.rank_state_dict(), before)
    assert (ours.stats().steps, theirs.stats().steps) == (1, 1)
    assert world.agree(gradients(g.module))


@cases.case
def test_contexts_within_each_other_exceptions_and_ranks_that_do_not_agree(world):
    ddp, handle = made(world, algorithm=PowerSGD(2))
    with handle.discarded():
        with handle.discarded():
            backward(ddp, world.rank, 0)
        backward(ddp, world.rank, 1)
        sent = handle.stats().bytes_sent
        with ddp.no_sync():
            backward(ddp, world.rank, 2)
    assert handle.stats().bytes_sent == sent > 0  # under no_sync nothing is sent
    with pytest.raises(RuntimeError, match="stop"), handle.discarded():
        raise RuntimeError("stop")
    assert handle.stats().steps == 0
    backward(ddp, world.rank, 3)
    assert handle.stats().steps == 1
    assert handle.error_norm() > 0
    with handle.discarded() if world.rank == 0 else nullcontext():
        given = [backward(ddp, world.rank, 4)]
    given += [backward(ddp, world.rank, step) for step in (5, 6)]
    assert world.agree(given)  # averages stay equal, and steps part
    assert handle.stats().steps == (3 if world.rank == 0 else 4)


DOORS = {
    "register_comm_hook": (hooked, lambda handle: handle.reconfigure(PowerSGD(1))),
    "DataParallel": (paralleled, lambda handle: handle.reconfigure(PowerSGD(1))),
    "PowerSGDState": (torchs, lambda state: setattr(state, "matrix_approximation_rank", 1)),
}


@cases.each(DOORS)
def test_another_configuration_within_goes_on_discarding(world, door):
    door, reconfigure = door
    (module, handle), (other, twin) = (made(world, door, PowerSGD(2)) for _ in range(2))
    for each in (module, other):
        backward(each, world.rank, 0)
    with handle.discarded():
        backward(module, world.rank, 50)
        reconfigure(handle)
        backward(module, world.rank, 51)
    reconfigure(twin)
    for step in (1, 2):
        assert same_bits(*(backward(each, world.rank, step) for each in (module, other)))
        assert same_bits(memory_of(handle), memory_of(twin))
        assert memory_of(handle)["step"] == step + 1  # what comes after the context counts


@cases.case
def test_torchs_state_discards_and_forgets(world):
    """The very first pass is one to be dropped; and memory that was loaded is forgotten before the first step."""
    (module, state), (other, twin), (later, loaded) = (made(world, torchs) for _ in range(3))
    with state.discarded():
        backward(module, world.rank, 50)
    assert memory_of(state)["step"] == 0
    assert not any(x.any() for x in state.error_dict.values())
    for step in range(2):
        assert same_bits(backward(module, world.rank, step), backward(other, world.rank, step))
    assert all(x.any() for x in state.error_dict.values())
    state.forget("*.0")
    assert all(x.any() != name.endswith(".0") for name, x in state.error_dict.items())
    with pytest.raises(ValueError, match=r"'\*\.9'"):
        state.forget(["*.0", "*.9"])
    loaded.load_state_dict(twin.state_dict())
    loaded.forget()
    with loaded.discarded():
        again = copy.deepcopy(loaded)  # a copy is at work by itself
    backward(later, world.rank, 2)
    twin.forget()
    backward(other, world.rank, 2)
    assert same_bits(loaded.error_dict, twin.error_dict)
    assert (again.iter, again._discarding) == (2, False)


@cases.case
def test_errors_are_forgotten_by_pattern_and_nothing_else_is(world):
    ddp, handle = made(world, algorithm=PowerSGD(2))
    for step in range(2):
        backward(ddp, world.rank, step)
    before = handle.rank_state_dict()

    def errors():
        """Of which parameters there are any; all else is what it was."""
        state = handle.rank_state_dict()
        without = [copy.deepcopy(s) for s in (before, state)]
        for memory in (m for s in without for m in s["tensors"].values()):
            del memory["error"]
        assert same_bits(*without)
        return "".join(n[0] for n, m in state["tensors"].items() if m["error"].any())

    assert errors() == "024"
    for names, left in (("0.*", "24"), (["2.weight", "*.bias"], "4"), (None, "")):
        handle.forget(names)
        assert errors() == left
