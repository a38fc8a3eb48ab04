"""What local SGD sends, step by step over a cycle, and remembers: its coroutines, run on arrays
without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, overload

from gradwire.core.algorithm import State
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.two_level import levels_of, without_levels
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps, abstract_arrays
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.local_sgd.outer import OuterFactory, OuterSGD
from gradwire.core.local_sgd.schedule import Level
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import (
    DryRun,
    DryStep,
    dry_run,
    portable_form,
    rehearsed,
    saying_what_is_not_portable,
    state_bytes,
)
from gradwire.core.plan.traffic import LevelBytes, Traffic, bytes_by_level


@dataclass(frozen=True)
class _Due:
    """A fragment that is averaged at some step, by the groups of a level, in a phase of the
    compressor."""

    fragment: int
    level: int
    phase: int


@dataclass(frozen=True)
class LocalSteps(Sequence[Traffic]):
    """What a replica sends in each step of a cycle, of which there may be more than can be listed.

    Attributes:
        kinds: each kind of step, and how many there are.
        length: of the cycle.
    """

    kinds: tuple[tuple[Traffic, int], ...]
    length: int
    _at: Callable[[int], Traffic] = field(compare=False, repr=False)

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Traffic: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Traffic, ...]: ...
    def __getitem__(self, index: int | slice) -> Traffic | tuple[Traffic, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(self.length)[index])
        return self._at(range(self.length)[index])


def local_steps(
    local: LocalSGD, specs: Mapping[str, Spec], world_size: int | None = None
) -> LocalSteps:
    """What one replica sends in each step of a cycle, once gradients are local and the compressor
    has started. "node" in the schedule is replaced before, see `Schedule.on_nodes_of`.

    `world_size` None: that of which the schedule speaks; if it speaks of none, a compressor must
    not ask for it.

    Raises:
        UnknownWorldSize: what the compressor sends depends on the number of replicas.
        ValueError: a schedule that does not fit so many.
    """
    return _steps(local, specs, world_size)[0]


def local_traffic(
    local: LocalSGD, specs: Mapping[str, Spec], world_size: int | None = None
) -> tuple[LocalSteps, dict[str, float]]:
    """`local_steps`; and for each parameter the bytes that it sends by itself, in a step on
    average."""
    steps, count, gradients = _steps(local, specs, world_size)
    outer = (
        dry_run(local.compressor or AllReduce(), local.kept(specs), gradients.world_size)
        if local.has_outer
        else None
    )
    by_itself = {}
    for number, names in enumerate(local.parts(specs)):
        for name in names:
            alone = gradients.alone(name).at(local.start_step).traffic.nbytes
            compressed = [] if outer is None else [t.nbytes for t in outer.alone(name).traffic]
            total = alone * steps.length
            for due, times in count.items():
                for here in due:
                    if here.fragment == number:
                        far = local.has_outer and here.level == 0
                        total += times * (compressed[here.phase] if far else specs[name].nbytes)
            by_itself[name] = total / steps.length
    return steps, by_itself


def _steps(
    local: LocalSGD, specs: Mapping[str, Spec], world_size: int | None
) -> tuple[LocalSteps, Mapping[tuple[_Due, ...], int], DryRun]:
    """The steps of a cycle; how many there are in which the same is due; and the gradients' part of
    them."""
    local = portable_form(local.at_once().without_factory())
    replicas = world_size or local.some_replicas
    if world_size is None and local.names_replicas:
        world_size = replicas
    compressor = local.compressor or AllReduce()
    levels = local.levels(replicas)

    due_at = partial(_due_at, local, levels)
    state = local_memory(local, specs, replicas)
    gradients = dry_run(local.gradients(replicas), specs, world_size)
    every_step = gradients.at(local.start_step).traffic
    length = local.cycle * compressor.cycle
    sent: dict[tuple[_Due, ...], Traffic] = {(): every_step}
    count: dict[tuple[_Due, ...], int] = {}
    for step, times in local.occasions(replicas, compressor.cycle, compressor.start_step):
        due = due_at(step)
        count[due] = count.get(due, 0) + times
        if due not in sent:
            # At most one fragment is due at the highest level, the only one that has phases.
            phase = next((d.phase for d in due if d.level == 0), 0)
            sent[due] = (
                every_step
                + average_of(local, specs, state, step, replicas, phase, world_size).traffic
            )

    first = local.start_step + levels[0].period * compressor.start_step
    kinds = tuple((sent[due], times) for due, times in count.items())
    return LocalSteps(kinds, length, lambda i: sent[due_at(first + i)]), count, gradients


def _due_at(local: LocalSGD, levels: Sequence[Level], step: int) -> tuple[_Due, ...]:
    compressor, due = local.compressor or AllReduce(), []
    for fragment in range(local.fragments):
        level = next((i for i, v in enumerate(levels) if local.due(step, v.period, fragment)), None)
        if level is not None:
            done = local.round(step, levels[level].period, fragment) - compressor.start_step
            due.append(_Due(fragment, level, done % compressor.cycle if level == 0 else 0))
    return tuple(due)


@dataclass(frozen=True)
class Leaving:
    """What leaves after a step.

    Attributes:
        step: of a cycle, numbered from 1.
        late: steps for which a replica trains before it waits for it.
        names: whose averages these are.
        sent: the messages.
    """

    step: int
    late: int
    names: tuple[str, ...]
    sent: DryStep


def leaving_in_cycle(
    local: LocalSGD, specs: Mapping[str, Spec], replicas: int
) -> tuple[int, list[Leaving]]:
    """The steps of a cycle, once the compressor has started, and what leaves after which of them.
    Raises as `local_steps`."""
    at_once, levels, parts = (
        portable_form(local.at_once().without_factory()),
        local.levels(replicas),
        local.parts(specs),
    )
    compressor, late = (
        local.compressor or AllReduce(),
        levels[0].period if local.eager else local.overlap,
    )
    state, length = local_memory(at_once, specs, replicas), local.cycle * compressor.cycle
    first = local.start_step + levels[0].period * compressor.start_step
    gradients = dry_run(local.gradients(replicas), specs, replicas).at(local.start_step)
    known: dict[tuple[_Due, ...], DryStep] = {}
    found = (
        [Leaving(t, 0, tuple(specs), gradients) for t in range(1, length + 1)]
        if gradients.messages
        else []
    )
    for step in sorted(
        (step - first) % length + first for step in local.steps_due(compressor.cycle)
    ):
        due = _due_at(at_once, levels, step)
        if due not in known:
            phase = next((d.phase for d in due if d.level == 0), 0)
            known[due] = average_of(at_once, specs, state, step, replicas, phase, replicas)
        # What smaller groups average belongs to no outer parameters, and is not late.
        wait = late if all(d.level == 0 for d in due) else 0
        names = tuple(name for d in due for name in parts[d.fragment])
        found.append(Leaving(step - first + 1, wait, names, known[due]))
    return length, found


def stage_starts(local: LocalSGD) -> tuple[int, ...]:
    """The steps from which on something else is sent: 0; that after which replicas part; and that
    after which the compressor has started. Some may be equal: so many are part of a state, in which
    a schedule may change."""
    warm_up = 0 if local.compressor is None else local.compressor.start_step
    return 0, local.start_step, local.start_step + local.longest * warm_up


def local_stages(local: LocalSGD, specs: Mapping[str, Spec], replicas: int) -> list[LevelBytes]:
    """What a step sends in each stage that `stage_starts` says, on average over a cycle. "node" and
    mesh axes in it are replaced before. Raises what `local_steps` raises."""
    levels = levels_of(local)
    near = None if levels is None else levels.near(replicas)
    if isinstance(local.outer, OuterFactory):  # whichever it is, what is sent is the same
        local = replace(local, outer=OuterSGD())
    starts = stage_starts(local)
    found = {starts[-1]: bytes_by_level(local_steps(local, specs, replicas).kinds, near)}
    local = local.at_once()
    memory = local_memory(local, specs, replicas)
    for start in {*starts} - {*found}:
        sent = dry_run(local.gradients(replicas), specs, replicas).at(start).traffic
        kinds = [(sent, 1)]
        if start == local.start_step:
            kinds = [
                (
                    sent + average_of(local, specs, memory, step, replicas, 0, replicas).traffic,
                    times,
                )
                for step, times in local.occasions(replicas)
            ]
        found[start] = bytes_by_level(kinds, near)
    return [found[start] for start in starts]


def local_memory(local: LocalSGD, specs: Mapping[str, Spec], replicas: int) -> State[AbstractArray]:
    """What local SGD remembers, without data. Raises what its `init` raises."""
    return local.init(AbstractOps(), abstract_arrays(specs), replicas)


def memory_bytes(algorithm: Any, specs: Mapping[str, Spec], replicas: int | None) -> int:
    """Bytes of the memory of an algorithm, or of local SGD, on each replica, but for what an outer
    optimizer of a framework remembers. Raises what its `init` raises."""
    if not isinstance(algorithm, LocalSGD):
        return state_bytes(dry_run(algorithm, specs, replicas).memory)
    # What is remembered does not depend on who averages.
    period = max(algorithm.fragments, algorithm.overlap + 1)
    alone = without_levels(replace(algorithm.without_factory(), period=period, subgroup=None))
    return state_bytes(local_memory(alone, specs, 1))


def average_of(
    local: LocalSGD,
    specs: Mapping[str, Spec],
    memory: State[AbstractArray],
    step: int,
    replicas: int,
    phase: int,
    world_size: int | None,
) -> DryStep:
    """The averages of parameters after one step, without data, in a phase of the compressor.
    `replicas` are those of the schedule, `world_size` what a compressor is told."""
    average = local.average(AbstractOps(), abstract_arrays(specs), memory, step, replicas)
    with saying_what_is_not_portable(local):
        return rehearsed(average, phase, world_size)
