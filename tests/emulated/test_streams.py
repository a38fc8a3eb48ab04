"""The emulated accelerator notices what it is there for; and what gradwire does in the odd places
of a training loop is ordered.

Odd places: a forward pass on two streams, a backward pass after one that failed, checkpoints of
what lies on the device.
"""

import os
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwire import AllReduce, PowerSGD, diloco
from gradwire.core.ops import Spec
from gradwire.core.protocol.halves import ReduceScatter
from gradwire.torch_backend import DataParallel, ZeroOptimizer, local_sgd, register_comm_hook
from gradwire.torch_backend.advise.compare.opaque import OpaqueReplicas
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.local_sgd.elastic.handle import ElasticHandle
from gradwire.torch_backend.monitor.watcher import SkippedSteps
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.setup.assumptions import Assumptions
from gradwire.torch_backend.state import means
from gradwire.torch_backend.zero.sharded_step import ShardedStep
from tests.emulated.ways import WAYS, native_collectives, train
from tests.torch.compare import same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases

if "RANK" in os.environ:  # it renames torch's PrivateUse1 for the life of the process
    from tests.emulated.device import DEVICE, core, event, stream, watched
    from tests.emulated.process_group import BACKEND

cases = Cases(__file__, ranks=2)
KB = 1 / 1024


def on_emulated_nccl():
    """A process group, of all ranks; and nothing has happened yet."""
    group = dist.new_group(backend=BACKEND)
    watched.clear()
    return group


def problems():
    return [event.what for event in watched.problems]


# --- the emulation itself -----------------------------------------------------------------------


@cases.case
def test_races_are_reported(world):
    def seen(second, *, wait=False):
        watched.clear()
        x = torch.zeros(8, device=DEVICE)
        with stream(3):
            if wait:
                core.wait_for(3, 0)
            second(x)
        core.wait_for(0, 3)
        return problems()

    assert seen(lambda x: x + 1) == ["race: add reads on stream 3 what zero_ writes on stream 0"]
    assert seen(lambda x: x.fill_(1)) == [
        "race: fill_ writes on stream 3 what zero_ writes on stream 0"
    ]
    assert seen(lambda x: x.fill_(1), wait=True) == []
    assert seen(lambda x: torch.zeros(8, device=DEVICE).fill_(1)) == []


@cases.case
def test_memory_that_another_stream_still_uses_is_not_used_again(world):
    def seen(*, record=False, wait=""):
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
        return problems()

    assert seen() == [
        "memory of stream 0 is freed and may be used by zero_ while fill_ uses it on stream 3"
    ]
    assert seen(record=True) == seen(wait="before") == seen(wait="after") == []


@cases.case
def test_waits_of_the_host_are_counted(world):
    x, on_device, pinned = (
        torch.ones(4).to(DEVICE),
        torch.tensor(0.0).to(DEVICE),
        torch.ones(4).pin_memory(),
    )

    def waits(action):
        watched.clear()
        action()
        return len(watched.waits)

    def wait_for_an_event(operations):
        now = event()
        for _ in range(operations):
            x.add_(0)
        now.synchronize()

    waiting = {
        "item": lambda: x[0].item(),
        "an event": lambda: wait_for_an_event(0),
        "bool": lambda: bool((x > 0).all()),
        "equal": lambda: torch.equal(x, x),
        "unique": lambda: torch.unique(x),
        "cpu": lambda: x.cpu(),
        "a list": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
        "where with a scalar of the host": lambda: torch.where(x > 0, x, torch.tensor(0.0)),
        "not blocking, not pinned": lambda: torch.ones(4).to(DEVICE, non_blocking=True),
    }
    free = {
        "an event of long ago": lambda: wait_for_an_event(100),
        "not blocking, pinned": lambda: pinned.to(DEVICE, non_blocking=True),
        "where with a scalar of the device": lambda: torch.where(x > 0, x, on_device),
        "a product with a scalar of the host": lambda: x * torch.tensor(2.0),
        "kernels": lambda: torch.linalg.vector_norm(x + x).sqrt(),
    }
    assert {name for name, action in (waiting | free).items() if not waits(action)} == set(free)


