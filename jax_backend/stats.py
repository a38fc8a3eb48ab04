"""What a run has to log about its compression, from the training state alone, inside `jax.jit` or
outside.

state, loss = train_step(state, batch)
print(stats(state.opt_state))    # Stats(steps=100, skipped_steps=0, bytes_sent=…, …)

What `gradwire.torch_backend.Stats` has too has the same name there. Times are not in the state, and
could not be: a step is one program, in which XLA orders compressing, sending and computing as it
likes, and nothing in it may look at a clock. `jax.profiler` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradwire.core.algorithms.compressor import ERROR
from gradwire.jax_backend.axes.mapped_axis import AxisName
from gradwire.jax_backend.axes.outside_meshes import automatic, outside_meshes
from gradwire.jax_backend.checks import scalar_weight
from gradwire.jax_backend.state.names import flatten, pure
from gradwire.jax_backend.state.skipped_steps import note_skipped_steps
from gradwire.jax_backend.state.survey import survey
from gradwire.jax_backend.state.types import DataParallelState, LocalSGDState, on_devices

#: Steps are counted so far.
LAST = np.iinfo(np.int32).max


class Stats(NamedTuple):
    """Scalars, of all states of `average_gradients` and `local_sgd` in a tree together.

    Attributes:
        steps: int32, updates so far.
        skipped_steps: int32, those that changed no memory, since a replica's gradient held an inf
            or NaN. Uncompressed averages of floats as they are, also those before the algorithm's
            start, are looked at for their weights alone. Of several states in a tree that of the
            one that has skipped the most. 0 of local SGD, where each replica has its own.
        bytes_sent: float32, what a replica has handed to the network in all of them, as
            `wire_bytes` counts: the state holds the number of steps, and of those before it was
            moved to another algorithm, or to another number of replicas, they are taken to be like
            these.
        dense_bytes: float32, what it would have been uncompressed; of local SGD, with gradients
            averaged in each step.
        compression_ratio: float32, how many times fewer bytes than uncompressed have been sent,
            `dense_bytes / between_bytes`; before the first step, and before the algorithm's start,
            1. With two levels it is that between nodes.
        wire_bytes: float32, bytes that a replica hands to the network in the step that comes next;
            from the algorithm's start on its average over a cycle, as in `gradwire.plan`: of local
            SGD over a period of its schedule. Without buffers and moments that are averaged along.
            NaN before the first step if it depends on the number of replicas, as it does with two
            levels and of local SGD, and `init` was called outside the map.
        local_error_norm: float32, the 2-norm of the compression error so far, which is sent later.
            Of a state in global form, the root of the mean square over the replicas of this
            process; inside the training step this replica's own, over which `jax.lax.pmean`
            averages.
        within_bytes: float32, with two levels those of `bytes_sent` that stay inside the node; else
            0.
        between_bytes: float32, with two levels what all replicas of a node have sent to other nodes
            together, whose link they share; else `bytes_sent`.
        skipped_averages: int32, of local SGD with outer parameters, averages of differences that
            were refused, of each fragment by itself, since they were not finite.
    """

    steps: jax.Array
    skipped_steps: jax.Array
    bytes_sent: jax.Array
    dense_bytes: jax.Array
    compression_ratio: jax.Array
    wire_bytes: jax.Array
    local_error_norm: jax.Array
    within_bytes: jax.Array
    between_bytes: jax.Array
    skipped_averages: jax.Array

    @property
    def within_ratio(self) -> jax.Array:
        """`dense_bytes / within_bytes`: with two levels, how many times fewer bytes inside the
        node; 1 if none were sent there."""
        return _times_fewer(self.dense_bytes, self.within_bytes)

    def scalars(self) -> dict[str, float]:
        """What a tracker draws: name → number, on the host. Those that torch's `Stats.scalars` has
        too have the same names."""
        drawn = ("steps", "skipped_steps", "bytes_sent", "compression_ratio", "local_error_norm")
        return {name: float(getattr(self, name)) for name in drawn}


class RelativeError(NamedTuple):
    """2-norms of differences between averages and the means that they stand for, over the norms of
    those means; float32.

    Attributes:
        whole: of all gradients together. 0 for exact averages, 1 if nothing was sent.
        by_parameter: a tree like the gradients.
    """

    whole: jax.Array
    by_parameter: Any


def relative_error(
    gradients: Any, averages: Any, state: Any, *, axis_name: AxisName, weight: Any = None
) -> RelativeError:
    """How well the algorithm does with the gradients of a step: on request, since it costs a full
    average. Inside the map.

        compressor = average_gradients(WireDtype(PowerSGD(16), "int8"), axis_name="data")
        averages, after = compressor.update(gradients, before)
        error = relative_error(gradients, averages, before, axis_name="data")

    The averages are compared with the mean of what the replicas put in: gradients, and the errors
    of the steps before. Error feedback sends that later, so a relative error of 0.9 is no 0.9 of
    the gradient lost.

    Args:
        gradients: this replica's, as they were given to `update`.
        averages: what `update` of the transformation itself returned, and not that of a chain.
        state: the state before that update, in local form.
        axis_name: that of the transformation.
        weight: this replica's, as it was given to `update`: the mean counts replicas by it. None:
            all count alike.

    Raises:
        TypeError: `weight` is no number.
        ValueError: there is not one state of `average_gradients` in `state`, or `weight` is
            negative, or out of range.
    """
    states = [each for each in _states(state) if isinstance(each, DataParallelState)]
    if len(states) != 1:
        raise ValueError(
            f"relative_error: state holds {len(states)} states of power_sgd, all_reduce_mean or"
            " average_gradients; give it that of one"
        )
    errors = {
        name: error[0]
        for name, error in flatten(states[0].local.per_replica.get(ERROR, {})).leaves.items()
    }
    given, structure = flatten(gradients).leaves.items(), jax.tree.structure(pure(gradients))
    mean_of = _mean_over(axis_name, weight)
    differences, norms = [], []
    for (name, gradient), average in zip(given, jax.tree.leaves(pure(averages)), strict=True):
        error = errors[name].astype(jnp.float32) if name in errors else 0
        mean = mean_of(gradient.astype(jnp.float32) + error)
        differences.append(jnp.square(average.astype(jnp.float32) - mean).sum())
        norms.append(jnp.square(mean).sum())
    by_parameter = [_ratio(*pair) for pair in zip(differences, norms, strict=True)]
    return RelativeError(
        _ratio(sum(differences), sum(norms)), jax.tree.unflatten(structure, by_parameter)
    )


def _mean_over(axis_name: AxisName, weight: Any) -> Callable[[jax.Array], jax.Array]:
    """The mean over the replicas, by the weight of each if there is one: an absent replica may hold
    anything, NaN too."""
    if weight is None:
        return lambda x: jax.lax.pmean(x, axis_name)  # type: ignore[no-untyped-call]
    own = scalar_weight(weight)
    # Sums of weights near the ends of their range would leave that of float32.
    own = own / jax.lax.pmax(own, axis_name)  # type: ignore[no-untyped-call]
    total = jax.lax.psum(own, axis_name)  # type: ignore[no-untyped-call]
    return lambda x: (
        jax.lax.psum(jnp.where(own == 0, 0, own * x), axis_name) / total  # type: ignore[no-untyped-call]
    )


def _ratio(difference: Any, whole: Any) -> jax.Array:
    """The root of it; 0 where there is neither."""
    return jnp.sqrt(
        jnp.where(
            whole > 0,
            difference / jnp.where(whole > 0, whole, 1),
            jnp.where(difference > 0, 1.0, 0.0),
        )
    )


def _times_fewer(dense: jax.Array, sent: jax.Array) -> jax.Array:
    return jnp.where(sent == 0, 1, dense / jnp.where(sent == 0, 1, sent))


def _is_ours(x: Any) -> bool:
    return isinstance(x, (DataParallelState, LocalSGDState))


def _states(tree: Any) -> list[Any]:
    """Those of `average_gradients` and `local_sgd` in a tree."""
    return [x for x in jax.tree.leaves(pure(tree), is_leaf=_is_ours) if _is_ours(x)]


def _shards_of_this_process(x: Any) -> list[Any]:
    """Those shards of an array of several processes, each once, that lie here; [] of any other."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or x.is_fully_addressable:
        return []
    return list({str(shard.index): shard for shard in x.addressable_shards}.values())


