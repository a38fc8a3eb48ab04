"""Codecs and what is averaged in their codes: what survives, what rounding does on average, and what is sent."""

import math
import re
from pathlib import Path

import ml_dtypes  # noqa: F401  (short floats in NumPy)
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradwire import AllReduce, Simulator, WireDtype, plan
from gradwire.core.codecs import CODECS, BlockCodec
from gradwire.core.codecs.coder import Coder, Noise
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.simulate import lock_step

OPS = NumpyOps()
BLOCKS = [name for name, codec in CODECS.items() if isinstance(codec, BlockCodec)]
#: Largest error of an element, of the largest of its block: half of what lies between two neighbours. In 4 bits 8/8 with the other sign becomes 7/8.
#: Two bits keep the mean size of each kind.
ERROR = {"float8_e4m3fn": 1 / 28, "int8": 1 / 254, "int4": 1 / 8, "e3m0": 1 / 4, "int2": 1}
ERROR |= {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11}


def through(name, rows, dither=None):
    with np.errstate(all="ignore"):
        fields = CODECS[name].encode(OPS, rows, dither)
        return CODECS[name].decode(OPS, *fields), fields


#: Numbers that each codec has, with 1 the largest of them.
EXACT = {name: [0.0, 0.5, 1.0, 0.75] for name in CODECS} | {
    "e3m0": [0.0, *(2.0**-i for i in range(7))],
    "int2": [0.25, 1.0],
    "float8_e4m3fn": np.arange(127, dtype=np.uint8).view("float8_e4m3fn").astype(np.float32) / 448,
    "int4": np.arange(8) / 8,  # 1 with the sign of the largest alone
    "int8": np.arange(128) / 127,
}


@given(st.sampled_from(sorted(CODECS)), st.integers(1, 4), st.integers(0, 2**31))
def test_what_is_exactly_representable_survives(name, rows, seed):
    rng = np.random.default_rng(seed)
    x = rng.choice(EXACT[name], (rows, 128)) * rng.choice([-1, 1], (rows, 128))
    x[:, 0] = rng.choice([-1, 1], rows)
    scales = {"int8": 127, "float8_e4m3fn": 448}.get(name, 1) * 2.0 ** rng.integers(-20, 8, (rows, 1))
    x = (x * scales).astype(np.float16 if name == "float16" else np.float32).astype(np.float32)
    np.testing.assert_array_equal(through(name, x)[0], x)


floats = st.floats(-(2.0**60), 2.0**60, width=32)


@given(st.sampled_from(sorted(set(CODECS) - {"float16"})), hnp.arrays(np.float32, (3, 16), elements=floats))
def test_nothing_is_rounded_farther_than_halfway(name, x):
    got, fields = through(name, x)
    assert sum(y.nbytes for y in fields) == 3 * CODECS[name].width(16)
    largest = np.abs(x).max(axis=1, keepdims=True)
    # And the scale, which is rounded up to 16 bits; what is smaller than the least scale is nothing.
    assert (np.abs(got - x) <= largest * (ERROR[name] + 2**-15) + 2.0**-100 * 448).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(name, wrong):
    x = np.ones((3, 16), np.float32)
    x[1, 3] = wrong
    got, fields = through(name, x)
    assert np.isfinite(got[[0, 2]]).all()
    assert not np.isfinite(got[1]).all()
    codec = CODECS[name]
    assert np.isfinite(codec.witness(*[y[[0, 2]] for y in fields])).all()
    assert not np.isfinite(codec.witness(*fields)).all()


def values(kind, shape=(300, 128)):
    rng = np.random.default_rng(0)
    drawn = {
        "normal": rng.normal(size=shape),
        "laplace": rng.laplace(size=shape),
        "t3": rng.standard_t(3, size=shape),
        "half zeros": rng.normal(size=shape) * (rng.random(shape) < 0.5),
    }
    return drawn[kind].astype(np.float32)