@cases.case
def test_what_cuda_refuses_to_pin_and_rounds_is_refused_and_rounded(world):
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(4, device=DEVICE).pin_memory()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(4, device=DEVICE, pin_memory=True)
    assert torch.empty(4, device="cpu", pin_memory=True).is_pinned()
    third, seven = torch.tensor(1 / 3), torch.full((1,), 7.0, dtype=torch.bfloat16, device=DEVICE)
    nearest, of_a_rounded_third = 2.328125, 2.34375
    assert (seven * third).item() == nearest
    assert (seven * third.to(DEVICE)).item() == of_a_rounded_third
    assert torch._foreach_mul([seven], third.to(DEVICE))[0].item() == of_a_rounded_third


@cases.case
def test_streams_see_what_came_to_pinned_memory_before(world):
    """To the host and back, and then to the host again: on one stream, or on another that does not
    wait."""

    def seen(second):
        pinned, x = torch.zeros(4).pin_memory(), torch.ones(4, device=DEVICE)
        core.wait_for(second, 0)
        watched.clear()
        pinned.copy_(x, non_blocking=True)
        with stream(second):
            back = pinned.to(DEVICE, non_blocking=True)
            pinned.copy_(back + 1, non_blocking=True)
            found = back.tolist()
        torch.accelerator.synchronize(DEVICE)
        return found, pinned.tolist(), problems()

    assert seen(0) == ([1.0] * 4, [2.0] * 4, [])
    assert seen(1)[0] != [1.0] * 4


@cases.case
def test_copies_by_pinned_memory_take_time(world):
    # Also where what is written is what was there.
    early = ["pinned memory was written while copy_ read it"]
    for value, wait, expected in ((2, True, []), (2, False, early), (1, False, early)):
        pinned = torch.ones(4).pin_memory()
        watched.clear()
        there = pinned.to(DEVICE, non_blocking=True)
        if wait:
            event().synchronize()
        pinned.fill_(value)
        back, now = there.to("cpu", non_blocking=True), event()
        assert back.isnan().all()
        assert not now.query()
        for _ in range(100):
            there.add_(0)
        assert now.query()
        assert back.tolist() == [1.0] * 4
        assert problems() == expected


@cases.case
def test_an_event_on_another_device_is_reported(world):
    watched.clear()
    torch.Event(DEVICE).record()  # on a stream of the current device, on which no tensor is
    core.set_device(DEVICE.index)
    torch.Event(DEVICE).record()
    core.set_device(0)
    assert problems() == ["an event is recorded on another device than that of the tensors"]


@cases.case
def test_results_are_hidden_until_somebody_waits(world):
    group, x = on_emulated_nccl(), torch.full((4,), float(world.rank + 1)).to(DEVICE)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert core.host_alias(x).isnan().all()
    work.wait()
    assert x.tolist() == [3.0] * 4
    assert problems() == []
    work = dist.all_reduce(x, group=group, async_op=True)
    x.fill_(2)
    work.wait()
    assert {"race: fill_ writes", "memory of allreduce was written while it was on its way"} <= {
        what.split(" on stream")[0] for what in problems()
    }
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=group)


@cases.case
def test_wrong_launches_are_refused(world):
    """Where NCCL would wait for ever, or sometimes."""
    group, x = on_emulated_nccl(), torch.ones(4).to(DEVICE)
    with pytest.raises(RuntimeError, match="another launches something else"):
        dist.all_reduce(x[: 2 + world.rank], group=group)
    future = dist.all_reduce(x, group=group, async_op=True).get_future()
    with pytest.raises(RuntimeError, match="launched from a callback"):
        future.then(lambda _: dist.all_reduce(x, group=group)).wait()
    dist.all_reduce(x, group=group)
    assert x.tolist() == [4.0] * 4


