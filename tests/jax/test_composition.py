"""The table of docs/jax.md: every cell trains, and comes to the parameters of one device that has
all the data.

PowerSGD at full rank is exact to rounding, so what is compared with is plain Optax on the whole
batch.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import equinox
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding

import gradwire.jax_backend as gw
from tests.jax.replicas import AXIS

pytestmark = pytest.mark.slow

STEPS, REPLICAS, EXAMPLES = 4, 4, 4
#: Of a kernel, which is 8 high. Orthonormalizing is compiled column by column.
WIDTH = 2
#: As many rows of a kernel as columns are kept: nothing is lost.
FULL = {"rank": WIDTH, "min_compression_rate": 1e-3}


@dataclass(frozen=True)
class Model:
    """`forward(params, x)`, of any tree of parameters."""

    params: Any
    forward: Any


def plain():
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.standard_normal((8, WIDTH)), jnp.float32),
        "b": (jnp.zeros(WIDTH),),
    }
    return Model(params, lambda p, x: jnp.tanh(x @ p["w"] + p["b"][0]))


def of_linen():
    module = linen.Dense(WIDTH)
    params = module.init(jax.random.key(0), jnp.zeros((1, 8)))["params"]
    return Model(params, lambda p, x: jnp.tanh(module.apply({"params": p}, x)))


def of_nnx():
    graph, params = nnx.split(nnx.Linear(8, WIDTH, rngs=nnx.Rngs(0)))
    return Model(params, lambda p, x: jnp.tanh(nnx.merge(graph, p)(x)))


def of_equinox():
    # What is no array, activation functions and sizes, stays out of what is differentiated and
    # averaged.
    params, static = equinox.partition(
        equinox.nn.Linear(8, WIDTH, key=jax.random.key(0)), equinox.is_inexact_array
    )
    return Model(params, lambda p, x: jnp.tanh(jax.vmap(equinox.combine(p, static))(x)))


def of_haiku():
    module = haiku.without_apply_rng(haiku.transform(lambda x: haiku.Linear(WIDTH)(x)))
    params = module.init(jax.random.key(0), jnp.zeros((1, 8)))
    return Model(params, lambda p, x: jnp.tanh(module.apply(p, x)))


def of_parts():
    """One matrix that reads and writes; experts, to which each replica sends its examples, so that
    others have no gradient there; a frozen matrix with two thin ones beside it, which travel as
    they are beside the factors of others; and a vector, which is averaged by itself."""
    rng = np.random.default_rng(0)
    shapes = {
        "fixed": (8, WIDTH),
        "embedding": (12, 8),
        "experts": (4, 8, 8),
        "a": (8, 2),
        "b": (2, WIDTH),
    }
    params = {
        n: jnp.asarray(rng.standard_normal(s) / s[-1] ** 0.5, jnp.float32)
        for n, s in shapes.items()
    }
    fixed, params["bias"] = params.pop("fixed"), jnp.zeros(WIDTH)

    def forward(p, x):
        read = jnp.tanh(x @ p["embedding"].T) @ p["embedding"]
        hidden = jnp.einsum(
            "ed,ndh,en->eh", read, p["experts"], jax.nn.one_hot(x[:, -1].astype(jnp.int32), 4)
        )
        return jnp.tanh(hidden) @ (fixed + p["a"] @ p["b"]) + p["bias"]

    return Model(params, forward)


MODELS = {
    "plain": plain,
    "linen": of_linen,
    "nnx": of_nnx,
    "equinox": of_equinox,
    "haiku": of_haiku,
    "parts": of_parts,
}
#: Rank by parameter, of "parts".
RANKS = {"rank": {"a": 0, "b": 0, "*": 8}, "stacked": {"experts": 1}}


def is_kernel(params):
    return jax.tree.map(lambda x: x.ndim == 2, params)


def is_bias(params):
    return jax.tree.map(lambda x: x.ndim != 2, params)


#: Transformations with `average` where gradients are averaged; None: there is only one replica.
FEATURES = {
    "chain": lambda average: optax.chain(
        average(), optax.clip_by_global_norm(0.5), optax.adam(0.05)
    ),
    "masked": lambda average: optax.chain(
        optax.masked(average(), is_kernel),
        optax.masked(average(dense=True), is_bias),
        optax.adam(0.05),
    ),
    "MultiSteps": lambda average: optax.chain(
        average(), optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation()
    ),
    "inject_hyperparams": lambda average: optax.chain(
        average(), optax.inject_hyperparams(optax.adam)(learning_rate=lambda step: 0.1 / (1 + step))
    ),
    "scan over steps": lambda average: optax.chain(average(), optax.sgd(0.3, momentum=0.9)),
    "accumulation": lambda average: optax.chain(average(), optax.sgd(0.3, momentum=0.9)),
    "parts": lambda average: optax.multi_transform(
        {
            "matrix": optax.chain(average(**RANKS), optax.sgd(0.3, momentum=0.9)),
            "vector": optax.chain(average(dense=True), optax.sgd(0.3)),
        },
        lambda params: {name: "vector" if name == "bias" else "matrix" for name in params},
    ),
    "sharded optimizer": lambda average: optax.chain(
        average(), average.sharded(optax.adamw(0.05, weight_decay=0.3))
    ),
}
MAPS = (
    "pmap",
    "shard_map",
    "shard_map, check_vma",
    "two axes",
    "sharded parameters",
    "Explicit mesh",
    "vmap",
)


def data():
    """Of every step: the examples of each replica."""
    x = np.random.default_rng(1).standard_normal((STEPS, REPLICAS, EXAMPLES, 8)).astype(np.float32)
    x[..., -1] = np.arange(REPLICAS)[:, None]  # whose it is
    return x, np.sin(x[..., :WIDTH]).astype(np.float32)


def stepper(model, tx, feature, own, inner=None):
    """One training step of a replica, on its examples."""

    def gradient(params, x, y):
        def loss(p, x, y):
            return jnp.square(model.forward(p, x) - y).mean()

        mine = own(params)
        if feature != "accumulation":
            return jax.grad(loss)(mine, x, y)
        halves = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), (x, y))
        start = jax.tree.map(lambda p: jnp.zeros_like(p) + 0 * p, mine)
        summed, _ = lax.scan(
            lambda g, xy: (jax.tree.map(jnp.add, g, jax.grad(loss)(mine, *xy)), None), start, halves
        )
        return jax.tree.map(lambda g: g / 2, summed)

    def step(state, x, y):
        params, opt_state = state
        g = gradient(params, x, y)
        updates, opt_state = tx.update(
            g if inner is None else lax.pmean(g, inner), opt_state, params
        )
        return optax.apply_updates(params, updates), opt_state

    def several(state, xs, ys):
        return lax.scan(lambda s, xy: (step(s, *xy), None), state, (xs, ys))[0]

    return several if feature == "scan over steps" else step


def calls(feature):
    """What each call is given, replicas first."""
    x, y = data()
    if feature == "scan over steps":
        return [(x.swapaxes(0, 1), y.swapaxes(0, 1))]
    return list(zip(x, y, strict=True))


def on_one_device(model, feature):
    def average(**_):
        return optax.identity()

    average.sharded = lambda tx: tx
    tx = FEATURES[feature](average)
    step = jax.jit(stepper(model, tx, feature, lambda p: p))
    state = model.params, tx.init(model.params)
    for x, y in calls(feature):
        # All examples of a step in one batch; halves for accumulation are of any examples.
        axis = 1 if feature == "scan over steps" else 0
        flat = [
            a.reshape(-1, *a.shape[2:])
            if axis == 0
            else a.swapaxes(0, 1).reshape(a.shape[1], -1, *a.shape[3:])
            for a in (x, y)
        ]
        state = step(state, *flat)
    return state[0]


def replicated(model, feature, how):
    axis, mesh = AXIS, None
    kind = AxisType.Explicit if how == "Explicit mesh" else AxisType.Auto
    if how in ("two axes", "sharded parameters"):
        axis, mesh = "dcn", jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(kind, kind))
    elif how not in ("pmap", "vmap"):
        mesh = jax.make_mesh((REPLICAS,), (AXIS,), axis_types=(kind,))

    def average(dense=False, **options):
        return (
            gw.all_reduce_mean(axis_name=axis)
            if dense
            else gw.power_sgd(axis_name=axis, **FULL | options)
        )

    average.sharded = lambda tx: gw.zero1(
        tx, axis_name=axis, replicas=2 if axis == "dcn" else REPLICAS, averaged=True
    )

    tx = FEATURES[feature](average)
    inner = "ici" if how == "two axes" else None
    everywhere = axis if inner is None else (axis, inner)
    step = stepper(model, tx, feature, lambda p: gw.mark_varying(p, everywhere), inner)
    params, sharded = model.params, how == "sharded parameters"
    if sharded:  # all of them, by their last axis
        last = jax.tree.map(
            lambda x: NamedSharding(mesh, jax.P(*[None] * (x.ndim - 1), "ici")), params
        )
        params = jax.device_put(params, last)
    state = (params, tx.init(params))
    if mesh is None:
        state = gw.replicate(state, axis_name=AXIS)
        mapped = jax.pmap(step, AXIS) if how == "pmap" else jax.jit(jax.vmap(step, axis_name=AXIS))
        for x, y in calls(feature):
            state = mapped(state, x, y)
        return gw.unreplicate(state)[0]
    state, specs = gw.distribute(state, mesh, axis), gw.partition_specs(state, axis)
    rows = jax.P(everywhere)

    def examples(x):
        """Of this replica. One that is divided has those of two."""
        return x.swapaxes(0, -3).reshape(*x.shape[1:-2], -1, x.shape[-1]) if sharded else x[0]

    mapped = jax.jit(
        jax.shard_map(
            lambda s, x, y: step(s, examples(x), examples(y)),
            mesh=mesh,
            in_specs=(specs, rows, rows),
            out_specs=specs,
            check_vma=how in ("shard_map, check_vma", "two axes", "sharded parameters"),
            axis_names={axis} if sharded else set(mesh.axis_names),
        )
    )
    for given in calls(feature):
        state = mapped(state, *jax.device_put(given, NamedSharding(mesh, rows)))
    if sharded:
        assert all("ici" in x.sharding.spec for x in jax.tree.leaves(state[0]))
    return state[0]


@functools.cache
def expected_of(model, feature):
    return on_one_device(MODELS[model](), feature)


def cells():
    """Each cell with one library: `optax.chain` with each in turn, other features with one on all
    maps, its own tree at the root of the parameters. Compiling is what takes the time."""
    names = [*MODELS][:-1]
    features = [*FEATURES][:-2]
    yield from (
        pytest.param("parts", "parts", how, marks=pytest.mark.slow)
        for how in ("shard_map", MAPS[4])
    )
    yield "linen", "sharded optimizer", "shard_map, check_vma"
    yield pytest.param("equinox", "sharded optimizer", "pmap", marks=pytest.mark.slow)
    for (i, feature), (j, how) in itertools.product(enumerate(features), enumerate(MAPS)):
        quick = feature == "chain" or how == "shard_map"
        yield pytest.param(
            names[(j if feature == "chain" else i) % len(names)],
            feature,
            how,
            marks=() if quick else pytest.mark.slow,
        )


@pytest.mark.parametrize(("model", "feature", "how"), [*cells()])
def test_a_cell_of_the_table(model, feature, how):
    begun = MODELS[model]()
    after, expected = replicated(begun, feature, how), expected_of(model, feature)
    moved = [
        float(jnp.abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (expected, begun.params)), strict=True)
    ]
    assert min(moved) > 1e-2
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        assert np.allclose(a, b, rtol=1e-3, atol=1e-3)
