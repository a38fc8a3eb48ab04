"""What it costs that `Auto` finds the method while a training runs, by a simulated clock that is fed with measured steps.

    python benchmarks/auto.py                    # writes benchmarks/results/auto.json

Steps are those of benchmarks/results/advice.json and network-two-levels.json, between hosts on shaped
links, with noise. Beside each link as it is: one that changes, bursts, and a rank that is late.

Asked for is 1.02 of the best method from the start on, and 20 plain steps; over 10,000 steps without these. Under bursts two of them are added, at the price of
the slowest method above the fastest: nobody foresees the first, and after it nobody knows whether others will come, for which any rule pays up to as much
again (Karlin, Manasse, Rudolph, Sleator 1988, "Competitive snoopy caching").
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measuring import save

from gradwire.core.advise.choosing.chooser import Chooser
from gradwire.core.advise.choosing.step_clock import clocked

RESULTS = Path(__file__).parent / "results"
#: By what they send, least first, as `Auto` tries them; after uncompressed averages.
ROUNDING = ("WireDtype(AllReduce(), 'int8')", "WireDtype(AllReduce(), 'bfloat16')")
SETS = {"Auto()": ROUNDING, 'Auto(loss="2%")': ("Quantize(dtype='int4')", "PowerSGD(rank=16)", *ROUNDING)}
TWO_LEVELS = ("DDP", "two levels, dense")
NOISE = 0.03
#: Steps of a burst; one comes in 250 steps, on average.
BURST = 5

Link = dict[str, list[float]]


def measured(methods: tuple[str, ...]) -> dict[str, Link]:
    """Seconds of a step of uncompressed averages and of these, by model and hosts, and by link."""
    found: dict[str, Link] = {}
    for row in json.loads((RESULTS / "advice.json").read_text())["rows"]:
        by_name = {m["algorithm"]: m["measured_ms"] / 1000 for m in row["methods"]}
        seconds = [by_name[name] for name in ("plain", *methods)]
        found.setdefault(f"{row['model']}, {row['hosts']} hosts", {})[row["link"]] = seconds
    return found


def two_by_two() -> Link:
    """The same of uncompressed averages of two hosts with two ranks each, and of averages by nodes."""
    rows = json.loads((RESULTS / "network-two-levels.json").read_text())["rows"]
    return {
        rate: [r["step_ms"] / 1000 for name in TWO_LEVELS for r in rows if (r["rate"], r["subject"]) == (rate, name)]
        for rate in dict.fromkeys(row["rate"] for row in rows)
    }


def traces(links: Link, steps: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Seconds of each step with each method, (steps, methods), of several trainings."""
    for link, seconds in links.items():
        yield link, np.tile(seconds, (steps, 1))
    if not {"100mbit", "unlimited"} <= links.keys():
        return
    slow, fast = links["100mbit"], links["unlimited"]
    for name, first, then in (("becomes slow", fast, slow), ("becomes fast", slow, fast)):
        changed = np.tile(first, (steps, 1))
        changed[int(0.3 * steps) :] = then
        yield name, changed
    bursts = np.tile(fast, (steps, 1))
    for begin in rng.integers(0, steps, steps // 250):
        bursts[begin : begin + BURST] = slow
    yield "bursts", bursts
    late = 0.2 * fast[0] * rng.random((steps, 1))
    yield "a late rank", np.tile(links.get("1gbit", slow), (steps, 1)) + late


def row_of(trace: np.ndarray, steps: int, bursts: float = 0.0) -> dict[str, Any]:
    """The cost of choosing, beside the best method from the start on and the seconds of two bursts."""
    seconds = trace[:steps].tolist()
    fixed = [clocked(m, lambda step, method, now: seconds[step][method], steps)[0] for m in range(trace.shape[1])]
    chooser = Chooser(trace.shape[1])
    total, _ = clocked(chooser, lambda step, method, now: seconds[step][method], steps)
    best, plain = min(fixed), fixed[0] / steps
    return {
        "steps": steps,
        "to_best": total / best,
        "to_plain": total / fixed[0],
        "plain_steps_beyond_102_percent": (total - 1.02 * best) / plain,
        "plain_steps_of_two_bursts": bursts / plain,
        "best": fixed.index(best),
        "ends": chooser.chosen,
        "holds": total <= 1.02 * best + bursts + (0 if steps >= 10_000 else 20 * plain),
    }


def main() -> None:
    p = argparse.ArgumentParser(prog="python benchmarks/auto.py", description=(__doc__ or "").split("\n")[0])
    p.add_argument("--steps", type=int, nargs="+", default=[1000, 10_000], help="of the trainings")
    p.add_argument("--output", type=Path, default=RESULTS / "auto.json")
    args = p.parse_args()
    subjects = [(name, model, links) for name, methods in SETS.items() for model, links in measured(methods).items()]
    subjects.append(("by nodes", "GPT, 25 million, 2 x 2", two_by_two()))
    rng, rows = np.random.default_rng(0), []
    for subject, model, links in subjects:
        for name, trace in traces(links, max(args.steps), rng):
            noisy = trace * np.exp(rng.normal(0, NOISE, trace.shape))
            slow = links.get("100mbit", [0.0])
            allowed = 2 * BURST * (max(slow) - min(slow)) if name == "bursts" else 0.0
            rows += [
                {"methods": subject, "model": model, "trace": name, **row_of(noisy, n, allowed)} for n in args.steps
            ]
    kept = sum(row["holds"] for row in rows)
    for row in rows:
        if not row["holds"]:
            beyond = row["plain_steps_beyond_102_percent"]
            where = f"{row['methods']:<16} {row['model']:<32} {row['trace']:<16} {row['steps']:>6} steps"
            print(f"{where}: {row['to_best']:.3f} of the best, {beyond:.1f} plain steps beyond 1.02")
    print(
        f"{kept} of {len(rows)} within 1.02 of the best fixed method, 20 plain steps below 10,000, and two bursts where there are any"
    )
    save({"command": "python benchmarks/auto.py", "noise": NOISE, "kept": kept, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