# --- times --------------------------------------------------------------------------------------


@cases.case
def test_times_on_a_device_are_those_of_its_stream_and_nobody_waits_for_them(world):
    """An operation takes a millisecond."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48)).to(DEVICE)
    wrapped = DistributedDataParallel(
        model, process_group=on_emulated_nccl(), bucket_cap_mb=20 * KB
    )
    handle = register_comm_hook(wrapped, PowerSGD(2), message_bytes=0)
    own, real, notes = [], handle._driver.add, handle._driver.watch.times

    def add(*args, **kwargs):
        core.operations()
        real(*args, **kwargs)
        own[-1:] = [own[-1] + sum(core.operations().values())] if own else []

    data, finished = torch.randn(16, 64).to(DEVICE), []
    handle._driver.add, notes._steps = add, deque(maxlen=4)
    for _ in range(7):
        own.append(0)
        wrapped(data).square().mean().backward()
        watched.clear()
        finished.append(notes.read().steps)
        assert not watched.waits
        model.zero_grad()
    stats = handle.stats()
    assert 1e3 * (stats.compress_seconds + stats.wait_seconds) == pytest.approx(sum(own[-4:]) / 4)
    assert stats.step_seconds > stats.compress_seconds > 0
    # not all had been finished
    assert any(steps < min(i, 4) for i, steps in enumerate(finished, 1))


@cases.case
def test_a_count_is_read_when_it_has_come(world):
    """While the device is behind by more than the ten steps between two looks of the host: all
    steps are skipped."""
    counted, seen = SkippedSteps("an algorithm", DEVICE, 0, seen_by_host=False), []
    counted._run.seen = lambda steps, skipped: seen.append((steps, skipped))
    finite = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for step in range(1, 201):
        counted.add(finite)
        counted.look(step)
    assert seen
    assert all(skipped == steps for steps, skipped in seen)


# --- odd places ---------------------------------------------------------------------------------


class TwoStreams(nn.Module):
    """One branch of the forward pass on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(48, 8)
        self.a, self.b = nn.Linear(64, 48), nn.Linear(64, 48)

    def forward(self, x):
        here, x = core.current_stream(), self.first(x)
        core.wait_for(3, here)
        with stream(3):
            self.kept = self.b(x)
        a = self.a(x)
        core.wait_for(here, 3)
        return self.last(a + self.kept)


def ddp(model, group):
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=20 * KB)
    register_comm_hook(wrapped, PowerSGD(2), message_bytes=0)
    return wrapped


def data_parallel(algorithm):
    buckets = {"bucket_cap_mb": 20 * KB, "first_bucket_mb": KB, "message_bytes": 0}
    return lambda model, group: DataParallel(model, algorithm, process_group=group, **buckets)


WRAPPERS = {
    "DDP": ddp,
    "DataParallel(AllReduce)": data_parallel(AllReduce()),
    "DataParallel(PowerSGD)": data_parallel(PowerSGD(2)),
}
#: DDP refuses to go on after a pass that failed.
OURS = {name: wrap for name, wrap in WRAPPERS.items() if name != "DDP"}


@cases.each(WRAPPERS)
def test_messages_travel_during_the_backward_pass(world, wrap):
    """Those before it have arrived when the next one is sent, each time that the driver is given a
    bucket."""
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
    assert len(seen) > 2
    assert seen == [(min(i, 1), i == len(seen) - 1) for i in range(len(seen))]


@cases.each(("hook_with_zero_step by element", "hook_with_zero_step_interleaved by element"))
def test_shards_travel_during_the_backward_pass(world, name):
    """Each time that a sharded optimizer is given a bucket, in the last step."""
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
    first, *others = seen[-1]
    assert first == 0
    assert others
    assert all(others)


