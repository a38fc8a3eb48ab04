"""What is noted in each step, by everything that watches a training: times, skipped steps, the
error, parameters that nobody knows.

A driver hands over one `StepEnded` when a step has come to its end, and notes the time on its way.
Whatever is made of the notes (`gradwire.torch_backend.monitor.timers`, `stats`, `report`) is made
when somebody reads them. Nothing is sent, and on a device the host waits for nothing.

    times = StepTimes(device)
    times.begin()                    # the first gradients of a step have come
    start = times.now()
    ...                              # compress, send, wait
    times.worked(start)
    times.end()
    times.read()                     # Times(steps=1, step_seconds=…, compress_seconds=…, …)
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.core.state.skipped_steps import IN_A_ROW, RunOfSkips
from gradwire.core.text.wording import some
from gradwire.torch_backend.monitor.report import Progress, log_costs
from gradwire.torch_backend.monitor.stats import Sent, Stats
from gradwire.torch_backend.monitor.timers import Moment, Notes, Times, times_of, whole_cycles

#: Figures are of so many steps.
LAST = 50
#: Steps between two looks at the error, each a pass over it, and how many looks are kept.
NORM_EVERY, NORMS = 100, 20
#: The line about costs is logged after so many compressed steps.
REPORT_AFTER = 100
#: Steps in full that others are compared with, at least.
ENOUGH = 20
#: So many parameters are walked past in a step, on average.
AT_ONCE = 10


class StepEnded(NamedTuple):
    """A step has come to its end.

    Attributes:
        steps: so many have, with this one.
        progress: what has been sent so far; asked for now and then.
        errors: the error memory; asked for now and then.
        scale: its units.
    """

    steps: int
    progress: Callable[[], Progress]
    errors: Callable[[], Sequence[Tensor]] = list
    scale: float | Tensor = 1.0


def moment_on(device: torch.device) -> Moment:
    """This moment on a device with streams: when its current stream comes here."""
    event = torch.Event(device, enable_timing=True)
    # Of the tensors' device, which need not be the current one.
    event.record(torch.accelerator.current_stream(device))
    return event


class StepTimes:
    """Notes of the last steps of one rank, as many at any time of a run. Nothing is launched for
    them.

    Args:
        device: where the work is done.
        cycle: steps after which averages repeat. Figures are of whole cycles.
    """

    def __init__(self, device: torch.device, cycle: int = 1) -> None:
        self._device = device
        self._on_host = device.type in ("cpu", "meta")  # which have no streams
        self._steps: deque[Notes] = deque(maxlen=whole_cycles(LAST, cycle))
        self._open: Notes | None = None
        self._follows = False

    def begin(self) -> None:
        """A step begins. One that never came to its end is forgotten."""
        self._open = Notes(None, self._follows)
        self._open.begin = self.now()
        self._follows = False

    def skip(self) -> None:
        """Note nothing until the next step begins, for instance because a CUDA graph captures this
        one."""
        self._open, self._follows = None, False

    def now(self) -> Moment:
        """This moment; on a device, when its current stream comes here."""
        if self._on_host:
            return perf_counter()
        if self._open is None:
            return None
        return moment_on(self._device)

    def worked(self, start: Moment) -> None:
        """Note that from `start` until now averaging has taken the stream, or this thread."""
        if self._open is not None and start is not None:
            self._open.work.append((start, self.now()))

    def waited(self, nbytes: int, launched: Moment, start: Moment) -> None:
        """Note that from `start` until now a message was waited for, which was launched then."""
        if self._open is not None and launched is not None and start is not None:
            self._open.messages.append((nbytes, launched, start, self.now()))

    def end(self) -> None:
        """The step has come to its end."""
        if self._open is not None:
            self._steps.append(self._open)
            self._open, self._follows = None, True

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def read(self) -> Times:
        """Averages over the last steps, 50 at most, or a whole cycle. On a device they are of those
        that it has finished: nobody waits."""
        return times_of(list(self._steps), self._open)


class SkippedSteps:
    """The count of one driver, kept where its gradients are. On a device the host looks at it after
    every tenth step, at what had arrived by then:
    nothing is launched but a copy of the number, and nobody waits.

    Args:
        what: the `repr` of the algorithm.
        device: of the gradients.
        rank: see `RunOfSkips`.
        seen_by_host: it may look at them without waiting.

    Attributes:
        count: of skipped steps, a scalar on the device.
        examines: the next step would be the tenth in a row: gradients are to be examined before it.
    """

    def __init__(self, what: str, device: torch.device, rank: int, *, seen_by_host: bool) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._run = RunOfSkips(what, rank)
        self._seen_by_host = seen_by_host
        self._arrived = None if device.type == "cpu" else torch.Event(device)
        self._copy: tuple[int, Tensor] | None = None
        self._seen: tuple[int, int] | None = (0, 0)
        self._names: list[str] = []
        self.examines = False

    def examine(self, gradients: Mapping[str, Tensor]) -> None:
        """Note which of this rank's gradients are not finite. To be called where `examines` says
        so: on the CPU alone, since on a device the host would wait."""
        self._names += [name for name, x in gradients.items() if not x.isfinite().all()]

    def add(self, finite: Tensor) -> None:
        """A step has ended, and was skipped if it is not `finite`: a boolean scalar. Also while a
        CUDA graph is captured."""
        self.count += ~finite

    def look(self, steps: int) -> None:
        """Look at a step that is not captured, after it, with the number of all steps so far."""
        if self._seen_by_host:
            self._note(steps, int(self.count))
            return
        if steps % IN_A_ROW:
            return
        if self._copy is None:
            pinned = self._arrived is not None
            self._copy = steps, torch.empty((), dtype=torch.int64, device="cpu", pin_memory=pinned)
        elif self._arrived is None or self._arrived.query():
            self._run.seen(self._copy[0], int(self._copy[1]))
        else:
            return
        self._copy = steps, self._copy[1]
        self._copy[1].copy_(self.count, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.accelerator.current_stream(self.count.device))

    def _note(self, steps: int, skipped: int) -> None:
        """Tell the run of a step that was skipped, and first of the step before it; of others it
        need not know."""
        before, self._seen = self._seen, (steps, skipped)
        names, self._names = self._names, []
        self.examines = False
        if before is not None and skipped > before[1]:
            self._run.seen(*before)
            self._run.seen(steps, skipped, names)
            self.examines = self._run.nearly(steps)

    def continue_from(self, other: SkippedSteps) -> None:
        """Count on from another algorithm's."""
        self.count = other.count

    def restart(self) -> None:
        """Steps have been given another number."""
        self._run.restart()
        self._copy = self._seen = None


