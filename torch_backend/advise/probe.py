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
    on_device = NCCL in dist.get_backend_config(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    nodes = _nodes(group, device) if nodes is None else nodes
    threads = 0 if on_device else torch.get_num_threads()
    cores = "1 thread" if threads == 1 else f"{threads} threads"
    name = torch.cuda.get_device_name(device) if on_device else f"cpu, {cores} each"
    partitions = partition(size, nodes) if 1 < nodes < size and size % nodes == 0 else ()
    groups = ProcessGroups(group, partitions)
    with torch.no_grad():
        return measure(_Prober(groups, device), "torch", name, size, nodes, threads)


def _nodes(group: dist.ProcessGroup, device: torch.device) -> int:
    """How many nodes a launcher has. Raises ValueError, on all ranks, for nodes of different
    sizes."""
    size, local = dist.get_world_size(group), os.environ.get("LOCAL_WORLD_SIZE", "")
    each = int(local) if size == dist.get_world_size() and local.isdigit() else 0
    ends = torch.tensor([each, -each], dtype=torch.int64, device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    most, least = int(ends[0]), -int(ends[1])
    if most != least:
        raise ValueError(
            f"nodes have {least} to {most} ranks (LOCAL_WORLD_SIZE); a probe is made between nodes"
            " of equally many"
        )
    return size // each if each and size % each == 0 else size


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