@cases.case
def test_a_capture_notes_no_times(world):
    """A step that goes into a graph, in which times would be noted once and for all."""
    model, data = (
        ddp(mlp(64, 64, 48).to(DEVICE), on_emulated_nccl()),
        torch.randn(16, 64).to(DEVICE),
    )
    for captures in (False, False, False, True):
        watched.clear()
        core.capture(captures)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "gradwire.torch_backend.engine.step.capturing", lambda captures=captures: captures
            )
            model(data).square().mean().backward()
        core.capture(False)
        model.zero_grad()
    torch.Event(DEVICE, enable_timing=True).record(torch.accelerator.current_stream(DEVICE))
    assert problems() == []
    core.capture(True)
    torch.Event(DEVICE, enable_timing=True).record(torch.accelerator.current_stream(DEVICE))
    data.sum().item()
    core.capture(False)
    waits = "the host waits in a capture: a value was read (item, bool, float)"
    assert problems() == ["an event with a time is recorded in a capture", waits]


@cases.each(WRAPPERS)
def test_a_forward_pass_on_two_streams(world, wrap):
    model = wrap(TwoStreams().to(DEVICE), on_emulated_nccl())
    for _ in range(3):
        model(torch.randn(16, 64).to(DEVICE)).square().mean().backward()
        model.zero_grad()
    assert problems() == []


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


@cases.each(OURS)
def test_a_pass_after_one_that_failed_leaves_its_messages_alone(world, wrap):
    model, data = wrap(Fragile().to(DEVICE), on_emulated_nccl()), torch.randn(16, 64).to(DEVICE)
    for Fails.now in (False, False, True, False):
        loss = model(data).square().mean()
        with pytest.raises(RuntimeError, match="out of memory") if Fails.now else nullcontext():
            loss.backward()
        model.zero_grad()
    assert problems() == []


