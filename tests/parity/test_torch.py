"""torch DDP and `DataParallel` on Gloo, 2 and 3 processes, against the float64 oracle."""

from itertools import cycle, islice

import pytest
import torch

from gradwire import PowerSGD, WireDtype, plan
from gradwire.core.codecs import CODECS
from gradwire.core.codecs.options import Quantizer
from tests.methods import METHODS, VARIANTS
from tests.parity.cases import (
    DIFFERENT,
    SHAPES,
    STEPS,
    TORCH_METHODS,
    assert_compressed,
    assert_same,
    oracle,
)
from tests.parity.launches import traces_of

#: The setting in which everything can go wrong has all methods but variants, that of more ranks
#: these too: there it is as on a device, where the host must not look at tensors. The others have
#: those that differ in kind.
SETTINGS = {
    (2, "many_groups"): [name for name in TORCH_METHODS if name not in VARIANTS],
    (2, "many_buckets"): DIFFERENT,
    (2, "data_parallel_buckets"): DIFFERENT,
    (3, "unseen"): TORCH_METHODS,
}
#: In this one a step sends one group.
TOGETHER = "many_buckets"
#: As on a device, factors are made orthonormal by other operations than the oracle's. What lies
#: between two numbers of the wire's dtype may then be rounded to the other one: the distance of two
#: such numbers, relative to the larger.
ROUNDED = {"bfloat16": 2**-7, "int8": 1 / 127}


TABLE = [
    pytest.param(
        case, ranks, setting, marks=pytest.mark.slow if ranks == 3 and case not in DIFFERENT else ()
    )
    for (ranks, setting), methods in SETTINGS.items()
    for case in methods
]


traces = traces_of(__file__, "torch_worker.py", "case", "setting")


@pytest.mark.parametrize(("case", "ranks", "setting"), TABLE)
def test_equals_the_oracle_and_the_plan(traces, case, ranks, setting):
    runs = [t[case, setting] for t in traces(ranks)]
    for run in runs[1:]:  # all ranks received the same bits
        for mine, first in zip(run["updates"], runs[0]["updates"], strict=True):
            assert all(torch.equal(mine[n], first[n]) for n in SHAPES)
    algorithm = METHODS[case].algorithm
    factors = (
        setting == "unseen"
        and isinstance(algorithm, WireDtype)
        and isinstance(algorithm.algorithm, PowerSGD)
    )
    tolerance = ROUNDED[algorithm.dtype] if factors else None
    for step in range(STEPS):
        memory = [run["memory"][step] for run in runs]
        assert_same(case, step, runs[0]["updates"][step], memory, tolerance=tolerance)
    assert_compressed(case, ranks)
    expected = oracle(case, ranks).nbytes
    # a message has as many rows of codes for every rank
    if isinstance(algorithm, Quantizer) and setting != TOGETHER:
        row = CODECS[algorithm.dtype].width(128)
        for sent, planned, messages in zip(
            runs[0]["bytes"], expected, runs[0]["collectives"], strict=True
        ):
            assert planned <= sent <= planned + messages * (ranks - 1) * row
    else:
        assert runs[0]["bytes"] == expected
    steps = plan(SHAPES, algorithm, world_size=ranks).steps
    sent = runs[0]["collectives"][algorithm.start_step :]
    planned = [step.collectives for step in islice(cycle(steps), len(sent))]
    if setting == TOGETHER:
        assert sent == planned
    else:  # as many bytes in more messages
        assert sum(sent) > sum(planned)
