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

#: On 2 ranks every form, on 3 the one in which most can go wrong; the other one there is slow.
RUNS = [
    pytest.param(ranks, name, form, marks=pytest.mark.slow if (ranks, form) == (3, "overlapped") else ())
    for ranks, unfit in ((2, ()), (3, ("plain", "averaging")))
    for name, case in ZERO_CASES.items()
    for form in torch_forms(case)
    if form not in unfit
]


@pytest.fixture(scope="module")
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """The traces of all ranks for a world size; each is launched once, for what has been selected to run."""
    selected = [item.callspec.params for item in request.session.items if item.path == Path(__file__)]  # type: ignore[attr-defined]

    @cache
    def launched(ranks: int) -> list[Any]:
        folder = tmp_path_factory.mktemp("traces")
        rows = [f"{row['case']},{row['form']}" for row in selected if row["ranks"] == ranks]
        run_ranks(Path(__file__).with_name("zero_torch_worker.py"), ranks, str(folder), *rows, timeout=280)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]

    return launched


@pytest.mark.parametrize(("ranks", "case", "form"), RUNS)
def test_equals_the_oracle(traces: Callable[[int], list[Any]], ranks: int, case: str, form: str) -> None:
    params = [t[case, form]["params"] for t in traces(ranks)]
    for other in params[1:]:
        for mine, first in zip(other, params[0], strict=True):
            assert all(torch.equal(mine[n], first[n]) for n in SHAPES)
    assert_same(case, ranks, [{n: np.asarray(p) for n, p in step.items()} for step in params[0]])
    if form != "plain" and dense(
        ZERO_CASES[case]
    ):  # nor is more sent, but for a clipped step's scalar: a float32 here, half of a float64 there
        assert abs(traces(ranks)[0][case, form]["bytes"] - sum(oracle(case, ranks).nbytes)) <= 8 * STEPS
