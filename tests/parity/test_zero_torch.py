"""Sharded optimizers in torch on Gloo, 2, 3 and 4 processes, in every form, against the float64 oracle."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.launch import torchrun
from tests.parity.zero_cases import SHAPES, STEPS, ZERO_CASES, assert_same, dense, oracle, torch_forms

RUNS = [(name, form) for name, case in ZERO_CASES.items() for form in torch_forms(case)]


@pytest.fixture(scope="module", params=[2, 3, 4], ids=lambda n: f"{n} ranks")
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of all ranks."""
    folder = tmp_path_factory.mktemp("traces")
    torchrun(Path(__file__).with_name("zero_torch_worker.py"), request.param, str(folder), timeout=280)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


@pytest.mark.parametrize(("case", "form"), RUNS)
def test_equals_the_oracle(traces: list[Any], case: str, form: str) -> None:
    ranks = [t[case, form]["params"] for t in traces]
    for other in ranks[1:]:
        for mine, first in zip(other, ranks[0], strict=True):
            assert all(torch.equal(mine[n], first[n]) for n in SHAPES)
    assert_same(case, len(traces), [{n: np.asarray(p) for n, p in step.items()} for step in ranks[0]])


@pytest.mark.parametrize(("case", "form"), [(c, f) for c, f in RUNS if f != "plain" and dense(ZERO_CASES[c])])
def test_sends_what_the_oracle_sends(traces: list[Any], case: str, form: str) -> None:
    expected = sum(oracle(case, len(traces)).nbytes)
    # The scalar of a clipped step is a float32 here, and half of a float64 there.
    assert abs(traces[0][case, form]["bytes"] - expected) <= 8 * STEPS
