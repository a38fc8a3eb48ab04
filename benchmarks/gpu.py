"""What compression costs on a GPU: gradwire's PowerSGD against torch's hook and against the device's memory bandwidth, in torch and in JAX.

    python benchmarks/gpu.py                 # some minutes on a GPU; writes benchmarks/results/gpu.json and prints tables
    python benchmarks/gpu.py --tiny --output /tmp/gpu.json

For the gradients of GPTs of 125 million and 1.3 billion parameters, at ranks 1, 4 and 32:

- compress: time of gradwire's hook and of torch's, one process (NCCL where there is a GPU), one bucket, taking turns; medians. The floor
  is eight passes over the gradient at the bandwidth that an in-place multiplication reaches. Kernels launched and times the host waited for the
  device, as the profiler and `torch.cuda.set_sync_debug_mode` see them.
- gloo: steps of two processes that share the device, each with the whole of it.
- jax: `benchmarks/jax_step.py` on the same device, where JAX has a build for it.

Without a GPU, or with --tiny, sizes are tiny, everything is on the CPU, and the figures mean nothing: it only shows that the script runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compress import PASSES, Subject, in_turns, ours, settle, theirs, time_ratio
from given import GivenGradients, drawn
from measuring import TORCHRUN, interleaved, last_line, save
from shapes import elements, gpt
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from gradwire import PowerSGD
from gradwire.torch_backend import register_comm_hook

HERE = Path(__file__).parent
GIB = 1 << 30
#: layers, width, vocabulary, context
SIZES = {"125M": (12, 768, 50_257, 1024), "1.3B": (24, 2048, 50_257, 2048)}
TINY = {"tiny": (1, 64, 200, 16)}
PARTS = ("compress", "gloo", "jax")
#: Copies of the gradients that two subjects keep at once: parameters, buckets, errors, and what torch's hook allocates.
COPIES = 10
#: What the runtime calls a host that waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
Shapes = dict[str, tuple[int, ...]]


def size_of(shapes: Shapes) -> int:
    return elements(shapes) * 4


def floor_ms(nbytes: int, device: torch.device, repeats: int) -> float:
    """Time of eight passes over the gradient: a multiplication in place is two."""
    x = torch.ones(nbytes // 4, device=device)
    seconds = []
    for _ in range(3 + repeats):
        settle(device)
        began = time.perf_counter()
        x.mul_(1.0)
        settle(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:]) * PASSES / 2 * 1e3


@contextmanager
def recorded(device: torch.device) -> Iterator[Counter[str]]:
    """What the profiler saw by name, once the context is left. Kernels are counted under "kernels" as well."""
    seen: Counter[str] = Counter()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        yield seen
    for event in profiler.events():
        seen[event.name] += 1
        if event.device_type.name == "CUDA" and not event.name.startswith(("Mem", "mem")):
            seen["kernels"] += 1


def launches(subject: Subject, given: dict[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Kernels, and waits of the host, in one call of the hook; None for what only a GPU has."""
    if device.type != "cuda":
        return {"kernels": None, "host_waits": None, "host_waits_warned": None}
    with recorded(device) as idle:  # the profiler waits, too
        pass
    seen: Counter[str] = Counter()

    class Recording:
        """Begins and ends with the hook, as `Subject` has it."""

        def __enter__(self) -> None:
            self._context = recorded(device)
            self.seen = self._context.__enter__()

        def __exit__(self, *error: Any) -> None:
            self._context.__exit__(*error)
            seen.update(self.seen)

    subject.profiler = Recording()
    subject.step(given)

    class Warned:
        """Torch warns of its own calls that make the host wait."""

        def __enter__(self) -> None:
            torch.cuda.set_sync_debug_mode("warn")

        def __exit__(self, *error: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    subject.profiler = Warned()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        subject.step(given)
    subject.profiler = None
    return {
        "kernels": seen["kernels"],
        "host_waits": sum(max(0, seen[name] - idle[name]) for name in WAITS),
        "host_waits_warned": sum("synchroniz" in str(w.message) for w in heard),
    }


def compress(shapes: Shapes, rank: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Both hooks at one rank."""
    given = drawn(shapes, device=device)
    subjects = {"gradwire": ours(shapes, rank, device), "torch": theirs(shapes, rank, device)}
    seconds = in_turns(subjects, given, repeats)
    return {
        name: {"compress_ms": statistics.median(seconds[name]) * 1e3, **launches(subject, given, device)}
        for name, subject in subjects.items()
    } | {"time_ratio": time_ratio(seconds)}


def compress_all(sizes: dict[str, Any], ranks: list[int], repeats: int, device: torch.device) -> list[dict[str, Any]]:
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    rows = []
    for name, size in sizes.items():
        shapes = gpt(*size)
        floor = floor_ms(size_of(shapes), device, repeats)
        for rank in ranks:
            row: dict[str, Any] = {"size": name, "rank": rank, "collectives": backend, "floor_ms": floor}
            row |= compress(shapes, rank, repeats, device)
            rows.append(row)
            for who in ("gradwire", "torch"):
                r = row[who]
                print(
                    f"{name:>5}  rank {rank:>2}  {who:<8}  {r['compress_ms']:8.2f} ms, {r['compress_ms'] / floor:5.2f} of eight passes"
                    f" ({floor:.2f} ms)  kernels {r['kernels']}  host waits {r['host_waits']}, warned of {r['host_waits_warned']}",
                    flush=True,
                )
            gc.collect()  # a DDP module lies in a cycle of references, with all its buffers
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()
    return rows


def shared(size: tuple[int, ...], repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Steps of this process among those of the default group, all on one device."""
    shapes = gpt(*size)
    given = drawn(shapes, device=device)

    def ddp(cap: float = 25) -> DistributedDataParallel:
        model = GivenGradients(shapes).to(device)
        return DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)

    models = {"DDP": ddp(), "torch's powerSGD_hook, rank 4": ddp(100_000), "PowerSGD, rank 4": ddp()}
    state = torchs.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    models["torch's powerSGD_hook, rank 4"].register_comm_hook(state, torchs.powerSGD_hook)
    register_comm_hook(models["PowerSGD, rank 4"], PowerSGD(4))

    def step(model: DistributedDataParallel) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=False)
            model(given).backward()
            settle(device)
            dist.barrier()  # a step is over when the slower process is done

        return run

    seconds = interleaved({name: step(model) for name, model in models.items()}, repeats)
    return [{"subject": name, "step_ms": statistics.median(taken) * 1e3} for name, taken in seconds.items()]


