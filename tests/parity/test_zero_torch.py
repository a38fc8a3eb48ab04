"""Sharded optimizers in torch on Gloo, 2 and 3 processes, in every form, against the float64
oracle."""

import numpy as np
import pytest
import torch

from tests.parity.launches import traces_of
from tests.parity.zero_cases import (
    SHAPES,
    STEPS,
    ZERO_CASES,
    assert_same,
    dense,
    oracle,
    torch_forms,
)

#: On 2 ranks every form, on 3 the one in which most can go wrong; the other one there is slow.
RUNS = [
    pytest.param(
        ranks, name, form, marks=pytest.mark.slow if (ranks, form) == (3, "overlapped") else ()
    )
    for ranks, unfit in ((2, ()), (3, ("plain", "averaging")))
    for name, case in ZERO_CASES.items()
    for form in torch_forms(case)
    if form not in unfit
]


traces = traces_of(__file__, "zero_torch_worker.py", "case", "form")


@pytest.mark.parametrize(("ranks", "case", "form"), RUNS)
def test_equals_the_oracle(traces, ranks, case, form):
    params = [t[case, form]["params"] for t in traces(ranks)]
    for other in params[1:]:
        for mine, first in zip(other, params[0], strict=True):
            assert all(torch.equal(mine[n], first[n]) for n in SHAPES)
    assert_same(case, ranks, [{n: np.asarray(p) for n, p in step.items()} for step in params[0]])
    if form != "plain" and dense(
        ZERO_CASES[case]
    ):  # nor is more sent, but for a clipped step's scalar: a float32 here, half of a float64 there
        assert (
            abs(traces(ranks)[0][case, form]["bytes"] - sum(oracle(case, ranks).nbytes))
            <= 8 * STEPS
        )
