"""What `gradwire.compare` returns: verdicts about methods, and a table of them."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.core.advise.advice import PLAIN, WIDTH, name_of
from gradwire.core.advise.compare.fingerprint import source_of_method
from gradwire.core.advise.compare.runs import Run, Runs, described
from gradwire.core.advise.compare.schedule import doubts, ready_at, warm_up
from gradwire.core.advise.compare.verdicts import Verdict, verdict
from gradwire.core.advise.losses import LossDifference, Losses
from gradwire.core.ops import Spec
from gradwire.core.plan.advice import CompressionWarning
from gradwire.core.plan.dry_run import size_of
from gradwire.core.plan.expressions import NotAnAlgorithm, parse_algorithm
from gradwire.core.plan.links import Library
from gradwire.core.plan.utilization import utilization
from gradwire.core.text.wording import many

#: Characters of a name that stands beside its figures, and of these.
NAME, SENT, RATE, LOSS = 18, 9, 6, 8


@dataclass(frozen=True)
class Comparison:
    """The runs of some methods on one training, and what they say. It prints as a table of 80
    characters.

    Where learning rates are searched, every other held-out window decides about the rate, with the
    first seed, and the others about the verdict.

    Attributes:
        runs: what was trained, and how it went.
        algorithms: what is compared with uncompressed averages, in order.
    """

    runs: Runs
    algorithms: Sequence[Any]

    @classmethod
    def load(cls, path: str | Path, own: Sequence[Any] = ()) -> Comparison:
        """That of which `gradwire.compare` has written the runs.

        Args:
            path: the file.
            own: methods of one's own: a file has their names alone. Runs of one that is not among
                them are left out.

        Warns:
            CompressionWarning: runs are left out.

        Raises:
            OSError: there is no such file.
            ValueError: it is something else.
        """
        runs, found = Runs.load(path), []
        known = {name_of(each): each for each in own}
        for name in dict.fromkeys(
            run.method for run in runs.done.values() if run.method != name_of(PLAIN)
        ):
            try:
                mine = known[name] if name in known else parse_algorithm(name)
                if source_of_method(mine) == runs.sources.get(name, ""):
                    found.append(mine)
                else:
                    warnings.warn(
                        f"{path}: {name} is left out, which was run as it was written then, or is"
                        " another method of that name; compare it anew",
                        CompressionWarning,
                        stacklevel=2,
                    )
            except NotAnAlgorithm:
                fix = "give the method itself, on the command line by --algorithm module:Class(…)"
                warnings.warn(
                    f"{path}: {name} is left out, a method of your own; {fix}",
                    CompressionWarning,
                    stacklevel=2,
                )
        return cls(runs, found)

    @property
    def searched(self) -> bool:
        """Whether each method has a learning rate of its own."""
        return len(self.runs.factors) > 1

    @property
    def _tells_rates(self) -> bool:
        return list(self.runs.factors) != [1.0]

    @property
    def seeds(self) -> list[int]:
        """The seeds with which uncompressed averages were run."""
        return sorted(self._chosen(PLAIN))

    def tried(self, algorithm: Any) -> dict[float, float]:
        """Factor on the learning rate → held-out loss of that part of the windows which the verdict
        leaves out, with the first seed; infinite where a run has broken."""
        found = {}
        for factor in self.runs.factors:
            run = self.runs.done.get((name_of(algorithm), 0, factor))
            if run is not None and run.held_out:
                loss = float(
                    np.mean(
                        run.held_out[self._last(algorithm, run.held_out) or max(run.held_out)][::2]
                    )
                )
                found[factor] = loss if math.isfinite(loss) else math.inf
        return found

    def factor(self, algorithm: Any) -> float | None:
        """The factor on the user's learning rate with which a method is compared: that of least
        loss; None before all were tried."""
        if not self.searched:
            return self.runs.factors[0]
        losses = self.tried(algorithm)
        return (
            min(losses, key=lambda factor: losses[factor])
            if len(losses) == len(self.runs.factors)
            else None
        )

    def verdict(self, algorithm: Any) -> Verdict:
        """How a method's held-out loss differs from that of uncompressed averages, at the last step
        after which both were evaluated; with the seeds that both were run with. Nothing is said of
        a local method before three averages of all parameters."""
        plain, own = self._chosen(PLAIN), self._chosen(algorithm)
        seeds = [seed for seed in sorted(plain) if seed in own]
        both = [runs[seed].held_out for seed in seeds for runs in (plain, own)]
        common = set.intersection(*map(set, both)) if both else set()
        step = self._last(algorithm, common)
        if step is None:
            return Verdict(None)
        part = slice(1, None, 2) if self.searched else slice(None)
        losses = [[runs[seed].held_out[step][part] for seed in seeds] for runs in (plain, own)]
        return verdict(step, losses[0], losses[1])

    def _last(self, algorithm: Any, steps: Mapping[int, Any] | set[int]) -> int | None:
        """The last of these steps, if something can be said there."""
        ready = 0 if algorithm == PLAIN else ready_at(algorithm, self.runs.replicas)
        return max((step for step in steps if step >= ready), default=None)

    def _chosen(self, algorithm: Any) -> dict[int, Run]:
        """The runs with the factor that was chosen, by seed."""
        name, factor = name_of(algorithm), self.factor(algorithm)
        return {
            run.seed: run
            for run in self.runs.done.values()
            if (run.method, run.factor) == (name, factor)
        }

    def losses(self, specs: Mapping[str, Spec], replicas: int) -> Losses:
        """What it says of methods, for a model and so many replicas.

        Raises:
            ValueError: it is of another model, or of another number of replicas; or has no interval
                for any method.
        """
        runs = self.runs
        if runs.replicas != replicas:
            raise ValueError(
                f"it is of {runs.replicas} replicas, and the probe of {replicas}: compare with"
                f" --replicas {replicas}"
            )
        models = {run.model for run in runs.done.values()}
        if models != {described(specs)}:
            raise ValueError(
                f"it is of {', '.join(sorted(models))}, and the model has {described(specs)}"
            )
        found = {}
        for algorithm in self.algorithms:
            verdict, rate = self.verdict(algorithm), self.factor(algorithm)
            if verdict.bound is not None and rate is not None:
                found[name_of(algorithm)] = LossDifference(verdict.difference, verdict.bound, rate)
        if not found and not self.algorithms:
            raise ValueError(
                "it has no method that is known here: give the method itself, on the command line"
                " by --algorithm module:Class(…)"
            )
        if not found:
            raise ValueError(
                "it has no interval for any method: compare with --seeds 3, and the --steps that it"
                " asks for"
            )
        return Losses(
            f"{runs.training}, {runs.steps} steps, {len(self.seeds)} seeds (gradwire compare)",
            found,
            own=True,
        )

    def notes(self) -> list[str]:
        """What a reader of the table has to know."""
        runs, found = self.runs, list(self.runs.notes)
        plain = list(self._chosen(PLAIN).values())
        if plain and (risen := warm_up(plain[0].rates)) * 2 > runs.steps:
            found.append(
                f"The learning rate rises for {risen} of the {runs.steps} steps: give --steps"
                f" {2 * risen} or more, twice the warm-up, at least"
            )
        if plain and not any(run.held_out for run in plain):
            found.append(
                "There are no held-out losses, so there are no verdicts: give Training(...,"
                " evaluate=)"
            )
        found += self._edges()
        for algorithm in self.algorithms:
            about = doubts(algorithm, runs.replicas, runs.steps, searched=self.searched)
            found += [f"{name_of(algorithm)}: {each}" for each in about]
        return found

    def _edges(self) -> list[str]:
        """Methods whose best rate may lie outside the grid, at each end of it."""
        if not self.searched:
            return []
        grid, found = self.runs.factors, []
        for end, next_to_it in ((grid[0], grid[1]), (grid[-1], grid[-2])):
            there = [
                name_of(each) for each in (PLAIN, *self.algorithms) if self.factor(each) == end
            ]
            if there:
                wider = " ".join(f"{factor:g}" for factor in sorted([*grid, end**2 / next_to_it]))
                found.append(
                    f"The best learning rate, × {end:g}, is at the edge of the grid, and may lie"
                    f" beyond: give --rates {wider} (for {', '.join(there)})"
                )
        return found

    def as_dict(self) -> dict[str, Any]:
        """The verdicts as plain data, for JSON, with the factor on the learning rate, and the
        losses by which it was chosen; None for what is no number."""
        return {
            name_of(algorithm): {
                "step": found.step,
                "loss": _number(found.loss),
                "difference": _number(found.difference),
                "margin": found.margin,
                "seeds": found.seeds,
                "rate": self.factor(algorithm),
                "tried": {
                    f"{factor:g}": _number(loss) for factor, loss in self.tried(algorithm).items()
                },
                "verdict": str(found),
            }
            for algorithm in (PLAIN, *self.algorithms)
            for found in [self.verdict(algorithm)]
        }

    def curves(self) -> dict[str, tuple[list[int], list[float]]]:
        """Method → the steps after which it was evaluated, and the held-out loss there, the mean
        over windows and seeds."""
        return {
            name: (steps, [float(np.mean(each)) for each in losses])
            for name, (steps, losses) in self.seed_curves().items()
        }

    def seed_curves(self) -> dict[str, tuple[list[int], list[list[float]]]]:
        """Method → the steps after which it was evaluated, and the held-out loss of each seed
        there, the mean over windows."""
        found = {}
        for algorithm in (PLAIN, *self.algorithms):
            runs = [run.held_out for _, run in sorted(self._chosen(algorithm).items())]
            steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
            found[name_of(algorithm)] = (
                steps,
                [[float(np.mean(run[step])) for run in runs] for step in steps],
            )
        return found

    def seconds(
        self,
        *,
        step: float,
        link: str | float,
        latency: float = 0.0,
        nodes: int | None = None,
        library: Library = "nccl",
    ) -> dict[str, float]:
        """How long a step takes under each method that was run, in seconds, if a link joins the
        replicas, or so many nodes of them: by `gradwire.utilization`, whose arguments these are.
        What compressing takes is not in it.

        Raises:
            ValueError: as `gradwire.utilization`.
        """
        shares = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CompressionWarning)  # those who trained were told
            for algorithm in (PLAIN, *self.algorithms):
                if self._chosen(algorithm):
                    shares[name_of(algorithm)] = utilization(
                        self.runs.specs,
                        algorithm,
                        step=step,
                        link=link,
                        replicas=self.runs.replicas,
                        nodes=nodes,
                        latency=latency,
                        library=library,
                    )
        return {name: step / share for name, share in shares.items()}

    def __str__(self) -> str:
        runs, seeds = self.runs, len(self.seeds)
        above = (
            f"{runs.training}: {many(runs.replicas, 'replica')}, {many(runs.steps, 'step')},"
            f" {many(seeds, 'seed')}"
        )
        rate = f"{'rate':>{RATE}}" if self._tells_rates else ""
        lines = [
            textwrap.fill(above, WIDTH),
            "",
            f"{'':<{NAME}}{'sent':>{SENT}}{rate}{'loss':>{LOSS}}  to uncompressed",
        ]
        for algorithm in (PLAIN, *self.algorithms):
            lines += self._row(algorithm)
        notes = [textwrap.fill(note, WIDTH) for note in self.notes()]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def _row(self, algorithm: Any) -> list[str]:
        name, found, factor = name_of(algorithm), self.verdict(algorithm), self.factor(algorithm)
        sent = next((size_of(run.sent) for run in self._chosen(algorithm).values()), "")
        rate = f"{'' if factor is None else f'×{factor:g}':>{RATE}}" if self._tells_rates else ""
        loss = "" if found.step is None else f"{found.loss:.4g}"
        figures = f"{sent:>{SENT}}{rate}{loss:>{LOSS}}  "
        says = found.in_short() if found.seeds == len(self.seeds) else str(found)
        says = "" if algorithm == PLAIN else says if sent else "not run"
        first, *others = textwrap.wrap(says, WIDTH - NAME - len(figures)) or [""]
        fits = len(name) <= NAME and len(f"{name} {sent}") <= NAME + SENT
        own_line = [] if fits else [name]
        row = f"{'' if own_line else name:<{NAME}}{figures}{first}".rstrip()
        return [*own_line, row, *(" " * (NAME + len(figures)) + each for each in others)]


def _number(x: float) -> float | None:
    return x if math.isfinite(x) else None
