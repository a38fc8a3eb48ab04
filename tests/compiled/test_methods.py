"""What compilers make of each method, beside `pmean` in the same process: passes over the gradients, memory, launches. `make test-compiled` prints the table."""

import functools
import json
import os
import subprocess
import sys

import pytest

from tests.compiled import targets

#: Passes over the gradients on a TPU more than those of `pmean`, and launches of an H100, for two matrices and a vector.
CEILINGS = {
    "WireDtype(AllReduce(),'int8')": (20, 20),
    "Quantize('int8')": (25, 32),
    "PowerSGD(4)": (16, 52),
}
COLUMNS = ("target", "method", "compile_s", "passes", "temporary", "launches", "messages")


@functools.cache
def rows(target):
    """Of all methods, compiled once."""
    if why_not := targets.missing(target):
        pytest.skip(why_not)
    command = [sys.executable, "-m", "tests.compiled.methods", target, "512", "pmean", *CEILINGS]
    said = subprocess.run(command, cwd=targets.ROOT, capture_output=True, text=True, timeout=580)
    assert said.returncode == 0, said.stderr[-3000:]
    found = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]
    print("", *(" | ".join(str(row[column]) for column in COLUMNS) for row in found), sep="\n")
    return {row["method"]: row for row in found}


@pytest.mark.slow
@pytest.mark.parametrize("method", CEILINGS)
def test_an_h100_launches_few_kernels(method):
    found = rows("h100")
    assert found[method]["launches"] <= CEILINGS[method][1], found[method]
    assert found[method]["temporary"] <= found["pmean"]["temporary"], found[method]


@pytest.mark.slow
@pytest.mark.parametrize("method", CEILINGS)
def test_a_tpu_passes_few_times_over_the_gradients(method):
    if "GRADWIRE_TEST_COMPILED" not in os.environ:
        pytest.skip("libtpu compiles for minutes; `make test-compiled` waits for it")
    found = rows("v5e")
    assert found[method]["passes"] <= found["pmean"]["passes"] + CEILINGS[method][0], found[method]
    # Of the smallest gradients; `pmean` works in place.
    assert found[method]["temporary"] <= max(found["pmean"]["temporary"], 0.3), found[method]
