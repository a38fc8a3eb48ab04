"""Which part of a sharded model this rank holds, and with whom: checked, before anything is
hooked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.core.text.wording import some
from gradwire.torch_backend.engine.groups.gathered_objects import gathered_by_all
from gradwire.torch_backend.fsdp.units import Unit, units_of
from gradwire.torch_backend.setup.sharded_models import is_dtensor, is_fsdp
from gradwire.torch_backend.state.blocks import Piece
from gradwire.torch_backend.torch_internals import require_sharded_models

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: How a model is set up so that there is something to compress.
RIGHT = """Shard over the inner axis of a mesh alone, and give the outer one to compress_replicas:
    mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    handle = compress_replicas(model, algorithm, mesh["replicate"])"""


@dataclass
class Held:
    """A parameter of the model, of which this rank holds a block.

    FSDP may put another tensor in a parameter's place (`to_empty`, `load_state_dict(assign=True)`),
    and in between the whole one.

    Attributes:
        module, attribute: where it lives.
        piece: the block.
    """

    module: nn.Module
    attribute: str
    piece: Piece
    _sharded: DTensor

    @property
    def parameter(self) -> DTensor:
        """The sharded one, as the optimizer knows it."""
        now: Any = getattr(self.module, self.attribute)
        if is_dtensor(now) and now.device_mesh == self._sharded.device_mesh:
            self._sharded = now
        return self._sharded

    @property
    def local(self) -> Tensor:
        """This rank's block, in the parameter's memory."""
        return local_part(self.parameter)

    def distributed(self, local: Tensor) -> DTensor:
        """A tensor that is sharded as the parameter is, of its local part."""
        from torch.distributed.tensor import DTensor

        p = self.parameter
        return DTensor.from_local(
            local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )


@dataclass
class Layout:
    """The trained parameters of a sharded model.

    Attributes:
        model: of which they are.
        held: name → what this rank holds of a parameter.
        units: what FSDP reduces the gradients of at once, in the order of the model.
        shards: the group of the ranks that hold the other blocks of this replica.
        replicas: the group of the ranks that hold this block in the other replicas.
    """

    model: nn.Module
    held: dict[str, Held]
    _frozen: dict[str, Tensor]
    units: list[Unit]
    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup

    @property
    def shard(self) -> int:
        """This rank's number among the shards."""
        return dist.get_rank(self.shards)

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The parameters that required no gradient, by name: those that are there now, and sharded
        as optimizers know them, see `Held`."""
        if self._frozen:
            for name, now in self.model.named_parameters():
                before = self._frozen.get(name)
                if before is not None and is_dtensor(now) >= is_dtensor(before):
                    self._frozen[name] = now
        return dict(self._frozen)

    def holds(self, name: str) -> bool:
        """Whether the module of this name is the one whose parameter is held."""
        held = self.held.get(name)
        if held is None:
            return False
        try:
            return self.model.get_submodule(name.rpartition(".")[0]) is held.module
        except AttributeError:  # it is there no more
            return False

    @property
    def pieces(self) -> dict[str, Piece]:
        """Which block of each parameter this rank holds."""
        return {name: held.piece for name, held in self.held.items()}

    @property
    def device(self) -> torch.device:
        """The device of the blocks."""
        return next(iter(self.held.values())).local.device

    @property
    def offloaded(self) -> bool:
        """Whether the blocks and their gradients are on the CPU, and the shards compute on a
        device."""
        held = next(iter(self.held.values()))
        return self.device.type == "cpu" != held.parameter.device_mesh.device_type

    def blocks(self) -> Blocks:
        """This rank's block of each parameter."""
        return Blocks(self.held)

    def thawed(self) -> Layout:
        """This layout with the parameters that have begun to require a gradient since. Raises
        ValueError for one that cannot be served, by name."""
        peers, mesh = _peers(self.replicas), next(iter(self.held.values())).parameter.device_mesh
        found = {name: p for name, p in self.frozen.items() if p.requires_grad}
        held = self.held | {
            name: _held(self.model, name, p, peers, mesh) for name, p in found.items()
        }
        frozen = {name: p for name, p in self._frozen.items() if name not in found}
        return replace(self, held=held, _frozen=frozen, units=units_of(self.model, held))

    @classmethod
    def of(cls, model: nn.Module, replicas: dist.ProcessGroup) -> Layout:
        """What a model says, of which the ranks of a group are to be replicas.

        Raises:
            TypeError: `model` is no module that `fully_shard` has sharded.
            ValueError: what cannot be served, by name, with the lines that set it up right; or this
                torch is too old, with the version that is not.
        """
        _require_fsdp2(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError(
                "model has no parameter with requires_grad=True, so there is nothing to average"
            )
        peers = _peers(replicas)
        shard_mesh: DeviceMesh | None = None
        held: dict[str, Held] = {}
        for name, p in trained.items():
            held[name] = _held(model, name, p, peers, shard_mesh)
            shard_mesh = held[name].parameter.device_mesh
        assert shard_mesh is not None
        frozen: dict[str, Tensor] = {
            name: p for name, p in model.named_parameters() if not p.requires_grad
        }
        return cls(model, held, frozen, units_of(model, held), shard_mesh.get_group(), replicas)


class Blocks(Mapping[str, Tensor]):
    """Name → this rank's block of a parameter, wherever FSDP keeps it by now."""

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._held = held

    def __getitem__(self, name: str) -> Tensor:
        return self._held[name].local

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def obstacle_of_shards(layout: Layout, asked: str, obstacle: str) -> str:
    """The obstacle of some shard, or that shards ask for different things: the replicas of the
    others have to learn of it as well."""
    everyone = gathered_by_all((obstacle, asked, sorted(layout.held)), layout.shards, layout.device)
    for shard, (theirs, *_) in enumerate(everyone):
        if theirs:
            return obstacle or f"shard {shard} cannot take part: {theirs}"
    if any(what != everyone[0][1] for _, what, _ in everyone):
        return f"shards differ in algorithm: {[what for _, what, _ in everyone]}"
    if any(names != everyone[0][2] for *_, names in everyone):
        return "shards differ in which parameters require gradients"
    return ""


def local_part(x: Tensor) -> Tensor:
    """What of a tensor is on this rank, in its memory; a tensor that is not distributed itself."""
    if not is_dtensor(x):
        return x.detach()
    local: Tensor = x.detach().to_local()  # type: ignore[attr-defined]
    return local


def _require_fsdp2(model: object) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "model is a DistributedDataParallel, which register_comm_hook(ddp, algorithm)"
            " compresses"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; give a module that fully_shard has sharded."
            f" {RIGHT}"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(
            "model is sharded by FullyShardedDataParallel, FSDP1; compress_replicas takes FSDP2."
            f" {RIGHT}"
        )
    sharded = [module for module in model.modules() if is_fsdp(module)]
    if not sharded:
        raise TypeError(
            f"model is a {type(model).__name__} that fully_shard has not sharded. {RIGHT}"
        )
    require_sharded_models(sharded)


def replica_group(mesh: object) -> dist.ProcessGroup:
    """The group behind the axis of the replicas. Raises TypeError for what is no mesh, and
    ValueError for one of several axes."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; give the axis of the replicas, mesh['replicate']"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh is {_described(mesh)}; give its axis of the replicas alone. {RIGHT}"
        )
    return mesh.get_group()


def _peers(replicas: dist.ProcessGroup) -> set[int]:
    """The other replicas of this rank."""
    return set(dist.get_process_group_ranks(replicas)) - {dist.get_rank()}


def _held(model: nn.Module, name: str, p: Tensor, peers: set[int], mesh: DeviceMesh | None) -> Held:
    """What this rank holds of a parameter, which is to be sharded over this mesh; None: over
    any."""
    parameter = _sharded(name, p, peers)
    if mesh is not None and parameter.device_mesh != mesh:
        raise ValueError(
            f"parameter {name!r} is sharded over {_described(parameter.device_mesh)}, others over"
            f" {_described(mesh)}; compress_replicas takes models that are sharded over one mesh."
            " gradwire.torch_backend.Averager takes any tensors"
        )
    owner, _, attribute = name.rpartition(".")
    return Held(model.get_submodule(owner), attribute, _piece(parameter), parameter)


def _sharded(name: str, p: Tensor, peers: set[int]) -> DTensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(p, DTensor):
        raise ValueError(  # noqa: TRY004 - of one parameter among others
            f"parameter {name!r} is not sharded, so FSDP averages nothing of it. Call fully_shard"
            " on the model itself last, for what its layers have left, or set requires_grad=False"
        )
    found = peers & set(p.device_mesh.mesh.flatten().tolist())
    if found and any(placement.is_replicate() for placement in p.placements):
        raise ValueError(
            f"parameter {name!r} is replicated over {_described(p.device_mesh)}, where ranks"
            f" {some(sorted(found))} are replicas of this one, and torch averages its gradient over"
            f" them in full before any hook is called. {RIGHT}"
        )
    if found:
        raise ValueError(
            f"parameter {name!r} is sharded over {_described(p.device_mesh)}, and ranks"
            f" {some(sorted(found))} of that are in mesh, as replicas of this one. {RIGHT}"
        )
    if p.device_mesh.ndim > 1 or not all(placement.is_shard() for placement in p.placements):
        raise ValueError(
            f"parameter {name!r} is {p.placements} on {_described(p.device_mesh)};"
            " compress_replicas takes models that fully_shard alone has sharded, over one axis."
            " With tensor parallelism give gradwire.torch_backend.Averager the local parts"
        )
    return p


def _piece(p: DTensor) -> Piece:
    axis: int = p.placements[0].dim  # type: ignore[attr-defined]
    shards, length = p.device_mesh.size(), p.shape[axis]
    # As `torch.chunk`: the last ones may have less, or nothing.
    each = -(-length // shards) if length else 0
    start = min(p.device_mesh.get_local_rank() * each, length)
    return Piece(axis, start, min(start + each, length), length)


def _described(mesh: DeviceMesh) -> str:
    axes = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
    return (
        "a mesh of"
        f" {' × '.join(f'{axis} {n}' for axis, n in zip(axes, mesh.mesh.shape, strict=True))}"
    )
