"""What a method costs on this device: its own program, at work on gradients of a model's shapes,
with messages that come back at once.

    cost = method_cost(PowerSGD(4), specs, replicas=16, device=torch.device("cuda"))
    print(cost.compute)

Replicas are imagined: each of the others sends what this one sends. Nothing is communicated, and no
process group is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.core.advise.cost import Cost, cost_of
from gradwire.core.advise.timing import seconds_in_cycle
from gradwire.core.algorithm import Algorithm
from gradwire.core.buckets.assignment import ddp_buckets
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol.groups import Groups
from gradwire.torch_backend.cpu.compiled import CODES, loops_for
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.engine.groups.point_to_point import Exchange
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.scheduler import run_alone
from gradwire.torch_backend.engine.step import MESSAGE_BYTES, MESSAGE_BYTES_ON_DEVICE, owned
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.torch_internals import foreach_copy_


def method_cost(
    algorithm: Algorithm | LocalSGD,
    specs: Mapping[str, Spec],
    replicas: int,
    device: torch.device | None = None,
) -> Cost:
    """Run a method on this device, group by group as DDP's buckets come; groups of the same shapes
    once.

    Takes memory for the gradients, what the method remembers of them, and some steps' time. Steps
    are eager: on CUDA those that are replayed take less.

    Args:
        algorithm: after its `start_step`, which is set aside.
        specs: of the parameters, in the order of the model.
        replicas: of how many this one is one.
        device: None: the current CUDA device if there is one, or the CPU.

    Raises:
        ValueError: what the algorithm refuses, by name.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = _Clock(device)
    groups = _Groups(replicas, clock)
    if isinstance(algorithm, LocalSGD):
        ops = TorchOps(device)
        ops.loops = loops_for(algorithm, specs, device, CODES)
        seconds = partial(_local_seconds, algorithm, Collectives(groups, ops), clock)
        return cost_of(algorithm, specs, replicas, seconds)
    driver = Driver(algorithm, specs, device, groups)
    driver.memory.steps = algorithm.start_step
    return cost_of(
        algorithm,
        specs,
        replicas,
        partial(_seconds, driver, clock),
        message_groups(algorithm, specs, replicas, device),
    )


def message_groups(
    algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int, device: torch.device
) -> list[set[str]]:
    """Names of the gradients that `register_comm_hook` averages together, in DDP's default
    buckets."""
    dry = dry_run(algorithm, specs, replicas)
    enough = (
        MESSAGE_BYTES_ON_DEVICE if dry.memory.tensors and device.type != "cpu" else MESSAGE_BYTES
    )
    groups: list[set[str]] = []
    payload = enough
    for bucket in ddp_buckets(specs):
        if payload >= enough:
            groups.append(set())
            payload = 0
        groups[-1] |= set(bucket)
        payload += sum(message.nbytes for message in dry.only(bucket).cycle[0].messages)
    return groups


def _seconds(driver: Driver, clock: _Clock, specs: Mapping[str, Spec]) -> list[float]:
    """The seconds of each step in a cycle, with these gradients."""
    given = _drawn(specs, driver.ops.device)
    gradients = {name: torch.empty_like(x) for name, x in given.items()}

    def step() -> float:
        foreach_copy_(list(gradients.values()), list(given.values()))
        return clock.time(lambda: driver.add(gradients, first=True, last=True))

    return seconds_in_cycle(step, driver.algorithm.cycle)


def _local_seconds(
    local: LocalSGD, collectives: Collectives, clock: _Clock, specs: Mapping[str, Spec]
) -> Iterator[float]:
    """The seconds of each average in a cycle, decoding and the outer step included, which come
    later where it overlaps."""
    ops, replicas, local = collectives.ops, collectives.groups.whole.size(), local.at_once()
    params = _drawn(specs, ops.device)
    state = local.init(ops, params, replicas)

    def average(step: int) -> None:
        copies = {name: x.clone() for name, x in params.items()}
        _, after, _ = run_alone(collectives, local.average(ops, copies, state, step, replicas))
        for name, memory in after.tensors.items():
            state.tensors[name] = owned(memory, state.tensors[name])

    for step in local.acting_steps(replicas):
        average(step)  # the first time memory is fresh
        yield clock.time(partial(average, step))


def _drawn(specs: Mapping[str, Spec], device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: (
            torch.randn(spec.shape, generator=generator, dtype=torch.float32, device=device).to(
                getattr(torch, spec.dtype)
            )
        )
        for name, spec in specs.items()
    }


class _Clock:
    """Time in which the device pretends to be others does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._paused = 0.0

    def time(self, run: Callable[[], object]) -> float:
        """Seconds of something."""
        self._paused = 0.0
        began = self._now()
        run()
        return self._now() - began - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = self._now()
        yield
        self._paused += self._now() - began

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Arrived:
    """A message that is there at once."""

    def wait(self) -> bool:
        return True


class _Group:
    """A process group of imagined ranks, of which this is the first."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Arrived:
        return _Arrived()


class _Groups(ProcessGroups):
    """Any partition of imagined ranks."""

    in_one_process = True

    def __init__(self, size: int, clock: _Clock) -> None:
        self.whole: Any = _Group(size)
        self._clock = clock

    @property
    def rank(self) -> int:
        return 0

    def __getitem__(self, groups: Groups | None) -> Any:
        return self.whole if groups is None else _Group(len(groups[0]))

    def exchange(self, groups: Groups | None, device: torch.device) -> Exchange:
        return _Exchange(self[groups], self._clock)


class _Exchange(Exchange):
    """Everybody sends what this rank sends."""

    def __init__(self, group: Any, clock: _Clock) -> None:
        self.group, self._clock = group, clock
        self.size, self.rank = group.size(), 0
        self.native = self.direct = False

    def gather(self, whole: Tensor, counts: Sequence[int]) -> list[Any]:
        own, *others = torch.split(whole, list(counts))
        return self._copied(own, others)

    def swap(
        self, given: Tensor, sent: Sequence[int], received: Tensor, counts: Sequence[int]
    ) -> list[Any]:
        return self._copied(torch.split(given, list(sent))[0], torch.split(received, list(counts)))

    def _copied(self, own: Tensor, others: Sequence[Tensor]) -> list[Any]:
        with self._clock.paused():
            for part in others:
                part.copy_(own[: part.numel()])
        return []
