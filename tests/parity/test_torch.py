"""torch DDP and `DataParallel` on Gloo, 2, 3 and 4 processes, against the float64 oracle."""

from itertools import cycle, islice

import pytest
import torch

from gradwire import PowerSGD, WireDtype, plan
from gradwire.core.codecs import CODECS
from tests.methods import METHODS, VARIANTS
from tests.parity.cases import DIFFERENT, SHAPES, STEPS, TORCH_METHODS, assert_compressed, assert_same, oracle
from tests.parity.launches import traces_of

#: Every setting, and the one in which most can go wrong on most ranks. "unseen" is as on a device, where the host must not look at tensors.
SETTINGS = {
    2: ["one_bucket", "many_groups", "data_parallel_buckets"],
    3: ["many_buckets", "unseen"],
    4: ["many_groups"],
}
#: Of variants, whose programs those of other methods are but for numbers: in both wrappers, the one as on a device.
OF_VARIANTS = ("data_parallel_buckets", "unseen")
#: In these a step sends one group.
TOGETHER = ("one_bucket", "many_buckets")
#: As on a device, factors are made orthonormal by other operations than the oracle's. What lies between two numbers of the wire's dtype may then
#: be rounded to the other one: the distance of two such numbers, relative to the larger.
ROUNDED = {"bfloat16": 2**-7, "int8": 1 / 127}


def usual(case, ranks, setting):
    """All methods but variants in one setting, those that differ in kind in one more for each of the others."""
    return ((ranks, setting) == (2, "many_groups") and case not in VARIANTS) or (
        case in DIFFERENT and ranks < 4 and setting != "many_buckets"
    )


TABLE = [
    pytest.param(case, ranks, setting, marks=() if usual(case, ranks, setting) else pytest.mark.slow)
    for ranks, settings in SETTINGS.items()
    for setting in settings
    # Only kinds of methods where buckets are as in "unseen", or ranks are more.
    for case in (DIFFERENT if setting == "many_buckets" or ranks == 4 else TORCH_METHODS)
    if case not in VARIANTS or setting in OF_VARIANTS
]


traces = traces_of(__file__, "torch_worker.py", "case", "setting")


@pytest.mark.parametrize(("case", "ranks", "setting"), TABLE)
def test_equals_the_oracle_and_the_plan(traces, case, ranks, setting):
    runs = [t[case, setting] for t in traces(ranks)]
    for run in runs[1:]:  # all ranks received the same bits
        for mine, first in zip(run["updates"], runs[0]["updates"], strict=True):
            assert all(torch.equal(mine[n], first[n]) for n in SHAPES)
    algorithm = METHODS[case].algorithm
    factors = setting == "unseen" and isinstance(algorithm, WireDtype) and isinstance(algorithm.algorithm, PowerSGD)
    tolerance = ROUNDED[algorithm.dtype] if factors else None
    for step in range(STEPS):
        memory = [run["memory"][step] for run in runs]
        assert_same(case, step, runs[0]["updates"][step], memory, tolerance=tolerance)
    assert_compressed(case, ranks)
    expected = oracle(case, ranks).nbytes
    if (
        isinstance(algorithm, WireDtype) and setting not in TOGETHER
    ):  # a message has as many rows of codes for every rank
        row = CODECS[algorithm.dtype].width(128)
        for sent, planned, messages in zip(runs[0]["bytes"], expected, runs[0]["collectives"], strict=True):
            assert planned <= sent <= planned + messages * (ranks - 1) * row
    else:
        assert runs[0]["bytes"] == expected
    steps = plan(SHAPES, algorithm, world_size=ranks).steps
    sent = runs[0]["collectives"][algorithm.start_step :]
    planned = [step.collectives for step in islice(cycle(steps), len(sent))]
    if setting in TOGETHER:
        assert sent == planned
    else:  # as many bytes in more messages
        assert sum(sent) > sum(planned)
