"""The device that is measured: its clock, its memory, its name, and the bandwidth of a copy."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

GIB = 1 << 30
#: Layers, width, vocabulary and context of the GPTs.
SIZES = {"125M": (12, 768, 50_257, 1024), "1.3B": (24, 2048, 50_257, 2048)}
TINY = {"tiny": (1, 64, 200, 16)}
#: Timed before the clock starts.
WARM_UP = 4


class Target:
    """A GPU, or the CPU at tiny sizes, which only shows that everything runs.

    Attributes:
        device: where tensors are.
        tiny: whether figures mean nothing.
        sizes: name of a GPT → layers, width, vocabulary, context.
    """

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny or not torch.cuda.is_available()
        self.device = torch.device("cpu") if self.tiny else torch.device("cuda", 0)
        self.sizes = TINY if self.tiny else SIZES
        if not self.tiny:
            torch.cuda.set_device(self.device)

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if not self.tiny:
            torch.cuda.synchronize(self.device)

    def seconds(
        self, run: Callable[[], object], most: int = 10, limit: float = 1.0, warm_up: int = WARM_UP
    ) -> list[float]:
        """Of each call, from an idle device to an idle device: at least 3 calls, at most `most`,
        none begun after `limit` seconds."""
        if self.tiny:
            most, warm_up = 1, min(warm_up, 3)
        for _ in range(warm_up):
            run()
        taken: list[float] = []
        self.settle()
        while len(taken) < most and (len(taken) < 3 or sum(taken) < limit):
            began = time.perf_counter()
            run()
            self.settle()
            taken.append(time.perf_counter() - began)
        return taken

    def kernel_ms(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Milliseconds on the device of one call, launched so often one after the other that
        launching does not matter; median of 5."""
        if self.tiny:
            return statistics.median(self.seconds(run)) * 1e3
        found = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / repeats)
        return float(statistics.median(found[2:]))

    def copy_bandwidth(self) -> float:
        """Bytes per second that a large copy reads and writes together."""
        source = torch.ones((1 << 14) if self.tiny else GIB // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / (self.kernel_ms(lambda: target.copy_(source)) / 1e3)

    def allocated(self) -> int:
        return 0 if self.tiny else torch.cuda.memory_allocated(self.device)

    def peak_of(self, run: Callable[[], object]) -> int | None:
        """Bytes that a call allocates at its peak, beyond what is there before it."""
        if self.tiny:
            run()
            return None
        self.settle()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = self.allocated()
        run()
        self.settle()
        return torch.cuda.max_memory_allocated(self.device) - before


def machine(target: Target) -> str:
    """What it was measured on."""
    cores = f"{_cpu()}, {os.cpu_count()} cores"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if target.tiny:
        return f"{cores}, {versions}"
    properties = torch.cuda.get_device_properties(target.device)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, {properties.multi_processor_count} SMs; {cores}; "
        f"{versions}, CUDA {torch.version.cuda}, NCCL {nccl}"
    )


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()


def error_of(error: BaseException) -> str:
    """One line for the file: a part that fails must not take the others with it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
