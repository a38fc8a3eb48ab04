"""The emulated accelerator notices what it is there for; and what gradwire does in the odd places of a training loop is ordered.

Odd places: a forward pass on two streams, a backward pass after one that failed, checkpoints of what lies on the device.
"""

from collections import deque
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD, diloco
from gradwire.core.protocol.collective_requests import ReduceScatter
from gradwire.torch_backend import DataParallel, ZeroOptimizer, local_sgd, register_comm_hook
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.monitor.skipped_steps import SkippedSteps
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.zero.sharded_step import ShardedStep
from tests.emulated.build import shared_library
from tests.emulated.ways import WAYS, native_collectives, train
from tests.torch.compare import same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases

cases = Cases(__file__, ranks=2)
KB = 1 / 1024


@pytest.fixture(scope="module", autouse=True)
def _built():
    shared_library()


def on_emulated_nccl():
    """A process group, of all ranks; and nothing has happened yet."""
    from tests.emulated.device import watched
    from tests.emulated.process_group import BACKEND

    group = dist.new_group(backend=BACKEND)
    watched.clear()
    return group


def whats(events):
    return [event.what for event in events]


# --- the emulation itself -----------------------------------------------------------------------------------------------------


@cases.case
def what_streams_do_not_order(world):
    from tests.emulated.device import DEVICE, core, stream, watched

    def problems(second, *, wait=False):
        watched.clear()
        x = torch.zeros(8, device=DEVICE)
        with stream(3):
            if wait:
                core.wait_for(3, 0)
            second(x)
        core.wait_for(0, 3)
        return whats(watched.problems)

    return {
        "reads": problems(lambda x: x + 1),
        "writes": problems(lambda x: x.fill_(1)),
        "waits": problems(lambda x: x.fill_(1), wait=True),
        "elsewhere": problems(lambda x: torch.zeros(8, device=DEVICE).fill_(1)),
    }


def test_races_are_reported(results):
    for seen in results("what_streams_do_not_order"):
        (read,), (write,) = seen["reads"], seen["writes"]
        assert read == "race: add reads on stream 3 what zero_ writes on stream 0"
        assert write == "race: fill_ writes on stream 3 what zero_ writes on stream 0"
        assert seen["waits"] == seen["elsewhere"] == []


@cases.case
def memory_freed_while_in_use(world):
    from tests.emulated.device import DEVICE, core, stream, watched

    def problems(*, record=False, wait=""):
        x = torch.zeros(8).to(DEVICE)
        watched.clear()
        core.wait_for(3, 0)
        with stream(3):
            x.fill_(1)
            if record:
                x.record_stream(torch.accelerator.current_stream(DEVICE))
        if wait == "before":
            core.wait_for(0, 3)
        del x
        if wait == "after":
            core.wait_for(0, 3)
        torch.zeros(8, device=DEVICE)
        core.wait_for(0, 3)
        return whats(watched.problems)

    return problems(), problems(record=True), problems(wait="before"), problems(wait="after")


def test_memory_that_another_stream_still_uses_is_not_used_again(results):
    for early, *right in results("memory_freed_while_in_use"):
        assert early == ["memory of stream 0 is freed and may be used by zero_ while fill_ uses it on stream 3"]
        assert right == [[], [], []]


