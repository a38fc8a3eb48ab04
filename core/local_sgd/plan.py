"""What local SGD sends, step by step over a cycle: its coroutines, run on arrays without data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.kernels.abstract import AbstractOps, abstract_arrays
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run, rehearsed
from gradwire.core.plan.traffic import Traffic


@dataclass(frozen=True)
class _Due:
    """A fragment that is averaged at some step, by the groups of a level, in a phase of the compressor."""

    fragment: int
    level: int
    phase: int


def local_traffic(
    local: LocalSGD, specs: Mapping[str, Spec], world_size: int | None = None
) -> tuple[list[Traffic], dict[str, list[int]]]:
    """What one replica sends in each step of a cycle, once gradients are local and the compressor has started; and for each parameter the bytes that
    it sends in each step by itself. "node" in the schedule is replaced before, see `Schedule.on_nodes_of`.

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
    first = local.start_step + levels[0].period * compressor.start_step
    steps = range(first, first + local.cycle * compressor.cycle)
    due_at: dict[int, list[_Due]] = {}
    for step in steps:
        for fragment in range(local.fragments):
            level = next((i for i, v in enumerate(levels) if local.due(step, v.period, fragment)), None)
            if level is not None:
                done = local.round(step, levels[level].period, fragment) - compressor.start_step
                phase = done % compressor.cycle if level == 0 else 0
                due_at.setdefault(step, []).append(_Due(fragment, level, phase))

    ops = AbstractOps()
    params = abstract_arrays(specs)
    state = local.init(ops, params, replicas)
    gradients = _gradients(local, specs, replicas, world_size)
    known: dict[tuple[_Due, ...], Traffic] = {(): Traffic(0, 0)}
    planned = []
    for step in steps:
        due = tuple(due_at.get(step, ()))
        if due not in known:
            # At most one fragment is due at the highest level, the only one that has phases.
            phase = next((d.phase for d in due if d.level == 0), 0)
            average = local.average(ops, dict(params), state, step, replicas)
            known[due] = rehearsed(average, phase, world_size).traffic
        planned.append(gradients + known[due])

    by_itself = {}
    outer = dry_run(compressor, local._specs(ops, params), world_size) if local.anchored else None
    for number, names in enumerate(local.parts(specs)):
        for name in names:
            alone = {name: specs[name]}
            every_step = _gradients(local, alone, replicas, world_size).nbytes
            compressed = [] if outer is None else [t.nbytes for t in outer.only([name]).traffic]
            by_itself[name] = [every_step] * len(steps)
            for i, step in enumerate(steps):
                for due_here in due_at.get(step, ()):
                    if due_here.fragment == number:
                        far = local.anchored and due_here.level == 0
                        by_itself[name][i] += compressed[due_here.phase] if far else specs[name].nbytes
    return planned, by_itself


def _gradients(local: LocalSGD, specs: Mapping[str, Spec], replicas: int, world_size: int | None) -> Traffic:
    return dry_run(local.gradients(replicas), specs, world_size).at(local.start_step).traffic
