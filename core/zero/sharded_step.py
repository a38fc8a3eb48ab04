"""ZeRO: every replica keeps the optimizer's state for its part of the model, and updates that part
(Rajbhandari et al. 2020, §5).

    shard of the average  =  reduce-scatter(gradients)
    shard of the result   =  optimizer(shard)
    result                =  all-gather(shard)

which together send as many bytes as the all-reduce they replace. The optimizer is the backend's
own: the program hands it the gradients of this replica's pieces and receives whatever is to be
gathered, new parameters in torch, updates in Optax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from gradwire.core.algorithm import Algorithm, State, require_algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.kernels.arrays import group_by, message_key
from gradwire.core.ops import A, Ops, Spec, wide_dtype
from gradwire.core.protocol import (
    all_gather,
    optimizer_step,
    reduce_scatter,
    reduce_sum,
    replica_index,
    sum_scalar,
)
from gradwire.core.text.options import Positive, check_options
from gradwire.core.zero.sharding import Shards
from gradwire.core.zero.stacks import StackShards

ALL_REDUCE = AllReduce()


@dataclass(frozen=True)
class Zero:
    """One step of sharded optimization, an `Algorithm` whose result is what the optimizer made and
    not an average.

        gradwire.plan(shapes, Zero(shard_by_element(specs, world_size=4)))

    Examples:
        >>> from gradwire import Spec, Zero, plan, shard_by_element
        >>> specs = {"w": Spec((64, 32)), "b": Spec((64,))}
        >>> zero = Zero(shard_by_element(specs, world_size=4))
        >>> plan({"w": (64, 32), "b": (64,)}, zero).wire_bytes
        8448

    Args:
        shards: who owns what.
        algorithm: how gradients are averaged. `AllReduce()`: by reduce-scatter, with `bucket_bytes`
            in several messages. Any other: by that, after which every replica takes its part. None:
            they are averages already.
        max_norm: scale gradients down to this global 2-norm.
        skip_non_finite: skip a step in which some replica's gradients hold inf or NaN: nothing is
            updated, on any replica.
        unscale: what gradients are multiplied by first, asked at every step: the reciprocal of a
            loss scale.

    Raises:
        ValueError: a norm that is not positive, or buckets of stacks, whose parameters share a
            message.
    """

    shards: Shards
    algorithm: Annotated[Algorithm, require_algorithm] | None = ALL_REDUCE
    max_norm: Positive | None = None
    skip_non_finite: bool = False
    unscale: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        size = self.algorithm.bucket_bytes if isinstance(self.algorithm, AllReduce) else None
        if size is not None and isinstance(self.shards, StackShards):
            raise ValueError(
                f"bucket_bytes={size} would part parameters that are stacked; leave it out"
            )

    @property
    def per_replica(self) -> frozenset[str]:
        """Names of the memories of `algorithm` that differ between replicas. The optimizer's state
        is the backend's, and not among them."""
        return self.algorithm.per_replica if self.algorithm else frozenset()

    @property
    def start_step(self) -> int:
        """The first step in which `algorithm` compresses; 0 where gradients are averages
        already."""
        return self.algorithm.start_step if self.algorithm else 0

    @property
    def cycle(self) -> int:
        """The number of steps after which the messages of `algorithm` repeat; 1 where gradients are
        averages already."""
        return self.algorithm.cycle if self.algorithm else 1

    def buckets(self, specs: Mapping[str, Spec]) -> list[list[str]]:
        """Names of the parameters in each message, in the order in which they are sent: the buckets
        of `algorithm`, or one message for each dtype; in each those of one kind of shards."""
        if isinstance(self.algorithm, AllReduce) and self.algorithm.bucket_bytes is not None:
            buckets = self.algorithm.buckets(specs)
        else:
            buckets = group_by(specs, map(message_key, specs.values()))
        return [names for bucket in buckets for names in self.shards.together(bucket)]

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        """The state of `algorithm`. Raises ValueError for a parameter that `shards` does not
        know."""
        if unknown := [name for name in specs if name not in self.shards.specs]:
            raise ValueError(
                f"parameter {unknown[0]!r} has no owner; make the shards from the same parameters"
            )
        return self.algorithm.init(ops, specs) if self.algorithm else State()

    async def step(
        self,
        ops: Ops[A],
        gradients: Mapping[str, A],
        state: State[A],
        step: Any,
        out: Mapping[str, A] | None = None,
    ) -> tuple[dict[str, A], State[A]]:
        """A step, see `Algorithm.step`. `out`, donated, is where the results may be written: the
        old parameters."""
        buckets = self.buckets({name: self.shards.specs[name] for name in gradients})
        own = await replica_index()
        pieces, state = await self._average_gradients(ops, gradients, state, step, buckets, own)
        if self.unscale is not None:
            factor = self.unscale()
            pieces = {name: piece * factor for name, piece in pieces.items()}
        ok = None
        if self.max_norm is not None or self.skip_non_finite:
            summed = wide_dtype(*(spec.dtype for spec in self.shards.specs.values()))
            kept = frozenset(filter(self.shards.is_kept, pieces))
            pieces, norm_squared = await clip_by_norm(ops, pieces, self.max_norm, summed, kept)
            ok = ops.all_finite(norm_squared) if self.skip_non_finite else None
        new = await optimizer_step(pieces, ok)
        results = await self._gathered(ops, new, buckets, own, out)
        return {name: results[name] for name in gradients}, state

    def _scatter(self, name: str) -> bool:
        return not (self.shards.is_kept(name) or self.shards.is_sparse(name))

    async def _average_gradients(
        self,
        ops: Ops[A],
        gradients: Mapping[str, A],
        state: State[A],
        step: Any,
        buckets: list[list[str]],
        own: Any,
    ) -> tuple[dict[str, A], State[A]]:
        """This replica's pieces of the averages, and the state of `algorithm` after them."""
        if not isinstance(self.algorithm, AllReduce):
            if self.algorithm is not None:
                gradients, state = await self.algorithm.step(ops, gradients, state, step)
            return self.shards.own(ops, gradients, own), state
        pieces: dict[str, A] = {}
        if whole := {name: g for name, g in gradients.items() if not self._scatter(name)}:
            averages, _ = await ALL_REDUCE.step(ops, whole, State(), 0)
            pieces = self.shards.own(ops, averages, own)
        buckets = [names for names in buckets if self._scatter(names[0])]
        messages = [
            self.shards.message(ops, {name: gradients[name] for name in names}) for names in buckets
        ]
        received = await reduce_scatter(messages, [self.shards.counts(names) for names in buckets])
        for names, shard in zip(buckets, received, strict=True):
            pieces |= self.shards.pieces(shard, names, own)
        return pieces, state

    async def _gathered(
        self,
        ops: Ops[A],
        pieces: Mapping[str, A],
        buckets: list[list[str]],
        own: Any,
        out: Mapping[str, A] | None,
    ) -> dict[str, A]:
        """The pieces of all replicas as whole parameters, in `out` where that is given."""
        whole = {name: piece for name, piece in pieces.items() if self.shards.is_kept(name)}
        for names in (names for names in buckets if self.shards.is_sparse(names[0])):
            alone = self.shards.alone(ops, pieces, names, own)
            vector = ops.rows(list(alone.values()), 1)
            summed = await reduce_sum(vector, out=vector, watched=False)
            whole |= dict(
                zip(
                    alone,
                    ops.from_rows(summed, [self.shards.specs[n].shape for n in alone]),
                    strict=True,
                )
            )
        buckets = [names for names in buckets if self._scatter(names[0])]
        shards = [self.shards.shard(ops, pieces, names, own) for names in buckets]
        into = [None if out is None else {name: out[name] for name in names} for names in buckets]
        places = [None if each is None else self.shards.place(each) for each in into]
        gathered = await all_gather(
            shards, [self.shards.counts(names) for names in buckets], out=places
        )
        for names, message, each in zip(buckets, gathered, into, strict=True):
            whole |= self.shards.whole(ops, message, names, each)
        return whole


