"""What local SGD sends, step by step over a cycle: its coroutines, run on arrays without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from gradwire.core.algorithm import State
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps, abstract_arrays
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec
from gradwire.core.plan.traffic import Traffic, cycle_traffic, dry_run, place_of, traffic


@dataclass(frozen=True)
class _Due:
    """A fragment that is averaged at some step, by the groups of a level, in a phase of the compressor."""

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


def local_traffic(
    local: LocalSGD, specs: Mapping[str, Spec], world_size: int | None = None
) -> tuple[LocalSteps, dict[str, float]]:
    """What one replica sends in each step of a cycle, once gradients are local and the compressor has started; and for each parameter the bytes that
    it sends by itself, in a step on average. "node" in the schedule is replaced before, see `Schedule.on_nodes_of`.

    `world_size` None: that of which the schedule speaks; if it speaks of none, a compressor must not ask for it.

    Raises:
        UnknownWorldSize: what the compressor sends depends on the number of replicas.
        ValueError: a schedule that does not fit so many.
    """
    replicas = world_size or local.some_replicas
    if world_size is None and local.names_replicas:
        world_size = replicas
    compressor = local.compressor or AllReduce()
    levels = local.levels(replicas)

    def due_at(step: int) -> tuple[_Due, ...]:
        due = []
        for fragment in range(local.fragments):
            level = next((i for i, v in enumerate(levels) if local.due(step, v.period, fragment)), None)
            if level is not None:
                done = local.round(step, levels[level].period, fragment) - compressor.start_step
                due.append(_Due(fragment, level, done % compressor.cycle if level == 0 else 0))
        return tuple(due)

    ops = AbstractOps()
    params = abstract_arrays(specs)
    state = local.init(ops, params, replicas)
    gradients = _gradients(local, specs, replicas, world_size)
    length = local.cycle * compressor.cycle
    sent: dict[tuple[_Due, ...], Traffic] = {(): gradients}
    count: dict[tuple[_Due, ...], int] = {}
    for step, times in local.occasions(replicas, compressor.cycle, compressor.start_step):
        due = due_at(step)
        count[due] = count.get(due, 0) + times
        if due not in sent:
            # At most one fragment is due at the highest level, the only one that has phases.
            phase = next((d.phase for d in due if d.level == 0), 0)
            average = local.average(ops, dict(params), state, step, replicas)
            sent[due] = gradients + dry_run(average, phase, world_size=world_size, place=place_of(local)).traffic

    by_itself = {}
    memory = compressor.init(ops, local._specs(ops, params)) if local.anchored else State[AbstractArray]()
    for number, names in enumerate(local.parts(specs)):
        for name in names:
            kept = local._specs(ops, {name: params[name]})
            compressed = [t.nbytes for t in cycle_traffic(compressor, kept, memory, world_size)]
            total = _gradients(local, {name: specs[name]}, replicas, world_size).nbytes * length
            for due, times in count.items():
                for here in due:
                    if here.fragment == number:
                        outer = local.anchored and here.level == 0
                        total += times * (compressed[here.phase] if outer else specs[name].nbytes)
            by_itself[name] = total / length
    first = local.start_step + levels[0].period * compressor.start_step
    kinds = tuple((sent[due], times) for due, times in count.items())
    return LocalSteps(kinds, length, lambda i: sent[due_at(first + i)]), by_itself


def _gradients(local: LocalSGD, specs: Mapping[str, Spec], replicas: int, world_size: int | None) -> Traffic:
    return traffic(local.gradients(replicas), specs, State(), local.start_step, world_size=world_size)
