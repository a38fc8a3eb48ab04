"""Every way to use gradwire in a training loop, as `Way`s that run on any device: on the emulated
accelerator, and with Gloo to compare.

Each algorithm, wrapper, hook and optimizer form; and what docs/works-together.md says goes with
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD, TwoLevel, WireDtype
from gradwire.torch_backend.engine.groups import point_to_point
from tests.methods import METHODS, VARIANTS
from tests.parity import cases
from tests.parity.given import GivenGradients
from tests.torch.everything import Everything
from tests.torch.models import TAKEN, Branches, Half

KB = 1 / 1024
#: Several buckets, in several groups: of a model of 20 KB.
BUCKETS = {"bucket_cap_mb": 5 * KB}
MESSAGE_BYTES = 512
#: A step in which one rank's loss is infinite, where there is a GradScaler.
OVERFLOW = 3
#: Of the distance that weights travel: exact but for the order of sums and the way of
#: orthonormalizing.
EXACT = 1e-4
#: Messages are rounded to 8 bits, in another order.
ROUNDED = 0.02
#: Forty steps: what a last place makes of a weight grows tenfold in every fifteen of this training.
#: In float32 sums in another order come to 9e-5 on the host, those of an H100 to 6e-4.
GROWN = 0.02
#: Weights are, which move by a few units of their last bit.
COARSE = 0.1
#: Numbers from 0 to n, of which a program may take the memory; and ones that signs are compared
#: with.
IOTA, ONES = frozenset({"arange"}), frozenset({"fill_"})
#: Of `DataParallel`, which learns the order of gradients from the first replica.
LEARNS = 2
#: Smooth near zero: gradients that are rounding noise stay noise, and are not turned into steps.
ADAMW = {"lr": 0.1, "eps": 0.1}


class OfTheTable(GivenGradients):
    """The parameters of the parity table, and the gradients that suit a method: whatever is lost,
    rounding does not decide what."""

    def __init__(self, method):
        super().__init__({name: torch.ones(shape) for name, shape in cases.SHAPES.items()})
        self.method, self.step = method, 0

    def forward(self, x):
        given = cases.gradients(self.method, self.step, dist.get_rank())
        total = super().forward(
            {name: _there(torch.from_numpy(g), x.device) for name, g in given.items()}
        )
        self.step += 1
        # the loss's derivative by `total` is 1
        return torch.sin(3 * x[:, :1]) + 0.5 + (total - total.detach())


def _there(x, device):
    """Without a wait of the host, in which what gradwire has forgotten to wait for would arrive."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def many():
    """Equal layers, more of them than are taken one by one."""
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def layers():
    return nn.Sequential(
        nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 33), nn.ReLU(), nn.Linear(33, 8)
    )


