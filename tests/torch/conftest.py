"""A world of one rank in the test process itself, for what needs no other rank."""

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def alone():
    """The default process group, of this process only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
    torch.set_num_threads(threads)
