"""Small models, and training that keeps a record: what the tests of the torch backend have in common."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwire import Compressor
from gradwire.core.requests import mean
from gradwire.core.simulate import Simulator
from gradwire.torch_backend import register_comm_hook

__all__ = [
    "TAKEN",
    "Branches",
    "Checkpointed",
    "Half",
    "Payload",
    "Trace",
    "branching_loss",
    "buckets_of",
    "collective_payloads",
    "distance",
    "fit",
    "flat",
    "gradients",
    "hooked",
    "loss_on",
    "mlp",
    "oracle",
    "relative",
    "said",
    "same_bits",
    "train",
    "weights",
]

Loss = Callable[[nn.Module, int, int], Tensor]
#: By step, the branches of `Branches` that each rank takes.
Taken = Sequence[tuple[Sequence[str], ...]]


@dataclass(frozen=True, kw_only=True, repr=False)
class Half(Compressor):
    """A compressor of a user's own, whose average is an array."""

    def memory(self, ops: Any, name: str, spec: Any) -> dict[str, Any] | None:
        return {} if len(spec.shape) > 1 else None

    async def compress(self, ops: Any, name: str, x: Any, memory: Any, context: Any) -> tuple[Any, Any, Any]:
        sent = x * 0.5
        return sent, await mean(sent), memory


def mlp(*widths: int, bias: bool = True, seed: int = 0) -> nn.Sequential:
    """Linear layers with tanh between them: the same weights on every rank."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(widths):
        layers += [nn.Linear(n, m, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def loss_on(width: int, batch: int = 24, dtype: torch.dtype = torch.float32, *, spread: float = 0.05) -> Loss:
    """Regression on data of the rank and the step: `loss(model, rank, step)`.

    Inputs lie near a plane, so gradients have little beyond rank 2. Where directions of nearly equal weight compete in the error memory of
    PowerSGD, rounding decides which is sent next, and two arithmetics part by a factor in every step. With `spread=1` inputs lie in all
    directions alike: for half precision, in which the small ones would be rounding alone, and for few steps.
    """
    plane = torch.randn(2, width, generator=torch.Generator().manual_seed(width)) * torch.tensor([[1.0], [0.5]])

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        data = torch.Generator().manual_seed(1000 * rank + step)
        near, off = torch.randn(batch, 2, generator=data) @ plane, torch.randn(batch, width, generator=data)
        x = ((1 - spread) * near + spread * off).to(dtype)
        y = model(x)
        target: Tensor = torch.sin(3 * x[:, : y.shape[1]].float() + rank)
        return (y.float() - target).square().mean()

    return loss


class Branches(nn.Module):
    """A trunk and two branches, of which each forward pass may take any or none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = mlp(40, 32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, taken: Sequence[str] = ("left", "right")) -> Tensor:
        x = self.trunk(x)
        for name in taken:
            x = x + torch.tanh(getattr(self, name)(x))
        return x


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward; or not, if `reentrant` is None. With `shared`, the first is also the last."""

    def __init__(self, *, reentrant: bool | None, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        if shared:
            self.layers[3] = self.layers[0]
        self.head = nn.Linear(64, 24)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = (
                checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
                if self.reentrant is not None
                else layer(x).tanh()
            )
        y: Tensor = self.head(x)
        return y


TAKEN: Taken = [
    (("left", "right"), ("left", "right")),
    (("left",), ("right",)),
    ((), ("left",)),
    ((), ()),
    (("right",), ()),
    (("left",), ("left",)),
    (("left", "right"), ("left", "right")),
]


def branching_loss(model: nn.Module, rank: int, step: int, taken: Taken = TAKEN) -> Tensor:
    return loss_on(40)(lambda x: model(x, taken[step][rank]), rank, step)


@dataclass
class Trace:
    """Training on one rank, step by step.

    Attributes:
        local: gradients of this rank alone, by parameter; zero for parameters that the forward pass did not reach.
        given: what the optimizer was given; None for parameters without a gradient.
        weights: in the end.
    """

    local: list[dict[str, Tensor]] = field(default_factory=list)
    given: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    ddp: DistributedDataParallel,
    loss: Loss,
    steps: int | Sequence[int],
    *,
    lr: float = 0.1,
    micro_batches: int = 1,
    local: bool = True,
) -> Trace:
    """SGD on `loss(ddp, rank, step)`. With several micro-batches the gradients of all but the last are accumulated under `no_sync`."""
    rank = dist.get_rank(ddp.process_group)
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=lr)
    trace = Trace()
    for step in range(steps) if isinstance(steps, int) else steps:
        parts = [step * micro_batches + i for i in range(micro_batches)]
        if local:
            twin = copy.deepcopy(ddp.module)
            for part in parts:
                (loss(twin, rank, part) / micro_batches).backward()
            trace.local.append(
                {
                    n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                    for n, p in twin.named_parameters()
                    if p.requires_grad
                }
            )
        optimizer.zero_grad()
        for part in parts[:-1]:
            with ddp.no_sync():
                (loss(ddp, rank, part) / micro_batches).backward()
        (loss(ddp, rank, parts[-1]) / micro_batches).backward()
        trace.given.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in ddp.module.named_parameters() if p.requires_grad}
        )
        optimizer.step()
    trace.weights = weights(ddp.module)
    return trace


def fit(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int], loss: Loss) -> None:
    """The plainest loop."""
    for step in steps:
        optimizer.zero_grad()
        loss(module, rank, step).backward()
        optimizer.step()


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
    """The model under DDP, in several buckets unless it is tiny, and the handle of the algorithm's hook, if it gets one."""
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap, **ddp)
    if algorithm is None:
        return wrapped, None
    return wrapped, register_comm_hook(wrapped, algorithm, message_bytes=message_bytes, grad_scaler=grad_scaler)


