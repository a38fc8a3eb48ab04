"""What the error remembers: backward passes that leave no trace, error that is forgotten, replicas' gradients that are clipped before it is added."""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.dry import Kernels, PretendedGroup, on_a_device
from benchmarks.shapes import gpt
from gradwire import AllReduce, PowerSGD, Simulator, WireDtype
from gradwire.torch_backend import DataParallel, PowerSGDState, powerSGD_hook, register_comm_hook
from gradwire.torch_backend.drive import Driver, specs_of
from tests.torch.ranks import Cases
from tests.torch.training import Branches, loss_on, mlp, relative, same_bits, train

WIDTHS = (40, 36, 32, 28)
ALGORITHMS = {
    "PowerSGD": PowerSGD(2),
    "half-step": PowerSGD(2, half_step=True),
    "dense yet": PowerSGD(2, start_step=100),
    "no warm start": PowerSGD(2, warm_start=False),
    "no error feedback": PowerSGD(2, error_feedback=False),
    "in float64": PowerSGD(2, state_dtype="float64"),
    "clipped": PowerSGD(2, max_norm=0.1),
    "bfloat16 on the wire": WireDtype(PowerSGD(2), "bfloat16"),
    "AllReduce": AllReduce(),
}
LOSS = loss_on(40)

cases = Cases(__file__, ranks=2)
results = cases.fixture()


def hooked(world, algorithm, *, model=None, small=True, scaler=None, **options):
    """With several buckets, each of which is a message of its own."""
    model = mlp(*WIDTHS) if model is None else model
    ddp = DistributedDataParallel(model, process_group=world.group, bucket_cap_mb=0.006 if small else None, **options)
    return ddp, register_comm_hook(ddp, algorithm, message_bytes=0 if small else None, grad_scaler=scaler)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def backward(module, rank, step, factor=1.0):
    module.zero_grad()
    (factor * LOSS(module, rank, step)).backward()
    return gradients(module)


def memory_of(handle):
    return handle.rank_compressor_state_dict() if isinstance(handle, DataParallel) else handle.rank_state_dict()


@cases.each(
    {name: (algorithm, False) for name, algorithm in ALGORITHMS.items()} | {"DataParallel": (PowerSGD(2), True)}
)
def discarded(world, variant):
    """After one step and after two, so at both phases of a half-step."""
    algorithm, in_python = variant

    def made():
        if not in_python:
            return hooked(world, algorithm)
        wrapper = DataParallel(mlp(*WIDTHS), algorithm, process_group=world.group, bucket_cap_mb=0.006, message_bytes=0)
        return wrapper, wrapper

    (module, handle), (other, twin) = made(), made()
    seen = []
    for step in range(3):
        backward(module, world.rank, step)
        backward(other, world.rank, step)
        before, stats = memory_of(handle), handle.stats()
        with handle.discarded():
            given = backward(module, world.rank, 50 + step, factor=1000.0)
        seen.append((before, memory_of(handle), stats, handle.stats(), given))
    after = [backward(m, world.rank, 9) for m in (module, other)]
    twin.forget()
    with handle.discarded():
        dropped = backward(module, world.rank, 20)
    counted = backward(other, world.rank, 20)
    return {"seen": seen, "after": after, "dropped": dropped, "counted": counted}


@pytest.mark.parametrize("variant", [*ALGORITHMS, "DataParallel"])
def test_a_discarded_pass_leaves_no_trace(results, variant):
    ranks = results(f"discarded[{variant}]")
    for rank in ranks:
        for before, after, stats, stats_after, given in rank["seen"]:
            assert same_bits(before, after)
            assert stats_after.steps == stats.steps
            assert stats_after.skipped_steps == stats.skipped_steps
            assert stats_after.bytes_sent > stats.bytes_sent  # it was averaged
            limit = 0.1 if variant == "clipped" else float("inf")
            assert 0 < torch.cat([g.flatten() for g in given.values()]).norm() <= limit * 1.001
        assert same_bits(*rank["after"])  # nor does what comes later know of it
        # It is compressed like any other, as if nothing had been left out before.
        assert same_bits(rank["dropped"], rank["counted"])
    assert same_bits(ranks[0]["seen"][1][4], ranks[1]["seen"][1][4])


