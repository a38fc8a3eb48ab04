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
    "PowerSGD(4)": Ceiling(15.2, 0.3, 44, 1),
    "Sign()": Ceiling(16.2, 0.3, 32, 1),
    "TopK(64,per=(64,64))": Ceiling(52, 0.8, 52, 2.2),
    "TwoLevel(PowerSGD(4),within='ici')": Ceiling(14.4, 0.3, 58, 2.7),
    "zero1": Ceiling(15.2, 0.3, 12, 2),
    "LocalSGD(4)": Ceiling(1, 0.3, 16, 2),
    "diloco(4)": Ceiling(24, 0.3, 28, 2),
}
STACKED_POWER_SGD = "PowerSGD(4,stacked={'h/*':1})"
#: The same for the 12 layers of a GPT in stacks.
STACKED = {
    "WireDtype(AllReduce(),'int8')": Ceiling(18.5, 0.4, 36, 1),
    "Quantize('int8')": Ceiling(40, 0.5, 84, 2),
    STACKED_POWER_SGD: Ceiling(16.5, 0.3, 96, 1),
    "Sign()": Ceiling(24, 0.3, 62, 1),
    "TopK(64,per=(64,64))": Ceiling(62, 2, 126, 2.2),
    f"TwoLevel({STACKED_POWER_SGD},within='ici')": Ceiling(16.5, 0.3, 122, 2.1),
    "zero1": Ceiling(16, 0.3, 20, 2),
    "LocalSGD(4)": Ceiling(1, 0.3, 34, 2),
    "diloco(4)": Ceiling(25.5, 0.5, 74, 2),
}
MOST = {"pair": CEILINGS, "stacked": STACKED}
ROWS = [(model, method) for model, ceilings in MOST.items() for method in ceilings]
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
#: And of those in stacks.
STACKED_LONGER = dict.fromkeys(STACKED, 0) | {
    "WireDtype(AllReduce(),'int8')": 80,
    "Quantize('int8')": 33,
    "TopK(64,per=(64,64))": 28,
    "zero1": 5,
}
#: Bytes of a tile. What is sent to another slice is filled up to whole ones.
TILE = 4096
COLUMNS = ("target", "method", "compile_s", "passes", "temporary", "launches", "messages", "beside", "sent", "moved")
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
@pytest.mark.parametrize(("model", "method"), ROWS)
def test_an_h100_launches_few_kernels(model, method):
    found, most = rows("h100", model, *MOST[model])[method], MOST[model][method]
    assert found["launches"] <= most.launches, found
    assert found["temporary"] <= most.memory_h100, found
    assert found["messages"] > 0 == found["waiting"], found  # the schedule may put something beside each of them


@pytest.mark.slow
def test_an_h100_computes_while_messages_of_stacks_travel():
    found = rows("h100", "stacked", *STACKED)
    idle = [method for method, row in found.items() if row["beside"] == 0]
    assert idle == ["Sign()", "zero1"], (
        found
    )  # which have nothing to do before their one message, or the second, is there


@all_of_it
@pytest.mark.parametrize(("model", "method"), ROWS)
def test_a_tpu_passes_few_times_over_the_gradients(model, method):
    found, most = rows("v5e", model, *MOST[model]), MOST[model][method]
    assert found[method]["passes"] <= found["pmean"]["passes"] + most.passes, found[method]
    assert found[method]["temporary"] <= most.memory, found[method]


@all_of_it
@pytest.mark.parametrize(("method", "passes"), [("PowerSGD(4)", 4), ("Sign()", 10)])
def test_a_tpu_passes_fewer_times_over_gradients_too_large_for_its_fast_memory(method, passes):
    found = rows("v5e", "wide", "PowerSGD(4)", "Sign()")
    assert found[method]["passes"] <= found["pmean"]["passes"] + passes, found
    assert found[method]["temporary"] <= found["pmean"]["temporary"], found


@all_of_it
@pytest.mark.parametrize(
    ("model", "method"), [*(("fifty", method) for method in LONGER), *(("stacked", method) for method in STACKED)]
)
def test_layers_compile_in_little_more_time(model, method):
    longer = {"fifty": LONGER, "stacked": STACKED_LONGER}[model]
    found = rows("v5e", model, *longer)
    most = TIMES * found["pmean"]["compile_s"] + SECONDS + longer[method]
    assert found[method]["compile_s"] <= most, found[method]


@all_of_it
@pytest.mark.parametrize("method", ["pmean", STACKED_POWER_SGD])
def test_stacks_that_are_divided_in_a_slice_are_gathered_by_nobody(method):
    """Of 12 layers the smallest matrices have 3 MiB; messages travel between slices while something is computed."""
    found = rows("tpu", "divided", STACKED_POWER_SGD)[method]
    assert found["moved"] < 12 * 256 * 256 * 4 / 4, found
    assert found["beside"] > 0, found


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
