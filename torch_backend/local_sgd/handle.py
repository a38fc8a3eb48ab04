"""Local SGD in torch: one call, and the training loop stays as it is.

ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
handle = gradwire.torch_backend.local_sgd(ddp, optimizer, gradwire.LocalSGD(period=8, start_step=1000, subgroup="node"))
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.algorithm import State
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.checkpoint import StateMismatch, fit, head
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.local_sgd.plan import local_memory
from gradwire.core.ops import ITEMSIZE
from gradwire.core.plan.advice import warn
from gradwire.core.plan.dry_run import size_of
from gradwire.core.protocol import mean_each
from gradwire.torch_backend.arithmetic import plain_arithmetic
from gradwire.torch_backend.capture import refuse_capture
from gradwire.torch_backend.collectives import Collectives
from gradwire.torch_backend.data_parallel.wrapper import DataParallel
from gradwire.torch_backend.ddp.hook import CommHook, hooked
from gradwire.torch_backend.drive import Driver, owned, specs_of
from gradwire.torch_backend.fsdp.backward import ShardedBackward
from gradwire.torch_backend.fsdp.checkpoint import of_shard, portable, sharded, whole_specs
from gradwire.torch_backend.fsdp.driver import ShardStep, asked_by_some_shard, on_all_shards
from gradwire.torch_backend.fsdp.layout import Layout, local_part, obstacle_of_shards
from gradwire.torch_backend.integrations.wrapped_optimizer import unwrapped
from gradwire.torch_backend.kernels import TorchOps, dtype_name
from gradwire.torch_backend.local_sgd.checks import averages_gradients, fitted, obstacle_of
from gradwire.torch_backend.local_sgd.moments import Moments
from gradwire.torch_backend.meeting import LONGEST, Meeting
from gradwire.torch_backend.own_memory import ShardedState
from gradwire.torch_backend.pieces import recut
from gradwire.torch_backend.process_groups import ProcessGroups, given_or_default
from gradwire.torch_backend.profiling import span
from gradwire.torch_backend.program import Step, run_alone
from gradwire.torch_backend.rank_checks import (
    copy_from_first_rank,
    describe,
    require_initialized,
    require_same_on_all_ranks,
)
from gradwire.torch_backend.sharded import is_fsdp
from gradwire.torch_backend.state import digest, load, of_this_rank, require_all_ranks, to_tensors
from gradwire.torch_backend.stats import Sent, Stats
from gradwire.torch_backend.step_hooks import step_on_every_rank
from gradwire.torch_backend.step_times import StepTimes
from gradwire.torch_backend.two_levels import gathered_from_nodes, keeps_rows, row_of_node
from gradwire.torch_backend.uncompiled import uncompiled
from gradwire.torch_backend.watch import Progress, Watcher


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

    fit_here = fitted(local, group, parameters, averager=ddp is not None or layout is not None)
    local = fit_here.local
    why_not = fit_here.obstacle or obstacle_of(inner, ddp, layout, optimizer, buffers, moments, group)
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
    groups = ProcessGroups(group, fit_here.groups)
    if ddp is None:
        copy_from_first_rank([*map(local_part, inner.parameters()), *inner.buffers()], group)
    moved = Moments(optimizer, trained, moments, group)
    handle = LocalSGDHandle(local, group.size(), parameters, averaged_buffers, moved, groups, layout)
    handle._message_bytes = message_bytes
    if ddp is not None:
        handle._gradients = _Gradients(handle, message_bytes)
        handle._hook, handle._ddp = hooked(ddp, handle._gradients, parameters), weakref.ref(ddp)
    elif layout is not None and averages_gradients(local):
        handle._average_by(_Gradients(handle, message_bytes))
    if optimizer is not None:
        handle._leave_optimizer = step_on_every_rank(optimizer, handle._begin, handle.step)
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
        self.steps = 0
        self._replicas = replicas
        self._parameters = parameters
        self._buffers = buffers
        self._moments = moments
        self._ops = TorchOps(next(iter(parameters.values())).device)
        self._gradients: Driver | None = None
        self._message_bytes: int | None = None
        # Who hands gradients over: of DDP, which must not be held by what its reducer holds, or of a sharded model.
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._hook: CommHook | None = None
        self._backward: ShardedBackward | None = None
        self._leave_optimizer: Callable[[], None] = lambda: None
        self._registered = True
        self._layout = layout
        self._first_step = 0
        self._has_begun = False
        self._equal_at = 0
        self._scheduled_from = 0
        self._meeting = Meeting(groups.whole)
        self._dense = sum(spec.nbytes for spec in specs_of(parameters).values())
        self._adopt(local, groups)

    def _adopt(self, local: LocalSGD, groups: ProcessGroups) -> None:
        """Do this from the next step on, with a memory that begins with the parameters as they are."""
        self.local, self._groups = local, groups
        self._collectives = Collectives(groups, self._ops)
        self._make_step: Callable[[Collectives], Step] = Step
        specs = specs_of(self._parameters)
        if self._layout is not None:
            asked = (
                frozenset() if local.compressor is None else asked_by_some_shard(local.compressor, specs, self._layout)
            )
            self._make_step = partial(ShardStep, shards=self._layout.shards, asked=asked)
        times = self._collectives.times = StepTimes(self._ops.device, local.cycle)
        self._watch = Watcher(repr(local), local.start_step, times, groups.whole, cycle=local.cycle, work="averaging")
        self._state = self._fresh()

    def __repr__(self) -> str:
        """What it does, and what it has saved."""
        stats = self.stats()
        saved = size_of(max(stats.dense_bytes - stats.bytes_sent, 0))
        spent = f", {stats.compress_share:.0%} of a step spent averaging" if stats.step_seconds else ""
        what = f"{self.local!r}: {len(self._parameters)} tensors, {size_of(self._dense)}"
        what = what if self._registered else f"unregistered; {what}"
        return f"{type(self).__name__}({what}; {stats.steps} steps, {saved} saved{spent})"

    def _fresh(self) -> State[Tensor]:
        with torch.no_grad():
            parameters = {n: p.detach() for n, p in self._parameters.items()}
            return self.local.init(self._ops, parameters, self._replicas)

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
            RuntimeError: under DDP's `join()`, where ranks step a different number of times; or captured in a CUDA graph; or unregistered.
        """
        if not self._registered:
            raise RuntimeError(self._why_not())
        refuse_capture(lambda: f"{self.local!r}, whose schedule the host counts,")
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None and ddp._join_config.enable:
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
        program = self.local.average(self._ops, params, self._state, step, self._replicas, extras)
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
        if self.local.fragments > 1 or self.steps == self._scheduled_from:
            return False
        return bool(self.local.due(self.steps - 1, self.local.levels(self._replicas)[0].period))

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

    def reconfigure(self, local: LocalSGD) -> StateMismatch:
        """Go on with another schedule, outer optimizer or compressor, from the next step on. To be called on all ranks, between steps.

            handle.reconfigure(diloco(500, compressor=PowerSGD(rank=4)))

        Memory is kept where it fits: anchors, velocities, what a compressor has left out, factors of the same shape. Steps and statistics count on,
        so `start_step` means what it says. Parameters that differ between ranks are averaged first, as by `synchronize`, where the new schedule takes
        them to be equal: it makes an anchor of them, or averages gradients of replicas that went their own ways. If it averages those of all
        replicas again (`start_step` is still to come), the optimizer's moments are made equal too, as by `unregister`.

        Args:
            local: what to do, the same on every rank. `buffers`, `moments` and `message_bytes` stay as they are.

        Returns:
            What of the memory did not fit.

        Raises:
            TypeError: no `LocalSGD`.
            ValueError: it cannot be served (named), or ranks ask for different things or are at different steps; on all ranks. Nothing has
                been changed then.
        """
        if why_not := self._why_not():
            raise ValueError(why_not)
        if not isinstance(local, LocalSGD):
            raise TypeError(f"local is a {type(local).__name__}; give LocalSGD(...) or diloco(...)")
        whole, before = self._groups.whole, self.local
        averager = self._hook is not None or self._layout is not None
        fit_here = fitted(local, whole, self._parameters, averager=averager)
        local, why_not = fit_here.local, fit_here.obstacle
        settings = {"call": "reconfigure", "local": repr(local), "step": str(self.steps)}
        if self._layout is not None:
            why_not = obstacle_of_shards(self._layout, repr(settings), why_not)
        require_same_on_all_ranks(whole, settings, {}, why_not, self._ops.device)
        warn(local, specs_of(self._parameters))

        subgroups = local.subgroups(self._replicas)
        if self.steps < local.start_step:
            self._make_equal()
        elif (local.anchored and not before.anchored) or subgroups not in (None, before.subgroups(self._replicas)):
            self._synchronize_if_needed()
        equal, sent = self._parameters_are_equal, self._collectives.sent
        memory = None
        if before.anchored and self.steps >= before.start_step:  # there is one
            kept = keeps_rows(local, before, whole)
            memory = self._state_dict(lambda x: x) if kept else self._gathered()
        self._adopt(local, self._groups.also(fit_here.groups))
        self._collectives.sent = replace(sent)
        difference = StateMismatch() if memory is None else self._continue_from(memory, before)
        self._scheduled_from = self.steps
        if equal:
            self._equal_at = self.steps
        if self._gradients is not None or averages_gradients(local):
            old, new = self._gradients, _Gradients(self, self._message_bytes)
            if old is not None:
                new.collectives.sent = replace(old.collectives.sent)
            self._average_by(new)
        return difference

    def unregister(self) -> None:
        """Take local SGD away: from the next step on gradients are averaged as they are, by DDP or between the replicas of a sharded model, and the
        optimizer steps as it does by itself. To be called on all ranks, between steps. `register_comm_hook`, `compress_replicas` or `local_sgd`
        may then be called on the same module again.

        Replicas are made equal for that, since they have gone their own ways: parameters and averaged buffers are averaged as by `synchronize`.
        The optimizer's moments are averaged too, or dropped with `moments="reset"`; what else it keeps (counters of steps, factors of other
        shapes) is that of the first rank. Of optimizers that were not given to `local_sgd` that is left to you. Gradients of a plain module are
        averaged by nobody.

        Statistics and memory stay readable, and are gone with the handle.

        Raises:
            ValueError: it has been unregistered before; or ranks call different things, or are at different steps.
        """
        settings = {"call": "unregister", "step": str(self.steps)}
        require_same_on_all_ranks(self._groups.whole, settings, {}, self._why_not(), self._ops.device)
        self._make_equal()
        self._leave_optimizer()
        self._registered = False
        if self._hook is not None:
            self._hook.leave()
        elif self._layout is not None:
            self._average_by(Driver(AllReduce(), specs_of(self._parameters), self._ops.device, self._groups.whole))
            assert self._backward is not None
            self._backward.free = True

    def _why_not(self) -> str:
        return (
            ""
            if self._registered
            else "this handle is unregistered; local_sgd(module, optimizer, local) gives a new one"
        )

    def _average_by(self, driver: Driver) -> None:
        """Let this driver average gradients, of DDP or of a sharded model."""
        if isinstance(driver, _Gradients):
            self._gradients = driver
        if self._hook is not None:
            self._hook._use(driver)
        elif self._backward is not None:
            self._backward.use(driver)
        elif self._layout is not None:
            self._backward = ShardedBackward(driver, self._layout, find_unused=False)

    def _make_equal(self) -> None:
        """All replicas, so that with equal gradients they stay so."""
        self._synchronize_if_needed()
        if self.steps > self.local.start_step:
            with torch.no_grad():
                self._moments.make_equal(self._collectives)

    def _synchronize_if_needed(self) -> None:
        if not self.synchronized:
            self.synchronize()

    def stats(self) -> Stats:
        """Steps, bytes and collectives since registration, of gradients and parameters. `dense_bytes` is what averaging the gradients in
        each step would have sent. Skipped steps are not counted: each rank has its own. Times are of the last 50 steps, or of a whole cycle of the
        schedule: a step reaches from one of the optimizer to the next."""
        _, nbytes, dense = self._progress()
        sent = Sent(sum(sent.collectives for sent in self._sent()), nbytes)
        return self._watch.stats(self.steps - self._first_step, 0, sent, dense)

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
        if self._layout is not None:
            own = self._state_dict(lambda x: x)
            return sharded(own, self._abstract(self._layout), self.local.per_replica, self._layout)
        return self._gathered()

    def _gathered(self) -> dict[str, Any]:
        own = self._state_dict(lambda x: x) | head("local_sgd", repr(without_levels(self.local)), self.steps)
        per_replica, device = self.local.per_replica, self._ops.device
        state = gathered_from_nodes(own, self.local, per_replica, self._groups, device, "mean", None)
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
        return local_memory(self.local, whole_specs(layout), self._replicas)

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
            name = repr(without_levels(self.local) if "local" in found else self.local)
            row = row_of_node(self.local, self._groups.whole)
            loaded, _ = load(found, name, self._state, self._groups.whole, strict=True, kind="local_sgd", row=row)
            identity = digest(loaded, self._state, self.local.per_replica)
        except ValueError as error:
            why_not = str(error)
        if self._layout is not None:
            why_not = obstacle_of_shards(self._layout, "", why_not)
        together = "load_state_dict() compares the step, so every rank calls it, with the same state"
        self._meeting.come("load_state_dict()", together, longest=LONGEST)
        settings = {"step": str(state.get("step")), "state": identity}
        require_same_on_all_ranks(self._groups.whole, settings, {}, why_not, self._ops.device)
        self._take(loaded)
        self._first_step += state["step"] - self.steps
        self.steps = state["step"]
        self._watch.restart()
        self._equal_at = self.steps if state.get("synchronized", "rank" not in state) else -1
        self._scheduled_from = 0
        self._has_begun = True

    def _continue_from(self, memory: Mapping[str, Any], before: LocalSGD) -> StateMismatch:
        """Take over what fits of the memory of the schedule before: of this rank, or of all ranks. Returns what did not fit."""
        if "replicas" in memory:
            given = {**memory, "algorithm": repr(without_levels(self.local))}
            whole = self._groups.whole
            row = row_of_node(self.local, whole)
            loaded, difference = load(
                given, repr(without_levels(self.local)), self._state, whole, strict=False, kind="local_sgd", row=row
            )
        else:
            name = repr(without_levels(self.local))
            given = {**memory, "algorithm": repr(without_levels(before))}
            loaded, difference = fit(given, name, self._state, "local_sgd")
        self._take(loaded)
        return difference

    def _take(self, loaded: State[Tensor]) -> None:
        """Put copies of memory that fits in the place of what is here."""
        own = self._state
        self._state = State(
            own.shared | {k: x.to(own.shared[k], copy=True) for k, x in loaded.shared.items()},
            own.tensors
            | {
                n: own.tensors[n] | {k: x.to(own.tensors[n][k], copy=True) for k, x in m.items()}
                for n, m in loaded.tensors.items()
            },
        )

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
        # DDP's reducer holds this driver, where Python cannot see what would lead back to DDP.
        self._handle = weakref.ref(handle)
        self.collectives.times = self.watch.times = handle._watch.times

    def add(
        self, gradients: Mapping[str, Tensor], *, first: bool, last: bool, unused: Collection[str] | None = None
    ) -> None:
        if first and (handle := self._handle()) is not None:
            self.steps = handle.steps
        super().add(gradients, first=first, last=last, unused=unused)

    def _begin_step(self) -> None:
        """The handle's steps are noted, of which this is a part."""

    def _end_step(self) -> None:
        """Nor does it end here, and what these gradients save says nothing: parameters are sent too."""


def _put(tensor: Tensor, value: Tensor) -> None:
    if value.data_ptr() != tensor.data_ptr() or value.stride() != tensor.stride():
        tensor.detach().copy_(value)
