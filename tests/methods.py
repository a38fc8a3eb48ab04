"""Every algorithm, by name: the one list over which tests go. What is added here is tested on every
driver.

Beside those that are shipped there is one that only tests have, for what an algorithm may send
besides: sums of 8-bit integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (short floats in NumPy)

from gradwire import (
    AllReduce,
    Compressor,
    PowerSGD,
    Quantize,
    Sign,
    TopK,
    TwoLevel,
    WireDtype,
)
from gradwire.core.algorithm import Algorithm
from gradwire.core.protocol import reduce_max, reduce_sum, world_size


@dataclass(frozen=True, kw_only=True, repr=False)
class Int8(Compressor):
    """Integers of 8 bits on one scale for all replicas, small enough that their sum is one too."""

    def memory(self, ops, name, spec):
        return {} if len(spec.shape) > 1 else None

    async def compress(self, ops, name, x, memory, context):
        replicas = await world_size()
        largest = ops.max_abs(x.reshape((1, -1))).reshape(())
        # A maximum may swallow a NaN. An inf reaches everyone.
        scale = await reduce_max(ops.where(ops.all_finite(x), largest, math.inf)) / (
            127 // replicas
        )
        scale = ops.where(scale > 0, scale, 1.0)
        sent = ops.cast(ops.round(x / scale), "int8")
        total = await reduce_sum(sent)
        dtype = ops.dtype_of(x)
        return ops.cast(sent, dtype) * scale, ops.cast(total, dtype) * (scale / replicas), memory


@dataclass(frozen=True)
class Method:
    """An algorithm, and gradients that suit it.

    `signal` is the rank of what the replicas' gradients share, `noise` the size of what they do
    not. The signal has the rank that the algorithm keeps: directions of nearly equal weight
    compete, and rounding decides which one is sent.

    `continuous`: a small change of its input is a small change of what it sends. Of what is not,
    the oracle computes in float32 as the drivers do:
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
    "views": Method(
        PowerSGD(2, stacked={"stack": 1}, rows={"heads": 1}, transpose=("conv", "stack"))
    ),
    "views_half_step": Method(
        PowerSGD(2, stacked={"stack": 1}, transpose=("stack",), half_step=True)
    ),
    "views_cold_start": Method(PowerSGD(2, stacked={"stack": 1}, warm_start=False)),
    "sometimes_zero": Method(PowerSGD(2, error_feedback=False), sometimes_zero=True),
    "int8": Method(Int8(), continuous=False),
    "quantize": Method(Quantize("int8"), continuous=False),
    "by_chance": Method(Quantize("int4", block=32, stochastic=True, seed=1), continuous=False),
    "two_bits": Method(Quantize("int2"), continuous=False),
    "wire_e3m0": Method(WireDtype(AllReduce(), "e3m0"), continuous=False),
    "wire_int8": Method(WireDtype(AllReduce(), "int8"), continuous=False),
    "wire_float8": Method(WireDtype(AllReduce(), "float8_e4m3fn"), continuous=False),
    "wire_factors": Method(WireDtype(PowerSGD(2), "bfloat16"), continuous=False),
    "wire_factors_int8": Method(WireDtype(PowerSGD(2), "int8"), continuous=False),
    # In messages of even length, but for one, so that halves of them add up whatever the buckets.
    "top_k": Method(TopK(8, per=64), continuous=False),
    "top_k_tiles": Method(
        TopK(16, per=(8, 8), mean="senders", error_feedback=0.95), continuous=False
    ),
    "top_k_bits": Method(TopK(8, per=64, bits=2), continuous=False),
    "sign": Method(Sign(), continuous=False),
    "one_bit": Method(Sign(per="column", magnitudes=2), continuous=False),
}

#: Of nodes of two replicas, for suites that have such: tests of two levels beside each driver have
#: more.
TWO_LEVELS: dict[str, Method] = {
    "two_levels": Method(TwoLevel(PowerSGD(2), within=2)),
    "two_levels_dense": Method(TwoLevel(AllReduce(), within=2)),
    "two_levels_codes": Method(
        TwoLevel(WireDtype(AllReduce(), "int8"), within=2), continuous=False
    ),
}

EVERY = METHODS | TWO_LEVELS

#: What is the program of another method but for numbers: the costly tables have them among what is
#: slow.
VARIANTS = (
    *("rank_1", "rank_4", "rank_deficient", "no_error_feedback", "error_decay", "sometimes_zero"),
    *(
        "views_cold_start",
        "views_half_step",
        "by_chance",
        "two_bits",
        "wire_int8",
        "wire_float8",
        "wire_factors_int8",
        "top_k_bits",
        "one_bit",
    ),
)