@cases.case
def waits_of_the_host(world):
    from tests.emulated.device import DEVICE, event, watched

    x = torch.ones(4).to(DEVICE)
    on_device = torch.tensor(0.0).to(DEVICE)
    pinned = torch.ones(4).pin_memory()

    def waits(action):
        watched.clear()
        action()
        return len(watched.waits)

    def wait_for_an_event(operations):
        now = event()
        for _ in range(operations):
            x.add_(0)
        now.synchronize()

    return {
        "item": waits(lambda: x[0].item()),
        "an event": waits(lambda: wait_for_an_event(0)),
        "an event of long ago": waits(lambda: wait_for_an_event(100)),
        "bool": waits(lambda: bool((x > 0).all())),
        "equal": waits(lambda: torch.equal(x, x)),
        "unique": waits(lambda: torch.unique(x)),
        "cpu": waits(lambda: x.cpu()),
        "a list": waits(lambda: torch.tensor([1.0, 2.0], device=DEVICE)),
        "where with a scalar of the host": waits(lambda: torch.where(x > 0, x, torch.tensor(0.0))),
        "not blocking, not pinned": waits(lambda: torch.ones(4).to(DEVICE, non_blocking=True)),
        "not blocking, pinned": waits(lambda: pinned.to(DEVICE, non_blocking=True)),
        "where with a scalar of the device": waits(lambda: torch.where(x > 0, x, on_device)),
        "a product with a scalar of the host": waits(lambda: x * torch.tensor(2.0)),
        "kernels": waits(lambda: torch.linalg.vector_norm(x + x).sqrt()),
    }


def test_waits_of_the_host_are_counted(results):
    free = (
        "an event of long ago",
        "not blocking, pinned",
        "where with a scalar of the device",
        "a product with a scalar of the host",
        "kernels",
    )
    for seen in results("waits_of_the_host"):
        assert {name for name, count in seen.items() if not count} == set(free)


@cases.case
def pinned_memory_between_copies(world):
    """To the host and back, and then to the host again: on one stream, or on another that does not wait."""
    from tests.emulated.device import DEVICE, core, stream, watched

    def problems(second):
        pinned, x = torch.zeros(4).pin_memory(), torch.ones(4, device=DEVICE)
        core.wait_for(second, 0)
        watched.clear()
        pinned.copy_(x, non_blocking=True)
        with stream(second):
            back = pinned.to(DEVICE, non_blocking=True)
            pinned.copy_(back + 1, non_blocking=True)
            seen = back.tolist()
        torch.accelerator.synchronize(DEVICE)
        return seen, pinned.tolist(), bool(whats(watched.problems))

    return problems(0), problems(1)


def test_streams_see_what_came_to_pinned_memory_before(results):
    for ordered, early in results("pinned_memory_between_copies"):
        assert ordered == ([1.0] * 4, [2.0] * 4, False)
        assert early[0] != [1.0] * 4


@cases.case
def copies_by_pinned_memory(world):
    from tests.emulated.device import DEVICE, event, watched

    def problems(value, *, wait=False):
        pinned = torch.ones(4).pin_memory()
        watched.clear()
        there = pinned.to(DEVICE, non_blocking=True)
        now = event()
        if wait:
            now.synchronize()
        pinned.fill_(value)
        back = there.to("cpu", non_blocking=True)
        before, now = back.clone(), event()
        asked = now.query()
        for _ in range(100):
            there.add_(0)
        return asked, before, now.query(), back, whats(watched.problems)

    return problems(2, wait=True), problems(2), problems(1)


def test_copies_by_pinned_memory_take_time(results):
    for seen in results("copies_by_pinned_memory"):
        for early, before, late, back, _ in seen:
            assert before.isnan().all()
            assert back.tolist() == [1.0] * 4
            assert (early, late) == (False, True)
        # Also where what is written is what was there.
        assert [problems for *_, problems in seen] == [[], *[["pinned memory was written while copy_ read it"]] * 2]


@cases.case
def skipped_steps(world):
    """What the host takes note of while the device is behind by more than the ten steps between two looks: all steps are skipped."""
    from tests.emulated.device import DEVICE

    counted, seen = SkippedSteps("an algorithm", DEVICE, 0, seen_by_host=False), []
    counted._run.seen = lambda steps, skipped: seen.append((steps, skipped))
    finite = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for step in range(1, 201):
        counted.add(finite)
        counted.look(step)
    return seen


def test_a_count_is_read_when_it_has_come(results):
    for seen in results("skipped_steps"):
        assert seen
        assert all(skipped == steps for steps, skipped in seen)


