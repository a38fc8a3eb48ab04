"""All that the host does with states on a mesh, by one generator: for `test_meshes.py`; run as a
script it takes meshes of one to eight devices."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

import gradwire.jax_backend as gw
from tests.jax.replicas import power

AXES = ("dcn", "ici")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
PARAMS = {"w": jnp.arange(24 * 16.0).reshape(24, 16) / 384, "b": jnp.ones(16)}
SHARDED = {"w": jax.P(None, "ici"), "b": jax.P("ici")}
ADAM = optax.adam(1e-2)


def helpers(mesh, params, context):
    """(name, result) of all helpers of the host, with these parameters and a mesh of replicas along
    "dcn". In `context` is what users call themselves."""
    tx, local = (
        optax.chain(gw.average_gradients(power(), axis_name="dcn"), ADAM),
        gw.diloco(ADAM, 4, axis_name="dcn"),
    )
    replicas = mesh.shape["dcn"]
    devices = jax.devices()[:replicas]

    def made(tx, mark=lambda state: state):
        """The state of a transformation: placed, sent to `pmap` and back, and made in `jax.jit`
        where it lies."""
        state = mark((params, tx.init(params)))
        yield state
        placed = gw.distribute(state, mesh, "dcn")
        yield gw.distribute(placed, mesh, "dcn")
        on_devices = gw.replicate(placed, devices, axis_name="dcn")
        yield on_devices
        yield gw.unreplicate(on_devices)
        yield gw.distribute(gw.unreplicate(on_devices), mesh, "dcn")
        if tx is not local:
            with context():
                shapes = jax.eval_shape(lambda p: mark((p, tx.init(p))), params)
                shardings = gw.abstract_state(shapes, replicas, mesh, "dcn", params=params)
                make = jax.jit(
                    lambda p: gw.distribute(mark((p, tx.init(p))), mesh, "dcn"),
                    out_shardings=jax.tree.map(lambda x: x.sharding, shardings),
                )
                yield make(params)
                yield jax.jit(lambda p: gw.distribute(mark((p, tx.init(p))), mesh, "dcn"))(params)
        return placed

    placed = yield from made(tx)
    key = gw.distribute({"key": jax.random.key(3)}, mesh, "dcn")
    yield jax.tree.map(jax.random.key_data, gw.unreplicate(gw.replicate(key, devices)))
    for number in (1, replicas, 8):
        yield gw.set_replicas(placed, number)
    yield gw.stats(placed)
    state = placed[1][0]
    for errors in ("mean", "all"):
        saved = gw.to_portable(state, power(), errors=errors)
        yield saved["tensors"], saved["local"]
        yield gw.from_portable(saved, power(), state, replicas=replicas)
    placed = yield from made(local, gw.stack_replicas)
    yield local.outer_params(placed)
    yield gw.stats(placed)
    for number in (1, replicas, 8):
        yield gw.set_replicas(placed, number)
    next(local.turns(placed))
    for options in ({"elementwise": True}, {"shard": "parameter"}):
        zero = gw.zero1(ADAM, axis_name="dcn", replicas=replicas, **options)
        placed = yield from made(zero)
        with context():
            plain, sharded = (
                jax.eval_shape(lambda p, tx=tx: (p, tx.init(p)), params) for tx in (ADAM, zero)
            )
        whole = gw.reshard(placed, plain)
        yield whole
        yield gw.reshard(whole, sharded)


def on_host(mesh, params, context=contextlib.nullcontext):
    return [jax.device_get(found) for found in helpers(mesh, params, context)]


def on_a_mesh(shape, kinds, inside, *, placed):
    """The results on a mesh of these types of axes; with it in context, or "another" whose axes the
    compiler manages; of parameters that lie there, sharded if there are two axes."""
    size = int(np.prod(shape))
    mesh = jax.make_mesh(shape, AXES[: len(shape)], axis_types=kinds, devices=jax.devices()[:size])
    params = PARAMS
    if placed:
        specs = SHARDED if len(shape) > 1 else dict.fromkeys(SHARDED, jax.P())
        params = jax.device_put(
            PARAMS, {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        )
    another = Mesh(mesh.devices, mesh.axis_names)
    its = contextlib.nullcontext if inside is None else lambda: jax.set_mesh(mesh)
    with (
        contextlib.nullcontext()
        if inside is None
        else jax.set_mesh(mesh if inside == "it" else another)
    ):
        return on_host(mesh, params, its)


def as_on_no_mesh(shape):
    """On a mesh of axes that the compiler manages, of parameters that lie on no mesh."""
    return on_a_mesh(shape, (AUTO,) * len(shape), None, placed=False)


def require_the_same(found, expected):
    for result, right in zip(found, expected, strict=True):
        assert jax.tree.structure(result) == jax.tree.structure(right)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4, strict=True),
            result,
            right,
        )


def main():
    """Each type of axes and each mesh in context is tried on four devices by `test_meshes.py`."""
    for shape, types, inside in (
        ((1,), (EXPLICIT,), "it"),
        ((2,), (EXPLICIT,), None),
        ((8,), (EXPLICIT,), "it"),
        ((1, 1), (EXPLICIT, EXPLICIT), None),
        ((4, 2), (EXPLICIT, AUTO), "it"),
    ):
        require_the_same(on_a_mesh(shape, types, inside, placed=True), as_on_no_mesh(shape))


if __name__ == "__main__":
    main()
