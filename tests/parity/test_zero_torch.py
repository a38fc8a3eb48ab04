"""Sharded optimizers in torch on Gloo, 2 and 3 processes, in every form, against the float64 oracle."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.forked import run_ranks
from tests.parity.zero_cases import SHAPES, STEPS, ZERO_CASES, assert_same, dense, oracle, torch_forms

RUNS = [
    (ranks, name, form) for ranks in (2, 3) for name, case in ZERO_CASES.items() for form in torch_forms(case, ranks)
]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """The traces of all ranks for a world size; each is launched once."""

    @cache
    def launched(ranks: int) -> list[Any]:
        folder = tmp_path_factory.mktemp("traces")
        run_ranks(Path(__file__).with_name("zero_torch_worker.py"), ranks, str(folder), timeout=280)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]

    return launched


@pytest.mark.parametrize(("ranks", "case", "form"), RUNS)
def test_equals_the_oracle(traces: Callable[[int], list[Any]], ranks: int, case: str, form: str) -> None:
    params = [t[case, form]["params"] for t in traces(ranks)]
    for other in params[1:]:
        for mine, first in zip(other, params[0], strict=True):
            assert all(torch.equal(mine[n], first[n]) for n in SHAPES)
    assert_same(case, ranks, [{n: np.asarray(p) for n, p in step.items()} for step in params[0]])


@pytest.mark.parametrize(("ranks", "case", "form"), [r for r in RUNS if r[2] != "plain" and dense(ZERO_CASES[r[1]])])
def test_sends_what_the_oracle_sends(traces: Callable[[int], list[Any]], ranks: int, case: str, form: str) -> None:
    expected = sum(oracle(case, ranks).nbytes)
    # The scalar of a clipped step is a float32 here, and half of a float64 there.
    assert abs(traces(ranks)[0][case, form]["bytes"] - expected) <= 8 * STEPS