@cases.case
def with_unused_parameters(world):
    ddp, handle = hooked(world, PowerSGD(2), model=Branches(), find_unused_parameters=True)

    def step(taken, i):
        ddp.zero_grad()
        loss_on(40)(lambda x: ddp(x, taken), world.rank, i).backward()

    step(("left", "right"), 0)
    before = handle.rank_state_dict()
    with handle.discarded():
        step(("left",) if world.rank == 0 else (), 1)
        step(("left", "right"), 2)
    return same_bits(before, handle.rank_state_dict()), sorted(gradients(ddp.module))


def test_a_discarded_pass_with_unused_parameters(results):
    for unchanged, names in results("with_unused_parameters"):
        assert unchanged
        assert len(names) == len(list(Branches().parameters()))


@cases.case
def not_finite(world):
    ddp, handle = hooked(world, PowerSGD(2))
    backward(ddp, world.rank, 0)
    before = handle.rank_state_dict(), handle.stats().skipped_steps
    with handle.discarded():
        given = backward(ddp, world.rank, 1, float("inf") if world.rank == 1 else 1.0)
    return before, (handle.rank_state_dict(), handle.stats().skipped_steps), given


def test_a_discarded_pass_that_is_not_finite(results):
    for before, after, given in results("not_finite"):
        assert same_bits(before, after)
        assert all(g.isnan().all() for n, g in given.items() if n.endswith("weight"))


@cases.case
def scaled(world):
    """The scale is halved before a discarded pass: memory stays in the units it has until a step counts."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp, handle = hooked(world, PowerSGD(2, max_norm=0.1), scaler=scaler)
    other, twin = hooked(world, PowerSGD(2, max_norm=0.1))
    scaler.scale(LOSS(ddp, world.rank, 0)).backward()
    LOSS(other, world.rank, 0).backward()
    scaler.update(512.0)
    before = handle.rank_state_dict()
    with handle.discarded():
        backward(ddp, world.rank, 5, 512.0)
    unchanged = same_bits(before, handle.rank_state_dict())
    given, expected = backward(ddp, world.rank, 1, 512.0), backward(other, world.rank, 1)
    return unchanged, {n: g / 512 for n, g in given.items()}, expected, handle.error_norm() / twin.error_norm()


def test_a_loss_scale_is_followed_by_the_next_step_and_counts_in_clipping(results):
    for unchanged, given, expected, errors in results("scaled"):
        assert unchanged
        assert relative(given, expected) < 1e-5
        assert errors == pytest.approx(512, rel=1e-4)


@cases.case
def nested_and_interrupted(world):
    ddp, handle = hooked(world, PowerSGD(2))
    sent = []
    with handle.discarded():
        with handle.discarded():
            backward(ddp, world.rank, 0)
        backward(ddp, world.rank, 1)
        sent.append(handle.stats().bytes_sent)
        with ddp.no_sync():
            backward(ddp, world.rank, 2)
        sent.append(handle.stats().bytes_sent)
    with pytest.raises(RuntimeError, match="stop"), handle.discarded():
        raise RuntimeError("stop")
    steps = [handle.stats().steps]
    backward(ddp, world.rank, 3)
    return sent, [*steps, handle.stats().steps], handle.error_norm()


def test_contexts_within_each_other_and_exceptions(results):
    for (synchronized, accumulated), steps, error in results("nested_and_interrupted"):
        assert synchronized == accumulated > 0  # under no_sync nothing is sent
        assert steps == [0, 1]
        assert error > 0


def torchs(world, **options):
    """Under torch's names."""
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=0.006)
    state = PowerSGDState(world.group, 2, start_powerSGD_iter=0, **options)
    ddp.register_comm_hook(state, powerSGD_hook)
    return ddp, state


def in_python(world):
    module = DataParallel(mlp(*WIDTHS), PowerSGD(2), process_group=world.group, bucket_cap_mb=0.006)
    return module, module


