"""What an algorithm that runs another one passes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from gradwire.core.algorithm import Algorithm, State, require_algorithm
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.protocol.groups import Groups


def require_inner(algorithm: object, what: str = "algorithm") -> None:
    """Raise TypeError for what is no algorithm, or has weights, which concern the whole step."""
    require_algorithm(algorithm, what)
    if getattr(algorithm, "weighted", False):
        raise TypeError(
            f"{what}={algorithm!r} is weighted, and is inside another algorithm; Weighted goes"
            " round all others"
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

    @property
    def mentions_nodes(self) -> bool:
        """Whether "node" is to be replaced in `algorithm`, see `TwoLevel.on_nodes_of`."""
        return bool(getattr(self.algorithm, "mentions_nodes", False))

    def on_nodes_of(self, near: int | Groups) -> Self:
        """The same with "node" replaced in `algorithm`."""
        inner: Any = self.algorithm
        return replace(self, algorithm=inner.on_nodes_of(near)) if self.mentions_nodes else self

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        return self.algorithm.init(ops, specs)
