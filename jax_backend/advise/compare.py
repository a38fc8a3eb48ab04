"""Replicas of a user's own training on as many devices, or on one by `jax.vmap`: what
`gradwire.compare` runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.sharding import NamedSharding

from gradwire.core.advise.advice import name_of
from gradwire.core.advise.compare.batches import endless
from gradwire.core.advise.compare.runs import Run
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.plan.plan import plan
from gradwire.jax_backend.advise.model_shapes import specs_of_parameters
from gradwire.jax_backend.axes.outside_meshes import outside_meshes
from gradwire.jax_backend.engine.self_check import check_noted
from gradwire.jax_backend.local_sgd.forms import is_nnx, is_train_state, parts, with_parts
from gradwire.jax_backend.local_sgd.transform import LocalOptimizer, local_sgd
from gradwire.jax_backend.state.types import (
    PerReplica,
    Record,
    on_host,
    place_mark,
    warn_of_legacy_keys,
)
from gradwire.jax_backend.transforms import average_gradients

#: Of the replicas.
AXIS = "replicas"


@dataclass(frozen=True)
class Training:
    """A training in pieces, of which `gradwire.compare` runs R replicas: on R devices, if this
    process has so many, and else on one, by `jax.vmap`. Arrays of a state that is divided on a mesh
    come to each replica whole; on devices of their own replicas run with no mesh in context.

        def make(wrap, seed):
            params = model.init(jax.random.key(seed), jnp.zeros((1, 64)))["params"]
            tx = wrap(optax.adamw(1e-3))
            state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
            return Training(state, train_step, batches, evaluate)

    Args:
        state: a Flax `TrainState`, whose `tx` is what `wrap` returned; `(params, opt_state)`, and
            more if you like, of arrays; or of Flax nnx `(model, optimizer)`.
        step: (state, batch) → (state, loss) of one replica, as on one device: nothing in it
            averages. Of nnx (model, optimizer, batch) → loss.
        batches: (replica, replicas) → the batches of a replica, each its own; trees of arrays of
            one shape. What comes to an end is begun again.
        evaluate: state → the losses of held-out windows, two or more, the same windows each time;
            of nnx (model, optimizer) →. None: there will be no verdicts.
    """

    state: Any
    step: Callable[..., Any]
    batches: Callable[[int, int], Iterable[Any]]
    evaluate: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("step", "batches", "evaluate"):
            value = getattr(self, name)
            if not callable(value) and not (name == "evaluate" and value is None):
                raise TypeError(f"{name} is a {type(value).__name__}; give a function")
        if not (
            is_train_state(self.state) or (isinstance(self.state, tuple) and len(self.state) > 1)
        ):
            raise TypeError(
                f"state is a {type(self.state).__name__}; give a TrainState, (params, opt_state),"
                " or (model, optimizer) of nnx"
            )


def run(
    make: Callable[..., Any],
    algorithm: Any,
    replicas: int,
    steps: int,
    seed: int,
    looks: Collection[int],
    on_step: Callable[[], object],
    factor: float = 1.0,
) -> Run:
    """Train anew under a method; see `gradwire.torch_backend.advise.compare.run.run`. `make` is
    called with `wrap`, after NumPy's and Python's generators are seeded.

    Raises:
        TypeError: `make` returns something else; or as `Training`.
        ValueError: what the algorithm refuses, or the training, by name; groups that `jax.vmap`
            does not have; `wrap` was not called once.
    """
    np.random.seed(seed)
    random.seed(seed)
    made: list[Any] = []
    training = make(partial(_wrapped, algorithm, factor, made))
    if not isinstance(training, Training):
        raise TypeError(
            f"make(wrap) returns a {type(training).__name__}; return a"
            " gradwire.jax_backend.Training"
        )
    if len(made) != 1:
        raise ValueError(
            f"make() called wrap {len(made)} times: call it once, on the optimizer that trains the"
            " parameters"
        )
    check_noted(jax.local_devices()[0])
    # Replicas lie whole on a device each, which is no mesh of the user's: `jax.pmap` runs in no
    # other.
    train = outside_meshes(_train) if _devices(replicas) else _train
    return train(training, algorithm, made[0], replicas, steps, seed, looks, on_step, factor)


def _train(
    training: Training,
    algorithm: Any,
    optimizer: Any,
    replicas: int,
    steps: int,
    seed: int,
    looks: Collection[int],
    on_step: Callable[[], object],
    factor: float,
) -> Run:
    """What `run` returns, of a training that was made."""
    form = _Form(training.state)
    tx = optimizer if isinstance(algorithm, LocalSGD) else None
    step = _mapped(partial(_step, training, form, tx), replicas)
    params, _ = parts(training.state)
    specs = specs_of_parameters(params)
    sent = plan(specs, algorithm, world_size=replicas).wire_bytes
    state = jax.tree.map(
        partial(_rows, form, replicas), form.tree(training.state), is_leaf=_is_marked
    )
    data = [endless(partial(training.batches, rank, replicas)) for rank in range(replicas)]
    losses, held_out = [], {}
    for n in range(1, steps + 1):
        batches = [next(own) for own in data]
        if n == 1 and replicas > 1 and _same(batches[0], batches[1]):
            raise ValueError(
                f"batches(0, {replicas}) and batches(1, {replicas}) begin with the same batch; give"
                " each replica its own shard"
            )
        try:
            state, loss = step(state, jax.tree.map(partial(_stacked, n), *batches))
        except NotImplementedError as error:
            raise ValueError(f"{name_of(algorithm)}: {error}") from error
        losses.append(float(np.mean(loss)))
        if n in looks and training.evaluate is not None:
            held_out[n] = _held_out(training, form, tx, n, _in_common(form, tx, state))
        on_step()
    return Run(name_of(algorithm), seed, losses, held_out, [], sent, factor, specs)


def _stacked(n: int, *own: Any) -> Any:
    """An array of the n-th batch, with a row for each replica. Raises ValueError for unequal
    ones."""
    found = {(np.shape(x), str(getattr(x, "dtype", ""))) for x in own}
    if len({shape for shape, _ in found}) > 1:
        raise ValueError(
            f"batches: arrays of batch {n} have shapes {', '.join(str(np.shape(x)) for x in own)}"
            " on the replicas; give all batches of a training one shape"
        )
    return jnp.stack([_on_no_mesh(x) for x in own]) if _is_key(own[0]) else np.stack(own)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _mapped(step: Callable[..., Any], replicas: int) -> Callable[..., Any]:
    """A step of all replicas, rows of its arguments, each on a device of its own where there are so
    many."""
    if devices := _devices(replicas):
        mapped: Callable[..., Any] = jax.pmap(step, AXIS, devices=devices, donate_argnums=0)
        return mapped
    return jax.jit(jax.vmap(step, axis_name=AXIS), donate_argnums=0)


def _devices(replicas: int) -> list[Any]:
    """One for each replica; none if there are fewer."""
    found = jax.local_devices()
    return found[:replicas] if len(found) >= replicas else []


def _wrapped(algorithm: Any, factor: float, made: list[Any], tx: Any) -> Any:
    """The optimizer with the method round it, or before it. Its updates are its learning rate times
    something, so they take the factor."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"wrap was given a {type(tx).__name__}; give the optax optimizer, the whole chain"
        )
    if factor != 1:
        tx = optax.chain(tx, optax.scale(factor))
    if isinstance(algorithm, LocalSGD):
        made.append(local_sgd(tx, algorithm, axis_name=AXIS))
    else:
        made.append(optax.chain(average_gradients(algorithm, axis_name=AXIS), tx))
    return made[-1]


