"""Many cases in one launch: starting torch on several ranks costs seconds, a case costs a fraction
of one.

A case runs on every rank. One that is called `test_…` is a test as it stands, and passes where it
passes on all ranks; what another returns is what tests look at. The ranks are started once for the
whole file.

    cases = Cases(__file__, ranks=3)

    @cases.case
    def test_weights_stay_equal(world): ...
        assert world.agree(weights)

    @cases.each({"small": 1, "large": 8})
    def trained(world, width): ...
        return weights

    def test_trained(results):
        first, *others = results("trained[small]")      # one per rank; raises with the traceback if a rank failed

With GRADWIRE_TEST_CASES in the environment, a regular expression, only those cases run whose names
it is found in.
"""

from __future__ import annotations

import importlib
import io
import os
import random
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from textwrap import shorten
from traceback import TracebackException
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.torch_backend.engine.groups import barrier
from gradwire.torch_backend.torch_internals import NeedsTorch
from tests.bounds import threads, watch_this_process
from tests.launch import LIMIT, Launch, started_ranks
from tests.torch.compare import same_bits

#: A rank whose partners never answer gives up after so long, so that one wrong case costs this and
#: not the whole launch.
PATIENCE = timedelta(seconds=120)
#: How an error begins that says that this torch is too old.
REFUSED = "refused: "


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

    def everyones(self, mine: Any) -> list[Any]:
        """What each rank gives, by rank."""
        file, found = io.BytesIO(), [b""] * self.size
        torch.save(mine, file)  # pickle alone cannot take every dtype
        dist.all_gather_object(found, file.getvalue(), group=self.group)
        return [torch.load(io.BytesIO(each), weights_only=False) for each in found]

    def agree(self, mine: Any) -> bool:
        """Whether all ranks give the same, to the last bit."""
        return all(same_bits(each, mine) for each in self.everyones(mine))


def variants(names: Iterable[str], slow: Collection[str] = ()) -> list[Any]:
    """Parameters for tests, with their marks."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


class Refused(Exception):
    """All ranks were told that this torch is too old."""


def refusal_in(error: BaseException | None) -> NeedsTorch | None:
    """That this torch is too old, where an error says so, or was raised because of one that does,
    as by `pytest.warns`."""
    while error is not None and not isinstance(error, NeedsTorch):
        error = error.__context__
    return error


@dataclass(frozen=True)
class Results:
    """What the cases have returned, or will: who asks for one waits for it.

    Attributes:
        folder: where each rank leaves what a case has returned.
        launch: the ranks.
        timeout: seconds that they may be without a new result.
    """

    folder: Path
    launch: Launch
    timeout: float

    def __call__(self, case: str) -> list[Any]:
        """The case's results, one per rank."""
        ranks = len(self.launch.processes)
        files = [self.folder / f"{case}.{rank}.pt" for rank in range(ranks)]
        if not self.finish(files):
            missing = [rank for rank, file in enumerate(files) if not file.exists()]
            raise AssertionError(f"no result of {case!r} from ranks {missing}:\n{self.said()}")
        results = [torch.load(file, weights_only=False) for file in files]
        failed = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(results) if error]
        if len(failed) == ranks and all(error.startswith(REFUSED) for _, error in results):
            raise Refused(results[0][1].splitlines()[0])
        if failed:
            raise AssertionError(f"case {case!r}\n" + "\n".join(failed))
        return [result for result, _ in results]

    def finish(self, files: Sequence[Path] | None = None) -> bool:
        """Wait until all cases have run, or until there are these files. False where the ranks have
        ended, or stand still, without them."""
        come = lambda: files is not None and all(file.exists() for file in files)  # noqa: E731
        while not come():
            still = time.time() - self.folder.stat().st_mtime > self.timeout
            if still or self.launch.is_over():
                return come()
            time.sleep(0.01)
        return True

    def said(self) -> str:
        """What the ranks have printed. It ends those that have not ended."""
        late = (
            "" if self.launch.is_over() else f", stopped after {self.timeout:g} s without a result"
        )
        try:
            return self.launch.outcome(late)
        except AssertionError as error:
            return str(error)


