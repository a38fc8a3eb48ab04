"""Every method on one model, one text and the same seeds, in torch and in JAX: loss against bytes,
and against time on three links.

    make frontier                                      # what is missing of all of it; some three hours on two cores
    make frontier LENGTH=240                           # trainings of 240 steps alone; half an hour
    python benchmarks/frontier --only times pictures   # measure the steps again on a quiet machine, then draw: five minutes
    python benchmarks/frontier --only pictures         # from what is in the file

Stages:

- train: for each length, a learning rate for each method, that of least loss among `--rates` and,
  where that is the highest or the lowest, up to two beyond (torch, the first seed); an outer one in
  the same way where there is an outer optimizer; then all seeds in torch with it, and the first in
  JAX. Every finished run is in benchmarks/results/frontier.json, and is not done again unless its
  configuration has changed.
- times: steps of all methods in turn, on two processes or devices of this machine.
- pictures: docs/frontier-bytes.png, docs/frontier-time.png, the figures between marks in README.md,
  docs/choosing.md and docs/frontier.md, and core/advise/evidence.py, by which `gradwire advise`
  weighs losses.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "examples")]
from frontier.evidence import write  # noqa: E402
from frontier.pages import fill  # noqa: E402
from frontier.pictures import draw  # noqa: E402
from frontier.reading import timed  # noqa: E402
from frontier.results import BACKENDS, Experiment, Results  # noqa: E402
from frontier.runs import LENGTHS, Run, Settings  # noqa: E402
from frontier.subjects import BY_NAME, PERIOD  # noqa: E402
from frontier.workers import events  # noqa: E402

STAGES = ("train", "times", "pictures")
#: Of each method, when steps are timed: two averages of parameters are among them.
TIMED_STEPS = 2 * PERIOD


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python benchmarks/frontier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--only", nargs="+", default=[], choices=STAGES, help="these stages, times measured again"
    )
    p.add_argument(
        "--fresh",
        nargs="*",
        choices=list(BY_NAME),
        metavar="METHOD",
        help="forget the runs of these methods, or of all",
    )
    p.add_argument(
        "--subjects",
        nargs="+",
        default=list(BY_NAME),
        choices=list(BY_NAME),
        metavar="METHOD",
        help="only these, in the pictures too",
    )
    p.add_argument(
        "--rates", nargs="+", type=float, default=[2e-3, 4e-3], help="peak learning rates to try"
    )
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--timed-steps", type=int, default=TIMED_STEPS)
    p.add_argument(
        "--steps",
        nargs="+",
        type=int,
        default=list(LENGTHS),
        help="lengths of the trainings to be done",
    )
    for f in fields(Settings)[1:]:
        p.add_argument(f"--{f.name.replace('_', '-')}", type=int, default=f.default)
    p.add_argument("--output", type=Path, default=HERE.parent / "results" / "frontier.json")
    p.add_argument("--pages", type=Path, default=ROOT, help="folder of README.md and docs")
    p.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "frontier",
        help="folder for what JAX writes: errors and compiled programs",
    )
    args = p.parse_args()
    if "uncompressed" not in args.subjects:
        p.error(
            f"--subjects {' '.join(args.subjects)}: name uncompressed too, with which the others are compared"
        )
    if any(n % PERIOD for n in [*args.steps, args.evaluate_every]):
        p.error(
            f"--steps {args.steps} and --evaluate-every {args.evaluate_every} must be multiples of {PERIOD}"
        )
    return args


def machine() -> str:
    versions = f"Python {platform.python_version()}, torch {version('torch')}, jax {version('jax')}"
    return f"{_processor()}, {os.cpu_count()} cores, {versions}"


def _processor() -> str:
    """Linux knows its name."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} ({names[0]})" if names else platform.machine()


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield bar


