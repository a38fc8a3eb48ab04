"""What every driver runs: the `Algorithm` protocol, its state, and the check that something is an
algorithm."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from gradwire.core.ops import ITEMSIZE, A, Ops, Spec
from gradwire.core.protocol.programs import Program
from gradwire.core.text.options import short

T = TypeVar("T")


@dataclass
class State(Generic[A]):
    """The memory of an algorithm: plain dictionaries of arrays. Memory belongs to parameters, by
    name.

    Examples:
        >>> import numpy as np
        >>> from gradwire import State
        >>> state = State(tensors={"w": {"error": np.zeros(3)}, "v": {"error": np.ones(2)}})
        >>> state.of({"w": None})
        State(shared={}, tensors={'w': {'error': array([0., 0., 0.])}})
        >>> state.map(lambda x: x.shape).tensors["v"]
        {'error': (2,)}

    Attributes:
        shared: scalars that concern the whole model, equal on all replicas.
        tensors: parameter name → name of the memory → array. A parameter that is not in it travels
            uncompressed and has none.
        model: of a part, the state of all parameters, by which a method may decide what must not
            depend on the part; None: this is all.
    """

    shared: dict[str, A] = field(default_factory=dict)
    tensors: dict[str, dict[str, A]] = field(default_factory=dict)
    model: State[A] | None = field(default=None, repr=False, compare=False)
    _found: tuple[tuple[str, ...], dict[Hashable, Any]] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def of(self, names: Mapping[str, Any]) -> State[A]:
        """The part that concerns these parameters, with the shared part. The arrays are the same,
        the dictionaries new."""
        own = {n: dict(self.tensors[n]) for n in names if n in self.tensors}
        return State(dict(self.shared), own, self.whole)

    @property
    def whole(self) -> State[A]:
        """That of all parameters."""
        return self if self.model is None else self.model

    def of_model(self, key: Hashable, find: Callable[[State[A]], T]) -> T:
        """What `find` finds in names, shapes and dtypes of the memory of all parameters: once, as
        long as their names are the same."""
        whole = self.whole
        names = tuple(whole.tensors)
        if whole._found is None or whole._found[0] != names:
            whole._found = names, {}
        found = whole._found[1]
        if key not in found:
            found[key] = find(whole)
        result: T = found[key]
        return result

    def map(self, function: Callable[[A], Any]) -> State[Any]:
        """`function` of every array, also of the whole that this is a part of:
        `state.map(np.array)` is a copy."""
        tensors = {
            name: {key: function(x) for key, x in memory.items()}
            for name, memory in self.tensors.items()
        }
        model = None if self.model is None else self.model.map(function)
        return State({key: function(x) for key, x in self.shared.items()}, tensors, model)


#: What a step returns: the averaged gradients by name, and the state after it.
Stepped = tuple[dict[str, A], State[A]]


class Algorithm(Protocol):
    """A frozen configuration whose `step` turns local gradients into what the optimizer is given on
    every replica.

    Examples:
        >>> from gradwire import PowerSGD, plan
        >>> method = PowerSGD(rank=2, half_step=True, start_step=100)
        >>> method.start_step, method.cycle, sorted(method.per_replica)
        (100, 2, ['error'])

    Attributes:
        per_replica: the names of those memories of a tensor that differ between replicas.
            Everything else is equal everywhere.
        start_step: the first step whose messages are those of the plan.
        cycle: after how many steps from there they repeat (2 for an algorithm that alternates); a
            plan averages over a cycle.

    What computes with more than `ops` and the operators that all arrays have (`x.sum()`,
    `torch.linalg`) is refused where it is registered, unless its class says `portable = False`:
    then it runs in its own framework alone, and a plan counts it as an uncompressed average.
    """

    @property
    def start_step(self) -> int:
        """The first step whose messages are those of the plan; steps before it average gradients as
        they are."""

    @property
    def per_replica(self) -> frozenset[str]:
        """The names of those memories of a tensor that differ between replicas, such as
        `{"error"}`. A checkpoint keeps their mean, or all of them."""

    @property
    def cycle(self) -> int:
        """The number of steps after which the messages repeat, from `start_step` on: 1, or 2 where
        two kinds of step alternate."""

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        """The memory before the first step, equal on all replicas.

        Args:
            ops: kernels of the arrays' framework.
            specs: parameter name → shape and dtype of its gradient, of the whole model.

        Returns:
            Arrays by parameter name; a parameter without memory has no entry.

        Raises:
            ValueError: naming the parameter or option that cannot be served.
        """

    def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> Program[Stepped[A]]:
        """Average some gradients.

        Args:
            ops: kernels of the arrays' framework.
            gradients: name → this replica's gradient, donated. Any part of the model; a driver may
                run one program per part.
            state: `State.of` these gradients, donated.
            step: number of steps before this one, an int or a traced int32 scalar.

        Returns:
            The same names → the averaged gradient, the same bits on all replicas; and the new
            state.
        """


#: Where an algorithm, or local SGD, has the one that it runs.
INNER = ("algorithm", "compressor")


def nested(algorithm: Any) -> Iterator[Any]:
    """An algorithm, the one that it runs, the one that this runs, and so on, from the outermost to
    the innermost. None: nothing."""
    while algorithm is not None:
        yield algorithm
        algorithm = next(
            (inner for name in INNER if (inner := getattr(algorithm, name, None)) is not None), None
        )


def is_ours(cls: type) -> bool:
    """Whether a class is one of gradwire's, and not somebody's own, which may have its name."""
    return cls.__module__.partition(".")[0] == "gradwire"


def innermost(algorithm: Any) -> Any:
    """What compresses: inside `WireDtype` and `Zero`, and in `LocalSGD`; None inside None."""
    return [None, *nested(algorithm)][-1]


def with_inner(algorithm: T, change: Callable[[Any], Any]) -> T:
    """The algorithm with `change` of the one that it runs; itself, if it runs none, that stays the
    same, or it is no dataclass."""
    for name in INNER if is_dataclass(algorithm) else ():
        if (inner := getattr(algorithm, name, None)) is not None:
            changed = change(inner)
            return algorithm if changed is inner else replace(algorithm, **{name: changed})  # type: ignore[type-var]
    return algorithm


def near_in(algorithm: object, groups: object) -> bool:
    """Whether these are the groups of replicas of a node, in an algorithm with two levels."""
    return any(each.is_near(groups) for each in nested(algorithm) if hasattr(each, "is_near"))


def require_algorithm(algorithm: object, what: str = "algorithm") -> None:
    """Raise TypeError for an argument, called `what`, that is no algorithm: a class, a name,
    None."""
    shown = algorithm.__name__ if isinstance(algorithm, type) else short(algorithm)
    kind = "a class" if isinstance(algorithm, type) else f"a {type(algorithm).__name__}"
    if instead := getattr(algorithm, "instead", "") if not isinstance(algorithm, type) else "":
        raise TypeError(f"{what}={shown} {instead}")
    lacking = [
        name
        for name in ("init", "step", "per_replica", "start_step", "cycle")
        if not hasattr(algorithm, name)
    ]
    if isinstance(algorithm, type) or {"init", "step"} & {*lacking}:
        raise TypeError(
            f"{what}={shown} is {kind} and no algorithm: give an instance, such as"
            " PowerSGD(rank=4), AllReduce() or WireDtype(AllReduce(), 'bfloat16')"
        )
    if lacking:
        raise TypeError(
            f"{what}={shown} lacks {', '.join(lacking)}; gradwire.Algorithm says what an"
            " algorithm has"
        )


def check_specs(specs: Mapping[str, Spec]) -> None:
    """Raise ValueError for a parameter whose gradient cannot be averaged."""
    for name, spec in specs.items():
        if spec.dtype not in ITEMSIZE:
            raise ValueError(
                f"parameter {name!r} has dtype {spec.dtype}; only {', '.join(ITEMSIZE)} gradients"
                " can be averaged. Leave it out of the gradients (frozen in torch, `optax.masked`"
                " in JAX)."
            )
