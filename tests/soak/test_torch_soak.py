"""The soak with real processes, for as long as a test may take; `make soak-torch` is the long one."""

import re

import pytest

from tests.soak.torch_soak import ALGORITHMS, soak


@pytest.mark.slow
def test_three_ranks_stay_equal_through_random_faults():
    steps = 5 * 2 * len(ALGORITHMS)
    said = soak(steps, seed=5, timeout=200, stretch_steps=5)
    for algorithm in ALGORITHMS:
        assert said.count(f"  {algorithm}\n") == 2  # under both wrappers
    summary = re.search(r"all ranks equal: (.*)", said)
    assert summary, said
    counts = {what: int(n) for what, n in re.findall(r"([a-z-]+(?: [a-z]+)*) (\d+)", summary[1])}
    assert counts["steps"] == steps
    assert all(counts.values()), counts  # each kind of fault has come up
