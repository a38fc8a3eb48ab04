"""DiLoCo between two hosts, with a message that takes half a period: what a step takes with overlap
and without, to one without a network.

    python benchmarks/network/diloco.py               # writes benchmarks/results/network-diloco.json, and network-diloco-trace.json.gz beside it

Linux, as root; see lab.py. The rate of the link is chosen so that a message takes half a period of
this machine's steps (and a whole one for `eager`). It takes longer than its bytes at that rate,
since TCP and Gloo do not fill a link: so it is timed alone, and the rate raised until it takes as
long as is said.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab import PORT, Lab, obstacle

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from measuring import save  # noqa: E402

#: What a step may take, to one without a network: with overlap, without (at least), and eager with
#: a message as long as a period.
GOALS = {"overlap": 1.10, "waiting": 1.4, "eager": 1.15}
#: So near has a message to be to the time that it is said to take, and so often is the rate changed
#: for that.
CLOSE, TRIES = 0.03, 4


def launch(rate: str | None, *options: str) -> Any:
    """The last line of rank 0, as JSON."""
    with Lab(2, rate) as lab:

        def command(host: int) -> list[str]:
            return [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes=2",
                    f"--node-rank={host}",
                    "--nproc-per-node=1",
                ),
                *(
                    f"--master-addr={lab.address(0)}",
                    f"--master-port={PORT}",
                    f"--local-addr={lab.address(host)}",
                ),
                *(str(HERE / "worker_diloco.py"), *options),
            ]

        return json.loads(lab.run(command, timeout=900)[0].strip().splitlines()[-1])


def rate_of(seconds: float, nbytes: int, size: list[str]) -> tuple[float, float]:
    """Mbit/s at which an all-reduce of so many bytes takes so long, and how long it takes then."""
    megabits, took = nbytes * 8 / seconds / 1e6, 0.0
    for _ in range(TRIES):
        took = launch(f"{megabits:.3f}mbit", *size, "--message", str(nbytes))["message_s"]
        if abs(took / seconds - 1) < CLOSE:
            break
        megabits *= took / seconds
    return megabits, took


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--width", type=int, default=1024, help="of the model's layers")
    p.add_argument("--period", type=int, default=20)
    p.add_argument("--repeats", type=int, default=7, help="periods of each subject, interleaved")
    p.add_argument("--output", type=Path, default=HERE.parent / "results" / "network-diloco.json")
    args = p.parse_args()
    if why_not := obstacle():
        raise SystemExit(f"No hosts: {why_not}")
    size = [
        "--width",
        str(args.width),
        "--period",
        str(args.period),
        "--repeats",
        str(args.repeats),
    ]
    alone = launch(None, *size, "--subjects", "alone")
    nbytes = alone["message_bytes"][0]
    rows: list[dict[str, Any]] = []
    for share, subjects in ((0.5, ["alone", "waiting", "overlap"]), (1.0, ["alone", "eager"])):
        seconds = share * args.period * alone["step_ms"]["alone"] / 1e3
        megabits, message = rate_of(seconds, nbytes, size)
        found = launch(
            f"{megabits:.3f}mbit",
            *size,
            "--subjects",
            *subjects,
            "--trace",
            str(args.output.with_name(f"{args.output.stem}-trace.json.gz")),
        )
        for subject, took in found["step_ms"].items():
            ratio = took / found["step_ms"]["alone"]
            row = {
                "subject": subject,
                "message": share,
                "message_ms": 1e3 * message,
                "rate_mbit": megabits,
            }
            rows.append(row | {"step_ms": took, "ratio": ratio})
            goal = GOALS.get(subject)
            print(
                f"a message of {share:g} periods ({message:.2f} s), {megabits:6.1f} Mbit/s  {subject:<8} {took:7.1f} ms  {ratio:5.3f} of no network"
                + (
                    f"  (goal {'at least' if subject == 'waiting' else 'at most'} {goal})"
                    if goal
                    else ""
                ),
                flush=True,
            )
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": alone["cores"],
        "torch": version("torch"),
    }
    save(
        {"machine": machine, "period": args.period, "message_bytes": nbytes, "rows": rows},
        args.output,
    )


if __name__ == "__main__":
    main()
