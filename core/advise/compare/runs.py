"""What a comparison has run, and the file that it goes on from."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gradwire.core.advise.compare.fingerprint import Fingerprint
from gradwire.core.algorithms.shared.views import StackedShape
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import size_of
from gradwire.core.state.files import whole_file

#: Of the file.
FORMAT = "gradwire comparison 2"


@dataclass(frozen=True)
class Run:
    """One training under one method, with one seed and one learning rate.

    Attributes:
        method: as it is written; of uncompressed averages "plain".
        seed: of weights, data and whatever draws.
        losses: of each step, the mean over replicas.
        held_out: number of steps done → the loss of each held-out window.
        rates: the optimizer's largest learning rate in each step; [] where nobody knows it.
        sent: bytes per step, in the unit of a plan.
        factor: on the user's learning rates.
        specs: what was trained: the shapes and dtypes of the parameters, by name.
    """

    method: str
    seed: int
    losses: Sequence[float]
    held_out: Mapping[int, Sequence[float]]
    rates: Sequence[float] = ()
    sent: float = 0.0
    factor: float = 1.0
    specs: Mapping[str, Spec] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """What was trained, see `described`."""
        return described(self.specs)


def described(specs: Mapping[str, Spec]) -> str:
    """A model in words that differ between models whose parameters have other shapes or dtypes.
    Names do not count: backends have their own."""
    shapes = sorted((tuple(spec.shape), spec.dtype) for spec in specs.values())
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    return (
        f"{len(specs)} parameters of {size_of(sum(spec.nbytes for spec in specs.values()))}"
        f" ({digest})"
    )


@dataclass
class Runs:
    """The runs of a comparison, by method, seed and factor on the learning rates.

    Attributes:
        training: what was trained, as the user calls it.
        replicas, steps: of each run.
        factors: among which that of each method is searched, ascending; one is that of all.
        done: what has been run, in that order.
        fingerprint: of the training; None before anybody has looked.
        sources: of methods of somebody's own, by name: a digest of how each is written.
        notes: what a file had of it, in words.
    """

    training: str
    replicas: int
    steps: int
    factors: Sequence[float] = (1.0,)
    done: dict[tuple[str, int, float], Run] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None
    sources: dict[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def specs(self) -> Mapping[str, Spec]:
        """The shapes and dtypes of the parameters, by name; {} before anything has been run."""
        return next((run.specs for run in self.done.values()), {})

    def add(self, run: Run) -> None:
        """Note a run, in place of one with the same method, seed and factor. Raises ValueError if
        it is of another model than those that are there."""
        other = next(iter(self.done.values()), run)
        if other.specs is not run.specs and other.model != run.model:
            raise ValueError(
                f"it trains {run.model}, and runs that are kept are of {other.model}; name another"
                " file"
            )
        self.done[run.method, run.seed, run.factor] = run

    def has(self, method: str, seed: int, factor: float, looks: Sequence[int]) -> bool:
        """Whether that was run, and evaluated after so many steps."""
        run = self.done.get((method, seed, factor))
        return run is not None and set(looks) <= set(run.held_out)

    def save(self, path: str | Path) -> None:
        """Write them as JSON, beside what another comparison of this training has written there
        meanwhile; what was there before stays until that is done. Raises OSError."""
        self._keep_others(path)
        data = {
            "format": FORMAT,
            "training": self.training,
            "replicas": self.replicas,
            "steps": self.steps,
            "factors": list(self.factors),
            "fingerprint": None if self.fingerprint is None else self.fingerprint.written(),
            "sources": self.sources,
            "shapes": {name: _written(spec) for name, spec in self.specs.items()},
            "runs": [
                {k: x for k, x in asdict(run).items() if k != "specs"} for run in self.done.values()
            ],
        }
        with whole_file(path) as file:
            file.write((json.dumps(_of_json(data), allow_nan=False) + "\n").encode())

    def _keep_others(self, path: str | Path) -> None:
        """Note the runs of a file that are of this very training, and are not here."""
        try:
            found = Runs.load(path)
        except (OSError, ValueError):  # none, or nothing to be kept
            return
        alike = all(
            getattr(self, name) == getattr(found, name)
            for name in ("training", "replicas", "steps")
        )
        if not alike or self._changed_since(found):
            return
        found._drop_edited(self.sources)
        for key, run in found.done.items():
            if key not in self.done and run.model == next(iter(self.done.values()), run).model:
                self.done[key] = run
        self.sources = found.sources | self.sources

    @classmethod
    def load(cls, path: str | Path) -> Runs:
        """Read what `save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is something else.
        """
        try:
            data: dict[str, Any] = {"format": None, **json.loads(Path(path).read_text())}
            factors = tuple(float(x) for x in data["factors"])
            runs = cls(str(data["training"]), int(data["replicas"]), int(data["steps"]), factors)
            known = data["fingerprint"]
            runs.fingerprint = None if known is None else Fingerprint.read(known)
            runs.sources = {str(m): str(x) for m, x in data.get("sources", {}).items()}
            specs = {name: _read(spec) for name, spec in data["shapes"].items()}
            for run in data["runs"]:
                held_out = {
                    int(step): [float(x) for x in losses]
                    for step, losses in run["held_out"].items()
                }
                losses = [float(x) for x in run["losses"]]
                runs.add(Run(**run | {"losses": losses, "held_out": held_out, "specs": specs}))
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} is no comparison of gradwire ({type(error).__name__}: {error})"
            ) from error
        if data["format"] != FORMAT:
            raise ValueError(f"{path} has the format {data['format']!r}, not {FORMAT!r}")
        return runs

    def continued(self, path: str | Path, looks: Mapping[str, Sequence[int]] | None = None) -> Runs:
        """The same, with what a file has of this very training, of other factors too, which is
        named, as far as it was evaluated after the steps `looks` of its method; this, if there is
        no file, or if its runs are of the training as it was before. Raises ValueError for a file
        of another comparison."""
        if not Path(path).exists():
            return self
        found = Runs.load(path)
        for name in ("training", "replicas", "steps"):
            mine, theirs = getattr(self, name), getattr(found, name)
            if mine != theirs:
                raise ValueError(
                    f"{path} has runs with {name}={theirs!r}, and not {mine!r}; name another file,"
                    " or remove it"
                )
        why_not = self._changed_since(found)
        if why_not and found.done:
            note = (
                f"{path} has {len(found.done)} runs of another training, of which {why_not} differ:"
                " all are made anew"
            )
            return replace(self, notes=(note,))
        notes = found._drop_edited(self.sources)
        if taken := found._listed(looks or {}):
            notes.append(f"Taken from {path}: {taken}")
        return replace(
            found,
            factors=self.factors,
            fingerprint=self.fingerprint,
            sources=found.sources | self.sources,
            notes=tuple(notes),
        )

    def _drop_edited(self, sources: Mapping[str, str]) -> list[str]:
        """Forget the runs of methods that are written in another way by now, or are others of the
        same name. Returns what is to be said of it."""
        edited = {m for m, x in sources.items() if x != self.sources.get(m, "")}
        dropped = {key: run for key, run in self.done.items() if run.method in edited}
        for key in dropped:
            del self.done[key]
        methods = dict.fromkeys(run.method for run in dropped.values())
        return [
            f"{method} is written in another way than when it was run: its runs are made anew"
            for method in methods
        ]

    def _changed_since(self, before: Runs) -> str:
        if self.fingerprint is None:
            return ""
        return (
            "marks"
            if before.fingerprint is None
            else self.fingerprint.difference(before.fingerprint)
        )

    def _listed(self, looks: Mapping[str, Sequence[int]]) -> str:
        seeds: dict[str, set[int]] = {}
        for run in self.done.values():
            if set(looks.get(run.method, ())) <= set(run.held_out):
                seeds.setdefault(run.method, set()).add(run.seed)
        return "; ".join(
            f"{method} (seeds {', '.join(map(str, sorted(own)))})" for method, own in seeds.items()
        )


def _of_json(x: Any) -> Any:
    """The same with "nan" and "inf" in place of numbers that JSON does not have."""
    if isinstance(x, Mapping):
        return {key: _of_json(each) for key, each in x.items()}
    if isinstance(x, list | tuple):
        return [_of_json(each) for each in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def _written(spec: Spec) -> dict[str, Any]:
    stacked = getattr(spec.shape, "stacked", 0)
    return {"shape": list(spec.shape), "dtype": spec.dtype} | (
        {"stacked": stacked} if stacked else {}
    )


def _read(written: Mapping[str, Any]) -> Spec:
    shape = tuple(written["shape"])
    return Spec(
        StackedShape(shape, written["stacked"]) if "stacked" in written else shape, written["dtype"]
    )
