"""How what a step needs grows with ranks, tensors and leaves, beside plain DDP and `pmean`.

    make bench-scale                                          # a quarter of an hour on two cores; writes benchmarks/results/scale.json
    python benchmarks/scale --only leaves --leaves 100 400    # one part; the others stay as they are in the file
    python benchmarks/scale --only pages                      # docs/evidence.md and docs/performance.md, from what is in the file

Counts (operations, bytes, requests, equations) are exact. Seconds are processor time, of the rank
that needs most. Each curve has the exponent of the power of the size that fits it, and is held to
its peer's: no more than 0.1 above. Parts:

- counted: one imagined rank of many, on torch's dispatcher alone: operations of a step, and the
  bytes of its plan.
- ranks: real processes over Gloo: requests to the store, bytes, processor time.
- tensors: two real processes with more and more small tensors.
- plans: seconds of `gradwire.plan`.
- leaves: equations, tracing and compiling in JAX.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
from measuring import save  # noqa: E402

from scale import counted, leaves, real  # noqa: E402
from scale.curves import Curve  # noqa: E402
from scale.pages import fill, table  # noqa: E402

PARTS = ("counted", "ranks", "tensors", "plans", "leaves")


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python benchmarks/scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--only", nargs="+", choices=(*PARTS, "pages"), default=[*PARTS, "pages"], metavar="PART"
    )
    p.add_argument(
        "--imagined",
        nargs="+",
        type=int,
        default=[8, 64, 512, 4096],
        help="ranks of which one is there",
    )
    p.add_argument("--ranks", nargs="+", type=int, default=[4, 16, 64], help="real ones")
    p.add_argument("--of", type=int, default=40, help="tensors, where ranks grow")
    p.add_argument("--tensors", nargs="+", type=int, default=[100, 1_000, 10_000])
    p.add_argument(
        "--planned",
        nargs="+",
        type=int,
        default=[100, 1_000, 8_000, 50_000],
        help="tensors of plans",
    )
    p.add_argument(
        "--leaves",
        nargs="+",
        type=int,
        default=[100, 400, 1_000],
        help="of which equations are counted",
    )
    p.add_argument(
        "--compiled",
        nargs="*",
        type=int,
        default=[100, 400, 1000],
        help="leaves that are compiled too",
    )
    p.add_argument("--output", type=Path, default=HERE.parent / "results" / "scale.json")
    p.add_argument(
        "--page",
        type=Path,
        default=ROOT / "docs" / "evidence.md",
        help="with a table between marks",
    )
    p.add_argument(
        "--short-page",
        type=Path,
        default=ROOT / "docs" / "performance.md",
        help="with a short one",
    )
    return p.parse_args()


def main() -> None:
    args = parse()
    began = time.perf_counter()

    def said(what: str) -> None:
        print(f"[{time.perf_counter() - began:.0f} s] {what}", file=sys.stderr, flush=True)

    parts: dict[str, Callable[[], list[Curve]]] = {
        "counted": lambda: counted.of_ranks(args.imagined, args.of, said),
        "ranks": lambda: real.of_ranks(args.ranks, args.of, said),
        "tensors": lambda: real.of_tensors(args.tensors, said),
        "plans": lambda: counted.of_plans(args.planned, said),
        "leaves": lambda: leaves.of_leaves(args.leaves, args.compiled, said),
    }
    known = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    for part in PARTS:
        if part not in args.only:
            continue
        rows = [{"measured": part} | curve.row() for curve in parts[part]()]
        known = sorted(
            [*(row for row in known if row["measured"] != part), *rows],
            key=lambda r: PARTS.index(r["measured"]),
        )
        versions = (
            f"Python {platform.python_version()}, torch {version('torch')}, jax {version('jax')}"
        )
        result = {
            "command": "python benchmarks/scale",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {versions}",
            "rows": known,
        }
        save(result, args.output)  # each part as soon as it is done
    print(table(known))
    above = [
        f"{row['subject']}, {row['what']}, {row['part']}: {row['exponent']:.2f}, {row['peer']:.2f}"
        for row in known
        if not row["holds"]
    ]
    print(
        f"{len(known) - len(above)} of {len(known)} curves hold",
        *(f"  above: {each}" for each in above),
        sep="\n",
    )
    if "pages" in args.only:
        fill(args.page, args.short_page, known)


if __name__ == "__main__":
    main()
