"""`ZeroOptimizer`: any torch optimizer, with its state sharded over the ranks.

optimizer = gradwire.torch_backend.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW,
lr=3e-4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.buckets.assignment import Mebibytes, bucket_limits
from gradwire.core.codecs.options import WireName
from gradwire.core.plan.dry_run import size_of
from gradwire.core.state.skipped_steps import RunOfSkips
from gradwire.core.text.options import OWN_CHECK, Positive, checked
from gradwire.core.zero.sharded_step import Zero
from gradwire.core.zero.sharding import Shards, shard_by_bucket
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.engine.groups.barrier import Meeting
from gradwire.torch_backend.engine.groups.gathered_objects import gathered_by
from gradwire.torch_backend.engine.groups.process_groups import given_or_default
from gradwire.torch_backend.engine.groups.whereabouts import Whereabouts
from gradwire.torch_backend.engine.torch_modes import outside_inference_mode, uncompiled
from gradwire.torch_backend.monitor.stats import Stats
from gradwire.torch_backend.setup.assumptions import Assumptions
from gradwire.torch_backend.setup.consistency import copy_from_first_rank
from gradwire.torch_backend.setup.layout import laid_out_like
from gradwire.torch_backend.setup.self_check import wrong_here
from gradwire.torch_backend.setup.sharded_models import sharded_parameter
from gradwire.torch_backend.state.loss_scale import require_all_ranks, require_receiver, scale_of
from gradwire.torch_backend.state.rank_memory import on_cpu
from gradwire.torch_backend.torch_internals import load_with_hooks, save_with_hooks
from gradwire.torch_backend.zero.arguments import (
    agreed_on,
    buckets_of,
    divide,
    named_groups,
    require_parameters,
    require_sharded,
)
from gradwire.torch_backend.zero.checkpoint import ShardedState, require_served
from gradwire.torch_backend.zero.owned_muon import OnShards
from gradwire.torch_backend.zero.rules import made, misfit, rules_of
from gradwire.torch_backend.zero.shard import Shard
from gradwire.torch_backend.zero.sharded_step import ShardedStep
from gradwire.torch_backend.zero.state import COUNTED, Counted, load_shard, shard_state
from gradwire.torch_backend.zero.state import consolidate as consolidate_shards
from gradwire.torch_backend.zero.trials import refusal, require_independent_parameters

BUCKET_CAP_MB, FIRST_BUCKET_MB = 25, 1
#: What is of no use where parameters are sharded already, and what it is by default.
OF_NO_USE = {
    "max_grad_norm": None,
    "master_dtype": None,
    "average_gradients": False,
    "wire_dtype": None,
    "consolidate": False,
    "bucket_cap_mb": BUCKET_CAP_MB,
}


class ZeroOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is divided among the ranks: each keeps the state of its part of the
    model, updates that part, and receives the other parts from their owners (Rajbhandari et al.
    2020, "ZeRO", §5).

        ddp = DistributedDataParallel(model)
        optimizer = ZeroOptimizer(ddp.module.named_parameters(), torch.optim.AdamW, lr=3e-4)
        ...
        loss.backward()
        optimizer.step()

    So used it follows any data-parallel wrapper and any communication hook, and everything that
    works on a plain optimizer works on it:
    parameter groups, LR schedulers, `GradScaler`, clipping before `step`. It sends the parameters
    (an all-gather) besides the gradients. `hook_with_zero_step` sends no more than plain
    data-parallel training does, and overlaps the step with communication; `average_gradients=True`
    does the former without DDP.

    On a model of `fully_shard`, whose parameters are DTensors over (shard) or (replicate, shard),
    patterns with `torch.optim.Muon` and "parameter" give each matrix to one rank: momentum stays
    sharded, and travels there, asynchronously, while the matrix before is orthogonalized. The other
    patterns are "element", torch's optimizers on DTensors. `state_dict` is that of any optimizer on
    DTensors. All ranks must have gradients of the same parameters.

    Examples:
        >>> import torch
        >>> from gradwire.torch_backend import ZeroOptimizer
        >>> model = torch.nn.Linear(64, 32)
        >>> options = {"average_gradients": True, "lr": 3e-4}
        >>> optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, **options)
        >>> model(torch.ones(2, 64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.stats().steps, sorted(optimizer.consolidated_state_dict())
        (1, ['counted', 'param_groups', 'parameters_with_state', 'state'])

    Args:
        params: named parameters, parameters, or groups of either, as for any optimizer. State is
            kept under the names; parameters without one are called `parameter.0`, `parameter.1`, …
            Those that do not require a gradient are left alone; a gradient that one of them has in
            a later `step` is an error.
        optimizer_class: any class of optimizers with the usual arguments. Or several, {pattern:
            (class, options, shard)}, where `shard` is "element" or "parameter": each takes the
            parameters whose names its pattern is the first to match (`fnmatch`), which become a
            parameter group of its own, so Muon for hidden matrices and AdamW for the rest are one
            optimizer with one state. A class may be given by its name in `torch.optim`. Whole
            parameters are balanced by work: where matrices are orthogonalized that is n·m·min(n,
            m).
        shard: "element": every parameter in as many equal pieces as there are ranks, for optimizers
            that treat each element by itself (tried out here). "parameter": whole parameters,
            balanced by size. "bucket": whole buckets of parameters.
        process_group: whose ranks share the state; None is the default group.
        max_grad_norm: scale gradients down to this 2-norm over all parameters, as
            `torch.nn.utils.clip_grad_norm_` does.
        master_dtype: keep the owned part of the parameters in this dtype too, with the optimizer's
            state, and update that:
            `torch.float32` for bfloat16 parameters. None: the parameters themselves are updated.
        average_gradients: gradients are each rank's own, and `step` averages them by
            reduce-scatter. For a model that no data-parallel wrapper holds; parameters are
            overwritten with rank 0's now. A parameter without a gradient counts as one with zeros.
            Not for `GradScaler`.
        wire_dtype: gradients travel to their owners in this dtype, and are summed in float32:
            "int8" and the others of `gradwire.WireDtype`. With `average_gradients=True`, or in a
            hook with `allreduce_hook`. New parameters travel as they are. None: so do gradients.
        consolidate: `state_dict` gathers the state of the whole model by itself, so that every rank
            has to call it, and receives all of it: for tools that do so, such as accelerate.
        bucket_cap_mb: messages of about so many MiB of parameters. In the hook forms buckets are
            DDP's.
        **defaults: of the optimizer.

    Raises:
        TypeError: `optimizer_class` is not a class of optimizers, `params` is no iterable of
            parameters, or none of them requires a gradient.
        ValueError: an option that cannot be served (named), DTensors without Muon, or divided in
            another way than by rows, an optimizer that needs whole parameters with
            `shard="element"` or cannot be sharded at all (L-BFGS, SparseAdam), or ranks that ask
            for different things.
    """

    @outside_inference_mode
    @checked
    def __init__(
        self,
        params: Annotated[Iterable[Any], OWN_CHECK],
        optimizer_class: Annotated[
            type[torch.optim.Optimizer] | Mapping[str, Any], "such as torch.optim.AdamW"
        ],
        *,
        shard: Literal["element", "parameter", "bucket"] = "element",
        process_group: dist.ProcessGroup | None = None,
        max_grad_norm: Positive | None = None,
        master_dtype: torch.dtype | None = None,
        average_gradients: bool = False,
        wire_dtype: WireName | None = None,
        consolidate: bool = False,
        bucket_cap_mb: Mebibytes = BUCKET_CAP_MB,
        **defaults: Any,
    ) -> None:
        if master_dtype is not None and not master_dtype.is_floating_point:
            raise ValueError(
                f"master_dtype={master_dtype} is not a floating dtype; use torch.float32"
            )
        wire = None if wire_dtype is None else WireDtype(AllReduce(), wire_dtype)
        group = given_or_default(process_group)
        self._limits = bucket_limits(bucket_cap_mb, FIRST_BUCKET_MB)
        groups, self._names, self._frozen = named_groups(params)
        trained = {name: p for p, name in self._names.items()}
        require_parameters(trained)
        groups, rules = rules_of(
            optimizer_class, defaults, shard, groups, self._names, self._frozen
        )
        group_names = [[self._names[p] for p in g["params"]] for g in groups]
        settings = {
            "optimizer_class": ", ".join(
                rule.optimizer_class.__qualname__ for rule in dict.fromkeys(rules)
            ),
            "shard": ", ".join(rule.shard for rule in dict.fromkeys(rules)),
            "max_grad_norm": max_grad_norm,
            "master_dtype": master_dtype,
            "average_gradients": average_gradients,
            "wire_dtype": wire_dtype,
            "consolidate": consolidate,
            "bucket_cap_mb": bucket_cap_mb,
            "param_groups": group_names,
        }
        self._complete = False
        self._sharded: OnShards | None = None
        refused = refusal(lambda stand_ins: made(rules, stand_ins), groups, master_dtype)
        refused = refused and misfit(rules, groups, self._names, refused)
        self._average_gradients = average_gradients
        self._serves_scaler = True
        self._in_hook = False
        if name := sharded_parameter(trained):
            require_sharded(name, rules, _given(settings, process_group))
            self._sharded = OnShards(rules, groups, self._names, settings, refused)
            super().__init__(self._sharded.param_groups, {})
            self._complete = True
            return
        self._buckets = buckets_of(trained, self._limits)

        def divided() -> Zero:
            for rule in dict.fromkeys(rules):
                rule.require_divisible(next(iter(trained.values())).device)
            rule_of = {
                name: rule for names, rule in zip(group_names, rules, strict=True) for name in names
            }
            shards = divide(rule_of, specs_of(trained), dist.get_world_size(group), self._buckets)
            device = next(iter(trained.values())).device
            if wire is not None and (
                wrong := wrong_here(wire, specs_of(trained), dist.get_world_size(group), device)
            ):
                raise ValueError(wrong)
            return Zero(shards, AllReduce(), max_grad_norm)

        self._zero = agreed_on(group, settings, trained, divided, refused)
        self._shard = str(settings["shard"])
        self._process_group = group
        self._wire = wire
        self._consolidate = consolidate
        self._whole: dict[str, Any] | None = None
        self._meeting = Meeting(group)
        self._skipped = 0
        self._what = f"ZeroOptimizer of {settings['optimizer_class']}"
        self._run_of_skips = RunOfSkips(self._what, dist.get_rank(group))
        self._has_state = False
        if average_gradients:
            copy_from_first_rank(list(trained.values()), group)
        given = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        shards, rank = self._zero.shards, dist.get_rank(group)
        self._part = Shard(rules, trained, group_names, given, shards, rank, master_dtype)
        super().__init__(groups, dict(self.optimizer.defaults))
        self._copy_options(self.optimizer.param_groups, self.param_groups)
        self._step = self._sharded_step(averaged=not average_gradients)
        self._assume()
        self._complete = True

    def _assume(self) -> None:
        """That parameters stay as they are now."""
        remedy = f"Make a new {type(self).__name__}, and load this one's state into it"
        self._assumed = Assumptions(
            type(self).__name__, self._own.parameters, {}, None, self, remedy
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError: it belongs to its process group and to these very parameters."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, since it belongs to its process"
            " group and to the parameters that it was given: make another one of the copied"
            " model's parameters, on all ranks, and load state_dict() into it"
        )

    def _require_own_shards(self) -> None:
        """Raise RuntimeError for DTensors."""
        if self._sharded is not None:
            raise RuntimeError(
                "this optimizer is of DTensors, and its state is divided as they are: state_dict()"
                " gives it to torch.distributed.checkpoint, and consolidated_state_dict() whole;"
                " nothing else is divided here, and no hook of DDP takes part"
            )

    @property
    def _own(self) -> Shard:
        self._require_own_shards()
        return self._part

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's part, of `optimizer_class`. Its parameters are pieces, or
        DTensors."""
        return self._sharded or self._own.optimizer

    @property
    def shards(self) -> Shards:
        """Who owns what."""
        return self._own.shards

    def _sharded_step(
        self, *, averaged: bool, interleaved: bool = False, **options: Any
    ) -> ShardedStep:
        zero = Zero(self.shards, None if averaged else AllReduce(), self._zero.max_norm, **options)
        wire = None if averaged else self._wire
        step = ShardedStep(
            zero,
            self._own.parameters,
            self._optimize,
            self._process_group,
            wire=wire,
            interleaved=interleaved,
        )
        before: ShardedStep | None = getattr(self, "_step", None)
        if before is not None:
            step.steps, step.collectives.sent = before.steps, before.collectives.sent
            before.collectives.whereabouts = None  # one says where this rank is
        step.collectives.whereabouts = Whereabouts(
            self._meeting, self._what, step, step.collectives
        )
        return step

    def _optimize(self, gradients: dict[str, Tensor], step: bool) -> dict[str, Tensor]:
        """New values of the owned pieces."""
        own = {name: self._own.pieces[name] for name in gradients if name in self._own.pieces}
        self._own.take_changes(own)
        if step:
            for name, piece in own.items():
                gradient = gradients[name].reshape(-1)[: piece.numel()].view(piece.shape)
                piece.grad = laid_out_like(piece, gradient.to(piece.dtype))
            self._copy_options(self.param_groups, self.optimizer.param_groups)
            self._step_pieces()
            self._copy_options(self.optimizer.param_groups, self.param_groups)
            for piece in own.values():
                piece.grad = None
        new = {
            name: piece.detach().to(self._own.parameters[name].dtype) for name, piece in own.items()
        }
        return new | {name: g.new_empty(0) for name, g in gradients.items() if name not in own}

    def _step_pieces(self) -> None:
        self.optimizer.step()

    def overlap(
        self, *, averaged: bool, interleaved: bool, spread: bool, grad_scaler: Any = None
    ) -> ShardedStep:
        """Give the step to a hook of DDP; for `hook_with_zero_step`. Raises ValueError for what
        does not go together."""
        self._require_own_shards()
        if self._average_gradients:
            raise ValueError(
                "average_gradients=True is for models without DDP; leave it out, the hook averages"
            )
        if self._in_hook:
            raise ValueError(
                "this ZeroOptimizer belongs to a hook already; make one for each model"
            )
        if averaged and self._wire is not None:
            raise ValueError(
                f"wire_dtype={self._wire.dtype!r} codes what this optimizer averages, and here the"
                " hook averages; give allreduce_hook, or leave it out and register"
                f" WireDtype(algorithm, {self._wire.dtype!r})"
            )
        if interleaved:
            if self._zero.max_norm is not None:
                raise ValueError(
                    f"max_grad_norm={self._zero.max_norm} needs the norm of all gradients before"
                    " the first update; use hook_with_zero_step"
                )
            for rule in dict.fromkeys(self._own.rules):
                require_independent_parameters(rule.optimizer_class, rule.options, self._device)
        if spread and self._shard == "bucket":
            if self._step.steps or self.optimizer.state:
                raise ValueError(
                    "shard_buckets=True divides the parameters anew; make the hook before the first"
                    " step"
                )
            self._own.divide(
                shard_by_bucket(
                    self.shards.specs, self.shards.world_size, self._buckets, spread=True
                )
            )
        options: dict[str, Any] = {}
        if grad_scaler is not None:
            options = {"skip_non_finite": True, "unscale": lambda: _reciprocal(grad_scaler)}
        self._serves_scaler = grad_scaler is not None
        self._in_hook = True
        self._step = self._sharded_step(averaged=averaged, interleaved=interleaved, **options)
        return self._step

    @property
    def _device(self) -> torch.device:
        return next(iter(self._own.parameters.values())).device

    @property
    def names(self) -> Mapping[Tensor, str]:
        """Parameter → the name under which its state is saved: as given, or `parameter.0`,
        `parameter.1`, …"""
        return self._names

    @staticmethod
    def _copy_options(
        source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]
    ) -> None:
        for theirs, ours in zip(source, target, strict=True):
            ours.update(
                {
                    key: value
                    for key, value in theirs.items()
                    if key not in ("params", "param_names")
                }
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """A scaler that must not go about it in its own way calls `step` at once, which then says
        so."""
        return not self._serves_scaler or self._average_gradients

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters on all ranks; every rank calls it. After a backward pass that a
        hook of `hook_with_zero_step` has seen, the update is done, and this does nothing.

        Args:
            closure: called first, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a sparse gradient, one of a parameter that required none at construction, or
                a `wire_dtype` where nothing is averaged. Nothing has been changed then.
            RuntimeError: called by a `GradScaler` that this form does not know of; or parameters
                are others, or of another dtype, than at construction.
        """
        if hasattr(self, "grad_scale"):
            raise RuntimeError(
                "a GradScaler drives this step, but the gradients are averaged here, after it has"
                " looked at them; pass the scaler to hook_with_zero_step(..., grad_scaler=scaler),"
                " or let DDP average the gradients (average_gradients=False)"
            )
        if self._sharded is None:
            self._assumed.require(self._step.steps)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, p in self._frozen.items():
            if p.grad is not None:
                raise ValueError(
                    f"parameter {name!r} has a gradient, and required none when this ZeroOptimizer"
                    " was made, so that no rank keeps a state for it. Make a new ZeroOptimizer"
                    " after parameters have been thawed"
                )
        if self._sharded is not None:
            self._sharded.step()
        elif not self._in_hook:
            if self._wire is not None and not self._average_gradients:
                raise ValueError(
                    f"wire_dtype={self._wire.dtype!r} codes what this optimizer averages, and it"
                    " averages nothing: pass average_gradients=True without DDP, or with DDP make"
                    " hook_with_zero_step(allreduce_hook, ddp, optimizer)"
                )
            gradients = {name: self._gradient(name) for name in self._own.parameters}
            self._step.begin()
            for bucket in self._buckets:
                present = {n: g for n in bucket if (g := gradients[n]) is not None}
                if present:
                    self._step.add(present)
            self.finish_step(self._step)
        elif not self._has_state and all(group.get("lr") == 0 for group in self.param_groups):
            # No step, since the hook has seen no backward pass: `get_optimizer_state_dict` of
            # torch.distributed.checkpoint wants a state to fill.
            for group, names in zip(self.param_groups, self._own.group_names, strict=True):
                for name in names:
                    if (piece := self._own.pieces.get(name)) is not None:
                        self.optimizer.state[piece] = self._own.first_state(name, group)
            self._has_state = True
        return loss

    def finish_step(self, step: ShardedStep) -> bool:
        """End a step of this optimizer or of its hook: gather the new parameters, and count the
        step. For the drivers of `hook_with_zero_step`.

        Args:
            step: under way, which `overlap` or `step` has begun.

        Returns:
            Whether the parameters were updated; False for a step that was skipped.
        """
        stepped = step.finish()
        self._whole, self._has_state = None, True
        step.collectives.sent.dense_bytes += sum(spec.nbytes for spec in self.shards.specs.values())
        self._skipped += not stepped
        self._run_of_skips.seen(step.steps, self._skipped)
        self._assumed.stepped()
        return stepped

    def _gradient(self, name: str) -> Tensor | None:
        p = self._own.parameters[name]
        if p.grad is None:
            averaged = self._average_gradients and p.requires_grad
            return torch.zeros_like(p) if averaged else None
        if p.grad.is_sparse:
            raise ValueError(
                f"parameter {name!r} has a sparse gradient; build the embedding with sparse=False"
            )
        return p.grad

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only at construction: who owns what is decided there. Raises ValueError afterwards."""
        if self._complete:
            raise ValueError(
                "a ZeroOptimizer takes no further parameter groups; give all of them at"
                " construction"
            )
        super().add_param_group(param_group)

    def stats(self) -> Stats:
        """Steps, and what `step` or the hook has sent, also before it went on from a saved state
        (with DTensors since construction, since their state is torch's own): reduce-scatters and
        all-gathers of n bytes count n/2, so that a step that replaces an all-reduce counts as many
        bytes as it. Times are of the same messages: packing and waiting, without the optimizer's
        own step, and without what another hook does that averages the gradients before."""
        if self._sharded is not None:
            return self._sharded.stats()
        collectives = self._step.collectives
        found = Stats.of(
            collectives.times.read(), self._step.steps, self._skipped, collectives.sent
        )
        return replace(found, compiled_loops=collectives.ops.loops.card)

    def __repr__(self) -> str:
        """What this rank keeps and how long sharding takes, and the parameter groups as every
        optimizer shows them."""
        if self._sharded is not None:
            return f"Optimizers of DTensors, whose matrices go to owners\n{super().__repr__()}"
        stats = self.stats()
        own = sum(piece.nbytes for piece in self._own.pieces.values())
        whole = sum(spec.nbytes for spec in self.shards.specs.values())
        spent = ""
        if stats.step_seconds:
            spent = (
                f", {stats.compress_share:.0%} of a step spent packing,"
                f" {stats.wait_seconds / stats.step_seconds:.0%} waiting"
            )
        what = (
            f"{', '.join(r.optimizer_class.__name__ for r in dict.fromkeys(self._own.rules))},"
            f" whose state is divided among {self.shards.world_size} ranks by {self._shard}"
        )
        here = f"{size_of(own)} of {size_of(whole)} of parameters are updated here"
        return (
            f"{what}: {here}; {stats.steps} steps, {size_of(stats.bytes_sent)}"
            f" sent{spent}\n{super().__repr__()}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model, in the form of `optimizer_class`'s own `state_dict`, which
        can load it; so can any number of ranks.

        This rank holds a part of it only. So either it has been consolidated on this rank since the
        last step, by `consolidate_state_dict`; or this optimizer was made with `consolidate=True`,
        and every rank calls this.

        Raises:
            RuntimeError: neither is so. A tool that saves the state of one rank would save a part
                of it, and find out when it resumes.
        """
        if self._sharded is not None:
            return super().state_dict()
        return save_with_hooks(self, self._saved)

    def _saved(self) -> dict[str, Any]:
        if self._whole is not None:
            # what a scheduler has set since
            self._copy_options(self.param_groups, self._whole["param_groups"])
            return {  # in dictionaries that are the caller's
                **self._whole,
                "state": {number: {**kept} for number, kept in self._whole["state"].items()},
                "param_groups": [{**group} for group in self._whole["param_groups"]],
            }
        if self._consolidate or self.shards.world_size == 1:
            whole = self._gathered("state_dict()", None)
            assert whole is not None
            return whole
        if not self._has_state and not self.optimizer.state:  # nowhere, so this is all of it
            return consolidate_shards(
                [{**self.rank_state_dict(), "rank": 0, "replicas": 1, "tensors": {}}]
            )
        raise RuntimeError(
            f"the state of this optimizer is divided among {self.shards.world_size} ranks, and has"
            f" not been consolidated on rank {self._own.rank} since the last step. Before it is"
            " saved, call optimizer.consolidate_state_dict(to=0) on every rank (Lightning does so"
            " by itself); or make the optimizer with consolidate=True, for tools that call"
            " state_dict() on every rank, as accelerate does; or give torch.distributed.checkpoint"
            " optimizer.sharded_state; or save rank_state_dict() of each rank"
        )

    @property  # type: ignore[override]
    def state(self) -> dict[Tensor, Any]:
        """What this rank remembers of each parameter: of its piece, or nothing. Empty before there
        is any state, on all ranks alike: by that tools see whether there is some."""
        if self._sharded is not None:
            return self._sharded.state  # type: ignore[return-value]  # a mapping of several
        if not self._has_state:
            return {}
        remembered, pieces = self.optimizer.state, self._own.pieces
        return {
            p: remembered.get(pieces[name], {}) if name in pieces else {}
            for name, p in self._own.parameters.items()
        }

    @state.setter
    def state(self, value: object) -> None:
        """Set by `torch.optim.Optimizer`, for optimizers that keep it themselves."""

    @property
    def sharded_state(self) -> ShardedState:
        """The state for `torch.distributed.checkpoint`, which saves and loads each rank's part,
        also on another number of ranks:

        dcp.save({"model": model.state_dict(), "optimizer": optimizer.sharded_state},
        checkpoint_id=folder)
        """
        return ShardedState(
            self._own, self._process_group, self.rank_state_dict, self.load_state_dict
        )

    def rank_state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state: plain nested dictionaries of tensors and numbers, by
        parameter name. To be saved by each rank. Communicates nothing."""
        # what a scheduler has set since
        self._copy_options(self.param_groups, self.optimizer.param_groups)
        return {**shard_state(self._own), COUNTED: self._counted().state()}

    def _counted(self) -> Counted:
        return Counted(self._step.steps, self._skipped, self._step.collectives.sent)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Let `state_dict` give the state of the whole model on rank `to`, until the next step; for
        tools that call it there. Every rank calls this. As in torch's `ZeroRedundancyOptimizer`.

        Args:
            to: the rank of the process group that receives it; or None: all ranks do.

        Raises:
            ValueError: `to` is no rank.
            RuntimeError: some ranks have not called it within 10 minutes, or the timeout that the
                process group was given.
        """
        self._whole = self._gathered("consolidate_state_dict()", to)

    def consolidated_state_dict(self, to: int | None = 0) -> dict[str, Any] | None:
        """The state of the whole model, in the form of `optimizer_class`'s own `state_dict`, which
        can load it. Every rank calls this.

        Args:
            to: the rank that receives it, the others receive None; or None: all ranks do.

        Raises:
            ValueError: `to` is no rank.
            RuntimeError: some ranks have not called it within 10 minutes, or the timeout that the
                process group was given.
        """
        if self._sharded is not None:
            require_receiver(to, dist.get_world_size())
            whole = self._sharded.whole(super().state_dict())
            return whole if to in (None, dist.get_rank()) else None
        return self._gathered("consolidated_state_dict()", to)

    def _gathered(self, subject: str, to: int | None) -> dict[str, Any] | None:
        device = self._device
        require_receiver(to, dist.get_world_size(self._process_group))
        require_all_ranks(self._meeting, subject, "rank_state_dict()")
        # A pickled CUDA tensor comes to life on the sender's device, in the receiver's process.
        mine = on_cpu(self.rank_state_dict())
        shards = gathered_by(to, mine, self._process_group, device)
        return None if shards is None else consolidate_shards(shards)

    @outside_inference_mode
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state.

        Args:
            state_dict: a `state_dict` or `consolidated_state_dict`, of any world size, or a plain
                optimizer's; or this rank's `rank_state_dict`. Shards of another world size are
                joined first: `gradwire.torch_backend.consolidate(shards)`.

        Raises:
            ValueError: it does not fit, holds NaN or inf, or cannot be stepped from, said why: each
                parameter's is tried out with zeros first. Nothing has been changed then.
        """
        load_with_hooks(self, state_dict, self._load)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        if self._sharded is not None:
            self._sharded.load_state_dict(state_dict)
            self.param_groups = self._sharded.param_groups
            return
        plain, masters = load_shard(state_dict, self._own)
        require_served(self._own, plain)
        counted = (
            Counted.of_state(state_dict[COUNTED]) if COUNTED in state_dict else self._counted()
        )
        self.optimizer.load_state_dict(plain)
        # Without `master_dtype` pieces are the weights themselves, which are the module's.
        for name, master in masters.items() if self._own.master_dtype is not None else ():
            self._own.pieces[name].detach().copy_(master)
        self._step.steps, self._skipped = counted.steps, counted.skipped_steps
        self._step.collectives.sent.count_from(counted.sent)
        self._run_of_skips.restart()
        self._whole = None
        self._has_state = "format" in state_dict or bool(state_dict["state"])
        self._copy_options(self.optimizer.param_groups, self.param_groups)


def _given(settings: Mapping[str, Any], process_group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Options that are of no use where parameters are sharded already, and are given all the
    same."""
    found = {key: settings[key] for key, default in OF_NO_USE.items() if settings[key] != default}
    return found if process_group is None else found | {"process_group": process_group}


def _reciprocal(scaler: Any) -> Any:
    scale = scale_of(scaler)
    return (
        scale.double().reciprocal().to(torch.float32) if isinstance(scale, Tensor) else 1.0 / scale
    )
