"""`gradwire advise`: measures what methods cost here, and prints which one helps."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from gradwire.advising import compared_losses, method_costs, step_compute
from gradwire.cli.models import BadArgument, Model, load_callable
from gradwire.core.advise.advice import weigh
from gradwire.core.advise.probe import Probe
from gradwire.core.advise.timing import NoStep
from gradwire.core.kernels.abstract import NotPortable


def load_probe(text: str) -> Probe:
    """The probe in a file. Raises ValueError with the fix."""
    try:
        return Probe.load(text)
    except OSError as error:
        raise ValueError(
            f"{text}: {error.strerror}; make it with `gradwire probe`, see `gradwire probe --help`"
        ) from error


def print_advice(
    model: Model,
    probe: Probe,
    step_ms: float | None,
    measure: str | None,
    algorithms: Sequence[Any],
    limits: Sequence[float],
    comparison: str | None,
    *,
    as_json: bool,
) -> None:
    """Measure and print. Raises BadArgument."""
    if (step_ms is None) == (measure is None):
        raise BadArgument(
            "give --step-ms, the time of a step of one replica alone, or --measure"
            " module:train_step, which does one"
        )
    if step_ms is not None and not 0 < step_ms < math.inf:
        raise BadArgument(f"--step-ms {step_ms:g} must be more than 0, and a number")
    if model.framework not in ("", probe.framework):
        # A note only: shapes are shapes, and a tree of arrays may be anybody's.
        print(
            f"gradwire: MODEL is of {model.framework} and --probe of {probe.framework}: what"
            f" follows is about training in {probe.framework}. For the other, make the probe with"
            f" `gradwire probe --framework {model.framework}`",
            file=sys.stderr,
        )
    step: float | Callable[[], Any] = (step_ms or 0) / 1e3
    if measure is not None:
        step = load_callable(measure, "--measure")
    try:
        compute = step_compute(step, probe)
    except NoStep as error:
        raise BadArgument(f"--measure {measure!r}: {error}") from error
    losses = None
    if comparison is not None:
        try:
            compared, losses = compared_losses(comparison, model.specs, probe, algorithms)
        except OSError as error:
            raise BadArgument(
                f"--compare {comparison}: {error.strerror}; make it with `gradwire compare`"
            ) from error
        except ValueError as error:
            raise BadArgument(f"--compare: {error}") from error
        algorithms = algorithms or compared
    try:
        costs = method_costs(model.specs, probe, algorithms or None, _shown)
    except (ValueError, NotPortable) as error:
        raise BadArgument(f"--algorithm: {error}") from error
    advice = weigh(costs, model.specs, probe, compute, limits, losses)
    print(json.dumps(advice.as_dict(), indent=1) if as_json else advice)


def _shown(methods: Sequence[Any]) -> Iterable[Any]:
    console = Console(file=sys.stderr)
    return track(
        methods,
        "measuring what methods cost here",
        console=console,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