class Cases:
    """A table of functions from a `World` to something that can be saved. The tests among them run
    on each of the numbers of `ranks`."""

    def __init__(self, file: str, ranks: int | tuple[int, ...], *, timeout: float = LIMIT) -> None:
        self.file = Path(file)
        self.ranks = ranks if isinstance(ranks, tuple) else (ranks,)
        self.timeout = timeout
        self.table: dict[str, Callable[[World], Any]] = {}
        self.slow: set[str] = set()
        self.only: dict[str, tuple[int, ...]] = {}

    def case(
        self,
        function: Callable[[World], Any] | None = None,
        *,
        slow: bool = False,
        ranks: tuple[int, ...] = (),
    ) -> Callable[..., Any]:
        """Decorator: a case called like the function, on some of the numbers of `ranks`, or all.

        One that is `slow` runs only where a test of the file that is marked so does; if it is a
        test itself, it is.
        """
        if function is None:
            return partial(self.case, slow=slow, ranks=ranks)
        self._add(function.__name__, function, slow, ranks)
        test = self._tested(function, ranks=ranks)
        return pytest.mark.slow(test) if slow else test

    def _add(
        self, name: str, function: Callable[[World], Any], slow: bool, ranks: tuple[int, ...]
    ) -> None:
        self.table[name] = function
        if ranks:
            self.only[name] = ranks
        if slow:
            self.slow.add(name)

    def each(
        self,
        variants: Mapping[str, Any] | Iterable[str],
        *,
        slow: Collection[str] = (),
        ranks: tuple[int, ...] = (),
    ) -> Callable[[Callable[[World, Any], Any]], Callable[..., Any]]:
        """Decorator: a case `name[variant]` for each of the variants, whose value, or name, is the
        second argument. Some may be `slow`, see `variants`."""
        values = variants if isinstance(variants, Mapping) else {name: name for name in variants}

        def add(function: Callable[[World, Any], Any]) -> Callable[..., Any]:
            for variant, value in values.items():
                call = lambda world, value=value: function(world, value)  # noqa: E731
                self._add(f"{function.__name__}[{variant}]", call, variant in slow, ranks)
            return self._tested(function, values, slow, ranks)

        return add

    def _tested(
        self,
        function: Callable[..., Any],
        names: Iterable[str] | None = None,
        slow: Collection[str] = (),
        ranks: tuple[int, ...] = (),
    ) -> Callable[..., Any]:
        """The pytest test of a case that is called as one; other cases as they are."""
        if not function.__name__.startswith("test_"):
            return function

        def test(results_of: Callable[[int], Results], ranks: int, variant: str | None) -> None:
            results_of(ranks)(
                function.__name__ if variant is None else f"{function.__name__}[{variant}]"
            )

        test.__name__, test.__doc__, test.__module__ = (
            function.__name__,
            function.__doc__,
            function.__module__,
        )
        if names is not None:
            test = pytest.mark.parametrize("variant", variants(names, slow))(test)
        return (
            pytest.mark.parametrize("ranks", ranks or self.ranks)(test)
            if len(self.ranks) > 1
            else test
        )

    def launched(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Callable[[int], Results]]:
        """Of a number of ranks: the results, while the file's tests run."""
        mine = (item for item in request.session.items if item.path == self.file)
        slow = any(item.get_closest_marker("slow") for item in mine)
        with ExitStack() as launches:
            yield cache(
                lambda ranks: launches.enter_context(
                    self.run(tmp_path_factory.mktemp(self.file.stem), ranks, slow=slow)
                )
            )

    @contextmanager
    def run(self, folder: Path, ranks: int, *, slow: bool) -> Iterator[Results]:
        """Run the cases, for the time of a `with`."""
        option = [] if slow else ["quick"]
        with started_ranks(Path(__file__), ranks, self.file, folder, *option) as launch:
            yield Results(folder, launch, self.timeout)

    def main(self, folder: Path, *options: str) -> None:
        """Run the cases on this rank."""
        watch_this_process()
        barrier.BY_DEFAULT = (*barrier.BY_DEFAULT, PATIENCE)  # no user has said it
        torch.set_num_threads(threads())
        dist.init_process_group("gloo", timeout=timedelta(seconds=self.timeout))
        skipped = self.slow if "quick" in options else ()
        only = re.compile(os.environ.get("GRADWIRE_TEST_CASES", ""))
        size = dist.get_world_size()
        for name, function in self.table.items():
            if size in self.only.get(name, (size,)) and name not in skipped and only.search(name):
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
        except (Exception, pytest.fail.Exception) as raised:
            refused = refusal_in(raised)
            error = _told(raised) if refused is None else f"{REFUSED}{refused}\n{_told(raised)}"
        torch.save((result, error), whole := folder / f"{name}.{rank}.part")
        whole.replace(whole.with_suffix(".pt"))  # a test may be waiting for it
        dist.barrier()
        # Its threads would look for messages a hundred times a second, to the end of the launch.
        dist.destroy_process_group(group)
        if rank == 0:
            print(f"{time.perf_counter() - start:6.2f} s  {name}", flush=True)


def _told(error: BaseException) -> str:
    """The traceback, with what the variables were where an assertion fails, as far as they can be
    shown."""
    try:
        trace = TracebackException.from_exception(error, capture_locals=True)
    except Exception:  # one that is half built
        trace = TracebackException.from_exception(error)
    for frame in trace.stack:
        frame.locals = {name: shorten(value, 200) for name, value in (frame.locals or {}).items()}
    return "".join(trace.format())


if __name__ == "__main__":
    file, folder, *options = sys.argv[1:]
    sys.path.insert(0, str(Path(file).parent))
    importlib.import_module(Path(file).stem).cases.main(Path(folder), *options)