def assign_rank(state):
    state.matrix_approximation_rank = 1


DOORS = {
    "register_comm_hook": (lambda world: hooked(world, PowerSGD(2)), lambda handle: handle.reconfigure(PowerSGD(1))),
    "DataParallel": (in_python, lambda handle: handle.reconfigure(PowerSGD(1))),
    "PowerSGDState": (torchs, assign_rank),
}


@cases.each(DOORS)
def reconfigured_within(world, door):
    make, reconfigure = door
    module, handle = make(world)
    other, twin = make(world)

    def memory(of):
        return of.state_dict()["memory"] if isinstance(of, PowerSGDState) else memory_of(of)

    for each in (module, other):
        backward(each, world.rank, 0)
    with handle.discarded():
        backward(module, world.rank, 50)
        reconfigure(handle)
        backward(module, world.rank, 51)
    reconfigure(twin)
    after = []
    for step in (1, 2):
        given = [backward(each, world.rank, step) for each in (module, other)]
        after.append((given, [memory(of) for of in (handle, twin)]))
    return after


@pytest.mark.parametrize("door", DOORS)
def test_another_configuration_within_goes_on_discarding(results, door):
    for after in results(f"reconfigured_within[{door}]"):
        for given, memories in after:
            assert same_bits(*given)
            assert same_bits(*memories)
        steps = [memories[0]["step"] for _, memories in after]
        assert steps == [2, 3]  # what comes after the context counts


@cases.case
def under_torchs_names(world):
    """The very first pass is one to be dropped; and memory that was loaded is forgotten before the first step."""
    (module, state), (other, twin) = torchs(world), torchs(world)
    with state.discarded():
        backward(module, world.rank, 50)
    dropped = state.state_dict()["memory"]["step"], max(float(x.norm()) for x in state.error_dict.values())
    same = [same_bits(backward(module, world.rank, step), backward(other, world.rank, step)) for step in range(2)]
    kept = {name: x.clone() for name, x in state.error_dict.items()}
    state.forget("*.0")
    forgotten = {name: float(x.norm()) for name, x in state.error_dict.items()}
    with pytest.raises(ValueError, match=r"names pattern '\*\.9' matches no parameter"):
        state.forget(["*.0", "*.9"])
    later, loaded = torchs(world)
    loaded.load_state_dict(twin.state_dict())
    loaded.forget()
    with loaded.discarded():
        again = copy.deepcopy(loaded)  # a copy is at work by itself
    backward(later, world.rank, 2)
    twin.forget()
    backward(other, world.rank, 2)
    same.append(same_bits(loaded.error_dict, twin.error_dict))
    return dropped, same, kept, forgotten, again.iter, again._discarding


def test_torchs_state_discards_and_forgets(results):
    for dropped, same, kept, forgotten, step, discarding in results("under_torchs_names"):
        assert dropped == (0, 0.0)
        assert same == [True] * 3
        assert {name: norm == 0 for name, norm in forgotten.items()} == {name: name.endswith(".0") for name in kept}
        assert all(float(x.norm()) > 0 for x in kept.values())
        assert any(name.endswith(".0") for name in kept)
        assert (step, discarding) == (2, False)


@cases.case
def on_one_rank_only(world):
    ddp, handle = hooked(world, PowerSGD(2))
    backward(ddp, world.rank, 0)
    if world.rank == 0:
        with handle.discarded():
            first = backward(ddp, world.rank, 1)
    else:
        first = backward(ddp, world.rank, 1)
    return first, backward(ddp, world.rank, 2), backward(ddp, world.rank, 3), handle.stats().steps


def test_on_one_rank_only_averages_stay_equal_and_steps_part(results):
    (*first, steps), (*second, others) = results("on_one_rank_only")
    assert same_bits(first, second)
    assert (steps, others) == (3, 4)


