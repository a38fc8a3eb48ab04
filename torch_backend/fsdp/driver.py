"""The driver of one shard: its replicas average, and the shards agree on what concerns the whole
model.

A norm is one of all shards' gradients, and a step counts for all shards or for none: a gradient
that is not finite on one rank is one of the whole model, and the optimizer will skip the step
everywhere. That is a scalar between the shards of a replica, which are near each other, once in a
step for each of the two, where an algorithm asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import Algorithm
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.torch_backend.engine.collectives import Collectives, asked_in
from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.engine.groups.gathered_objects import gathered_by_all
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.questions import Asked
from gradwire.torch_backend.engine.scheduler import Step
from gradwire.torch_backend.fsdp.checkpoint import Sharded
from gradwire.torch_backend.fsdp.layout import Layout


class ShardStep(Step):
    """A step of one shard, in which the shards agree.

    Args:
        collectives: between the replicas of this shard.
        shards: the group of the shards.
        asked: what the program of some shard asks of the whole model: each of these is answered
            once in a step, by all shards together.
        unscaled: what is made of a norm.
    """

    def __init__(
        self,
        collectives: Collectives,
        shards: dist.ProcessGroup,
        asked: frozenset[Asked],
        *,
        unscaled: Callable[[Tensor], Tensor] = lambda norm: norm,
    ) -> None:
        super().__init__(collectives, unscaled=lambda norm: unscaled(self._norm_of_all(norm)))
        self._shards = shards
        self._asked = asked
        self._norm: Tensor | None = None
        self._norm_is_of_others = False
        self._all_finite: Tensor | None = None

    def begin(self, *, apart: bool = False) -> None:
        super().begin(apart=apart)
        self._norm = self._all_finite = None
        self._norm_is_of_others = False

    def finish(self) -> None:
        """Run all programs to their end. What other shards ask and this one does not is answered
        here."""
        super().finish()
        self._norm_of_others()
        self.finite()

    def finite(self) -> Tensor | None:
        mine = super().finite()
        if Asked.FINITE not in self._asked:
            return mine
        if self._all_finite is None:
            # A shard may ask for the norm and then for this, and another for this alone: the same
            # message has to come first.
            self._norm_of_others()
            device = self.collectives.ops.device
            flag = torch.ones((), dtype=torch.bool, device=device) if mine is None else mine
            self._all_finite = on_all_shards(flag, self._shards)
        return self._all_finite

    def _norm_of_others(self) -> None:
        """Take part in the norm that other shards ask for, where this one has not."""
        if Asked.NORM in self._asked and self._norm is None:
            self._norm_of_all(
                torch.zeros((), dtype=torch.float32, device=self.collectives.ops.device)
            )
            self._norm_is_of_others = True

    def _norm_of_all(self, norm: Tensor) -> Tensor:
        if self._norm_is_of_others:
            raise RuntimeError(
                "the algorithm asks for local_norm after step_is_finite, by which time the shards"
                " have agreed on a norm without this one's part; ask for local_norm first"
            )
        if self._norm is None:
            square = norm.double().square()
            dist.all_reduce(square, group=self._shards)
            self._norm = square.sqrt()
        return self._norm.to(norm.dtype)


def on_all_shards(flag: Tensor, shards: dist.ProcessGroup) -> Tensor:
    """Whether a boolean scalar holds on all shards."""
    found = flag.to(torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=shards)
    return found.bool()


def asked(algorithm: Algorithm, specs: Mapping[str, Spec], layout: Layout) -> frozenset[Asked]:
    """What an algorithm asks of the whole model, for the blocks of this shard."""
    try:
        return asked_in(dry_run(algorithm, specs, dist.get_world_size(layout.replicas)).requests)
    except Exception:  # it is written for torch's tensors alone, and may ask for anything
        return frozenset({Asked.NORM, Asked.FINITE})


def asked_by_some_shard(
    algorithm: Algorithm, specs: Mapping[str, Spec], layout: Layout, settings: Mapping[str, float]
) -> tuple[frozenset[Asked], dict[str, float]]:
    """What an algorithm asks for on some shard, since of blocks of other sizes it may ask other
    things: of the whole model, and by name, with defaults. `settings` are those of this shard."""
    found: frozenset[Asked] = frozenset()
    named: dict[str, float] = {}
    for mine, own in gathered_by_all(
        (asked(algorithm, specs, layout), dict(settings)), layout.shards, layout.device
    ):
        found |= mine
        named |= own
    return found, named


class ShardDriver(Driver):
    """A driver of the blocks that a rank holds of a sharded model. To be made on all ranks of the
    shards, which it asks what they need.

    Args:
        algorithm: see `Driver`.
        layout: what this rank holds.
        groups: whose ranks are the replicas.
        message_bytes, grad_scaler: see `Driver`.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        specs: Mapping[str, Spec],
        groups: ProcessGroups,
        message_bytes: int | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.layout = layout
        super().__init__(
            algorithm, specs, layout.device, groups, message_bytes, grad_scaler=grad_scaler
        )
        self._programs = ShardStep(
            self.collectives,
            layout.shards,
            self._asked,
            unscaled=lambda norm: self.memory.scale.unscaled(norm),
        )

    def _asks(self, settings: dict[str, float]) -> dict[str, float]:
        self._asked, found = asked_by_some_shard(self.algorithm, self.specs, self.layout, settings)
        return found

    def _placement(self) -> Sharded:
        return Sharded(self.layout, self.groups)

    def successor(self, algorithm: Algorithm, groups: ProcessGroups, **options: Any) -> Driver:
        return ShardDriver(algorithm, self.layout, self.specs, groups, **options)
