"""The sharded JAX example trains on 2×2 devices, and goes on with slices of another size."""

import re

import pytest

from tests.examples.conftest import EXAMPLES

TINY = ("--width=32", "--layers=1", "--context=16", "--batch-size=4", "--rank=2")
SCRIPT = EXAMPLES / "train_sharded_flax.py"


def losses(output):
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss ([\d.]+)$", output, re.MULTILINE)}


@pytest.mark.slow
def test_it_trains_and_goes_on_with_slices_of_another_size(start, tmp_path):
    said = start(SCRIPT, *TINY, "--steps=12", f"--checkpoint={tmp_path}").finish()
    bytes_of = re.search(r"^each slice sends ([\d,]+) bytes a step, in place of ([\d,]+)$", said, re.MULTILINE)
    assert bytes_of
    compressed, dense = (int(n.replace(",", "")) for n in bytes_of.groups())
    assert compressed < dense / 5
    begun = losses(said)
    assert list(begun) == [*range(1, 13)]
    assert begun[12] < begun[1] - 0.3
    resumed = losses(start(SCRIPT, *TINY, "--steps=16", "--chips=1", "--batch-size=8", f"--resume={tmp_path}").finish())
    assert list(resumed) == [13, 14, 15, 16]
    assert resumed[13] < begun[1] - 0.3
