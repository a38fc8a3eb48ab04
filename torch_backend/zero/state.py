"""The state of a sharded optimizer: one rank's shard, the whole, and the way between them.

A shard has the form of all states of this project (`gradwire.core.state.checkpoint`), with what is
remembered of a parameter's piece in "tensors", by name, and in "shared" what all ranks have in
common: "param_groups", the "shapes" of the parameters, the "strides" of those that are not
contiguous, and whether they are divided by "element" or by "parameter". The whole is what the plain
optimizer's `state_dict` gives, so either loads the other's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.core.state.checkpoint import head, require_kind
from gradwire.core.text.wording import some
from gradwire.core.zero.sharding import ElementShards, Shards, WholeShards
from gradwire.torch_backend.monitor.stats import Sent
from gradwire.torch_backend.setup.layout import laid_out_like, strides_of
from gradwire.torch_backend.zero.arguments import are_made_up
from gradwire.torch_backend.zero.shard import Shard

MASTER = "master"
#: Under which a state says what was counted until then, see `Counted`.
COUNTED = "counted"
KIND = "sharded_optimizer"


@dataclass(frozen=True)
class Counted:
    """What an optimizer counts of itself, for its statistics."""

    steps: int
    skipped_steps: int
    sent: Sent

    def state(self) -> dict[str, Any]:
        """The entry for a saved state."""
        return asdict(self)

    @classmethod
    def of_state(cls, saved: Any) -> Counted:
        """The opposite. Raises ValueError for what is none."""
        counts = saved if isinstance(saved, Mapping) else {}
        steps, skipped = counts.get("steps"), counts.get("skipped_steps")
        if type(steps) is not int or type(skipped) is not int or not 0 <= skipped <= steps:
            raise ValueError(
                f"{COUNTED}={saved!r} in the state must be steps, skipped_steps and what was sent"
                " in them"
            )
        return cls(steps, skipped, Sent.of_state(counts.get("sent")))


def shard_state(shard: Shard) -> dict[str, Any]:
    """One rank's state (copies)."""
    state: dict[str, dict[str, Any]] = {}
    for name, piece in shard.pieces.items():
        own = {
            k: v.clone() if isinstance(v, Tensor) else v
            for k, v in shard.optimizer.state.get(piece, {}).items()
        }
        if shard.master_dtype is not None:
            own[MASTER] = piece.detach().clone()
        state[name] = own
    groups = [
        {
            **{k: v for k, v in group.items() if k not in ("params", "param_names")},
            "params": list(names),
        }
        for group, names in zip(shard.optimizer.param_groups, shard.group_names, strict=True)
    ]
    return {
        **head(KIND, type(shard.optimizer).__name__, _steps(state)),
        "rank": shard.rank,
        "replicas": shard.shards.world_size,
        "shared": {
            "param_groups": groups,
            "shapes": _shapes(shard.shards),
            "divided": _divided(shard.shards),
            "strides": {
                name: list(strides)
                for name, p in shard.parameters.items()
                if (strides := strides_of(p)) is not None
            },
        },
        "tensors": state,
    }


