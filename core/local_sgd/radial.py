"""Directions and lengths averaged apart ("Decoupled DiLoCo for Resilient Distributed Pre-training",
arXiv 2604.21428).

    mean = (Σ w‖D‖ / Σ w) · φ(Σ w φ(D) / Σ w)        φ(x) = x / ‖x‖, φ(0) = 0

The mean of M differences that are orthogonal to each other is shorter than each of them by √M. This
one is as long as they are on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradwire.core.algorithm import State, Stepped
from gradwire.core.ops import A, Ops, Spec, wide_dtype
from gradwire.core.protocol import mean_each, together
from gradwire.core.protocol.programs import Program
from gradwire.core.text.name_patterns import chosen

#: A mean of directions that is shorter has none: it stays as it is.
SHORTEST = 1e-12
#: A difference that is shorter counts as 0.
ZERO = 1e-30

#: `Algorithm.step`.
Step = Callable[[Ops[Any], Mapping[str, Any], State[Any], Any], Program[Stepped[Any]]]


def split_by_direction(radial: bool | tuple[str, ...], specs: Mapping[str, Spec]) -> list[str]:
    """Which of these tensors are averaged by direction and length. Raises `UnmatchedPattern`."""
    if isinstance(radial, tuple):
        names = chosen("radial", radial, specs)
        return [name for name in specs if name in names]
    return [name for name, spec in specs.items() if radial and len(spec.shape) > 1]


def averaged_by_direction(step: Step, names: Iterable[str]) -> Step:
    """The step of an algorithm, which is given the directions of these tensors instead of
    themselves."""
    names = list(names)

    async def by_direction(
        ops: Ops[Any], tensors: Mapping[str, Any], state: State[Any], index: Any
    ) -> Stepped[Any]:
        wide = wide_dtype(*[ops.dtype_of(tensors[n]) for n in names])
        lengths = [ops.cast(ops.norm_of_all([tensors[n]]), wide) for n in names]
        directions = {
            n: _divided(ops, tensors[n], length, ZERO)
            for n, length in zip(names, lengths, strict=True)
        }
        sent = step(ops, {**tensors, **directions}, state, index)
        (averages, after), means = await together([sent, _means(ops.stack(lengths))])
        averages = dict(averages)
        for i, n in enumerate(names):
            mean = _divided(ops, averages[n], ops.norm_of_all([averages[n]]), SHORTEST)
            averages[n] = ops.scale_each([mean], means[i])[0]
        return averages, after

    return by_direction


async def _means(lengths: A) -> A:
    return (await mean_each({0: lengths}, watched=False))[0]


def _divided(ops: Ops[A], x: A, length: A, shortest: float) -> A:
    """`x / length`, in its place; `x` itself if that is not longer than the shortest."""
    counts = length > shortest
    one = ops.zeros((), ops.dtype_of(length)) + 1.0
    return ops.scale_each([x], ops.divide(one, ops.where(counts, length, one)))[0]