def relative_error(found, right):
    return np.linalg.norm(found - right) / np.linalg.norm(right)


def split_at(x, threshold):
    """A sign and the mean size of those above a threshold, or of the others that are not zero."""
    size = np.abs(x)
    large, small = size > threshold, (size <= threshold) & (size > 0)

    def mean(these):
        return (size * these).sum(1, keepdims=True) / np.maximum(1, these.sum(1, keepdims=True))

    return np.where(x < 0, -1, 1) * np.where(large, mean(large), mean(small))


@pytest.mark.parametrize("kind", ["normal", "laplace", "t3", "half zeros"])
def test_two_bits_take_the_better_of_two_thresholds_in_each_block(kind):
    x = values(kind)
    size = np.abs(x.astype(np.float64))
    each = [split_at(x, t) for t in (size.max(1, keepdims=True) / 2, np.sqrt((size**2).mean(1, keepdims=True)))]
    squares = np.min([((y - x) ** 2).sum(1) for y in each], axis=0)
    best = np.sqrt(squares.sum()) / np.linalg.norm(x)
    # Magnitudes are counted in 255ths of the largest.
    assert relative_error(through("int2", x)[0], x) == pytest.approx(best, rel=0.005)
    assert best < 0.98 * min(relative_error(y, x) for y in each) or kind in ("normal", "laplace", "half zeros")
    if (
        kind == "normal"
    ):  # Max 1960, "Quantizing for minimum distortion", table I: the four best levels leave 0.1175 of the squares
        assert relative_error(through("int2", x)[0], x) < math.sqrt(0.1175)


@pytest.mark.parametrize("kind", ["normal", "laplace", "t3"])
def test_four_bits_use_all_codes(kind):
    """15 even steps leave a seventh more of every element than 16 do."""
    x = values(kind)
    scale = np.abs(x).max(1, keepdims=True) / 7
    assert relative_error(through("int4", x)[0], x) < 0.91 * relative_error(np.rint(x / scale) * scale, x)
    codes = through("int4", x)[1][0]
    assert {int(c) for c in np.unique(codes & 15)} == {int(c) for c in np.unique(codes >> 4)} == set(range(16))


@given(st.sampled_from(["int2", "int4"]), st.integers(0, 2**31), st.integers(-60, 60))
def test_a_few_bits_do_not_depend_on_the_scale_nor_on_what_fills_up(name, seed, exponent):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, (2, 128)).astype(np.float32)
    codes = through(name, x)[1][0]
    np.testing.assert_array_equal(through(name, x * np.float32(2.0**exponent))[1][0], codes)
    # Zeros at the end cost nothing of the others' mean sizes, of which they have no part.
    x[:, 100:] = 0
    got = through(name, x)[0]
    assert relative_error(got[:, :100], x[:, :100]) < (0.7 if name == "int2" else 0.4)


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if codec.dithers])
def test_rounding_by_chance_is_right_on_average_with_chances_of_each_replica_and_step(name):
    """Of 400 elements rounded 1,000 times. The mean error has a standard deviation of at most 1/2 · 1/sqrt(1000) of a code, so that one of 400 is beyond
    5 of them in fewer than one of 4,000 runs; and the seeds are fixed."""
    x = np.random.default_rng(0).uniform(-1, 1, (5, 80)).astype(np.float32)
    x[:, 0] = 1
    coder = [Coder(OPS, CODECS[name], Noise(key=7, step=step)) for step in range(1000)]
    mean = sum(c._decoded(c._encoded(x, 1)).astype(np.float64) for c in coder) / 1000
    bound = 5 * 0.5 / math.sqrt(1000) / (127 if name == "int8" else 7)
    assert np.abs(mean - x).max() < bound
    # And by chance: to the nearest, the mean error would be that of one rounding.
    assert np.abs(through(name, x)[0] - x).max() > bound
    coders = [Coder(OPS, CODECS[name], Noise(key=7, step=step)) for step in range(4)]
    codes = [c._encoded(x, who)[0].tobytes() for c in coders for who in range(4)]
    assert len(set(codes)) == 16
    assert Coder(OPS, CODECS[name], Noise(key=7, step=2))._encoded(x, 0)[0].tobytes() == codes[8]


shapes = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 40), max_size=2).map(tuple), min_size=1)


@given(shapes, st.sampled_from(sorted(CODECS)), st.integers(1, 5), st.integers(0, 2**31))
def test_a_mean_depends_on_nothing_but_its_own_tensor(shapes, name, replicas, seed):
    """Not on what is sent beside it, and so not on buckets; and it is rounded twice at most, whatever the number of replicas."""
    rng = np.random.default_rng(seed)
    own = [[rng.normal(size=s).astype(np.float32) for s in shapes.values()] for _ in range(replicas)]

    def mean(*which):
        coders = [Coder(OPS, CODECS[name]) for _ in own]
        return lock_step([c.mean([x[k] for k in which]) for c, x in zip(coders, own, strict=True)])

    together = mean(*range(len(shapes)))
    for k, of_all in enumerate(zip(*together, strict=True)):
        np.testing.assert_array_equal(of_all, [of_all[0]] * replicas)
        # The two sizes of "int2" are sums, whose last bit depends on the library.
        np.testing.assert_allclose(mean(k)[0][0], of_all[0], rtol=1e-6 if name == "int2" else 0)
        if of_all[0].size:
            largest, right = max(np.abs(x[k]).max() for x in own), np.mean([x[k] for x in own], axis=0)
            assert np.abs(of_all[0] - right).max() <= 2 * largest * (ERROR[name] + 2**-14)


class Joining(NumpyOps):
    """Where arrays lie in memory differs from replica to replica, and from call to call."""

    def __init__(self, rng):
        super().__init__()
        self.rng = rng

    def joining(self, arrays):
        return self.rng.permutation(len(arrays)).tolist()


@given(st.lists(st.integers(1, 400), min_size=4, max_size=8), st.integers(2, 4), st.integers(0, 2**31))
def test_a_mean_does_not_depend_on_where_arrays_lie(sizes, replicas, seed):
    rng = np.random.default_rng(seed)
    own = [[rng.normal(size=n).astype(np.float32) for n in sizes] for _ in range(replicas)]

    def results(*ops):
        coders = [Coder(each, CODECS["int8"]) for each in ops]
        means, both = (
            lock_step([getattr(c, form)(x) for c, x in zip(coders, own, strict=True)])
            for form in ("mean", "mean_and_sent")
        )
        return [[*mean, *again, *sent] for mean, (again, sent) in zip(means, both, strict=True)]

    in_any_order = results(*[Joining(rng) for _ in own])
    for found, right in zip(in_any_order, results(*[OPS] * replicas), strict=True):
        for x, y in zip(found, right, strict=True):
            np.testing.assert_array_equal(x, y)


def test_the_table_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    rows = re.findall(r'^\| `"(\w+)"` \| .+ \| ([\d.]+) \| ([\d.]+) % \|$', page, re.MULTILINE)
    assert {name for name, *_ in rows} == set(CODECS) - {"float32"}
    rng = np.random.default_rng(0)
    own = [{"w": rng.normal(size=(512, 512)).astype(np.float32)} for _ in range(4)]
    right = np.mean([x["w"] for x in own], axis=0)
    for name, bits, off in rows:
        algorithm = WireDtype(AllReduce(), name)
        mean = Simulator(algorithm, {"w": (512, 512)}, 4, dtype="float32").step(own)["w"]
        assert np.linalg.norm(mean - right) / np.linalg.norm(right) == pytest.approx(float(off) / 100, rel=0.2)
        p = plan({"w": (512, 512)}, algorithm)
        assert p.wire_bytes / p.dense_bytes == float(bits) / 32
