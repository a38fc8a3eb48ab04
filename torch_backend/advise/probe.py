"""How long messages take between the ranks of a group, measured with the requests that algorithms
make.

torchrun --nproc-per-node=2 train.py
    probe = gradwire.torch_backend.probe()
    print(probe)
"""

from __future__ import annotations

import os
import statistics
import time

import torch
import torch.distributed as dist

from gradwire.core.advise.probe import (
    ROWS,
    Probe,
    measure,
    message,
    message_shape,
    partition,
)
from gradwire.core.protocol.groups import Groups
from gradwire.core.text.options import AtLeast1, checked
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups.point_to_point import NCCL
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups, given_or_default
from gradwire.torch_backend.engine.scheduler import Step
from gradwire.torch_backend.ops.kernels import TorchOps


@checked
def probe(group: dist.ProcessGroup | None = None, *, nodes: AtLeast1 | None = None) -> Probe:
    """Measure latency and bandwidth of a group, in some seconds. To be called on all of its ranks;
    all of them are told the same.

    Args:
        group: whose ranks; None is the default group. On NCCL messages are of CUDA tensors, on the
            current device.
        nodes: on how many machines they are, in order. None: as torchrun says (LOCAL_WORLD_SIZE);
            of other groups than the default one each rank is taken to be on a machine of its own.

    Raises:
        ValueError: there is no group; one rank alone; or nodes of different sizes.
    """
    group = given_or_default(group, "group")
    size = dist.get_world_size(group)
    nodes = _nodes(group) if nodes is None else nodes
    on_device = NCCL in dist.get_backend_config(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    threads = torch.get_num_threads()
    cores = "1 thread" if threads == 1 else f"{threads} threads"
    name = torch.cuda.get_device_name(device) if on_device else f"cpu, {cores} each"
    partitions = partition(size, nodes) if 1 < nodes < size and size % nodes == 0 else ()
    groups = ProcessGroups(group, partitions)
    with torch.no_grad():
        return measure(_Prober(groups, device), "torch", name, size, nodes)


def _nodes(group: dist.ProcessGroup) -> int:
    size, local = dist.get_world_size(group), os.environ.get("LOCAL_WORLD_SIZE", "")
    everybody = size == dist.get_world_size()
    return (
        size // int(local)
        if everybody and local.isdigit() and int(local) and size % int(local) == 0
        else size
    )


class _Prober:
    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._device = device
        self._group = groups.whole
        self._step = Step(Collectives(groups, TorchOps(device)))
        self._matrix = torch.full((ROWS, ROWS), 1.0 / ROWS, dtype=torch.float32, device=device)

    def __call__(
        self,
        nbytes: int,
        groups: Groups | None,
        *,
        exchange: bool = False,
        products: int = 0,
        repeats: int = 1,
    ) -> float:
        size = len(groups[0]) if groups else dist.get_world_size(self._group)
        shape = message_shape(nbytes, size, exchange=exchange)
        x = torch.zeros(shape, dtype=torch.float32, device=self._device)
        product = torch.empty_like(self._matrix)
        found = []
        for _ in range(repeats):
            dist.all_reduce(self._matrix.new_zeros(1), group=self._group)  # all begin together
            self._synchronize()
            began = time.perf_counter()
            self._step.begin()
            if nbytes:
                self._step.start(message(x, groups, exchange=exchange))
            for _ in range(products):
                torch.mm(self._matrix, self._matrix, out=product)
            self._step.finish()
            self._synchronize()
            found.append(time.perf_counter() - began)
        slowest = torch.tensor(statistics.median(found), dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return float(slowest)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
