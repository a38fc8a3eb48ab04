"""Every algorithm, by name: the one list over which tests go. What is added here is tested on every driver.

Beside those that are shipped there are three that only tests have, for what an algorithm may send besides means: 8-bit integers, positions, votes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire import AllReduce, Compressor, PowerSGD, RandomProjection
from gradwire.core.algorithm import Algorithm
from gradwire.core.requests import gather, mean, reduce_max, reduce_sum, world_size

__all__ = ["METHODS", "Int8", "Method", "Sign", "TopK"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Int8(Compressor):
    """Integers of 8 bits on one scale for all replicas, small enough that their sum is one too."""

    def memory(self, ops, name, spec):
        return {} if len(spec.shape) > 1 else None

    async def compress(self, ops, name, x, memory, context):
        replicas = await world_size()
        largest = ops.max_abs(x.reshape((1, -1))).reshape(())
        # A maximum may swallow a NaN. An inf reaches everyone.
        scale = await reduce_max(ops.where(ops.all_finite(x), largest, math.inf)) / (127 // replicas)
        scale = ops.where(scale > 0, scale, 1.0)
        sent = ops.cast(ops.round(x / scale), "int8")
        total = await reduce_sum(sent)
        dtype = ops.dtype_of(x)
        return ops.cast(sent, dtype) * scale, ops.cast(total, dtype) * (scale / replicas), memory


@dataclass(frozen=True, kw_only=True, repr=False)
class TopK(Compressor):
    """The largest elements of each tensor, one in `every`: values and positions, gathered."""

    every: int = 16

    def memory(self, ops, name, spec):
        return {} if spec.size >= 2 * self.every else None

    async def compress(self, ops, name, x, memory, context):
        flat = x.reshape((-1,))
        flat = ops.where(ops.all_finite(flat), flat, math.nan)  # a sort may lose a NaN
        index = ops.top_k(ops.abs(flat), flat.shape[0] // self.every)
        values = ops.take(flat, index)
        all_values, all_index = await gather(values, index)

        def spread(index, values):
            nothing = ops.zeros(tuple(flat.shape), ops.dtype_of(flat))
            return ops.scatter_add(nothing, index.reshape((-1,)), values.reshape((-1,))).reshape(tuple(x.shape))

        return spread(index, values), spread(all_index, all_values / await world_size()), memory


@dataclass(frozen=True, kw_only=True, repr=False)
class Sign(Compressor):
    """Signs, on one scale, and what most replicas say (Bernstein et al. 2018, "signSGD"). A vote is a sum of 8-bit integers."""

    biased = True

    def memory(self, ops, name, spec):
        return {} if len(spec.shape) > 1 and spec.size else None

    async def compress(self, ops, name, x, memory, context):
        scale = await mean(ops.norm(x.reshape((1, -1))).reshape(()) / math.sqrt(math.prod(x.shape)))
        sign, dtype = ops.sign(x), ops.dtype_of(x)
        vote = ops.sign(ops.cast(await reduce_sum(ops.cast(sign, "int8")), dtype))
        return sign * scale, vote * scale, memory


@dataclass(frozen=True)
class Method:
    """An algorithm, and gradients that suit it.

    `signal` is the rank of what the replicas' gradients share, `noise` the size of what they do not. The signal has the rank that the algorithm
    keeps: directions of nearly equal weight compete, and rounding decides which one is sent.

    `continuous`: a small change of its input is a small change of what it sends. Of what is not, the oracle computes in float32 as the drivers do:
    there every comparison, and so every rounding to an integer, comes out the same.
    """

    algorithm: Algorithm
    signal: int = 2
    noise: float = 0.1
    sometimes_zero: bool = False
    continuous: bool = True


METHODS: dict[str, Method] = {
    "all_reduce": Method(AllReduce()),
    "all_reduce_buckets": Method(AllReduce(bucket_bytes=2048, first_bucket_bytes=1024)),
    "rank_1": Method(PowerSGD(1), 1),
    "rank_2": Method(PowerSGD(2)),
    "rank_4": Method(PowerSGD(4, min_compression_rate=1.0), 4),
    "rank_deficient": Method(PowerSGD(4, min_compression_rate=1.0), 1, noise=0.0),
    "half_step": Method(PowerSGD(2, half_step=True)),
    "cold_start": Method(PowerSGD(2, warm_start=False)),
    "no_error_feedback": Method(PowerSGD(2, error_feedback=False)),
    "error_decay": Method(PowerSGD(2, error_feedback=0.9)),
    # The norm of replica 0 stays below, that of replica 1 lies about it, those of the others above.
    "max_norm": Method(PowerSGD(2, max_norm=32.0)),
    "start_step": Method(PowerSGD(2, start_step=6)),
    "square": Method(PowerSGD(2, square=True)),
    "rank_by_name": Method(PowerSGD({"conv": 2, "tall": 0, "*": 2})),
    "views": Method(PowerSGD(2, stacked={"stack": 1}, rows={"heads": 1}, transpose=("conv", "stack"))),
    "views_half_step": Method(PowerSGD(2, stacked={"stack": 1}, transpose=("stack",), half_step=True)),
    "views_cold_start": Method(PowerSGD(2, stacked={"stack": 1}, warm_start=False)),
    "sometimes_zero": Method(PowerSGD(2, error_feedback=False), sometimes_zero=True),
    "random_projection": Method(RandomProjection(2)),
    "int8": Method(Int8(), continuous=False),
    "top_k": Method(TopK(), continuous=False),
    "sign": Method(Sign(), continuous=False),
}