class UnknownParameters:
    """Warns once of parameters that have come to require gradients since these were known; and says
    what happened `then`, and what to do."""

    def __init__(
        self,
        module: nn.Module,
        known: Iterable[Tensor],
        ignored: Collection[str] = (),
        *,
        then: str,
    ) -> None:
        self._module = weakref.ref(module)
        self._known = list(known)  # which live as long as their ids are in use here
        self._ids = {id(p) for p in self._known}
        self._every = max(1, len(self._known) // AT_ONCE)
        self._ignored = frozenset(ignored)
        self._then = then
        self._said = False

    def look(self, step: int) -> None:
        """Look at the beginning of each step, with its number. A large module is not walked through
        in each of them."""
        if step % self._every or self._said or (module := self._module()) is None:
            return
        if not self._any_unknown(module):
            return
        names = [
            name
            for name, p in module.named_parameters()
            if p.requires_grad and id(p) not in self._ids and name not in self._ignored
        ]
        if names:
            self._said = True
            warnings.warn(
                f"nobody averages {some(names)}, so replicas drift apart: they were frozen, or not"
                f" there, when {self._then}",
                stacklevel=2,
            )

    def _any_unknown(self, module: nn.Module) -> bool:
        for part in module.modules():
            for p in part._parameters.values():
                if p is not None and p.requires_grad and id(p) not in self._ids:
                    return True
        return False


class Watcher:
    """What a handle knows of its steps.

    Args:
        what: the `repr` of the algorithm.
        start_step: its first step that compresses.
        times: where its collectives note their times.
        group: of the replicas, whose first rank logs.
        skipped: counts its skipped steps; None: nobody does.
        cycle: steps after which what is sent repeats; the line in the log is about whole cycles.
        work: what is done beside waiting, as the line calls it.

    Attributes:
        before: times of steps that averaged in full, if there were enough of them before
            `start_step`.
        logs: whether to say in the log what compression costs; not where messages go nowhere.
        partial: steps are part of longer ones, which somebody else notes with the same times. What
            gradients save by themselves says nothing then.
    """

    def __init__(
        self,
        what: str,
        start_step: int,
        times: StepTimes,
        group: dist.ProcessGroup,
        *,
        skipped: SkippedSteps | None = None,
        cycle: int = 1,
        work: str = "compressing",
    ) -> None:
        self.times = times
        self.before: Times | None = None
        self.logs = True
        self.partial = False
        self._what = what
        self._start_step = start_step
        self._skipped = skipped
        self._group = group
        self._observed = whole_cycles(REPORT_AFTER - 1, cycle)
        self._work = work
        self._norms: deque[tuple[int, Tensor]] = deque(maxlen=NORMS)
        self._since: Progress | None = None

    def begin(self) -> None:
        """A step begins that no CUDA graph captures."""
        if not self.partial:
            self.times.begin()

    def step_ended(self, event: StepEnded) -> None:
        """A step has ended that no CUDA graph has captured."""
        steps = event.steps
        if self._skipped is not None:
            self._skipped.look(steps)
        if self.partial:
            return
        self.times.end()
        if steps % NORM_EVERY == 0 and (norm := norm_of(event.errors())) is not None:
            self._norms.append((steps, norm / event.scale))
        if steps <= self._start_step:
            if steps == self._start_step:
                before = self.times.read()
                self.before = before if before.steps >= ENOUGH and before.step_seconds else None
                self.times.clear()
            self._since = None
        elif self._since is None:
            self._since = event.progress()
        elif steps - self._since.steps == self._observed and self._says:
            log_costs(
                self._what, self._since, event.progress(), self.times.read, self.before, self._work
            )

    @property
    def _says(self) -> bool:
        return self.logs and self._group.rank() == 0 and self._group.size() > 1

    def restart(self) -> None:
        """Steps have been given another number."""
        self._since = None
        if self._skipped is not None:
            self._skipped.restart()

    def continue_from(self, other: Watcher) -> None:
        """The error is the same, whatever algorithm goes on with it."""
        self._norms = other._norms

    def stats(self, steps: int, skipped_steps: int, sent: Sent) -> Stats:
        """What is known of so many steps. On a device the host waits for the norms of errors."""
        norms = tuple((step, float(norm)) for step, norm in self._norms)
        return Stats.of(self.times.read(), steps, skipped_steps, sent, norms)


def norm_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """2-norm of all of them together, on their device; None of none."""
    if not tensors:
        return None
    norms = [
        torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).float()
        for x in tensors
    ]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole
