"""Gram-Schmidt twice, against float64 SVD and QR; and one source of random bits in three frameworks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.kernels import random
from gradwire.core.kernels.gram_schmidt import gram_schmidt, refresh
from gradwire.core.simulate import NumpyOps


def orthonormal(x, epsilon=0.0):
    """Rows of one matrix."""
    return gram_schmidt(OPS, np.asarray(x)[None], epsilon)[0]


def with_conditioning(rng, r, n, conditioning):
    """(r, n) in float64 with the singular values 1, …, 1/conditioning."""
    left, _ = np.linalg.qr(rng.normal(size=(r, r)))
    right, _ = np.linalg.qr(rng.normal(size=(n, r)))
    return (left * np.geomspace(1, 1 / conditioning, r)) @ right.T


def gram(rows):
    rows = rows.astype(np.float64)
    return rows @ rows.T


def assert_zero_or_orthonormal(rows, tolerance=1e-5):
    kept = np.diag((np.abs(rows).max(axis=-1, initial=0) > 0).astype(float))
    np.testing.assert_allclose(gram(rows), kept, rtol=0, atol=tolerance)


sizes = st.tuples(st.integers(1, 16), st.integers(1, 200)).filter(lambda s: s[0] <= s[1])
seeds = st.integers(0, 2**32 - 1)
conditionings = st.floats(0, 6).map(lambda e: 10**e)


@given(sizes, seeds, conditionings, st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_float32_rows_are_orthonormal_at_any_conditioning_and_scale(size, seed, conditioning, scale):
    rng = np.random.default_rng(seed)
    x = (with_conditioning(rng, *size, conditioning) * scale).astype(np.float32)
    rows = orthonormal(x)
    assert rows.dtype == np.float32
    assert_zero_or_orthonormal(rows)
    # A row's part orthogonal to the others is at least the smallest singular value: far above what counts as dependent.
    if conditioning <= 1e5:
        assert (np.diag(gram(rows)) > 0.5).all()
    # Nothing is lost: every row of x lies in the span.
    x = x.astype(np.float64) / scale
    outside = x - x @ rows.T.astype(np.float64) @ rows.astype(np.float64)
    assert (np.linalg.norm(outside, axis=1) <= 2e-6 * np.linalg.norm(x, axis=1)).all()


@given(sizes, seeds, st.floats(0, 3).map(lambda e: 10**e))
def test_float64_rows_are_those_of_qr(size, seed, conditioning):
    x = with_conditioning(np.random.default_rng(seed), *size, conditioning)
    q, r = np.linalg.qr(x.T)
    expected = (q * np.sign(np.diag(r))).T
    np.testing.assert_allclose(orthonormal(x), expected, rtol=0, atol=1e-12 * conditioning)


@given(st.integers(1, 40), seeds)
def test_dependent_rows_become_zero(n, seed):
    rng = np.random.default_rng(seed)
    a, b = np.eye(2, n + 1) + 0.1 * rng.uniform(-1, 1, size=(2, n + 1))
    x = np.stack([a, a, 0 * a, b, a + b, -3 * a, 2 * a - b]).astype(np.float32)
    rows = orthonormal(x)
    assert_zero_or_orthonormal(rows)
    np.testing.assert_array_equal(np.abs(rows).max(axis=1) > 0, [True, False, False, True, False, False, False])


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_rank_deficient_input_of_any_kind_is_finite_and_the_same_each_time(n):
    rng = np.random.default_rng(0)
    sizes = [0, 1, 1e-30, 1e30, 1e-45, 3e38]
    low = [rng.normal(size=(4, 1)) * rng.normal(size=n), rng.normal(size=(4, 2)) @ rng.normal(size=(2, n))]
    for x in (*(np.full((4, n), size) for size in sizes), *low, rng.normal(size=(4, n)) * [[1e30], [1e-30], [1], [0]]):
        rows = orthonormal(x.astype(np.float32))
        assert_zero_or_orthonormal(rows)
        np.testing.assert_array_equal(rows, orthonormal(x.astype(np.float32)))


@given(st.sampled_from([np.nan, np.inf, -np.inf]), seeds, st.integers(0, 3))
def test_a_row_that_is_not_finite_becomes_zero_and_spoils_no_other(bad, seed, where):
    x = np.random.default_rng(seed).normal(size=(4, 9)).astype(np.float32)
    broken, blank = x.copy(), x.copy()
    broken[where, seed % 9] = bad
    blank[where] = 0
    with np.errstate(invalid="ignore"):
        rows = orthonormal(broken)
    np.testing.assert_array_equal(rows, orthonormal(blank))
    np.testing.assert_array_equal(rows[where], 0)


@given(st.sampled_from([("bfloat16", 2e-2), ("float16", 3e-3)]), sizes, seeds)
def test_half_precision_is_computed_in_float32_and_rounded_once(half, size, seed):
    dtype, tolerance = half
    x = np.random.default_rng(seed).normal(size=size).astype(dtype)
    rows = orthonormal(x)
    assert rows.dtype.name == dtype
    np.testing.assert_array_equal(rows, orthonormal(x.astype(np.float32)).astype(dtype))
    assert_zero_or_orthonormal(rows.astype(np.float32), tolerance)


@pytest.mark.parametrize("shape", [(1, 0, 3), (2, 3, 0), (0, 2, 3)])
def test_empty_matrices_stay_empty(shape):
    assert gram_schmidt(OPS, np.zeros(shape)).shape == shape


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_refresh_replaces_only_negligible_rows(scale, dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3, 4, 8)) * scale).astype(dtype)
    fresh = rng.uniform(-1, 1, size=(3, 4, 8)).astype(dtype)
    x[0, 1] = x[2] = 0
    x[0, 3] = x[0, 3] * np.asarray(1e-7, dtype)
    x[1, 0] = x[1, 0] * np.asarray(1e-3, dtype)  # small, not negligible
    expected = x.copy()
    expected[0, [1, 3]], expected[2] = fresh[0, [1, 3]], fresh[2]
    np.testing.assert_array_equal(refresh(OPS, x, fresh), expected)


OPS = NumpyOps()
WORD = 2**32


def lowbias32(x):
    """As its author prints it, on unsigned words."""
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ (x >> 16)


@given(st.integers(0, 2**63), st.text(max_size=20), st.integers(0, 2**31 - 1), st.lists(st.integers(0, 4), max_size=3))
def test_numbers_are_the_hash_of_key_step_and_element(seed, name, step, shape):
    key = random.key(seed, name)
    assert -(2**31) <= key < 2**31
    numbers = random.uniform(OPS, key, tuple(shape), step)
    assert (numbers.dtype, numbers.shape) == (np.float32, tuple(shape))
    salt = lowbias32(lowbias32(step ^ key % WORD))
    for i, number in enumerate(numbers.reshape(-1)):
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


def test_keys_depend_on_seed_and_name():
    assert len({random.key(seed, name) for seed in range(20) for name in ("", "a", "b", "a/q", "0/a")}) == 100
