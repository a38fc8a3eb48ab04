"""What an algorithm that runs another one passes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from gradwire.core.algorithm import Algorithm, State, require_algorithm
from gradwire.core.ops import A, Ops, Spec


def require_inner(algorithm: object, what: str = "algorithm") -> None:
    """Raise TypeError for what is no algorithm, or has weights, which concern the whole step."""
    require_algorithm(algorithm, what)
    if getattr(algorithm, "weighted", False):
        raise TypeError(
            f"{what}={algorithm!r} is weighted, and stands inside another algorithm; Weighted goes round all others"
        )


@dataclass(frozen=True)
class Wrapper:
    """A base of algorithms whose memory is that of `algorithm`: they differ in `step`."""

    algorithm: Annotated[Algorithm, require_inner]

    @property
    def per_replica(self) -> frozenset[str]:
        return self.algorithm.per_replica

    @property
    def start_step(self) -> int:
        return self.algorithm.start_step

    @property
    def cycle(self) -> int:
        return self.algorithm.cycle

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        return self.algorithm.init(ops, specs)