class _Form:
    """A user's training state as a tree of arrays, which it is, or is made of objects of nnx."""

    def __init__(self, state: Any) -> None:
        self.objects = is_nnx(state)
        if self.objects:
            from flax import nnx

            self._graph: Any = nnx.split(state)[0]

    def tree(self, state: Any) -> Any:
        """The parameters as a tree of arrays."""
        if not self.objects:
            return state
        from flax import nnx

        return nnx.state(state)

    def state(self, tree: Any) -> Any:
        """The state as the user has it."""
        if not self.objects:
            return tree
        from flax import nnx

        return nnx.merge(self._graph, tree)


def _step(
    training: Training, form: _Form, tx: LocalOptimizer | None, tree: Any, batch: Any
) -> tuple[Any, Any]:
    """The user's step on one replica, inside the map, and what local SGD does after it."""
    state = form.state(tree)
    if form.objects:
        loss = training.step(*state, batch)
    else:
        state, loss = training.step(state, batch)
    if tx is not None:
        state = with_parts(state, *tx.average_params(*parts(state)))
    return form.tree(state), loss


def _in_common(form: _Form, tx: LocalOptimizer | None, rows: Any) -> Any:
    """The tree of the first replica; where local SGD has no outer parameters, with the mean of all
    replicas' parameters: in fragments they are averaged in different steps."""
    first = jax.tree.map(lambda x: x[0], rows)
    if tx is None or tx._halves.local.has_outer:
        return first
    own, opt_state = parts(form.state(first))
    every, _ = parts(form.state(rows))
    mean = jax.tree.map(lambda x, p: jnp.mean(x, 0).astype(p.dtype), every, own)
    return form.tree(with_parts(form.state(first), mean, opt_state))


