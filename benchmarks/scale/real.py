"""Real ranks over Gloo on this machine: what each asks of the store, sends and computes, beside
plain DDP."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from given import HandedOver, drawn
from measuring import told_by_ranks
from shapes import elements
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from scale.curves import Curve, beside
from scale.subjects import GATHERED, methods, shapes

PEER = "DDP"
TIMEOUT = timedelta(minutes=5)
#: The first makes memory, DDP rebuilds its buckets after it.
WARM_UP, STEPS = 2, 5
#: How often a model is made and registered.
MODELS = 3


class CountingStore(dist.Store):
    """A client of the ranks' store that counts the requests for gradwire's keys and for others."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self.requests: Counter[bool] = Counter()
        #: Processor seconds that the process group took.
        self.seconds = 0.0

    def _asked(self, key: str) -> None:
        self.requests["gradwire" in key] += 1

    def set(self, key: str, value: Any) -> None:
        self._asked(key)
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        self._asked(key)
        return self._store.get(key)

    def add(self, key: str, amount: int) -> Any:
        self._asked(key)
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        self._asked(key)
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> Any:
        self._asked(keys[0])
        return self._store.check(keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._asked(keys[0])
        self._store.wait(keys, *timeout)

    def delete_key(self, key: str) -> Any:
        self._asked(key)
        return self._store.delete_key(key)

    def multi_get(self, keys: list[str]) -> Any:
        self._asked(keys[0])
        return self._store.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._asked(keys[0])
        self._store.multi_set(keys, values)

    def append(self, key: str, value: Any) -> None:
        self._asked(key)
        self._store.append(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def num_keys(self) -> Any:
        return self._store.num_keys()

    def has_extended_api(self) -> Any:
        return self._store.has_extended_api()

    @property
    def timeout(self) -> timedelta:
        return TIMEOUT

    def clone(self) -> CountingStore:
        return self


def counting_group() -> CountingStore:
    """Replace the process group by one whose store counts. Every rank calls this."""
    rank, size, port = dist.get_rank(), dist.get_world_size(), torch.zeros(1, dtype=torch.int64)
    server = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    )
    if server:
        port[0] = server.port
    dist.broadcast(port, 0)
    store = CountingStore(server or dist.TCPStore("127.0.0.1", int(port), is_master=False))
    dist.barrier()
    dist.destroy_process_group()
    cpu = time.process_time()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    store.seconds = time.process_time() - cpu
    return store


def written() -> int:
    """Bytes that this process has written, to sockets too (Linux)."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


def steps_of(
    name: str, given: Mapping[str, tuple[int, ...]], store: CountingStore | None, began: int
) -> dict[str, float]:
    """What registration and steps of a subject need of this rank. `began`: what its process group
    has asked of the store."""
    gradients = drawn(dict(given), seed=dist.get_rank())
    method = None if name == PEER else methods(dist.get_world_size())[name]
    model: Any = None
    seconds = []
    for _ in range(MODELS):
        model, handle, whole = None, None, HandedOver(dict(given))
        gc.collect()  # DDP, hook and parameters hold each other
        dist.barrier()
        cpu, asked = time.process_time(), store.requests[True] if store else 0
        model = DistributedDataParallel(whole)
        handle = None if method is None else gw.register_comm_hook(model, method)
        seconds.append(time.process_time() - cpu)
    group = store.seconds if store else 0.0
    found = {"processor seconds to begin": group + statistics.median(seconds)}
    seconds = []
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            bytes_before, counted = written(), handle.stats().bytes_sent if handle else 0
        dist.barrier()
        cpu = time.process_time()
        model(gradients).backward()
        if step >= WARM_UP:
            seconds.append(time.process_time() - cpu)
    found["processor seconds of a step"] = statistics.median(seconds)
    found["bytes written in a step"] = (written() - bytes_before) / STEPS
    sent = (handle.stats().bytes_sent - counted) / STEPS if handle else 4 * elements(given)
    found["bytes of a step"] = sent
    if store:
        found["store requests, group included"] = began + store.requests[True] - asked
    return found


def work(
    tell: Callable[[Any], None],
    names: Sequence[str],
    given: Mapping[str, tuple[int, ...]],
    counts: bool,
) -> None:
    """Every subject in turn. Every rank calls this; what it needs most on any rank is told."""
    store = counting_group() if counts else None
    began = store.requests[False] if store else 0
    for name in names:
        found = steps_of(name, given, store, began)
        most = torch.tensor(list(found.values()), dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        tell({"subject": name, **dict(zip(found, most.tolist(), strict=True))})


def measured(
    part: str,
    sizes: Sequence[int],
    names: Sequence[str],
    run: Callable[[int], Any],
    said: Callable[[str], None],
) -> list[Curve]:
    """The curves of what `run(size)` tells, beside those of DDP."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for size in sizes:
        for found in run(size):
            subject = found.pop("subject")
            said(f"{size:,} {part}: {subject}")
            for what, value in found.items():
                values.setdefault((subject, what), {})[size] = value
    grows = {"bytes of a step", "bytes written in a step"}
    curves = [
        Curve(
            part,
            subject,
            what,
            own,
            gathered=part == "ranks" and what in grows and subject in GATHERED,
        )
        for (subject, what), own in values.items()
    ]
    return beside(curves, PEER)


def of_ranks(ranks: Sequence[int], tensors: int, said: Callable[[str], None]) -> list[Curve]:
    """Requests, bytes and processor time of a rank, against the number of ranks."""
    names = [PEER, *methods(max(ranks))]

    def run(size: int) -> Any:
        return told_by_ranks(work, names, shapes(tensors, width=256), True, replicas=size)

    return measured("ranks", ranks, names, run, said)


def of_tensors(tensors: Sequence[int], said: Callable[[str], None]) -> list[Curve]:
    """The same of two ranks, against the number of tensors."""
    names = [PEER, *(name for name in methods(2) if name != "TwoLevel")]

    def run(size: int) -> Any:
        return told_by_ranks(work, names, shapes(size, width=32), False)

    return measured("tensors", tensors, names, run, said)
