"""Steps that take turns, workers that say what they measured, and the file for all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPLICAS = 2
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}")
#: Rounds before the clock starts: buckets are rebuilt after the first.
WARM_UP = 3


def interleaved(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, by subject; the subjects take turns, and in every other round in reverse."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(WARM_UP + repeats):
        for name in list(steps)[:: 1 if round_ % 2 else -1]:
            began = time.perf_counter()
            steps[name]()
            if round_ >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def last_line(*command: str, **env: str) -> Any:
    """Run Python with these arguments; what a worker found is the last line that it prints, as JSON."""
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | env, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def save(result: dict[str, Any], path: Path) -> None:
    """Write what a benchmark found as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
