"""Models whose parameters are sharded already (FSDP, DTensors): refused by name, with what serves
them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

#: What compresses between replicas of a sharded model.
INSTEAD = (
    "Shard over one axis of the mesh, fully_shard(model, mesh=mesh['shard']), and compress over the"
    " other: gradwire.torch_backend.compress_replicas(model, algorithm, mesh['replicate']); or"
    " average between backward and step: gradwire.torch_backend.Averager(algorithm, {name:"
    " p.to_local() for name, p in model.named_parameters()}, mesh.get_group('replicate'))"
)


def is_fsdp(module: object) -> bool:
    """Whether a module is wrapped in FSDP1, or `fully_shard` has made it one of FSDP2's. Nothing is
    imported for it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = (getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel"))
    return isinstance(module, tuple(kind for kind in kinds if kind is not None))


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is distributed."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def sharded_parameter(parameters: Mapping[str, Tensor]) -> str | None:
    """The name of the first that is distributed."""
    return next((name for name, p in parameters.items() if is_dtensor(p)), None)
