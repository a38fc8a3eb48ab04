"""The sharded example trains, and goes on as other replicas and shards."""

import re

import pytest

from tests.examples.conftest import EXAMPLES
from tests.forked import run_ranks

TINY = ("--width=32", "--layers=1", "--context=16", "--batch-size=4", "--rank=2")


def losses(output):
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss ([\d.]+)$", output, re.MULTILINE)}


@pytest.mark.slow
def test_it_trains_and_goes_on_with_other_shards(tmp_path):
    script = EXAMPLES / "train_sharded.py"
    first = run_ranks(script, 4, *TINY, "--steps=12", f"--checkpoint={tmp_path}")
    begun = losses(first)
    assert list(begun) == [*range(1, 13)]
    assert begun[12] < begun[1] - 0.3
    said = re.search(r"ReplicaHandle\(PowerSGD\(rank=2\): (\d+) of (\d+) tensors.*\(([\d.]+)×\).*; 12 steps, ", first)
    assert said
    assert float(said[3]) > 1.5
    second = run_ranks(script, 4, *TINY, "--steps=16", "--replicas=4", f"--resume={tmp_path}")
    resumed = losses(second)
    assert list(resumed) == [13, 14, 15, 16]
    assert resumed[13] < begun[1] - 0.3
    assert "; 16 steps, " in second
