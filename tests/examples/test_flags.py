"""What the scripts say about themselves, and refuse."""

import argparse
import math
import re

import pytest

from tests.examples.conftest import EXAMPLES, examples_importable

pytestmark = pytest.mark.slow

with examples_importable():
    import flags


@pytest.mark.parametrize("script", ["train_torch.py", "train_flax.py", "demo.py"])
def test_help_explains_every_flag(script, start):
    text = start(EXAMPLES / script, "--help").finish()
    options = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    assert len(options) >= 3
    # An option is followed by its explanation, on its line or on the next.
    for option in options:
        explained = re.search(rf"^  {option}\b[^\n]*?(?:  +|\n {{10,}})(\w[^\n]*)", text, re.MULTILINE)
        assert explained, option


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--batch-size", "-1"], "--batch-size -1 must be at least 1"),
        (["--width", "100"], "--width 100 is more than one head of 64 and no multiple of 64; 64 is"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--resume", "--checkpoint", "nowhere.pt"], "no checkpoint at nowhere.pt"),
    ],
)
def test_impossible_flags_are_refused(given, message, capsys):
    p = flags.parser("")
    with pytest.raises(SystemExit):
        flags.check(p.parse_args(given), p)
    assert message in capsys.readouterr().err


def test_the_learning_rate_warms_up_and_decays():
    args = argparse.Namespace(lr=1.0, steps=1000)
    rates = [flags.learning_rate(step, args) for step in range(args.steps)]
    assert rates[0] == pytest.approx(1 / flags.WARMUP, rel=0.01)
    peak = rates.index(max(rates))
    assert peak == flags.WARMUP - 1
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, rel=0.01)
    assert not math.isclose(rates[500], rates[-1])
