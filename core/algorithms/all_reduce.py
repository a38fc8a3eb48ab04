"""The plainest algorithm: every gradient is averaged as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.core.algorithm import State, Stepped, check_specs
from gradwire.core.buckets.assignment import assign_buckets
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.protocol import mean_each
from gradwire.core.text.options import AtLeast1, check_options
from gradwire.core.text.wording import configured


@dataclass(frozen=True, repr=False)
class AllReduce:
    """Average every gradient as it is: what plain data-parallel training does.

    Sends each gradient once: in as many messages as there are dtypes, or in buckets.

    Examples:
        >>> from gradwire import AllReduce, Spec
        >>> specs = {"a": Spec((512,)), "b": Spec((1024,)), "c": Spec((16,))}
        >>> AllReduce(bucket_bytes=4096).buckets(specs)
        [['c', 'b'], ['a']]

    Args:
        bucket_bytes: size of a bucket, which exceeds it by less than one tensor; each is one
            message. Buckets hold one dtype and are filled in reverse order of the parameters, as
            gradients arrive (`gradwire.core.buckets.assignment.assign_buckets`). None: no buckets.
            Only where the driver has the whole model at once, in JAX and the simulator: DDP and
            `DataParallel` have buckets of their own.
        first_bucket_bytes: size of the first bucket of each dtype, small so that communication
            begins early. None: as the others.

    Raises:
        ValueError: a size that is not positive, or one for the first bucket alone.
    """

    bucket_bytes: AtLeast1 | None = None
    first_bucket_bytes: AtLeast1 | None = None

    per_replica = frozenset[str]()
    start_step = 0
    cycle = 1

    def __post_init__(self) -> None:
        check_options(self)
        if self.bucket_bytes is None and self.first_bucket_bytes is not None:
            raise ValueError(
                f"first_bucket_bytes={self.first_bucket_bytes} needs bucket_bytes, the size of the"
                " others"
            )

    def __repr__(self) -> str:
        return configured(self)

    def buckets(self, specs: Mapping[str, Spec]) -> list[list[str]]:
        """Names of the parameters in each message, in the order in which they are sent; [] without
        `bucket_bytes`."""
        if self.bucket_bytes is None:
            return []
        names = list(specs)[::-1]
        limits = [self.first_bucket_bytes or self.bucket_bytes, self.bucket_bytes]
        sizes = [specs[name].nbytes for name in names]
        return [
            [names[i] for i in b]
            for b in assign_buckets(sizes, limits, [specs[name].dtype for name in names])
        ]

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        """An empty state. Raises ValueError for a dtype that cannot be averaged, with the
        parameter's name."""
        check_specs(specs)
        return State()

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> Stepped[A]:
        """Average all gradients: one request for each bucket. Arguments and results are those of
        `Algorithm.step`."""
        buckets = [list(gradients)] if gradients else []
        if self.bucket_bytes is not None:
            buckets = self.buckets(
                {name: Spec(tuple(g.shape), ops.dtype_of(g)) for name, g in gradients.items()}
            )
        averages = dict(gradients)
        for names in buckets:
            averages |= await mean_each({name: gradients[name] for name in names}, watched=False)
        return averages, state
