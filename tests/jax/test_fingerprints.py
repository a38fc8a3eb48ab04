"""Computations that are alike have one number, whatever calls, loops or branches they are in."""

import jax
import jax.numpy as jnp
import pytest

from gradwire.jax_backend.zero.fingerprints import fingerprints

VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32)
TABLE = jnp.arange(4.0)


def branch(g, other=0):
    return jax.lax.cond(g.sum() > 0, lambda x: x + 1, lambda x: x - 1 - other, g)


def loop(g, times=3):
    return jax.lax.fori_loop(0, times, lambda i, x: x * x + TABLE, g)


@jax.custom_jvp
def ruled(g):
    return jnp.sin(g)


ruled.defjvps(lambda tangent, out, g: tangent * jnp.cos(g))

ALIKE = [
    lambda g: -0.1 * g,
    lambda g: jax.jit(lambda x: jnp.tanh(x) / jnp.linalg.norm(x))(g),
    branch,
    loop,
    lambda g: ruled(g) * jnp.arange(4.0),
]


@pytest.mark.parametrize("compute", ALIKE)
def test_alike(compute):
    a, b, c = fingerprints(lambda gs: [compute(g) for g in gs], ([VECTOR] * 3,), ["g", "g", "h"])
    assert a == b != c


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda g: g * 2, lambda g: g * 3),
        (lambda g: g * TABLE, lambda g: g * (TABLE + 1)),
        (branch, lambda g: branch(g, 1)),
        (loop, lambda g: loop(g, 4)),
        (loop, lambda g: jax.lax.fori_loop(0, 3, lambda i, x: x * x + TABLE[::-1], g)),
        (lambda g: g.sum(), lambda g: g.max()),
        (lambda g: g.astype(jnp.bfloat16), lambda g: g.astype(jnp.float16)),
    ],
)
def test_unlike(one, other):
    a, b = fingerprints(lambda g, h: (one(g), other(h)), (VECTOR, VECTOR), ["g", "g"])
    assert a != b
