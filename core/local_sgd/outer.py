"""What is made of the averaged difference after some local steps: the outer optimizer of DiLoCo
(Douillard et al. 2023, arXiv 2311.08105).

`OuterSGD` is the same everywhere. Any optimizer of torch, or of Optax, is given as a factory, and
acts in that backend alone.

difference = outer - parameters        # what the replica's own steps have done, as a gradient
outer = outer - update(mean(difference))
parameters = outer                     # the same on all replicas
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from gradwire.core.ops import A, Ops
from gradwire.core.text.options import check_options, more_than, share

VELOCITY = "velocity"
#: Before the name of what an optimizer of a framework remembers.
OUTERS = "outer."


def is_optimizers(key: str) -> bool:
    """Whether a memory of this name is the outer optimizer's."""
    return key == VELOCITY or key.startswith(OUTERS)


class OuterOptimizer(ABC):
    """What moves outer parameters. It holds no arrays: what it remembers of a parameter is in the
    memory, under `velocity` or names that begin with `outer.`."""

    @property
    @abstractmethod
    def memories(self) -> frozenset[str]:
        """The names of what it remembers of a parameter."""

    @property
    def infinite(self) -> frozenset[str]:
        """The names of memories that begin as inf or NaN, such as a bound that is off: they tell
        nothing of an average."""
        return frozenset()

    @abstractmethod
    def init(self, ops: Ops[A], outer: Mapping[str, A]) -> dict[str, dict[str, A]]:
        """The memory before the first step of these parameters, which take each of their steps
        together: parameter → name → array."""

    @abstractmethod
    def step(
        self,
        ops: Ops[A],
        outer: Mapping[str, A],
        averages: Mapping[str, A],
        memory: Mapping[str, Mapping[str, A]],
    ) -> tuple[dict[str, A], dict[str, dict[str, A]]]:
        """The new outer parameters and memory, as new arrays of the same shapes and dtypes, by
        averaged differences."""


class OuterFactory(OuterOptimizer):
    """What makes an outer optimizer of a framework: `make(parameters)` a `torch.optim.Optimizer`,
    `make()` an Optax transformation.

    As it is, it cannot act: a backend does, which calls it.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.make == self.make

    def __hash__(self) -> int:
        return hash(self.make)

    def __repr__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The name of what is called, with the arguments that it is given, if it is a
        `functools.partial`."""
        if not isinstance(self.make, functools.partial):
            return self.called
        given = [
            *map(_argument, self.make.args),
            *(f"{key}={_argument(value)}" for key, value in self.make.keywords.items()),
        ]
        return f"{self.called}({', '.join(given)})"

    @property
    def called(self) -> str:
        """The name without arguments."""
        return _named(self.make.func if isinstance(self.make, functools.partial) else self.make)

    def __refused(self) -> TypeError:
        return TypeError(
            f"outer={self.name} makes an optimizer of a framework, which acts in that backend"
            " alone; use OuterSGD(…) here, which is the same everywhere"
        )

    @property
    def memories(self) -> frozenset[str]:
        return frozenset()

    def init(self, ops: Ops[A], outer: Mapping[str, A]) -> dict[str, dict[str, A]]:
        raise self.__refused()

    def step(
        self,
        ops: Ops[A],
        outer: Mapping[str, A],
        averages: Mapping[str, A],
        memory: Mapping[str, Mapping[str, A]],
    ) -> tuple[dict[str, A], dict[str, dict[str, A]]]:
        raise self.__refused()


def _named(made: object) -> str:
    name = getattr(made, "__qualname__", type(made).__qualname__)
    return f"{getattr(made, '__module__', '?')}.{name}"


def _argument(value: object) -> str:
    """What is called has a name that is the same in all processes: its address is not."""
    return _named(value) if callable(value) else repr(value)


@dataclass(frozen=True)
class OuterSGD(OuterOptimizer):
    """SGD on averaged differences.

        v = momentum · v + difference
        outer = outer - lr · (difference + momentum · v)     # with nesterov
        outer = outer - lr · v                               # without

    The default, lr 1 and no momentum, is plain averaging. The paper of DiLoCo uses lr 0.7, momentum
    0.9, Nesterov.

    Examples:
        >>> import numpy as np
        >>> from gradwire import OuterSGD
        >>> from gradwire.core.kernels.numpy import NumpyOps
        >>> sgd = OuterSGD(lr=0.5, momentum=0.9)
        >>> outer, velocity = sgd.update(NumpyOps(), np.ones(2), np.full(2, 0.2), np.zeros(2))
        >>> outer.tolist(), velocity.tolist()
        ([0.9, 0.9], [0.2, 0.2])

    Args:
        lr: learning rate.
        momentum: 0 keeps no velocity.
        nesterov: look ahead.

    Raises:
        TypeError: for what is no number, such as a schedule.
        ValueError: naming the option, its value and the fix.
    """

    lr: Annotated[
        float,
        more_than(0),
        "1.0 is plain averaging, DiLoCo uses 0.7; schedules belong to the inner optimizer",
    ] = 1.0
    momentum: Annotated[float, share(most_open=True), "DiLoCo uses 0.9"] = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs momentum; DiLoCo uses 0.9")

    @property
    def memories(self) -> frozenset[str]:
        return frozenset({VELOCITY} if self.momentum else ())

    def init(self, ops: Ops[A], outer: Mapping[str, A]) -> dict[str, dict[str, A]]:
        return {
            name: {key: ops.zeros(tuple(x.shape), ops.dtype_of(x)) for key in self.memories}
            for name, x in outer.items()
        }

    def step(
        self,
        ops: Ops[A],
        outer: Mapping[str, A],
        averages: Mapping[str, A],
        memory: Mapping[str, Mapping[str, A]],
    ) -> tuple[dict[str, A], dict[str, dict[str, A]]]:
        new, kept = {}, {}
        for name, average in averages.items():
            new[name], velocity = self.update(ops, outer[name], average, memory[name].get(VELOCITY))
            kept[name] = {} if velocity is None else {VELOCITY: velocity}
        return new, kept

    def update(
        self, ops: Ops[A], outer: A, difference: A, velocity: A | None
    ) -> tuple[A, A | None]:
        """The new outer parameters and velocity, as new arrays of the same shape and dtype.
        `velocity` is None without momentum."""
        if velocity is not None:
            velocity = ops.add(times(ops, velocity, self.momentum), difference)
            difference = (
                ops.add(times(ops, velocity, self.momentum), difference)
                if self.nesterov
                else velocity
            )
        return ops.add(times(ops, difference, -self.lr), outer), velocity


def times(ops: Ops[A], x: A, factor: float) -> A:
    """`factor · x`, a new array. bfloat16 times a float is wider in NumPy."""
    return ops.cast(x * factor, ops.dtype_of(x))
