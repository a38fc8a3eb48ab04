"""What a sharded optimizer is given: checked, named, divided, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.buckets.assignment import assign_buckets
from gradwire.core.ops import ITEMSIZE, Spec
from gradwire.core.zero.sharding import (
    MixedShards,
    Shards,
    shard_by_bucket,
    shard_by_element,
    shard_by_parameter,
)
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.ops.workspace import dtype_name
from gradwire.torch_backend.setup.consistency import (
    describe,
    require_initialized,
    require_same_on_all_ranks,
)
from gradwire.torch_backend.setup.optimizer_state import has_two_modes
from gradwire.torch_backend.torch_internals import MUON, NeedsTorch
from gradwire.torch_backend.zero.rules import Rule

T = TypeVar("T")
#: What a parameter is called that was given without a name.
MADE_UP = "parameter.{}"


def require_parameters(trained: Mapping[str, Tensor]) -> None:
    """Raise TypeError or ValueError for parameters whose optimizer cannot be sharded."""
    require_initialized(trained)
    if not trained:
        raise TypeError(
            "params has no parameter with requires_grad=True, so there is nothing to optimize"
        )
    for name, p in trained.items():
        if dtype_name(p.dtype) not in ITEMSIZE:
            raise ValueError(
                f"parameter {name!r} is {dtype_name(p.dtype)}, and a sharded optimizer takes real"
                " ones: keep torch.view_as_real(...) of a complex parameter, and make it complex"
                " in the forward pass"
            )
    devices = {p.device for p in trained.values()}
    if len(devices) != 1:
        raise ValueError(
            f"parameters are on {sorted(map(str, devices))}; one device per process is supported"
        )


def require_sharded(name: str, rules: Sequence[Rule], given: Mapping[str, Any]) -> None:
    """Raise ValueError for what cannot be done where a parameter, this one, is a DTensor.

    Args:
        name: of the parameter.
        rules: of all parameters.
        given: options that are not what they are by default.
    """
    if given:
        option, value = next(iter(given.items()))
        raise ValueError(
            f"{option}={value!r} with the DTensor {name!r}: fully_shard averages gradients, divides"
            " the state and keeps parameters in the dtype that they have, and"
            " torch.nn.utils.clip_grad_norm_ knows their norm; leave it out"
        )
    whole = [rule for rule in rules if rule.shard != "element"]
    if not whole:
        raise ValueError(
            f"parameter {name!r} is a DTensor, whose optimizer state is sharded as it is itself:"
            " use the plain optimizer itself"
        )
    if two := next((rule for rule in rules if has_two_modes(rule.optimizer_class)), None):
        name = two.optimizer_class.__name__
        raise ValueError(
            f"{two.subject or 'optimizer_class'}={name}: {name} has train() and eval(), which put"
            f" other weights into the parameters, and a ZeroOptimizer has them not: make {name}"
            " itself for these parameters, beside a ZeroOptimizer for the others"
        )
    if MUON.obstacle:
        raise NeedsTorch(
            f"parameter {name!r} is a DTensor, and of those matrices go to owners for Muon alone."
            f" {MUON.obstacle}"
        )
    if other := next(
        (rule for rule in whole if rule.optimizer_class is not torch.optim.Muon), None
    ):
        raise ValueError(
            f"{other.subject or 'optimizer_class'}={other.optimizer_class.__name__},"
            f" shard={other.shard!r}: of DTensors matrices go to owners for torch.optim.Muon alone,"
            " since its state is elementwise; use torch's optimizers, or 'element'"
        )


def agreed_on(
    group: dist.ProcessGroup,
    settings: Mapping[str, Any],
    trained: Mapping[str, Tensor],
    divided: Callable[[], T],
    refused: Exception | None,
) -> T:
    """What `divided` gives, if all ranks ask for the same, and no rank's optimizer has `refused`
    its arguments."""
    # What its arguments are worth is no question of shards.
    found: list[T] = []
    obstacle = "" if refused is None else f"{settings['optimizer_class']}: {refused}"
    try:
        found += [] if refused else [divided()]
    except ValueError as error:
        obstacle = str(error)
    said = {name: str(value) for name, value in settings.items()}
    try:
        require_same_on_all_ranks(
            group, said, describe(trained), obstacle, next(iter(trained.values())).device
        )
    except ValueError as error:
        raise (error if refused is None else refused) from None
    return found[0]  # or there was an obstacle


def buckets_of(parameters: Mapping[str, Tensor], limits: Any) -> list[list[str]]:
    """Names of parameters that share a message, in reverse order, as gradients arrive."""
    in_reverse = list(parameters)[::-1]
    specs = specs_of(parameters)
    assigned = assign_buckets(
        [specs[n].nbytes for n in in_reverse], limits, [specs[n].dtype for n in in_reverse]
    )
    return [[in_reverse[i] for i in bucket] for bucket in assigned]


def divide(
    rule_of: Mapping[str, Rule],
    specs: Mapping[str, Spec],
    world_size: int,
    buckets: Sequence[Sequence[str]],
) -> Shards:
    """Who owns what. `rule_of` each parameter, by name."""
    if any(rule.shard == "bucket" for rule in rule_of.values()):  # then there is one rule
        return shard_by_bucket(specs, world_size, buckets)
    cut = {name: spec for name, spec in specs.items() if rule_of[name].shard == "element"}
    whole = {name: spec for name, spec in specs.items() if name not in cut}
    work = {name: rule_of[name].work(spec) for name, spec in whole.items()}
    parts: list[Shards] = [shard_by_element(cut, world_size)] if cut else []
    parts += [shard_by_parameter(whole, world_size, work)] if whole else []
    return parts[0] if len(parts) == 1 else MixedShards(specs, world_size, tuple(parts))


def are_made_up(names: Iterable[str]) -> bool:
    """Whether these are names of parameters that were given without any. (A `ParameterList` called
    "parameter" has such too; where all of a group are, its order says as much.)"""
    begin = MADE_UP.format("")
    return all(name.startswith(begin) and name[len(begin) :].isdigit() for name in names)


def named_groups(
    params: Iterable[Any],
) -> tuple[list[dict[str, Any]], dict[Tensor, str], dict[str, Tensor]]:
    """Parameter groups of parameters that require a gradient; the parameters' names in the order of
    the groups; and those that require none, by name."""
    if hasattr(params, "shape") or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {type(params).__name__}; give parameters, (name, parameter) pairs, or"
            " groups of either"
        )
    given = list(params)
    if not given:
        raise ValueError(
            "params is empty, as a generator is that was used before; give parameters, (name,"
            " parameter) pairs, or groups of either"
        )
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    cleaned: list[dict[str, Any]] = []
    names: dict[Tensor, str] = {}
    taken: set[str] = set()
    frozen: dict[str, Tensor] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, dict):
            raise TypeError(
                f"params[{number}] is a {type(group).__name__} among parameter groups; put it into"
                " one: {'params': [...]}"
            )
        if "params" not in group:
            raise ValueError(
                f"params[{number}] is a parameter group with {sorted(group)} and without 'params',"
                " its parameters"
            )
        members = group["params"]
        kept = []
        for entry in [members] if isinstance(members, Tensor) else members:
            name, p = entry if isinstance(entry, tuple) else (MADE_UP.format(len(names)), entry)
            if not isinstance(p, Tensor):
                raise TypeError(
                    f"params holds a {type(p).__name__}; give parameters, or (name, parameter)"
                    " pairs"
                )
            if not p.requires_grad:
                frozen[name if isinstance(entry, tuple) else f"frozen.{len(frozen)}"] = p
                continue
            if p in names:
                raise ValueError(
                    f"parameter {name!r} is given twice; a parameter belongs to one group"
                )
            if name in taken:
                raise ValueError(f"two parameters are called {name!r}; names must be distinct")
            names[p] = name
            taken.add(name)
            kept.append(p)
        cleaned.append({**group, "params": kept})
    return cleaned, names, frozen
