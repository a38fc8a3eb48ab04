"""Trainings: what decides about the outcome of one, and what both backends share: text, weights,
schedule."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import flags
import numpy as np
import numpy.typing as npt
from text import VOCABULARY, Text, Tokens, load

from frontier.subjects import BY_NAME, PERIOD, Subject

REPLICAS = 2
#: Steps of a training. The gap of a lossy method grows with them, so one length says little.
LENGTHS = (240, 1440)
BETAS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.95), 0.01, 1.0
#: Of Muon's learning rate to that of AdamW beside it. Muon's gradients are not clipped: its steps
#: do not depend on their length.
MUON_RATE = 5.0


@dataclass(frozen=True)
class Settings:
    """Of all trainings alike. `evaluate_every` is a multiple of `PERIOD`: then replicas that
    average their parameters have just become one model. Of those that have outer parameters these
    are evaluated."""

    steps: int = LENGTHS[0]
    width: int = 128
    layers: int = 2
    context: int = 64
    batch: int = 4
    evaluate_every: int = 4 * PERIOD
    windows: int = 128

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)

    def rate(self, step: int, peak: float) -> float:
        """Of AdamW."""
        return flags.learning_rate(step, argparse.Namespace(lr=peak, steps=self.steps))

    @property
    def text(self) -> Text:
        return _text(self.context)


@functools.cache
def _text(context: int) -> Text:
    return load(context=context)


@functools.cache
def _fingerprint(context: int) -> list[str]:
    text = _text(context)
    return [hashlib.sha256(part.tobytes()).hexdigest() for part in (text.train, text.validation)]


@dataclass(frozen=True)
class Run:
    """One training. `rate` is the peak learning rate."""

    backend: str
    subject: Subject
    rate: float
    seed: int
    settings: Settings

    @functools.cached_property
    def key(self) -> str:
        """Equal for runs that nothing tells apart: the text is what the installed Python has."""
        what = {
            "backend": self.backend,
            "algorithm": repr(self.subject.algorithm),
            "rate": self.rate,
            "seed": self.seed,
            "settings": asdict(self.settings),
            "text": _fingerprint(self.settings.context),
            "optimizer": [
                BETAS,
                WEIGHT_DECAY,
                MAX_NORM,
                *([MUON_RATE] if self.subject.muon else []),
            ],
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]

    def job(self) -> dict[str, Any]:
        """For a worker."""
        return {
            "backend": self.backend,
            "subject": self.subject.name,
            "outer_rate": self.subject.outer_rate,
            "rate": self.rate,
            "seed": self.seed,
            "settings": asdict(self.settings),
        }

    @classmethod
    def of(cls, job: dict[str, Any]) -> Run:
        subject = BY_NAME[job["subject"]].at(job["outer_rate"])
        return cls(job["backend"], subject, job["rate"], job["seed"], Settings(**job["settings"]))

    def batch(self, step: int, replica: int) -> tuple[Tokens, Tokens]:
        return self.settings.text.batch(
            self.seed, step, replica, self.settings.batch, self.settings.context
        )

    def held_out(self, replica: int) -> tuple[Tokens, Tokens]:
        return self.settings.text.validation_batch(
            replica, REPLICAS, self.settings.windows, self.settings.context
        )

    def evaluated(self, step: int) -> bool:
        """Whether held-out text is looked at after this step."""
        return (step + 1) % self.settings.evaluate_every == 0 or step + 1 == self.settings.steps


def by_muon(name: str, ndim: int) -> bool:
    """Whether Muon moves a parameter of this name in torch: a matrix of a block."""
    return ndim == 2 and name.startswith("blocks.")


def new_model(settings: Settings, seed: int) -> Any:
    """In torch, with the weights that both backends begin with."""
    import torch
    from model_torch import Transformer

    torch.manual_seed(seed)
    return Transformer(
        VOCABULARY, settings.context, settings.width, settings.layers, settings.heads
    )


def weights(settings: Settings, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """By torch's names, in torch's shapes."""
    return {name: p.detach().numpy() for name, p in new_model(settings, seed).named_parameters()}


def per_step(seconds: list[float], cycle: Any) -> float:
    """Seconds of a step, on average over a cycle of the plan: steps that send alike are alike, and
    the median speaks for them.

    Args:
        seconds: of steps 0, 1, …, a cycle of them at least.
        cycle: of the plan: the traffic of each step.
    """
    kinds = [cycle[step % len(cycle)] for step in range(len(seconds))]
    median = {
        kind: float(np.median([s for s, k in zip(seconds, kinds, strict=True) if k == kind]))
        for kind in set(kinds)
    }
    return sum(median[kind] for kind in cycle) / len(cycle)
