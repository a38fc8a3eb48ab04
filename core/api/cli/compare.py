"""`gradwire compare`: trains under several methods, and prints how their losses differ."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

from gradwire.cli.models import BadArgument, load_callable, place_of_users, require_folder
from gradwire.comparing import Stopped, compare
from gradwire.core.advise.compare.comparison import Comparison
from gradwire.core.advise.probe import ALL, Probe
from gradwire.core.state.files import whole_file
from gradwire.core.text.units import rate_of, time_of

#: Of pictures, by the end of the name.
FORMATS = (".svg", ".png", ".pdf")
#: Of a command that Ctrl-C has ended.
INTERRUPTED = 130


@dataclass(frozen=True)
class Network:
    """What the losses are drawn against the time of.

    Attributes:
        step: seconds of a step of one replica alone.
        bandwidth: bytes per second of the link between replicas, in each direction.
        latency: seconds per hop.
        said: where these are from.
    """

    step: float
    bandwidth: float
    latency: float
    said: str

    @classmethod
    def of(
        cls,
        step_ms: float | None,
        link: float | None,
        latency: float,
        probe: Probe | None,
        replicas: int,
    ) -> Network | None:
        """What the options say; None: nothing. Raises BadArgument."""
        if link is None and probe is None:
            if step_ms is not None:
                raise BadArgument(
                    f"--step-ms {step_ms:g} is for a picture of the losses against time: give"
                    " --link or --probe too"
                )
            return None
        if link is not None and probe is not None:
            raise BadArgument(
                "--link with --probe: give one of them, the rate of a link or what was measured"
                " of one"
            )
        if step_ms is None or not 0 < step_ms < math.inf:
            given = "" if step_ms is None else f" --step-ms {step_ms:g} is none:"
            raise BadArgument(
                "--link and --probe need --step-ms, the time of a step of one replica"
                f" alone;{given} give more than 0"
            )
        if link is not None:
            return cls(step_ms / 1e3, link, latency, rate_of(link))
        assert probe is not None
        if probe.replicas != replicas:
            raise BadArgument(
                f"--probe is of {probe.replicas} replicas, and --replicas {replicas}: give"
                f" --replicas {probe.replicas}"
            )
        level = probe.level(ALL)
        return cls(step_ms / 1e3, level.bandwidth, level.latency, probe.network)

    def curves(self, comparison: Comparison) -> dict[str, tuple[list[float], list[float]]]:
        """Method → when it was evaluated, in seconds, and the held-out loss there."""
        seconds = comparison.seconds(step=self.step, link=8 * self.bandwidth, latency=self.latency)
        return {
            name: ([n * seconds[name] for n in steps], losses)
            for name, (steps, losses) in comparison.curves().items()
            if name in seconds
        }

    def __str__(self) -> str:
        return f"{self.said}, a step alone takes {time_of(self.step)}"


def print_comparison(
    training: str,
    algorithms: Sequence[Any],
    replicas: int,
    steps: int,
    seeds: int,
    rates: Sequence[float],
    output: Path,
    network: Network | None,
    picture: Path | None,
    table: Path | None,
    *,
    as_json: bool,
) -> int:
    """Train, print, and draw if somebody can, with a `network` the losses against time too; returns
    the exit status. Raises BadArgument.

    `picture` is where, in the format of its suffix; None: beside the output, as SVG. To `table` all
    losses are written as CSV.
    """
    files = {"--output": output, "--csv": table, "--picture": picture}
    _require_apart({option: path for option, path in files.items() if path is not None})
    if picture is not None:
        _require_drawable(picture)
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
        except (TypeError, ValueError, OSError) as error:
            if place := place_of_users(error):
                said = f"{training} raised {type(error).__name__}: {error} (at {place})"
                raise BadArgument(said) from error
            if isinstance(error, OSError):
                raise  # of what is written here
            raise BadArgument(f"{training}: {error}") from error
        except Stopped as stopped:
            found, status = stopped.comparison, INTERRUPTED
            if not found.runs.done:
                print("gradwire: stopped before a run had ended", file=sys.stderr)
                return status
            print(f"gradwire: stopped; the same command goes on from {output}", file=sys.stderr)
    print(json.dumps(found.as_dict(), indent=1) if as_json else found)
    if not as_json:
        drawn = _drawn(found, picture or output.with_suffix(".svg"), network)
        print(f"\nwritten to {output}{drawn}")
    elif picture is not None:
        _drawn(found, picture, network)
    if table is not None:
        _write_csv(found, table)
    return status


def each_after(option: str, args: Sequence[str]) -> Iterator[str]:
    """The arguments with an option that takes several values, `--rates 0.5 1 2`, before each of
    them, as click reads it."""
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


def _require_apart(files: Mapping[str, Path]) -> None:
    """Raise BadArgument, before anything is trained, for files that nobody can write, or of which
    one would take the place of another. A picture has its own place beside the output."""
    for option, path in files.items():
        require_folder(option, path)
    if "--picture" not in files and files["--output"].suffix == ".svg":
        raise BadArgument(
            f"--output {files['--output']} is where the picture goes; give a name that ends with"
            " .json"
        )
    for (option, path), (other, its) in combinations(files.items(), 2):
        if path.resolve() == its.resolve():
            raise BadArgument(f"{other} {its} is the file of {option}; give it another name")


def _require_drawable(path: Path) -> None:
    """Raise BadArgument before anything is trained for a picture that nobody can draw."""
    if path.suffix not in FORMATS:
        raise BadArgument(f"--picture {path}: give a name that ends with {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise BadArgument(f"--picture {path} is drawn by matplotlib; pip install matplotlib")


def _write_csv(comparison: Comparison, path: Path) -> None:
    """A row for each evaluation of each run: the mean over held-out windows."""
    with whole_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        rows = csv.writer(text)
        rows.writerow(["method", "rate", "seed", "step", "loss"])
        for run in comparison.runs.done.values():
            for step, windows in sorted(run.held_out.items()):
                rows.writerow([run.method, run.factor, run.seed, step, sum(windows) / len(windows)])
        text.flush()
        text.detach()


def _drawn(comparison: Comparison, path: Path, network: Network | None) -> str:
    """The curves as a picture, where matplotlib is installed. Returns what to say of it."""
    if importlib.util.find_spec("matplotlib") is None:
        return "; pip install matplotlib for a picture"
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(7 if network is None else 12, 4.5), layout="constrained")
    axes = figure.subplots(1, 1 if network is None else 2, sharey=True, squeeze=False)[0]
    means = comparison.curves()
    for name, (steps, losses) in comparison.seed_curves().items():
        (line,) = axes[0].plot(*means[name], marker=".", label=name)
        if losses and len(losses[0]) > 1:  # between the seeds
            axes[0].fill_between(
                steps,
                list(map(min, losses)),
                list(map(max, losses)),
                color=line.get_color(),
                alpha=0.2,
                linewidth=0,
            )
    axes[0].set(xlabel="step", ylabel="held-out loss", title=comparison.runs.training)
    axes[0].legend(fontsize="small")
    if network is not None:
        for name, (seconds, losses_then) in network.curves(comparison).items():
            axes[1].plot(seconds, losses_then, marker=".", label=name)
        axes[1].set(
            xlabel="estimated seconds (compute and network, compression excluded)",
            title=str(network),
        )
    with whole_file(path) as file:
        figure.savefig(file, format=path.suffix[1:])
    return f" and {path}"
