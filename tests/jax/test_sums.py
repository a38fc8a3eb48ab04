"""A gradient and its error, not added up, beside their sum."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradwire.jax_backend.ops.kernels import JaxOps
from gradwire.jax_backend.ops.lazy_sum import Sum

OPS = JaxOps()
SHAPE = (3, 6, 4, 5)


def pair(dtype="float32"):
    rng = np.random.default_rng(0)
    gradient, error = (jnp.asarray(rng.normal(size=SHAPE), dtype) for _ in range(2))
    return gradient, error


def close(x, y, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("view", [(18, 20), (3, 6, 20), (72, 5)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_what_they_leave(view, transposed, dtype):
    @jax.jit
    def made(gradient, error):
        lazy, matrix = Sum(gradient, error).reshape(view), (gradient + error).reshape(view)
        if transposed:
            lazy, matrix = lazy.mT, matrix.mT
        assert lazy.shape == matrix.shape
        thin = jnp.ones((*matrix.shape[:-2], 2, matrix.shape[-2]), dtype)
        product = lazy.multiplied_by(thin)
        assert product.dtype == matrix.dtype
        return (product, thin @ matrix), (lazy.minus(0.5 * matrix).value(), 0.5 * matrix)

    for found, right in made(*pair(dtype)):
        close(found, right, 1e-5 if dtype == "float32" else 5e-2)


def test_the_sum_in_the_place_of_the_error():
    gradient, error = pair()
    left = Sum(gradient, error).reshape((18, 20)).minus(jnp.ones((18, 20)))
    close(left.added(jnp.asarray(True), math.inf), gradient + error - 1)
    # Not a bit of it changes in a step that does not count.
    poisoned = Sum(gradient * jnp.nan, -jnp.zeros(SHAPE)).added(jnp.asarray(False), 0.5)
    assert np.array_equal(np.asarray(poisoned).view(np.int32), np.asarray(-jnp.zeros(SHAPE)).view(np.int32))
    # But what overflows by itself.
    close(Sum(gradient, error).added(jnp.asarray(False), 0.5), jnp.clip(error, -0.5, 0.5))


def test_flattened_it_is_an_array():
    """As a tensor that is padded needs it."""
    gradient, error = pair()
    lazy, whole = Sum(gradient, error), gradient + error
    assert (lazy.ndim, lazy.dtype) == (whole.ndim, whole.dtype)
    close(lazy.reshape((-1,)), whole.reshape(-1))
    close(lazy.mT.reshape((-1,)), whole.mT.reshape(-1))


def test_only_what_promises_to_multiply_is_given_one():
    large = jnp.ones((512, 256))
    assert isinstance(OPS.add_each([large], [large], multiplied=True)[0], Sum)
    assert isinstance(OPS.add_each([large], [large])[0], jax.Array)
    assert isinstance(OPS.add_each([large[:2]], [large[:2]], multiplied=True)[0], jax.Array)
