"""The parts of the benchmark, each within its time, and the file that they are written to one by one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gpu.children import in_jax, worker
from gpu.correctness import number_rows
from gpu.hooks import hook_rows, method_rows
from gpu.products import product_rows
from gpu.screen import Progress
from gpu.steps import step_rows
from gpu.target import Target, error_of

#: Seconds that each part may begin new rows for. Together less than the eight minutes, since a row that has begun is finished.
BUDGETS = {
    "numbers": 25,
    "products": 15,
    "hook": 80,
    "methods": 30,
    "steps": 80,
    "graph": 40,
    "gloo": 35,
    "jax": 65,
    "compiled": 90,
}
Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]


def run_part(name: str, target: Target, ranks: list[int], bandwidth: float, budget: float) -> Row:
    """Rows of one part, what was left out of it for want of time or memory, and its seconds. An error is a row's, or the part's."""
    began = time.monotonic()

    def left() -> float:
        return budget - (time.monotonic() - began)

    with one_process(target, needed=name in ("hook", "methods", "steps")):
        rows = list(_rows(name, target, ranks, bandwidth, left))
        found, left_out = _measured(name, rows, left)
    return {"rows": found, "left_out": left_out, "seconds": round(time.monotonic() - began, 1)}


def _rows(name: str, target: Target, ranks: list[int], bandwidth: float, left: Callable[[], float]) -> Rows:
    if name == "numbers":
        return number_rows(target)
    if name == "methods":
        return method_rows(target, bandwidth)
    if name == "products":
        return product_rows(target, ranks, bandwidth)
    if name == "hook":
        return hook_rows(target, ranks, bandwidth)
    if name == "steps":
        return step_rows(target, ranks)
    if name == "jax":
        return _jax_rows(target, ranks, left)
    several = name == "gloo" and not target.tiny
    return iter([(name, lambda: {name: worker(name, left(), tiny=target.tiny, several=several)})])


def _jax_rows(target: Target, ranks: list[int], left: Callable[[], float]) -> Rows:
    """All ranks of the smallest model, then rank 4 alone of the others, which take long to compile."""
    for i, (size, shape) in enumerate(target.sizes.items()):
        for_size = ranks if i == 0 else [r for r in ranks if r == 4] or ranks[:1]

        def run(size: str = size, shape: tuple[int, ...] = shape, for_size: list[int] = for_size) -> Row:
            with tempfile.TemporaryDirectory() as folder:
                found: Row = in_jax(shape, for_size, left(), Path(folder) / "jax.json", tiny=target.tiny)
                return {"size": size} | found

        yield f"{size}, ranks {', '.join(map(str, for_size))}", run


def _measured(
    part: str, rows: list[tuple[str, Callable[[], Row]]], left: Callable[[], float]
) -> tuple[list[Row], list[str]]:
    found: list[Row] = []
    left_out: list[str] = []
    with Progress(part, len(rows)) as progress:
        for name, measure in rows:
            if left() <= 0:
                left_out.append(name)
                continue
            progress.begin(name)
            try:
                found.append({"row": name} | measure())
            except (RuntimeError, TimeoutError, ImportError) as error:
                found.append({"row": name, "error": error_of(error)})
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return found, left_out


class one_process:  # noqa: N801  (a context)
    """The default process group, of this process alone: NCCL on a GPU."""

    def __init__(self, target: Target, *, needed: bool = True) -> None:
        self._backend = "nccl" if not target.tiny and dist.is_nccl_available() else "gloo"
        self._needed = needed

    def __enter__(self) -> None:
        if self._needed:
            dist.init_process_group(self._backend, store=HashStore(), rank=0, world_size=1)

    def __exit__(self, *error: object) -> None:
        if self._needed:
            dist.destroy_process_group()
