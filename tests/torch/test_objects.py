"""What is sent as a pickled object travels by the parameters' device, which need not be the current one: NCCL refuses two ranks on one GPU."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from gradwire.torch_backend import ZeroOptimizer
from gradwire.torch_backend.local_sgd.moments import Moments
from gradwire.torch_backend.rank_checks import require_same_on_all_ranks
from tests.torch.models import mlp

DEVICE = torch.device("cuda", 3)


class Parameter:
    """All that is asked of a parameter here."""

    device, dtype = DEVICE, torch.float32


PARAMETER = Parameter()


@pytest.fixture
def devices(monkeypatch):
    """The device that is current during each collective of objects; there is no CUDA, so switching to it only leaves a note."""
    current, seen = [None], []

    @contextmanager
    def switched(device):
        current.append(device)
        yield
        current.pop()

    def noting(function):
        def call(*args, **kwargs):
            seen.append(current[-1])
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch.cuda, "device", switched)
    for name in ("all_gather_object", "gather_object", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, noting(getattr(dist, name)))
    return seen


def agreement(group):
    require_same_on_all_ranks(group, {"setting": "1"}, {}, device=DEVICE)


def moments(group):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)
    optimizer.state = {}
    Moments(optimizer, {"p": PARAMETER}, "average", group)._agree()


def consolidated(group):
    optimizer = ZeroOptimizer(mlp(4, 4).named_parameters(), torch.optim.SGD, lr=1, process_group=group)
    optimizer._parameters = {"p": PARAMETER}
    optimizer.consolidated_state_dict()
    optimizer.consolidated_state_dict(to=None)


@pytest.mark.parametrize(("send", "times"), [(agreement, 1), (moments, 1), (consolidated, 2)])
def test_objects_travel_by_the_parameters_device(alone, devices, send, times):
    send(alone)
    assert devices[-times:] == [DEVICE] * times