#: (model, process group, scaler) → wrapped model, optimizer.
Wrap = Callable[[Any, dist.ProcessGroup, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Way:
    """A way to train."""

    #: The model and its optimizer; and what makes the model.
    wrap: Wrap
    model: Callable[[], nn.Module] = layers
    #: Of parameters and data.
    dtype: torch.dtype = torch.float32
    #: How far apart weights may end here and with Gloo on the CPU, as a part of how far they have
    #: come.
    tolerance: float = EXACT
    #: Of the host, that gradwire may cause in a step; and besides in the first two steps together.
    waits: int = 0
    waits_at_first: int = 0
    #: Kernels by which gradwire makes constants in every step.
    makes: frozenset[str] = frozenset()
    #: All but the last under `no_sync`.
    micro_batches: int = 1
    #: The loss is scaled, and infinite once on the last rank; gradients are clipped to a norm.
    scaler: bool = False
    max_norm: float | None = None
    #: Forward passes take some of the model's branches, see `tests.torch.models.Branches`.
    branches: bool = False
    #: Collectives that only NCCL has are used, as on NCCL.
    native: bool = True
    #: Of the optimizer, where branches do not say them.
    steps: int = 5
    #: Messages that are on their way in the end.
    left: int = 0


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def plain(**options):
    """DDP, without a hook."""

    def wrap(model, group, scaler):
        return DistributedDataParallel(model, process_group=group, **BUCKETS, **options), sgd(model)

    return wrap


def hooked(algorithm, *, message_bytes=MESSAGE_BYTES, **options):
    """DDP with `register_comm_hook`."""

    def wrap(model, group, scaler):
        ddp = DistributedDataParallel(model, process_group=group, **BUCKETS | options)
        gw.register_comm_hook(ddp, algorithm, message_bytes=message_bytes, grad_scaler=scaler)
        return ddp, sgd(model)

    return wrap


def named(hook, state=lambda group: group):
    """DDP with a hook by its torch name."""

    def wrap(model, group, scaler):
        ddp = with_ddp(model, group)
        ddp.register_comm_hook(state(group), hook)
        return ddp, sgd(model)

    return wrap


def powersgd_state(group):
    return gw.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=1)


def data_parallel(algorithm, **options):
    def wrap(model, group, scaler):
        buckets = BUCKETS | {"first_bucket_mb": KB}
        wrapped = gw.DataParallel(
            model, algorithm, process_group=group, grad_scaler=scaler, **buckets, **options
        )
        return wrapped, sgd(model)

    return wrap


def averager(algorithm, **options):
    """No wrapper: gradients are averaged before the optimizer's step."""

    def wrap(model, group, scaler):
        average, optimizer = (
            gw.Averager(algorithm, dict(model.named_parameters()), group, **options),
            sgd(model),
        )

        def before(*_):
            average({name: p.grad for name, p in model.named_parameters()})

        optimizer.register_step_pre_hook(before)
        return model, optimizer

    return wrap


def everything(door):
    """An algorithm that asks for whatever there is, in one group of all ranks besides, in another
    order."""

    def wrap(model, group, scaler):
        ranks = tuple(reversed(range(dist.get_world_size(group))))
        return door(Everything((ranks,)), message_bytes=0)(model, group, scaler)

    return wrap


def with_ddp(model, group):
    return DistributedDataParallel(model, process_group=group, **BUCKETS)


def sharded(model, group, **options):
    options |= {"process_group": group, **ADAMW, **BUCKETS}
    return gw.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, **options)


def zero(**options):
    """DDP, and an optimizer with sharded state beside it; or alone, if it averages gradients
    itself."""

    def wrap(model, group, scaler):
        optimizer = sharded(model, group, **options)
        return model if options.get("average_gradients", False) else with_ddp(
            model, group
        ), optimizer

    return wrap


def zero_step(
    make=gw.hook_with_zero_step,
    hook=gw.allreduce_hook,
    state=lambda group: group,
    *,
    spread=False,
    **options,
):
    """An optimizer that steps inside DDP's hook."""

    def wrap(model, group, scaler):
        ddp, optimizer = with_ddp(model, group), sharded(model, group, **options)
        scaling = {"grad_scaler": scaler} if scaler else {}
        ddp.register_comm_hook(state(group), make(hook, ddp, optimizer, spread, **scaling))
        return ddp, optimizer

    return wrap


def local(schedule, *, nan_in=None, **options):
    """Local SGD. `nan_in`: the step in which the last rank's gradients are NaN."""

    def wrap(model, group, scaler):
        ddp = with_ddp(model, group)
        optimizer, steps = torch.optim.AdamW(model.parameters(), **ADAMW), count()

        def spoil(*_):
            if next(steps) == nan_in and dist.get_rank() == dist.get_world_size() - 1:
                for p in model.parameters():
                    p.grad.fill_(math.nan)

        optimizer.register_step_pre_hook(spoil)
        fitting = schedule(dist.get_world_size(group)) if callable(schedule) else schedule
        gw.local_sgd(ddp, optimizer, fitting, message_bytes=MESSAGE_BYTES, **options)
        return ddp, optimizer

    return wrap


def one_by_one(size):
    """Subgroups: the first rank, and the others."""
    return ((0,), tuple(range(1, size))) if size > 1 else ((0,),)


