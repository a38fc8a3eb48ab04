"""The parts of the benchmark: which processes measure each, for how long, and what they have
printed so far."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.children import told
from gradwire.core.simulate.doctor.processes import as_host

HERE = Path(__file__).parent
#: Processes of a part in which messages are sent.
RANKS = 2
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """At most so many seconds of so many processes that run a script of this folder, with more in
    their environment."""

    seconds: float
    processes: int = 1
    script: str = "__main__.py"
    env: Mapping[str, str] = field(default_factory=dict)


_IN_JAX = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
#: The most important first.
PARTS = {
    "steps": Part(150, processes=RANKS),
    "hook": Part(110),
    "jax": Part(110, script="in_jax.py", env=_IN_JAX),
    "jax-steps": Part(90, processes=RANKS, script="in_jax.py", env=_IN_JAX),
    "doctor": Part(90, script="doctor.py"),
    # DDP can be captured only if nobody watches for errors of NCCL in the background.
    "graph": Part(40, env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
    "products": Part(20),
    "compiled": Part(90),
}


def run_part(name: str, seconds: float, keep: Callable[[Row], None], *, tiny: bool) -> None:
    """Calls `keep` after each row with the part as far as it is: its rows, those for which no time
    was left, the error that ended it, its seconds."""
    part, began = PARTS[name], time.monotonic()
    rows: dict[str, Row] = {}
    planned: list[str] = []
    failed: Row = {}

    def save() -> None:
        left_out = [each for each in planned if each not in rows]
        taken = round(time.monotonic() - began, 1)
        keep({"rows": list(rows.values()), "left_out": left_out, "seconds": taken} | failed)

    command = [str(HERE / part.script), "--worker", name, *(["--tiny"] if tiny else [])]
    with tempfile.TemporaryDirectory() as folder:
        try:
            for each in told(command, _places(part, folder), seconds):
                if isinstance(each, list):  # what there will be
                    planned = each
                else:
                    rows[each["row"]] = each
                    save()
                following = next((row for row in planned if row not in rows), "that is all")
                print(
                    f"{name} {len(rows)}/{len(planned)}: {following}", file=sys.stderr, flush=True
                )
        except TimeoutError:
            pass  # the other rows are left out
        except RuntimeError as error:
            failed["error"] = str(error)
    save()


def _places(part: Part, folder: str) -> list[dict[str, str]]:
    """What each process of a part is told of itself and the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {
            "BENCH_STORE": f"{folder}/store",
            "BENCH_PORT": str(free.getsockname()[1]),
            **part.env,
        }
    return [
        common
        | {"RANK": str(rank), "WORLD_SIZE": str(part.processes)}
        | (as_host(rank) if part.processes > 1 else {})
        for rank in range(part.processes)
    ]
