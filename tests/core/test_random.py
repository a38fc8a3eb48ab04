"""One source of random bits in three frameworks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
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


@settings(max_examples=8)  # every new shape is compiled
@given(st.integers(0, 99), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2**31 - 1))
def test_the_bits_are_equal_in_numpy_torch_and_jax(seed, shape, step):
    import jax
    import torch

    from gradwire.jax_backend.ops.kernels import JaxOps
    from gradwire.torch_backend.ops.kernels import TorchOps

    key, shape = random.key(seed, "layers.0.weight/q"), tuple(shape)
    expected = random.uniform(OPS, key, shape, step)
    assert expected.shape == shape
    in_torch = random.uniform(TorchOps(torch.device("cpu")), key, shape, step)
    in_jax = random.uniform(JaxOps(), key, shape, step)
    traced = jax.jit(lambda s: random.uniform(JaxOps(), key, shape, s))(np.int32(step))
    for numbers in (in_torch.numpy(), np.asarray(in_jax), np.asarray(traced)):
        assert numbers.dtype == np.float32
        np.testing.assert_array_equal(numbers.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_uniform(seed):
    n = 1 << 16
    x = random.uniform(OPS, random.key(seed, "w"), (n,)).astype(float)
    assert np.abs(x).max() < 1
    assert (x * 2**24 % 2 == 1).all(), "odd multiples of 2**-24: never zero"
    # Five standard deviations each; the sum of squared bin deviations is chi-square with 255 degrees of freedom.
    assert abs(x.mean()) < 5 * np.sqrt(1 / 3 / n)
    assert abs((x**2).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / n)
    counts, _ = np.histogram(x, 256, (-1, 1))
    assert abs(((counts - n / 256) ** 2 / (n / 256)).sum() - 255) < 5 * np.sqrt(2 * 255)
    for lag in (1, 2, 64, 1000):
        assert abs((x[lag:] * x[:-lag]).mean() * 3) < 5 / np.sqrt(n - lag)


def test_streams_of_other_seeds_names_and_steps_are_unrelated():
    n = 1 << 13
    names = itertools.product((0, 1, 2), ("a", "b", "a/q"), (0, 1, 2, 3))
    streams = [random.uniform(OPS, random.key(seed, name), (n,), step).astype(float) for seed, name, step in names]
    for x, y in itertools.combinations(streams, 2):
        assert abs((x * y).mean() * 3) < 5.5 / np.sqrt(n)


def test_steps_and_elements_do_not_mirror_each_other():
    """Hashes of `element ^ step`, `element + step` or of anything symmetric in the two would repeat their numbers."""
    for key in (0, random.key(0, "w")):
        table = np.stack([random.uniform(OPS, key, (100,), step) for step in range(100)])
        # 10,000 draws out of 2**24 numbers: three coincidences are expected.
        assert np.unique(table).size >= table.size - 12


def test_numbers_do_not_depend_on_the_shape():
    key = random.key(3, "w")
    flat = random.uniform(OPS, key, (24,), 5)
    np.testing.assert_array_equal(random.uniform(OPS, key, (2, 3, 4), 5).reshape(-1), flat)
    np.testing.assert_array_equal(random.uniform(OPS, key, (10,), 5), flat[:10])
    assert random.uniform(OPS, key, (), 5) == flat[0]


def test_keys_depend_on_seed_and_name():
    keys = {random.key(seed, name) for seed in range(20) for name in ("", "a", "b", "a/q", "0/a")}
    assert len(keys) == 100
    assert random.key(1, "w") == random.key(1, "w")
