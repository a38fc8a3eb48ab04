"""Which bounds of tests lie within reach of rounding: `make test-portability CONFIG=bounds`.

Tests are run as processors of several kinds would, with one thread and with two, and once more with
what the product is given moved by one unit in the last place, while what it is compared with stays.
Each comparison notes its value and its bound: `relative(x, y) < bound`, and those of NumPy, torch
and pytest. A bound of rounding has to be 30 times as large as the largest value that was seen, and
one of something else (what codes lose, say) 30 times as far from it as values are from each other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

#: In the environment: the folder that values are noted in; and whether what the product is given is
#: moved.
NOTED, MOVED = "GRADWIRE_TEST_BOUNDS", "GRADWIRE_TEST_MOVED"
#: In the environment: how many threads torch has.
THREADS = "GRADWIRE_TEST_THREADS"
#: A bound is so many times what rounding was seen to do.
ROOM = 30
#: Bounds up to this are about rounding.
ROUNDING = 3e-4
TESTS = Path(__file__).parent
#: What puts something in place of an attribute: (owner, its name, what).
Put = Callable[[Any, str, Any], None]
APPROX = sys.modules[type(pytest.approx(1.0)).__module__].__file__


def threads() -> int:
    """How many threads torch has in tests."""
    return int(os.environ.get(THREADS, "1"))


def relative(x: Any, y: Any) -> float:
    """Distance of an array from `y` in units of `y`'s norm; as it is from zeros."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert x.shape == y.shape
    return noting(float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0)))


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
    """For the line of a test that compares; not for a function that compares for many, called
    `assert_…`, nor for a library that compares for itself."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in (__file__, APPROX) and frame.f_back is not None:
        frame = frame.f_back
    while TESTS in Path(frame.f_code.co_filename).resolve().parents:
        if not frame.f_code.co_name.startswith("assert_") or frame.f_back is None:
            line = json.dumps(
                [
                    f"{Path(frame.f_code.co_filename).resolve().relative_to(TESTS.parent)}:{frame.f_lineno}",
                    value,
                    bound,
                ]
            )
            with Path(os.environ[NOTED], str(os.getpid())).open("a") as out:
                print(line, file=out)
            return
        frame = frame.f_back


def watch_this_process() -> None:
    """Note what libraries compare, and move what the product is given, if somebody asks for
    that."""
    if NOTED in os.environ:
        note_comparisons(setattr)
    if MOVED in os.environ:
        move_inputs_of_torch(setattr)
        move_inputs_of_jax(setattr)


def note_comparisons(put: Put) -> None:
    """Those of arrays by NumPy and torch, and of numbers by pytest."""
    import torch

    def noted(owner: Any, name: str, defaults: tuple[float, float] | None) -> None:
        compare = getattr(owner, name)

        def comparing(
            x: Any, y: Any, rtol: Any = None, atol: Any = None, *rest: Any, **options: Any
        ) -> Any:
            chosen = {
                key: value for key, value in (("rtol", rtol), ("atol", atol)) if value is not None
            }
            for a, b in _leaves(x, y):
                default = defaults or torch.testing._comparison.default_tolerances(
                    *(each if isinstance(each, torch.Tensor) else torch.float64 for each in (a, b))
                )
                _note_arrays(
                    a,
                    b,
                    *(default[i] if each is None else each for i, each in enumerate((rtol, atol))),
                )
            return compare(x, y, **chosen, **options)

        put(owner, name, comparing)

    for owner, name, defaults in (
        (np.testing, "assert_allclose", (1e-7, 0.0)),
        (np, "allclose", (1e-5, 1e-8)),
        (torch, "allclose", (1e-5, 1e-8)),
        (torch.testing, "assert_close", None),
    ):
        noted(owner, name, defaults)
    scalar: Any = type(pytest.approx(1.0))
    equal: Callable[[Any, Any], bool] = scalar.__eq__

    def equal_noting(self: Any, actual: Any) -> bool:
        if (
            isinstance(actual, (float, np.floating))
            and isinstance(self.expected, float)
            and np.isfinite(self.expected)
        ):
            _note_arrays(actual, self.expected, 0.0, self.tolerance, relative_to=self.expected)
        return equal(self, actual)

    put(scalar, "__eq__", equal_noting)


def _leaves(x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """The arrays of two trees, which are compared with each other; what has no partner is the
    comparison's to say."""
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        for key in x.keys() & y.keys():
            yield from _leaves(x[key], y[key])
    elif isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        for a, b in zip(x, y, strict=False):
            yield from _leaves(a, b)
    else:
        yield x, y


