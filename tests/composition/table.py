"""The first table of docs/composition.md: which cells there are, what comes of each, and the page's text of it.

python -m tests.composition.table      # writes it into the page
"""

from __future__ import annotations

from tests.composition.scenario import begins_dense

#: Where a method is given → how the table calls it.
DOORS = {
    "ddp": "DDP, `register_comm_hook`",
    "data_parallel": "`DataParallel`",
    "zero": "`ZeroOptimizer` behind it",
    "local_sgd": "`local_sgd`, its `compressor`",
    "jax": "JAX, `average_gradients`",
    "jax_local_sgd": "JAX, `local_sgd`",
}
#: Of every kind of message and of memory one, at all doors; what the others are is a variant of it, and slow.
KINDS = ["all_reduce", "rank_2", "half_step", "quantize", "wire_factors_int8", "top_k", "sign"]
QUICK = {"ddp": KINDS, "data_parallel": KINDS, "zero": KINDS, "local_sgd": KINDS, "jax": KINDS, "jax_local_sgd": KINDS}


def outcome(case: str, door: str, feature: str) -> str:
    """ "works", "refused", or "none": there is no such thing."""
    if case == "all_reduce_buckets" and door in ("ddp", "data_parallel", "zero"):
        return "refused"
    if feature == "dense start" and not begins_dense(case):
        return "none"
    if feature == "other world size" and door == "jax_local_sgd":
        return "refused"
    return "works"