@cases.case
def in_a_compiled_step(world):
    torch._dynamo.reset()
    ddp, handle = hooked(world, PowerSGD(2), small=False)

    @torch.compile(backend="aot_eager")
    def step(x):
        loss = ddp(x).square().mean()
        with handle.discarded():
            loss.backward()
        return loss

    @torch.compile(backend="aot_eager")
    def counted(x):
        ddp(x).square().mean().backward()

    x = torch.randn(8, 40)
    counted(x)
    before = handle.rank_state_dict()
    step(x)
    return before, handle.rank_state_dict()


def test_in_a_compiled_step(results):
    for before, after in results("in_a_compiled_step"):
        assert same_bits(before, after)
        assert after["step"] == 1


@cases.case
def forgotten(world):
    ddp, handle = hooked(world, PowerSGD(2))
    for step in range(2):
        backward(ddp, world.rank, step)
    states = [handle.rank_state_dict()]
    for patterns in ("0.*", ["nothing*", "2.weight"], ["2.weight", "*.bias"], None):
        try:
            handle.forget(patterns)
        except ValueError as error:
            states.append(str(error))
        states.append(handle.rank_state_dict())
    return states


def test_errors_are_forgotten_by_pattern_and_nothing_else_is(results):
    for before, first, refusal, unchanged, second, all_of_them in results("forgotten"):

        def errors(state):
            return {n for n, m in state["tensors"].items() if m["error"].any()}

        def rest(state):
            tensors = {n: {k: x for k, x in m.items() if k != "error"} for n, m in state["tensors"].items()}
            return state | {"tensors": tensors}

        assert errors(before) == {"0.weight", "2.weight", "4.weight"}
        assert errors(first) == {"2.weight", "4.weight"}
        assert "names pattern 'nothing*' matches no parameter" in refusal
        assert same_bits(first, unchanged)
        assert errors(second) == {"4.weight"}
        assert not errors(all_of_them)
        for state in (first, second, all_of_them):
            assert same_bits(rest(state), rest(before))


@cases.each({"one message": False, "several": True})
def clipped(world, small):
    """With several messages in a step the norm is still that of the whole model."""
    model = mlp(*WIDTHS)
    ddp, _ = hooked(world, PowerSGD(2, max_norm=0.05), model=model, small=small)
    trace = train(ddp, LOSS, 4)
    return trace


@pytest.mark.parametrize("messages", ["one message", "several"])
def test_each_ranks_gradient_is_clipped_by_its_norm(results, messages):
    traces = results(f"clipped[{messages}]")
    local = [[{n: g.double().numpy() for n, g in step.items()} for step in t.local] for t in traces]
    simulator = Simulator(PowerSGD(2), {n: g.shape for n, g in local[0][0].items()}, 2)
    for step, given in enumerate(traces[0].given):
        norms = [sum((g**2).sum() for g in replica[step].values()) ** 0.5 for replica in local]
        assert min(norms) > 0.05
        scaled = [
            {n: g * (0.05 / norm) for n, g in replica[step].items()} for replica, norm in zip(local, norms, strict=True)
        ]
        assert relative(given, simulator.step(scaled)) < 1e-5


def test_neither_clipping_nor_discarding_lets_the_host_wait():
    """On a device; and clipping is a handful of kernels, however many tensors there are."""
    gradients = {name: torch.zeros(shape) for name, shape in gpt(4, 64, 500, 32).items()}

    def counted(algorithm, discarding=False):
        with on_a_device():
            driver = Driver(algorithm, specs_of(gradients), torch.device("cpu"), PretendedGroup())
        scalars = dict(driver.state.shared)
        for _ in range(3):
            with Kernels() as seen:
                driver.add(gradients, first=True, last=True)
            driver.discarding = discarding
        assert all(driver.state.shared[key] is x for key, x in scalars.items())  # the very ones that are foreseen
        return seen

    usual, clipping = counted(PowerSGD(4)), counted(PowerSGD(4, max_norm=1.0))
    assert usual.waits == clipping.waits == 0
    assert clipping.kernels - usual.kernels < 20 < len(gradients)
    for algorithm in (PowerSGD(4), PowerSGD(4, half_step=True)):
        assert counted(algorithm, discarding=True).waits == counted(algorithm).waits


if __name__ == "__main__":
    cases.main()
