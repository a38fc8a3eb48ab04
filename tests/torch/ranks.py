"""Many cases in one launch: starting torch on several ranks costs seconds, a case costs a fraction of one.

A test file holds both halves. Its cases run on every rank, return what they saw, and are run once for the whole file; its tests look at
what came back.

    cases = Cases(__file__, ranks=3)
    results = cases.fixture()

    @cases.case
    def same_weights(world): ...
        return weights

    def test_same_weights(results):
        first, *others = results("same_weights")      # one per rank; raises with the traceback if a rank failed

    if __name__ == "__main__":
        cases.main()
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.forked import run_ranks

__all__ = ["Cases", "Results", "World", "variants"]

#: A rank whose partners never answer gives up after so long, so that one wrong case costs this and not the whole launch.
PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class World:
    """Where a case runs.

    Attributes:
        rank, size: of this process.
        group: a process group of its own for this case, of all ranks.
        folder: a temporary folder, the same for all ranks and all launches of the file.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    folder: Path


def variants(names: Iterable[str], slow: Collection[str] = ()) -> list[Any]:
    """Parameters for tests, with their marks."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


class Results:
    """What the cases returned."""

    def __init__(self, folder: Path, ranks: int, launch: str) -> None:
        self._folder = folder
        self._ranks = ranks
        self._launch = launch

    def __call__(self, case: str) -> list[Any]:
        """The case's results, one per rank."""
        files = [self._folder / f"{case}.{rank}.pt" for rank in range(self._ranks)]
        missing = [rank for rank, file in enumerate(files) if not file.exists()]
        if missing:
            raise AssertionError(f"no result of {case!r} from ranks {missing}:\n{self._launch}")
        results = [torch.load(file, weights_only=False) for file in files]
        failed = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(results) if error]
        if failed:
            raise AssertionError(f"case {case!r}\n" + "\n".join(failed))
        return [result for result, _ in results]


class Cases:
    """A table of functions from a `World` to something that can be saved."""

    def __init__(self, file: str, ranks: int, *, timeout: float = 240) -> None:
        self.file = Path(file)
        self.ranks = ranks
        self.timeout = timeout
        self.table: dict[str, Callable[[World], Any]] = {}
        self.slow: set[str] = set()

    def case(self, function: Callable[[World], Any]) -> Callable[[World], Any]:
        """Decorator: a case called like the function."""
        self.table[function.__name__] = function
        return function

    def each(
        self, variants: Mapping[str, Any], *, slow: Collection[str] = ()
    ) -> Callable[[Callable[[World, Any], Any]], Callable[[World, Any], Any]]:
        """Decorator: one case `name[variant]` for each of the variants, whose value is the second argument.

        Those that are `slow` run only where a test of the file that is marked so does, see `variants`.
        """

        def add(function: Callable[[World, Any], Any]) -> Callable[[World, Any], Any]:
            for variant, value in variants.items():
                name = f"{function.__name__}[{variant}]"
                self.table[name] = lambda world, value=value: function(world, value)
                if variant in slow:
                    self.slow.add(name)
            return function

        return add

    def fixture(self, launches: int = 1) -> Any:
        """A fixture of the `Results`: runs this file as a script, `launches` times one after the other in fresh processes."""

        @pytest.fixture(scope="module")
        def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
            mine = (item for item in request.session.items if item.path == self.file)
            slow = any(item.get_closest_marker("slow") for item in mine)
            return self.run(tmp_path_factory.mktemp(self.file.stem), launches, slow=slow)

        return results

    def fixture_by_ranks(self) -> Any:
        """A fixture of a function from a number of ranks to the `Results`: each number is launched once."""

        @pytest.fixture(scope="module")
        def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
            return cache(lambda ranks: self.run(tmp_path_factory.mktemp(self.file.stem), 1, ranks))

        return results_of

    def run(self, folder: Path, launches: int, ranks: int | None = None, *, slow: bool = True) -> Results:
        ranks = ranks or self.ranks
        option = [] if slow else ["quick"]
        outcome = ""
        for launch in range(launches):
            try:
                outcome = run_ranks(self.file, ranks, str(folder), str(launch), *option, timeout=self.timeout)
            except AssertionError as error:  # cases that have come to their end have left their results
                outcome = str(error)
                break
        return Results(folder, ranks, outcome)

    def main(self) -> None:
        """What the script does. Without arguments: run the cases here and show how they went, for work on a test.

        A case whose name begins with `launch1_` runs in the second launch, and so on; all others in the first.
        """
        if len(sys.argv) == 1:
            self._show()
            return
        folder, launch = Path(sys.argv[1]), int(sys.argv[2])
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=self.timeout))
        skipped = self.slow if "quick" in sys.argv[3:] else ()
        for name, function in self.table.items():
            if name not in skipped and launch == (int(name[len("launch")]) if name.startswith("launch") else 0):
                self._run_one(name, function, folder)
        dist.destroy_process_group()

    def _run_one(self, name: str, function: Callable[[World], Any], folder: Path) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        group = dist.new_group(timeout=PATIENCE)
        assert isinstance(group, dist.ProcessGroup)
        torch.manual_seed(0)
        random.seed(rank)
        start = time.perf_counter()
        result, error = None, ""
        try:
            result = function(World(rank, size, group, folder))
        except Exception:
            error = traceback.format_exc()
            # Whoever waits for this rank learns of it now.
            dist.destroy_process_group(group)
        torch.save((result, error), folder / f"{name}.{rank}.pt")
        dist.barrier()
        if rank == 0:
            print(f"{time.perf_counter() - start:6.2f} s  {name}", flush=True)

    def _show(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            launches = 1 + max(int(n[len("launch")]) if n.startswith("launch") else 0 for n in self.table)
            results = self.run(Path(folder), launches)
            print(results._launch)
            for name in self.table:
                try:
                    results(name)
                except AssertionError as error:
                    print(error)
