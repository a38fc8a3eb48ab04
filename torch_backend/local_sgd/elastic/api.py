"""Replicas that come and go: one call, under a torchft `Manager`.

groups = torchft.ProcessGroupGloo()
manager = torchft.Manager(pg=groups, min_replica_size=1, use_async_quorum=False, ...)
handle = gradwire.torch_backend.elastic(model, optimizer, gradwire.diloco(500), manager)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.algorithm import Algorithm, require_algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.algorithms.weighted import weighted
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.local_sgd.schedule import Schedule
from gradwire.core.ops import Spec
from gradwire.core.plan.advice import warn
from gradwire.core.text.options import OWN_CHECK, checked
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.engine.groups.same_state import digest_of
from gradwire.torch_backend.engine.torch_modes import outside_inference_mode
from gradwire.torch_backend.local_sgd.buffers import AveragedBuffers
from gradwire.torch_backend.local_sgd.elastic.gradients import ElasticGradients
from gradwire.torch_backend.local_sgd.elastic.handle import KEY, rest_of
from gradwire.torch_backend.local_sgd.elastic.quorum import Quorum
from gradwire.torch_backend.local_sgd.elastic.schedules import ElasticLocalSGD
from gradwire.torch_backend.local_sgd.wrapped_optimizer import unwrapped
from gradwire.torch_backend.setup.assumptions import Assumptions
from gradwire.torch_backend.setup.consistency import (
    algorithm_obstacle,
    describe,
    obstacle,
    require_initialized,
)
from gradwire.torch_backend.setup.registration import tried


@outside_inference_mode
@checked
def elastic(
    module: Annotated[nn.Module, OWN_CHECK],
    optimizer: Annotated[torch.optim.Optimizer, OWN_CHECK],
    what: Annotated[Algorithm | LocalSGD, OWN_CHECK],
    manager: Annotated[Any, OWN_CHECK],
    *,
    buffers: Literal["average", "keep"] | list[str] = "average",
    outer_device: Literal["cpu"] | None = None,
) -> ElasticGradients | ElasticLocalSGD:
    """Train with replicas that come and go: from now on `optimizer.step()` averages gradients, or
    parameters when it is time to, among the replicas that a torchft lighthouse sees.

    It joins at once, and returns when this replica has met the others: the first ones wait for each
    other (`min_replicas` of the lighthouse), a newcomer for the next average. A newcomer receives
    all parameters, frozen ones too, all buffers, the optimizer's state, outer parameters and
    factors from one of the others by torchft's checkpoint transport; so do those that begin
    together. Its error memory begins with zeros, and its own work counts from the next average on.
    What else it needs, a scheduler's state for instance, give to `manager.register_state_dict_fn`
    before; the position in the data is `handle.steps`.

    Each average is a round of the manager: a quorum, messages, a vote. A replica that is lost fails
    one round at most: where a message does not come, nothing that this replica remembers is
    changed. A schedule then trains on from where it is, and the next difference holds what was
    learned since; a step that averages gradients does nothing. Replicas for which a round failed,
    and for others it did not, take over the state of these in the next quorum.

    Args:
        module: a model that each replica, one process, holds as a whole. A gradient of a parameter
            that is frozen now is a RuntimeError in the step, and so is a parameter that comes
            later, or is put in the place of another. Layers may be frozen later, on all replicas
            after the same step; with an algorithm, a newcomer freezes what the others have frozen.
        optimizer: that steps the module's parameters. Weights that it keeps (masters in float32,
            `z` of schedule-free optimizers) go with the parameters; moments are each replica's own.
        what: an algorithm, which averages gradients in each step; or `LocalSGD(...)`,
            `diloco(...)`, which average parameters among all replicas.
        manager: a `torchft.Manager` with `use_async_quorum=False`. Its process group carries the
            messages, and its time limits are those of a round.
        buffers: floating buffers are averaged with the parameters of a schedule, or some of them,
            see `local_sgd`; or each replica keeps its own, as it does with an algorithm, and with
            `eager`.
        outer_device: "cpu" keeps what a schedule with outer parameters remembers in memory of the
            host, as `local_sgd` does. Each replica as it likes.

    Returns:
        A handle with the position, the outer parameters, and the state for checkpoints.

    Warns:
        CompressionWarning: see `register_comm_hook`.

    Raises:
        ImportError: torchft is not installed.
        TypeError: `module`, `optimizer`, `what` or `manager` is no such thing.
        ValueError: something cannot be served, and nothing has been changed; or this replica asks
            for something else than the others do, and its manager has been shut down, so that they
            do not wait for it.
        RuntimeError: there is no quorum, or too many rounds have failed, as the manager says.
    """
    if not isinstance(module, nn.Module) or isinstance(module, DistributedDataParallel):
        raise TypeError(
            f"module is a {type(module).__name__}; give the model itself: each replica is one"
            " process"
        )
    if not isinstance(what, Schedule):
        require_algorithm(what)
    optimizer = unwrapped(optimizer)
    if optimizer is None:
        raise TypeError(
            "optimizer is None; give the one that steps the model: averages are rounds of its steps"
        )
    _require_manager(manager)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    require_initialized(trained)
    averages_buffers = isinstance(what, LocalSGD) and not what.eager
    kept, why_not = AveragedBuffers.of(module, buffers if averages_buffers else "keep")
    why_not = why_not or _obstacle(what, module, optimizer, manager)
    if outer_device is not None and not (isinstance(what, LocalSGD) and what.has_outer):
        needless = f"outer_device={outer_device!r} with {what!r}, which has no outer parameters"
        why_not = why_not or f"{needless}; leave it out"
    if why_not:
        raise ValueError(why_not)
    warn(what, specs_of(trained))
    rest = partial(rest_of, module, [*trained.values(), *kept.values()])
    quorum = Quorum(
        manager, _asks(what, trained, kept, rest()), next(iter(trained.values())).device
    )
    frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    remedy = "Train them from the beginning of a run, on all replicas"
    assumed = Assumptions(
        "elastic", trained, frozen, module, optimizer, remedy, digest=lambda: digest_of(trained)
    )
    if isinstance(what, LocalSGD):
        return ElasticLocalSGD(
            what, trained, kept, optimizer, quorum, rest, assumed, on_host=outer_device is not None
        )
    return ElasticGradients(what, trained, kept, optimizer, quorum, rest, assumed)


def _require_manager(manager: object) -> None:
    """Raise for what is no torchft `Manager`."""
    try:
        from torchft.manager import Manager  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            f"elastic needs torchft ({error}); install it with pip install 'gradwire[elastic]'"
        ) from error
    if not isinstance(manager, Manager):
        raise TypeError(f"manager is a {type(manager).__name__}; give a torchft.Manager")


def _obstacle(
    what: Algorithm | LocalSGD, module: nn.Module, optimizer: torch.optim.Optimizer, manager: Any
) -> str:
    """Why this replica cannot take part; "" if it can."""
    if manager._use_async_quorum:
        return (
            "manager has use_async_quorum=True: a newcomer would train before it has its"
            " parameters; make it with use_async_quorum=False"
        )
    if manager._replica_world_size_mode is not type(manager._replica_world_size_mode).DYNAMIC:
        return (
            "manager has spare replicas (world_size_mode); all count here, so leave"
            " world_size_mode out"
        )
    if manager._group_world_size != 1:
        return (
            f"manager has world_size={manager._group_world_size}: the ranks of a newcomer would"
            " receive the local parameters of different replicas; let each replica be one process,"
            " world_size=1"
        )
    if KEY in manager._user_state_dicts:
        return "manager serves another model already; make one for each"
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if not trained:
        return "module has no parameter with requires_grad=True, so there is nothing to average"
    known, device = {id(p) for p in trained.values()}, next(iter(trained.values())).device
    if any(
        id(p) not in known
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    ):
        return "optimizer steps parameters that are not in module, and nobody would average them"
    if isinstance(what, LocalSGD):
        return obstacle(module, AllReduce(), trained) or _obstacle_of_schedule(
            what, specs_of(trained), device
        )
    why_not = obstacle(module, what, trained) or algorithm_obstacle(what, in_buckets=False)
    return why_not or _obstacle_of_algorithm(what, specs_of(trained), "what", device)


def _obstacle_of_schedule(local: LocalSGD, specs: Mapping[str, Spec], device: torch.device) -> str:
    if local.start_step:
        return (
            f"start_step={local.start_step} of {local!r} averages gradients first; train so with"
            " elastic(…, AllReduce(), …), and go on from its checkpoint"
        )
    if local.subgroup is not None or isinstance(local.period, Mapping):
        return (
            f"{local!r} averages in groups, and replicas that come and go have none; give a number"
            " as period, and leave subgroup out"
        )
    try:
        turn = local.longest / len(local.parts(specs))
    except ValueError as error:
        return str(error)
    if local.eager and local.fragments > 1:
        return (
            f"fragments={local.fragments} with eager=True has several messages on their way, and a"
            " vote is about one; use one fragment"
        )
    if local.eager and local.weighted:
        return (
            "weighted=True with eager=True sends its weights before there is a quorum; leave one of"
            " them out"
        )
    if local.overlap >= turn:
        return (
            f"overlap={local.overlap} is not less than the {turn:g} steps from one fragment to the"
            " next, and a vote is about one message; use fewer"
        )
    if local.compressor is None:
        return ""
    return _obstacle_of_algorithm(local.compressor, local.kept(specs), "compressor", device)


def _obstacle_of_algorithm(
    algorithm: Algorithm, specs: Mapping[str, Spec], option: str, device: torch.device
) -> str:
    if levels_of(algorithm) is not None or getattr(algorithm, "mentions_nodes", False):
        return (
            f"{option}={algorithm!r} needs nodes of equally many replicas, and here they come and"
            " go; give the algorithm inside"
        )
    return tried(weighted(algorithm), specs, 2, device).obstacle


def _asks(
    what: Algorithm | LocalSGD,
    trained: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    rest: Mapping[str, Tensor],
) -> str:
    """What has to be the same for all replicas, in words."""
    described = describe(trained) | describe(buffers, "buffer") | describe(rest, "rest")
    digest = hashlib.sha256(repr(described).encode()).hexdigest()[:8]
    elements = sum(p.numel() for p in trained.values())
    return (
        f"{what!r} of {len(trained)} parameters and {len(buffers)} buffers with {elements:,}"
        f" elements ({digest})"
    )
