"""A rank on a host of a cell of the advice benchmark; started by `torchrun`. Prints its rows as the last
line.

Probe, steps alone and costs of methods are measured as an advice would, on all hosts at once, since
they share the machine. Then each method trains.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire.advising import method_costs, model_specs, step_compute
from gradwire.core.advise.advice import PLAIN, Advice, default_methods, name_of, weigh
from gradwire.core.advise.cost import Cost
from gradwire.core.advise.timeline import Compute
from gradwire.core.local_sgd.algorithm import LocalSGD

sys.path.insert(0, str(Path(__file__).parents[1]))
from advice.models import MODELS, train_step

#: Seconds for the steps of a method, and how many there are at least and at most.
LONG, LEAST, MOST = 1.5, 2, 7
#: What is predicted to take so many times longer than the fastest is measured in one step.
HOPELESS = 3.0


def methods(probe: Any) -> list[Any]:
    """Those of an advice that average in each step."""
    per_node = probe.replicas // probe.nodes if probe.nodes > 1 else 1
    return [each for each in default_methods(per_node) if not isinstance(each, LocalSGD)]


def calibrated(
    name: str, model: nn.Module, probe: Any, folder: Path
) -> tuple[Compute, list[tuple[Any, Cost]]]:
    """Steps alone, and costs: they do not depend on the network, so each number of hosts measures
    them once."""
    file = (
        folder
        / f"{name.replace(',', '').replace(' ', '-')}-{probe.replicas}-{probe.nodes}-{dist.get_rank()}.pickle"
    )
    known = torch.tensor(float(file.exists()))
    dist.all_reduce(known, dist.ReduceOp.MIN)
    if known:
        found: tuple[Compute, list[tuple[Any, Cost]]] = pickle.loads(file.read_bytes())
        return found
    dist.barrier()
    compute = step_compute(train_step(name, copy.deepcopy(model)), "torch")

    def side_by_side(chosen: Sequence[Any]) -> Iterable[Any]:
        for algorithm in chosen:
            dist.barrier()
            yield algorithm

    costs = method_costs(model_specs(model, "torch"), probe, methods(probe), side_by_side)
    dist.barrier()
    file.write_bytes(pickle.dumps((compute, costs)))
    return compute, costs


def measured(name: str, model: nn.Module, algorithm: Any, *, once: bool) -> float:
    """Median seconds of a training step, on the slowest host."""
    gc.collect()  # a DDP is a cycle, with its buckets; all ranks share this machine's memory
    ddp = DistributedDataParallel(copy.deepcopy(model))
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
        timed = times[1 if once or times[0] > LONG else 2 :]
        if len(timed) >= (1 if once or times[0] > 2 * LONG else LEAST) and (
            sum(timed) > LONG or len(timed) >= MOST or once
        ):
            return statistics.median(timed)


def row(
    name: str, advice: Advice, times: dict[str, float], compute: Compute, probe: Any
) -> dict[str, Any]:
    """What was predicted of a cell, and what was measured."""
    fastest = min(times, key=lambda method: times[method])
    return {
        "model": name,
        "compute_ms": compute.seconds * 1e3,
        "latency_us": probe.levels[0].latency * 1e6,
        "mbit_per_second": probe.levels[0].bandwidth * 8e-6,
        "overlap": probe.levels[0].overlap,
        "recommended": advice.recommended,
        "fastest": fastest,
        "to_fastest": times[advice.recommended] / times[fastest],
        "methods": [
            {
                "algorithm": method.algorithm,
                "predicted_ms": method.step * 1e3,
                "measured_ms": times[method.algorithm] * 1e3,
                "ratio": method.step / times[method.algorithm],
                "compression_ms": method.compression * 1e3,
                "exposed_ms": method.exposed * 1e3,
                "hidden_ms": method.hidden * 1e3,
            }
            for method in advice.methods
        ],
    }


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--models", nargs="+", required=True)
    p.add_argument("--calibrations", type=Path, required=True, help="a folder")
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    probe = gw.probe()
    found = []
    for name in args.models:
        model = MODELS[name][0]()
        compute, costs = calibrated(name, model, probe, args.calibrations)
        # Costs are of this host: the step is that of the slowest.
        slowest: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(slowest, (compute, costs))
        compute, costs = max(slowest, key=lambda own: own[0].seconds)
        # by time alone
        advice = weigh(costs, model_specs(model, "torch"), probe, compute, (math.inf,))
        best = min(method.step for method in advice.methods)
        times = {}
        for algorithm in methods(probe):
            expected = advice.method(name_of(algorithm)).step
            times[name_of(algorithm)] = measured(
                name, model, algorithm, once=expected > HOPELESS * best
            )
        found.append(row(name, advice, times, compute, probe))
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