def train(runs: Sequence[Run], results: Results, work: Path, console: Console, what: str) -> None:
    """Those runs that are missing, of one backend after the other."""
    missing = results.missing(runs)
    console.print(f"{what}: {len(missing)} of {len(runs)} runs are to be done")
    if missing:
        results.machine = machine()
    with progress(console) as bar:
        for backend in BACKENDS:
            mine = [run for run in missing if run.backend == backend]
            if not mine:
                continue
            task = bar.add_task(backend, total=len(mine))
            curve: list[list[float]] = []
            for event in events(backend, mine, work):
                run = mine[event["run"]]
                if "loss" in event:
                    curve.append([event["step"], event["loss"]])
                    continue
                results.add(run, curve, **{k: v for k, v in event.items() if k == "bytes_sent"})
                results.save()
                told = f"{backend}, {run.subject.name}, {run.rate:g}"
                bar.update(task, advance=1, description=told)
                if not console.is_terminal:
                    console.print(
                        f"  {told}, seed {run.seed}: loss {curve[-1][1]:.4f}", highlight=False
                    )
                curve = []


def time_steps(
    experiment: Experiment, steps: int, results: Results, work: Path, console: Console
) -> None:
    for backend in BACKENDS:
        runs = [
            Run(backend, s, experiment.rates[0], 0, experiment.settings)
            for s in experiment.subjects
        ]
        with progress(console) as bar:
            task = bar.add_task(f"times, {backend}", total=steps)
            console.print(f"times, {backend}: {steps} steps of each of {len(runs)} methods")
            for event in events(backend, runs, work, timed_steps=steps):
                if "step" in event:
                    bar.update(task, completed=event["step"])
                if "seconds" in event:
                    results.add_times(
                        backend, experiment.subjects, event["seconds"], experiment.settings
                    )
                    results.times |= {"machine": machine(), "settings": timed_settings(experiment)}
                    results.save()


def timed_settings(experiment: Experiment) -> dict[str, int]:
    """What decides how long a step takes."""
    return {name: value for name, value in asdict(experiment.settings).items() if name != "steps"}


def has_times(experiment: Experiment, results: Results) -> bool:
    """Whether the file has the times of all methods on this machine."""
    here = results.times.get("machine") == machine() and results.times.get(
        "settings"
    ) == timed_settings(experiment)
    return here and all(
        s.name in results.times.get(b, {}) for s in experiment.subjects for b in BACKENDS
    )


def main() -> None:
    args = parse()
    console = Console()
    subjects = tuple(BY_NAME[name] for name in args.subjects)
    others = {f.name: getattr(args, f.name) for f in fields(Settings)[1:]}

    def of_length(steps: int) -> Experiment:
        return Experiment(subjects, tuple(args.rates), args.seeds, Settings(steps, **others))

    asked = [of_length(steps) for steps in sorted(args.steps)]
    shown = [of_length(steps) for steps in sorted({*args.steps, *LENGTHS})]
    results = Results.at(args.output)
    if args.fresh is not None:
        forgotten = args.fresh or list(BY_NAME)
        results.runs = {
            key: run for key, run in results.runs.items() if run["subject"] not in forgotten
        }
    stages = args.only or STAGES
    if "train" in stages:
        for experiment in asked:
            what = f"{experiment.settings.steps:,} steps"
            while results.missing(results.tuning(experiment)):
                train(
                    results.tuning(experiment),
                    results,
                    args.work,
                    console,
                    f"learning rates, {what}",
                )
            train(results.training(experiment), results, args.work, console, f"training, {what}")
        results.keep_only(shown)
    if "times" in args.only or ("times" in stages and not has_times(asked[0], results)):
        time_steps(asked[0], args.timed_steps, results, args.work, console)
    missing = results.missing(
        [run for e in shown for run in [*results.tuning(e), *results.training(e)]]
    )
    if missing:
        console.print(f"{len(missing)} runs are missing; pictures and pages show what is there")
    results.summarize(shown)
    results.save()
    if "pictures" in stages:
        if not timed(results.methods):
            raise SystemExit(
                f"{args.output} has no trained methods, or no times; leave --only out and both are done"
            )
        for path in draw(results.methods, results.settings, args.pages / "docs"):
            console.print(f"drawn: {path}", highlight=False)
        write(results.content, args.pages)
        for path in fill(results.content, args.pages):
            console.print(f"filled: {path}", highlight=False)


if __name__ == "__main__":
    # the workers are ended on the way
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
