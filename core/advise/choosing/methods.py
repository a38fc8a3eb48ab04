"""`Auto`: among which methods a training chooses while it runs, and the log by which a run is
repeated."""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from gradwire.core.advise.advice import PLAIN, default_methods, name_of
from gradwire.core.advise.compare.comparison import Comparison
from gradwire.core.advise.cost import Cost
from gradwire.core.advise.losses import known_losses, limits_of
from gradwire.core.advise.probe import Probe
from gradwire.core.advise.timeline import seconds_of
from gradwire.core.algorithms.two_level import TwoLevel
from gradwire.core.local_sgd.schedule import Schedule
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol.groups import Groups
from gradwire.core.text.options import OWN_CHECK, check_options

logger = logging.getLogger("gradwire")


class Chosen(NamedTuple):
    """A method that is chosen from this step on: its number, 0 for uncompressed averages, and how
    it is written."""

    step: int
    number: int
    method: str


@dataclass(frozen=True)
class Auto:
    """The fastest of several algorithms, to be given in the place of one, found while the training
    runs.

        handle = register_comm_hook(ddp, gradwire.Auto())
        handle = register_comm_hook(ddp, gradwire.Auto(loss="2%"))
        auto = gradwire.jax_backend.AutoStep(gradwire.Auto(), build, axis_name="data")

    Each method averages some real steps, whose time on the slowest rank is compared with that of
    others; see `gradwire.core.advise.choosing.chooser.Chooser`. All ranks change in the same step.
    Where nothing is faster than uncompressed averages, uncompressed averages stay.

    Examples:
        >>> import gradwire
        >>> from gradwire.core.advise.choosing.methods import methods_of
        >>> specs = {"w": gradwire.Spec((512, 512), "float32")}
        >>> uncompressed, *others = methods_of(gradwire.Auto(), specs, replicas=2)
        >>> uncompressed, [method.dtype for method in others]
        (AllReduce(), ['int8', 'bfloat16'])

    Args:
        loss: by how much a method's held-out loss may be higher than that of uncompressed averages,
            as `gradwire.advise` has it: "2%", or 0.02. None: methods that only round, to 8 bits or
            more, whose loss cannot be told from that of uncompressed averages.
        comparison: what `gradwire.compare` has found on this model with as many replicas, or its
            file; its methods are chosen among. None: those whose loss this project has measured on
            one small model (docs/frontier.md).
        decisions: a file. If it is not there, rank 0 writes to it which method averages from which
            step on. If it is there, methods are those in it, whatever they cost: the run is
            repeated bit for bit. Where it ends the method that was chosen stays, also after a
            restart of the run that wrote it; remove it to choose anew.
        probe: what `gradwire probe` has measured of this network, or its file. Then each method
            computes for about a second where this is registered, and has its trial in the order of
            what `gradwire.advise` expects of it. None: in the order of what they send, least first.

    Raises:
        TypeError: an argument is of another type.
        ValueError: no limit of a loss; a comparison without a limit.
    """

    loss: Annotated[float | str | None, OWN_CHECK] = None
    comparison: Annotated[Comparison | str | Path | None, OWN_CHECK] = None
    decisions: Annotated[str | Path | None, OWN_CHECK] = None
    probe: Annotated[Probe | str | Path | None, OWN_CHECK] = None

    instead: ClassVar[str] = (
        "chooses the method of a DDP while it trains: give it to"
        " gradwire.torch_backend.register_comm_hook, in JAX to gradwire.jax_backend.AutoStep, and"
        " here one method, such as the one that it has chosen (handle.stats().choices)"
    )

    def __post_init__(self) -> None:
        check_options(self)
        try:
            limits_of(self.loss)
        except ValueError as error:
            raise ValueError(f"loss={error}") from error
        if self.comparison is not None and self.loss is None:
            raise ValueError(
                "comparison= says what methods do to the loss; say how much it may be higher,"
                " loss='2%'"
            )
        given = {
            "comparison": (Comparison, str, Path),
            "decisions": (str, Path),
            "probe": (Probe, str, Path),
        }
        for name, kinds in given.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give a path")