@cases.case
def another_device(world):
    from tests.emulated.device import DEVICE, core, watched

    watched.clear()
    torch.Event(DEVICE).record()  # on a stream of the current device, on which no tensor is
    core.set_device(DEVICE.index)
    torch.Event(DEVICE).record()
    core.set_device(0)
    return whats(watched.problems)


def test_an_event_on_another_device_is_reported(results):
    assert results("another_device") == [["an event is recorded on another device than that of the tensors"]] * 2


@cases.case
def collectives(world):
    from tests.emulated.device import DEVICE, core

    group = on_emulated_nccl()
    x = torch.full((4,), float(world.rank + 1)).to(DEVICE)
    work = dist.all_reduce(x, group=group, async_op=True)
    hidden = core.host_alias(x).clone()
    work.wait()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=group)
    return {"hidden": hidden, "after": x.cpu()}


def test_results_are_hidden_until_somebody_waits(results):
    for seen in results("collectives"):
        assert seen["hidden"].isnan().all()
        assert seen["after"].tolist() == [3.0] * 4


@cases.case
def wrong_launches(world):
    """Where NCCL would wait for ever, or sometimes."""
    from tests.emulated.device import DEVICE

    group, x = on_emulated_nccl(), torch.ones(4).to(DEVICE)
    with pytest.raises(RuntimeError, match="another launches something else"):
        dist.all_reduce(x[: 2 + world.rank], group=group)
    future = dist.all_reduce(x, group=group, async_op=True).get_future()
    with pytest.raises(RuntimeError, match="launched from a callback"):
        future.then(lambda _: dist.all_reduce(x, group=group)).wait()
    dist.all_reduce(x, group=group)
    return x.cpu()


def test_wrong_launches_are_refused(results):
    for seen in results("wrong_launches"):
        assert seen.tolist() == [4.0] * 4


MISTAKES = {
    "none": lambda message, wait: wait(),
    "does not wait": lambda message, wait: None,
    "reads before it waits": lambda message, wait: (message * 2, wait()),
    "writes before it waits": lambda message, wait: (message.mul_(2), wait()),
}


class Mistaken:
    """An all-reduce that is waited for wrongly."""

    def __init__(self, work, message, wait):
        self.work, self.message, self.how = work, message, wait

    def wait(self):
        self.how(self.message, self.work.wait)


@cases.each(MISTAKES)
def a_mistake(world, mistake):
    from tests.emulated.device import DEVICE, watched

    group = on_emulated_nccl()
    real = dist.all_reduce

    def all_reduce(tensor, *args, async_op=False, **kwargs):
        work = real(tensor, *args, async_op=async_op, **kwargs)
        return Mistaken(work, tensor, mistake) if async_op else work

    dist.all_reduce = all_reduce
    try:
        train(WAYS["PowerSGD"], DEVICE, group)
    finally:
        dist.all_reduce = real
    return whats(watched.problems)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_order_of_waits_are_noticed(results, mistake):
    for problems in results(f"a_mistake[{mistake}]"):
        assert bool(problems) == (mistake != "none")


# --- times -----------------------------------------------------------------------------------------------------------------------


@cases.case
def times_of_steps(world):
    """An operation takes a millisecond."""
    from tests.emulated.device import DEVICE, core, watched

    group = on_emulated_nccl()
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48)).to(DEVICE)
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=20 * KB)
    handle = register_comm_hook(wrapped, PowerSGD(2), message_bytes=0)
    own, real, notes = [], handle._driver.add, handle._driver.watch.times

    def add(*args, **kwargs):
        core.operations()
        real(*args, **kwargs)
        own[-1:] = [own[-1] + sum(core.operations().values())] if own else []

    data = torch.randn(16, 64).to(DEVICE)
    handle._driver.add = add
    events, notes._steps = [], deque(maxlen=4)
    for _ in range(7):
        own.append(0)
        wrapped(data).square().mean().backward()
        watched.clear()
        read = notes.read()  # of the steps that the device has finished
        events.append((read.steps, len(watched.waits)))
        model.zero_grad()
    return handle.stats(), own[-4:], events


