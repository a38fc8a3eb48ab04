"""What it does to the loss that a training changes its method: `Auto()` on the model, the text and
the seeds of docs/frontier.md.

    make frontier && python benchmarks/auto_loss.py     # twenty minutes on two cores; goes on where it ended; writes benchmarks/results/auto-loss.json

The two processes are on one machine, where nothing is faster than uncompressed averages. So what
is chosen is that of a link which is slow and fast in turn, by the simulated clock of
benchmarks/auto.py: trials and changes, to all of its methods. Losses are beside those of
uncompressed averages with the same seed, which are in benchmarks/results/frontier.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from measuring import save, told_by_ranks

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "examples")]
from auto import NOISE, RESULTS, SETS, measured  # noqa: E402
from frontier.__main__ import machine  # noqa: E402
from frontier.reading import longest, uncompressed, upper_bound  # noqa: E402
from frontier.runs import REPLICAS, Run, Settings, weights  # noqa: E402
from frontier.subjects import BY_NAME, Subject  # noqa: E402

from gradwire import Auto, Spec  # noqa: E402
from gradwire.core.advise.choosing.chooser import Chooser  # noqa: E402
from gradwire.core.advise.choosing.methods import Decisions, methods_of  # noqa: E402
from gradwire.core.advise.choosing.step_clock import clocked  # noqa: E402

#: Whose steps are those of the clock.
LINKS = "GPT, 25 million, 2 hosts"
#: Steps after which the link becomes another.
TURN = 180


def decisions(methods: Sequence[Any], links: dict[str, list[float]], steps: int) -> list[str]:
    """The log of a training on a link that is slow and fast in turn."""
    noise = np.exp(np.random.default_rng(0).normal(0, NOISE, (steps, len(methods)))).tolist()
    turns = links["1gbit"], links["unlimited"]
    chooser, lines, at_work = Chooser(len(methods)), [], 0

    def seconds(step: int, method: int, now: float) -> float:
        nonlocal at_work
        if method != at_work:
            at_work = method
            chosen = methods[chooser.chosen]
            lines.append(Decisions.line(step, methods[method], chooser.trial, chosen))
        return float(turns[step // TURN % 2][method] * noise[step][method])

    clocked(chooser, seconds, steps)
    return lines


def work(tell: Callable[[Any], None], log: str, rate: float, seeds: list[int], steps: int) -> None:
    """Train with each seed. Every rank calls this."""
    from frontier.worker_torch import train

    for seed in seeds:
        subject = Subject("Auto", "codes", Auto(decisions=log))  # type: ignore[arg-type]
        curve: list[float] = []

        def told(curve: list[float] = curve, **what: Any) -> None:
            if "loss" in what:
                curve.append(what["loss"])

        train(Run("torch", subject, rate, seed, Settings(steps)), told)
        tell((seed, curve[-1]))


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python benchmarks/auto_loss.py", description=(__doc__ or "").split("\n")[0]
    )
    p.add_argument("--seeds", type=int, default=8)
    p.add_argument("--frontier", type=Path, default=RESULTS / "frontier.json")
    p.add_argument("--output", type=Path, default=RESULTS / "auto-loss.json")
    args = p.parse_args()
    frontier = json.loads(args.frontier.read_text())
    steps, _ = longest(frontier["methods"])
    plain = uncompressed(frontier["methods"])["lengths"][str(steps)]
    rate, known = float(plain["rates"]), {run["key"] for run in frontier["runs"]}
    of = [
        Run("torch", BY_NAME["uncompressed"], rate, n, Settings(steps)) for n in range(args.seeds)
    ]
    if missing := [run.seed for run in of if run.key not in known]:
        raise SystemExit(
            f"{args.frontier} has no uncompressed run of seeds {missing} on this text, which is that of"
            " the installed Python: make frontier first"
        )
    model = {name: Spec(x.shape, "float32") for name, x in weights(Settings(steps), 0).items()}
    methods = methods_of(Auto(), model, REPLICAS)
    lines = decisions(methods, measured(SETS["Auto()"])[LINKS], steps)
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    losses: dict[str, float] = found.get("losses", {}) if found.get("decisions") == lines else {}
    rest = [seed for seed in range(args.seeds) if str(seed) not in losses]

    def summary() -> dict[str, Any]:
        pairs = [(losses[str(n)], plain["losses"]["torch"][n]) for n in map(int, losses)]
        parts = [mine / theirs - 1 for mine, theirs in pairs]
        return {
            "command": "python benchmarks/auto_loss.py",
            "machine": machine(),
            "steps": steps,
            "decisions": lines,
            "losses": losses,
            "uncompressed": plain["losses"]["torch"][: args.seeds],
            "higher": mean(parts),
            "bound": upper_bound(parts) if len(parts) > 1 else None,
        }

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        log.write_text("".join(lines))
        for seed, loss in told_by_ranks(work, str(log), rate, rest, steps) if rest else ():
            losses[str(seed)] = round(loss, 6)
            print(f"seed {seed}: {loss:.4f}, uncompressed {plain['losses']['torch'][seed]:.4f}")
            save(summary(), args.output)
    print({key: summary()[key] for key in ("higher", "bound")})


if __name__ == "__main__":
    main()
