"""What every driver runs: the `Algorithm` protocol, its state, and the plainest algorithm, `AllReduce`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from gradwire.core.buckets.assignment import assign_buckets
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec
from gradwire.core.programs import Program
from gradwire.core.requests import mean_each

__all__ = ["Algorithm", "AllReduce", "State", "check_specs", "require_algorithm"]


@dataclass
class State(Generic[A]):
    """The memory of an algorithm: plain dictionaries of arrays. Memory belongs to parameters, by name.

    Attributes:
        shared: scalars that concern the whole model, equal on all replicas.
        tensors: parameter name → name of the memory → array. A parameter that is not in it travels uncompressed and has none.
    """

    shared: dict[str, A] = field(default_factory=dict)
    tensors: dict[str, dict[str, A]] = field(default_factory=dict)

    def of(self, names: Mapping[str, Any]) -> State[A]:
        """The part that concerns these parameters, with the shared part. The arrays are the same, the dictionaries new."""
        return State(dict(self.shared), {n: dict(self.tensors[n]) for n in names if n in self.tensors})


class Algorithm(Protocol):
    """A frozen configuration whose `step` turns local gradients into what the optimizer is given on every replica.

    Attributes:
        per_replica: the names of those memories of a tensor that differ between replicas. Everything else is equal everywhere.
        start_step: the first step whose messages are those of the plan.
        cycle: after how many steps from there they repeat (2 for an algorithm that alternates); a plan averages over a cycle.
    """

    @property
    def start_step(self) -> int: ...

    @property
    def per_replica(self) -> frozenset[str]: ...

    @property
    def cycle(self) -> int: ...

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        """Memory for these parameters. Raises ValueError naming the parameter or option that cannot be served."""

    def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> Program[tuple[dict[str, A], State[A]]]:
        """Average some gradients.

        Args:
            ops: kernels of the arrays' framework.
            gradients: name → this replica's gradient, donated. Any part of the model; a driver may run one program per part.
            state: `State.of` these gradients, donated.
            step: number of steps before this one, an int or a traced int32 scalar.

        Returns:
            The same names → the averaged gradient, the same bits on all replicas; and the new state.
        """


def require_algorithm(algorithm: object, what: str = "algorithm") -> None:
    """Raise TypeError for what is no algorithm: a class, a name, None.

    Args:
        algorithm: what a user has given.
        what: the name of the argument.
    """
    shown = algorithm.__name__ if isinstance(algorithm, type) else repr(algorithm)
    kind = "a class" if isinstance(algorithm, type) else f"a {type(algorithm).__name__}"
    lacking = [name for name in ("init", "step", "per_replica", "start_step", "cycle") if not hasattr(algorithm, name)]
    if isinstance(algorithm, type) or {"init", "step"} & {*lacking}:
        raise TypeError(
            f"{what}={shown} is {kind} and no algorithm: give an instance, such as PowerSGD(rank=4), AllReduce() or "
            "WireDtype(AllReduce(), 'bfloat16')"
        )
    if lacking:
        raise TypeError(f"{what}={shown} lacks {', '.join(lacking)}; gradwire.Algorithm says what an algorithm has")


def check_specs(specs: Mapping[str, Spec]) -> None:
    """Raise ValueError for a parameter whose gradient cannot be averaged."""
    for name, spec in specs.items():
        if spec.dtype not in ITEMSIZE:
            raise ValueError(
                f"parameter {name!r} has dtype {spec.dtype}; only {', '.join(ITEMSIZE)} gradients can be averaged. "
                "Leave it out of the gradients (frozen in torch, `optax.masked` in JAX)."
            )


@dataclass(frozen=True, repr=False)
class AllReduce:
    """Average every gradient as it is: what plain data-parallel training does.

    Sends each gradient once: in as many messages as there are dtypes, or in buckets.

    Args:
        bucket_bytes: size of a bucket, which exceeds it by less than one tensor; each is one message. Buckets hold one dtype and are
            filled in reverse order of the parameters, as gradients arrive (`gradwire.core.buckets.assignment.assign_buckets`). None: no buckets. Only
            where the driver has the whole model at once, in JAX and the simulator: DDP and `DataParallel` have buckets of their own.
        first_bucket_bytes: size of the first bucket of each dtype, small so that communication begins early. None: as the others.

    Raises:
        ValueError: a size that is not positive, or one for the first bucket alone.
    """

    bucket_bytes: int | None = None
    first_bucket_bytes: int | None = None

    per_replica = frozenset[str]()
    start_step = 0
    cycle = 1

    def __post_init__(self) -> None:
        for name, size in self._options().items():
            if size <= 0:
                raise ValueError(f"{name}={size} must be more than 0 bytes")
        if self.bucket_bytes is None and self.first_bucket_bytes is not None:
            raise ValueError(f"first_bucket_bytes={self.first_bucket_bytes} needs bucket_bytes, the size of the others")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={size}' for name, size in self._options().items())})"

    def _options(self) -> dict[str, int]:
        options = {"bucket_bytes": self.bucket_bytes, "first_bucket_bytes": self.first_bucket_bytes}
        return {name: size for name, size in options.items() if size is not None}

    def buckets(self, specs: Mapping[str, Spec]) -> list[list[str]]:
        """Names of the parameters in each message, in the order in which they are sent; [] without `bucket_bytes`."""
        if self.bucket_bytes is None:
            return []
        names = list(specs)[::-1]
        limits = [self.first_bucket_bytes or self.bucket_bytes, self.bucket_bytes]
        sizes = [specs[name].nbytes for name in names]
        return [[names[i] for i in b] for b in assign_buckets(sizes, limits, [specs[name].dtype for name in names])]

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        check_specs(specs)
        return State()

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> tuple[dict[str, A], State[A]]:
        buckets = [list(gradients)] if gradients else []
        if self.bucket_bytes is not None:
            buckets = self.buckets({name: Spec(tuple(g.shape), ops.dtype_of(g)) for name, g in gradients.items()})
        averages = dict(gradients)
        for names in buckets:
            averages |= await mean_each({name: gradients[name] for name in names}, watched=False)
        return averages, state
