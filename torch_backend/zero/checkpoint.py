"""A sharded optimizer's state for `torch.distributed.checkpoint`, of which each rank writes and
reads its own part.

    state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state}
    dcp.save(state, checkpoint_id=folder)
    ...
    dcp.load({"model": weights, "optimizer": optimizer.sharded_state}, checkpoint_id=folder)

Pieces are given as DTensors that are sharded along their only axis, so the library itself cuts a
checkpoint anew for another number of ranks. Nothing is gathered, and no rank holds more than its
part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.state.checkpoint import not_finite
from gradwire.torch_backend.zero.shard import Shard
from gradwire.torch_backend.zero.state import COUNTED, MASTER

FORMAT = 1


class ShardedState:
    """What `torch.distributed.checkpoint` saves and loads of a `ZeroOptimizer`: its
    `sharded_state`.

    The library fills what `state_dict` gives. So where nothing is remembered of a parameter yet,
    that has tensors of the right shapes all the same: those that the first step would make. `begun`
    says where they mean nothing.
    """

    def __init__(
        self,
        shard: Shard,
        process_group: dist.ProcessGroup,
        save: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        self._shard = shard
        self._process_group = process_group
        self._save = save
        self._load = load

    def state_dict(self) -> dict[str, Any]:
        """This rank's part (copies), by parameter name. Communicates nothing.

        Returns:
            `state`: tensors of a piece's shape as flat DTensors of the whole parameter's size, or
            as vectors where a parameter belongs to one rank; other tensors and numbers as they are.
            `begun`: whether anything was remembered. `remembered`: of what names. `shapes`, of all
            parameters. `param_groups`: options, and names. `counted`: see `Counted`.
        """
        saved = self._save()
        state: dict[str, dict[str, Any]] = saved["tensors"]
        begun = {name: bool(own.keys() - {MASTER}) for name, own in state.items()}
        groups = [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
            }
            for group in saved["shared"]["param_groups"]
        ]
        for group in groups:
            for name in group["params"]:
                if not begun.get(name, True):
                    state[name] |= self._shard.first_state(name, group)
        return {
            "sharded_format": FORMAT,
            COUNTED: saved[COUNTED],
            "param_groups": groups,
            "shapes": saved["shared"]["shapes"],
            "begun": begun,
            "remembered": {name: sorted(own) for name, own in state.items()},
            "state": {
                name: {k: self._given(name, x) for k, x in own.items()}
                for name, own in state.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what the library has read into a `state_dict`.

        Raises:
            ValueError: it is no such state, of other parameters, or of an optimizer that remembers
                something else. Nothing has been changed then.
        """
        if state.get("sharded_format") != FORMAT:
            raise ValueError(
                "not the sharded_state of a ZeroOptimizer: sharded_format is"
                f" {state.get('sharded_format')!r}, and this version reads {FORMAT}"
            )
        if missing := {"state", "begun", "remembered", "shapes", "param_groups"} - state.keys():
            raise ValueError(
                f"not the sharded_state of a ZeroOptimizer: it lacks {sorted(missing)}"
            )
        here = self._save()
        for name, shape in here["shared"]["shapes"].items():
            if state["shapes"].get(name) != shape:
                raise ValueError(
                    f"parameter {name!r} has shape {state['shapes'].get(name)} in the state, here"
                    f" {shape}"
                )
        kept = {}
        for name, own in state["state"].items():
            if sorted(own) != state["remembered"][name]:
                raise ValueError(
                    f"of parameter {name!r} the state holds {state['remembered'][name]}, and"
                    f" {self._shard.rule_of(name).optimizer_class.__name__} remembers {sorted(own)}"
                    " with the options given here; make it with those that it had"
                )
            keys = own if state["begun"][name] else own.keys() & {MASTER}
            kept[name] = {key: self._taken(name, own[key]) for key in keys}
        shared = {**here["shared"], "param_groups": state["param_groups"]}
        counted = {COUNTED: state[COUNTED]} if COUNTED in state else {}
        self._load({**here, **counted, "shared": shared, "tensors": kept})

    def _given(self, name: str, value: Any) -> Any:
        """A piece as a part of the whole, as the library has it."""
        shards, piece = self._shard.shards, self._shard.pieces[name]
        if not isinstance(value, Tensor) or value.shape != piece.shape or not piece.ndim:
            return value
        flat = value.reshape(-1)
        if not shards.in_pieces(name) or shards.world_size == 1:
            return flat
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(self._process_group, flat.device.type)
        whole = torch.Size([shards.specs[name].size])
        return DTensor.from_local(flat, mesh, [Shard(0)], run_check=False, shape=whole, stride=(1,))

    def _taken(self, name: str, value: Any) -> Any:
        """The opposite."""
        piece = self._shard.pieces[name]
        local = value.to_local() if hasattr(value, "to_local") else value
        is_piece = isinstance(local, Tensor) and local.ndim == 1 and local.numel() == piece.numel()
        return local.view(piece.shape) if is_piece and piece.ndim else local


def require_served(shard: Shard, plain: Mapping[str, Any]) -> None:
    """Raise ValueError for a state of this rank's optimizer from which it cannot step: each
    parameter's is tried out with zeros, on a copy. The optimizer is left alone.

    Args:
        shard: that is to load it.
        plain: see `load_shard`.
    """
    pieces = [name for names in shard.group_names for name in names if name in shard.pieces]
    for group, defaults in zip(plain["param_groups"], shard.defaults, strict=True):
        for key, value in group.items():
            if (bad := not_finite(value)) is not None and value != defaults.get(key):
                raise ValueError(
                    f"{key}={bad} in a parameter group of the state; load an earlier checkpoint"
                )
        for number in group["params"]:
            name, state = pieces[number], plain["state"].get(number)
            if state is not None:
                _require_served(
                    shard, name, {k: v for k, v in group.items() if k != "params"}, state
                )


def _require_served(
    shard: Shard, name: str, options: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"{key!r} of parameter {name!r} is a meta tensor in the state, which holds no data"
            )
        if (bad := not_finite(value)) is not None:
            raise ValueError(
                f"{key!r} of parameter {name!r} holds {bad} in the state; load an earlier"
                " checkpoint"
            )
    try:
        first = shard.first_state(name, options)
        trial, _ = shard.trial(name, options)
        loaded = {"state": {0: state}, "param_groups": [{**options, "params": [0]}]}
        trial.load_state_dict(copy.deepcopy(loaded))
        with torch.no_grad():
            trial.step()
        if (bad := not_finite(trial.param_groups[0]["params"][0])) is not None:
            raise ValueError(f"a step with a gradient of zeros gives {bad}")  # noqa: TRY301
    except Exception as error:  # of any optimizer, from anything
        raise ValueError(
            f"{shard.rule_of(name).optimizer_class.__name__} cannot step with the state of"
            f" parameter {name!r}, which holds {sorted(state)}: {type(error).__name__}: {error}"
        ) from error
    for key in first.keys() & state.keys():
        here, there = (_kind(x[key]) for x in (first, state))
        if here != there:
            raise ValueError(f"{key!r} of parameter {name!r} is {there} in the state, here {here}")


def _kind(value: Any) -> str:
    """What has to agree. Scalars may be numbers or tensors: optimizers turn the one into the
    other."""
    if isinstance(value, Tensor) and value.ndim:
        dtype = "floating" if value.is_floating_point() else str(value.dtype)
        return f"a {dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (int, float)) or (
        isinstance(value, Tensor) and value.dtype not in (torch.bool, torch.complex64)
    ):
        return "a number"
    return f"a {type(value).__name__}"
