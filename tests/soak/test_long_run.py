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
    said = run_ranks(Path(long_run.__file__), RANKS, "--work", "--steps=300", "--groups=20", timeout=200)
    assert said.count("nothing grows") == RANKS
    assert len(re.findall(r"descriptors (\d+) → \1, threads (\d+) → \2, system threads (\d+) → \3 ", said)) == 2 * RANKS


def test_what_grows_is_seen(tmp_path):
    kept = []

    def leaks(number):
        kept.append((tmp_path / str(number)).open("w"))

    with mock.patch("torch.distributed.get_rank", return_value=0):
        assert watched("steps", 20, leaks) == ["descriptors"]
    for file in kept:
        file.close()