def _of_this_process(x: Any) -> Any:
    """Numbers that are equal on all replicas, as this process has them."""
    shards = _shards_of_this_process(x)
    if not shards:
        return x
    return jnp.asarray(
        np.concatenate([np.asarray(shard.data) for shard in shards]) if x.ndim else shards[0].data
    )


def _mean_square(error: Any, *, rows: bool) -> Any:
    """The sum of the squares, of several rows on average: of those that this process has. Nothing
    is sent."""
    shards = _shards_of_this_process(error)
    if not shards:
        return jnp.square(on_devices(error).astype(jnp.float32)).sum() / (
            error.shape[0] if rows else 1
        )
    here = (
        {i for shard in shards for i in range(*shard.index[0].indices(error.shape[0]))}
        if rows
        else {0}
    )
    return sum(float(jnp.square(shard.data.astype(jnp.float32)).sum()) for shard in shards) / len(
        here
    )


@outside_meshes
def stats(state: Any) -> Stats:
    """What compression does in this run.

    Outside `jax.jit` the host looks at the counts of steps, and waits for them. Where ten and more
    in a row were skipped it says so in the log, as `distribute`, `replicate`, `unreplicate`,
    `set_replicas` and `to_portable` do.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gradwire.jax_backend import power_sgd, stats
        >>> new = stats(power_sgd(16, axis_name="data").init({"w": jnp.zeros((512, 512))}))
        >>> int(new.steps), float(new.wire_bytes), float(new.local_error_norm)
        (0, 65536.0, 0.0)

    In several processes any of them may call it alone: nothing is sent, and the error norm is that
    of its own replicas.

    Args:
        state: any tree that holds states of `average_gradients` or `local_sgd`: an optimizer's
            state, a Flax `TrainState`, `nnx.Optimizer.opt_state`. In local or global form; after
            `jax.pmap`: `unreplicate` first, or call it in the training step.

    Raises:
        ValueError: there is no such state in it; or it is in pmap form, or of an ensemble; or it is
            one of local SGD that has lost averages, see `distribute`.
    """
    found = _states(jax.tree.map(automatic, state))
    if not found:
        raise ValueError(
            "stats: there is no state of power_sgd, all_reduce_mean, average_gradients or local_sgd"
            " in what it was given. Give it the optimizer's state; of what nnx.split returned, in"
            " which types are gone, the optimizer itself: nnx.merge(graphdef, state)[1]"
        )
    survey(state).refuse_skipped_steps()
    surveyed = survey(found)
    surveyed.refuse_missed_averages()
    note_skipped_steps(found)
    next_step, dense, squares = (jnp.zeros((), jnp.float32) for _ in range(3))
    sent = jnp.zeros((3,), jnp.float32)
    skipped, refused = (jnp.zeros((), jnp.int32) for _ in range(2))
    steps: Any = None
    for each in found:
        of_local = isinstance(each, LocalSGDState)
        one: DataParallelState = each.averages if of_local else each
        if one.step.ndim > of_local:
            surveyed.refuse_ensemble()
            raise ValueError(
                f"stats: the count of steps has the shape {one.step.shape}: the state is in pmap"
                " form, or that of several members of an ensemble. Give it unreplicate(state), or"
                " call it in the training step; of members that of each, jax.tree.map(lambda x:"
                " x[0], state)"
            )
        # all of it has a row for each replica, and these are equal
        stacked = of_local and one.step.ndim > 0
        step, account = jax.tree.map(
            lambda x: on_devices(_of_this_process(x)), (one.step, one.account)
        )
        if stacked:
            step, account = jax.tree.map(lambda x: x.max(0), (step, account))
        steps = step if steps is None else steps
        first = np.minimum(one.record.stages, LAST).astype(np.int32)
        after = np.append(first[1:], np.int32(LAST))
        taken = jnp.clip(step, first, after) - first
        counted = taken[:, None].astype(jnp.float32)
        # which may be `UNSAID` before
        sent += jnp.where(counted > 0, counted * account.sent, 0).sum(0)
        coming = account.sent[(step >= first).sum() - 1, 0]
        next_step += jnp.where(coming < 0, jnp.nan, coming)
        dense += jnp.asarray(step, jnp.float32) * account.dense_bytes
        skipped = skipped if of_local else jnp.maximum(skipped, account.skipped)
        refused += account.skipped if of_local else 0
        memory = one.memory if of_local else one.local.per_replica
        for error in jax.tree.leaves(memory.get(ERROR) if isinstance(memory, Mapping) else None):
            squares += _mean_square(error, rows=stacked or not of_local)
    return Stats(
        steps=steps,
        skipped_steps=skipped,
        bytes_sent=sent[0],
        dense_bytes=dense,
        compression_ratio=_times_fewer(dense, sent[2]),
        wire_bytes=next_step,
        local_error_norm=jnp.sqrt(squares),
        within_bytes=sent[1],
        between_bytes=sent[2],
        skipped_averages=refused,
    )