def looked_at(function, devices):
    def call(*args, **kwargs):
        devices.update(x.device.type for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        return function(*args, **kwargs)

    return call


@cases.case
def test_a_consolidated_state_travels_by_the_cpu(world):
    """A pickled tensor comes to life on the sender's device, which the receiver may not have, and
    on which it would keep memory."""
    states, devices = [], set()
    for device, of in ((DEVICE, on_emulated_nccl()), (torch.device("cpu"), world.group)):
        model = mlp(16, 12, 8).to(device)
        optimizer = ZeroOptimizer(
            model.named_parameters(), torch.optim.Adam, lr=0.1, process_group=of
        )
        loss_on(16)(
            lambda x, model=model, device=device: model(x.to(device)).cpu(), 0, 0
        ).backward()
        optimizer.step()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("gather_object", "all_gather_object"):
                patch.setattr(dist, name, looked_at(getattr(dist, name), devices))
            states.append(
                (optimizer.consolidated_state_dict(), optimizer.consolidated_state_dict(to=None))
            )
        optimizer.load_state_dict(states[-1][1])
    assert devices == {"cpu"}
    assert same_bits(*states)


@cases.case
def test_outer_parameters_may_be_on_the_host(world):
    """Two steps of DiLoCo, here and on the CPU: where its memory is, and what it is."""
    states = []
    for device, of in ((DEVICE, on_emulated_nccl()), (torch.device("cpu"), world.group)):
        model = mlp(16, 12, 8).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = local_sgd(
            model, optimizer, diloco(2, overlap=1), process_group=of, outer_device="cpu"
        )
        watched.clear()
        for step in range(3):
            optimizer.zero_grad()
            loss_on(16)(
                lambda x, model=model, device=device: model(x.to(device)).cpu(), 0, step
            ).backward()
            optimizer.step()
        if device == DEVICE:
            memory = [x for m in handle._memory.state.tensors.values() for x in m.values()]
            assert {(x.device.type, x.is_pinned()) for x in memory} == {("cpu", True)}
        handle.synchronize()
        states.append(handle.state_dict())
        handle.load_state_dict(handle.rank_state_dict())
        assert next(iter(handle.outer_parameters().values())).device.type == device.type
    on_device, on_cpu = states
    assert on_device.keys() == on_cpu.keys()
    for name, memory in on_cpu["tensors"].items():
        for key, x in memory.items():
            assert torch.allclose(on_device["tensors"][name][key], x, rtol=1e-4, atol=1e-5)
    assert problems() == []


@cases.case
def test_a_users_step_in_compare_runs_where_the_user_is(world):
    """On the caller's device and stream, in the thread of each replica: a backward pass that ended
    in torch's own would make the others wait for it for ever."""
    x, seen = torch.ones(4, 64, device=DEVICE), []

    def now():
        return (
            torch.accelerator.current_device_index(),
            core.current_stream(),
            torch.is_autocast_enabled("cpu"),
        )

    def make(replica, replicas):
        model = mlp(64, 48, 32).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            seen.append(now())
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return model, optimizer, step

    watched.clear()
    core.set_device(DEVICE.index)
    try:
        core.wait_for(3, 0)
        with stream(3), torch.autocast("cpu", torch.bfloat16):
            before = now()
            replicas = OpaqueReplicas(make, PowerSGD(2), 2, 0)
            losses = [replicas.step() for _ in range(3)]
        core.wait_for(0, 3)
    finally:
        core.set_device(0)
    assert seen == [before] * 6 == [(DEVICE.index, 3, True)] * 6
    assert losses[2] < losses[0]
    assert problems() == []


@cases.case
def test_a_newcomer_is_given_copies_that_take_no_room_on_the_device(world):
    model = mlp(*(64,) * 5).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64, device=DEVICE)).sum().backward()
    optimizer.step()
    gives, parameters = [], dict(model.named_parameters())
    manager = SimpleNamespace(register_state_dict_fn=lambda key, receive, give: gives.append(give))
    quorum = SimpleNamespace(device=DEVICE, manager=manager, asks="")
    specs = {name: Spec(tuple(p.shape), "float32") for name, p in parameters.items()}
    state = PowerSGD(2).init(TorchOps(DEVICE), specs)
    assumed = Assumptions("elastic", parameters, {}, model, optimizer, "")
    handle = ElasticHandle(PowerSGD(2), state, parameters, {}, optimizer, quorum, dict, assumed)
    core.memory()
    _, before = core.memory()
    given = gives[0]()
    peak, _ = core.memory()
    assert peak == before
    assert {x.device.type for x in tree_leaves(given) if isinstance(x, torch.Tensor)} == {"cpu"}
    theirs = tree_map_only(torch.Tensor, lambda x: x.cpu(), optimizer.state_dict())
    assert same_bits(given["optimizer"], theirs)
    assert handle.steps == 0


@cases.case
def test_a_gathered_state_takes_room_for_one_tensor(world):
    """In float64, and once more in transit; not for all eight of them, where a message has room for
    one."""
    model = mlp(*(64,) * 9, bias=False).to(DEVICE)
    wrapped = DistributedDataParallel(model, process_group=on_emulated_nccl())
    handle = register_comm_hook(wrapped, PowerSGD(2))
    wrapped(torch.randn(4, 64).to(DEVICE)).square().mean().backward()
    core.memory()
    _, before = core.memory()
    with mock.patch.object(means, "SUMMED_AT_ONCE", 64 * 64):
        handle.gathered_state_dict()
    peak, _ = core.memory()
    assert (peak - before) / (64 * 64 * 4) < 6


@cases.case
def test_a_rank_that_owns_much_needs_no_room_for_everybodys_addends(world):
    """All of a vector, or nearly all; besides the vector."""
    with native_collectives(BACKEND):
        collectives = Collectives(ProcessGroups(on_emulated_nccl()), TorchOps(DEVICE))
        collectives.exchange(None)
    for counts in ((1000, 0), (600, 400), (0, 1000)):
        x = torch.full((1000,), float(world.rank + 1), device=DEVICE)
        core.memory()
        _, before = core.memory()
        (own,) = collectives.perform(ReduceScatter((x,), (counts,))).wait()
        peak, _ = core.memory()
        assert own.tolist() == [1.5] * counts[world.rank]
        assert (peak - before) / x.nbytes < 0.1
