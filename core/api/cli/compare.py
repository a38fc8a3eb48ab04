"""`gradwire compare`: trains under several methods, and prints how their losses differ."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

from gradwire.cli.models import BadArgument, load_callable
from gradwire.comparing import compare
from gradwire.core.advise.compare.comparison import Comparison
from gradwire.core.advise.compare.runs import Runs
from gradwire.core.state.files import whole_file

#: Of a command that Ctrl-C has ended.
INTERRUPTED = 130


def print_comparison(
    training: str,
    algorithms: Sequence[Any],
    replicas: int,
    steps: int,
    seeds: int,
    rates: Sequence[float],
    output: Path,
    *,
    as_json: bool,
) -> int:
    """Train, print, and draw if somebody can; returns the exit status. Raises BadArgument."""
    make = load_callable(training, "TRAINING")
    status = 0
    with Progress(
        *Progress.get_default_columns()[:-1],
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as shown:
        bars: dict[tuple[str, int], Any] = {}

        def on_step(method: str, seed: int, step: int) -> None:
            if (method, seed) not in bars:
                bars[method, seed] = shown.add_task(f"{method}, seed {seed}", total=steps)
            shown.update(bars[method, seed], completed=step, visible=step < steps)

        try:
            found = compare(
                make,
                algorithms,
                replicas=replicas,
                steps=steps,
                seeds=seeds,
                rates=rates,
                output=output,
                training=training,
                progress=on_step,
            )
        except (TypeError, ValueError) as error:
            raise BadArgument(f"{training}: {error}") from error
        except KeyboardInterrupt:
            print(f"gradwire: stopped; the same command goes on from {output}", file=sys.stderr)
            if not output.exists():
                return INTERRUPTED
            found, status = Comparison(Runs.load(output), algorithms), INTERRUPTED
    print(json.dumps(found.as_dict(), indent=1) if as_json else found)
    if not as_json:
        drawn = _drawn(found, output.with_suffix(".svg"))
        print(f"\nwritten to {output}{drawn}")
    return status


def each_after(option: str, args: Sequence[str]) -> Iterator[str]:
    """The arguments with an option that takes several values, `--rates 0.5 1 2`, before each of them, as click reads it."""
    several = first = False
    for arg in args:
        if several and not first and not _is_number(arg):
            several = False
        if several and not first:
            yield option
        yield arg
        first = arg == option
        several = several or first


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _drawn(comparison: Comparison, path: Path) -> str:
    """The curves as a picture, where matplotlib is installed. Returns what to say of it."""
    if importlib.util.find_spec("matplotlib") is None:
        return "; pip install matplotlib for a picture"
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, (steps, losses) in comparison.curves().items():
        axes.plot(steps, losses, marker=".", label=name)
    axes.set(xlabel="step", ylabel="held-out loss", title=comparison.runs.training)
    axes.legend(fontsize="small")
    with whole_file(path) as file:
        figure.savefig(file, format="svg")
    return f" and {path}"
