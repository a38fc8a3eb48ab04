"""Methods on other models than the frontier's, with 4 replicas, learning rates searched: calls of
`gradwire compare`.

    python benchmarks/compare/others.py larger          # the frontier's model seven times as large, the best row of each family; three hours on two quiet cores
    python benchmarks/compare/others.py larger-codes    # the same model, low rank in codes; 80 minutes
    python benchmarks/compare/others.py glyphs          # a convolutional network that reads characters, the first screen's rows; 40 minutes
    python benchmarks/compare/others.py glyphs --steps 6 --seeds 1 --runs /tmp/glyphs.json --results "" --page ""      # whether it runs

After Ctrl-C the same line goes on. Runs are kept in build/compare-TABLE.json; what follows from
them is written to benchmarks/results/compare-TABLE.json, and the table to docs/frontier.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "examples")]
from frontier.subjects import TILES  # noqa: E402
from measuring import save, write_part  # noqa: E402

from compare import glyphs, larger  # noqa: E402
from gradwire.core.advise.compare.comparison import Comparison  # noqa: E402

REPLICAS, SEEDS, PERIOD = 4, 3, 30
CODES = ("WireDtype(AllReduce(), 'int8')", "Quantize('int4')")
LOW_RANK_IN_CODES = (
    "WireDtype(PowerSGD(rank=16), 'int8')",
    "WireDtype(PowerSGD(rank=16), 'int4')",
    "WireDtype(PowerSGD(rank=4), 'int8')",
)


@dataclass(frozen=True)
class Table:
    """What is trained, the rows beside uncompressed averages, and factors on its learning rate,
    which are tried for each."""

    trained: ModuleType
    methods: tuple[str, ...]
    factors: tuple[str, ...] = ("0.5", "1", "2")


#: By their marks in the page.
TABLES = {
    "larger": Table(
        larger,
        (
            *CODES,
            "PowerSGD(rank=16)",
            "PowerSGD(rank=4)",
            f"TopK(64, per={TILES})",
            f"LocalSGD({PERIOD})",
            f"diloco({PERIOD})",
        ),
    ),
    "larger-codes": Table(larger, LOW_RANK_IN_CODES),
    "glyphs": Table(glyphs, CODES + LOW_RANK_IN_CODES, ("1", "2", "4")),
}


def page(found: Comparison, rate: float) -> str:
    """The table: what each method sends in a step, its learning rate, and its held-out loss beside
    that of uncompressed averages."""
    lines = ["|  | sent in a step | rate | loss | to uncompressed |", "|---|---|---|---|---|"]
    sent = {run.method: run.sent for run in found.runs.done.values()}
    for name, row in found.as_dict().items():
        said = "" if name == "plain" else row["verdict"].partition(" at step")[0]
        lines.append(
            f"| `{name}` | {sent[name] / 1e6:.3g} MB | {rate * row['rate']:g} | {row['loss']:.4f} | {said} |"
        )
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python benchmarks/compare/others.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("table", choices=TABLES)
    p.add_argument("--steps", type=int, help="default: as the learning rate's schedule has it")
    p.add_argument("--seeds", type=int, default=SEEDS)
    p.add_argument("--runs", type=Path, help="default: build/compare-TABLE.json")
    p.add_argument("--results", help="default: benchmarks/results/compare-TABLE.json; '' for none")
    p.add_argument(
        "--page",
        default=str(ROOT / "docs" / "frontier.md"),
        help="whose table is written; '' for none",
    )
    args = p.parse_args()
    table = TABLES[args.table]
    trained = table.trained
    steps = args.steps or trained.STEPS
    name = f"compare-{args.table}.json"
    runs = args.runs or ROOT / "build" / name
    results = args.results if args.results is not None else str(HERE.parent / "results" / name)
    asked = {
        "--replicas": str(REPLICAS),
        "--steps": str(steps),
        "--seeds": str(args.seeds),
        "--output": str(runs.resolve()),
    }
    command = [
        *(
            sys.executable,
            "-m",
            "gradwire",
            "compare",
            f"{trained.__name__.removeprefix('compare.')}:make",
        ),
        *(part for option in asked.items() for part in option),
        *(part for method in table.methods for part in ("--algorithm", method)),
        *("--rates", *table.factors, "--json"),
    ]
    ended = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    print(ended.stdout)
    if results:
        found = {
            "command": f"python benchmarks/compare/others.py {args.table}",
            "steps": steps,
            "replicas": REPLICAS,
        }
        save({**found, "found": json.loads(ended.stdout)}, Path(results))
    if args.page:
        write_part(Path(args.page), args.table, page(Comparison.load(runs), trained.RATE))


if __name__ == "__main__":
    main()
