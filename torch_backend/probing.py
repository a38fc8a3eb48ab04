"""How long messages take between the ranks of a group, measured with the requests that algorithms make.

torchrun --nproc-per-node=2 train.py
    probe = gradwire.torch_backend.probe()
    print(probe)
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.advise.probe import Probe, measure, partition
from gradwire.core.programs import Groups, Program
from gradwire.core.requests import all_to_all, reduce_sum
from gradwire.torch_backend.collectives import Collectives
from gradwire.torch_backend.exchange import NCCL
from gradwire.torch_backend.kernels import TorchOps
from gradwire.torch_backend.process_groups import ProcessGroups, given_or_default
from gradwire.torch_backend.program import Step

ITEM = 4  # bytes of float32
#: Rows of the matrices that are multiplied while a message is on its way.
ROWS = 256


def probe(group: dist.ProcessGroup | None = None, *, nodes: int | None = None) -> Probe:
    """Measure latency and bandwidth of a group, in some seconds. To be called on all of its ranks; all of them are told the same.

    Args:
        group: whose ranks; None is the default group. On NCCL messages are of CUDA tensors, on the current device.
        nodes: on how many machines they are, in order. None: as torchrun says (LOCAL_WORLD_SIZE); of other groups than the default one each
            rank is taken to be on a machine of its own.

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
        found = measure(_Prober(groups, device), "torch", name, size, nodes)
    for own in partitions:
        dist.destroy_process_group(groups[own])
    return found


def _nodes(group: dist.ProcessGroup) -> int:
    size, local = dist.get_world_size(group), os.environ.get("LOCAL_WORLD_SIZE", "")
    everybody = size == dist.get_world_size()
    return size // int(local) if everybody and local.isdigit() and int(local) and size % int(local) == 0 else size


class _Prober:
    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._device = device
        self._group = groups.whole
        self._step = Step(Collectives(groups, TorchOps(device)))

    def all_reduce(self, nbytes: int, groups: Groups | None, repeats: int) -> float:
        x = torch.zeros(max(1, nbytes // ITEM), device=self._device)
        return self._median(lambda: self._run(_all_reduce(x, groups)), repeats)

    def exchange(self, nbytes: int, groups: Groups | None, repeats: int) -> float:
        size = len(groups[0]) if groups else dist.get_world_size(self._group)
        x = torch.zeros(size, max(1, 2 * nbytes // ITEM // size), device=self._device)
        return self._median(lambda: self._run(_exchange(x, groups)), repeats)

    def overlap(self, nbytes: int, groups: Groups | None) -> float:
        x = torch.zeros(max(1, nbytes // ITEM), device=self._device)
        matrix = torch.full((ROWS, ROWS), 1.0 / ROWS, device=self._device)
        product = torch.empty_like(matrix)

        def compute(times: int) -> None:
            for _ in range(times):
                torch.mm(matrix, matrix, out=product)

        def both(times: int) -> None:
            self._step.begin()
            self._step.start(_all_reduce(x, groups))
            compute(times)
            self._step.finish()

        alone = self._median(lambda: self._run(_all_reduce(x, groups)), 5)
        unit = self._median(lambda: compute(20), 5) / 20
        times = max(1, int(alone / unit))
        computing = self._median(lambda: compute(times), 5)
        together = self._median(lambda: both(times), 5)
        return (alone + computing - together) / min(alone, computing)

    def _run(self, program: Program[Tensor]) -> None:
        self._step.begin()
        self._step.start(program)
        self._step.finish()

    def _median(self, run: Callable[[], None], repeats: int) -> float:
        """Seconds, on the slowest rank."""
        found = []
        for _ in range(repeats):
            self._meet()
            began = time.perf_counter()
            run()
            self._settle()
            found.append(time.perf_counter() - began)
        slowest = torch.tensor(statistics.median(found), dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return float(slowest)

    def _meet(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


async def _all_reduce(x: Tensor, groups: Groups | None) -> Tensor:
    return await reduce_sum(x, out=x, watched=False, groups=groups)


async def _exchange(x: Tensor, groups: Groups | None) -> Tensor:
    (received,) = await all_to_all(x, groups=groups)
    return received
