"""What local SGD needs to know before it begins, or goes on with another schedule: that it fits
these ranks and parameters, and can be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.plan.local_sgd import local_memory
from gradwire.core.protocol.groups import Groups
from gradwire.core.text.wording import some
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.engine.groups.nodes import on_nodes
from gradwire.torch_backend.fsdp.backward import hook_obstacle
from gradwire.torch_backend.local_sgd.optimizer_hooks import is_followed
from gradwire.torch_backend.local_sgd.outer import in_torch
from gradwire.torch_backend.local_sgd.target import Target
from gradwire.torch_backend.setup.consistency import obstacle
from gradwire.torch_backend.setup.optimizer_state import uncopied
from gradwire.torch_backend.setup.registration import tried

#: Optimizers whose ranks share the work of a step.
SHARDED = ("ZeroOptimizer", "ZeroRedundancyOptimizer")


@dataclass(frozen=True)
class Fitted:
    """A schedule among so many replicas.

    Attributes:
        local: with nodes replaced by their size, and its outer optimizer made for these parameters.
        groups: in which it averages.
        obstacle: why it does not fit; "" if it does.
    """

    local: LocalSGD
    groups: Sequence[Groups] = ()
    obstacle: str = ""


def fitted(
    local: LocalSGD, group: dist.ProcessGroup, parameters: Mapping[str, Tensor], *, averager: bool
) -> Fitted:
    """A schedule for this group and these parameters. `averager`: there is somebody who can average
    gradients, if it wants that. To be called on all ranks."""
    replicas, specs = dist.get_world_size(group), specs_of(parameters)
    device = next((x.device for x in parameters.values()), None)
    try:
        local = on_nodes(local, group, device)
        if device is not None:
            local = in_torch(local, specs, device)
        local_memory(local, specs, replicas)
    except ValueError as error:
        return Fitted(local, obstacle=str(error))
    if averages_gradients(local) and not averager:
        return Fitted(
            local,
            obstacle=(
                f"{local!r} averages gradients as well, and a plain module has nobody to do it;"
                " wrap it in DistributedDataParallel first"
            ),
        )
    if type(local.compressor).__repr__ is object.__repr__:
        return Fitted(
            local,
            obstacle=(
                f"compressor {type(local.compressor).__name__} has no repr to compare its options"
                " by; make it a frozen dataclass"
            ),
        )
    subgroups = local.subgroups(replicas)
    groups = [level.groups for level in local.levels(replicas)]
    found = [
        each
        for each in [*groups, subgroups if subgroups and len(subgroups) > 1 else None]
        if each is not None
    ]
    if local.compressor is None:
        return Fitted(local, found)
    trial = tried(local.compressor, local.kept(specs), replicas, device)
    return Fitted(local, [*trial.groups, *found], trial.obstacle)


def averages_gradients(local: LocalSGD) -> bool:
    """Whether it averages gradients in some steps, and not parameters alone."""
    return bool(local.start_step or local.subgroup is not None)


def radial_obstacle(local: LocalSGD, target: Target) -> str:
    """Why lengths of tensors cannot be averaged; "" if they can."""
    if local.radial and target.partial:
        return (
            f"radial={local.radial!r} takes lengths of whole tensors, and a rank of a sharded model"
            " has blocks of them; leave it out"
        )
    return ""


def obstacle_of(
    module: nn.Module,
    target: Target,
    optimizer: torch.optim.Optimizer | None,
    local: LocalSGD,
    moments: str,
) -> str:
    """Why this rank cannot take part; "" if it can."""
    if not target.trained:
        return "module has no parameter with requires_grad=True, so there is nothing to average"
    if why_not := hook_obstacle(module) or target.obstacle():
        return why_not
    if why_not := radial_obstacle(local, target):
        return why_not
    if moments == "reset" and local.delayed:
        return (
            f"moments='reset' with {local!r}: parameters are merged, and not replaced, when an"
            " average is taken; use 'average' or 'keep'"
        )
    if optimizer is None and moments != "keep":
        return f"moments={moments!r} needs the optimizer"
    if optimizer is not None:
        if is_followed(optimizer):
            return (
                "optimizer has a handle already that averages after its steps; unregister() of that"
                " handle makes room"
            )
        own = {id(p) for p in module.parameters()}
        foreign = [
            tuple(p.shape) for g in optimizer.param_groups for p in g["params"] if id(p) not in own
        ]
        if foreign:
            return (
                f"optimizer steps parameters of shapes {some(foreign)} that are not in module, and"
                " nobody would average them"
            )
        if type(optimizer).__name__ in SHARDED:
            return (
                f"{type(optimizer).__name__} needs equal gradients on all ranks; give an optimizer"
                " that steps alone"
            )
        if (
            moments == "average"
            and target.device is not None
            and (why := uncopied(type(optimizer), optimizer.defaults, target.device))
        ):
            return f"moments='average': {type(optimizer).__name__} {why}; use 'keep' or 'reset'"
        if moments == "reset" and isinstance(optimizer, torch.optim.Adagrad):
            return (
                "moments='reset' drops what Adagrad makes only when it is built; use 'average' or"
                " 'keep'"
            )
    return obstacle(module, AllReduce(), target.parameters)
