"""The soak with real processes, for as long as a test may take; `make soak-torch` is the long one."""

import re
from pathlib import Path

import pytest

from tests.forked import run_ranks
from tests.soak import torch_soak
from tests.soak.torch_soak import ALGORITHMS, RANKS

#: Of each algorithm, under each wrapper. The one that begins late compresses in the last of its eight.
STRETCH = 4


@pytest.mark.slow
def test_three_ranks_stay_equal_through_random_faults():
    steps = STRETCH * 2 * len(ALGORITHMS)
    arguments = "--work", f"--steps={steps}", "--seed=5", f"--stretch={STRETCH}"
    said = run_ranks(Path(torch_soak.__file__), RANKS, *arguments, timeout=200)
    for algorithm in ALGORITHMS:
        assert said.count(f"  {algorithm}\n") == 2  # under both wrappers
    summary = re.search(r"all ranks equal: (.*)", said)
    assert summary, said
    counts = {what: int(n) for what, n in re.findall(r"([a-z-]+(?: [a-z]+)*) (\d+)", summary[1])}
    assert counts["steps"] == steps
    assert all(counts.values()), counts  # each kind of fault has come up
