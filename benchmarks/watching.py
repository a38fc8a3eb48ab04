"""What it costs to watch a run: the notes of a step alone, and a step with them and without.

    python benchmarks/watching.py                                  # writes benchmarks/results/watching.json
    python benchmarks/watching.py --repeats 5 --output /tmp/w.json

One process, with messages that come back at once, so that nothing but the host's own work is seen.
The two kinds of step take turns. With a GPU the notes are CUDA events, and steps are those of the
host that launches them.
"""

from __future__ import annotations

import argparse
import platform
import timeit
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dry import PretendedGroup
from measuring import interleaved, save

from gradwire import PowerSGD
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.monitor.watcher import StepTimes

HERE = Path(__file__).parent
SHAPES = {f"{i}.weight": (64, 48) for i in range(4)} | {f"{i}.bias": (64,) for i in range(4)}


class Silent(StepTimes):
    """Notes nothing."""

    def begin(self) -> None: ...

    def now(self) -> None: ...

    def end(self) -> None: ...


def notes_of_a_step(times: StepTimes) -> None:
    """Those of a step with two messages."""
    times.begin()
    start = times.now()
    for _ in range(2):
        launched = times.now()
        times.waited(1, launched, times.now())
    times.worked(start)
    times.end()


def steps(device: torch.device, repeats: int) -> dict[str, float]:
    """Microseconds of the quickest step, by what is noted: of the same work anything slower is the
    machine."""

    def step(silent: bool) -> Any:
        gradients = {name: torch.randn(shape, device=device) for name, shape in SHAPES.items()}
        driver = Driver(PowerSGD(2), specs_of(gradients), device, PretendedGroup())
        if silent:
            driver.collectives.times = driver.watch.times = Silent(device)
        return lambda: driver.add(gradients, first=True, last=True)

    found = interleaved({"watched": step(False), "not watched": step(True)}, repeats)
    return {name: round(1e6 * min(seconds), 1) for name, seconds in found.items()}


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--repeats", type=int, default=3000, help="steps of each kind")
    p.add_argument("--output", type=Path, default=HERE / "results" / "watching.json")
    args = p.parse_args()
    torch.set_num_threads(1)
    rows = []
    for device in [torch.device("cpu")] + [torch.device("cuda", 0)] * torch.cuda.is_available():
        times = StepTimes(device)
        alone = min(
            timeit.repeat(
                partial(notes_of_a_step, times), number=100, repeat=args.repeats // 10 + 1
            )
        )
        row = {
            "device": device.type,
            "notes_us": round(1e4 * alone, 2),
            "step_us": steps(device, args.repeats),
        }
        print(row)
        rows.append(row)
    save(
        {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "rows": rows,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
