"""Small models under FSDP2, with and without replicas that are compressed: what the tests of
sharded models have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.torch.models import Loss, mlp
from tests.torch.training import Trace, distance


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Each `nn.Linear` a unit of its own, and the model for what is left."""
    for module in list(model.modules()):
        if isinstance(module, (nn.Linear, nn.Embedding)) and module is not model:
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded_mlp(
    widths: Sequence[int], mesh: DeviceMesh, dtype: torch.dtype | None = None, **options: Any
) -> nn.Module:
    return shard(mlp(*widths).to(dtype), mesh, **options)


def local_parts(model: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """This rank's blocks, copied: of the parameters, or of their gradients."""
    found = {}
    for name, p in model.named_parameters():
        x: Any = p.grad if gradients else p
        if x is not None:
            found[name] = x.detach().to_local().clone()
    return found


def train_sharded(
    model: nn.Module,
    loss: Loss,
    steps: Sequence[int],
    twin: nn.Module | None = None,
    optimizer: Callable[..., Any] = torch.optim.SGD,
) -> Trace:
    """SGD on `loss(model, rank, step)`. `twin` is the same model without replicas: its gradients
    are those of this replica alone."""
    rank = dist.get_rank()
    stepping = optimizer(model.parameters(), lr=0.1)
    trace = Trace()
    for step in steps:
        if twin is not None:
            follow(twin, model)
            loss(twin, rank, step).backward()
            trained = {n for n, p in model.named_parameters() if p.requires_grad}
            zeros = {n: torch.zeros_like(x) for n, x in local_parts(model).items() if n in trained}
            trace.local.append(zeros | local_parts(twin, gradients=True))
        stepping.zero_grad()
        loss(model, rank, step).backward()
        trace.given.append({**local_parts(model, gradients=True)})
        stepping.step()
    trace.weights = {n: p.full_tensor().detach() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    return trace


def follow(twin: nn.Module, model: nn.Module) -> None:
    """Give the twin the model's weights, and no gradients."""
    with torch.no_grad():
        for theirs, ours in zip(twin.parameters(), model.parameters(), strict=True):
            theirs.copy_(ours)
    twin.zero_grad()


def simulated(world: Any, algorithm: Any, trace: Trace, shards: int, **options: Any) -> float:
    """How far what optimizers were given is from what the simulator makes of the same blocks: the
    largest distance of any rank and step. The first rank works it out; 0.0 on the others.

    Rank r is shard r % shards of replica r // shards. Empty blocks are left out.
    """
    traces = world.everyones(trace)
    if world.rank:
        return 0.0

    def held(steps: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [{n: x for n, x in step.items() if x.numel()} for step in steps]

    replicas = [Trace(held(trace.local), held(trace.given)) for trace in traces]
    return max(distance(algorithm, replicas[s::shards], **options) for s in range(shards))
