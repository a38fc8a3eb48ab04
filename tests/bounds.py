"""Which bounds of tests lie within reach of rounding: `make test-portability CONFIG=bounds`.

Tests are run as processors of several kinds would, with one thread and with two, and once more with what the product is given moved by one unit in the last place,
while what it is compared with stays. Each `relative(x, y) < bound` notes its value. A bound of rounding has to be 30 times as large as the largest value that was
seen, and one of something else (what codes lose, say) 30 times as far from it as values are from each other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

#: In the environment: the folder that values are noted in; and whether what the product is given is moved.
NOTED, MOVED = "GRADWIRE_TEST_BOUNDS", "GRADWIRE_TEST_MOVED"
#: In the environment: how many threads torch has.
THREADS = "GRADWIRE_TEST_THREADS"
#: A bound is so many times what rounding was seen to do.
ROOM = 30
#: Bounds up to this are about rounding.
ROUNDING = 1e-4
TESTS = Path(__file__).parent


class Distance(float):
    """A number that notes with what it is compared."""

    def __lt__(self, bound: float) -> bool:
        _note(float(self), float(bound))
        return float(self) < float(bound)

    def __le__(self, bound: float) -> bool:
        _note(float(self), float(bound))
        return float(self) <= float(bound)

    __hash__ = float.__hash__


def noting(value: float) -> float:
    """The same number, which notes its bounds where somebody asks for that."""
    return Distance(value) if NOTED in os.environ else value


def _note(value: float, bound: float) -> None:
    frame = sys._getframe(2)
    file = Path(frame.f_code.co_filename).resolve()
    if TESTS not in file.parents:  # `max`, of a library
        return
    line = json.dumps([f"{file.relative_to(TESTS.parent)}:{frame.f_lineno}", value, bound])
    with Path(os.environ[NOTED], str(os.getpid())).open("a") as out:
        print(line, file=out)


@contextmanager
def inputs_moved() -> Iterator[None]:
    """Gradients that are given to a driver, and parameters that local SGD averages, are moved by one unit in the last place, if somebody asks for that."""
    if MOVED not in os.environ:
        yield
        return
    import torch

    from gradwire.torch_backend.engine.driver import Driver
    from gradwire.torch_backend.local_sgd.handle import LocalSGDHandle

    def move(tensors: Any) -> None:
        with torch.no_grad():
            for x in tensors:
                if x.is_floating_point() and x.itemsize > 1:
                    x.mul_(1 + torch.finfo(x.dtype).eps)

    add, average = Driver.add, LocalSGDHandle._average

    def moved_add(self: Any, gradients: Any, **options: Any) -> Any:
        move(gradients.values())
        return add(self, gradients, **options)

    def moved_average(self: Any) -> Any:
        move(self._parameters.values())
        return average(self)

    with mock.patch.object(Driver, "add", moved_add), mock.patch.object(LocalSGDHandle, "_average", moved_average):
        yield


def too_near(folder: Path) -> list[str]:
    """Of what was noted in a folder, the bounds that are within reach, in words."""
    seen: dict[tuple[str, float], list[float]] = {}
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            where, value, bound = json.loads(line)
            seen.setdefault((where, bound), []).append(value)
    found = []
    for (where, bound), values in sorted(seen.items()):
        largest, spread = max(values), max(values) - min(values)
        # Values of one comparison differ by rounding alone, and those of several by what they compare.
        rounding = spread if spread < 0.01 * largest else 0.0
        needed = ROOM * largest if bound <= ROUNDING else largest + ROOM * rounding
        if bound and bound < needed:
            found.append(f"{where}: {bound:g} is within reach of {largest:.3g}; give {needed:.1g} or more")
    return found