def consolidate(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the shards of all ranks (`ZeroOptimizer.rank_state_dict` of each, in any order) to the
    state of the whole model.

    Examples:
        >>> import torch
        >>> from gradwire.torch_backend import ZeroOptimizer, consolidate
        >>> model = torch.nn.Linear(64, 32)
        >>> options = {"average_gradients": True}
        >>> optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, **options)
        >>> model(torch.ones(2, 64)).sum().backward()
        >>> optimizer.step()
        >>> whole = consolidate([optimizer.rank_state_dict()])    # of a single rank
        >>> whole["state"][0]["exp_avg"].shape
        torch.Size([32, 64])

    Returns:
        What the plain optimizer's `state_dict` gives: state by number, parameter groups with the
        numbers and, where parameters were given with names, those. And `parameters_with_state`,
        how many have one, and what the first rank has `counted`, which plain optimizers do not
        read.

    Raises:
        ValueError: shards are missing, given twice, or of different runs.
    """
    if not shards:
        raise ValueError("shards=[] holds no state")
    for shard in shards:
        _require_shard(shard)
    in_order = sorted(shards, key=lambda s: int(s["rank"]))
    first = in_order[0]
    ranks = [int(s["rank"]) for s in in_order]
    if ranks != list(range(len(ranks))) or len(ranks) != first["replicas"]:
        raise ValueError(
            f"shards of ranks {ranks}; all of {first['replicas']} ranks are needed, each once"
        )
    for shard in in_order:
        for key in ("replicas", "divided", "shapes"):
            if shard.get(key, shard["shared"].get(key)) != first.get(key, first["shared"].get(key)):
                raise ValueError(
                    f"the shards of ranks {first['rank']} and {shard['rank']} differ in {key}"
                )
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    given = _groups(first["shared"]["param_groups"])
    # A plain optimizer whose parameters have no names takes further ones without them only.
    named = not are_made_up(name for group in given for name in group["params"])
    for group in given:
        numbers = []
        for name in group["params"]:
            owners = [s["tensors"][name] for s in in_order if s["tensors"].get(name)]
            if name not in first["shared"]["shapes"] or any(
                own.keys() != owners[0].keys() for own in owners
            ):
                raise ValueError(
                    f"the shards hold different memory of parameter {name!r}, or do not say its"
                    " shape"
                )
            shape = tuple(first["shared"]["shapes"][name])
            if owners:
                strides = first["shared"]["strides"].get(name)
                state[number] = {
                    key: _joined(name, key, [o[key] for o in owners], shape, strides)
                    for key in owners[0]
                }
            numbers.append(number)
            number += 1
        names = {"param_names": list(group["params"])} if named else {}
        groups.append({**group, "params": numbers, **names})
    counted = {COUNTED: first[COUNTED]} if COUNTED in first else {}
    return {"state": state, "param_groups": groups, "parameters_with_state": len(state), **counted}


def load_shard(saved: Mapping[str, Any], shard: Shard) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What this rank's inner optimizer loads, and its master weights. Raises ValueError for a state
    that does not fit."""
    if not isinstance(saved, Mapping):
        raise ValueError(  # noqa: TRY004  (what a file holds)
            f"not the state of an optimizer: it is a {type(saved).__name__} and not a dictionary"
        )
    is_whole = "format" not in saved
    groups, by_name = _of_whole(saved, shard.group_names) if is_whole else _of_shard(saved, shard)
    names = [list(group["params"]) for group in groups]
    if names != shard.group_names:
        raise ValueError(
            f"the state is of other parameters: {difference_of(names, shard.group_names)}"
        )
    masters: dict[str, Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    inner_groups, number = [], 0
    for group in groups:
        first = number
        for name in (name for name in group["params"] if name in shard.pieces):
            own = {
                key: _cut(shard, name, key, x, is_whole) for key, x in by_name.get(name, {}).items()
            }
            if (master := own.pop(MASTER, None)) is not None:
                _require_weights(name, master, shard.pieces[name])
                masters[name] = master
            if own:
                state[number] = own
            number += 1
        options = {k: v for k, v in group.items() if k != "param_names"}
        inner_groups.append({**options, "params": list(range(first, number))})
    return {"state": state, "param_groups": inner_groups}, masters


def _of_shard(
    saved: Mapping[str, Any], shard: Shard
) -> tuple[list[dict[str, Any]], Mapping[str, Mapping[str, Any]]]:
    """Parameter groups and memory by name of a rank's shard, if it is that of this rank."""
    _require_shard(saved)
    shards, divided = shard.shards, saved["shared"]["divided"]
    if (saved["replicas"], saved["rank"], divided) != (
        shards.world_size,
        shard.rank,
        _divided(shards),
    ):
        raise ValueError(
            f"the state is the shard of rank {saved['rank']} of {saved['replicas']}, by {divided};"
            f" this is rank {shard.rank} of {shards.world_size}, by {_divided(shards)}. Load"
            " gradwire.torch_backend.consolidate(shards of all ranks) instead"
        )
    if (
        saved["shared"]["shapes"] != _shapes(shards)
        or saved["tensors"].keys() != shard.pieces.keys()
    ):
        raise ValueError(
            "the state is of other parameters:"
            f" {difference_of([list(saved['tensors'])], [list(shard.pieces)])}, or of other shapes"
        )
    return _groups(saved["shared"]["param_groups"]), saved["tensors"]


def _of_whole(
    saved: Mapping[str, Any], group_names: Sequence[Sequence[str]]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Parameter groups and memory by name of a plain optimizer's state. Where parameters have no
    names, in it or here, they are taken in order."""
    if missing := {"state", "param_groups"} - set(saved):
        raise ValueError(f"not the state of an optimizer: it lacks {sorted(missing)}")
    if not isinstance(saved["state"], Mapping) or not all(
        isinstance(x, Mapping) for x in saved["state"].values()
    ):
        raise ValueError("'state' in the state has to be a dictionary of one for each parameter")
    if saved.get("parameters_with_state", len(saved["state"])) != len(saved["state"]):
        raise ValueError(
            f"the state is of {saved['parameters_with_state']} parameters, and that of"
            f" {len(saved['state'])} is here. torch.distributed.checkpoint fills what is there, and"
            " a new optimizer remembers nothing: save and load optimizer.sharded_state"
        )
    theirs = _groups(saved["param_groups"])
    if len(theirs) != len(group_names):
        raise ValueError(
            f"the state has {len(theirs)} parameter groups, this optimizer {len(group_names)}"
        )
    groups, by_name = [], {}
    for group, ours in zip(theirs, group_names, strict=True):
        names = list(ours if are_made_up(ours) else group.get("param_names", ours))
        if len(names) != len(group["params"]):
            raise ValueError(
                f"a group of the state has {len(group['params'])} parameters, here it has"
                f" {len(ours)}"
            )
        for number, name in zip(group["params"], names, strict=True):
            by_name[name] = dict(saved["state"].get(number, {}))
        groups.append({**group, "params": names})
    numbers = {number for group in theirs for number in group["params"]}
    if others := saved["state"].keys() - numbers:
        raise ValueError(
            f"the state holds memory of parameters {some(sorted(map(repr, others)))}, which no"
            " group of it has"
        )
    return groups, by_name


def _groups(groups: Any) -> list[dict[str, Any]]:
    """Parameter groups. Raises ValueError for what is none."""

    def is_group(x: Any) -> bool:
        lists = (
            [x.get(key, ()) for key in ("params", "param_names")]
            if isinstance(x, Mapping)
            else [None]
        )
        known = all(
            isinstance(each, (list, tuple)) and all(isinstance(n, (int, str)) for n in each)
            for each in lists
        )
        return known and "params" in x

    if not isinstance(groups, (list, tuple)) or not all(map(is_group, groups)):
        raise ValueError(
            "'param_groups' in the state has to be a list of dictionaries, each with its list of"
            " 'params'"
        )
    return [dict(group) for group in groups]


def _cut(shard: Shard, name: str, key: str, value: Any, is_whole: bool) -> Any:
    """What a rank remembers of its piece of a parameter (a copy), from what it remembered, or from
    what is remembered of the parameter."""
    if not isinstance(value, Tensor):
        return value
    shape = shard.shards.specs[name].shape
    piece = shard.pieces[name]
    if is_whole and tuple(value.shape) == shape:
        value = shard.of_whole(name, value).reshape(piece.shape)
        return laid_out_like(piece, value.clone())
    if is_whole and value.ndim and shard.shards.in_pieces(name):
        raise ValueError(
            f"{key!r} of parameter {name!r} has shape {tuple(value.shape)} in the state, and the"
            f" parameter {shape}: it has no pieces"
        )
    return laid_out_like(piece, value.clone())


def _require_weights(name: str, master: Any, piece: Tensor) -> None:
    """Raise ValueError for master weights that are none of this piece."""
    of_kind = isinstance(master, Tensor) and master.is_floating_point() and not master.is_meta
    if not of_kind or master.shape != piece.shape:
        found = (
            f"{master.dtype} of shape {tuple(master.shape)}"
            if isinstance(master, Tensor)
            else type(master).__name__
        )
        raise ValueError(
            f"{MASTER!r} of {name!r} is {found} in the state, here {piece.dtype} of"
            f" {tuple(piece.shape)}"
        )


def _joined(
    name: str,
    key: str,
    values: Sequence[Any],
    shape: tuple[int, ...],
    strides: Sequence[int] | None,
) -> Any:
    """What is remembered of a whole parameter, as it lies in memory."""
    first = values[0]
    if any(isinstance(v, Tensor) != isinstance(first, Tensor) for v in values):
        raise ValueError(
            f"{key!r} of parameter {name!r} is a tensor in some shards and not in others"
        )
    if not isinstance(first, Tensor) or (first.ndim == 0 and shape):
        return first
    joined = torch.cat([v.reshape(-1).to(first.device) for v in values])
    if joined.numel() == torch.Size(shape).numel():
        whole = joined.view(shape)
        return whole if strides is None else joined.new_empty_strided(shape, strides).copy_(whole)
    if any(v.shape != first.shape for v in values):
        raise ValueError(
            f"{key!r} of parameter {name!r} has {joined.numel()} elements in all shards, and its"
            f" shape is {shape}"
        )
    return first


def _require_shard(saved: Mapping[str, Any]) -> None:
    """Raise ValueError for what is no shard."""
    require_kind(saved, KIND, ("rank", "replicas", "shared", "tensors"))
    if missing := {"param_groups", "shapes", "divided", "strides"} - saved["shared"].keys():
        raise ValueError(f"'shared' in the state lacks {sorted(missing)}")
    for key in ("rank", "replicas"):
        if isinstance(saved[key], bool) or not isinstance(saved[key], int):
            # (what a file holds)
            raise ValueError(f"{key}={saved[key]!r} in the state must be a number")  # noqa: TRY004


def _steps(state: Mapping[str, Mapping[str, Any]]) -> int:
    """The steps as the optimizer counts them, for those that do."""
    return max((int(own["step"]) for own in state.values() if "step" in own), default=0)


def _shapes(shards: Shards) -> dict[str, list[int]]:
    return {name: list(spec.shape) for name, spec in shards.specs.items()}


def _divided(shards: Shards) -> str | dict[str, str]:
    """How it is divided: by "element", by "parameter", or of each parameter by what."""
    if isinstance(shards, ElementShards):
        return "element"
    if isinstance(shards, WholeShards):
        return "parameter"
    return {name: "element" if shards.in_pieces(name) else "parameter" for name in shards.specs}


def difference_of(theirs: Sequence[Sequence[str]], ours: Sequence[Sequence[str]]) -> str:
    """What a state's groups of names have that an optimizer's have not, and the reverse, in
    words."""
    a, b = ({n for names in groups for n in names} for groups in (theirs, ours))
    if a == b:
        return "the same names in other groups or in another order"
    return f"only in the state: {some(sorted(a - b))}, only here: {some(sorted(b - a))}"
