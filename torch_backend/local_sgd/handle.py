"""Local SGD in torch: one call, and the training loop stays as it is.

ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
handle = gradwire.torch_backend.local_sgd(ddp, optimizer, gradwire.LocalSGD(period=8, start_step=1000, subgroup="node"))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.algorithm import State, on_replica, parts_of
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.checkpoint import head
from gradwire.core.deprecated import old_arguments
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps, abstract_arrays
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import ITEMSIZE
from gradwire.core.plan.advice import warn
from gradwire.core.plan.dry_run import size_of
from gradwire.core.programs import Groups
from gradwire.core.requests import mean_each
from gradwire.core.wording import some
from gradwire.torch_backend.arithmetic import plain_arithmetic
from gradwire.torch_backend.capture import refuse_capture
from gradwire.torch_backend.collectives import Collectives
from gradwire.torch_backend.data_parallel.wrapper import DataParallel
from gradwire.torch_backend.ddp.hook import hook_obstacle, hooked
from gradwire.torch_backend.drive import Driver, owned, specs_of
from gradwire.torch_backend.fsdp.backward import ShardedBackward
from gradwire.torch_backend.fsdp.backward import hook_obstacle as sharded_hook_obstacle
from gradwire.torch_backend.fsdp.checkpoint import of_shard, portable, sharded, whole_specs
from gradwire.torch_backend.fsdp.driver import ShardStep, asked_by_some_shard, on_all_shards
from gradwire.torch_backend.fsdp.layout import Layout, local_part, obstacle_of_shards
from gradwire.torch_backend.integrations.wrapped_optimizer import unwrapped
from gradwire.torch_backend.kernels import TorchOps, dtype_name
from gradwire.torch_backend.local_sgd.moments import Moments
from gradwire.torch_backend.meeting import LONGEST, Meeting
from gradwire.torch_backend.own_memory import ShardedState
from gradwire.torch_backend.pieces import recut
from gradwire.torch_backend.process_groups import ProcessGroups, given_or_default, node_size
from gradwire.torch_backend.profiling import span
from gradwire.torch_backend.program import Step, run_alone
from gradwire.torch_backend.rank_checks import (
    copy_from_first_rank,
    describe,
    obstacle,
    require_initialized,
    require_same_on_all_ranks,
)
from gradwire.torch_backend.registration import tried
from gradwire.torch_backend.sharded import is_fsdp
from gradwire.torch_backend.state import digest, gathered, of_this_rank, require_all_ranks, to_tensors
from gradwire.torch_backend.stats import Sent, Stats, stats_of
from gradwire.torch_backend.step_hooks import step_on_every_rank
from gradwire.torch_backend.step_times import StepTimes
from gradwire.torch_backend.two_levels import gathered_over_nodes, load_part
from gradwire.torch_backend.uncompiled import uncompiled
from gradwire.torch_backend.watch import Progress, Watcher

#: Optimizers whose ranks share the work of a step.
SHARDED = ("ZeroOptimizer", "ZeroRedundancyOptimizer")


@old_arguments(group_bytes="message_bytes")
def local_sgd(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    local: LocalSGD,
    *,
    buffers: Literal["average", "keep"] = "average",
    moments: Literal["keep", "average", "reset"] = "keep",
    process_group: dist.ProcessGroup | None = None,
    message_bytes: int | None = None,
) -> LocalSGDHandle:
    """Train with local SGD: from now on `optimizer.step()` averages the parameters when it is time to.

    To be called on all ranks, once, before the first backward pass. It communicates, to check that all ranks ask for the same. Each rank
    must then call `optimizer.step()` equally often; steps that a `GradScaler` skips on some ranks count on all.

    Averaged are all parameters that require gradients at this moment, whether they have received one or not.

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
        module: a DistributedDataParallel whose hook is still free: it averages gradients as the schedule says. Or a model that `fully_shard`
            has sharded over the inner axis of a mesh: each rank averages its own blocks. Or any other module, if the schedule has no part
            for gradients (`start_step=0`, no subgroup). Without DDP, parameters and buffers are overwritten with those of rank 0 once.
        optimizer: that steps the module's parameters, any; in several parameter groups if you like. accelerate's and Lightning's wrappers
            of one count as the optimizer inside. None: call `handle.step()` after each
            step yourself, for instance where there are several optimizers; weights must then be loaded before.
        local: what to do: `LocalSGD(...)` or `diloco(...)`. "node" in it is what LOCAL_WORLD_SIZE says.
        buffers: floating buffers (the statistics of BatchNorm) are averaged with the parameters, as they are; or kept. A DDP that
            broadcasts buffers in each forward pass is refused, since that is a message in each step.
        moments: the optimizer's tensors of a parameter that have its shape are kept as each rank has them; averaged with the parameter; or
            dropped when it is averaged, so that the optimizer begins anew. "average" communicates once more the first time.
        process_group: whose ranks are the replicas; None is that of the DDP, or the default group. Of a sharded model,
            `mesh.get_group("replicate")`.
        message_bytes: see `register_comm_hook`.

    Returns:
        A handle with the number of steps, statistics and the state for checkpoints.

    Raises:
        TypeError: `module` is no module, a gradwire `DataParallel`, or sharded by FSDP1; `local` is no `LocalSGD`; `optimizer` is no torch
            optimizer, or a wrapper of one that takes no step hooks.
        ValueError: something cannot be served (named), or ranks ask for different things (said how, on all ranks). Nothing has been
            changed then.
    """
    if not isinstance(module, nn.Module) or isinstance(module, DataParallel):
        raise TypeError(
            f"module is a {type(module).__name__}; give a DistributedDataParallel(model), or the model itself"
        )
    if not isinstance(local, LocalSGD):
        raise TypeError(f"local is a {type(local).__name__}; give LocalSGD(...) or diloco(...)")
    optimizer = unwrapped(optimizer)
    ddp = module if isinstance(module, DistributedDataParallel) else None
    group = given_or_default(process_group or (None if ddp is None else ddp.process_group))
    inner: nn.Module = module if ddp is None else ddp.module
    trained = {n: p for n, p in inner.named_parameters() if p.requires_grad}
    require_initialized(trained)
    layout = None
    parameters: Mapping[str, Tensor] = trained
    if any(is_fsdp(each) for each in inner.modules()):
        if process_group is None:
            raise ValueError(
                f"module is a {type(module).__name__}, sharded by FSDP, whose replicas are not all ranks; give "
                "process_group=mesh.get_group('replicate')"
            )
        layout = Layout.of(inner, group)
        parameters = layout.blocks()
    averaged_buffers = dict(inner.named_buffers()) if buffers == "average" else {}
    averaged_buffers = {n: b for n, b in averaged_buffers.items() if dtype_name(b.dtype) in ITEMSIZE}

    replicas = dist.get_world_size(group)
    local, why_not = _fitted(local, group, parameters)
    why_not = why_not or _obstacle(inner, ddp, layout, optimizer, local, buffers, moments, group)
    partitions: Sequence[Groups] = ()
    if local.compressor is not None and not why_not:
        specs = {n: replace(s, dtype=local.state_dtype or s.dtype) for n, s in specs_of(parameters).items()}
        trial = tried(local.compressor, specs, replicas)
        partitions, why_not = trial.groups, trial.obstacle
    settings = {
        "local": repr(local),
        "optimizer": type(optimizer).__name__,
        "buffers": buffers,
        "moments": moments,
        "message_bytes": str(message_bytes),
    }
    described = describe(parameters, "parameter" if layout is None else "block of parameter") | describe(
        averaged_buffers, "buffer"
    )
    device = next((p.device for p in parameters.values()), None)
    if layout is not None:
        why_not = obstacle_of_shards(layout, repr(settings), why_not)
    require_same_on_all_ranks(group, settings, described, why_not, device)

    warn(local, specs_of(parameters))
    levels = [level.groups for level in local.levels(replicas)]
    subgroups = local.subgroups(replicas)
    groups = ProcessGroups(group, [*partitions, *levels, subgroups if subgroups and len(subgroups) > 1 else None])
    if ddp is None:
        copy_from_first_rank([*map(local_part, inner.parameters()), *inner.buffers()], group)
    moved = Moments(optimizer, trained, moments, group)
    handle = LocalSGDHandle(local, replicas, parameters, averaged_buffers, moved, groups, layout)
    if ddp is not None:
        driver = _Gradients(handle, message_bytes)
        hooked(ddp, driver, parameters)
        handle._gradients, handle._ddp = driver, ddp
    elif layout is not None and _averages_gradients(local):
        handle._gradients = _Gradients(handle, message_bytes)
        handle._backward = ShardedBackward(handle._gradients, layout, find_unused=False)
    if optimizer is not None:
        step_on_every_rank(optimizer, handle._begin, handle.step)
    return handle


class LocalSGDHandle:
    """What `local_sgd` returns.

    Attributes:
        local: what is done, with "node" replaced by its size.
        steps: calls of `optimizer.step()` since registration, or since the beginning of the run that a loaded state is of.
    """

    def __init__(
        self,
        local: LocalSGD,
        replicas: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        moments: Moments,
        groups: ProcessGroups,
        layout: Layout | None = None,
    ) -> None:
        self.local = local
        self.steps = 0
        self._replicas = replicas
        self._parameters = parameters
        self._buffers = buffers
        self._moments = moments
        self._groups = groups
        self._ops = TorchOps(next(iter(parameters.values())).device)
        self._collectives = Collectives(groups, self._ops)
        self._gradients: Driver | None = None
        self._ddp: DistributedDataParallel | None = None
        self._backward: ShardedBackward | None = None
        self._layout = layout
        self._make_step: Callable[[Collectives], Step] = Step
        if layout is not None:
            compressor, specs = local.compressor, specs_of(parameters)
            asked = frozenset() if compressor is None else asked_by_some_shard(compressor, specs, layout)
            self._make_step = partial(ShardStep, shards=layout.shards, asked=asked)
        kept = {n: replace(s, dtype=local.state_dtype or s.dtype) for n, s in specs_of(parameters).items()}
        self._here = on_replica(local, kept, groups.whole.rank(), replicas)
        self._first_step = 0
        self._has_begun = False
        self._equal_at = 0
        self._meeting = Meeting(groups.whole)
        self._dense = sum(spec.nbytes for spec in specs_of(parameters).values())
        times = self._collectives.times = StepTimes(self._ops.device, local.cycle)
        self._watch = Watcher(repr(local), local.start_step, times, groups.whole, cycle=local.cycle, work="averaging")
        self._state = self._fresh()

    def __repr__(self) -> str:
        """What it does, and what it has saved."""
        stats = self.stats()
        saved = size_of(max(stats.dense_bytes - stats.bytes_sent, 0))
        spent = f", {stats.compress_share:.0%} of a step spent averaging" if stats.step_seconds else ""
        what = f"{self.local!r}: {len(self._parameters)} tensors, {size_of(self._dense)}"
        return f"{type(self).__name__}({what}; {stats.steps} steps, {saved} saved{spent})"

    def _fresh(self) -> State[Tensor]:
        with torch.no_grad():
            parameters = {n: p.detach() for n, p in self._parameters.items()}
            return self._here.init(self._ops, parameters, self._replicas)

    def _begin(self) -> None:
        """Before each step of the optimizer."""
        if not self._has_begun and self.local.anchored:
            # Weights may have been loaded since registration: replicas part from what is there now.
            self._state = self._fresh()
        self._has_begun = True

    @uncompiled
    def step(self) -> None:
        """Count a step, and average if it is time to. `optimizer.step()` calls this; call it yourself if you gave no optimizer.

        Raises:
            RuntimeError: under DDP's `join()`, where ranks step a different number of times; or captured in a CUDA graph.
        """
        refuse_capture(f"{self.local!r}, whose schedule the host counts,")
        if self._ddp is not None and self._ddp._join_config.enable:
            raise RuntimeError(
                "local SGD needs the same number of steps on all ranks, and DDP's join() is for when they differ; give all ranks equally "
                "many batches"
            )
        times = self._watch.times
        if self.local.acts(self.steps, self._replicas):
            start = times.now()
            with torch.no_grad(), plain_arithmetic(self._ops.device), span(self.local, "average"):
                self._average()
            times.worked(start)
        self.steps += 1
        self._watch.end_step(self._progress(), tuple, 1.0)
        times.begin()  # a step reaches from one of the optimizer to the next

    def _average(self) -> None:
        local, step = self.local, self.steps
        due = self._due(step)
        # In their logical order, so that memory means the same on every backend.
        params = {n: p.detach().contiguous() for n, p in self._parameters.items()}
        if self._layout is not None and local.anchored:
            # A replica that has broken goes back to the anchor with all its shards.
            finite = torch.stack([self._ops.all_finite(p) for p in params.values()]).all()
            ok = on_all_shards(finite, self._layout.shards)
            params = dict(zip(params, self._ops.nan_unless(ok, list(params.values())), strict=True))
        extras: dict[str, dict[str, Tensor]] = {n: {"": b.detach().contiguous()} for n, b in self._buffers.items()}
        if due:
            extras |= self._moments.taken(due)
        program = self._here.average(self._ops, params, self._state, step, self._replicas, extras)
        after, state, others = run_alone(self._collectives, program, self._make_step)
        for name, x in after.items():
            _put(self._parameters[name], x)
        for name, buffer in self._buffers.items():
            _put(buffer, others[name][""])
        self._state = State(
            owned(state.shared, self._state.shared),
            {n: owned(m, self._state.tensors[n]) for n, m in state.tensors.items()},
        )
        self._moments.put({n: others[n] for n in others if n in self._parameters}, due)

    def _due(self, step: int) -> set[str]:
        """Names of the parameters that are averaged after this step."""
        periods = [level.period for level in self.local.levels(self._replicas)]
        parts = self.local.parts(specs_of(self._parameters))
        return {
            name
            for number, names in enumerate(parts)
            if any(self.local.due(step, period, number) for period in periods)
            for name in names
        }

    @property
    def synchronized(self) -> bool:
        """Whether parameters (and averaged buffers) are the same on all ranks now, as they were left by the last step: then a checkpoint of
        one rank holds them for all. With several fragments they never are all at once after `start_step`, unless by `synchronize`."""
        if self.steps <= self.local.start_step and self._buffers:
            return self.steps == self._equal_at
        return self._parameters_are_equal

    @property
    def _parameters_are_equal(self) -> bool:
        if self.steps <= self.local.start_step or self.steps == self._equal_at:
            return True
        return self.local.fragments == 1 and self.local.due(self.steps - 1, self.local.levels(self._replicas)[0].period)

    def synchronize(self) -> None:
        """Average all parameters and averaged buffers over all ranks now, whatever the schedule says: for the end of training, or before
        an evaluation. To be called on all ranks. Anchors and memories stay as they are."""
        start = self._watch.times.now()
        with torch.no_grad():
            tensors = [*self._parameters.values(), *self._buffers.values()]
            arrays = {i: tensor.detach().contiguous() for i, tensor in enumerate(tensors)}
            for i, x in run_alone(self._collectives, mean_each(arrays, watched=False)).items():
                _put(tensors[i], x)
        self._watch.times.worked(start)
        self._equal_at = self.steps

    def stats(self) -> Stats:
        """Steps, bytes and collectives since registration, of gradients and parameters. `dense_bytes` is what averaging the gradients in
        each step would have sent. Skipped steps are not counted: each rank has its own. Times are of the last 50 steps, or of a whole cycle of the
        schedule: a step reaches from one of the optimizer to the next."""
        _, nbytes, dense = self._progress()
        sent = Sent(sum(sent.collectives for sent in self._sent()), nbytes)
        return stats_of(self._watch.times.read(), self.steps - self._first_step, 0, sent, dense)

    def _sent(self) -> list[Sent]:
        """By parameters, and by gradients."""
        drivers = [] if self._gradients is None else [self._gradients]
        return [self._collectives.sent, *(driver.collectives.sent for driver in drivers)]

    def _progress(self) -> Progress:
        nbytes = sum(sent.nbytes for sent in self._sent())
        return Progress(self.steps, nbytes, (self.steps - self._first_step) * self._dense)

    def state_dict(self) -> dict[str, Any]:
        """The step and the memory of all ranks (anchors, velocities, the mean of what a compressor left out), for a checkpoint that any number of
        ranks can continue, together with the parameters of one of them. Every rank calls this, and every rank receives the same.

        Between two averages the parameters of one rank are not those of all, and what the others have learned since would be lost. So call
        `synchronize` before you save, or save when `synchronized`.

        Returns:
            Plain nested dictionaries of tensors on the CPU, numbers and strings, by parameter name.

        Raises:
            RuntimeError: on every rank, if parameters differ between ranks now; or some ranks have not called it within 10 minutes.
        """
        if not self._parameters_are_equal:
            raise RuntimeError(
                f"after {self.steps} steps of {self.local!r} each rank has parameters of its own, and a checkpoint of one rank would lose what "
                "the others have learned since the last average. Call synchronize() on every rank before you save parameters and state, or save "
                "where handle.synchronized is true; or save rank_state_dict() with the parameters and the optimizer of each rank"
            )
        require_all_ranks(self._meeting, "state_dict()", "rank_state_dict()")
        own, whole = self._state_dict(lambda x: x), self._groups.whole
        if self._layout is not None:
            return sharded(own, self._abstract(self._layout), self.local.per_replica, self._layout)
        if (parts := parts_of(self._here)) is not None:
            own |= head("local_sgd", repr(without_levels(self.local)), self.steps)
            state = gathered_over_nodes(
                own, parts, self.local.per_replica, self._groups, self._ops.device, "mean", None
            )
        else:
            state = gathered(own, self.local.per_replica, whole, self._ops.device, "mean", None)
        assert state is not None
        return state

    @property
    def sharded_state(self) -> ShardedState:
        """For `torch.distributed.checkpoint`: what `state_dict` gives, and where it does; and each rank's own memory as an entry of its own. As many
        ranks go on bit for bit, another number from the mean."""
        return ShardedState(self)

    @property
    def identity(self) -> dict[str, Any]:
        """What a state says of itself that is of this very rank, of as many, and of this schedule."""
        state = of_this_rank({"algorithm": repr(self.local)}, self._groups.whole)
        return state if self._layout is None else of_shard(state, self._layout)

    @property
    def per_replica(self) -> Collection[str]:
        """Names of the memories that each rank has for itself."""
        return self.local.per_replica

    def rank_state_dict(self) -> dict[str, Any]:
        """The step and this rank's memory, copied where it is: to be saved on each rank, with its parameters and its optimizer, and loaded by the
        same rank of the same number of them. Communicates nothing."""
        state = of_this_rank(self._state_dict(Tensor.clone), self._groups.whole)
        state |= {"synchronized": self._parameters_are_equal}
        return state if self._layout is None else of_shard(state, self._layout)

    def _abstract(self, layout: Layout) -> State[AbstractArray]:
        """The memory of whole parameters."""
        whole = abstract_arrays(whole_specs(layout))
        return self.local.init(AbstractOps(), whole, self._replicas)

    def _state_dict(self, kept: Any) -> dict[str, Any]:
        return {
            **head("local_sgd", repr(self.local), self.steps),
            "shared": {k: kept(v) for k, v in self._state.shared.items()},
            "tensors": {n: {k: kept(v) for k, v in m.items()} for n, m in self._state.tensors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, or from the `rank_state_dict` of this rank. To be called on all ranks: it compares the step and the
        memory, so that none waits for averages that others have behind them.

        Raises:
            ValueError: on every rank, with nothing changed, if the state does not fit on one of them, or they differ.
            RuntimeError: some ranks have not called it within 10 minutes.
        """
        why_not, loaded, identity = "", self._state, ""
        try:
            found = state if self._layout is None else self._of_this_shard(state, self._layout)
            loaded, _ = load_part(found, self._here, self._state, self._groups.whole, strict=True, kind="local_sgd")
            if parts_of(self._here) is None:  # else ranks have different parts of it
                identity = digest(loaded, self._state, self.local.per_replica)
        except ValueError as error:
            why_not = str(error)
        if self._layout is not None:
            why_not = obstacle_of_shards(self._layout, "", why_not)
        together = "load_state_dict() compares the step, so every rank calls it, with the same state"
        self._meeting.come("load_state_dict()", together, longest=LONGEST)
        settings = {"step": str(state.get("step")), "state": identity}
        require_same_on_all_ranks(self._groups.whole, settings, {}, why_not, self._ops.device)
        self._state = State(
            {k: x.to(self._state.shared[k], copy=True) for k, x in loaded.shared.items()},
            {
                n: {k: x.to(self._state.tensors[n][k], copy=True) for k, x in m.items()}
                for n, m in loaded.tensors.items()
            },
        )
        self._first_step += state["step"] - self.steps
        self.steps = state["step"]
        self._watch.restart()
        self._equal_at = self.steps if state.get("synchronized", "rank" not in state) else -1
        self._has_begun = True

    def _of_this_shard(self, state: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
        memory = self._state
        found = portable(to_tensors(state), layout, memory.tensors, self.local.per_replica, "local_sgd")
        return found if "rank" in found else recut(found, layout.pieces, memory)


class _Gradients(Driver):
    """Averages gradients under DDP, at the step that the handle counts: a backward pass more or less does not move the schedule."""

    def __init__(self, handle: LocalSGDHandle, message_bytes: int | None) -> None:
        specs = specs_of(handle._parameters)
        super().__init__(
            handle.local.gradients(handle._replicas), specs, handle._ops.device, handle._groups, message_bytes
        )
        self._handle = handle
        self.collectives.times = self.watch.times = handle._watch.times

    def add(
        self, gradients: Mapping[str, Tensor], *, first: bool, last: bool, unused: Collection[str] | None = None
    ) -> None:
        if first:
            self.steps = self._handle.steps
        super().add(gradients, first=first, last=last, unused=unused)

    def _begin_step(self) -> None:
        """The handle's steps are noted, of which this is a part."""

    def _end_step(self) -> None:
        """Nor does it end here, and what these gradients save says nothing: parameters are sent too."""


def _put(tensor: Tensor, value: Tensor) -> None:
    if value.data_ptr() != tensor.data_ptr() or value.stride() != tensor.stride():
        tensor.detach().copy_(value)


def _fitted(local: LocalSGD, group: dist.ProcessGroup, parameters: Mapping[str, Tensor]) -> tuple[LocalSGD, str]:
    """The configuration with nodes replaced by their size; and why it does not fit this group and these parameters, or ""."""
    try:
        if local.mentions_nodes:
            local = local.on_nodes_of(node_size(group))
        abstract = abstract_arrays(specs_of(parameters))
        on_replica(local, specs_of(parameters), 0, dist.get_world_size(group))
        local.init(AbstractOps(), abstract, dist.get_world_size(group))
    except ValueError as error:
        return local, str(error)
    return local, ""


def _obstacle(
    module: nn.Module,
    ddp: DistributedDataParallel | None,
    layout: Layout | None,
    optimizer: torch.optim.Optimizer | None,
    local: LocalSGD,
    buffers: str,
    moments: str,
    group: dist.ProcessGroup,
) -> str:
    """Why this rank cannot take part; "" if it can."""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if not parameters:
        return "module has no parameter with requires_grad=True, so there is nothing to average"
    for option, value, known in (
        ("buffers", buffers, ("average", "keep")),
        ("moments", moments, ("keep", "average", "reset")),
    ):
        if value not in known:
            return f"{option}={value!r} is not one of {', '.join(map(repr, known))}"
    if ddp is None and layout is None and _averages_gradients(local):
        return f"{local!r} averages gradients as well, and a plain module has nobody to do it; wrap it in DistributedDataParallel first"
    if why_not := sharded_hook_obstacle(module):
        return why_not
    if ddp is not None:
        if why_not := hook_obstacle(ddp):
            return why_not
        if dist.get_world_size(group) != dist.get_world_size(ddp.process_group):
            return "process_group is not that of the DDP; leave it out"
        if ddp.broadcast_buffers and any(True for _ in module.buffers()):
            return (
                "ddp broadcasts buffers before each forward pass, a message in each step; build it with "
                "DistributedDataParallel(model, broadcast_buffers=False): local SGD averages them with the parameters"
            )
    if type(local.compressor).__repr__ is object.__repr__:
        return f"compressor {type(local.compressor).__name__} has no repr to compare its options by; make it a frozen dataclass"
    if optimizer is None and moments != "keep":
        return f"moments={moments!r} needs the optimizer"
    if optimizer is not None:
        own = {id(p) for p in module.parameters()}
        foreign = [tuple(p.shape) for g in optimizer.param_groups for p in g["params"] if id(p) not in own]
        if foreign:
            return f"optimizer steps parameters of shapes {some(foreign)} that are not in module, and nobody would average them"
        if type(optimizer).__name__ in SHARDED:
            return f"{type(optimizer).__name__} needs equal gradients on all ranks; give an optimizer that steps alone"
        if moments == "reset" and isinstance(optimizer, torch.optim.Adagrad):
            return "moments='reset' drops what Adagrad makes only when it is built; use 'average' or 'keep'"
    return obstacle(module, AllReduce(), parameters if layout is None else layout.blocks())


def _averages_gradients(local: LocalSGD) -> bool:
    return bool(local.start_step or local.subgroup is not None)