def test_times_on_a_device_are_those_of_its_stream_and_nobody_waits_for_them(results):
    for stats, own, read in results("times_of_steps"):
        assert 1e3 * (stats.compress_seconds + stats.wait_seconds) == pytest.approx(sum(own) / len(own))
        assert stats.step_seconds > stats.compress_seconds > 0
        assert not any(waits for _, waits in read)
        assert any(steps < min(i, 4) for i, (steps, _) in enumerate(read, 1))  # not all had been finished


# --- odd places ---------------------------------------------------------------------------------------------------------------


class TwoStreams(nn.Module):
    """One branch of the forward pass on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(48, 8)
        self.a, self.b = nn.Linear(64, 48), nn.Linear(64, 48)

    def forward(self, x):
        from tests.emulated.device import core, stream

        here, x = core.current_stream(), self.first(x)
        core.wait_for(3, here)
        with stream(3):
            self.kept = self.b(x)
        a = self.a(x)
        core.wait_for(here, 3)
        return self.last(a + self.kept)


def ddp(model, group, algorithm=PowerSGD(2)):  # noqa: B008
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=20 * KB)
    register_comm_hook(wrapped, algorithm, message_bytes=0)
    return wrapped


def data_parallel(algorithm, **options):
    def wrap(model, group):
        return DataParallel(
            model, algorithm, process_group=group, bucket_cap_mb=20 * KB, first_bucket_mb=KB, message_bytes=0, **options
        )

    return wrap


WRAPPERS = {
    "DDP": ddp,
    "DataParallel(AllReduce)": data_parallel(AllReduce()),
    "DataParallel(PowerSGD)": data_parallel(PowerSGD(2)),
}


@cases.each(WRAPPERS)
def on_their_way(world, wrap):
    """Messages each time that the driver is given a bucket, and whether it is the last. Those before it have arrived when the next one is sent."""
    from tests.emulated.device import DEVICE, core

    model, seen, real = wrap(mlp(64, 96, 96, 96, 48).to(DEVICE), on_emulated_nccl()), [], Driver.add
    before = core.messages_on_their_way()  # of other cases

    def add(driver, *args, last, **kwargs):
        seen.append((core.messages_on_their_way() - before, last))
        real(driver, *args, last=last, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "add", add)
        for _ in range(3):
            seen.clear()
            model(torch.randn(16, 64).to(DEVICE)).square().mean().backward()
            model.zero_grad()
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_messages_travel_during_the_backward_pass(results, wrapper):
    for seen in results(f"on_their_way[{wrapper}]"):
        assert len(seen) > 2
        assert seen == [(min(i, 1), i == len(seen) - 1) for i in range(len(seen))]


SHARDED = ("hook_with_zero_step by element", "hook_with_zero_step_interleaved by element")


@cases.each(SHARDED)
def shards_on_their_way(world, name):
    """Messages each time that a sharded optimizer is given a bucket, in the last step."""
    from tests.emulated.device import DEVICE, core
    from tests.emulated.process_group import BACKEND

    group, seen, begin, add = on_emulated_nccl(), [], ShardedStep.begin, ShardedStep.add
    before = core.messages_on_their_way()

    def begun(step):
        begin(step)
        seen.append([])

    def added(step, gradients):
        seen[-1].append(core.messages_on_their_way() - before)
        add(step, gradients)

    with pytest.MonkeyPatch.context() as patch, native_collectives(BACKEND):
        patch.setattr(ShardedStep, "begin", begun)
        patch.setattr(ShardedStep, "add", added)
        train(WAYS[name], DEVICE, group)
    return seen[-1]


@pytest.mark.parametrize("name", SHARDED)
def test_shards_travel_during_the_backward_pass(results, name):
    for first, *others in results(f"shards_on_their_way[{name}]"):
        assert first == 0
        assert others
        assert all(others)


@cases.case
def captured(world):
    """A step that goes into a graph, in which times would be noted once and for all."""
    from tests.emulated.device import DEVICE, core, watched

    model, data = ddp(mlp(64, 64, 48).to(DEVICE), on_emulated_nccl()), torch.randn(16, 64).to(DEVICE)
    for captures in (False, False, False, True):
        watched.clear()
        core.capture(captures)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gradwire.torch_backend.engine.driver.capturing", lambda captures=captures: captures)
            model(data).square().mean().backward()
        core.capture(False)
        model.zero_grad()
    torch.Event(DEVICE, enable_timing=True).record(torch.accelerator.current_stream(DEVICE))
    seen = whats(watched.problems)
    core.capture(True)
    torch.Event(DEVICE, enable_timing=True).record(torch.accelerator.current_stream(DEVICE))
    data.sum().item()
    core.capture(False)
    return seen, whats(watched.problems)


def test_a_capture_notes_no_times(results):
    for seen, wrong in results("captured"):
        assert seen == []
        assert wrong == [
            "an event with a time is recorded in a capture",
            "the host waits in a capture: a value was read (item, bool, float)",
        ]


@cases.each(WRAPPERS)
def forward_on_two_streams(world, wrap):
    from tests.emulated.device import DEVICE, watched

    model = wrap(TwoStreams().to(DEVICE), on_emulated_nccl())
    for _ in range(3):
        model(torch.randn(16, 64).to(DEVICE)).square().mean().backward()
        model.zero_grad()
    return whats(watched.problems)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_forward_pass_on_two_streams(results, wrapper):
    assert results(f"forward_on_two_streams[{wrapper}]") == [[], []]


class Fails(torch.autograd.Function):
    now = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.now:
            raise RuntimeError("out of memory")
        return gradient


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 48)

    def forward(self, x):
        return self.b(Fails.apply(self.a(x)))


@contextmanager
def failing():
    Fails.now = True
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            yield
    finally:
        Fails.now = False


@cases.each({name: wrap for name, wrap in WRAPPERS.items() if name != "DDP"})  # which refuses to go on after a failure
def a_pass_after_one_that_failed(world, wrap):
    from tests.emulated.device import DEVICE, watched

    model = wrap(Fragile().to(DEVICE), on_emulated_nccl())
    data = torch.randn(16, 64).to(DEVICE)
    for fails in (False, False, True, False):
        loss = model(data).square().mean()
        if fails:
            with failing():
                loss.backward()
        else:
            loss.backward()
        model.zero_grad()
    return whats(watched.problems)


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "DDP"])
def test_a_pass_after_one_that_failed_leaves_its_messages_alone(results, wrapper):
    assert results(f"a_pass_after_one_that_failed[{wrapper}]") == [[], []]


@cases.case
def consolidated(world):
    """Two optimizers with the same gradients, one of them on the device; and what was pickled on the way."""
    from tests.emulated.device import DEVICE

    group = on_emulated_nccl()
    states, devices = [], set()
    real = {name: getattr(dist, name) for name in ("gather_object", "all_gather_object")}

    def seen(name):
        def call(*args, **kwargs):
            devices.update(t.device.type for t in tensors_in(args))
            return real[name](*args, **kwargs)

        return call

    for device, of in ((DEVICE, group), (torch.device("cpu"), world.group)):
        model = mlp(16, 12, 8).to(device)
        optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.1, process_group=of)
        loss_on(16)(lambda x, model=model, device=device: model(x.to(device)).cpu(), 0, 0).backward()
        optimizer.step()
        for name in real:
            setattr(dist, name, seen(name))
        try:
            states.append((optimizer.consolidated_state_dict(), optimizer.consolidated_state_dict(to=None)))
        finally:
            for name, function in real.items():
                setattr(dist, name, function)
        optimizer.load_state_dict(states[-1][1])
    return states, devices


def tensors_in(x):
    if isinstance(x, torch.Tensor):
        return [x]
    values = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return [t for value in values for t in tensors_in(value)]


def test_a_consolidated_state_travels_by_the_cpu(results):
    """A pickled tensor comes to life on the sender's device, which the receiver may not have, and on which it would keep memory."""
    for (on_device, on_cpu), devices in results("consolidated"):
        assert devices == {"cpu"}
        assert same_bits(on_device, on_cpu)


