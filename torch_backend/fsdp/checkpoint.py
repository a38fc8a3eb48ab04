"""The memory of a sharded model's replicas outside a program: as sharded tensors, and gathered.

**Sharded**, for `torch.distributed.checkpoint`: the form that FSDP2 gives a model's own state. What
lies as its parameter does (the error, the outer parameters) is a DTensor, laid out as the parameter
is, so that it is written by its shards and read by any number of others. All else is small, and the
same on all ranks:

    {"format": 1, "kind": …, "algorithm": …, "step": …, "scale": …, "replicas": W,
     "sharded": {parameter: {key: DTensor}}, "rest": bytes}

**Gathered**, for a file of one rank: the portable form of `gradwire.core.state.checkpoint`, with
the blocks under names of their own (`gradwire.torch_backend.state.blocks`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.core.algorithm import State
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.plan.local_sgd import local_memory
from gradwire.core.state.checkpoint import require_kind
from gradwire.torch_backend.engine.groups.barrier import Meeting
from gradwire.torch_backend.engine.groups.gathered_objects import gathered_by, gathered_by_all
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.fsdp.layout import Layout, local_part
from gradwire.torch_backend.ops.workspace import dtype_name
from gradwire.torch_backend.state.means import counted, means_over
from gradwire.torch_backend.state.memory import Memory, Replicated
from gradwire.torch_backend.state.rank_memory import packed


class Sharded(Replicated):
    """Each rank has a block of each parameter, as some rank of each replica has. Its number counts
    shard by shard, of one replica after the other."""

    def __init__(self, layout: Layout, groups: ProcessGroups) -> None:
        super().__init__(groups, layout.device)
        self.layout = layout
        self.meetings.append(Meeting(layout.shards))
        self.pieces = layout.pieces

    @property
    def identity(self) -> dict[str, int]:
        return super().identity | {"shard": self.layout.shard, "shards": self.layout.shards.size()}

    def mean_sent(self, sent: Mapping[str, int]) -> dict[str, int]:
        of_shards = gathered_by_all(super().mean_sent(sent), self.layout.shards, self.device)
        return {key: round(sum(each[key] for each in of_shards) / len(of_shards)) for key in sent}

    def whole(self, memory: Memory, sliced: bool) -> dict[str, Any]:
        """The sharded form, `sliced` or not, on all ranks. Which parameters have what in it does
        not depend on the number of shards: the error of a block that is too small to be compressed
        is zero."""
        state, per_replica, layout = memory.lent(), memory.per_replica, self.layout
        state["sent"] = self.mean_sent(state["sent"])

        large = {
            (name, key): getattr(torch, x.dtype)
            for name, kept in self._whole_memory(memory).tensors.items()
            for key, x in kept.items()
            if tuple(x.shape) == tuple(layout.held[name].parameter.shape)
        }

        def own(name: str, key: str) -> Tensor:
            x: Tensor | None = state["tensors"].get(name, {}).get(key)
            if x is not None:
                return x
            return torch.zeros(
                layout.held[name].local.shape, dtype=large[name, key], device=layout.device
            )

        here = {(name, key): None for name, kept in state["tensors"].items() for key in kept}
        differ = [(name, key) for name, key in large | here if key in per_replica]
        weights = [counted(key, state["tensors"].get(name, {})) for name, key in differ]
        given = [own(name, key) for name, key in differ]
        means = dict(
            zip(
                differ,
                means_over(given, self.groups.whole, layout.device, weights=weights),
                strict=True,
            )
        )
        parts: dict[str, dict[str, Tensor]] = {}
        for name, key in large:
            x = means[name, key] if key in per_replica else own(name, key)
            parts.setdefault(name, {})[key] = layout.held[name].distributed(
                x.to(layout.device, copy=True)
            )
        rest: dict[str, dict[str, Any]] = {"tensors": {}, "local": {}}
        for name, kept in state["tensors"].items():
            block = layout.held[name].piece.name(name)
            small = {key: x for key, x in kept.items() if (name, key) not in large}
            rest["tensors"][block] = {k: x.cpu() for k, x in small.items() if k not in per_replica}
            rest["local"][block] = {k: means[name, k][None] for k in small if k in per_replica}
        together: dict[str, dict[str, Any]] = {"tensors": {}, "local": {}}
        for each in gathered_by_all(rest, layout.shards, layout.device):
            for section, blocks in each.items():
                together[section] |= blocks
        together["shared"] = {key: x.cpu() for key, x in state.pop("shared").items()}
        del state["tensors"]
        state |= {
            "algorithm": repr(without_levels(memory.algorithm)),
            "replicas": self.groups.whole.size(),
        }
        return {**state, "sharded": parts, "rest": packed(together)}

    def portable(self, memory: Memory, errors: str, to: int | None) -> dict[str, Any] | None:
        """Gathered from shards one parameter at a time: no rank needs memory for more than it
        keeps. A block that is too small to be compressed is there, with nothing in it, if the whole
        parameter is not."""
        replica, shard = (None, None) if to is None else divmod(to, self.layout.shards.size())
        state = super().portable(memory, errors, replica)
        if state is None:
            return None
        whole: dict[str, Any] = {**state, "tensors": {}, "local": {}}
        receives, remembered = False, self._whole_memory(memory).tensors
        for name, held in self.layout.held.items():
            block = held.piece.name(name)
            part = {s: {block: state[s][name]} for s in ("tensors", "local") if name in state[s]}
            if name in remembered:
                part.setdefault("tensors", {block: {}})
            everyone = gathered_by(shard, part, self.layout.shards, self.device)
            receives = everyone is not None
            for each in everyone or ():
                for section, blocks in each.items():
                    whole[section] |= blocks
        return whole if receives else None

    def given(self, state: Mapping[str, Any], memory: Memory) -> Mapping[str, Any]:
        if "rank" in state or "rest" not in state:
            return super().given(state, memory)
        require_kind(state, memory.kind, ("sharded", "algorithm", "step"))
        state = dict(state)
        try:
            rest = torch.load(io.BytesIO(bytes(state.pop("rest"))), weights_only=True)
        except Exception as error:
            raise ValueError(
                f'"rest" of the state is not what state_dict() gave: {error}'
            ) from error
        parts = state.pop("sharded")
        state |= rest
        for name, kept in parts.items():
            held, here = self.layout.held.get(name), memory.state.tensors.get(name, {})
            if held is not None and name not in memory.state.tensors:
                continue  # a block too small to be compressed
            block = name if held is None else held.piece.name(name)
            for key, x in kept.items():
                if held is not None and key in memory.per_replica and key not in here:
                    # of such a block, or an empty one, local SGD keeps the outer parameters alone
                    continue
                section, own = (
                    ("local", local_part(x)[None])
                    if key in memory.per_replica
                    else ("tensors", local_part(x))
                )
                state[section].setdefault(block, {})[key] = own.cpu()
            state["tensors"].setdefault(block, {})
        return state

    def _whole_memory(self, memory: Memory) -> State[AbstractArray]:
        """That of whole parameters, without data."""
        specs, replicas = whole_specs(self.layout), self.groups.whole.size()
        if isinstance(memory.algorithm, LocalSGD):
            return local_memory(memory.algorithm, specs, replicas)
        return dry_run(memory.algorithm, specs, replicas).memory


def whole_specs(layout: Layout) -> dict[str, Spec]:
    """The specs of the parameters, with all their blocks."""
    parameters = {name: held.parameter for name, held in layout.held.items()}
    return {name: Spec(tuple(p.shape), dtype_name(p.dtype)) for name, p in parameters.items()}
