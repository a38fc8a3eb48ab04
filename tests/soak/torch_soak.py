"""Three real processes for thousands of steps, with random faults: `make soak-torch`.

    python -m tests.soak.torch_soak --steps 10000 --seed 7

Ranks are slow at random places of the backward pass, their gradients hold an inf or NaN now and
then, layers are frozen and trained again, and steps accumulate a random number of micro-batches.
The wrapper (DDP with a hook, or `DataParallel`) and the algorithm change from stretch to stretch,
with the memory of the algorithm taken along where it is the same. In between the ranks train by
themselves, with averages that are taken later, and end and go on while these are on their way.
After every 100 steps and every stretch the ranks compare, bit for bit, weights, moments of the
optimizer and all memory that must be equal; and after every step that was not finite, each of them
that nothing has changed.
"""

import argparse
import copy
import gc
import hashlib
import math
import os
import random
import resource
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD, WireDtype, diloco
from gradwire.torch_backend import DataParallel, local_sgd, register_comm_hook
from tests.launch import run_ranks
from tests.methods import METHODS, VARIANTS
from tests.parity.cases import TORCH_METHODS
from tests.soak.draw import fits

RANKS = 3
COMPARE_EVERY = 100
STRETCH = 250
#: Of a rank's gradient in a step.
BAD = 0.02
WIDTH = 24

#: Of the methods that differ in more than numbers, those for any model.
ALGORITHMS = [
    algorithm
    for algorithm in (METHODS[name].algorithm for name in TORCH_METHODS if name not in VARIANTS)
    if algorithm == AllReduce() or fits(algorithm)
]
#: Averages that are on their way while training goes on.
OVERLAPPED = [
    diloco(6, overlap=2, fragments=3),
    diloco(5, overlap=4, merge="progress", compressor=PowerSGD(2, min_compression_rate=1)),
    diloco(4, eager=True, fragments=2, compressor=WireDtype(AllReduce(), "int8")),
]


class Model(nn.Module):
    """Three branches, of which each step may train some."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.outer, self.scale = nn.Linear(WIDTH, 8), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        for layer in self.inner:
            x = x + torch.tanh(layer(x))
        return self.outer(x) * self.scale


class Training:
    """A model under a wrapper, on one rank, and everything that is random about it."""

    def __init__(self, seed):
        self.rank = dist.get_rank()
        self.shared, self.own = random.Random(seed), random.Random(f"{seed} {self.rank}")
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        counted = (
            "steps",
            "not finite",
            "frozen",
            "micro-batches",
            "delays",
            "comparisons",
            "resumed",
        )
        self.counts = dict.fromkeys(counted, 0)
        self.wrapped = None
        for p in self.model.parameters():
            p.register_hook(self._delay)

    def wrap(self, algorithm, ours, memory):
        """Begin a stretch."""
        self.wrapped = None
        # the wrapper before is gone, and what it had hung on the parameters is of no effect
        gc.collect()
        options = {"bucket_cap_mb": 0.003, "find_unused_parameters": True}
        if ours:
            self.wrapped = DataParallel(self.model, algorithm, first_bucket_mb=0.001, **options)
            handle = self.wrapped.handle
        else:
            self.wrapped = DistributedDataParallel(self.model, **options)
            handle = register_comm_hook(
                self.wrapped, algorithm, message_bytes=self.shared.choice([0, 1500, 1 << 20])
            )
        self.memory, self.algorithm = handle.rank_state_dict, algorithm
        if memory is not None:
            handle.load_state_dict(memory)

    def step(self):
        """One step, and what must be true after it on this rank."""
        frozen = [layer for layer in self.model.inner if self.shared.random() < 0.1]
        parts = self.shared.choice([1, 1, 2, 3])
        # All ranks draw for all, so that each knows whether the step will be finite.
        bad = [self.shared.random() < BAD for _ in range(dist.get_world_size())]
        for layer in frozen:
            layer.requires_grad_(False)
        before = copy.deepcopy(self._all()) if any(bad) else None
        self.optimizer.zero_grad()
        for part in range(parts):
            last = part == parts - 1
            with nullcontext() if last else self.wrapped.no_sync():
                loss = self._loss()
                if last and bad[self.rank]:
                    loss = (
                        loss
                        + self.own.choice([math.inf, math.nan, -math.inf])
                        * self.model.outer.weight[0, 0]
                    )
                loss.backward()
        finite = all(
            bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None
        )
        assert finite is not any(bad), f"finite: {finite}, bad: {bad}"
        if finite:
            self.optimizer.step()
        elif before is not None:
            after = self._all()
            after["memory"] |= {key: before["memory"][key] for key in ("step", "sent")}
            assert digest(after) == digest(before), (
                f"a step that was not finite has changed {self.algorithm}"
            )
        for layer in frozen:
            layer.requires_grad_(True)
        self.counts["steps"] += 1
        self.counts["not finite"] += any(bad)
        self.counts["frozen"] += len(frozen)
        self.counts["micro-batches"] += parts

    def train_apart(self, steps):
        """With DiLoCo whose messages overlap. Now and then the handle goes, and another takes over
        from each rank's own state."""
        local, handle = self.shared.choice(OVERLAPPED), None
        for _ in range(steps):
            if handle is None or self.shared.random() < 0.1:
                saved = handle and (
                    handle.rank_state_dict(),
                    copy.deepcopy(self.model.state_dict()),
                )
                if handle is not None:
                    handle._leave_optimizer()
                handle = local_sgd(self.model, self.optimizer, local)  # makes parameters equal
                if saved:
                    self.model.load_state_dict(saved[1])
                    handle.load_state_dict(saved[0])
                    self.counts["resumed"] += 1
            self.optimizer.zero_grad()
            self.wrapped = self.model
            self._loss().backward()
            self.optimizer.step()
            everyone = [None] * dist.get_world_size()
            outer = {} if local.eager else handle.outer_parameters()
            dist.all_gather_object(everyone, digest(outer))
            assert len(set(everyone)) == 1, f"{local}: outer parameters differ"
        handle.unregister()
        assert all(bool(p.isfinite().all()) for p in self.model.parameters())

    def compare(self):
        """All ranks hold the same bits. Raises AssertionError on all of them otherwise."""
        state = self._all()
        del state["memory"]["rank"]
        for memory in state["memory"]["tensors"].values():
            for key in self.algorithm.per_replica & memory.keys():
                del memory[key]
        mine = {name: digest(part) for name, part in state.items()}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        assert all(theirs == mine for theirs in everyone), (
            f"step {self.counts['steps']}, {self.algorithm}: {everyone}"
        )
        assert all(bool(p.isfinite().all()) for p in self.model.parameters())
        self.counts["comparisons"] += 1

    def _all(self):
        optimizer = self.optimizer.state_dict()["state"]
        return {"weights": self.model.state_dict(), "optimizer": optimizer, "memory": self.memory()}

    def _loss(self):
        data = torch.Generator().manual_seed(self.own.randrange(1 << 40))
        x = torch.randn(4, WIDTH, generator=data)
        return (self.wrapped(x) - torch.sin(3 * x[:, :8] + self.rank)).square().mean()

    def _delay(self, gradient):
        if self.own.random() < 0.05:
            self.counts["delays"] += 1
            time.sleep(self.own.expovariate(1000))
        return gradient


