"""One source of random bits in three frameworks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.kernels import random
from gradwire.core.simulate import NumpyOps

OPS = NumpyOps()
WORD = 2**32


def lowbias32(x):
    """As its author prints it, on unsigned words."""
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ (x >> 16)


@given(st.integers(0, 2**63), st.text(max_size=20), st.integers(0, 2**31 - 1), st.integers(0, 50))
def test_numbers_are_the_hash_of_key_step_and_element(seed, name, step, size):
    key = random.key(seed, name)
    assert -(2**31) <= key < 2**31
    numbers = random.uniform(OPS, key, (size,), step)
    assert numbers.dtype == np.float32
    salt = lowbias32(lowbias32(step ^ key % WORD))
    for i, number in enumerate(numbers):
        bits = lowbias32(lowbias32(i ^ key % WORD) ^ salt) >> 8
        assert float(number) == (2 * bits + 1) / 2**24 - 1


# Every new shape is compiled.
@pytest.mark.parametrize(("seed", "shape", "step"), [(0, (), 0), (3, (4, 0), 7), (99, (3, 4, 5), 2**31 - 1)])
def test_the_bits_are_equal_in_numpy_torch_and_jax(seed, shape, step):
    import jax
    import torch

    from gradwire.jax_backend.ops.kernels import JaxOps
    from gradwire.torch_backend.ops.kernels import TorchOps

    key = random.key(seed, "layers.0.weight/q")
    expected = random.uniform(OPS, key, shape, step)
    assert expected.shape == shape
    in_torch = random.uniform(TorchOps(torch.device("cpu")), key, shape, step)
    in_jax = random.uniform(JaxOps(), key, shape, step)
    traced = jax.jit(lambda s: random.uniform(JaxOps(), key, shape, s))(np.int32(step))
    for numbers in (in_torch.numpy(), np.asarray(in_jax), np.asarray(traced)):
        assert numbers.dtype == np.float32
        np.testing.assert_array_equal(numbers.view(np.int32), expected.view(np.int32))


def test_numbers_do_not_depend_on_the_shape():
    key = random.key(3, "w")
    flat = random.uniform(OPS, key, (24,), 5)
    np.testing.assert_array_equal(random.uniform(OPS, key, (2, 3, 4), 5).reshape(-1), flat)
    assert random.uniform(OPS, key, (), 5) == flat[0]


def test_keys_depend_on_seed_and_name():
    keys = {random.key(seed, name) for seed in range(20) for name in ("", "a", "b", "a/q", "0/a")}
    assert len(keys) == 100
    assert random.key(1, "w") == random.key(1, "w")
