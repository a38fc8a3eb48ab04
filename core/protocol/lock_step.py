"""How the requests of N replicas in one process are answered: what the `simulate` of collective
requests is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from gradwire.core.protocol.groups import members_of
from gradwire.core.protocol.programs import Fusable, ReplicaMismatch

R = TypeVar("R", bound=Fusable[Any])


def answer_by_group(
    asked: Sequence[R], answers_of: Callable[[Sequence[R], int], Sequence[Any]]
) -> list[tuple[Any, ...]]:
    """The answers for each array, of each replica: `answers_of(requests of the replicas of a group,
    array)`, in the order of the group."""
    answers: list[tuple[Any, ...]] = [()] * len(asked)
    for members in members_of(asked[0].groups, len(asked), equal=True):
        for i in range(len(asked[0])):
            for m, answer in zip(members, answers_of([asked[m] for m in members], i), strict=True):
                answers[m] += (answer,)
    return answers


def split(vector: Any, counts: Sequence[int], replicas: int) -> list[Any]:
    """The parts of a vector, for each of so many replicas."""
    if sum(counts) != vector.size or len(counts) != replicas:
        raise ReplicaMismatch(
            f"{vector.size} elements in parts of {list(counts)} for {replicas} replicas"
        )
    return np.split(vector, np.cumsum(counts)[:-1])


def combine(vectors: Sequence[Any], op: str) -> Any:
    dtype = vectors[0].dtype
    if op == "max":
        return np.maximum.reduce(list(vectors))
    if op == "sum":
        return np.asarray(sum(vectors), dtype)
    if dtype == np.float16:  # whose sum may overflow where the mean does not
        return np.asarray(sum(v / len(vectors) for v in vectors), dtype)
    return np.asarray(sum(vectors) / len(vectors), dtype)


def join(arrays: Sequence[Any]) -> Any:
    return (
        arrays[0].reshape(-1)
        if len(arrays) == 1
        else np.concatenate([x.reshape(-1) for x in arrays])
    )


def cut(vector: Any, like: Sequence[Any]) -> list[Any]:
    """Arrays of the shapes of those, in the vector's memory."""
    if len(like) == 1:
        return [vector.reshape(like[0].shape)]
    arrays, start = [], 0
    for x in like:
        end = start + x.size
        arrays.append(vector[start:end].reshape(x.shape))
        start = end
    return arrays
