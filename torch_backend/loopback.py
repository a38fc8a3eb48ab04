"""What a method costs on this device: its own program, at work on gradients of a model's shapes, with messages that come back at once.

    cost = method_cost(PowerSGD(4), specs, replicas=16, device=torch.device("cuda"))
    print(cost.compute)

Replicas are imagined: each of the others sends what this one sends. Nothing is communicated, and no process group is needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gradwire.core.advise.cost import Cost, Group, Round, ddp_buckets
from gradwire.core.algorithm import Algorithm
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import DryRun, dry_run
from gradwire.core.plan.memory import memory_bytes
from gradwire.core.plan.traffic import Message
from gradwire.core.programs import Groups
from gradwire.torch_backend.collectives import Collectives
from gradwire.torch_backend.drive import MESSAGE_BYTES, MESSAGE_BYTES_ON_DEVICE, Driver
from gradwire.torch_backend.exchange import Exchange
from gradwire.torch_backend.kernels import TorchOps
from gradwire.torch_backend.memory import owned
from gradwire.torch_backend.process_groups import ProcessGroups
from gradwire.torch_backend.program import Step

#: Steps before the clock starts, and at least and at most as many under it, as long as they take less than so many seconds.
WARM_UP, LEAST, MOST, LONG = 1, 2, 9, 0.3


def method_cost(
    algorithm: Algorithm | LocalSGD, specs: Mapping[str, Spec], replicas: int, device: torch.device | None = None
) -> Cost:
    """Run a method on this device, group by group as DDP's buckets come; groups of the same shapes once.

    Takes memory for the largest group, and what the method remembers of it, and some steps' time.

    Args:
        algorithm: after its `start_step`, which is set aside.
        specs: of the parameters, in the order of the model.
        replicas: of how many this one is one.
        device: None: the current CUDA device if there is one, or the CPU.

    Raises:
        ValueError: what the algorithm refuses, by name.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = memory_bytes(algorithm, specs, replicas)
    if isinstance(algorithm, LocalSGD):
        rounds = _local_rounds(algorithm, specs, replicas, device)
        return Cost(((Group(_bytes_of(specs), rounds),),), algorithm.cycle, overlaps=False, memory_bytes=kept)
    known: dict[Any, list[tuple[Round, ...]]] = {}
    cycle: list[list[Group]] = [[] for _ in range(algorithm.cycle)]
    ready = 0
    dry = dry_run(algorithm, specs, replicas)
    for names in message_groups(algorithm, specs, replicas, device):
        own = {name: specs[name] for name in specs if name in names}
        ready += _bytes_of(own)
        kind = tuple((tuple(spec.shape), spec.dtype) for spec in own.values()), _payloads(dry, names)
        if kind not in known:
            known[kind] = _rounds(algorithm, own, replicas, device)
        for step, rounds in zip(cycle, known[kind], strict=True):
            step.append(Group(ready, rounds))
    return Cost(tuple(map(tuple, cycle)), memory_bytes=kept)


def message_groups(
    algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int, device: torch.device
) -> list[set[str]]:
    """Names of the gradients that `register_comm_hook` averages together, in DDP's default buckets."""
    dry = dry_run(algorithm, specs, replicas)
    enough = MESSAGE_BYTES_ON_DEVICE if dry.memory.tensors and device.type != "cpu" else MESSAGE_BYTES
    groups: list[set[str]] = []
    payload = enough
    for bucket in ddp_buckets(specs):
        if payload >= enough:
            groups.append(set())
            payload = 0
        groups[-1] |= set(bucket)
        payload += sum(_payloads(dry, bucket))
    return groups


def _payloads(dry: DryRun, names: Iterable[str]) -> tuple[int, ...]:
    return tuple(message.nbytes for message in dry.only(names).cycle[0].messages)


def _bytes_of(specs: Mapping[str, Spec]) -> int:
    return sum(spec.nbytes for spec in specs.values())


def _rounds(
    algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int, device: torch.device
) -> list[tuple[Round, ...]]:
    """What is done with these gradients, in each step of a cycle."""
    clock = _Clock(device)
    driver = Driver(algorithm, specs, device, _Groups(replicas, clock))
    driver.memory.steps = algorithm.start_step
    given = _drawn(specs, device)
    gradients = {name: torch.empty_like(x) for name, x in given.items()}
    cycle: list[list[list[Round]]] = [[] for _ in range(algorithm.cycle)]
    began = time.perf_counter()
    for number in range((WARM_UP + MOST) * algorithm.cycle):
        done = number // algorithm.cycle - WARM_UP
        if number % algorithm.cycle == 0 and done >= LEAST and time.perf_counter() - began > LONG:
            break
        torch._foreach_copy_(list(gradients.values()), list(given.values()))
        clock.begin()
        driver.add(gradients, first=True, last=True)
        clock.end()
        if done >= 0:
            cycle[number % algorithm.cycle].append(clock.rounds)
    return [_typical(runs) for runs in cycle]


