"""What a run has to log about its compression, from the training state alone, inside `jax.jit` or outside.

state, loss = train_step(state, batch)
print(stats(state.opt_state))        # Stats(steps=100, skipped_steps=0, bytes_sent=…, dense_bytes=…, compression_ratio=72.1, …)

What `gradwire.torch_backend.Stats` has too has the same name there. Times are not in the state, and could not be: a step is one program, in which XLA
orders compressing, sending and computing as it likes, and nothing in it may look at a clock. `jax.profiler` shows them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten_with_path, tree_leaves_with_path

from gradwire.core.algorithms.compressor import ERROR
from gradwire.jax_backend.axes.mapped_axis import AxisName
from gradwire.jax_backend.local_sgd.transform import LocalSGDState
from gradwire.jax_backend.state.names import pure
from gradwire.jax_backend.state.types import DataParallelState


class Stats(NamedTuple):
    """Scalars, of all `average_gradients` transformations in a state together.

    Attributes:
        steps: int32, updates so far.
        skipped_steps: int32, those that changed no memory, since a replica's gradient held an inf or NaN.
        bytes_sent: float32, what a replica has handed to the network in all of them, as `wire_bytes` counts.
        dense_bytes: float32, what it would have been uncompressed.
        compression_ratio: float32, how many times fewer bytes than uncompressed have been sent; before the first step, and before the algorithm's
            start, 1.
        wire_bytes: float32, bytes that a replica hands to the network in the step that comes next; from the algorithm's start on its average
            over a cycle, as in `gradwire.plan`. NaN before the first step if it depends on the number of replicas, and `init` was called
            outside the map.
        error_norm: float32, the 2-norm of the compression error so far and will send later. Of a state in global form, the root of
            the mean square over the replicas; inside the training step this replica's own, over which `jax.lax.pmean` averages.
    """

    steps: jax.Array
    skipped_steps: jax.Array
    bytes_sent: jax.Array
    dense_bytes: jax.Array
    compression_ratio: jax.Array
    wire_bytes: jax.Array
    error_norm: jax.Array

    def scalars(self) -> dict[str, float]:
        """What a tracker draws: name → number, on the host. Those that torch's `Stats.scalars` has too have the same names."""
        drawn = ("steps", "skipped_steps", "bytes_sent", "compression_ratio", "error_norm")
        return {name: float(getattr(self, name)) for name in drawn}


class RelativeError(NamedTuple):
    """2-norms of differences between averages and the means that they stand for, over the norms of those means; float32.

    Attributes:
        whole: of all gradients together. 0 for exact averages, 1 if nothing was sent.
        by_parameter: a tree like the gradients.
    """

    whole: jax.Array
    by_parameter: Any


def relative_error(gradients: Any, averages: Any, state: Any, *, axis_name: AxisName) -> RelativeError:
    """How well the algorithm does with the gradients of a step: on request, since it costs a full average. Inside the map.

        compressor = power_sgd(rank=4, axis_name="data")
        averages, after = compressor.update(gradients, before)
        error = relative_error(gradients, averages, before, axis_name="data")

    The averages are compared with the mean of what the replicas put in: gradients, and the errors of the steps before. Error feedback sends that later,
    so a relative error of 0.9 is no 0.9 of the gradient lost.

    Args:
        gradients: this replica's, as they were given to `update`.
        averages: what `update` of the transformation itself returned, and not that of a chain.
        state: the state before that update, in local form.
        axis_name: that of the transformation.

    Raises:
        ValueError: there is not one state of `average_gradients` in `state`.
    """
    states = _states(state)
    if len(states) != 1:
        raise ValueError(
            f"relative_error: state holds {len(states)} states of power_sgd, all_reduce_mean or average_gradients; give it that of one"
        )
    errors = {path: error[0] for path, error in tree_leaves_with_path(states[0].local.per_replica.get(ERROR, {}))}
    given, structure = tree_flatten_with_path(pure(gradients))
    differences, norms = [], []
    for (path, gradient), average in zip(given, jax.tree.leaves(pure(averages)), strict=True):
        mean: jax.Array = jax.lax.pmean(gradient.astype(jnp.float32) + errors.get(path, 0), axis_name)  # type: ignore[no-untyped-call]
        differences.append(jnp.square(average.astype(jnp.float32) - mean).sum())
        norms.append(jnp.square(mean).sum())
    by_parameter = [_ratio(*pair) for pair in zip(differences, norms, strict=True)]
    return RelativeError(_ratio(sum(differences), sum(norms)), jax.tree.unflatten(structure, by_parameter))


def _ratio(difference: Any, whole: Any) -> jax.Array:
    """The root of it; 0 where there is neither."""
    return jnp.sqrt(
        jnp.where(whole > 0, difference / jnp.where(whole > 0, whole, 1), jnp.where(difference > 0, 1.0, 0.0))
    )


def _states(tree: Any) -> list[DataParallelState]:
    """Those of `average_gradients` transformations that stand for themselves."""

    def stands_alone(x: Any) -> bool:
        return isinstance(x, (DataParallelState, LocalSGDState))

    return [x for x in jax.tree.leaves(pure(tree), is_leaf=stands_alone) if isinstance(x, DataParallelState)]


def stats(state: Any) -> Stats:
    """What compression does in this run.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gradwire.jax_backend import power_sgd, stats
        >>> new = stats(power_sgd(4, axis_name="data").init({"w": jnp.zeros((512, 512))}))
        >>> int(new.steps), float(new.wire_bytes), float(new.error_norm)
        (0, 16384.0, 0.0)

    Args:
        state: any tree that holds states of `average_gradients` transformations: an optimizer's state, a Flax `TrainState`, `nnx.Optimizer.opt_state`.
            In local or global form; after `jax.pmap`: `unreplicate` first, or call it in the training step.

    Raises:
        ValueError: there is no such state in it. What local SGD sends stands in `gradwire.plan`.
    """
    found = _states(state)
    if not found:
        raise ValueError(
            "stats: there is no state of power_sgd, all_reduce_mean or average_gradients in what it was given. Give it the optimizer's state. "
            "For local SGD: gradwire.plan(parameter_shapes(params), LocalSGD(…))"
        )
    next_step, sent, dense, squares = (jnp.zeros((), jnp.float32) for _ in range(4))
    skipped = jnp.zeros((), jnp.int32)
    for one in found:
        record, account = one.record, one.account
        next_step += jnp.where(one.step >= record.start_step, account.wire_bytes, account.dense_bytes)
        compressed = jnp.maximum(one.step - record.start_step, 0)
        sent += (one.step - compressed) * account.dense_bytes
        sent += jnp.where(compressed > 0, compressed * account.wire_bytes, 0)  # which may be unknown before
        dense += one.step * account.dense_bytes
        skipped += account.skipped
        for error in jax.tree.leaves(one.local):
            squares += jnp.square(error.astype(jnp.float32)).sum() / error.shape[0]
    return Stats(
        steps=found[0].step,
        skipped_steps=skipped,
        bytes_sent=sent,
        dense_bytes=dense,
        compression_ratio=jnp.where(sent == 0, 1, dense / jnp.where(sent == 0, 1, sent)),
        wire_bytes=next_step,
        error_norm=jnp.sqrt(squares),
    )
