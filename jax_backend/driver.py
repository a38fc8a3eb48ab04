"""The driver: runs an algorithm inside a traced function, over a mapped axis.

A `Reduce` of any number of arrays is one `psum` of a list per dtype, which XLA makes one all-reduce of. Gradients lie in that list as they are:
packing them would cost a copy of the model, and would gather whole what the compiler has sharded. What an algorithm makes for the wire, factors
and the small tensors beside them, is packed into a flat array first: left to XLA, the two messages of a PowerSGD step came out as four or
five all-reduces. `ReduceScatter` and `AllGather` are `psum_scatter` and `all_gather`, one for each array.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.core.programs import Groups, Program, Request, cannot_answer, run
from gradwire.core.requests import (
    AllGather,
    Branch,
    LocalNorm,
    OptimizerStep,
    Orthonormalize,
    Reduce,
    ReduceScatter,
    ReplicaIndex,
    StepIsFinite,
    SumScalar,
)
from gradwire.jax_backend.axis import AxisName, axes_of, tracked, vary, vary_if_tracked, varying_axes
from gradwire.jax_backend.groups import mean_by_sum, mean_in_groups
from gradwire.jax_backend.packing import pack, unpack
from gradwire.jax_backend.traffic import one_message

__all__ = ["drive", "drive_watched"]

T = TypeVar("T")
Side = Callable[[], tuple[Any, jax.Array]]

GATHERS_INVARYING = "to" in inspect.signature(lax.all_gather).parameters

#: Of what is watched, arrays from this size on, in bytes, are worth a place of their own in a message.
LARGE = 1 << 20

#: A sharded optimizer: (gradients of this replica's pieces by name, whether the step counts or None) → what it makes of them.
Optimizer = Callable[[dict[str, jax.Array], jax.Array | None], dict[str, jax.Array]]


def drive(program: Program[T], axis_name: AxisName, optimizer: Optimizer | None = None) -> T:
    """Run a program to its end.

    Args:
        program: a coroutine over JAX arrays.
        axis_name: the mapped axis over which its averages run; must be bound.
        optimizer: of a program that has one (`gradwire.core.algorithms.zero.Zero`).

    Returns:
        What the program returned.
    """
    return drive_watched(program, axis_name, optimizer)[0]


def drive_watched(program: Program[T], axis_name: AxisName, optimizer: Optimizer | None = None) -> tuple[T, jax.Array]:
    """`drive`, and whether all watched averages were finite: a bool scalar, equal on all replicas."""
    driver = _Driver(axis_name, jnp.asarray(True), optimizer)
    return run(program, driver.answer), driver.finite


class _Driver:
    """Performs requests; `finite` tells whether all watched averages so far were finite."""

    def __init__(self, axis_name: AxisName, finite: jax.Array, optimizer: Optimizer | None = None) -> None:
        self.axis_name = axis_name
        self.finite = finite
        self.optimizer = optimizer

    def answer(self, request: Request) -> tuple[Any, ...]:
        if isinstance(request, Reduce):
            return self._mean(request)
        if isinstance(request, Orthonormalize):
            return request.answer()
        if isinstance(request, LocalNorm):
            return (self._own_norm(request),)
        if isinstance(request, StepIsFinite):
            return (self._finite(),)
        if isinstance(request, Branch):
            return (self._branch(request),)
        if isinstance(request, ReplicaIndex):
            return (lax.axis_index(self.axis_name),)
        if isinstance(request, ReduceScatter):
            return tuple(self._reduce_scatter(x) for x in request.arrays)
        if isinstance(request, AllGather):
            return tuple(self._all_gather(x) for x in request.arrays)
        if isinstance(request, SumScalar):
            return tuple(self._sum([request.array]))
        if isinstance(request, OptimizerStep) and self.optimizer is not None:
            return (self.optimizer(request.pieces, request.ok),)
        raise cannot_answer("the JAX driver", request)

    def _mean(self, request: Reduce[jax.Array]) -> tuple[jax.Array, ...]:
        answers = [jnp.zeros(x.shape, x.dtype) for x in request.arrays]
        by_dtype: dict[Any, list[int]] = {}
        for i, x in enumerate(request.arrays):
            if x.size:
                by_dtype.setdefault(x.dtype, []).append(i)
        for members in by_dtype.values():
            pieces = _pieces(request, members)
            sent = [pack([request.arrays[i] for i in piece]) for piece in pieces]
            for piece, average in zip(pieces, self._average(sent, request.groups), strict=True):
                if request.watched:
                    self.finite = self.finite & jnp.isfinite(average).all()
                for i, answer in zip(piece, unpack(average, [request.arrays[i].shape for i in piece]), strict=True):
                    answers[i] = answer
        return tuple(answers)

    def _own_norm(self, request: LocalNorm[jax.Array]) -> jax.Array:
        # Of a parameter that is divided over another axis too, all parts belong to the replica.
        own = frozenset(axes_of(self.axis_name))
        divided: dict[frozenset[str], list[jax.Array]] = {}
        for x in request.arrays:
            divided.setdefault(varying_axes(x) - own, []).append(x)
        norms = [request.ops.norm_of_all(divided.pop(frozenset(), []))]
        for along, members in divided.items():
            square = jnp.square(request.ops.norm_of_all(members))
            norms.append(jnp.sqrt(lax.psum(square, tuple(sorted(along)))))  # type: ignore[no-untyped-call]
        return norms[0] if len(norms) == 1 else request.ops.norm_of_all(norms)

    def _finite(self) -> jax.Array:
        # Parameters that are divided over another axis are finite or not in each part: all of them must decide alike.
        others = tuple(sorted(varying_axes(self.finite)))
        if others:
            self.finite = lax.psum((~self.finite).astype(jnp.int32), others) == 0  # type: ignore[no-untyped-call]
        return self.finite

    def _average(self, arrays: list[jax.Array], groups: Groups | None) -> list[jax.Array]:
        """Of one dtype, in one message."""
        if groups is not None:
            return one_message(lambda xs: mean_in_groups(xs, groups, self.axis_name), arrays)
        return mean_by_sum(self._sum, arrays, lax.axis_size(self.axis_name))

    def _sum(self, arrays: list[jax.Array]) -> list[jax.Array]:
        def total(xs: list[jax.Array]) -> list[jax.Array]:
            result: list[jax.Array] = lax.psum(xs, self.axis_name)  # type: ignore[no-untyped-call]
            return result

        return one_message(total, vary_if_tracked(arrays, self.axis_name))

    def _reduce_scatter(self, x: jax.Array) -> jax.Array:
        if not x.size:
            return jnp.zeros_like(x)

        def scattered(xs: list[jax.Array]) -> list[jax.Array]:
            return [lax.psum_scatter(x, self.axis_name, tiled=True) for x in xs]  # type: ignore[no-untyped-call]

        (part,) = mean_by_sum(scattered, [vary_if_tracked(x, self.axis_name)], lax.axis_size(self.axis_name))
        return part

    def _all_gather(self, x: jax.Array) -> jax.Array:
        if not x.size:
            return jnp.zeros(x.shape, x.dtype)  # which is the same on all replicas, and x is not known to be
        told = {}
        if tracked(self.axis_name):  # Then JAX must be told that the result is the same on all replicas.
            if not GATHERS_INVARYING:
                raise NotImplementedError(
                    "an all-gather under jax.shard_map(check_vma=True) needs JAX 0.9; pass check_vma=False to jax.shard_map"
                )
            x, told = vary(x, axes_of(self.axis_name)), {"to": "invarying"}
        whole: jax.Array = lax.all_gather(x, self.axis_name, tiled=True, **told)
        return whole

    def _branch(self, request: Branch[Any]) -> Any:
        def side(start: Callable[..., Program[Any]]) -> Side:
            def traced() -> tuple[Any, jax.Array]:
                driver = _Driver(self.axis_name, self.finite, self.optimizer)
                return run(start(*request.operands), driver.answer), driver.finite

            return traced

        then, otherwise = side(request.then), side(request.otherwise)
        if tracked(self.axis_name):
            then, otherwise = _equally_varying(then, otherwise)
        answer, self.finite = lax.cond(request.predicate, then, otherwise)
        return answer


def _pieces(request: Reduce[Any], members: list[int]) -> list[list[int]]:
    """These arrays of a request, all of one dtype, divided among the arrays of its message: in each those that are packed."""
    if not request.watched:
        return [[i] for i in members]
    packed: dict[frozenset[str], list[int]] = {}
    alone = []
    for i in members:
        x = request.arrays[i]
        if x.nbytes < LARGE:
            # Under `check_vma=True` what is packed comes to vary wherever one piece of it does.
            packed.setdefault(varying_axes(x), []).append(i)
        else:
            alone.append([i])
    return [*packed.values(), *alone]


def _equally_varying(then: Side, otherwise: Side) -> tuple[Side, Side]:
    """Both sides of a branch, with every result marked as varying where it varies on either side, as `lax.cond` demands."""
    results = [jax.eval_shape(side) for side in (then, otherwise)]
    leaves, structures = zip(*(jax.tree.flatten(r) for r in results), strict=True)
    if structures[0] != structures[1]:
        return then, otherwise  # `lax.cond` says it better.
    axes = [varying_axes(a) | varying_axes(b) for a, b in zip(*leaves, strict=True)]

    def marked(side: Side) -> Side:
        def traced() -> tuple[Any, jax.Array]:
            values, structure = jax.tree.flatten(side())
            answer, finite = jax.tree.unflatten(structure, [vary(v, a) for v, a in zip(values, axes, strict=True)])
            return answer, finite

        return traced

    return marked(then), marked(otherwise)
