"""What `gradwire.compare` returns: verdicts about methods, and a table of them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.core.advise.advice import PLAIN, WIDTH, name_of
from gradwire.core.advise.compare.runs import Runs
from gradwire.core.advise.compare.schedule import doubts, ready_at, warm_up
from gradwire.core.advise.compare.verdicts import Verdict, verdict
from gradwire.core.plan.dry_run import size_of

#: Characters of a name that stands beside its figures, and of these.
NAME, SENT, LOSS = 18, 9, 8


@dataclass(frozen=True)
class Comparison:
    """The runs of some methods on one training, and what they say. It prints as a table of 80 characters.

    Attributes:
        runs: what was trained, and how it went.
        algorithms: what is compared with plain averages, in order.
    """

    runs: Runs
    algorithms: Sequence[Any]

    @property
    def seeds(self) -> list[int]:
        """The seeds with which plain averages were run."""
        return sorted(seed for method, seed in self.runs.done if method == name_of(PLAIN))

    def verdict(self, algorithm: Any) -> Verdict:
        """How a method's held-out loss differs from that of plain averages, at the last step after which both were evaluated; with the seeds that both were run
        with. Nothing is said of a local method before three averages of all parameters."""
        done, name, plain = self.runs.done, name_of(algorithm), name_of(PLAIN)
        seeds = [seed for seed in self.seeds if (name, seed) in done]
        both = [done[each, seed].held_out for seed in seeds for each in (plain, name)]
        common = set.intersection(*map(set, both)) if both else set()
        ready = 0 if algorithm == PLAIN else ready_at(algorithm, self.runs.replicas)
        steps = [step for step in common if step >= ready]
        if not steps:
            return Verdict(None)
        step = max(steps)
        losses = [[done[each, seed].held_out[step] for seed in seeds] for each in (plain, name)]
        return verdict(step, losses[0], losses[1])

    def notes(self) -> list[str]:
        """What a reader of the table has to know."""
        runs, found = self.runs, []
        plain = [runs.done[name_of(PLAIN), seed] for seed in self.seeds]
        if plain and (risen := warm_up(plain[0].rates)) * 2 > runs.steps:
            found.append(
                f"The learning rate rises for {risen} of the {runs.steps} steps: give --steps {2 * risen} or more, twice the warm-up, at least"
            )
        if plain and not any(run.held_out for run in plain):
            found.append("There are no held-out losses, so there are no verdicts: give Training(..., evaluate=)")
        for algorithm in self.algorithms:
            found += [f"{name_of(algorithm)}: {each}" for each in doubts(algorithm, runs.replicas, runs.steps)]
        return found

    def as_dict(self) -> dict[str, Any]:
        """The verdicts as plain data, for JSON."""
        return {
            name_of(algorithm): {
                "step": found.step,
                "loss": found.loss,
                "difference": found.difference,
                "margin": found.margin,
                "seeds": found.seeds,
                "verdict": str(found),
            }
            for algorithm in self.algorithms
            for found in [self.verdict(algorithm)]
        }

    def curves(self) -> dict[str, tuple[list[int], list[float]]]:
        """Of each method the steps after which it was evaluated, and the held-out loss there, the mean over windows and seeds."""
        found = {}
        for name in [name_of(each) for each in (PLAIN, *self.algorithms)]:
            runs = [run.held_out for (method, _), run in self.runs.done.items() if method == name]
            steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
            found[name] = steps, [float(np.mean([run[step] for run in runs])) for step in steps]
        return found

    def __str__(self) -> str:
        runs, seeds = self.runs, len(self.seeds)
        above = f"{runs.training}: {runs.replicas} replicas, {runs.steps} steps, {seeds} seed{'s' * (seeds != 1)}"
        lines = [textwrap.fill(above, WIDTH), "", f"{'':<{NAME}}{'sent':>{SENT}}{'loss':>{LOSS}}  to plain averages"]
        for algorithm in (PLAIN, *self.algorithms):
            lines += self._row(algorithm)
        notes = [textwrap.fill(note, WIDTH) for note in self.notes()]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def _row(self, algorithm: Any) -> list[str]:
        name = name_of(algorithm)
        sent = next((size_of(run.sent) for (method, _), run in self.runs.done.items() if method == name), "")
        found = self.verdict(algorithm)
        loss = "" if found.step is None else f"{found.loss:.4g}"
        says = found.in_short() if found.seeds == len(self.seeds) else str(found)
        says = "" if algorithm == PLAIN else says if sent else "not run"
        first, *others = textwrap.wrap(says, WIDTH - NAME - SENT - LOSS - 2) or [""]
        own_line = [name] if len(name) > NAME else []
        row = f"{'' if own_line else name:<{NAME}}{sent:>{SENT}}{loss:>{LOSS}}  {first}".rstrip()
        return [*own_line, row, *(" " * (NAME + SENT + LOSS + 2) + each for each in others)]
