"""A world of one rank in the test process itself, for what needs no other rank; and both branches
of the kernels."""

from collections.abc import Generator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from benchmarks.dry import on_a_device
from tests.bounds import threads
from tests.torch.ranks import REFUSED, Refused, refusal_in


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """On a torch that is too old for what a test does, the test is passed by the refusal, on every
    rank. It is counted as "xfailed"; what else is raised is a failure."""
    try:
        return (yield)
    except Refused as refused:
        return pytest.xfail(str(refused))
    except (Exception, pytest.fail.Exception) as error:
        if (refusal := refusal_in(error)) is None:
            raise
        return pytest.xfail(f"{REFUSED}{refusal}")


@pytest.fixture
def alone():
    """The default process group, of this process only."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
    torch.set_num_threads(before)


@pytest.fixture(params=["seen by the host", "unseen"])
def both_branches(request):
    """Once as on the CPU, where the host looks at tensors, and once as on a device, where it must
    not. (All tests in the latter way:
    `make test-device-branch`.)"""
    with on_a_device() if request.param == "unseen" else nullcontext():
        yield
