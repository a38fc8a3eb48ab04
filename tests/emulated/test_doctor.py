"""The doctor on the emulated accelerator, whose messages are NCCL's: all is right, and what is planted is found there too."""

import os

import pytest
import torch.distributed as dist

from gradwire import AllReduce, PowerSGD, WireDtype
from gradwire.torch_backend.doctor.checks import check_kernels, check_messages, check_methods
from tests.torch.ranks import Cases
from tests.torch.test_doctor import faults_of, one_wrong_scale, rows_of, swapped

if "RANK" in os.environ:  # it renames torch's PrivateUse1 for the life of the process
    from tests.emulated.device import DEVICE, watched
    from tests.emulated.process_group import BACKEND

cases = Cases(__file__, ranks=2)
CODES = WireDtype(AllReduce(), "int8")


def found(algorithms):
    group = dist.new_group(backend=BACKEND)
    watched.clear()
    rows = rows_of(check_kernels, DEVICE, quick=True) + rows_of(check_messages, group, DEVICE)
    return faults_of(rows + rows_of(check_methods, group, DEVICE, algorithms))


@cases.case
def test_nothing_is_wrong_there(world):
    assert found([CODES, PowerSGD(2)]) == {}
    assert [each.what for each in watched.problems] == []


@cases.each({"one wrong scale": (one_wrong_scale, "codec int8"), "ranks in another order": (swapped, "messages")})
def test_what_is_planted_is_found_there(world, planted):
    plant, check = planted
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert any(name.startswith(check) for name in found([CODES]))