def oracle(
    algorithm: Any, traces: Sequence[Trace], *, dtype: str = "float64", used: Callable[[int, str], bool] | None = None
) -> list[dict[str, np.ndarray]]:
    """What the lock-step simulator makes of the ranks' own gradients, step by step.

    `used(step, name)` says which parameters take part in a step; all by default.
    """
    shapes = {name: tuple(g.shape) for name, g in traces[0].local[0].items()}
    simulator = Simulator(algorithm, shapes, len(traces), dtype=dtype)
    averages = []
    for step in range(len(traces[0].local)):
        gradients = [
            {n: g.double().numpy() for n, g in t.local[step].items() if used is None or used(step, n)} for t in traces
        ]
        averages.append(simulator.step(gradients))
    return averages


def distance(algorithm: Any, traces: Sequence[Trace], steps: int | None = None, **options: Any) -> float:
    """From what any of the ranks was given to what the simulator makes of their gradients, in the worst of the steps. See `oracle`."""
    right = oracle(algorithm, traces, **options)[:steps]
    return max(
        relative({n: given[n] for n in average} if "used" in options else given, average)
        for trace in traces
        for given, average in zip(trace.given[:steps], right, strict=True)
    )


def relative(x: Any, y: Any) -> float:
    """Distance of `x` from `y` in units of `y`'s norm. Dictionaries are compared as one long vector."""
    if isinstance(x, Mapping):
        assert x.keys() == y.keys()
        x = np.concatenate([np.ravel(_numpy(x[k])) for k in y])
        y = np.concatenate([np.ravel(_numpy(y[k])) for k in y])
    x, y = _numpy(x), _numpy(y)
    assert x.shape == y.shape
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def _numpy(x: Any) -> np.ndarray:
    return x.detach().double().numpy() if isinstance(x, Tensor) else np.asarray(x, np.float64)


def same_bits(x: Any, y: Any) -> bool:
    """Equal in structure, dtype and every bit of every tensor (NaN equals itself)."""
    if isinstance(x, Tensor):
        if not isinstance(y, Tensor) or x.dtype != y.dtype or x.shape != y.shape:
            return False
        return x.contiguous().view(-1).view(torch.uint8).equal(y.contiguous().view(-1).view(torch.uint8))
    if isinstance(x, Mapping):
        return x.keys() == y.keys() and all(same_bits(x[k], y[k]) for k in x)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same_bits, x, y))
    return bool(x == y)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters, by name."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of those that there are, by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def said(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The class and the words of what the call raises; nothing if it raises nothing."""
    try:
        function(*args, **kwargs)
    except BaseException as error:  # of which torch.distributed.checkpoint has its own
        return f"{type(error).__name__}: {error}"
    return ""


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


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
    """A list of all that is handed to `torch.distributed.all_reduce` meanwhile. DDP's own averaging is in C++ and not in it."""
    real = dist.all_reduce
    seen: list[Payload] = []

    def recording(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        ranks = dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)
        seen.append(Payload(tensor.numel(), tensor.dtype, tuple(ranks)))
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", recording):
        yield seen
