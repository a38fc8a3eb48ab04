"""torch DDP and `DataParallel` on Gloo, 2, 3 and 4 processes, against the float64 oracle."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire import plan
from tests.forked import run_ranks
from tests.methods import METHODS
from tests.parity.cases import SHAPES, STEPS, TORCH_METHODS, assert_compressed, assert_same, oracle

#: Every setting, and the one in which most can go wrong on most ranks. "unseen" is as on a device, where the host must not look at tensors.
SETTINGS = {
    2: ["one_bucket", "many_groups", "data_parallel_buckets"],
    3: ["many_buckets", "unseen"],
    4: ["many_groups"],
}
RUNS = [(ranks, setting) for ranks, settings in SETTINGS.items() for setting in settings]
TABLE = [(case, *run) for run in RUNS for case in TORCH_METHODS]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[Any]]:
    """The traces of all ranks for a world size and a setting; each world size is launched once, for all its settings."""

    @cache
    def launched(ranks: int) -> list[Any]:
        folder = tmp_path_factory.mktemp("traces")
        run_ranks(Path(__file__).with_name("torch_worker.py"), ranks, str(folder), *SETTINGS[ranks], timeout=280)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]

    return lambda ranks, setting: launched(ranks)


@pytest.mark.parametrize(("case", "ranks", "setting"), TABLE)
def test_equals_the_oracle(traces: Callable[[int, str], list[Any]], case: str, ranks: int, setting: str) -> None:
    runs = [t[case, setting] for t in traces(ranks, setting)]
    for run in runs[1:]:  # all ranks received the same bits
        for mine, first in zip(run["updates"], runs[0]["updates"], strict=True):
            assert all(torch.equal(mine[n], first[n]) for n in SHAPES)
    for step in range(STEPS):
        assert_same(case, step, runs[0]["updates"][step], [run["memory"][step] for run in runs])
    assert_compressed(case, ranks)
    assert runs[0]["bytes"] == oracle(case, ranks).nbytes


@pytest.mark.parametrize("case", TORCH_METHODS)
def test_sends_the_plan(traces: Callable[[int, str], list[Any]], case: str) -> None:
    start = METHODS[case].algorithm.start_step
    runs = {setting: traces(ranks, setting)[0][case, setting] for ranks, setting in RUNS if ranks < 4}
    for setting, ranks in (("one_bucket", 2), ("many_buckets", 3)):
        expected = plan(SHAPES, METHODS[case].algorithm, world_size=ranks).steps
        steps = list(zip(runs[setting]["bytes"][start:], runs[setting]["collectives"][start:], strict=True))
        assert steps == [(t.nbytes, t.collectives) for t in expected] * (len(steps) // len(expected))
    for bucketed in ("many_groups", "data_parallel_buckets"):
        assert sum(runs[bucketed]["collectives"]) > sum(runs["one_bucket"]["collectives"])