def _held_out(
    training: Training, form: _Form, tx: LocalOptimizer | None, steps: int, tree: Any
) -> list[float]:
    """The losses of the held-out windows, under the outer parameters if there are any. Raises
    ValueError for fewer than two."""
    assert training.evaluate is not None
    state = form.state(tree)
    if tx is not None and tx._halves.local.has_outer and steps > tx._halves.local.start_step:
        params, opt_state = parts(state)
        outer = jax.tree.map(
            lambda x, p: jnp.asarray(x, p.dtype), tx.outer_params(opt_state), params
        )
        state = with_parts(state, outer, opt_state)
    found = np.asarray(
        training.evaluate(*state) if form.objects else training.evaluate(state), np.float64
    )
    if found.ndim != 1 or found.size < 2:
        raise ValueError(
            f"evaluate returns an array of shape {found.shape}; return the losses of several"
            " held-out windows, of which an interval can be made"
        )
    return [float(x) for x in found]


def _is_marked(x: Any) -> bool:
    return isinstance(x, PerReplica | Record)


def _rows(form: _Form, replicas: int, leaf: Any) -> Any:
    """A row for each replica, random keys of its own in it. The marks of the place have come there.
    A tree of nnx has lost their paths; there no other array is one int8."""

    def one(x: Any) -> Any:
        return place_mark(placed=True) if x.shape == (1,) and x.dtype == jnp.int8 else x

    if _is_marked(leaf):
        leaf = jax.tree.map(one, leaf)
    elif form.objects:
        leaf = one(jnp.asarray(leaf))

    def rows(x: Any) -> Any:
        x = _on_no_mesh(x)
        if not _is_key(x):
            warn_of_legacy_keys("an array of the state", x)
            return jnp.repeat(x[None], replicas, axis=0)
        # Noise that all replicas shared would not be averaged away.
        own = [
            jax.vmap(partial(jax.random.fold_in, data=i))(x.reshape(-1)).reshape(x.shape)
            for i in range(replicas)
        ]
        return jnp.stack(own)

    return jax.tree.map(rows, leaf)


def _on_no_mesh(x: Any) -> Any:
    """A whole array, of one that may be divided on a mesh."""
    if not isinstance(getattr(x, "sharding", None), NamedSharding):
        return jnp.asarray(x)
    if _is_key(x):
        return jax.random.wrap_key_data(
            jnp.asarray(on_host(jax.random.key_data(x))), impl=jax.random.key_impl(x)
        )
    return jnp.asarray(on_host(x))


def _same(x: Any, y: Any) -> bool:
    pairs = zip(*(jax.tree.leaves(jax.tree.map(_data, tree)) for tree in (x, y)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x
