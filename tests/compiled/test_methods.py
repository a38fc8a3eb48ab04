"""What compilers make of each method, beside `pmean` in the same process: passes over the gradients, memory, launches, time, and what crosses which link.

`make test-compiled` compiles all of it, and prints the table of docs/performance.md; `make test-all` a part for H100, where the packages are installed.
"""

import functools
import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from gradwire import AllReduce, PowerSGD, TwoLevel, plan
from tests.compiled import targets
from tests.compiled.methods import pair


class Ceiling(NamedTuple):
    """For two matrices and a vector: passes over the gradients on a TPU more than those of `pmean`, and temporary memory in gradients, where `pmean` works
    in place; launches of an H100, and temporary memory there, in gradients."""

    passes: float
    memory: float
    launches: int
    memory_h100: float


CEILINGS = {
    "WireDtype(AllReduce(),'int8')": Ceiling(8.6, 0.2, 18, 0.6),
    "Quantize('int8')": Ceiling(23.2, 0.25, 28, 1.6),
    "PowerSGD(4)": Ceiling(15.2, 0.3, 52, 1),
    "Sign()": Ceiling(18.2, 0.3, 32, 1),
    "TopK(64,per=(64,64))": Ceiling(52, 0.8, 56, 3.3),
    "TwoLevel(PowerSGD(4),within='ici')": Ceiling(14.4, 0.3, 66, 2.7),
    "zero1": Ceiling(15.2, 0.3, 12, 2),
    "LocalSGD(4)": Ceiling(1, 0.3, 16, 2),
    "diloco(4)": Ceiling(24, 0.3, 28, 2),
}
#: For 50 matrices of three shapes: processor seconds to compile for a TPU are to be at most so many times those of `pmean`, and some more.
TIMES, SECONDS = 3, 8
#: What is compiled so, in how many seconds more.
LONGER = {
    "WireDtype(AllReduce(),'int8')": 0,
    "PowerSGD(4)": 0,
    "TwoLevel(PowerSGD(4),within='ici')": 0,
    "Quantize('int8')": 4,
    "Sign()": 5,
    "TopK(64,per=(64,64))": 40,
    "zero1": 0,
    "LocalSGD(4)": 0,
    "diloco(4)": 0,
}
#: Bytes of a tile. What is sent to another slice is filled up to whole ones.
TILE = 4096
COLUMNS = ("target", "method", "compile_s", "passes", "temporary", "launches", "messages", "sent")
all_of_it = pytest.mark.skipif(
    "GRADWIRE_TEST_COMPILED" not in os.environ, reason="compilers take minutes; `make test-compiled` waits for them"
)


@functools.cache
def rows(target, model, *methods):
    """Of `pmean` and these methods, compiled once."""
    if why_not := targets.missing(target):
        pytest.skip(why_not)
    command = [sys.executable, "-m", "tests.compiled.methods", target, model, "pmean", *methods]
    said = subprocess.run(command, cwd=targets.ROOT, capture_output=True, text=True, timeout=1800)
    assert said.returncode == 0, said.stderr[-3000:]
    found = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]
    print("", *(" | ".join(str(row[column]) for column in COLUMNS) for row in found), sep="\n")
    return {row["method"]: row for row in found}


@pytest.mark.slow
@pytest.mark.parametrize("method", CEILINGS)
def test_an_h100_launches_few_kernels(method):
    found, most = rows("h100", "pair", *CEILINGS)[method], CEILINGS[method]
    assert found["launches"] <= most.launches, found
    assert found["temporary"] <= most.memory_h100, found
    assert found["messages"] > 0 == found["waiting"], found  # the schedule may put something beside each of them


@all_of_it
@pytest.mark.parametrize("method", CEILINGS)
def test_a_tpu_passes_few_times_over_the_gradients(method):
    found, most = rows("v5e", "pair", *CEILINGS), CEILINGS[method]
    assert found[method]["passes"] <= found["pmean"]["passes"] + most.passes, found[method]
    assert found[method]["temporary"] <= most.memory, found[method]


@all_of_it
def test_a_tpu_passes_fewer_times_over_gradients_too_large_for_its_fast_memory():
    found = rows("v5e", "wide", "PowerSGD(4)")
    assert found["PowerSGD(4)"]["passes"] <= found["pmean"]["passes"] + 4, found
    assert found["PowerSGD(4)"]["temporary"] <= found["pmean"]["temporary"], found


@all_of_it
@pytest.mark.parametrize("method", LONGER)
def test_fifty_matrices_compile_in_little_more_time(method):
    found = rows("v5e", "fifty", *LONGER)
    most = TIMES * found["pmean"]["compile_s"] + SECONDS + LONGER[method]
    assert found[method]["compile_s"] <= most, found[method]


@all_of_it
def test_muon_divided_among_four_computes_a_quarter_of_the_plain_step():
    found = rows("v5e", "layers", "muon", "zero1 of muon")
    assert found["zero1 of muon"]["flops"] <= 1.15 / 4 * found["muon"]["flops"], found


@all_of_it
@pytest.mark.parametrize(
    ("method", "algorithm"),
    [
        ("pmean", AllReduce()),
        ("PowerSGD(4)", PowerSGD(4)),
        ("TwoLevel(PowerSGD(4),within='ici')", TwoLevel(PowerSGD(4), within=4)),
        ("diloco(4)", AllReduce()),
    ],
)
def test_what_a_device_sends_to_the_other_slice_is_what_the_plan_says(method, algorithm):
    found = rows("tpu", "pair", "PowerSGD(4)", "TwoLevel(PowerSGD(4),within='ici')", "diloco(4)")[method]
    planned = plan(pair(), algorithm, world_size=8)
    nbytes = planned.levels[1].nbytes if planned.levels else planned.wire_bytes
    assert nbytes <= found["sent"] < nbytes + TILE * found["messages"], found
