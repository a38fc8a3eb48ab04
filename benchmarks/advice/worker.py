"""A rank on a host of a cell of the advice benchmark; started by `torchrun`. Prints its rows as the last
line.

Probe, steps alone and costs of methods are measured as an advice would, on all hosts at once, since
they share the machine. Then each method trains, in two rounds over all of them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import pickle
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire.advising import method_costs, model_specs, step_compute
from gradwire.core.advise.advice import (
    PLAIN,
    Advice,
    MethodAdvice,
    default_methods,
    name_of,
    weigh,
)
from gradwire.core.advise.cost import Cost
from gradwire.core.advise.timeline import Compute
from gradwire.core.local_sgd.algorithm import LocalSGD

sys.path.insert(0, str(Path(__file__).parents[1]))
from advice.models import MODELS, train_step

#: Seconds for the steps of a method in a round, where each host has one rank and where it has
#: several, which wait for each other's cores; and how many there are at least and at most.
LONG, LONG_SHARED, LEAST, MOST = 0.8, 4.0, 2, 8
#: What is predicted to take so many times longer than the fastest is measured in one step.
HOPELESS = 3.0
#: By how much the loss may be higher: two of those that an advice names by itself, and by anything.
LIMITS = (0.005, 0.02, math.inf)


def methods(probe: Any) -> list[Any]:
    """Those of an advice that average in each step."""
    per_node = probe.replicas // probe.nodes if probe.nodes > 1 else 1
    return [each for each in default_methods(per_node) if not isinstance(each, LocalSGD)]


def calibrated(
    name: str, model: nn.Module, probe: Any, folder: Path
) -> tuple[Compute, list[tuple[Any, Cost]]]:
    """A step alone, and costs: they do not depend on the network, so each number of hosts measures
    them once."""
    plain_name = name.replace(",", "").replace(" ", "-")
    file = folder / f"{plain_name}-{probe.replicas}-{probe.nodes}.pickle"
    known = dist.get_rank() == 0 and file.exists()
    found: list[Any] = [pickle.loads(file.read_bytes()) if known else None]
    dist.broadcast_object_list(found, 0)
    if found[0] is None:
        found = [calibrate(name, model, probe)]
        if dist.get_rank() == 0:
            file.write_bytes(pickle.dumps(found[0]))
    return found[0]  # type: ignore[no-any-return]


def calibrate(name: str, model: nn.Module, probe: Any) -> tuple[Compute, list[tuple[Any, Cost]]]:
    """The step of the slowest rank where all take theirs at once, and the costs of methods there.

    Costs are measured on as many ranks as there are cores: what a rank does in the place of the
    others whose messages it imagines does not count, but would keep others from a core. Where ranks
    share cores a method takes as many times longer as a step does.
    """
    together = slowest_step(name, model, probe)
    cores = min(os.cpu_count() or 1, dist.get_world_size())
    few = dist.new_group(list(range(cores)))
    costs: list[tuple[Any, Cost]] = []
    apart = together
    if dist.get_rank() < cores:
        if cores < dist.get_world_size():
            apart = slowest_step(name, model, probe, few)

        def side_by_side(chosen: Sequence[Any]) -> Iterable[Any]:
            for algorithm in chosen:
                dist.barrier(few)
                yield algorithm

        costs = method_costs(model_specs(model, "torch"), probe, methods(probe), side_by_side)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (apart, costs))
    apart = every[0][0]
    shared = max(1.0, together.seconds / apart.seconds)
    by_rank = zip(*(own for _, own in every if own), strict=True)
    slowest = [max(own, key=lambda pair: pair[1].compute) for own in by_rank]
    return together, [(algorithm, times_longer(cost, shared)) for algorithm, cost in slowest]


def slowest_step(name: str, model: nn.Module, probe: Any, group: Any = None) -> Compute:
    """A step alone, of the slowest rank of a group whose ranks all take theirs at once."""
    dist.barrier(group)
    own = step_compute(train_step(name, copy.deepcopy(model)), probe)
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group)
    return max(every, key=lambda each: each.seconds)  # type: ignore[no-any-return]


def times_longer(cost: Cost, factor: float) -> Cost:
    """A method that computes so many times as long."""
    steps = (tuple(replace(g, compute=factor * g.compute) for g in step) for step in cost.steps)
    return replace(cost, steps=tuple(steps))


def train(
    name: str, model: nn.Module, algorithm: Any, *, once: bool, long: float = LONG
) -> list[float]:
    """Seconds of training steps, each on the slowest rank."""
    gc.collect()  # a DDP is a cycle, with its buckets; all ranks share this machine's memory
    # All ranks have built the same model.
    ddp = DistributedDataParallel(copy.deepcopy(model), init_sync=False)
    if algorithm != PLAIN:
        gw.register_comm_hook(ddp, algorithm)
    step = train_step(name, ddp)
    times: list[float] = []
    while True:
        dist.barrier()
        began = time.perf_counter()
        step()
        slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
        # The first makes the buckets, and what is allocated once; after it DDP makes them anew.
        timed = times[1 if once or times[0] > 1 else 2 :]
        if len(timed) >= (1 if once else LEAST) and (
            sum(timed) > long or len(timed) >= MOST or once
        ):
            return timed


def row(
    name: str, advice: Advice, rounds: dict[str, list[list[float]]], compute: Compute, probe: Any
) -> dict[str, Any]:
    """What was predicted of a cell, and what was measured."""
    rounds_ms = {m: [statistics.median(each) * 1e3 for each in of] for m, of in rounds.items()}
    return {
        "model": name,
        "compute_ms": compute.seconds * 1e3,
        "latency_us": probe.levels[0].latency * 1e6,
        "mbit_per_second": probe.levels[0].bandwidth * 8e-6,
        "overlap": probe.levels[0].overlap,
        "answers": [
            {
                "loss": None if choice.loss == math.inf else choice.loss,
                "recommended": choice.recommended,
                "allowed": [m.algorithm for m in advice.methods if allowed(m, choice.loss)],
            }
            for choice in advice.choices
        ],
        "methods": [
            {
                "algorithm": method.algorithm,
                "predicted_ms": method.step * 1e3,
                "measured_ms": statistics.geometric_mean(rounds_ms[method.algorithm]),
                "rounds_ms": rounds_ms[method.algorithm],
                "compression_ms": method.compression * 1e3,
                "exposed_ms": method.exposed * 1e3,
                "hidden_ms": method.hidden * 1e3,
            }
            for method in advice.methods
        ],
    }


def allowed(method: MethodAdvice, limit: float) -> bool:
    """Whether a method's loss is surely within a limit."""
    return method.algorithm == "plain" or (method.loss is not None and method.loss.bound <= limit)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--models", nargs="+", required=True)
    p.add_argument("--calibrations", type=Path, required=True, help="a folder")
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    probe = gw.probe()
    long = LONG if probe.replicas == probe.nodes else LONG_SHARED
    found = []
    for name in args.models:
        torch.manual_seed(0)
        model = MODELS[name][0]()
        compute, costs = calibrated(name, model, probe, args.calibrations)
        advice = weigh(costs, model_specs(model, "torch"), probe, compute, LIMITS)
        best = min(method.step for method in advice.methods)
        rounds: dict[str, list[list[float]]] = {m.algorithm: [] for m in advice.methods}
        for number in range(2):
            for algorithm in methods(probe):
                of = rounds[name_of(algorithm)]
                once = advice.method(name_of(algorithm)).step > HOPELESS * best
                if number == 0 or not once:
                    of.append(train(name, model, algorithm, once=once, long=long))
        found.append(row(name, advice, rounds, compute, probe))
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