def digest(value):
    """Of all bits in nested dictionaries of tensors and numbers."""
    sha = hashlib.sha256()
    for path, x in torch.utils._pytree.tree_flatten_with_path(value)[0]:
        bits = (
            x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            if isinstance(x, Tensor)
            else b""
        )
        sha.update(f"{path} {(x.dtype, x.shape) if bits else x}".encode() + bits)
    return sha.hexdigest()


def work(steps, seed, stretch_steps):
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    training = Training(seed)
    start, memory = time.monotonic(), None
    for stretch in range(math.ceil(steps / stretch_steps)):
        # Each algorithm for two stretches: under one wrapper, then with what it has kept under the
        # other.
        algorithm, ours = ALGORITHMS[stretch // 2 % len(ALGORITHMS)], stretch % 2 == 1
        training.wrap(algorithm, ours, memory if ours else None)
        for _ in range(min(stretch_steps, steps - stretch * stretch_steps)):
            training.step()
            if training.counts["steps"] % COMPARE_EVERY == 0:
                training.compare()
        training.compare()  # the next wrapper begins with the weights of rank 0
        memory = training.memory()
        if ours:
            training.train_apart(stretch_steps)
        if training.rank == 0:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            now = f"{training.counts['steps']:>6} steps  {time.monotonic() - start:6.0f} s  {resident:4} MiB"
            print(f"{now}  {'DataParallel' if ours else 'DDP':12}  {algorithm}", flush=True)
    delays = torch.tensor(training.counts["delays"])
    dist.all_reduce(delays)
    if training.rank == 0:
        counts = training.counts | {"delays": int(delays)}
        print(
            "all ranks equal: " + ", ".join(f"{what} {n}" for what, n in counts.items()), flush=True
        )
    dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--steps", type=int, default=10_000)
    p.add_argument(
        "--seed",
        type=int,
        default=int(time.time()) % (1 << 30),
        help="default: another one each time",
    )
    p.add_argument(
        "--stretch", type=int, default=STRETCH, help="steps with one wrapper (default: %(default)s)"
    )
    p.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.work:
        work(args.steps, args.seed, args.stretch)
        return
    print(f"seed {args.seed}", flush=True)
    # DDP warns of steps in which no layer happened to be frozen
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    options = "--work", f"--steps={args.steps}", f"--seed={args.seed}", f"--stretch={args.stretch}"
    try:
        print(run_ranks(Path(__file__), RANKS, *options, timeout=6 * 3600))
    except AssertionError as failure:
        sys.exit(f"seed {args.seed}: {failure}")


if __name__ == "__main__":
    main()