@cases.case
def outer_parameters_on_the_host(world):
    """Two steps of DiLoCo, here and on the CPU: where its memory is, and what it is."""
    from tests.emulated.device import DEVICE, watched

    states, memory = [], []
    for device, of in ((DEVICE, on_emulated_nccl()), (torch.device("cpu"), world.group)):
        model = mlp(16, 12, 8).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = local_sgd(model, optimizer, diloco(2, overlap=1), process_group=of, outer_device="cpu")
        watched.clear()
        for step in range(3):
            optimizer.zero_grad()
            loss_on(16)(lambda x, model=model, device=device: model(x.to(device)).cpu(), 0, step).backward()
            optimizer.step()
        memory += [x for m in handle._memory.state.tensors.values() for x in m.values()] if device == DEVICE else []
        handle.synchronize()
        states.append(handle.state_dict())
        handle.load_state_dict(handle.rank_state_dict())
        assert next(iter(handle.outer_parameters().values())).device.type == device.type
    return states, {(x.device.type, x.is_pinned()) for x in memory}, whats(watched.problems)


def test_outer_parameters_may_be_on_the_host(results):
    for (on_device, on_cpu), places, problems in results("outer_parameters_on_the_host"):
        assert places == {("cpu", True)}
        assert on_device.keys() == on_cpu.keys()
        for name, memory in on_cpu["tensors"].items():
            for key, x in memory.items():
                assert torch.allclose(on_device["tensors"][name][key], x, rtol=1e-4, atol=1e-6)
        assert problems == []


