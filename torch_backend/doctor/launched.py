"""The doctor of ranks that `torchrun` has started: each checks its own device, all of them the
messages, and every few the algorithms."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.algorithm import Algorithm
from gradwire.core.simulate.doctor.report import FAULT, NOTE, OK, Report, Row, Section, differing
from gradwire.core.simulate.self_check import VARIABLE
from gradwire.torch_backend.doctor.checks import (
    check_kernels,
    check_messages,
    check_methods,
    join,
    note_unseen,
    of_first,
)
from gradwire.torch_backend.doctor.compiled_loops import check_loops
from gradwire.torch_backend.doctor.machine import ALIKE, facts, first_device
from gradwire.torch_backend.doctor.replayed_steps import check_replays
from gradwire.torch_backend.engine.groups.process_groups import given_or_default

#: Ranks that average together: each computes what all of them ought to come to. Ranks that stand
#: far from each other are in one group, so that messages cross the network between nodes.
TOGETHER = 8


def examine(
    algorithms: Sequence[Algorithm], report: Report, *, seconds: float, quick: bool
) -> None:
    """Check all ranks, in the default group if there is one. The report fills on rank 0; on the
    others it gets the faults. Afterwards groups, threads and environment are as before."""
    until, device = time.monotonic() + seconds, first_device()
    with _as_before():
        found = not dist.is_initialized()
        library = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        world = join(library, device, seconds) if found else given_or_default(None)
        whole = _examine(algorithms, report, world, device, until, quick=quick)
        if found and whole:
            dist.destroy_process_group()


@contextmanager
def _as_before() -> Iterator[None]:
    """Threads and environment are put back."""
    threads, checked = torch.get_num_threads(), os.environ.get(VARIABLE)
    torch.set_num_threads(1)
    os.environ[VARIABLE] = "0"  # that is what happens here
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if checked is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = checked


def _examine(
    algorithms: Sequence[Algorithm],
    report: Report,
    world: dist.ProcessGroup,
    device: torch.device,
    until: float,
    *,
    quick: bool,
) -> bool:
    """Whether nothing was broken off, so that no rank stands at a message."""
    host, size, rank = dist.new_group(backend="gloo"), dist.get_world_size(), dist.get_rank()
    library = dist.get_backend()
    _compare_machines(facts(device), host, report)
    rows: list[Row] = []

    def merged() -> None:
        _merge(rows, host, report)
        rows.clear()

    section = Section(f"torch, kernels, {device.type}", rows.append, until)
    note_unseen(section, device, rows.append)
    check_kernels(section, device, quick=quick)
    if not quick:
        check_loops(section, device)
    merged()
    section = Section(
        f"torch, {size} ranks, {library}, {device.type}",
        rows.append,
        until,
        of_first(device, world),
    )
    check_messages(section, world, device)
    merged()
    # of this rank, or of another: "messages, rank 3"
    if any(row.check.partition(",")[0] == "messages" for row in report.faults):
        return False  # between ranks that do not understand each other nothing else is right
    count = -(-size // TOGETHER)
    groups = [[*range(first, size, count)] for first in range(count)]
    own = [dist.new_group(ranks) for ranks in groups][rank % count]
    several = Section(
        f"torch, {len(groups[rank % count])} ranks, {library}, {device.type}",
        rows.append,
        until,
        of_first(device, own),
    )
    for algorithm in algorithms:
        check_methods(several, own, device, [algorithm], loops=not quick)
        check_replays(several, own, device, [algorithm])
        merged()
    if section.broken or several.broken:
        return False
    for group in {host, own}:
        dist.destroy_process_group(group)
    return True


def _compare_machines(mine: dict[str, Any], host: dist.ProcessGroup, report: Report) -> None:
    """What ranks run on, in the report of each, and a row for each fact in which they differ."""
    everyone: list[Any] = [None] * dist.get_world_size(host)
    dist.all_gather_object(everyone, mine, group=host)
    for rank, found in enumerate(everyone):
        report.add_machine({"rank": rank, **found})
    each = {
        f"rank {rank}": {k: v for k, v in found.items() if k not in ("host", "device")}
        for rank, found in enumerate(everyone)
    }
    apart = differing(each)
    for name, values in apart.items():
        ranks: dict[str, list[str]] = {}
        for who, value in values.items():
            ranks.setdefault(str(value), []).append(who.removeprefix("rank "))
        said = "; ".join(
            f"{value} on ranks {', '.join(who[:4])}{' …' if len(who) > 4 else ''}"
            for value, who in ranks.items()
        )
        verdict = FAULT if name in ALIKE else NOTE
        if name == "gpu":
            said += (
                ": what is computed after an average is rounded otherwise on each, so replicas"
                " drift apart by rounding"
            )
        report.add(Row("torch, machines", name, verdict, f"ranks differ: {said}"))
    if not apart:
        report.add(
            Row(
                "torch, machines", "versions and hardware", OK, f"the same on {len(everyone)} ranks"
            )
        )


def _merge(rows: Sequence[Row], host: dist.ProcessGroup, report: Report) -> None:
    """All rows of rank 0, and the faults of the others, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size(host)
    dist.all_gather_object(everyone, list(rows), group=host)
    for row in everyone[0]:
        report.add(row)
    for rank, found in enumerate(everyone[1:], 1):
        for row in found:
            if row.verdict == FAULT:
                report.add(
                    Row(row.part, f"{row.check}, rank {rank}", FAULT, row.detail, row.seconds)
                )
