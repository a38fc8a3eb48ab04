"""Steps that are replayed as graphs of the device, beside eager ones on the same gradients: equal
to the last bit, or it is said in which step what differs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import Algorithm
from gradwire.core.ops import Spec
from gradwire.core.simulate.doctor.report import Fault, Section
from gradwire.core.simulate.known_answers import known_specs
from gradwire.torch_backend.engine.cuda_graphs import has_graphs
from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.engine.replays import EQUAL

#: Steps that are replayed, of each kind: the first has an inf on one rank, and the second goes on
#: from there.
REPLAYED = 3


def check_replays(
    section: Section,
    group: dist.ProcessGroup,
    device: torch.device,
    algorithms: Sequence[Algorithm],
) -> None:
    """Averages, memory and skipped steps of each algorithm on this rank, replayed and eager.
    Nothing where the device has no graphs."""
    if not has_graphs(device):
        return
    for algorithm in algorithms:
        section.check(
            f"replays of {algorithm!r}", functools.partial(_check, algorithm, group, device)
        )


def _check(algorithm: Algorithm, group: dist.ProcessGroup, device: torch.device) -> str:
    specs = known_specs(algorithm, "float32")
    eager, replayed = (
        _Steps(algorithm, specs, group, device, replay=replay) for replay in (False, True)
    )
    first = algorithm.start_step + EQUAL * algorithm.cycle
    steps = first + REPLAYED * algorithm.cycle
    wrong = ""
    for step in range(steps):  # all of them on all ranks, so that none waits for another
        eager.take(step, bad=step == first)
        replayed.take(step, bad=step == first)
        wrong = wrong or _difference(step, eager.found(), replayed.found())
    if wrong:
        raise Fault(wrong)
    replays = replayed.driver.replays
    if not replays.replayed:
        return f"no step is replayed here: {replays.obstacle or 'none is like another'}"
    return f"{replays.replayed} of {steps} steps replayed, with the bits of eager ones"


def _difference(step: int, eager: dict[str, Tensor], replayed: dict[str, Tensor]) -> str:
    for name, x in eager.items():
        if differ := int((_bits(x) != _bits(replayed[name])).sum()):
            return (
                f"step {step} comes out otherwise where it is replayed: {name} differs in {differ}"
                f" of {x.numel()} elements. Set handle.replay = False here"
            )
    return ""


def _bits(x: Tensor) -> Tensor:
    """The bits of each element, as a row of bytes."""
    return x.contiguous().cpu().view(-1, 1).view(torch.uint8)


class _Steps:
    """A driver whose gradients lie where they lie."""

    def __init__(
        self,
        algorithm: Algorithm,
        specs: dict[str, Spec],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        replay: bool,
    ) -> None:
        self.driver = Driver(algorithm, specs, device, group)
        self.driver.replays.wanted = replay
        self._rank, self._last = (
            dist.get_rank(group),
            dist.get_rank(group) + 1 == dist.get_world_size(group),
        )
        self._gradients = {
            name: torch.zeros(spec.shape, dtype=torch.float32, device=device)
            for name, spec in specs.items()
        }

    def take(self, step: int, *, bad: bool) -> None:
        """Average gradients of this rank's own; one that is `bad` holds inf on the last rank."""
        draw = torch.Generator().manual_seed(1000 * step + self._rank)
        for x in self._gradients.values():
            given = torch.randn(x.shape, generator=draw, dtype=torch.float32, device="cpu")
            if bad and self._last:
                given.view(-1)[-1] = float("inf")
            x.copy_(given)
        self.driver.add(self._gradients, first=True, last=True)

    def found(self) -> dict[str, Tensor]:
        """What has to be the same."""
        memory = self.driver.memory.state
        found = {f"the average of {name!r}": x for name, x in self._gradients.items()}
        found |= {
            f"memory {key!r} of {name!r}": x
            for name, own in memory.tensors.items()
            for key, x in own.items()
        }
        found |= {f"memory {key!r}": x for key, x in memory.shared.items()}
        return found | {"the number of skipped steps": self.driver.skipped.count}
