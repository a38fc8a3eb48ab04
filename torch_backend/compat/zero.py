"""Torch's `ZeroRedundancyOptimizer` under its own name: `ZeroOptimizer` with torch's arguments and
attributes.

- from torch.distributed.optim import ZeroRedundancyOptimizer
+ from gradwire.torch_backend import ZeroRedundancyOptimizer
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.zero.sharding import WholeShards
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.engine.torch_modes import uncompiled
from gradwire.torch_backend.setup.consistency import (
    copy_from_first_rank,
    describe,
    require_same_on_all_ranks,
)
from gradwire.torch_backend.zero.arguments import buckets_of, named_groups
from gradwire.torch_backend.zero.optimizer import ZeroOptimizer
from gradwire.torch_backend.zero.trials import refusal


class ZeroRedundancyOptimizer(ZeroOptimizer):
    """`ZeroOptimizer` as torch's class of this name is called. Parameters belong to ranks as a
    whole.

    Args:
        params: parameters, named or not, or groups of them. Those that require no gradient are left
            alone.
        optimizer_class: a class of optimizers, or `functools.partial` of one.
        process_group: whose ranks share the state; None is the default group.
        parameters_as_bucket_view: without effect. Parameters stay where they are, and small ones
            share a message in any case.
        overlap_with_ddp: the step is taken by a hook, which `hook_with_zero_step` or
            `hook_with_zero_step_interleaved` makes; whole buckets belong to ranks. Updates begin
            with the first iteration; torch's skips two or three.
        **defaults: of the optimizer; and the other options of `ZeroOptimizer`.

    Attributes:
        optim: the optimizer of this rank's parameters.
        process_group: whose ranks share the state.
        rank, world_size: in it.

    Raises:
        TypeError, ValueError: as `ZeroOptimizer`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer] | functools.partial[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        self._made = False
        self._overlap_with_ddp = overlap_with_ddp
        self._step_arguments: dict[str, Any] = {}
        if isinstance(optimizer_class, functools.partial):
            if optimizer_class.args:
                raise TypeError(
                    f"optimizer_class={optimizer_class!r} has positional arguments; give them by"
                    " name"
                )
            defaults = {**optimizer_class.keywords, **defaults}
            optimizer_class = optimizer_class.func  # type: ignore[assignment]
        shard: Any = "bucket" if overlap_with_ddp else "parameter"
        inner: Any = optimizer_class
        super().__init__(params, inner, shard=shard, process_group=process_group, **defaults)
        self._made = True

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters, of `optimizer_class`. Its groups and its state
        are this rank's part alone."""
        return self.optimizer

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group whose ranks share the state."""
        return self._process_group

    @property
    def rank(self) -> int:
        """The number of this process in the process group, from 0 on."""
        return self._own.rank

    @property
    def world_size(self) -> int:
        """How many ranks the process group has."""
        return self.shards.world_size

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """A step, see `ZeroOptimizer.step`.

        Args:
            closure: called first, with gradients enabled.
            **kwargs: for the optimizer's own `step`.

        Raises:
            RuntimeError: with `overlap_with_ddp=True` and without a hook nobody would ever take a
                step.
            ValueError: arguments for a step that a hook has taken.
        """
        if self._overlap_with_ddp and not self._in_hook:
            raise RuntimeError(
                "overlap_with_ddp=True leaves the step to a hook, and there is none: "
                "ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))"
            )
        if kwargs and self._in_hook:
            raise ValueError(
                f"step({', '.join(kwargs)}): the hook has taken the step, without these arguments"
            )
        self._step_arguments = kwargs
        return super().step(closure)

    def _step_pieces(self) -> None:
        self.optimizer.step(**self._step_arguments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Optimize further parameters. Every rank calls this, with the same; each of them goes to
        the rank that has the fewest elements.

        Raises:
            TypeError: not a group of parameters.
            ValueError: a hook takes the step; parameters that are optimized already, or on another
                device; or ranks that add different things. Nothing has been changed then.
        """
        if not self._made:
            super().add_param_group(param_group)
            return
        if self._in_hook:
            raise ValueError(
                "a hook takes the step of this optimizer; add parameters before"
                " hook_with_zero_step, and wrap the model anew"
            )
        own = self._own
        known = [
            {"params": [(name, own.parameters[name]) for name in names]}
            for names in own.group_names
        ]
        groups, names, frozen = named_groups([*known, param_group])
        group = groups[-1]
        new = {names[p]: p for p in group["params"]}
        obstacle, device = (
            refusal(own.rules[-1].optimizer, [group], own.master_dtype) or "",
            self._device,
        )
        if not obstacle and any(p.device != device for p in new.values()):
            obstacle = f"the new parameters are not on {device}, where the others are"
        options = {key: value for key, value in group.items() if key != "params"}
        settings = {"call": "add_param_group", "options": str(options)}
        require_same_on_all_ranks(
            self._process_group, settings, describe(new), str(obstacle), device
        )
        if self._average_gradients:
            copy_from_first_rank(list(new.values()), self._process_group)
        self._names, self._whole = names, None
        # they may have been thawed
        self._frozen = {name: p for name, p in self._frozen.items() if p not in names}
        self._frozen |= {
            f"{name} of group {len(self.param_groups)}": p for name, p in frozen.items()
        }
        own.add(new, options, self._divided(new))
        self._zero = replace(self._zero, shards=own.shards)
        self._buckets += buckets_of(new, self._limits)
        torch.optim.Optimizer.add_param_group(self, group)
        self._copy_options(self.optimizer.param_groups[-1:], self.param_groups[-1:])
        self._step = self._sharded_step(averaged=not self._average_gradients)
        self._assumed.leave()
        self._assume()

    def _divided(self, new: Mapping[str, Tensor]) -> WholeShards:
        """Owners for new parameters; who owns the others stays, and so does their state."""
        assert isinstance(self.shards, WholeShards)
        specs = specs_of(new)
        work = {name: self._own.rules[-1].work(spec) for name, spec in specs.items()}
        return self.shards.extend(specs, work)

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Uneven inputs (`Join([ddp, optimizer])`) are refused: raises NotImplementedError."""
        raise NotImplementedError(
            "Join([..., optimizer]): a rank whose data have ended has no gradients, and would"
            " update its part of the model by old ones. Give all ranks as many batches"
            " (DistributedSampler(..., drop_last=True)), or leave the optimizer out and use a plain"
            " one with Join([ddp])"
        )
