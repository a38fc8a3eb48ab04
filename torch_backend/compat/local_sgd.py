"""torch's own names for local SGD: only the import lines change.

    from gradwire.torch_backend import PostLocalSGDState, post_localSGD_hook
    from gradwire.torch_backend import PeriodicModelAverager, PostLocalSGDOptimizer

    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
    ddp.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=100)
    optimizer = PostLocalSGDOptimizer(optimizer, averager)

They count and average as torch's do, and differ where torch's go wrong: parameters without a
gradient in a step are averaged as well; a hook and an averager whose warm-ups leave a gap are
refused; a step that a `GradScaler` skips on one rank does not make the others wait for ever; nodes
are found without CUDA. New code calls `gradwire.torch_backend.local_sgd`, where one schedule holds
for both.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the real
# objects.

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState as TorchsState,
)
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.protocol import mean_each
from gradwire.core.protocol.groups import Groups
from gradwire.core.state.checkpoint import step_in
from gradwire.torch_backend.compat.hooks import one_message
from gradwire.torch_backend.ddp.bucket_hook import BackwardPass, as_it_is
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.cuda_graphs import refuse_capture
from gradwire.torch_backend.engine.groups.process_groups import (
    ProcessGroups,
    given_or_default,
    node_size,
)
from gradwire.torch_backend.engine.scheduler import run_alone
from gradwire.torch_backend.engine.torch_modes import uncompiled
from gradwire.torch_backend.local_sgd.optimizer_hooks import scaled_gradients
from gradwire.torch_backend.local_sgd.wrapped_optimizer import is_wrapped
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.torch_internals import SKIPS_BY_ITSELF

logger = logging.getLogger(__name__)

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class PostLocalSGDState(TorchsState):
    """Who averages gradients and until when, for `post_localSGD_hook`, with torch's arguments. An
    instance of torch's class too: Lightning asks for that.

    Args:
        process_group: whose ranks average gradients at first; None is the default group.
        subgroup: whose ranks do afterwards; None is the ranks on this machine, which torchrun
            counts (LOCAL_WORLD_SIZE).
        start_localSGD_iter: K, number of steps with global gradients.
        post_local_gradient_allreduce: False: gradients stay local afterwards.

    Attributes:
        iter: number of steps (backward passes that synchronize) taken.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,  # noqa: N803  (torch's name)
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        # Not torch's `__init__`, which speaks of it.
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        self._pass = BackwardPass()

    def _end_step(self) -> None:
        self.iter += 1

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("Process groups cannot be saved and are left out of the saved state.")
        kept = ("start_localSGD_iter", "post_local_gradient_allreduce", "iter")
        return {name: getattr(self, name) for name in kept} | {
            "process_group": None,
            "subgroup": None,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._pass = BackwardPass()


@uncompiled
def post_localSGD_hook(  # noqa: N802
    state: PostLocalSGDState, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """Average gradients over all ranks until `start_localSGD_iter`, then over the subgroup, or not
    at all.

    Args:
        state: who averages and until when, one for each DDP module.
        bucket: that DDP hands over: dense gradients of one float dtype, on one device.

    Returns:
        A future of the averaged bucket, a tensor of the same shape and dtype.
    """
    if state._pass.enter(bucket.index(), bucket.is_last(), state._end_step):
        if state.iter <= state.start_localSGD_iter:
            refuse_capture(
                f"post_localSGD_hook before start_localSGD_iter={state.start_localSGD_iter}"
            )
        if state.subgroup is None and state.post_local_gradient_allreduce:
            _find_subgroup(state)
        if state.iter == state.start_localSGD_iter:
            logger.info("Local SGD begins after %s steps.", state.iter)
    for parameter in bucket.parameters() if state.iter == 0 else ():
        _warm_ups[parameter] = state
    local = state.iter >= state.start_localSGD_iter
    if bucket.is_last():
        state._end_step()
    if local and not state.post_local_gradient_allreduce:
        return as_it_is(bucket.buffer())
    return one_message(state.subgroup if local else state.process_group, bucket, AllReduce())


def _find_subgroup(state: PostLocalSGDState) -> None:
    """Find the subgroup in the first step already: what cannot work is said there, and not after a
    thousand. It may never come to it, so that is no error yet."""
    begins = state.iter >= state.start_localSGD_iter
    if not begins and state.iter > 0:
        return
    try:
        state.subgroup = _node(state.process_group)
    except ValueError as error:
        why = (
            "PostLocalSGDState(subgroup=None) averages among the ranks of a machine from step"
            f" {state.start_localSGD_iter} on, and {error}"
        )
        if begins:
            raise ValueError(why) from error
        warnings.warn(why, stacklevel=3)


#: Which state a parameter's gradients are averaged by, to compare its warm-up with that of an
#: averager.
_warm_ups: Any = WeakIdKeyDictionary()


class _Averager(ModelAverager):
    """What torch's averagers have in common, and what they leave out."""

    def __init__(self, warmup_steps: int, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must not be negative")
        self.warmup_steps = warmup_steps
        self._compared = False

    def _group_now(self) -> dist.ProcessGroup | None:
        """Who averages at this step, if anybody does."""
        raise NotImplementedError

    @uncompiled
    def average_parameters(self, params: Parameters) -> None:
        """Average parameters, if this step is one for it, and count it. To be called on all ranks
        after each step of the optimizer.

        Args:
            params: parameters, or an optimizer's `param_groups`. All that require gradients are
                averaged, with or without one now.

        Raises:
            ValueError: the hook lets gradients be local before this averager begins.
        """
        refuse_capture(f"{type(self).__name__}, whose schedule the host counts,")
        group = self._group_now()
        if group is not None or not self._compared:
            parameters = _listed(params)
            if not self._compared:
                self._compare(parameters)
            if parameters and group is not None and dist.get_rank(group) >= 0:
                _average(parameters, group)
        self.step += 1

    def _compare(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = _warm_ups.get(parameter)
            if state is None:
                continue
            start = state.start_localSGD_iter
            both = (
                f"warmup_steps={self.warmup_steps} of {type(self).__name__} and"
                f" start_localSGD_iter={start} of PostLocalSGDState"
            )
            if self.warmup_steps > start:
                raise ValueError(
                    f"{both}: from step {start} to {self.warmup_steps} nothing would keep the"
                    " replicas together; give both one number"
                )
            if self.warmup_steps < start:
                warnings.warn(
                    f"{both}: until step {start} parameters that are equal anyway are averaged;"
                    " give both one number",
                    stacklevel=4,
                )
            break
        self._compared = True


class PeriodicModelAverager(_Averager):
    """Averages parameters at the steps `warmup_steps`, `warmup_steps + period`, … (counted from 0),
    with torch's arguments.

    Examples:
        >>> import torch
        >>> from gradwire.torch_backend import PeriodicModelAverager
        >>> model = torch.nn.Linear(64, 32)
        >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
        >>> averager.average_parameters(model.parameters())    # after optimizer.step()
        >>> averager.step
        1

    Args:
        period: steps from one average to the next.
        warmup_steps: steps before the first; the `start_localSGD_iter` of the hook's state.
        process_group: whose ranks average; None is the default group.

    Attributes:
        step: calls of `average_parameters` so far.

    Raises:
        ValueError: `period` below 1, `warmup_steps` below 0.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> None:
        if period < 1:
            raise ValueError(f"period={period} must be at least 1")
        if period == 1:
            _warn_of_every_step("period")
        super().__init__(warmup_steps, process_group)
        self.period = period

    def _group_now(self) -> dist.ProcessGroup | None:
        since = self.step - self.warmup_steps
        return self.process_group if since >= 0 and since % self.period == 0 else None


class HierarchicalModelAverager(_Averager):
    """Averages parameters in groups of several sizes, each at the steps that its period divides,
    with torch's arguments.

    Of several groups that are due the one with the largest period averages. Note that steps are
    counted from 0 and not from the end of the warm-up, as torch does.

    Args:
        period_group_size_dict: period → number of ranks, both ascending; the last is all ranks.
        warmup_steps: steps without averages at first.
        process_group: of all ranks that take part; None is the default group.

    Attributes:
        step: calls of `average_parameters` so far.
        period_process_group_dict: period → the group of this rank.

    Raises:
        ValueError: naming the period or size that does not fit.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not period_group_size_dict:
            raise ValueError(
                "period_group_size_dict must not be empty; give period → number of ranks"
            )
        super().__init__(warmup_steps, process_group)
        periods, sizes = list(period_group_size_dict), list(period_group_size_dict.values())
        world_size = dist.get_world_size(self.process_group)
        if periods[0] < 1:
            raise ValueError(
                f"period_group_size_dict has period {periods[0]}; it must be at least 1"
            )
        if periods != sorted(periods) or sizes != sorted(sizes):
            raise ValueError(
                f"period_group_size_dict={dict(period_group_size_dict)}: periods and sizes must"
                " ascend together, or a group of many would be replaced by one of few"
            )
        if sizes[-1] != world_size:
            raise ValueError(
                f"the last size in period_group_size_dict is {sizes[-1]}, but process_group has"
                f" {world_size} ranks, which must all average now and then"
            )
        if periods[-1] == 1:
            _warn_of_every_step("the largest period")
        partitions = {
            period: _consecutive(world_size, size)
            for period, size in period_group_size_dict.items()
            if size != world_size
        }
        groups = ProcessGroups(self.process_group, partitions.values())
        self.period_process_group_dict = {
            period: groups[partitions.get(period)] for period in periods
        }

    def _group_now(self) -> dist.ProcessGroup | None:
        due = [
            group
            for period, group in self.period_process_group_dict.items()
            if self.step % period == 0
        ]
        return due[-1] if due and self.step >= self.warmup_steps else None


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Any optimizer, and after each of its steps an averager, with torch's arguments.

    Examples:
        >>> import torch
        >>> from gradwire.torch_backend import PeriodicModelAverager, PostLocalSGDOptimizer
        >>> model = torch.nn.Linear(64, 32)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = PostLocalSGDOptimizer(sgd, PeriodicModelAverager(period=4))
        >>> model(torch.ones(2, 64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state_dict()["step"]
        1

    Args:
        optim: the local optimizer.
        averager: one of the averagers above.

    Raises:
        TypeError: accelerate or Lightning has wrapped `optim`.
    """

    _step_supports_amp_scaling = True

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        # The step of a wrapper does nothing while it accumulates, when the averager would count
        # nevertheless.
        if is_wrapped(optim):
            raise TypeError(
                f"optim is a {type(optim).__name__}; give the optimizer itself, and let the tool"
                " wrap what comes of it: accelerator.prepare(PostLocalSGDOptimizer(optimizer,"
                " averager))"
            )
        self.optim = optim
        self.averager = averager

    def __getattr__(self, name: str) -> Any:
        # What `torch.optim.Optimizer.__init__` would have made: hooks, defaults. Groups and state,
        # too: loading replaces them there.
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return repr(self.optim)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, Any]:
        """The state of the local optimizer, in its own form, and under "step" how many steps the
        averager has seen."""
        return self.optim.state_dict() | {"step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave. Without a `step` in it the averager begins anew, with a
        warning.

        Raises:
            ValueError: its `step` is no number of steps. Nothing has been changed then.
        """
        step_in({"step": 0, **state_dict})
        self.optim.load_state_dict(
            {key: value for key, value in state_dict.items() if key != "step"}
        )
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step"
                " counter to 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the local optimizer; then the averager's. Also where a `GradScaler` found
        inf: then only the averager's."""
        arguments = () if closure is None else (closure,)
        flags = {
            key: self.__dict__[key] for key in ("found_inf", "grad_scale") if key in self.__dict__
        }
        if getattr(self.optim, SKIPS_BY_ITSELF, False):
            for key, value in flags.items():
                setattr(self.optim, key, value)
            result = self.optim.step(*arguments)
            for key in flags:
                delattr(self.optim, key)
        else:
            with scaled_gradients(self):
                result = self.optim.step(*arguments)
        averager: Any = self.averager
        averager.average_parameters(self.optim.param_groups)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the local optimizer does it."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the local optimizer further parameters, a dictionary with `params` and options. They
        are averaged with the others."""
        self.optim.add_param_group(param_group)


def _listed(params: Parameters) -> list[Tensor]:
    listed: list[Tensor] = []
    each: Iterable[Any] = params
    for item in each:
        if isinstance(item, tuple):
            raise NotImplementedError(
                "average_parameters was given names with parameters; give parameters, or an"
                " optimizer's param_groups"
            )
        listed += item["params"] if isinstance(item, dict) else [item]
    return [p for p in listed if p.requires_grad]


def _average(parameters: list[Tensor], group: dist.ProcessGroup) -> None:
    with torch.no_grad():
        arrays = {p: p.detach().contiguous() for p in parameters}
        collectives = Collectives(ProcessGroups(group), TorchOps(parameters[0].device))
        for p, average in run_alone(collectives, mean_each(arrays, watched=False)).items():
            if average.data_ptr() != p.data_ptr():
                p.copy_(average)


def _node(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    whole = given_or_default(process_group)
    nodes = _consecutive(dist.get_world_size(whole), node_size(whole))
    return ProcessGroups(whole, [nodes])[nodes]


def _consecutive(world_size: int, size: int) -> Groups:
    if size < 1 or world_size % size:
        raise ValueError(
            f"{world_size} ranks cannot be divided into groups of {size}; use a divisor"
        )
    return tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))


def _warn_of_every_step(what: str) -> None:
    warnings.warn(
        f"{what} is 1: parameters are averaged after every step, which sends as much as averaging"
        " gradients. Use DDP alone.",
        stacklevel=3,
    )
