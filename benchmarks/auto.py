"""What it costs that `Auto` finds the method while a training runs, by a simulated clock that is
fed with measured steps.

    python benchmarks/auto.py                    # writes benchmarks/results/auto.json
    python benchmarks/auto.py --links            # trains on links that are shaped, Auto and each of its methods (Linux, as root; half an hour of a quiet machine)

Steps are those of benchmarks/results/advice.json and network-two-levels.json, between hosts on
shaped links, with noise. Beside each link as it is: one that changes, bursts, and a rank that is
late.

Asked for is 1.02 of the best method from the start on, and 20 plain steps; over 10,000 steps
without these. Under bursts two of them are added, at the price of the slowest method above the
fastest: nobody foresees the first, and after it nobody knows whether others will come, for which
any rule pays up to as much again (Karlin, Manasse, Rudolph, Sleator 1988, "Competitive snoopy
caching").
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import save

from gradwire.core.advise.choosing.chooser import Chooser
from gradwire.core.advise.choosing.step_clock import clocked

RESULTS = Path(__file__).parent / "results"
WORKER = Path(__file__).parent / "network" / "worker_auto.py"
#: By what they send, least first, as `Auto` tries them; after uncompressed averages.
ROUNDING = ("WireDtype(AllReduce(), 'int8')", "WireDtype(AllReduce(), 'bfloat16')")
SETS = {
    "Auto()": ROUNDING,
    'Auto(loss="2%")': (
        "WireDtype(PowerSGD(rank=16), 'int4')",
        "WireDtype(PowerSGD(rank=16), 'int8')",
        "Quantize(dtype='int4')",
        *ROUNDING,
    ),
}
TWO_LEVELS = ("DDP", "two levels, dense")
NOISE = 0.03
#: Steps of a burst; one comes in 250 steps, on average.
BURST = 5
#: Layers and width of the GPTs that are trained on shaped links: where a step would take a second,
#: and where it takes some tens of milliseconds even so, of which this machine's noise is a small
#: part.
SMALL, LARGE = (1, 128), (2, 256)

Link = dict[str, list[float]]


def measured(methods: tuple[str, ...]) -> dict[str, Link]:
    """Seconds of a step of uncompressed averages and of these between hosts of one rank, by model
    and hosts, and by link."""
    found: dict[str, Link] = {}
    for row in json.loads((RESULTS / "advice.json").read_text())["rows"]:
        if row["ranks"] > 1:
            continue
        by_name = {m["algorithm"]: m["measured_ms"] / 1000 for m in row["methods"]}
        seconds = [by_name[name] for name in ("plain", *methods)]
        found.setdefault(f"{row['model']}, {row['hosts']} hosts", {})[row["link"]] = seconds
    return found


def two_by_two() -> Link:
    """The same of uncompressed averages of two hosts with two ranks each, and of averages by
    nodes."""
    rows = json.loads((RESULTS / "network-two-levels.json").read_text())["rows"]
    return {
        rate: [
            r["step_ms"] / 1000
            for name in TWO_LEVELS
            for r in rows
            if (r["rate"], r["subject"]) == (rate, name)
        ]
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
    """The cost of choosing, beside the best method from the start on and the seconds of two
    bursts."""
    seconds = trace[:steps].tolist()
    fixed = [
        clocked(m, lambda step, method, now: seconds[step][method], steps)[0]
        for m in range(trace.shape[1])
    ]
    chooser = Chooser(trace.shape[1])
    total, _ = clocked(chooser, lambda step, method, now: seconds[step][method], steps)
    return {
        "steps": steps,
        **judged(total, fixed, steps, bursts),
        "best": fixed.index(min(fixed)),
        "ends": chooser.chosen,
    }


def judged(total: float, fixed: list[float], steps: int, bursts: float) -> dict[str, Any]:
    """Seconds of a training beside those of each method from the start on, uncompressed averages
    first, and the seconds of two bursts."""
    best, plain = min(fixed), fixed[0] / steps
    return {
        "to_best": total / best,
        "to_plain": total / fixed[0],
        "plain_steps_beyond_102_percent": (total - 1.02 * best) / plain,
        "plain_steps_of_two_bursts": bursts / plain,
        "holds": total <= 1.02 * best + bursts + (0 if steps >= 10_000 else 20 * plain),
    }


def by_the_clock(steps: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """A row for each method set, model, trace and number of steps."""
    subjects = [
        (name, model, links)
        for name, methods in SETS.items()
        for model, links in measured(methods).items()
    ]
    subjects.append(("by nodes", "GPT, 25 million, 2 x 2", two_by_two()))
    rng, rows = np.random.default_rng(seed), []
    for subject, model, links in subjects:
        for name, trace in traces(links, max(steps), rng):
            noisy = trace * np.exp(rng.normal(0, NOISE, trace.shape))
            slow = links.get("100mbit", [0.0])
            allowed = 2 * BURST * (max(slow) - min(slow)) if name == "bursts" else 0.0
            rows += [
                {"methods": subject, "model": model, "trace": name, **row_of(noisy, n, allowed)}
                for n in steps
            ]
    return rows


def on_links(
    steps: int, traces: Collection[str], rows: dict[str, dict[str, Any]]
) -> Iterator[None]:
    """Real trainings of two hosts on links whose rate changes with the step: Auto and each of its
    methods, which take turns. They come to the rows, by trace."""
    half = steps // 2
    bursts = {
        begin + i: rate
        for begin in range(half, steps, 250)
        for i, rate in ((0, "100mbit"), (BURST, None))
    }
    #: Rates from so many steps on, by how much a rank is late, and ranks of each host.
    rates: dict[str, tuple[dict[int, str | None], float, int]] = {
        **{name: ({0: name}, 0.0, 1) for name in ("100mbit", "1gbit")},
        "unlimited": ({0: None}, 0.0, 1),
        "becomes slow": ({0: None, half: "100mbit"}, 0.0, 1),
        "becomes fast": ({0: "100mbit", half: None}, 0.0, 1),
        "bursts": ({0: None, **bursts}, 0.0, 1),
        "a late rank": ({0: "1gbit"}, 0.1, 1),
        "2 x 2": ({0: "1gbit"}, 0.0, 2),
    }
    for name, (changes, late, ranks) in rates.items():
        if traces and name not in traces:
            continue
        layers, width = SMALL if "100mbit" in changes.values() else LARGE
        options = [f"--steps={steps}", f"--late={late}", f"--layers={layers}", f"--width={width}"]
        found = _trained(changes, ranks, options)
        auto, *fixed = found["seconds"].values()
        slow = [*rows["100mbit"]["seconds"].values()][1:] if "100mbit" in rows else [0.0]
        two_bursts = 2 * BURST * (max(slow) - min(slow)) / steps
        rows[name] = row = {
            "trace": name,
            "steps": steps,
            "seconds": found["seconds"],
            **judged(auto, fixed, steps, two_bursts if name == "bursts" else 0.0),
            "trainings": found["all"],
            "choices": found["choices"],
        }
        print(
            f"{name:<14} {row['to_best']:.3f} of the best, {row['to_plain']:.3f} of plain,"
            f" holds: {row['holds']}",
            flush=True,
        )
        yield


def _trained(changes: dict[int, str | None], ranks: int, options: list[str]) -> dict[str, Any]:
    """What trainings of two hosts tell whose links change."""
    from lab import PORT, Lab

    cuts = sorted(changes) if len(changes) > 1 else []
    with Lab(2, changes[0]) as lab, tempfile.TemporaryDirectory() as folder:
        ended = threading.Event()

        def command(host: int) -> list[str]:
            return [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *(f"--node-rank={host}", f"--nproc-per-node={ranks}"),
                *(f"--master-addr={lab.address(0)}", f"--master-port={PORT}"),
                *(f"--local-addr={lab.address(host)}", str(WORKER), *options),
                *(f"--folder={folder}", "--cuts", *map(str, cuts)),
            ]

        follower = threading.Thread(target=_follow, args=(lab, Path(folder), changes, ended))
        follower.start()
        try:
            lines = lab.run(command, timeout=7200)[0].strip().splitlines()
        finally:
            ended.set()
            follower.join()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _follow(lab: Any, folder: Path, changes: dict[int, str | None], ended: threading.Event) -> None:
    """Change the links when a cut has come, for which the trainings wait."""
    cut = folder / "cut"
    while not ended.wait(0.01):
        if cut.exists():
            lab.shape(changes[int(cut.read_text())])
            cut.unlink()


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python benchmarks/auto.py", description=(__doc__ or "").split("\n")[0]
    )
    p.add_argument("--steps", type=int, nargs="+", default=[1000, 10_000], help="of the trainings")
    p.add_argument(
        "--links",
        action="store_true",
        help="trainings on shaped links in place of the simulated clock",
    )
    p.add_argument(
        "--traces",
        nargs="*",
        default=[],
        help="with --links: some of them, such as 'becomes slow', beside those that are there; none: all",
    )
    p.add_argument("--seeds", type=int, default=8, help="all once more with so many other noises")
    p.add_argument("--output", type=Path, help="benchmarks/results/auto.json, or auto-links.json")
    args = p.parse_args()
    args.output = args.output or RESULTS / ("auto-links.json" if args.links else "auto.json")
    if args.links:
        sys.path.insert(0, str(WORKER.parent))
        from lab import obstacle

        if why := obstacle():
            raise SystemExit(why)
        found = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
        by_trace = {row["trace"]: row for row in found}
        for _ in on_links(args.steps[0], args.traces, by_trace):
            rows = [*by_trace.values()]
            save({"command": "python benchmarks/auto.py --links", "rows": rows}, args.output)
        return
    rows = by_the_clock(args.steps, 0)
    kept = sum(row["holds"] for row in rows)
    for row in rows:
        if not row["holds"]:
            beyond = row["plain_steps_beyond_102_percent"]
            where = f"{row['methods']:<16} {row['model']:<32} {row['trace']:<16} {row['steps']:>6} steps"
            print(
                f"{where}: {row['to_best']:.3f} of the best, {beyond:.1f} plain steps beyond 1.02"
            )
    print(
        f"{kept} of {len(rows)} within 1.02 of the best fixed method, 20 plain steps below 10,000, and two bursts where there are any"
    )
    others = [
        row["holds"] for seed in range(args.seeds) for row in by_the_clock(args.steps, 1 + seed)
    ]
    print(f"with other noise {sum(others)} of {len(others)}")
    found = {"noise": NOISE, "kept": kept, "others": [sum(others), len(others)], "rows": rows}
    save({"command": "python benchmarks/auto.py", **found}, args.output)


if __name__ == "__main__":
    main()
