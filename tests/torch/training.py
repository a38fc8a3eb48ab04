"""Training that keeps a record, what it sends, and what the simulator says of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.simulate import Simulator
from gradwire.torch_backend import Averager, DataParallel, local_sgd, register_comm_hook
from tests.torch.compare import flat, relative, weights
from tests.torch.models import Loss, loss_on, mlp


@dataclass
class Trace:
    """Training on one rank, step by step.

    Attributes:
        local: gradients of this rank alone, by parameter; zero for parameters that the forward pass
            did not reach.
        given: what the optimizer was given; None for parameters without a gradient.
        weights: in the end.
    """

    local: list[dict[str, Tensor]] = field(default_factory=list)
    given: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    ddp: Any,
    loss: Loss,
    steps: int | Sequence[int],
    *,
    lr: float = 0.1,
    micro_batches: int = 1,
    local: bool = True,
) -> Trace:
    """SGD on `loss(ddp, rank, step)`. With several micro-batches the gradients of all but the last
    are accumulated under `no_sync`."""
    rank, trace = dist.get_rank(ddp.process_group), Trace()
    optimizer = torch.optim.SGD([p for _, p in _trained(ddp)], lr=lr)

    def backward(model: nn.Module, part: int) -> None:
        (loss(model, rank, part) / micro_batches).backward()

    for step in range(steps) if isinstance(steps, int) else steps:
        *accumulated, last = (step * micro_batches + i for i in range(micro_batches))
        if local:
            twin = copy.deepcopy(ddp.module)
            for part in (*accumulated, last):
                backward(twin, part)
            trace.local.append(
                {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in _trained(twin)}
            )
        optimizer.zero_grad()
        for part in accumulated:
            with ddp.no_sync():
                backward(ddp, part)
        backward(ddp, last)
        trace.given.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in _trained(ddp.module)}
        )
        optimizer.step()
    trace.weights = weights(ddp.module)
    return trace


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def fit(
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int], loss: Loss
) -> None:
    """The plainest loop."""
    for step in steps:
        optimizer.zero_grad()
        loss(module, rank, step).backward()
        optimizer.step()


class LocalRun:
    """A small model that trains with local SGD, under DDP where gradients are averaged first.
    `options`: of `local_sgd`."""

    def __init__(
        self, world: Any, local: Any, model: nn.Module | None = None, **options: Any
    ) -> None:
        self.rank, self.model = world.rank, mlp(8, 7, 5) if model is None else model
        self.loss = loss_on(8, dtype=next(self.model.parameters()).dtype)
        options = {"process_group": world.group, **options}
        if local.start_step:
            self.model = DistributedDataParallel(
                self.model, process_group=options["process_group"], broadcast_buffers=False
            )
        self.optimizer = sgd(self.model)
        self.handle = local_sgd(self.model, self.optimizer, local, **options)

    def steps(self, first: int, last: int) -> None:
        fit(self.model, self.optimizer, self.rank, range(first, last), self.loss)

    def seen(self) -> Any:
        return weights(self.model), self.handle.rank_state_dict()["tensors"]


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def hooked(
    model: nn.Module,
    algorithm: Any = None,
    group: dist.ProcessGroup | None = None,
    *,
    cap: float = 0.006,
    message_bytes: int | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    **ddp: Any,
) -> tuple[DistributedDataParallel, Any]:
    """The model under DDP, in several buckets unless it is tiny, and the handle of the algorithm's
    hook, if it gets one."""
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap, **ddp)
    if algorithm is None:
        return wrapped, None
    return wrapped, register_comm_hook(
        wrapped, algorithm, message_bytes=message_bytes, grad_scaler=grad_scaler
    )


def paralleled(
    model: nn.Module,
    algorithm: Any,
    group: dist.ProcessGroup | None = None,
    *,
    cap: float = 0.006,
    **options: Any,
) -> tuple[DataParallel, Any]:
    """The same with `DataParallel`, and its handle."""
    caps = {"bucket_cap_mb": cap, "first_bucket_mb": cap}
    wrapped = DataParallel(model, algorithm, process_group=group, **caps, **options)
    return wrapped, wrapped.handle


def try_other_doors(
    world: Any,
    algorithm: Any,
    make: Callable[[], nn.Module],
    loss: Loss,
    tolerance: float,
    **options: Any,
) -> None:
    """Four steps by `DataParallel` give what the simulator gives, and four by `Averager` the same
    as far as `tolerance`."""
    model = DataParallel(make(), algorithm, process_group=world.group, **options)
    trace = train(model, loss, 4)
    assert distance_of_all(world, algorithm, trace) < 1e-5
    by_hand = make()
    averager = Averager(algorithm, dict(by_hand.named_parameters()), world.group)
    optimizer = sgd(by_hand)
    for step in range(4):
        optimizer.zero_grad()
        loss(by_hand, world.rank, step).backward()
        averager({n: p.grad for n, p in by_hand.named_parameters()})
        optimizer.step()
    assert world.agree([flat(model.module), flat(by_hand)])
    assert relative(flat(model.module), flat(by_hand)) < tolerance


def oracle(
    algorithm: Any,
    traces: Sequence[Trace],
    *,
    dtype: str = "float64",
    used: Callable[[int, str], bool] | None = None,
) -> list[dict[str, np.ndarray]]:
    """What the lock-step simulator makes of the ranks' own gradients, step by step. `used(step,
    name)`: whether a parameter takes part in a step."""
    shapes = {name: tuple(g.shape) for name, g in traces[0].local[0].items()}
    simulator = Simulator(algorithm, shapes, len(traces), dtype=dtype)
    return [
        simulator.step(
            [
                {n: g.double().numpy() for n, g in t.local[i].items() if not used or used(i, n)}
                for t in traces
            ]
        )
        for i in range(len(traces[0].local))
    ]


def distance(
    algorithm: Any, traces: Sequence[Trace], steps: int | None = None, **options: Any
) -> float:
    """From what any of the ranks was given to what the simulator makes of their gradients, in the
    worst of the steps. See `oracle`."""
    right = oracle(algorithm, traces, **options)[:steps]
    return max(
        relative({n: given[n] for n in average} if "used" in options else given, average)
        for trace in traces
        for given, average in zip(trace.given[:steps], right, strict=True)
    )


def distance_of_all(world: Any, algorithm: Any, trace: Trace, **options: Any) -> float:
    """`distance` of the traces of all ranks, which the first one works out; 0.0 on the others."""
    traces = world.everyones(trace)
    return distance(algorithm, traces, **options) if world.rank == 0 else 0.0


def buckets_of(ddp: DistributedDataParallel) -> int:
    """Number of buckets now, which are rebuilt after the first step."""
    facts = ddp._get_ddp_logging_data()
    return len(str(facts.get("rebuilt_bucket_sizes") or facts["bucket_sizes"]).split(","))


@dataclass(frozen=True)
class Payload:
    """A message as the collective library got it, for the ranks of a group."""

    numel: int
    dtype: torch.dtype
    ranks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@contextmanager
def collective_payloads() -> Iterator[list[Payload]]:
    """A list of all that is handed to `torch.distributed.all_reduce` meanwhile. DDP's own averaging
    is in C++ and not in it."""
    real = dist.all_reduce
    seen: list[Payload] = []

    def recording(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        ranks = dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)
        seen.append(Payload(tensor.numel(), tensor.dtype, tuple(ranks)))
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", recording):
        yield seen