def gloo(tiny: bool, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows of two processes; in tiny size of this one alone."""
    if tiny:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        rows = shared(TINY["tiny"], repeats, device)
        dist.destroy_process_group()
    else:
        rows = last_line(*TORCHRUN, str(HERE / "gpu.py"), "--worker", "--repeats", str(repeats))
    for r in rows:
        print(f"Gloo, one device, {1 if tiny else 2} processes  {r['subject']:<32}  {r['step_ms']:8.2f} ms", flush=True)
    return rows


def in_jax(sizes: dict[str, Any], ranks: list[int], repeats: int, tiny: bool) -> dict[str, Any]:
    """What `jax_step.py` finds, or why it found nothing."""
    found: dict[str, Any] = {}
    for name, (layers, width, vocabulary, context) in sizes.items():
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "jax.json"
            command = [str(HERE / "jax_step.py"), "--platform", "cpu" if tiny else "cuda", "--compile-layers", "0"]
            command += ["--layers", str(layers), "--width", str(width), "--vocabulary", str(vocabulary)]
            command += ["--context", str(context), "--ranks", *map(str, ranks), "--repeats", str(repeats)]
            environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            command = [sys.executable, *command, "--output", str(output)]
            status = subprocess.run(command, env=environment, check=False).returncode
            found[name] = (
                json.loads(output.read_text()) if not status else f"jax_step.py ended with {status}; see above"
            )
    return found


def main() -> None:
    p = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    p.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="of the GPT")
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 32], help="PowerSGD ranks")
    p.add_argument("--repeats", type=int, default=10, help="timed steps of each")
    p.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, as where there is no GPU")
    p.add_argument("--output", type=Path, help="benchmarks/results/gpu.json; where sizes are tiny, none")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    tiny = args.tiny or not torch.cuda.is_available()
    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    if not tiny:
        torch.cuda.set_device(device)
    if args.worker:
        dist.init_process_group("gloo")
        found = shared(SIZES["125M"], args.repeats, device)
        dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)
        return
    name = "CPU" if tiny else torch.cuda.get_device_name(device)
    sizes: dict[str, Any] = TINY if tiny else {size: SIZES[size] for size in args.sizes}
    left_out: list[str] = []
    if tiny:
        why = "--tiny" if args.tiny else "no GPU"
        print(f"{why}: tiny sizes on the CPU; the figures mean nothing")
        args.ranks, args.repeats = args.ranks[:1], 1
    else:
        memory = torch.cuda.get_device_properties(device).total_memory
        left_out = [s for s, size in sizes.items() if size_of(gpt(*size)) * COPIES > memory]
        sizes = {s: size for s, size in sizes.items() if s not in left_out}
        for size in left_out:
            print(f"{size} is left out: {COPIES} times its gradients do not fit into {memory / GIB:.0f} GiB")
    result: dict[str, Any] = {
        "command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]),
        "machine": f"{name}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "tiny": tiny,
        "left_out": left_out,
        "repeats": args.repeats,
    }
    if "compress" in args.parts:
        result["compress"] = compress_all(sizes, args.ranks, args.repeats, device)
    if "gloo" in args.parts:
        result["gloo"] = gloo(tiny, args.repeats, device)
    if "jax" in args.parts:
        result["jax"] = in_jax(sizes, args.ranks, args.repeats, tiny)
    output = args.output or (None if tiny else HERE / "results" / "gpu.json")
    if output:
        save(result, output)


if __name__ == "__main__":
    main()