def _note_arrays(x: Any, y: Any, rtol: float, atol: float, relative_to: float = 0.0) -> None:
    """How much of what two tolerances allow is used, in the units of the larger one."""
    try:
        x, y = (
            np.asarray(a.detach().double() if hasattr(a, "detach") else a, np.float64)
            for a in (x, y)
        )
        with np.errstate(invalid="ignore"):  # of infinities there is nothing to note
            difference = np.abs(x - y)
            allowed = np.broadcast_to(atol + rtol * np.abs(y), difference.shape)
    except (TypeError, ValueError):  # structures, and what is refused
        return
    used = np.nanmax(
        np.divide(difference, allowed, out=np.zeros_like(difference), where=allowed > 0),
        initial=0.0,
    )
    bound = atol / abs(relative_to) if relative_to else max(rtol, atol)
    if 0 < used <= ROOM:  # more is meant to differ
        _note(float(used * bound), float(bound))


def move_inputs_of_torch(put: Put) -> None:
    """Gradients that are given to a driver or to a sharded optimizer, and parameters that local SGD
    averages, are moved by one unit in the last place: up or down by what their bits are, so that
    equal numbers stay equal on all replicas."""
    import torch

    from gradwire.torch_backend.engine.driver import Driver
    from gradwire.torch_backend.local_sgd.handle import LocalSGDHandle
    from gradwire.torch_backend.setup.optimizer_state import weights_in
    from gradwire.torch_backend.zero.sharded_step import ShardedStep

    integers = {4: torch.int32, 8: torch.int64}

    def move(tensors: Any) -> None:
        with torch.no_grad():
            for x in tensors:
                if x.is_floating_point() and x.itemsize > 2 and not x.is_sparse:
                    mixed = x.contiguous().view(integers[x.itemsize]).to(torch.int32) * 0x2C1B3C6D
                    x.mul_(1 + torch.finfo(x.dtype).eps * (((mixed >> 17) & 1) * 2 - 1).to(x.dtype))

    add, average, add_bucket = Driver.add, LocalSGDHandle._average, ShardedStep.add

    def moved_add(self: Any, gradients: Any, **options: Any) -> Any:
        move(gradients.values())
        return add(self, gradients, **options)

    def moved_average(self: Any) -> Any:
        optimizer, parameters = self._moments._optimizer, self._parameters.values()
        # masters are these to the bit
        if optimizer is None or not any(weights_in(optimizer, parameters)):
            move(parameters)
        return average(self)

    def moved_bucket(self: Any, gradients: Any) -> Any:
        move(gradients.values())
        return add_bucket(self, gradients)

    put(Driver, "add", moved_add)
    put(LocalSGDHandle, "_average", moved_average)
    put(ShardedStep, "add", moved_bucket)


def move_inputs_of_jax(put: Put) -> None:
    """The same for trees that transformations take apart."""
    import jax
    import jax.numpy as jnp

    from gradwire.jax_backend import transforms
    from gradwire.jax_backend.local_sgd import transform
    from gradwire.jax_backend.zero import zero1

    def moved(x: Any) -> Any:
        if (
            not isinstance(x, (jax.Array, np.ndarray))
            or not jnp.issubdtype(x.dtype, jnp.floating)
            or x.dtype.itemsize <= 2
        ):
            return x
        x = jnp.asarray(x)
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(
            jnp.uint32
        )
        up = (bits * jnp.uint32(0x2C1B3C6D) >> 17) & 1
        return x * (1 + jnp.finfo(x.dtype).eps * (2 * up.astype(x.dtype) - 1))

    for module in (transforms, transform, zero1):

        def flatten(tree: Any, named: Callable[[Any], Any] = module.flatten) -> Any:
            found = named(tree)
            return replace(found, leaves={name: moved(x) for name, x in found.leaves.items()})

        put(module, "flatten", flatten)


def move_simulated(put: Put) -> None:
    """The same for the simulators, where they are not what others are compared with."""
    from gradwire import LocalSimulator, Simulator

    def moved(x: Any, like: Any) -> Any:
        """As the dtype that it computes in has units."""
        if like not in ("float32", "float64"):
            return x
        x = np.asarray(x, like)
        bits = (
            np.ascontiguousarray(x).view(f"uint{8 * x.itemsize}").astype(np.uint32).reshape(x.shape)
        )
        up = (bits * np.uint32(0x2C1B3C6D) >> 17) & 1
        return x * (1 + np.finfo(x.dtype).eps * (2 * up.astype(x.dtype) - 1))

    for simulator in (Simulator, LocalSimulator):

        def step(
            self: Any, gradients: Any, *rest: Any, take: Any = simulator.step, **options: Any
        ) -> Any:
            kinds = self.parameters[0] if isinstance(self, LocalSimulator) else self.specs
            given = [
                {n: moved(x, str(kinds[n].dtype)) for n, x in own.items()} for own in gradients
            ]
            return take(self, given, *rest, **options)

        put(simulator, "step", step)


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
        # Values of one comparison differ by rounding alone, and those of several by what they
        # compare.
        rounding = spread if spread < 0.01 * largest else 0.0
        needed = ROOM * largest if bound <= ROUNDING else largest + ROOM * rounding
        if 0 < bound < min(needed, 1):  # up to 1 is what any direction is
            found.append(
                f"{where}: {bound:g} is within reach of {largest:.3g}; give {needed:.1g} or more"
            )
    return found
