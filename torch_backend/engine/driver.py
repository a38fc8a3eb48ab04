"""The torch driver between two steps: what it is made of, its statistics, another algorithm or a
loaded memory in its place.

What happens in a step is in `gradwire.torch_backend.engine.step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol import reduce_max
from gradwire.core.state.checkpoint import StateMismatch
from gradwire.core.text.name_patterns import chosen
from gradwire.torch_backend.cpu.compiled import loops_for
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.cuda_graphs import capturable
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.groups.whereabouts import Whereabouts
from gradwire.torch_backend.engine.replays import Replays
from gradwire.torch_backend.engine.scheduler import Running, Step
from gradwire.torch_backend.engine.step import GradientStep
from gradwire.torch_backend.monitor.fidelity import Measurement
from gradwire.torch_backend.monitor.stats import Stats
from gradwire.torch_backend.monitor.watcher import SkippedSteps, Watcher, norm_of
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.workspace import dtype_name
from gradwire.torch_backend.state.loss_scale import require_all_ranks
from gradwire.torch_backend.state.memory import Memory, Replicated, factors_side_by_side
from gradwire.torch_backend.state.settings import Settings


def specs_of(parameters: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Shape and dtype by name."""
    return {name: Spec(tuple(p.shape), dtype_name(p.dtype)) for name, p in parameters.items()}


class Driver(GradientStep):
    """An algorithm at work on one rank. Raises ValueError for whatever the algorithm refuses, by
    name.

    Args:
        algorithm: what to run.
        specs: parameter name → shape and dtype, of all parameters it may meet.
        device: of the gradients.
        process_group: whose ranks are the replicas; or groups of them as well, if the algorithm
            averages in groups.
        message_bytes: payload at which a group is closed; 0 makes every call of `add` a group of
            its own. None: 1 MiB; 4 MiB for compressed steps on an accelerator.
        grad_scaler: the loss scaler in whose units gradients come; memory of them follows its
            scale. None: they are not scaled, or by a constant.
        divided: gradients come multiplied by `gradwire.torch_backend.engine.collectives.share`,
            which saves a pass over them where they have to be copied anyway. Only for an algorithm
            that sends them as they are, and computes nothing.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        specs: Mapping[str, Spec],
        device: torch.device,
        process_group: dist.ProcessGroup | ProcessGroups,
        message_bytes: int | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        divided: bool = False,
    ) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.specs = dict(specs)
        self.ops = TorchOps(device)
        self.ops.loops = loops_for(algorithm, specs, device)
        self.groups = (
            process_group
            if isinstance(process_group, ProcessGroups)
            else ProcessGroups(process_group)
        )
        self.process_group = self.groups.whole
        self.message_bytes = message_bytes
        self.divided = divided
        self.weighted = bool(getattr(algorithm, "weighted", False))
        self.weight = torch.ones((), dtype=torch.float32, device=device)
        self._capturable = capturable(device)
        replicas = self.process_group.size()
        self._dry = dry_run(algorithm, self.specs, replicas)
        self.settings = Settings(self._asks(self._dry.settings), device)
        self._remembered = frozenset(self._dry.memory.tensors)
        state = factors_side_by_side(
            algorithm.init(self.ops, self.specs), apart=algorithm.per_replica
        )
        self.memory = Memory(algorithm, state, self._placement(), grad_scaler)
        self._meeting = self.memory.placement.meetings[0]
        self.collectives = Collectives(self.groups, self.ops, divided=divided)
        self.collectives.sent = self.memory.sent
        self.collectives.levels = levels = levels_of(algorithm)
        self.collectives.whereabouts = Whereabouts(
            self._meeting, repr(algorithm), self.memory, self.collectives
        )
        near = None if levels is None else levels.near(replicas)
        self._programs = Step(
            self.collectives, unscaled=lambda norm: self.memory.scale.unscaled(norm), near=near
        )
        self.memory.owed = self.owed.errors
        self._foresee()
        rank, knows = self.process_group.rank(), self.ops.host_knows
        self.skipped = SkippedSteps(repr(algorithm), device, rank, seen_by_host=knows)
        times = self.collectives.times
        self.watch = Watcher(
            repr(algorithm), algorithm.start_step, times, self.process_group, skipped=self.skipped
        )
        self.replays = Replays(self, near)

    def _asks(self, settings: dict[str, float]) -> dict[str, float]:
        """Settings with their defaults, where those of other ranks may be others."""
        return settings

    def _placement(self) -> Replicated:
        """The placement of the memory."""
        return Replicated(self.groups, self.ops.device)

    def abandon(self) -> None:
        """Give up a step that never came to its end."""
        self._programs.abandon()

    def send_usage(self, used: Sequence[bool]) -> Running[Tensor]:
        """Tell all ranks which parameters this one has used: on its way, for each whether some rank
        has."""
        usage = self.ops.from_host(used, torch.uint8)
        return Step(self.collectives).start(reduce_max(usage, out=usage, watched=False))

    def stats(self) -> Stats:
        """Totals so far. On CUDA this waits for the device."""
        skipped = int(self.skipped.count)  # first: the times are of what the device has finished
        found = self.watch.stats(self.memory.steps, skipped, self.memory.sent)
        replays, card = self.replays, self.ops.loops.card
        return replace(
            found, replayed_steps=replays.replayed, graph_bytes=replays.nbytes, compiled_loops=card
        )

    def measure(self) -> Measurement:
        """Compare steps with a full average, from the next one on until `measurement` is None
        again. Every rank calls this."""
        require_all_ranks(self._meeting, "measured()", "local_error_norm()")
        self.measurement = Measurement(self.process_group, divided=self.divided)
        return self.measurement

    def local_error_norm(self) -> float:
        """2-norm of this rank's error memory over all tensors, without a loss scale; 0.0 without
        any. On CUDA this waits for the device."""
        norm = norm_of(self.memory.errors())
        return 0.0 if norm is None else float(norm / self.memory.scale.value)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> StateMismatch:
        """Go on from a saved state in any form; see
        `gradwire.torch_backend.Handle.load_state_dict`."""
        found = self.memory.fit(state, strict)
        self.memory.take(found)
        self._foresee()
        self.watch.restart()
        self._compared = False
        return found.difference

    def successor(self, algorithm: Algorithm, groups: ProcessGroups, **options: Any) -> Driver:
        """A driver of another algorithm for the same gradients, with a memory of its own."""
        return Driver(algorithm, self.specs, self.ops.device, groups, **options)

    def continue_from(self, other: Driver) -> StateMismatch:
        """Take over the memory of a driver of another algorithm on the same parameters, as far as
        it fits, with its counts and its units. Returns what did not fit."""
        difference = self.memory.continue_from(other.memory)
        self._foresee()
        self.skipped.continue_from(other.skipped)
        self.watch.continue_from(other.watch)
        self.be_told_as(other)
        return difference

    def be_told_as(self, other: Driver) -> None:
        """Take over what the user has told another driver on the same parameters."""
        self.weight.copy_(other.weight)
        self.settings.continue_from(other.settings)
        self.dense_elements = other.dense_elements
        self.replays.wanted = other.replays.wanted

    def take_as_compared(self) -> None:
        """Ranks know already that they go on from the same."""
        self._compared = True

    def forget(self, names: str | Iterable[str] | None = None) -> None:
        """Set error memory to zero; see `gradwire.torch_backend.setup.handle.Handle.forget`."""
        wanted = chosen("names", names, self.specs)
        for x in (
            *self.memory.errors(wanted),
            *(x for name, x in self.owed.errors.items() if wanted is None or name in wanted),
        ):
            x.zero_()
