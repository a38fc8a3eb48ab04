"""What only a TPU computes, computed here."""

import jax.numpy as jnp
import numpy as np
import pytest

from gradwire.core.kernels.numpy import NumpyOps
from gradwire.jax_backend.ops.tiles import product_of_tiles


@pytest.mark.parametrize(
    ("replicas", "rows", "width", "across"), [(1, 64, 64, 4), (4, 64, 64, 2), (3, 8, 32, 8)]
)
def test_a_product_puts_elements_in_their_places(replicas, rows, width, across):
    rng = np.random.default_rng(0)
    n, count, k = rows * width, 3 * across, 5
    index = np.stack(
        [[rng.permutation(n)[:k] for _ in range(count)] for _ in range(replicas)]
    ).astype("int32")
    values = rng.normal(size=index.shape).astype("float32")
    tiles = rows, across
    expected = NumpyOps().scatter_sum(n, lambda *own: own, index, values, tiles=tiles)
    found = product_of_tiles(jnp.asarray(index), jnp.asarray(values), n, *tiles)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=0 if replicas == 1 else 1e-5)
    assert product_of_tiles(jnp.asarray(index), jnp.asarray(values), n, rows, across + 1) is None
