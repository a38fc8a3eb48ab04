"""Whether the order of methods after part of the steps is that of the end: what a verdict of
`gradwire compare` is worth.

    python benchmarks/compare                    # trains what is missing, with fresh seeds: some quarter of an hour on a quiet core; then the page
    python benchmarks/compare --fresh-seeds 0    # from the frontier's curves alone, in a second

Two sources: the curves of `make frontier` (benchmarks/results/frontier.json), of trainings that
have ended; and trainings by `compare`'s engine with seeds that nobody has looked at, to half of the
frontier's shorter length, held against the frontier's losses in the end. Writes
benchmarks/results/compare.json after each training, and the table of docs/compare.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "examples")]
import torch  # noqa: E402
from frontier.runs import LENGTHS, REPLICAS, Settings  # noqa: E402
from frontier.subjects import BY_NAME  # noqa: E402
from measuring import save, write_part  # noqa: E402

from compare.order import Curves, Pair, Rates, best_of, curves_of, kendall, told_apart  # noqa: E402
from compare.training import training_of  # noqa: E402
from gradwire import LocalSGD  # noqa: E402
from gradwire.torch_backend.advise.compare.run import run  # noqa: E402

SEEDS = (0, 1, 2)
#: Of the frontier's shorter length: after a fifth and after a half of its steps.
SETTINGS = Settings()
LOOKS = (SETTINGS.steps // 5, SETTINGS.steps // 2)
#: The rate on which that of each method is a factor.
RATE = 0.002
Row = dict[str, Any]


def trained(subject: str, rates: Rates, seed: int, looks: Sequence[int]) -> Row:
    """A training by the engine of `gradwire compare`, cut after the last look."""
    rate, outer_rate = rates
    found = run(
        partial(training_of, SETTINGS, RATE, seed),
        BY_NAME[subject].at(outer_rate).algorithm,
        REPLICAS,
        max(looks),
        seed,
        looks,
        lambda: None,
        rate / RATE,
    )
    curve = [[step, round(mean(losses), 6)] for step, losses in found.held_out.items()]
    return {
        "subject": subject,
        "rate": rate,
        "outer_rate": outer_rate,
        "seed": seed,
        "curve": curve,
    }


def averages_each_step(subject: str) -> bool:
    return not isinstance(BY_NAME[subject].algorithm, LocalSGD)


def row(
    source: str, steps: int, at: int, seed: int, losses: Mapping[str, float], pairs: Sequence[Pair]
) -> Row:
    """Kendall's tau of one seed after `at` of so many steps, among all methods and among those that
    average in each step."""
    known = [pair for pair in pairs if set(pair) <= losses.keys()]
    each = [pair for pair in known if all(map(averages_each_step, pair))]
    return {
        "source": source,
        "steps": steps,
        "at": at,
        "seed": seed,
        "methods": len(losses),
        "all": round(kendall(losses, pairs), 3) if len(known) == len(pairs) else None,
        "pairs": len(pairs),
        "each_step": round(kendall(losses, each), 3) if each else None,
        "each_step_pairs": len(each),
    }


def rows_of(frontier: Mapping[str, Any], fresh: Sequence[Row]) -> list[Row]:
    """What the frontier's curves say of themselves, and what fresh seeds say of its ends."""
    found = []
    for steps in LENGTHS:
        curves = curves_of(frontier["runs"], steps, SEEDS)
        pairs = told_apart(curves, steps, SEEDS)
        for at in sorted({step for own in curves.values() for step in own[0]} & set(parts(steps))):
            found += [
                row("frontier", steps, at, seed, _at(curves, seed, at), pairs) for seed in SEEDS
            ]
        if steps != SETTINGS.steps:
            continue
        for at, seed in itertools.product(LOOKS, sorted({each["seed"] for each in fresh})):
            losses = {
                each["subject"]: dict(each["curve"])[at] for each in fresh if each["seed"] == seed
            }
            found.append(row("fresh seeds", steps, at, seed, losses, pairs))
    return found


def parts(steps: int) -> list[int]:
    """About a sixth, a quarter and a half of the steps, where the frontier has looked."""
    return [steps // 6, steps // 4, steps // 2]


def _at(curves: Mapping[str, Curves], seed: int, step: int) -> dict[str, float]:
    return {name: own[seed][step] for name, own in curves.items()}


def page(rows: Sequence[Row]) -> str:
    """The table: for each part of the way the taus of its seeds."""
    lines = [
        "| trainings | looked at | methods | τ by seed, all methods | τ by seed, those that average in each step |",
        "|---|---|---|---|---|",
    ]
    for (source, steps, at), group in itertools.groupby(
        rows, lambda r: (r["source"], r["steps"], r["at"])
    ):
        seeds = list(group)
        taus = [
            ", ".join("not yet" if r[key] is None else f"{r[key]:.2f}" for r in seeds)
            for key in ("all", "each_step")
        ]
        lines.append(
            f"| {source}, {steps:,} steps | step {at}, {at / steps:.0%} | {min(r['methods'] for r in seeds)} | {taus[0]} "
            f"({min(r['pairs'] for r in seeds)} pairs) | {taus[1]} ({min(r['each_step_pairs'] for r in seeds)}) |"
        )
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python benchmarks/compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--fresh-seeds",
        type=int,
        default=3,
        help="how many seeds are trained that the frontier has not",
    )
    p.add_argument(
        "--subjects", nargs="+", default=list(BY_NAME), choices=list(BY_NAME), metavar="METHOD"
    )
    p.add_argument(
        "--looks",
        type=int,
        nargs="+",
        default=LOOKS,
        help="after how many steps fresh seeds are looked at",
    )
    p.add_argument("--frontier", type=Path, default=HERE.parent / "results" / "frontier.json")
    p.add_argument("--output", type=Path, default=HERE.parent / "results" / "compare.json")
    p.add_argument(
        "--page",
        default=str(ROOT / "docs" / "compare.md"),
        help="whose table is written; '' for none",
    )
    args = p.parse_args()
    frontier = json.loads(args.frontier.read_text())
    fresh: list[Row] = json.loads(args.output.read_text())["fresh"] if args.output.exists() else []
    rates = {
        name: rates for name, (rates, _) in best_of(frontier["runs"], SETTINGS.steps, SEEDS).items()
    }
    # Those that average in each step come first: two of the questions are about them.
    subjects = sorted(args.subjects, key=lambda subject: not averages_each_step(subject))
    seeds = range(len(SEEDS), len(SEEDS) + args.fresh_seeds)
    for seed, subject in itertools.product(seeds, subjects):
        if any((each["subject"], each["seed"]) == (subject, seed) for each in fresh):
            continue
        fresh.append(trained(subject, rates[subject], seed, args.looks))
        print(json.dumps(fresh[-1]), flush=True)
        save({"fresh": fresh}, args.output)
    whole = {
        "command": "python benchmarks/compare",
        "machine": f"{platform.machine()}, torch {torch.__version__}",
    }
    # A seed counts when the methods that average in each step have been trained; the others are
    # asked when all have.
    known: dict[int, set[str]] = {}
    for each in fresh:
        known.setdefault(each["seed"], set()).add(each["subject"])
    quick = set(filter(averages_each_step, rates))
    complete = [each for each in fresh if quick <= known[each["seed"]]]
    rows = rows_of(frontier, complete)
    save({**whole, "found": rows, "fresh": fresh}, args.output)
    print(page(rows))
    if args.page:
        write_part(Path(args.page), "order", page(rows))


if __name__ == "__main__":
    main()
