"""What local SGD trains: a module, a DDP, or a model that FSDP has sharded. They differ in whose
gradients are averaged and by whom, and in what a rank has of a parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.torch_backend.ddp.hook import CommHook, hook_obstacle, hooked
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups, given_or_default
from gradwire.torch_backend.engine.scheduler import Step
from gradwire.torch_backend.fsdp.backward import ATTRIBUTE, ShardedBackward
from gradwire.torch_backend.fsdp.checkpoint import Sharded
from gradwire.torch_backend.fsdp.driver import ShardStep, asked_by_some_shard, on_all_shards
from gradwire.torch_backend.fsdp.layout import Layout, obstacle_of_shards
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.setup.consistency import require_initialized
from gradwire.torch_backend.setup.sharded_models import is_fsdp
from gradwire.torch_backend.state.memory import Replicated
from gradwire.torch_backend.state.settings import asked_by
from gradwire.torch_backend.torch_internals import joins


class Target:
    """A plain module, of which nobody averages gradients.

    Args:
        trained: its parameters that require gradients, by name.
        group: whose ranks are the replicas.

    Attributes:
        trained, group: as given.
        frozen: its other parameters.
        parameters: what this rank has of each.
        kind: what that is, for messages.
        averages: somebody can average gradients.
        averages_always: somebody averages them in full, unless told otherwise.
        partial: this rank has only blocks of parameters.
        anew: after `unregister`, what takes in what has come, was thawed, or is another tensor.
    """

    kind = "parameter"
    anew = "call local_sgd again"
    averages = averages_always = partial = False

    def __init__(self, trained: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self.trained, self.group = trained, group
        self.frozen: Mapping[str, Tensor] = {}
        self.parameters: Mapping[str, Tensor] = trained

    @property
    def device(self) -> torch.device | None:
        """The device of the parameters; None if there are none."""
        return next((p.device for p in self.parameters.values()), None)

    def obstacle(self) -> str:
        """Why this rank cannot take part; "" if it can."""
        return ""

    def obstacle_of_all(self, why_not: str, asked: str = "") -> str:
        """The obstacle of this rank, or of another that is part of the same replica; also if what
        they ask for differs."""
        return why_not

    def placement(self, groups: ProcessGroups, device: torch.device) -> Replicated:
        """The placement of the memory."""
        return Replicated(groups, device)

    def settings_of(self, local: LocalSGD) -> dict[str, float]:
        """What the compressor asks for by name, with defaults."""
        return asked_by(
            local.compressor, local.kept(specs_of(self.parameters)), dist.get_world_size(self.group)
        )

    def step_of(self, local: LocalSGD) -> Callable[[Collectives], Step]:
        """What makes a step in which parameters are averaged. To be called on all ranks."""
        return Step

    def all_or_none(self, ops: TorchOps, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters to be averaged, of which all are NaN if some are not finite, where this rank
        has only a part of them."""
        return parameters

    def require_steps(self) -> None:
        """Raise RuntimeError where ranks may step a different number of times."""

    def average_by(self, driver: Driver) -> None:
        """Let this driver average gradients."""

    def average_none(self) -> None:
        """Let nobody average gradients, not even who was left to it by a handle before."""

    def leave(self) -> None:
        """Let gradients be averaged as they are, until somebody else comes."""


class DdpTarget(Target):
    """A DDP."""

    averages = averages_always = True
    anew = "wrap the model anew and call local_sgd again"

    def __init__(
        self, ddp: DistributedDataParallel, trained: Mapping[str, Tensor], group: dist.ProcessGroup
    ) -> None:
        super().__init__(trained, group)
        self._ddp = weakref.ref(ddp)  # which must not be held by what its reducer holds
        self._hook: CommHook | None = None

    def obstacle(self) -> str:
        ddp = self._ddp()
        assert ddp is not None
        if why_not := hook_obstacle(ddp):
            return why_not
        if dist.get_world_size(self.group) != dist.get_world_size(ddp.process_group):
            return "process_group is not that of the DDP; leave it out"
        if ddp.broadcast_buffers and any(True for _ in ddp.module.buffers()):
            return (
                "ddp broadcasts buffers before each forward pass, a message in each step; build it"
                " with DistributedDataParallel(model, broadcast_buffers=False): local SGD averages"
                " them with the parameters"
            )
        return ""

    def require_steps(self) -> None:
        ddp = self._ddp()
        if ddp is not None and joins(ddp):
            raise RuntimeError(
                "local SGD needs the same number of steps on all ranks, and DDP's join() is for"
                " when they differ; give all ranks equally many batches"
            )

    def average_by(self, driver: Driver) -> None:
        if self._hook is not None:
            self._hook._use(driver)
        elif (ddp := self._ddp()) is not None:
            self._hook = hooked(ddp, driver, self.parameters)

    def leave(self) -> None:
        if self._hook is not None:
            self._hook.leave()


