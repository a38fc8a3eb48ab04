"""What the error remembers: backward passes that leave no trace, error that is forgotten. Clipping: "max_norm" of tests/parity."""

import copy
from contextlib import nullcontext

import pytest
import torch

from benchmarks.dry import Kernels, PretendedGroup, on_a_device
from benchmarks.shapes import gpt
from gradwire import PowerSGD, WireDtype
from gradwire.torch_backend import PowerSGDState, powerSGD_hook
from gradwire.torch_backend.engine.driver import Driver, specs_of
from tests.torch.compare import gradients, relative, same_bits
from tests.torch.models import Branches, loss_on, mlp
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
    "dense yet": (hooked, PowerSGD(2, start_step=100)),
    "no warm start": (hooked, PowerSGD(2, warm_start=False)),
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
def test_a_discarded_pass_with_unused_parameters(world):
    ddp, handle = hooked(Branches(), PowerSGD(2), world.group, message_bytes=0, find_unused_parameters=True)

    def step(taken, i):
        ddp.zero_grad()
        loss_on(40)(lambda x: ddp(x, taken), world.rank, i).backward()

    step(("left", "right"), 0)
    before = handle.rank_state_dict()
    with handle.discarded():
        step(("left",) if world.rank == 0 else (), 1)
        step(("left", "right"), 2)
    assert same_bits(before, handle.rank_state_dict())
    assert len(gradients(ddp.module)) == len(list(Branches().parameters()))


@cases.each({"hook": hooked, "DataParallel": paralleled})
def test_of_two_models_in_one_backward_pass_one_may_be_discarded(world, door):
    """A generator's step goes through the discriminator, whose gradients are dropped."""
    (g, ours), (d, theirs) = (door(mlp(*widths), PowerSGD(2), world.group) for widths in ((8, 32, 40), (40, 32, 1)))
    noise = torch.randn(6, 8, generator=torch.Generator().manual_seed(world.rank))
    d(g(noise).detach()).mean().backward()
    before = theirs.rank_state_dict()
    d.zero_grad()
    with theirs.discarded():
        (-d(g(noise)).mean()).backward()
    assert same_bits(theirs.rank_state_dict(), before)
    assert (ours.stats().steps, theirs.stats().steps) == (1, 1)
    assert world.agree(gradients(g.module))
    d.zero_grad()
    (-d(g(noise)).mean()).backward()  # without a word, it takes them up
    assert not same_bits(theirs.rank_state_dict(), before)
    assert theirs.stats().steps == 2


@cases.case
def test_a_loss_scale_is_followed_by_the_next_step_and_counts_in_clipping(world):
    """The scale is halved before a discarded pass: memory stays in the units it has until a step counts."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    (ddp, handle), (other, twin) = made(world, grad_scaler=scaler), made(world)
    scaler.scale(LOSS(ddp, world.rank, 0)).backward()
    backward(other, world.rank, 0)
    scaler.update(512.0)
    before = handle.rank_state_dict()
    with handle.discarded():
        backward(ddp, world.rank, 5, 512.0)
    assert same_bits(before, handle.rank_state_dict())
    given, expected = backward(ddp, world.rank, 1, 512.0), backward(other, world.rank, 1)
    assert relative({n: g / 512 for n, g in given.items()}, expected) < 1e-5
    assert handle.error_norm() / twin.error_norm() == pytest.approx(512, rel=1e-4)


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
    kept = {name: bool(x.any()) for name, x in state.error_dict.items()}
    assert kept == {name: not name.endswith(".0") for name in kept}
    assert not all(kept.values())
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


def test_neither_clipping_nor_discarding_lets_the_host_wait():
    """On a device; and clipping is a handful of kernels, however many tensors there are."""
    gradients = {name: torch.zeros(shape) for name, shape in gpt(4, 64, 500, 32).items()}

    def counted(algorithm, discarding=False):
        with on_a_device():
            driver = Driver(algorithm, specs_of(gradients), torch.device("cpu"), PretendedGroup())
        scalars = dict(driver.memory.state.shared)
        for _ in range(3):
            with Kernels() as seen:
                driver.add(gradients, first=True, last=True)
            driver.discarding = discarding
        shared = driver.memory.state.shared
        assert all(shared[key] is x for key, x in scalars.items())  # the very ones that are foreseen
        return seen

    usual, clipping = counted(PowerSGD(4)), counted(PowerSGD(4, max_norm=1.0))
    assert usual.waits == clipping.waits == 0
    assert clipping.kernels - usual.kernels < 20 < len(gradients)
    for algorithm in (PowerSGD(4), PowerSGD(4, half_step=True)):
        assert counted(algorithm, discarding=True).waits == counted(algorithm).waits
