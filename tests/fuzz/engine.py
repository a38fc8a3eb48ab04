"""What is tried and what is counted: every option of a constructor with values that do not belong
there, one at a time.

A finding is one of `KINDS`. All of them have to be 0.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

#: What may refuse an option. Anything else says that nobody has looked at it.
REFUSALS = (TypeError, ValueError, NotImplementedError)
WRONG_CLASS, NOT_NAMED, LATE, SLOW = "wrong class", "not named", "refused late", "slow"
CHANGED, GARBAGE = "changed though refused", "garbage accepted"
KINDS = (WRONG_CLASS, NOT_NAMED, LATE, SLOW, CHANGED, GARBAGE)
#: Seconds that nothing here may take.
LONG = 30.0


class Odd:
    """Is nothing, and cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError


#: Of every kind that could come out of a configuration file, a command line or another library.
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 3.5, -0.5, 0.5, 1e-320, 1e308, 10**30, -(10**30), 10**400, 2**31, 2**62, 2**64),
    *(math.nan, math.inf, -math.inf, "", "x", "3", "False", "node", "int8", "float64", "complex64", b"x", "*", "[é\u2028", "\0"),
    *([], [1, 2], (), (0, 0), (-1, 3), (2,), (1, 2, 3), ((0, 1), (2, 3)), ((0, 1), (1,)), [[0], [1]], range(3), {1}),
    *({}, {"*": 1}, {"*": -1}, {"": 0}, {"*": math.nan}, {"*": "x"}, {1: 2}, {"x": True}, {"w": (2, 2)}, {"w": None}),
    *(np.float32(2), np.int64(3), np.float64("nan"), np.bool_(True), np.array([1, 2]), np.array(3), np.zeros((2, 2))),
    *(1 + 1j, Decimal(2), Fraction(1, 2), object(), Odd(), Odd, int, lambda: 3, "a" * 10000, slice(3), iter([1])),
)  # fmt: skip


@dataclass
class Target:
    """A constructor or a function.

    Attributes:
        make: what is called.
        valid: arguments, or a function that makes them, with which it can be.
        use: what is done with the result; what is refused there, but for a ValueError that names
            the option, is refused too late.
        left_out: arguments that are not options: any object is in its place there, or another test
            tries them.
        tries: the arguments instead, of a function that hands them on.
        raises: what it says it raises besides, such as OSError for a file.
    """

    make: Callable[..., Any]
    valid: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    use: Callable[[Any], object] | None = None
    left_out: Sequence[str] = ()
    tries: Sequence[str] = ()
    raises: tuple[type[Exception], ...] = ()

    @property
    def options(self) -> list[str]:
        if self.tries:
            return list(self.tries)
        named = inspect.signature(self.make).parameters.values()
        return [
            p.name
            for p in named
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in self.left_out
        ]


@dataclass
class Found:
    """How much was tried, and what was found."""

    tried: int = 0
    findings: list[tuple[str, str]] = field(default_factory=list)

    def add(self, kind: str, what: str) -> None:
        self.findings.append((kind, what))

    @property
    def counts(self) -> dict[str, int]:
        return {kind: Counter(kind for kind, _ in self.findings)[kind] for kind in KINDS}


def shown(value: Any, most: int = 60) -> str:
    try:
        return (str if isinstance(value, Exception) else repr)(value)[:most]
    except RuntimeError:
        return "what cannot be shown"


def construct(name: str, target: Target, option: str, value: Any, found: Found) -> None:
    """Give an option this value, and use what has been made."""
    valid = target.valid() if callable(target.valid) else target.valid
    what, began, made = f"{name}({option}={shown(value)})", time.perf_counter(), None
    found.tried += 1
    stage = "made"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = target.make(**{**valid, option: value})
            stage = "used"
            if target.use is not None:
                target.use(made)
    except target.raises:
        pass
    except REFUSALS as error:
        named = option in shown(error, 10_000)
        if stage == "used" and not (named and isinstance(error, ValueError)):
            found.add(LATE, f"{what}: {type(error).__name__}: {shown(error, 150)}")
        elif not named:
            found.add(NOT_NAMED, f"{what}: {type(error).__name__}: {shown(error, 150)}")
    except Exception as error:
        found.add(
            LATE if stage == "used" else WRONG_CLASS,
            f"{what}: {type(error).__name__}: {shown(error, 150)}",
        )
    if time.perf_counter() - began > LONG:
        found.add(SLOW, what)


def cases(targets: Mapping[str, Target]) -> Iterator[tuple[str, Target, str, Any]]:
    """Every option of every target with every value."""
    for name, target in targets.items():
        for option in target.options:
            for value in VALUES:
                yield name, target, option, value