class ShardedTarget(Target):
    """A model that FSDP has sharded: a rank averages its own blocks, and the shards of a replica
    agree on what concerns all of them."""

    kind = "block of parameter"
    averages = partial = True

    def __init__(self, layout: Layout, trained: Mapping[str, Tensor]) -> None:
        super().__init__(trained, layout.replicas)
        self.layout = layout
        self.parameters = layout.blocks()
        self._backward: ShardedBackward | None = None

    def obstacle_of_all(self, why_not: str, asked: str = "") -> str:
        return obstacle_of_shards(self.layout, asked, why_not)

    def placement(self, groups: ProcessGroups, device: torch.device) -> Replicated:
        return Sharded(self.layout, groups)

    def settings_of(self, local: LocalSGD) -> dict[str, float]:
        asked = super().settings_of(local)
        if local.compressor is None:
            return asked
        return asked_by_some_shard(
            local.compressor, local.kept(specs_of(self.parameters)), self.layout, asked
        )[1]

    def step_of(self, local: LocalSGD) -> Callable[[Collectives], Step]:
        compressor, specs = local.compressor, specs_of(self.parameters)
        asked = (
            frozenset()
            if compressor is None
            else asked_by_some_shard(compressor, specs, self.layout, {})[0]
        )
        return partial(ShardStep, shards=self.layout.shards, asked=asked)

    def all_or_none(self, ops: TorchOps, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        ok = on_all_shards(ops.all_finite(*parameters.values()), self.layout.shards)
        return dict(zip(parameters, ops.nan_unless(ok, list(parameters.values())), strict=True))

    def average_by(self, driver: Driver) -> None:
        if self._backward is None:
            self._backward = ShardedBackward(driver, self.layout, find_unused=False)
        else:
            self._backward.use(driver)

    def average_none(self) -> None:
        before: ShardedBackward | None = getattr(self.layout.model, ATTRIBUTE, None)
        if before is not None:
            before.close()

    def leave(self) -> None:
        self.average_by(
            Driver(AllReduce(), specs_of(self.parameters), self.layout.device, self.group)
        )
        assert self._backward is not None
        self._backward.free = True
        # What was thawed before now has gone its own ways on each replica, and is refused.
        self._backward.takes_thawed = not any(p.requires_grad for p in self.layout.frozen.values())


def target_of(module: nn.Module, process_group: dist.ProcessGroup | None) -> Target:
    """What `local_sgd` was given. Raises ValueError for a sharded model without the group of its
    replicas, see also `Layout.of`."""
    ddp = module if isinstance(module, DistributedDataParallel) else None
    inner: nn.Module = module if ddp is None else ddp.module
    group = given_or_default(process_group or (None if ddp is None else ddp.process_group))
    trained = {n: p for n, p in inner.named_parameters() if p.requires_grad}
    require_initialized(trained)
    target = Target(trained, group) if ddp is None else DdpTarget(ddp, trained, group)
    if any(is_fsdp(each) for each in inner.modules()):
        if process_group is None:
            raise ValueError(
                f"module is a {type(module).__name__}, sharded by FSDP, whose replicas are not all"
                " ranks; give process_group=mesh.get_group('replicate')"
            )
        target = ShardedTarget(Layout.of(inner, group), trained)
    target.frozen = {n: p for n, p in inner.named_parameters() if not p.requires_grad}
    return target
