"""What a training loop says of each step, by name: a learning rate, a threshold.

    async def compress(self, ops, name, x, memory, context):
        threshold = await setting(ops, "threshold", 0.1)

The method asks; torch's `handle.set(threshold=0.05)`, and `settings=` of JAX's `update` and
`average_params` and of the simulators' `step`, say. What nobody has said has its default. A new
setting is a line in the method, and in no driver.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gradwire.core.algorithm import nested
from gradwire.core.ops import A, Ops
from gradwire.core.protocol.programs import (
    AbstractReplica,
    LockStep,
    Program,
    Request,
    ask,
    ask_one,
    relay,
)
from gradwire.core.protocol.weights import weight_of

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Request):
    """The value of a setting in this step: the default, unless somebody is `told` another one.
    Equal on all replicas."""

    priority = 0
    shared = True
    local = True

    name: str
    default: float

    def key(self) -> object:
        return type(self), self.name, self.default

    def signature(self) -> object:
        return self.key()

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return self.answer()

    def answer(self) -> tuple[Any, ...]:
        return (self.default,)

    @staticmethod
    def simulate(asked: Sequence[Setting], world: LockStep) -> list[tuple[Any, ...]]:
        return [request.answer() for request in asked]


async def setting(ops: Ops[A], name: str, default: float) -> A:
    """What the training loop says of this step under `name`, a scalar array of float32; `default`
    until it says something."""
    return weight_of(ops, await ask_one(Setting(name, float(default))))


def with_settings(program: Program[T], settings: Mapping[str, Any]) -> Program[T]:
    """A program with these values of settings; it returns what the program returns."""
    return _with_settings(program, settings) if settings else program


async def _with_settings(program: Program[T], settings: Mapping[str, Any]) -> T:

    async def answer(request: Request) -> tuple[Any, ...]:
        if isinstance(request, Setting) and request.name in settings:
            return (settings[request.name],)
        return await ask(request.wrapped(partial(with_settings, settings=settings)))

    return await relay(program, answer)


def settings_of(requests: Iterable[Request]) -> dict[str, float]:
    """The settings that a method asks for, with their defaults. Raises ValueError for one with two
    defaults."""
    found: dict[str, float] = {}
    for request in requests:
        if (
            isinstance(request, Setting)
            and found.setdefault(request.name, request.default) != request.default
        ):
            raise ValueError(
                f"setting({request.name!r}) has two defaults, {found[request.name]:g} and"
                f" {request.default:g}; give one"
            )
    return found


def require_settings(algorithm: object, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for a setting that an algorithm does not ask for, as far as anybody can look
    into it, or that is NaN; TypeError for one that is no number."""
    for name, value in given.items():
        if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
            raise TypeError(f"settings: {name}={value!r} is no number; give a float")
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"settings: {name}=nan says nothing; give a number")
    seen = all(getattr(each, "portable", True) for each in nested(algorithm))
    if unknown := sorted(given.keys() - set(known)) if seen else []:
        asked = ", ".join(sorted(known)) or "no setting"
        raise ValueError(
            f"settings: {algorithm!r} does not ask for {', '.join(unknown)}; it asks for {asked}"
        )
