"""The doctor on the emulated accelerator, whose messages are NCCL's: all is right, and what is
planted is found there too."""

import os

import pytest
import torch.distributed as dist

from gradwire import AllReduce, PowerSGD, Quantize, WireDtype
from gradwire.core.simulate.doctor.report import FAULT, OK
from gradwire.torch_backend.doctor.checks import check_kernels, check_messages, check_methods
from gradwire.torch_backend.doctor.replayed_steps import check_replays
from gradwire.torch_backend.engine.stretches import Number
from tests.torch.everything import Everything
from tests.torch.ranks import Cases
from tests.torch.test_doctor import faults_of, one_wrong_scale, rows_of, swapped

if "RANK" in os.environ:  # it renames torch's PrivateUse1 for the life of the process
    from tests.emulated.device import DEVICE, watched
    from tests.emulated.graphs import with_graphs
    from tests.emulated.process_group import BACKEND

cases = Cases(__file__, ranks=2)
CODES = WireDtype(AllReduce(), "int8")


def found(algorithms):
    group = dist.new_group(backend=BACKEND)
    watched.clear()
    rows = rows_of(check_kernels, DEVICE, quick=True) + rows_of(check_messages, group, DEVICE)
    return faults_of(rows + rows_of(check_methods, group, DEVICE, algorithms))


def replays_of(algorithms):
    rows = rows_of(check_replays, dist.new_group(backend=BACKEND), DEVICE, algorithms)
    return [(row.verdict, row.detail) for row in rows]


@cases.case
def test_nothing_is_wrong_there(world):
    assert found([CODES, PowerSGD(2)]) == {}
    assert [each.what for each in watched.problems] == []


@cases.case
def test_replays_are_compared_with_eager_steps(world):
    """Those that are right, those that are none since the host looks on, and those that go on with
    the number of another step."""
    assert replays_of([CODES]) == []
    with_graphs()
    watched.clear()
    right = replays_of([CODES, PowerSGD(2, half_step=True), PowerSGD(2, start_step=2)])
    assert right == [
        (OK, f"{replayed} of {steps} steps replayed, with the bits of eager ones")
        for replayed, steps in ((3, 6), (6, 12), (3, 8))
    ]
    assert [each.what for each in watched.problems if "replays.py" in str(each.where)] == []
    ((verdict, detail),) = replays_of([Everything()])
    assert verdict == OK
    assert detail.startswith("no step is replayed")
    assert "a value was read" in detail
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Number, "computed", property(lambda number: False, lambda number, computed: None)
        )
        ((verdict, detail),) = replays_of([Quantize("int4", stochastic=True)])
    assert verdict == FAULT
    assert "step 4 comes out otherwise where it is replayed" in detail


@cases.each(
    {
        "one wrong scale": (one_wrong_scale, "codec int8"),
        "ranks in another order": (swapped, "messages"),
    }
)
def test_what_is_planted_is_found_there(world, planted):
    plant, check = planted
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert any(name.startswith(check) for name in found([CODES]))
