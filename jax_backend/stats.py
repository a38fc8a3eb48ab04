"""What a run has to log about its compression, from the training state alone, inside `jax.jit` or outside.

state, loss = train_step(state, batch)
print(stats(state.opt_state))        # Stats(step=100, wire_bytes=…, compression_ratio=72.1, error_norm=0.8, skipped=0)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradwire.jax_backend.local_sgd import LocalSGDState
from gradwire.jax_backend.parameter_names import pure
from gradwire.jax_backend.state import DataParallelState


class Stats(NamedTuple):
    """Scalars, of all `average_gradients` transformations in a state together.

    Attributes:
        step: int32, updates so far.
        wire_bytes: float32, bytes that a replica hands to the network in the step that comes next; from the algorithm's start on its average
            over a cycle, as in `gradwire.plan`. NaN before the first step if it depends on the number of replicas, and `init` was called
            outside the map.
        compression_ratio: float32, how many times fewer that is than uncompressed.
        error_norm: float32, the 2-norm of what compression has left out so far and will send later. Of a state in global form, the root of
            the mean square over the replicas; inside the training step this replica's own, over which `jax.lax.pmean` averages.
        skipped: int32, steps that changed no memory, since a replica's gradient held an inf or NaN.
    """

    step: jax.Array
    wire_bytes: jax.Array
    compression_ratio: jax.Array
    error_norm: jax.Array
    skipped: jax.Array


def stats(state: Any) -> Stats:
    """What compression does in this run.

    Args:
        state: any tree that holds states of `average_gradients` transformations: an optimizer's state, a Flax `TrainState`, `nnx.Optimizer.opt_state`.
            In local or global form; after `jax.pmap`: `unreplicate` first, or call it in the training step.

    Raises:
        ValueError: there is no such state in it, or one of an older version. What local SGD sends stands in `gradwire.plan`.
    """

    def stands_alone(x: Any) -> bool:
        return isinstance(x, (DataParallelState, LocalSGDState))

    leaves = jax.tree.leaves(pure(state), is_leaf=stands_alone)
    states = [x for x in leaves if isinstance(x, DataParallelState)]
    found = [(x, x.record, x.account) for x in states if x.record is not None and x.account is not None]
    if not found:
        raise ValueError(
            "stats: there is no state of power_sgd, all_reduce_mean or average_gradients in what it was given. Give it the optimizer's state. "
            "For local SGD: gradwire.plan(parameter_shapes(params), LocalSGD(…))"
        )
    sent, dense, squares = (jnp.zeros((), jnp.float32) for _ in range(3))
    skipped = jnp.zeros((), jnp.int32)
    for one, record, account in found:
        sent += jnp.where(one.step >= record.start_step, account.wire_bytes, account.dense_bytes)
        dense += account.dense_bytes
        skipped += account.skipped
        for error in jax.tree.leaves(one.local):
            squares += jnp.square(error.astype(jnp.float32)).sum() / error.shape[0]
    return Stats(
        step=found[0][0].step,
        wire_bytes=sent,
        compression_ratio=jnp.where(sent == 0, 1, dense / jnp.where(sent == 0, 1, sent)),
        error_norm=jnp.sqrt(squares),
        skipped=skipped,
    )
