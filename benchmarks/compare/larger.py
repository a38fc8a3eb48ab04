"""One row of each family on a model of 3.3 million parameters with 4 replicas, learning rates
searched: a call of `gradwire compare`.

    python benchmarks/compare/larger.py            # some three hours on two quiet cores; after Ctrl-C the same line goes on
    python benchmarks/compare/larger.py --table larger-codes        # low rank in codes, beside uncompressed averages: 80 minutes
    python benchmarks/compare/larger.py --steps 6 --seeds 1 --runs /tmp/larger.json --results "" --page ""      # whether it runs

Runs are kept in benchmarks/results/compare-TABLE-runs.json; what follows from them is written to
compare-TABLE.json beside it, and the table to docs/frontier.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "examples")]
from frontier.runs import Settings  # noqa: E402
from frontier.subjects import TILES  # noqa: E402
from measuring import save, write_part  # noqa: E402

from compare.training import training_of  # noqa: E402
from gradwire.core.advise.compare.comparison import Comparison  # noqa: E402
from gradwire.torch_backend import Training  # noqa: E402

STEPS, REPLICAS, SEEDS, PERIOD = 300, 4, 3, 30
SETTINGS = Settings(steps=STEPS, width=256, layers=4, context=64, batch=4, windows=128)
RATE, FACTORS = 0.002, ("0.5", "1", "2")
#: The best row of each family on the frontier; of low rank two, since the question is which rank
#: suffices.
METHODS = (
    "WireDtype(AllReduce(), 'int8')",
    "Quantize('int4')",
    "PowerSGD(rank=16)",
    "PowerSGD(rank=4)",
    f"TopK(64, per={TILES})",
    f"LocalSGD({PERIOD})",
    f"diloco({PERIOD})",
)
#: Mark of a table in the page → its rows, beside uncompressed averages.
TABLES = {
    "larger": METHODS,
    "larger-codes": (
        "WireDtype(PowerSGD(rank=16), 'int8')",
        "WireDtype(PowerSGD(rank=16), 'int4')",
        "WireDtype(PowerSGD(rank=4), 'int8')",
    ),
}


def make(seed: int) -> Training:
    """What is trained; `gradwire compare larger:make` calls it."""
    return training_of(SETTINGS, RATE, seed)


def page(found: Comparison) -> str:
    """The table: what each method sends in a step, its learning rate, and its held-out loss beside
    that of uncompressed averages."""
    lines = ["|  | sent in a step | rate | loss | to uncompressed |", "|---|---|---|---|---|"]
    sent = {run.method: run.sent for run in found.runs.done.values()}
    for name, row in found.as_dict().items():
        said = "" if name == "plain" else row["verdict"].partition(" at step")[0]
        lines.append(
            f"| `{name}` | {sent[name] / 1e6:,.2f} MB | {RATE * row['rate']:g} | {row['loss']:.4f} | {said} |"
        )
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python benchmarks/compare/larger.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--seeds", type=int, default=SEEDS)
    p.add_argument("--table", choices=TABLES, default="larger")
    p.add_argument("--runs", type=Path, help="default: benchmarks/results/compare-TABLE-runs.json")
    p.add_argument("--results", help="default: benchmarks/results/compare-TABLE.json; '' for none")
    p.add_argument(
        "--page",
        default=str(ROOT / "docs" / "frontier.md"),
        help="whose table is written; '' for none",
    )
    args = p.parse_args()
    kept = HERE.parent / "results" / f"compare-{args.table}"
    runs = args.runs or kept.with_name(f"{kept.name}-runs.json")
    results = f"{kept}.json" if args.results is None else args.results
    asked = [
        "compare",
        "larger:make",
        "--replicas",
        str(REPLICAS),
        "--steps",
        str(args.steps),
        "--seeds",
        str(args.seeds),
    ]
    methods = [part for method in TABLES[args.table] for part in ("--algorithm", method)]
    command = [
        sys.executable,
        "-m",
        "gradwire",
        *asked,
        *methods,
        "--rates",
        *FACTORS,
        "--output",
        str(runs.resolve()),
    ]
    ended = subprocess.run(
        [*command, "--json"], cwd=HERE, stdout=subprocess.PIPE, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(ended.returncode)
    print(ended.stdout)
    if results:
        table = "" if args.table == "larger" else f" --table {args.table}"
        found = {
            "command": f"python benchmarks/compare/larger.py{table}",
            "steps": args.steps,
            "replicas": REPLICAS,
        }
        save({**found, "found": json.loads(ended.stdout)}, Path(results))
    if args.page:
        write_part(Path(args.page), args.table, page(Comparison.load(runs)))


if __name__ == "__main__":
    main()
