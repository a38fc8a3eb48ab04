"""What concerns all programs of a step, and so is answered by the driver: norms, sums, updates,
whether all was finite."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Arrived:
    """The answers, which are to be watched."""

    watched: tuple[Tensor, ...]


class Asked(IntEnum):
    """What concerns all programs of a step, in the order in which they are answered when nothing is
    on its way any more."""

    NORM = 0
    SUM = 1
    UPDATE = 2
    FINITE = 3


@dataclass(slots=True)
class Question:
    """What a program adds to it: the norm of its gradients, its addend, or its gradients and
    whether the step counts."""

    asked: Asked
    value: Any = None
