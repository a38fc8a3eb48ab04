"""The memory of a sharded model's replicas outside a program: as sharded tensors, and gathered.

**Sharded**, for `torch.distributed.checkpoint`: the form that FSDP2 gives a model's own state. What lies as its parameter does (the error, an anchor) is
a DTensor, laid out as the parameter is, so that it is written by its shards and read by any number of others. All else is small, and the same on all ranks:

    {"format": 1, "kind": …, "algorithm": …, "step": …, "scale": …, "replicas": W, "sharded": {parameter: {key: DTensor}}, "rest": bytes}

**Gathered**, for a file of one rank: the portable form of `gradwire.core.checkpoint`, with the blocks under names of their own
(`gradwire.torch_backend.pieces`).
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import State
from gradwire.core.checkpoint import require_kind
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.ops import Spec
from gradwire.torch_backend.fsdp.layout import Layout, local_part
from gradwire.torch_backend.kernels import dtype_name
from gradwire.torch_backend.objects import gathered_by, gathered_by_all


def of_shard(state: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """A state of one rank, marked with whose it is."""
    return {**state, "shard": layout.shard, "shards": dist.get_world_size(layout.shards)}


def sharded(
    state: Mapping[str, Any], whole: State[AbstractArray], per_replica: Collection[str], layout: Layout
) -> dict[str, Any]:
    """The sharded form, on all ranks of the model. What each replica has for itself is the mean over the replicas.

    Args:
        state: of this rank.
        whole: the memory of whole parameters. It says which of them have what, so that this does not depend on the number of shards: the error
            of a block that is too small to be compressed is zero.
        per_replica: keys of what each replica has for itself.
        layout: of the model.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, memory in whole.tensors.items():
        held = layout.held[name]
        for key, x in memory.items():
            if tuple(x.shape) != tuple(held.parameter.shape):
                continue
            own = state["tensors"].get(name, {}).get(key)
            if own is None:
                own = torch.zeros(held.local.shape, dtype=getattr(torch, x.dtype), device=layout.device)
            local = _mean(own, layout) if key in per_replica else own.clone()
            parts.setdefault(name, {})[key] = held.distributed(local)
    rest: dict[str, dict[str, Any]] = {"shared": _on_cpu(state["shared"]), "tensors": {}, "local": {}}
    for name, memory in state["tensors"].items():
        block = layout.held[name].piece.name(name)
        kept = {key: x for key, x in memory.items() if key not in parts.get(name, {})}
        rest["tensors"][block] = {k: x.cpu() for k, x in kept.items() if k not in per_replica}
        rest["local"][block] = {k: _mean(x, layout).cpu()[None] for k, x in kept.items() if k in per_replica}
    kept_keys = {key: value for key, value in state.items() if key not in ("shared", "tensors")}
    replicas = dist.get_world_size(layout.replicas)
    together = _merged(gathered_by_all(rest, layout.shards, layout.device))
    return {"scale": 1.0, **kept_keys, "replicas": replicas, "sharded": parts, "rest": _packed(together)}


def portable(
    state: Mapping[str, Any],
    layout: Layout,
    remembered: Collection[str],
    per_replica: Collection[str],
    kind: str = "compressor",
) -> dict[str, Any]:
    """A state in any form as a portable one, or as one of this rank.

    Args:
        state: in any form.
        layout: of this rank.
        remembered: the parameters of whose block there is memory here.
        per_replica: keys of what each replica has for itself.
        kind: of state.

    Raises:
        ValueError: it is no state, or another shard's.
    """
    require_kind(state, kind, ())
    state = dict(state)
    if "rank" in state:
        whose = state.pop("shard", None), state.pop("shards", None)
        mine = layout.shard, dist.get_world_size(layout.shards)
        if whose != mine:
            raise ValueError(
                f"the state is that of one rank, of shard {whose[0]} of {whose[1]}; this is shard {mine[0]} of {mine[1]}. Load what state_dict() or "
                "gathered_state_dict() gives, which serves any number of shards"
            )
        return state
    if "rest" not in state:
        require_kind(state, kind, ("shared", "tensors", "replicas", "local"))
        return state
    require_kind(state, kind, ("sharded", "algorithm", "step"))
    try:
        rest = torch.load(io.BytesIO(bytes(state.pop("rest"))), weights_only=True)
    except Exception as error:
        raise ValueError(f'"rest" of the state is not what state_dict() gave: {error}') from error
    parts = state.pop("sharded")
    state |= rest
    for name, memory in parts.items():
        if name in layout.held and name not in remembered:
            continue  # a block too small to be compressed
        block = layout.held[name].piece.name(name) if name in layout.held else name
        for key, x in memory.items():
            section, own = ("local", local_part(x)[None]) if key in per_replica else ("tensors", local_part(x))
            state[section].setdefault(block, {})[key] = own.cpu()
        state["tensors"].setdefault(block, {})
    return state


def gathered_over_shards(state: Mapping[str, Any], layout: Layout, to: int | None) -> dict[str, Any] | None:
    """The portable form of the whole model, of those of its shards, on shard `to`, or on all.

    One parameter at a time: no rank needs memory for more than it keeps.
    """
    whole: dict[str, Any] = {**state, "tensors": {}, "local": {}}
    receives = False
    for name, held in layout.held.items():
        block = held.piece.name(name)
        part = {s: {block: state[s][name]} for s in ("tensors", "local") if name in state[s]}
        everyone = gathered_by(to, part, layout.shards, layout.device)
        receives = everyone is not None
        for each in everyone or ():
            for section, blocks in each.items():
                whole[section] |= blocks
    return whole if receives else None


def whole_specs(layout: Layout) -> dict[str, Spec]:
    """Of the parameters, with all their blocks."""
    parameters = {name: held.parameter for name, held in layout.held.items()}
    return {name: Spec(tuple(p.shape), dtype_name(p.dtype)) for name, p in parameters.items()}


def _mean(x: Tensor, layout: Layout) -> Tensor:
    total = x.to(torch.float64, copy=True)
    dist.all_reduce(total, group=layout.replicas)
    return (total / dist.get_world_size(layout.replicas)).to(x.dtype)


def _on_cpu(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: x.to("cpu", copy=True) for key, x in memory.items()}


def _merged(parts: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    first = next(iter(parts))
    whole: dict[str, Any] = {"shared": first["shared"], "tensors": {}, "local": {}}
    for part in parts:
        whole["tensors"] |= part["tensors"]
        whole["local"] |= part["local"]
    return whole


def _packed(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
