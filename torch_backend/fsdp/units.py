"""The units of a sharded model: modules whose gradients FSDP2 reduces together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.core.plan.advice import CompressionWarning, outside
from gradwire.torch_backend.setup.sharded_models import is_fsdp
from gradwire.torch_backend.torch_internals import (
    REDUCES_IN_OWN_DTYPE,
    fsdp_accumulates,
    fsdp_policies,
    fsdp_state,
)


@dataclass
class Unit:
    """Modules that were given to `fully_shard` in one call.

    Attributes:
        name: of the first of them.
        modules: mostly one.
        parameters: names of the trained ones.
    """

    name: str
    modules: list[Any]
    parameters: list[str]

    def hook(self, called: Callable[[Tensor], None], stream: Any = None) -> None:
        """Let FSDP call this from now on in each backward pass, when it has reduced the unit's
        gradients over the shards and before they are in `.grad`.

        Raises:
            ValueError: FSDP reduces parts of the unit over different meshes.
        """
        for module in self.modules:
            module.set_all_reduce_hook(called, stream=stream)


def units_of(model: nn.Module, parameters: Iterable[str]) -> list[Unit]:
    """The units that have trained parameters, in the order of the model. A parameter is of the
    innermost unit above it."""
    names = {name: module for name, module in model.named_modules() if is_fsdp(module)}
    units: dict[int, Unit] = {}
    for name, module in names.items():
        units.setdefault(id(fsdp_state(module)), Unit(name, [], [])).modules.append(module)
    for parameter in parameters:
        owner = parameter.rpartition(".")[0]
        while owner and owner not in names:
            owner = owner.rpartition(".")[0]
        if owner not in names:
            raise ValueError(
                f"parameter {parameter!r} is in no module of model that fully_shard was called on"
            )
        units[id(fsdp_state(names[owner]))].parameters.append(parameter)
    return [unit for unit in units.values() if unit.parameters]


def accumulating(units: Sequence[Unit]) -> bool:
    """Whether gradients of this backward pass are to stay with their replica, to be averaged with
    those of a later one.

    That is what `set_requires_all_reduce(False)` means where FSDP averages over replicas by itself,
    and `set_is_last_backward(False)`. After `set_requires_gradient_sync(False)` no unit reduces
    anything.

    Raises:
        RuntimeError: units differ.
    """
    found = {unit.name: fsdp_accumulates(unit.modules[0]) for unit in units}
    if len(set(found.values())) > 1:
        kept = next(name for name, keeps in found.items() if keeps)
        raise RuntimeError(
            f"set_requires_all_reduce(False) was called for module {kept!r} and not for all others,"
            " and replicas average all of a model or nothing: call it on the model itself, which"
            " passes it on"
        )
    return any(found.values())


def warn_of_wide_shards(units: Sequence[Unit]) -> None:
    """Warn where FSDP reduces over the shards in more bytes than the user who asked for a shorter
    `param_dtype` may think."""
    if not REDUCES_IN_OWN_DTYPE:
        return
    for unit in units:
        for policy in fsdp_policies(unit.modules[0]):
            short = None if policy.reduce_dtype is not None else policy.param_dtype
            wide = {p.dtype for module in unit.modules for p in module.parameters()}
            if short is not None and any(dtype.itemsize > short.itemsize for dtype in wide):
                warnings.warn(
                    f"reduce_dtype=None in the MixedPrecisionPolicy of module {unit.name!r}: torch"
                    f" {torch.__version__} reduces over the shards in the dtype of the parameters,"
                    f" and not in param_dtype={short}. Say reduce_dtype={short} to send fewer"
                    " bytes, or the other to be rid of this",
                    CompressionWarning,
                    stacklevel=outside(),
                )
                return