def methods_of(
    auto: Auto,
    specs: Mapping[str, Spec],
    replicas: int,
    near: int | Groups = 1,
    own: Sequence[Any] = (),
) -> list[Any]:
    """The methods among which it chooses, uncompressed averages first and then by what they send
    between nodes, least first.

    Args:
        specs: of the gradients.
        near: how many replicas there are on each node, or which.

    Raises:
        OSError, ValueError: of the comparison, which is not there, or of another model.
    """
    if auto.comparison is None:
        each = near if isinstance(near, int) else len(near[0])
        methods = default_methods(each if each < replicas else 1)
        methods = [replace(m, within=near) if isinstance(m, TwoLevel) else m for m in methods]
        losses = known_losses({name_of(method): method for method in methods}).methods
    else:
        found = auto.comparison
        found = found if isinstance(found, Comparison) else Comparison.load(found, own)
        methods, losses = [PLAIN, *found.algorithms], found.losses(specs, replicas).methods
    limit, *_ = limits_of(auto.loss)
    fitting = [
        method
        for method in dict.fromkeys(methods)
        if method != PLAIN
        and not isinstance(method, Schedule)
        and (loss := losses.get(name_of(method))) is not None
        and (loss.by_kind or (auto.loss is not None and loss.bound <= limit))
    ]
    return [PLAIN, *sorted(fitting, key=lambda method: _sent(method, specs, replicas))]


def expected_order(auto: Auto, methods: Sequence[Any], cost: Callable[[Any], Cost]) -> list[int]:
    """The numbers of the methods in the order of their trials: as they are, or by what a probe lets
    expect of a step in which nothing overlaps.

    Args:
        cost: of a method on this device.

    Raises:
        OSError, ValueError: of the probe.
    """
    if auto.probe is None:
        return list(range(len(methods)))
    probe = auto.probe if isinstance(auto.probe, Probe) else Probe.load(auto.probe)

    def seconds(number: int) -> float:
        found = cost(methods[number])
        return found.compute + found.per_step(
            sum(seconds_of(message, probe) for message in found.messages)
        )

    return [0, *sorted(range(1, len(methods)), key=seconds)]


def _sent(method: Any, specs: Mapping[str, Spec], replicas: int) -> float:
    """Bytes between nodes in a step, on average; of what cannot be tried, more than anything."""
    try:
        dry = dry_run(method, specs, replicas)
    except Exception:  # who registers it says why
        return float("inf")
    return sum(step.traffic.far_bytes(method) for step in dry.cycle) / len(dry.cycle)


def change_in_words(step: int, method: str, before: str, times: str = "") -> str:
    """The line for the log: from this step on another method is chosen. `times`: of a step of both,
    where they are known."""
    said = f", whose steps take {times}" if times else ""
    return f"Auto: from step {step} on {method} averages, after {before}{said}"


class Decisions:
    """Which method averages from which step on.

    A run that has gone back to a saved state goes on from there: a line takes back those before it
    whose steps are not smaller.

    Args:
        methods: among which it was chosen.
        text: what `line` has written, line by line.

    Raises:
        ValueError: it is something else, or names another method.
    """

    def __init__(self, methods: Sequence[Any], text: str) -> None:
        self._steps: list[int] = []
        self._numbers: list[int] = []
        names = [repr(method) for method in methods]
        trial, chosen = 0, ""
        for line in text.splitlines():
            try:
                found = json.loads(line)
                step, method = found["step"], found["method"]
                trial, chosen = int(found.get("trial", 0)), found.get("chosen", method)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"{line[:80]!r} is no decision: {error}") from error
            if not {method, chosen} <= {*names} or type(step) is not int:
                raise ValueError(
                    f"from step {step} on {method}: methods here are {', '.join(names)}"
                )
            while self._steps and step <= self._steps[-1]:
                del self._steps[-1], self._numbers[-1]
            self._steps.append(step)
            self._numbers.append(names.index(method))
        if trial:  # the run ended in it
            self._steps.append(self._steps[-1] + trial)
            self._numbers.append(names.index(chosen))

    @staticmethod
    def line(step: int, method: Any, trial: int = 0, chosen: Any = None) -> str:
        """That from this step on it averages; or for so many steps, in a trial, while another is
        chosen."""
        of = {"trial": trial, "chosen": repr(chosen)} if trial else {}
        return json.dumps({"step": step, "method": repr(method), **of}) + "\n"

    def at(self, step: int) -> int:
        """The number of the method that averages this step."""
        place = bisect_right(self._steps, step)
        return self._numbers[place - 1] if place else 0


def read_or_begin(path: Path) -> str:
    """The decisions in a file. "": there are none, and a log of new ones can be written there; its
    folder is made. Raises OSError."""
    text = path.read_text() if path.exists() else ""
    if not text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    return text


def appended(log: Path, line: str) -> Path | None:
    """The log with a line more. None, and a warning, where it cannot be written any more: no
    training ends for it."""
    try:
        with log.open("a") as file:
            file.write(line)
    except OSError as error:
        logger.warning("Auto's decisions are not written to %s any more: %s", log, error)
        return None
    return log