def _local_rounds(local: LocalSGD, specs: Mapping[str, Spec], replicas: int, device: torch.device) -> tuple[Round, ...]:
    """All averages of a cycle, one after the other."""
    clock = _Clock(device)
    ops = TorchOps(device)
    collectives = Collectives(_Groups(replicas, clock), ops)
    params = _drawn(specs, device)
    state = local.init(ops, params, replicas)
    rounds: list[Round] = []
    for step in local.acting_steps(replicas):
        runs: list[list[Round]] = []
        for _ in range(2):  # the first time memory is fresh
            engine = Step(collectives)
            engine.begin()
            clock.begin()
            running = engine.start(local.average(ops, {n: x.clone() for n, x in params.items()}, state, step, replicas))
            engine.finish()
            _, after, _ = running.result
            for name, memory in after.tensors.items():
                state.tensors[name] = owned(memory, state.tensors[name])
            clock.end()
            runs.append(clock.rounds)
        rounds += _typical(runs[1:])
    return tuple(rounds) or (Round(0.0),)


def _drawn(specs: Mapping[str, Spec], device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.randn(tuple(spec.shape), generator=generator, device=device).to(getattr(torch, spec.dtype))
        for name, spec in specs.items()
    }


class _Clock:
    """Takes down the rounds of a step. Time in which the device pretends to be others does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        self.rounds: list[Round] = []
        self._sent: list[Message] = []
        self._computed = self._meanwhile = 0.0
        self._waiting = False
        self._since = self._now()

    def sent(self, message: Message) -> None:
        """A message leaves."""
        if self._waiting:  # what was sent before has arrived
            self._close()
        if not self._sent:
            self._computed = self._lap()
        else:
            self._since = self._now()
        self._sent.append(message)

    def waited(self) -> None:
        """The answer to a message is asked for."""
        elapsed = self._lap()
        if not self._waiting:
            self._meanwhile, self._waiting = elapsed, True

    def end(self) -> None:
        """The step is over."""
        if self._sent:
            self._close()
        self.rounds.append(Round(self._lap()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens meanwhile takes no time."""
        began = self._now()
        yield
        self._since += self._now() - began

    def _close(self) -> None:
        self.rounds.append(Round(self._computed, tuple(self._sent), self._meanwhile))
        self._sent, self._meanwhile, self._waiting = [], 0.0, False

    def _lap(self) -> float:
        before, self._since = self._since, self._now()
        return self._since - before

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _typical(runs: Sequence[Sequence[Round]]) -> tuple[Round, ...]:
    """Of steps that all did the same, the median of each time."""
    return tuple(
        Round(median(r.compute for r in rounds), rounds[0].messages, median(r.meanwhile for r in rounds))
        for rounds in zip(*runs, strict=True)
    )


class _Work:
    """A message that has come back."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    def wait(self) -> bool:
        self._clock.waited()
        return True


class _Group:
    """A process group of imagined ranks, of which this is the first."""

    def __init__(self, size: int, groups: Groups | None, clock: _Clock) -> None:
        self._size, self._groups, self.clock = size, groups, clock

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        (x,) = tensors
        self.clock.sent(Message(x.nbytes, exchange=False, groups=self._groups))
        return _Work(self.clock)

    def exchanged(self, nbytes: int) -> _Work:
        """Half of an all-reduce of so many bytes."""
        self.clock.sent(Message(-(-nbytes // 2), exchange=True, groups=self._groups))
        return _Work(self.clock)


class _Groups(ProcessGroups):
    """Any partition of imagined ranks."""

    def __init__(self, size: int, clock: _Clock) -> None:
        self.clock = clock
        self._made: dict[Groups | None, Any] = {None: _Group(size, None, clock)}
        self.whole = self._made[None]

    @property
    def rank(self) -> int:
        return 0

    def __getitem__(self, groups: Groups | None) -> Any:
        if groups not in self._made:
            assert groups is not None
            self._made[groups] = _Group(len(groups[0]), groups, self.clock)
        return self._made[groups]

    def exchange(self, groups: Groups | None, device: torch.device) -> Exchange:
        return _Exchange(self[groups], device)


class _Exchange(Exchange):
    """Everybody sends what this rank sends."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.size, self.rank = group.size(), 0
        self.native = self.direct = False
        self._peers: _Group = group
        self._clock = self._peers.clock

    def gather(self, whole: Tensor, counts: Sequence[int]) -> list[Any]:
        with self._clock.paused():
            own, *others = torch.split(whole, list(counts))
            for part in others:
                part.copy_(own[: part.numel()])
        return [self._peers.exchanged(whole.nbytes)]

    def swap(self, given: Tensor, sent: Sequence[int], received: Tensor, counts: Sequence[int]) -> list[Any]:
        with self._clock.paused():
            own = torch.split(given, list(sent))[0]
            for part in torch.split(received, list(counts)):
                part.copy_(own[: part.numel()])
        return [self._peers.exchanged(given.nbytes)]
