"""What compilers make of each method, beside `pmean` in the same process: passes over the
gradients, memory, launches, time, and what crosses which link.

`make test-compiled` compiles all of it, and prints the table of docs/evidence.md; `make test-all` a
part for H100, where the packages are installed.
"""

import functools
import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

import gradwire
from gradwire import AllReduce, plan
from tests.compiled import targets
from tests.compiled.methods import pair


class Ceiling(NamedTuple):
    """Passes over the gradients on a TPU more than those of `pmean`, as XLA counts them, and
    temporary memory there, in gradients; launches of an H100, and temporary memory there. Of local
    SGD up to four launches count steps, turns and averages, four bytes each, whatever the model
    is."""

    passes: float
    memory: float
    launches: int
    memory_h100: float


#: Passes more than those of `pmean` over what lies in the memory of a TPU, for every model.
HBM = {
    "WireDtype(AllReduce(),'int8')": 10,
    "Quantize('int8')": 8,
    "PowerSGD(4)": 8,
    "Sign()": 12,
    "TopK(64,per=(64,64))": 25,
    "TwoLevel(PowerSGD(4),within='ici')": 8,
    "zero1": 3,
    "LocalSGD(4)": 1,
    "diloco(4)": 10,
}
#: Two small matrices and a vector, where `pmean` works in place.
PAIR = {
    "WireDtype(AllReduce(),'int8')": Ceiling(8.6, 0.2, 18, 0.6),
    "Quantize('int8')": Ceiling(23.2, 0.25, 24, 0.9),
    "PowerSGD(4)": Ceiling(15.2, 0.3, 44, 1),
    "Sign()": Ceiling(15, 0.3, 20, 0.3),
    "TopK(64,per=(64,64))": Ceiling(42, 0.25, 44, 1.8),
    "TwoLevel(PowerSGD(4),within='ici')": Ceiling(14.4, 0.3, 58, 2.7),
    "zero1": Ceiling(2, 0.1, 12, 1.3),
    "LocalSGD(4)": Ceiling(1, 0.3, 18, 2),
    "diloco(4)": Ceiling(24, 0.3, 28, 2),
}
#: Eight large matrices. `pmean` takes 0.76 gradients of memory on a TPU, and 1 on an H100; 56
#: launches are 40, and 2 for each matrix.
EIGHT = {
    "WireDtype(AllReduce(),'int8')": Ceiling(5.4, 0.2, 38, 0.6),
    "Quantize('int8')": Ceiling(20, 0.76, 42, 0.9),
    "PowerSGD(4)": Ceiling(11, 0.1, 54, 0.1),
    "Sign()": Ceiling(14.5, 0.4, 38, 0.2),
    "TopK(64,per=(64,64))": Ceiling(35, 1.2, 56, 1.7),
    "TwoLevel(PowerSGD(4),within='ici')": Ceiling(13.4, 1, 94, 1.2),
    "zero1": Ceiling(4, 0.1, 34, 1),
    "LocalSGD(4)": Ceiling(1, 1, 38, 0.1),
    "diloco(4)": Ceiling(15.7, 1, 56, 0.1),
}
STACKED_POWER_SGD = "PowerSGD(4,stacked={'h/*':1})"
#: The 12 layers of a GPT in stacks.
STACKED = {
    "WireDtype(AllReduce(),'int8')": Ceiling(9.8, 0.1, 36, 1),
    "Quantize('int8')": Ceiling(31, 0.7, 47, 0.9),
    STACKED_POWER_SGD: Ceiling(16.5, 0.1, 96, 1),
    "Sign()": Ceiling(17, 0.1, 42, 0.3),
    "TopK(64,per=(64,64))": Ceiling(48, 0.7, 74, 2),
    f"TwoLevel({STACKED_POWER_SGD},within='ici')": Ceiling(16.5, 0.1, 123, 2.1),
    "zero1": Ceiling(4.5, 0.1, 24, 1.3),
    "LocalSGD(4)": Ceiling(1, 0.1, 36, 2),
    "diloco(4)": Ceiling(25.5, 0.5, 58, 2),
}
MOST = {"pair": PAIR, "eight": EIGHT, "stacked": STACKED}
ROWS = [(model, method) for model, ceilings in MOST.items() for method in ceilings]
#: For 50 matrices of three shapes, and for the same in stacks: processor seconds to compile for a
#: TPU are at most so many times those of `pmean` in the same process. Seconds differ with the
#: processor, and with what else the machine does.
TIMES = dict.fromkeys(PAIR, 7) | {
    "WireDtype(AllReduce(),'int8')": 10,
    "Quantize('int8')": 15,
    "TopK(64,per=(64,64))": 10,
}
TIMES_STACKED = dict.fromkeys(STACKED, 10) | {
    "Quantize('int8')": 14,
    "TopK(64,per=(64,64))": 20,
    **dict.fromkeys(("Sign()", "zero1", "LocalSGD(4)", "diloco(4)"), 7),
}
#: What averages parameters as they are.
DENSE = ("LocalSGD(4)", "diloco(4)")
#: Bytes of a tile. What is sent to another slice is filled up to whole ones.
TILE = 4096
COLUMNS = (
    "target",
    "method",
    "compile_s",
    "hbm",
    "passes",
    "temporary",
    "launches",
    "messages",
    "beside",
    "sent",
    "moved",
)
all_of_it = pytest.mark.skipif(
    "GRADWIRE_TEST_COMPILED" not in os.environ,
    reason="compilers take minutes; `make test-compiled` waits for them",
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
    # the schedule may put something beside each of them
    assert found["messages"] > 0 == found["waiting"], found


@pytest.mark.slow
def test_an_h100_computes_while_messages_of_stacks_travel():
    found = rows("h100", "stacked", *STACKED)
    idle = [method for method, row in found.items() if row["beside"] == 0]
    assert idle == ["Sign()"], found  # which has nothing to do before its one message is there


@all_of_it
@pytest.mark.parametrize(("model", "method"), ROWS)
def test_a_tpu_passes_few_times_over_the_gradients(model, method):
    found, most = rows("v5e", model, *MOST[model]), MOST[model][method]
    assert (
        found[method]["hbm"]
        <= found["pmean"]["hbm"] + HBM[method.replace(STACKED_POWER_SGD, "PowerSGD(4)")]
    ), found[method]
    assert found[method]["passes"] <= found["pmean"]["passes"] + most.passes, found[method]
    assert found[method]["temporary"] <= most.memory, found[method]


@all_of_it
@pytest.mark.parametrize(
    ("model", "method"),
    [*(("fifty", method) for method in TIMES), *(("stacked", method) for method in STACKED)],
)
def test_layers_compile_in_little_more_time(model, method):
    times = {"fifty": TIMES, "stacked": TIMES_STACKED}[model]
    found = rows("v5e", model, *times)
    assert found[method]["compile_s"] <= times[method] * found["pmean"]["compile_s"], found[method]


DIVIDED = (
    STACKED_POWER_SGD,
    "Sign()",
    "TopK(64,per=(64,64))",
    "Quantize('int8')",
    "WireDtype(AllReduce(),'int8')",
)


@all_of_it
@pytest.mark.parametrize("method", ["pmean", *DIVIDED])
def test_stacks_that_are_divided_in_a_slice_are_gathered_by_nobody(method):
    """Of 12 layers the smallest matrices have 3 MiB; messages travel between slices while something
    is computed."""
    found = rows("tpu", "divided", *DIVIDED)[method]
    assert found["moved"] < 12 * 256 * 256 * 4 / 4, found
    assert found["beside"] > 0, found


@all_of_it
def test_muon_divided_among_four_computes_a_quarter_of_the_plain_step():
    found = rows("v5e", "layers", "muon", "zero1 of muon")
    assert found["zero1 of muon"]["flops"] <= 1.15 / 4 * found["muon"]["flops"], found


@all_of_it
@pytest.mark.parametrize("method", PAIR)
def test_what_a_device_sends_to_the_other_slice_is_what_the_plan_says(method):
    """And two slices read and write no more of their memory than one."""
    found = rows("tpu", "pair", *PAIR)
    own, pmean = found[method], found["pmean"]
    assert own["hbm"] <= pmean["hbm"] + HBM[method], own
    assert own["temporary"] <= max(pmean["temporary"], PAIR[method].memory), own
    if method == "zero1":  # twice: gradients to their owners, parameters from them
        return
    algorithm = (
        AllReduce()
        if method in DENSE
        else eval(method.replace("within='ici'", "within=4"), vars(gradwire))
    )
    planned = plan(pair(), algorithm, world_size=8 if "TwoLevel" in method else 2)
    nbytes = planned.levels[1].nbytes if planned.levels else planned.wire_bytes
    assert nbytes <= own["sent"] < nbytes + TILE * own["messages"], own