async def clip_by_norm(
    ops: Ops[A],
    pieces: Mapping[str, A],
    max_norm: float | None,
    dtype: str = "float32",
    kept: Collection[str] = (),
) -> tuple[dict[str, A], A]:
    """Scale pieces down so that the 2-norm of all pieces of all replicas is at most `max_norm`
    (Pascanu et al. 2013, algorithm 1). Those that are `kept` are the same on all replicas, and
    count once.

    Returns:
        The pieces, unchanged where the norm is small enough or `max_norm` is None, and the square
        of the norm before in `dtype`: inf or NaN if any element is.
    """
    norm_squared = await sum_scalar(
        _sum_of_squares(ops, [x for name, x in pieces.items() if name not in kept], dtype)
    )
    norm_squared = norm_squared + _sum_of_squares(ops, [pieces[name] for name in kept], dtype)
    if max_norm is None:
        return dict(pieces), norm_squared
    norm = ops.sqrt(norm_squared)
    # Not `norm > max_norm`: a NaN has to come out as NaN everywhere.
    factor = ops.where(norm <= max_norm, ops.zeros((), ops.dtype_of(norm)) + 1.0, max_norm / norm)
    clipped = {
        name: ops.cast(ops.cast(piece, dtype) * factor, ops.dtype_of(piece))
        for name, piece in pieces.items()
    }
    return clipped, norm_squared


def _sum_of_squares(ops: Ops[A], arrays: Sequence[A], dtype: str) -> A:
    result = ops.zeros((), dtype)
    for x in arrays:
        norm = ops.norm(ops.cast(x, dtype).reshape((1, -1))).reshape(())
        result = result + norm * norm
    return result
