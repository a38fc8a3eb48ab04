"""Messages: what travels from where it lies, and objects by the parameters' device.

For objects that need not be the current device: NCCL refuses two ranks on one GPU.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gradwire.core.protocol.collective_requests import Reduce
from gradwire.torch_backend import ZeroOptimizer
from gradwire.torch_backend.engine.collectives import Reducing
from gradwire.torch_backend.local_sgd.moments import Moments
from gradwire.torch_backend.ops.workspace import Scratch
from gradwire.torch_backend.setup.consistency import require_same_on_all_ranks
from tests.torch.models import mlp


def parts(flat):
    return [flat[:6].view(2, 3), flat[6:6], flat[6:7], flat[7:10]]


@pytest.fixture
def send(alone):
    def send(*arrays, donated=True, **options):
        return Reducing(Reduce(arrays, (donated,) * len(arrays)), dist.group.WORLD, Scratch(), **options)

    return send


def test_arrays_side_by_side_travel_from_where_they_are(send):
    flat = torch.arange(10.0)
    for first, arrays in ((0, parts(flat)), (6, parts(flat)[1:]), (0, [flat.view(5, 2)])):
        sent = send(*arrays)
        (message,) = sent.messages
        assert message.flat.data_ptr() == flat[first:].data_ptr()
        assert message.flat.tolist() == list(range(first, 10))
        assert all(a is b for a, b in zip(sent.wait(), arrays, strict=True))


def neighbours():
    """Two storages that are neighbours in memory by chance."""
    memory = np.arange(10, dtype=np.float32)
    arrays = [torch.from_numpy(memory[:4]), torch.from_numpy(memory[4:])]
    assert arrays[0].data_ptr() + 16 == arrays[1].data_ptr()
    return arrays


PACKED = {
    "in another order": lambda: parts(torch.arange(10.0))[::-1],
    "with a gap": lambda: parts(torch.arange(10.0))[::3],
    "transposed": lambda: [torch.arange(10.0).view(5, 2).T],
    "neighbours by chance": neighbours,
    "of another dtype": lambda: [torch.arange(4, dtype=torch.int32).view(torch.float32)],
    "not donated": lambda: parts(torch.arange(10.0)),
}


@pytest.mark.parametrize("case", PACKED)
def test_others_are_packed_and_left_alone(send, case):
    arrays = PACKED[case]()
    before = [a.clone() for a in arrays]
    sent = send(*arrays, donated=case != "not donated")
    (message,) = sent.messages
    assert message.flat.dtype == torch.float32
    if case != "of another dtype":
        assert not {a.untyped_storage().data_ptr() for a in arrays} & {message.flat.untyped_storage().data_ptr()}
        message.flat.add_(100)
        for a, b, answer in zip(arrays, before, sent.wait(), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(answer, b + 100)


def test_a_residual_is_computed_once_before_anybody_waits(alone, monkeypatch):
    events = []

    class Work:
        def wait(self):
            events.append("waits")

    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: events.append("sends") or Work())
    request = Reduce((torch.ones(3),), (False,), overlap=(SimpleNamespace(compute=lambda: events.append("works")),))
    sent = Reducing(request, dist.group.WORLD, Scratch())
    assert events == ["sends"]
    sent.wait()
    assert events == ["sends", "works", "waits"]


DEVICE = torch.device("cuda", 3)


class Parameter:
    """All that is asked of a parameter here."""

    device, dtype = DEVICE, torch.float32


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
    Moments(optimizer, {"p": Parameter()}, "average", group)._agree()


def consolidated(group):
    optimizer = ZeroOptimizer(mlp(4, 4).named_parameters(), torch.optim.SGD, lr=1, process_group=group)
    optimizer._own.parameters = {"p": Parameter()}
    optimizer.consolidated_state_dict()
    optimizer.consolidated_state_dict(to=None)


@pytest.mark.parametrize(("send", "times"), [(agreement, 1), (moments, 1), (consolidated, 2)])
def test_objects_travel_by_the_parameters_device(alone, devices, send, times):
    send(alone)
    assert devices[-times:] == [DEVICE] * times