def post_local(make_averager):
    def wrap(model, group, scaler):
        ddp = with_ddp(model, group)
        state = gw.PostLocalSGDState(group, None, 2, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(state, gw.post_localSGD_hook)
        return ddp, gw.PostLocalSGDOptimizer(sgd(model), make_averager(group))

    return wrap


def hierarchical(group):
    size = dist.get_world_size(group)
    periods = {2: 1, 4: size} if size > 1 else {2: 1}
    return gw.HierarchicalModelAverager(periods, warmup_steps=2, process_group=group)


def _zero_ways():
    inside, interleaved = "hook_with_zero_step", "hook_with_zero_step_interleaved"
    ways, late = {}, gw.hook_with_zero_step_interleaved
    for shard in ("element", "parameter", "bucket"):
        by = f"by {shard}"
        ways[f"ZeroOptimizer {by}"] = Way(zero(shard=shard))
        ways[f"ZeroOptimizer {by}, averaging"] = Way(zero(shard=shard, average_gradients=True))
        ways[f"{inside} {by}"] = Way(zero_step(shard=shard))
        ways[f"{inside} {by}, all-to-all"] = Way(zero_step(shard=shard), native=False)
        ways[f"{interleaved} {by}"] = Way(zero_step(late, shard=shard))
    return ways | {
        # The host reads whether the step is finite: the optimizer's step is not called otherwise.
        f"{inside}, GradScaler": Way(zero_step(), scaler=True, waits=1),
        f"{inside}, max_grad_norm": Way(zero_step(max_grad_norm=0.01)),
        "ZeroOptimizer, max_grad_norm": Way(zero(max_grad_norm=0.01)),
        "ZeroOptimizer, GradScaler": Way(zero(), scaler=True),
        "ZeroOptimizer, gradient accumulation": Way(zero(), micro_batches=2),
    }


def of_the_table(name):
    """Some steps, of which two compress and come after the first ones."""
    algorithm = METHODS[name].algorithm
    steps = max(5, algorithm.start_step + 2)
    makes = frozenset[str]() if isinstance(algorithm, PowerSGD) else IOTA | ONES
    return Way(hooked(algorithm), partial(OfTheTable, name), steps=steps, makes=makes)


def crossed(wrap, algorithm, waits_at_first=0):
    """A method with a scaler, behind a door: without one a step is what it is there in four of
    five."""
    return Way(
        wrap(algorithm),
        scaler=True,
        tolerance=COARSE,
        waits_at_first=waits_at_first,
        makes=IOTA | ONES,
    )


WAYS = {
    "plain DDP": Way(plain()),
    "plain DDP, unused parameters": Way(plain(find_unused_parameters=True), Branches, branches=True),
    # Every method of the list; and options that it leaves out. Of a half step the phase decides,
    # which the host reads: a copy that was begun when the step before ended.
    **{name: of_the_table(name) for name in cases.TORCH_METHODS if name not in VARIANTS or name in cases.DIFFERENT},
    "PowerSGD": Way(hooked(PowerSGD(2))),
    "PowerSGD, one message": Way(hooked(PowerSGD(2), message_bytes=1 << 20)),
    "PowerSGD, a message per bucket": Way(hooked(PowerSGD(2), message_bytes=0)),
    "PowerSGD, float64 state": Way(hooked(PowerSGD(2, state_dtype="float64"))),
    "WireDtype(PowerSGD)": Way(hooked(WireDtype(PowerSGD(2), "bfloat16")), tolerance=ROUNDED),
    "WireDtype(AllReduce)": Way(hooked(WireDtype(AllReduce(), "float16")), tolerance=ROUNDED),
    "own compressor": Way(hooked(Half())),
    "two levels": Way(hooked(TwoLevel(PowerSGD(2), "node"))),
    "two levels, a message per bucket": Way(hooked(TwoLevel(PowerSGD(2), "node"), message_bytes=0)),
    # It branches on an average of each tensor, which the host has to read.
    "everything that can be asked": Way(everything(hooked), waits=6, makes=IOTA),
    "everything that can be asked, all-to-all": Way(everything(hooked), native=False, waits=6, makes=IOTA),
    "DataParallel, everything that can be asked": Way(everything(data_parallel), waits=6, waits_at_first=LEARNS, makes=IOTA),
    # DDP's options, and what a loop does besides.
    "DDP, views": Way(hooked(PowerSGD(2), gradient_as_bucket_view=True)),
    "DDP, unused parameters looked for": Way(hooked(PowerSGD(2), find_unused_parameters=True)),
    "DDP, unused parameters": Way(hooked(PowerSGD(2), find_unused_parameters=True), Branches, branches=True),
    "DDP, accumulation": Way(hooked(PowerSGD(2)), micro_batches=3),
    "DDP, GradScaler": Way(hooked(PowerSGD(2)), scaler=True),
    "DDP, GradScaler, nothing remembered": Way(hooked(WireDtype(AllReduce(), "bfloat16")), scaler=True, tolerance=ROUNDED),
    "DDP, clipping": Way(hooked(PowerSGD(2)), max_norm=0.01),
    "DDP, bfloat16": Way(hooked(PowerSGD(2)), dtype=torch.bfloat16, tolerance=COARSE),
    # torch's names.
    "allreduce_hook": Way(named(gw.allreduce_hook)),
    "powerSGD_hook": Way(named(gw.powerSGD_hook, powersgd_state)),
    "batched_powerSGD_hook": Way(named(gw.batched_powerSGD_hook, powersgd_state)),
    "post_localSGD_hook": Way(
        named(gw.post_localSGD_hook, lambda group: gw.PostLocalSGDState(group, group, start_localSGD_iter=2))
    ),
    "AllReduce x DDP x scaler": crossed(hooked, AllReduce()),
    "PowerSGD, half steps x DataParallel x scaler": crossed(data_parallel, PowerSGD(2, half_step=True), LEARNS),
    "TopK x DataParallel x scaler": crossed(data_parallel, gradwire.TopK(8, per=64), LEARNS),
    "two levels x DataParallel x scaler": crossed(data_parallel, TwoLevel(WireDtype(PowerSGD(2), "bfloat16"), "node"), LEARNS),
    "many memories, GradScaler": Way(
        hooked(gradwire.Quantize("int8"), message_bytes=1 << 20), many, scaler=True, tolerance=COARSE, makes=IOTA | ONES
    ),
    "PowerSGD, forty steps": Way(hooked(PowerSGD(2), message_bytes=1 << 20), steps=40, tolerance=GROWN),
    # The wrapper.
    "DataParallel(AllReduce)": Way(data_parallel(AllReduce()), waits_at_first=LEARNS),
    "DataParallel(PowerSGD)": Way(data_parallel(PowerSGD(2)), waits_at_first=LEARNS),
    "DataParallel(PowerSGD), a message per bucket": Way(data_parallel(PowerSGD(2), message_bytes=0), waits_at_first=LEARNS),
    "DataParallel(WireDtype(AllReduce))": Way(data_parallel(WireDtype(AllReduce(), "bfloat16")), tolerance=ROUNDED, waits_at_first=LEARNS),
    "DataParallel, unused parameters looked for": Way(data_parallel(PowerSGD(2), find_unused_parameters=True)),
    # Which of them found no use anywhere decides what has a gradient: the host has to know.
    "DataParallel, unused parameters": Way(
        data_parallel(PowerSGD(2), find_unused_parameters=True), Branches, branches=True, waits=1
    ),
    "DataParallel, accumulation": Way(data_parallel(AllReduce()), micro_batches=3, waits_at_first=LEARNS),
    "DataParallel, GradScaler": Way(data_parallel(PowerSGD(2)), scaler=True, waits_at_first=LEARNS),
    # Without a wrapper. The phase of a half step is asked for a few operations after it was copied,
    # as the model is small. After ten steps the host looks at how many were skipped.
    "Averager": Way(averager(PowerSGD(2, half_step=True)), steps=12, waits=1),
    "Averager, unused parameters": Way(averager(PowerSGD(2), unused=True), waits=1),
    # Optimizers with sharded state.
    **_zero_ways(),
    # Parameters that are averaged now and then. Whether the optimizer keeps weights was asked for a
    # step before the first averages, and ranks meet in the store.
    "local_sgd": Way(local(LocalSGD(period=2))),
    "local_sgd, moments": Way(local(LocalSGD(period=2), moments="average")),
    "local_sgd, subgroups": Way(local(lambda size: LocalSGD(period=3, start_step=1, subgroup=one_by_one(size)))),
    # as torch's: is the step skipped?
    "local_sgd, GradScaler": Way(local(LocalSGD(period=2)), scaler=True, waits=1),
    # With outer parameters the host asks after an average whether it was taken, and whether the
    # optimizer remembers inf or NaN.
    "diloco": Way(local(gradwire.diloco(2)), waits=1),
    "diloco, NaN once on one rank": Way(local(gradwire.diloco(2), nan_in=1), steps=8, waits=1),
    "diloco, fragments": Way(local(gradwire.diloco(2, fragments=2)), waits=1),
    "diloco, overlap": Way(local(gradwire.diloco(4, overlap=2, compressor=PowerSGD(2))), steps=6, makes=ONES, waits=1),
    "diloco, overlap, fragments": Way(local(gradwire.diloco(3, overlap=1, fragments=2, merge="progress")), waits=1),
    "diloco, two on their way": Way(local(gradwire.diloco(4, overlap=3, fragments=2)), many, steps=8, left=1),
    "diloco, on the host": Way(local(gradwire.diloco(2, compressor=PowerSGD(2)), outer_device="cpu"), waits=1),
    "diloco, on the host, overlap": Way(
        local(gradwire.diloco(4, overlap=2, fragments=2, compressor=PowerSGD(2)), outer_device="cpu"), steps=8, left=1, waits=1
    ),
    "diloco, eager": Way(local(gradwire.diloco(2, eager=True)), left=1, waits=1),
    "local_sgd, compressed": Way(local(LocalSGD(period=2, compressor=PowerSGD(2))), waits=1),
    "PeriodicModelAverager": Way(
        post_local(lambda group: gw.PeriodicModelAverager(2, warmup_steps=2, process_group=group))
    ),
    "HierarchicalModelAverager": Way(post_local(hierarchical)),
}  # fmt: skip


@dataclass
class Record:
    """Of a run how far all parameters have come, as one vector in float32; and by step, what was
    seen of it."""

    moved: Tensor
    seen: list[Any] = field(default_factory=list)


def train(way, device, group, stream_of_backward=nullcontext, look=list, defaults=nullcontext):
    """Some steps in a user's loop; the same data and weights on every device. `backward` is called
    in a context, and all but what makes model and data in another, `defaults`; `look` gives what
    was seen of the device since."""
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    model = way.model()
    model = (model.to(way.dtype) if way.dtype != torch.float32 else model).to(device)
    scaler = (
        torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
        if way.scaler
        else None
    )
    steps = len(TAKEN) if way.branches else way.steps
    width = 40 if way.branches else 64
    data = torch.Generator().manual_seed(rank)
    batches = [
        [
            torch.randn(16, width, generator=data).to(way.dtype).to(device)
            for _ in range(way.micro_batches)
        ]
        for _ in range(steps)
    ]
    infinite = torch.tensor(float("inf")).to(device)
    before = _weights(model)
    record = Record(before)
    with defaults():
        _steps(way, model, group, scaler, batches, infinite, record, stream_of_backward, look)
    record.moved = _weights(model) - before
    return record


def _steps(way, model, group, scaler, batches, infinite, record, stream_of_backward, look):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    wrapped, optimizer = way.wrap(model, group, scaler)
    look()
    for step, batch in enumerate(batches):
        for part, x in enumerate(batch):
            with wrapped.no_sync() if part + 1 < len(batch) else nullcontext():
                loss = _loss(wrapped, x, TAKEN[step][rank % 2] if way.branches else None)
                if scaler is not None:
                    loss = scaler.scale(
                        loss * infinite if (step, rank) == (OVERFLOW, size - 1) else loss
                    )
                with stream_of_backward():
                    loss.backward()
        if scaler is not None and way.max_norm is not None:
            scaler.unscale_(optimizer)
        if way.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), way.max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        record.seen.append(look())
        optimizer.zero_grad()


def _weights(model):
    return torch.cat([p.detach().cpu().float().reshape(-1) for p in model.parameters()])


def _loss(model, x, taken):
    y = model(x) if taken is None else model(x, taken)
    return (y.float() - torch.sin(3 * x[:, : y.shape[1]].float())).square().mean()


@contextmanager
def native_collectives(backend):
    """Within, sharded optimizers take this backend for NCCL."""
    before, point_to_point.NCCL = point_to_point.NCCL, backend
    try:
        yield
    finally:
        point_to_point.NCCL = before
