"""The command behind `make test-peers`: what it takes for good, and one test of torch for real."""

import pytest

from tests.peers.__main__ import run, tell
from tests.peers.expected import EXPECTED
from tests.peers.rows import ROWS

LISTED = "test_ddp_grad_div_uneven_inputs"


@pytest.mark.parametrize(
    ("test", "outcome", "good"),
    [
        ("test_other", "passed", True),
        ("test_other", "skipped", True),
        ("test_other", "failed", False),
        (LISTED, "failed", True),
        (LISTED, "passed", False),
        (LISTED, "skipped", True),
    ],
)
def test_only_what_is_listed_may_fail_and_has_to(test, outcome, good, capsys):
    assert tell("hook", {test: (outcome, "why"), "test_one_more": ("passed", "")}) == good
    out = capsys.readouterr().out
    assert test in out
    assert ROWS["hook"].title in out
    if outcome == "failed":
        assert (EXPECTED["hook"].get(test) or "why") in out
    assert set(EXPECTED) <= set(ROWS)


@pytest.mark.slow
def test_a_test_of_torch_runs_against_gradwire():
    outcomes = run("names", "test_ddp_hook_parity_allreduce$", limit=240)
    assert outcomes == {"test_ddp_hook_parity_allreduce": ["passed", ""]}
