"""Whether an algorithm computes here what it ought to: looked at once in a process, where an
accelerator computes for the first time.

Compilers and devices do as they like with much that looks the same everywhere. What an algorithm
makes of known gradients on the machine that is to run it says whether that is so: a second's work,
before hours of training on numbers that are none.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.ops import Spec
from gradwire.core.simulate.known_answers import KnownStep, Tensors, known_specs, known_steps
from gradwire.core.simulate.lock_step import NDArray

logger = logging.getLogger("gradwire")

#: In the environment: "0" leaves it out; "always" looks on a CPU too, where the tests have proved
#: it.
VARIABLE = "GRADWIRE_SELFCHECK"
#: More replicas compute nothing that so many do not.
MOST_REPLICAS = 3

_found: dict[tuple[str, str, int, str], str] = {}
_looking = threading.RLock()


class Steps(Protocol):
    """What a backend makes of known steps, as NumPy arrays: short floats as float32."""

    def first_memory(self, specs: Mapping[str, Spec]) -> State[NDArray]:
        """The memory that `init` makes."""

    def step(self, known: KnownStep) -> tuple[list[Tensors], list[State[NDArray]]]:
        """The averages and the memory after it, of each replica."""


@dataclass(frozen=True)
class Place:
    """The place where an algorithm is to run.

    Attributes:
        kind: of the device, in words: those of one kind compute alike.
        framework: and its version.
        on_cpu: it is no accelerator.
    """

    kind: str
    framework: str
    on_cpu: bool


def self_check(
    algorithm: Algorithm,
    specs: Mapping[str, Spec],
    replicas: int,
    place: Place,
    steps_of: Callable[[Algorithm, str], Steps],
) -> str:
    """What an algorithm gets wrong on a device, in words; "" if nothing is, or it was not looked
    at. Once for each algorithm, dtype and kind of device in a process.

    With two levels it is the algorithm inside that is looked at. Of what NumPy cannot run, a line
    in the log says that it was left out.

    Args:
        algorithm: any that has an average.
        specs: of the user's parameters, whose dtypes, and names if patterns ask for them, the known
            ones have.
        replicas: how many there are; more than 3 count as 3.
        place: where.
        steps_of: what computes the steps there, of an algorithm and a dtype.

    Raises:
        ValueError: GRADWIRE_SELFCHECK has another value than 0, 1 and always.
    """
    if not _wanted(place):
        return ""
    algorithm, replicas = without_levels(algorithm), min(replicas, MOST_REPLICAS)
    for dtype in dict.fromkeys(spec.dtype for spec in specs.values()):
        key = repr(algorithm), dtype, replicas, place.kind
        with _looking:
            if key not in _found:
                _found[key] = _looked(algorithm, dtype, specs, replicas, place, steps_of)
        if _found[key]:
            return _found[key]
    return ""


def _wanted(place: Place) -> bool:
    said = os.environ.get(VARIABLE, "1")
    if said not in ("", "0", "1", "always"):
        raise ValueError(
            f"{VARIABLE}={said!r} must be 0 (no self-check), 1 (on accelerators) or always (on a"
            " CPU too)"
        )
    return said != "0" and (said == "always" or not place.on_cpu)


def _looked(
    algorithm: Algorithm,
    dtype: str,
    specs: Mapping[str, Spec],
    replicas: int,
    place: Place,
    steps_of: Callable[[Algorithm, str], Steps],
) -> str:
    logger.info(
        "self-check of %r, %s, on %s, once (%s=0 leaves it out)",
        algorithm,
        dtype,
        place.kind,
        VARIABLE,
    )
    began = time.perf_counter()
    try:
        known = known_specs(algorithm, dtype, specs)
        # Before the device has a part in it: what raises here is what NumPy cannot run.
        everything = list(known_steps(algorithm, known, replicas))
    except Exception as error:
        logger.info(
            "no self-check of %r: NumPy, which knows the answers, cannot run it (%s)",
            algorithm,
            error,
        )
        return ""
    wrong = ""
    try:
        steps = steps_of(algorithm, dtype)
        wrong = everything[0].wrong_start(steps.first_memory(known))
        for step in everything:
            wrong = wrong or step.wrong(*steps.step(step))
    except Exception as error:
        logger.warning(
            "self-check of %r on %s came to no end, and nothing is known: %r",
            algorithm,
            place.kind,
            error,
        )
    logger.info("self-check took %.1f s", time.perf_counter() - began)
    return wrong and _said(algorithm, place, wrong)


def _said(algorithm: Algorithm, place: Place, wrong: str) -> str:
    try:
        own = version("gradwire")
    except PackageNotFoundError:  # on a path, and not installed
        own = "of no version"
    return (
        f"{algorithm!r} computes wrong numbers on {place.kind}: {wrong}. A self-check on known"
        f" gradients found that before training (gradwire {own}, {place.framework}, Python"
        f" {platform.python_version()}, {platform.machine()}). Run `gradwire doctor`, and report"
        " what it prints; take another algorithm, or another version of the framework or driver."
        f" {VARIABLE}=0 trains in spite of it"
    )
