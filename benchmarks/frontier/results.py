"""The file of results: every finished run, the times of steps, and what follows from both for each
method."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from frontier.runs import LENGTHS, REPLICAS, Run, Settings, per_step, weights
from frontier.subjects import FIRST, OUTER_RATES, Subject
from gradwire import plan

#: Bytes per second.
LINKS = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9}
#: Learning rates, inner and outer ones, that are tried beyond those that are asked for, where the
#: best is at an end.
MORE_RATES = 2
#: Seconds that a message takes to the next host when the link is idle.
LATENCY = 1e-4
BACKENDS = ("torch", "jax")
#: Of the methods of the first screen, at the greatest length.
FIRST_SEEDS = 8
Row = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """What is asked for, at one length of training. Learning rates are searched in torch, with the
    first seed."""

    subjects: tuple[Subject, ...]
    rates: tuple[float, ...]
    seeds: int
    settings: Settings

    def seeds_of(self, subject: Subject) -> int:
        """More of those that the first screen is about, at the length that it tells."""
        first = self.settings.steps == LENGTHS[-1] and subject in FIRST
        return FIRST_SEEDS if first else self.seeds

    def tuning_run(self, subject: Subject, rate: float, outer_rate: float | None = None) -> Run:
        return Run("torch", subject.at(outer_rate), rate, 0, self.settings)


@dataclass
class Results:
    """The file, which is written after each run."""

    path: Path
    machine: str = ""
    #: Finished runs by their key.
    runs: dict[str, Row] = field(default_factory=dict)
    #: "machine", "settings", and for each backend the seconds of a step by method.
    times: Row = field(default_factory=dict)
    #: Summaries of all methods, as pictures and pages show them.
    methods: list[Row] = field(default_factory=list)
    settings: Row = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> Results:
        if not path.exists():
            return cls(path)
        found = json.loads(path.read_text())
        runs = {run["key"]: run for run in found["runs"]}
        return cls(
            path, found["machine"], runs, found["times"], found["methods"], found["settings"]
        )

    @property
    def content(self) -> Row:
        """Of the file."""
        return {
            "command": "make frontier",
            "machine": self.machine,
            "settings": self.settings,
            "links": LINKS,
            "latency": LATENCY,
            "times": self.times,
            "methods": self.methods,
            "runs": list(self.runs.values()),
        }

    def save(self) -> None:
        """In one piece, or not at all; a line for each run and each method."""
        text = ",\n".join(f'"{key}": {_lines(value)}' for key, value in self.content.items())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(f"{{\n{text}\n}}\n")
        unfinished.replace(self.path)

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        return [run for run in runs if run.key not in self.runs]

    def add(self, run: Run, curve: list[list[float]], **what: Any) -> None:
        """`curve`: [step, loss on held-out text] of each evaluation."""
        told = {
            "key": run.key,
            "backend": run.backend,
            "subject": run.subject.name,
            "rate": run.rate,
            "seed": run.seed,
        }
        if run.subject.outer_rate is not None:
            told["outer_rate"] = run.subject.outer_rate
        finite = [[step, round(loss, 6) if math.isfinite(loss) else None] for step, loss in curve]
        self.runs[run.key] = told | {"curve": finite} | what

    def loss(self, run: Run) -> float:
        """In the end; infinite where a run has broken."""
        last = self.runs[run.key]["curve"][-1][1]
        return math.inf if last is None else float(last)

    def tuning_of(self, subject: Subject, experiment: Experiment) -> list[Run]:
        """Learning rates as `_searched`; then outer ones, with the best of these."""
        runs = self._searched(experiment.rates, lambda rate: experiment.tuning_run(subject, rate))
        if subject.outer_rate is None or self.missing(runs):
            return runs
        rate, tried = min(runs, key=self.loss).rate, sorted({*OUTER_RATES, subject.outer_rate})
        return runs + self._searched(
            tried, lambda outer: experiment.tuning_run(subject, rate, outer)
        )

    def _searched(self, rates: Sequence[float], run_at: Callable[[float], Run]) -> list[Run]:
        """Runs at these rates; and, if they are several, at up to two beyond the end at which the
        loss is least: twice the highest, half the lowest."""
        tried = list(rates)
        while 1 < len(tried) < len(rates) + MORE_RATES:
            runs = {rate: run_at(rate) for rate in tried}
            if self.missing(list(runs.values())):
                break
            best = min(tried, key=lambda rate: self.loss(runs[rate]))
            if min(tried) < best < max(tried):
                break
            tried.append(2 * best if best == max(tried) else best / 2)
        return [run_at(rate) for rate in tried]

    def tuning(self, experiment: Experiment) -> list[Run]:
        """Of all methods, as far as it is known what will be tried."""
        return [
            run for subject in experiment.subjects for run in self.tuning_of(subject, experiment)
        ]

    def best_rates(self, subject: Subject, experiment: Experiment) -> tuple[float, float | None]:
        """Those of least loss, the learning rate and the outer one, once the tuning is done."""
        best = min(self.tuning_of(subject, experiment), key=self.loss)
        return best.rate, best.subject.outer_rate

    def tuned(self, experiment: Experiment) -> list[Subject]:
        """The methods whose learning rate is known."""
        return [s for s in experiment.subjects if not self.missing(self.tuning_of(s, experiment))]

    def training(self, experiment: Experiment) -> list[Run]:
        """All seeds in torch and the first in JAX, of the methods whose learning rate is known; one
        seed of all after the other."""
        best = [
            (subject, *self.best_rates(subject, experiment)) for subject in self.tuned(experiment)
        ]
        most = max((experiment.seeds_of(subject) for subject, *_ in best), default=0)
        return [
            Run(backend, subject.at(outer_rate), rate, seed, experiment.settings)
            for backend in BACKENDS
            for seed in range(most)
            for subject, rate, outer_rate in best
            if seed < (experiment.seeds_of(subject) if backend == "torch" else 1)
        ]

    def keep_only(self, experiments: Sequence[Experiment]) -> None:
        """Forget runs of these methods in other configurations."""
        asked = {subject.name for e in experiments for subject in e.subjects}
        wanted = [run.key for e in experiments for run in [*self.tuning(e), *self.training(e)]]
        others = [key for key, run in self.runs.items() if run["subject"] not in asked]
        self.runs = {
            key: self.runs[key] for key in dict.fromkeys([*wanted, *others]) if key in self.runs
        }

    def summarize(self, experiments: Sequence[Experiment]) -> None:
        """Fill `methods`, with those whose learning rate is known at some length, from the runs
        that are there."""
        first = experiments[0]
        self.settings = asdict(first.settings) | {
            "steps": [e.settings.steps for e in experiments if self.tuned(e)],
            "replicas": REPLICAS,
            "seeds": first.seeds,
            "rates": list(first.rates),
            "outer_rates": OUTER_RATES,
        }
        shapes = {name: x.shape for name, x in weights(first.settings, 0).items()}
        self.settings["parameters"] = sum(math.prod(shape) for shape in shapes.values())
        self.methods = []
        for subject in first.subjects:
            lengths = {
                str(e.settings.steps): self._at_length(subject, e)
                for e in experiments
                if subject in self.tuned(e)
            }
            if lengths:
                self.methods.append(self._sent(subject, shapes) | {"lengths": lengths})

    def _at_length(self, subject: Subject, experiment: Experiment) -> Row:
        tried = {
            _rates(run.rate, run.subject.outer_rate): self.loss(run)
            for run in self.tuning_of(subject, experiment)
        }
        done = [
            r
            for r in self.training(experiment)
            if r.subject.name == subject.name and r.key in self.runs
        ]
        losses = {b: [self.loss(run) for run in done if run.backend == b] for b in BACKENDS}
        return {
            "tried": {r: loss if math.isfinite(loss) else None for r, loss in tried.items()},
            "rates": _rates(*self.best_rates(subject, experiment)),
            "loss": round(statistics.mean(losses["torch"][: experiment.seeds]), 6),
            "losses": losses,
        }

    def _sent(self, subject: Subject, shapes: dict[str, tuple[int, ...]]) -> Row:
        planned = plan(shapes, subject.algorithm, world_size=REPLICAS)
        return {
            "name": subject.name,
            "kind": subject.kind,
            "algorithm": repr(subject.algorithm),
            "bytes_per_step": planned.wire_bytes,
            "dense_bytes_per_step": planned.dense_bytes,
            "collectives": planned.collectives,
            "wire_seconds": {
                link: planned.seconds(REPLICAS, LATENCY, bandwidth)
                for link, bandwidth in LINKS.items()
            },
            "step_seconds": {b: self.times.get(b, {}).get(subject.name) for b in BACKENDS},
        }

    def add_times(
        self,
        backend: str,
        subjects: Sequence[Subject],
        seconds: Sequence[list[float]],
        settings: Settings,
    ) -> None:
        shapes = {name: x.shape for name, x in weights(settings, 0).items()}
        self.times[backend] = {
            subject.name: per_step(of, plan(shapes, subject.algorithm, world_size=REPLICAS).steps)
            for subject, of in zip(subjects, seconds, strict=True)
        }


def _rates(rate: float, outer_rate: float | None) -> str:
    return f"{rate:g}" if outer_rate is None else f"{rate:g}, outer {outer_rate:g}"


def _lines(value: Any) -> str:
    if isinstance(value, list):
        return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)
