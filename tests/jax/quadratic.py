"""A tiny problem that any optimizer makes progress on, trained on W replicas under `vmap` or
`shard_map`, in one compiled scan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradwire.jax_backend import distribute, mark_varying, partition_specs
from tests.bounds import noting
from tests.jax.replicas import AXIS, mesh_of

#: Sizes that no number of replicas divides, a scalar, and nothing at all.
SHAPES = {"kernel": (5, 7), "bias": (7,), "scale": (), "nothing": (0, 4)}


def start(shapes=SHAPES):
    return {
        name: jnp.asarray(
            np.random.default_rng(list(name.encode())).standard_normal(shape), jnp.float32
        )
        for name, shape in shapes.items()
    }


def loss(params, step, replica):
    """Distances from points that move, of another curvature and another place on each replica."""
    return sum(
        0.5
        * (1 + 0.3 * replica)
        * ((p - jnp.sin(0.2 * step + jnp.arange(p.size).reshape(p.shape)) - replica) ** 2).sum()
        for p in jax.tree.leaves(params)
    )


def under_vmap(body, state, replicas, axis=None):
    """`body(x, state) → (y, state)` on replicas, with their state in global form. That `y` is equal
    on all of them is proved. `axis`: of `x`, that of the replicas."""
    axes = jax.tree.map(lambda spec: 0 if spec == P(AXIS) else None, partition_specs(state, AXIS))
    mapped = jax.vmap(body, (axis, axes), (None, axes), axis_name=AXIS, axis_size=replicas)

    @jax.jit  # as a whole: outside, each of these would compile programs of its own
    def whole(x, state):
        rows = jax.tree.map(lambda x, axis: rows_of(x, replicas) if axis == 0 else x, state, axes)
        y, rows = mapped(x, rows)
        return y, jax.tree.map(lambda x, axis: x[:, 0] if axis == 0 else x, rows, axes)

    return whole


def train(tx, replicas, mode="vmap", steps=50, params=None, state=None):
    """Parameters and state, in global form, after that many steps.

    Under "vmap" that what is equal on all replicas is so is proved by `out_axes`, under
    "shard_map_vma" by the types.
    """
    params = start() if params is None else params
    state = tx.init(params) if state is None else state
    specs = partition_specs(state, AXIS)

    def run(params, state):
        def one(carry, step):
            params, state = carry
            gradients = jax.grad(loss)(mark_varying(params, AXIS), step, lax.axis_index(AXIS))
            updates, state = tx.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(one, (params, state), jnp.arange(steps))[0]

    if mode == "vmap":
        return under_vmap(run, state, replicas)(params, state)
    mesh = mesh_of(replicas)
    shards = {
        "in_specs": (P(), specs),
        "out_specs": (P(), specs),
        "check_vma": mode in ("shard_map_vma", "slices"),
    }
    # a replica is two devices, between which the compiler divides the parameters
    if mode == "slices":
        mesh = jax.make_mesh(
            (replicas, 2),
            (AXIS, "ici"),
            axis_types=(AxisType.Auto,) * 2,
            devices=jax.devices()[: 2 * replicas],
        )
        shards["axis_names"] = {AXIS}
        halves = {
            n: P("ici") if x.ndim > 1 and x.shape[0] % 2 == 0 else P() for n, x in params.items()
        }
        params = {n: jax.device_put(x, NamedSharding(mesh, halves[n])) for n, x in params.items()}
    mapped = jax.shard_map(run, mesh=mesh, **shards)
    return jax.jit(mapped)(params, distribute(state, mesh, AXIS))


def rows_of(x, replicas):
    """What vmap gives to each replica: its row, or the only one, with an axis of length 1."""
    # the mark of the place, before there is one
    x = x if len(x) else jnp.zeros((1, *x.shape[1:]), x.dtype)
    return jnp.broadcast_to(x, (replicas, *x.shape[1:]))[:, None]


def step_of(tx, gradients, params, state, replicas=2, **extra):
    """One update under vmap. `gradients` with a leading axis."""

    def body(gradients, state):
        return tx.update(gradients, state, params, **extra)

    return under_vmap(body, state, replicas, 0)(gradients, state)


def train_plain(tx, replicas, steps=50, params=None, state=None):
    """The same with an optimizer that is given the average of all gradients: nothing sharded, no
    collective."""
    params = start() if params is None else params

    @jax.jit
    def run(params, state):
        def one(carry, step):
            params, state = carry
            each = jax.vmap(lambda r: jax.grad(loss)(params, step, r))(jnp.arange(replicas))
            updates, state = tx.update(jax.tree.map(lambda g: g.mean(0), each), state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(one, (params, state), jnp.arange(steps))[0]

    return run(params, tx.init(params) if state is None else state)


def filled(plain):
    """A plain state with another number in every element."""
    numbers = iter(range(1, 10**6))
    return jax.tree.map(
        lambda x: np.array([next(numbers) for _ in range(x.size)], x.dtype).reshape(x.shape), plain
    )


def assert_close(mine, theirs, tolerance=1e-5):
    """Trees of one structure, each array within `tolerance` of the other's norm."""
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for (path, x), y in zip(
        jax.tree_util.tree_flatten_with_path(mine)[0], jax.tree.leaves(theirs), strict=True
    ):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert x.shape == y.shape, jax.tree_util.keystr(path)
        apart = noting(float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0)))
        assert apart <= tolerance, jax.tree_util.keystr(path)
