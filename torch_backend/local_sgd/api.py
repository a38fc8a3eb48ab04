"""Local SGD in torch: one call, and the training loop stays as it is.

ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = gradwire.LocalSGD(period=8, start_step=1000, subgroup="node")
handle = gradwire.torch_backend.local_sgd(ddp, optimizer, schedule)
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.plan.advice import warn, warn_of_few_rounds
from gradwire.core.text.options import OWN_CHECK, AtLeast0, AtLeast1, checked
from gradwire.torch_backend.ddp.data_parallel import DataParallel
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.groups.same_state import digest_of
from gradwire.torch_backend.engine.torch_modes import outside_inference_mode
from gradwire.torch_backend.fsdp.layout import local_part
from gradwire.torch_backend.local_sgd.buffers import AveragedBuffers
from gradwire.torch_backend.local_sgd.checks import fitted, obstacle_of
from gradwire.torch_backend.local_sgd.handle import LocalSGDHandle
from gradwire.torch_backend.local_sgd.moments import Moments
from gradwire.torch_backend.local_sgd.optimizer_hooks import step_on_every_rank
from gradwire.torch_backend.local_sgd.target import target_of
from gradwire.torch_backend.local_sgd.wrapped_optimizer import unwrapped
from gradwire.torch_backend.setup.assumptions import Assumptions
from gradwire.torch_backend.setup.consistency import (
    copy_from_first_rank,
    describe,
    require_same_on_all_ranks,
)


@outside_inference_mode
@checked
def local_sgd(
    module: Annotated[nn.Module, OWN_CHECK],
    optimizer: Annotated[torch.optim.Optimizer, OWN_CHECK] | None,
    local: Annotated[LocalSGD, "LocalSGD(…) or diloco(…)"],
    *,
    buffers: Literal["average", "keep"] | list[str] = "average",
    moments: Literal["keep", "average", "reset"] = "keep",
    process_group: dist.ProcessGroup | None = None,
    message_bytes: AtLeast0 | None = None,
    steps: AtLeast1 | None = None,
    outer_device: Literal["cpu"] | None = None,
) -> LocalSGDHandle:
    """Train with local SGD: from now on `optimizer.step()` averages the parameters when it is time
    to.

    To be called on all ranks, once, before the first backward pass. It communicates, to check that
    all ranks ask for the same. Each rank must then call `optimizer.step()` equally often; steps
    that a `GradScaler` skips on some ranks count on all.

    Averaged are all parameters that require gradients at this moment, whether they have received
    one or not. A gradient of any other is a RuntimeError in the step, and so is a parameter that
    comes later, is put in the place of another, or is given another dtype.

    Examples:
        >>> import gradwire, torch
        >>> from gradwire.torch_backend import local_sgd
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> handle = local_sgd(model, optimizer, gradwire.diloco(2))
        >>> for _ in range(4):
        ...     model(torch.ones(2, 64)).sum().backward()
        ...     optimizer.step()
        >>> handle.steps, handle.stats().collectives, handle.synchronized
        (4, 2, True)

    Args:
        module: a DistributedDataParallel whose hook is still free: it averages gradients as the
            schedule says. Or a model that `fully_shard` has sharded over the inner axis of a mesh:
            each rank averages its own blocks. Or any other module, if the schedule has no part for
            gradients (`start_step=0`, no subgroup). Without DDP, parameters and buffers are
            overwritten with those of rank 0 once.
        optimizer: that steps the module's parameters, any; in several parameter groups if you like.
            accelerate's and Lightning's wrappers of one count as the optimizer inside. None: call
            `handle.step()` after each step yourself, for instance where there are several
            optimizers; weights must then be loaded before.
        local: what to do: `LocalSGD(...)` or `diloco(...)`. "node" in it is a machine, as for
            `TwoLevel`: by what torchrun says in LOCAL_WORLD_SIZE, or else by the names of the
            hosts.
        buffers: floating buffers (the statistics of BatchNorm) are averaged with the parameters, as
            they are, but for vectors of length 1 (those of spectral norm), of which no mean is one;
            or kept; or patterns (`fnmatch`) of the names of those that are averaged. A DDP that
            broadcasts buffers in each forward pass is refused, since that is a message in each
            step.
        moments: the optimizer's tensors of a parameter that have its shape are kept as each rank
            has them; averaged with the parameter; or dropped when it is averaged, so that the
            optimizer begins anew. "average" communicates once more the first time, and so does
            "keep" without an outer optimizer. Weights among them (masters in float32, `z` of
            schedule-free optimizers) go with the parameters.
        process_group: whose ranks are the replicas; None is that of the DDP, or the default group.
            Of a sharded model, `mesh.get_group("replicate")`.
        message_bytes: see `register_comm_hook`.
        steps: how many there will be, if that is known: a warning where they have few outer steps.
        outer_device: "cpu" keeps outer parameters, velocities, what is on its way, and what a
            compressor remembers in pinned memory of the host; those of a fragment are on the device
            while it is averaged, and of several fragments the outer parameters of all. The bits are
            the same. None: where the parameters are.

    Returns:
        A handle with the number of steps, statistics and the state for checkpoints.

    Raises:
        TypeError: `module` is no module, a gradwire `DataParallel`, or sharded by FSDP1; `local` is
            no `LocalSGD`; `optimizer` is no torch optimizer, or a wrapper of one that takes no step
            hooks.
        ValueError: something cannot be served (named), or ranks ask for different things (said how,
            on all ranks). Nothing has been changed then.
    """
    if not isinstance(module, nn.Module) or isinstance(module, DataParallel):
        raise TypeError(
            f"module is a {type(module).__name__}; give a DistributedDataParallel(model), or the"
            " model itself"
        )
    optimizer = unwrapped(optimizer)
    target = target_of(module, process_group)
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    averaged_buffers, why_not = AveragedBuffers.of(inner, buffers)

    fit_here = fitted(local, target.group, target.parameters, averager=target.averages)
    local = fit_here.local
    why_not = why_not or fit_here.obstacle or obstacle_of(inner, target, optimizer, local, moments)
    if outer_device is not None and not local.has_outer:
        needless = f"outer_device={outer_device!r} with {local!r}, which has no outer parameters"
        why_not = why_not or f"{needless}; leave it out"
    settings = {
        "local": repr(local),
        "optimizer": type(optimizer).__name__,
        "buffers": str(buffers),
        "moments": moments,
        "message_bytes": str(message_bytes),
        "outer_device": str(outer_device),
    }
    described = describe(target.parameters, target.kind) | describe(averaged_buffers, "buffer")
    why_not = target.obstacle_of_all(why_not, repr(settings))
    require_same_on_all_ranks(target.group, settings, described, why_not, target.device)

    warn(local, specs_of(target.parameters))
    warn_of_few_rounds(local, steps)
    groups = ProcessGroups(target.group, fit_here.groups)
    if inner is module:  # DDP has done so
        copy_from_first_rank(
            [*map(local_part, module.parameters()), *module.buffers()], target.group
        )
    moved = Moments(optimizer, target.trained, moments, target.group)
    remedy = f"Call handle.unregister(), and {target.anew}"
    digest = lambda: digest_of(target.parameters)  # noqa: E731
    assumed = Assumptions(
        "local_sgd",
        target.trained,
        target.frozen,
        inner,
        optimizer,
        remedy,
        digest=digest,
        moves=target.partial,
    )
    handle = LocalSGDHandle(
        local,
        target,
        averaged_buffers,
        moved,
        groups,
        assumed,
        message_bytes,
        on_host=outer_device is not None,
    )
    if optimizer is not None:
        handle._leave_optimizer = step_on_every_rank(optimizer, handle._begin, handle._end)
    return handle