@cases.case
def memory_of_a_gathered_state(world):
    from tests.emulated.device import DEVICE, core

    widths = (64,) * 9  # eight equal matrices
    model = mlp(*widths, bias=False).to(DEVICE)
    wrapped = DistributedDataParallel(model, process_group=on_emulated_nccl())
    handle = register_comm_hook(wrapped, PowerSGD(2))
    wrapped(torch.randn(4, 64).to(DEVICE)).square().mean().backward()
    core.memory()
    _, before = core.memory()
    handle.gathered_state_dict()
    peak, _ = core.memory()
    return (peak - before) / (64 * 64 * 4)


def test_a_gathered_state_takes_room_for_one_tensor(results):
    """In float64, and once more in transit; not for all eight of them."""
    assert max(results("memory_of_a_gathered_state")) < 6


@cases.case
def memory_of_uneven_shards(world):
    """One rank owns all of a vector, or nearly all. Its average, and what that took besides the vector, in units of it."""
    from tests.emulated.device import DEVICE, core
    from tests.emulated.process_group import BACKEND

    group = on_emulated_nccl()
    with native_collectives(BACKEND):
        collectives = Collectives(ProcessGroups(group), TorchOps(DEVICE))
        collectives._exchange(None)
    seen = []
    for counts in ((1000, 0), (600, 400), (0, 1000)):
        x = torch.full((1000,), float(world.rank + 1), device=DEVICE)
        core.memory()
        _, before = core.memory()
        (own,) = collectives.perform(ReduceScatter((x,), (counts,))).wait()
        peak, _ = core.memory()
        seen.append((own.cpu(), (peak - before) / x.nbytes))
    return seen


def test_a_rank_that_owns_much_needs_no_room_for_everybodys_addends(results):
    for rank, seen in enumerate(results("memory_of_uneven_shards")):
        for (own, extra), counts in zip(seen, ((1000, 0), (600, 400), (0, 1000)), strict=True):
            assert own.tolist() == [1.5] * counts[rank]
            assert extra < 0.1
