"""The long run for as long as a test may take; `make soak-long` is the long one."""

import re
from pathlib import Path
from unittest import mock

import pytest

from tests.forked import run_ranks
from tests.soak import long_run
from tests.soak.long_run import RANKS, watched


@pytest.mark.slow
def test_nothing_grows_in_many_steps_and_groups():
    said = run_ranks(Path(long_run.__file__), RANKS, "--work", "--steps=150", "--groups=20", timeout=200)
    assert said.count("nothing grows") == RANKS
    seen = re.findall(r"descriptors (\d+) → (\d+), threads (\d+) → (\d+), system threads (\d+) → (\d+) ", said)
    assert len(seen) == 2 * RANKS
    for counts in seen:  # one may be gone that was about to go
        before, after = counts[::2], counts[1::2]
        assert all(int(b) >= int(a) for b, a in zip(before, after, strict=True)), counts


def test_what_grows_is_seen(tmp_path):
    kept = []

    def leaks(number):
        kept.append((tmp_path / str(number)).open("w"))

    # What earlier tests have left is no garbage of this one, and takes seconds to look through.
    with mock.patch("torch.distributed.get_rank", return_value=0), mock.patch("gc.collect"):
        assert watched("steps", 20, leaks) == ["descriptors"]
    for file in kept:
        file.close()
