"""The compilers of TPU and H100 send DiLoCo's differences while the forward and backward pass
compute."""

import json
import subprocess
import sys

import pytest

from tests.compiled import targets
from tests.compiled.schedule import Message, Schedule, schedule


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tpu", "h100"])
def test_a_step_computes_while_a_difference_travels(target):
    """Eight layers: as many products forward, and twice as many backward, but for the first layer's
    input."""
    if why_not := targets.missing(target):
        pytest.skip(why_not)
    command = [sys.executable, "-m", "tests.compiled.overlap", target]
    said = subprocess.run(command, cwd=targets.ROOT, capture_output=True, text=True, timeout=280)
    assert said.returncode == 0, said.stderr[-3000:]
    found = json.loads(said.stdout.splitlines()[-1])
    assert found["products"] >= 3 * 8 - 1
    assert found["beside"] >= 0.8 * found["products"], found


PROGRAM = """
ENTRY main {
  %dot.1 = f32[4] dot(%a, %b)
  %all-reduce-start = f32[4] all-reduce-start(%c), replica_groups={{0,1}}, to_apply=%sum
  %gemm.2 = f32[4] fusion(%a, %b), kind=kCustom, calls=%gemm_fusion_dot.2_computation
  %other = f32[4] fusion(%gemm.2), kind=kLoop, calls=%fused
  %all-reduce-done = f32[4] all-reduce-done(%all-reduce-start)
  %dot.3 = f32[4] dot(%a, %b)
"""


def test_products_beside_a_message_are_counted():
    found = schedule(PROGRAM)
    assert found == Schedule(3, (Message("{{0,1}},", 1, 2),))
    assert (found.beside("{{0,1}}"), found.beside("{{0,2}}")) == (1, 0)
