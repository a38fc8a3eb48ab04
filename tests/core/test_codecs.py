"""Codecs, and what is averaged in their codes: what survives, what rounding does on average, and
what is sent. TopK and Sign: the same."""

import itertools
import math
import re
from dataclasses import fields
from pathlib import Path

import ml_dtypes  # noqa: F401  (short floats in NumPy)
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradwire
from gradwire import (
    AllReduce,
    PowerSGD,
    Quantize,
    Sign,
    Simulator,
    Spec,
    TopK,
    WireDtype,
    diloco,
    plan,
)
from gradwire.core.algorithms.compressor import StepContext
from gradwire.core.algorithms.shared.sparse_blocks import bits_of, blocks_of
from gradwire.core.codecs import CODECS, BlockCodec, Scaled
from gradwire.core.codecs.coder import Coder
from gradwire.core.codecs.row_coder import Noise
from gradwire.core.codecs.shares import Shares, is_even
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps
from gradwire.core.kernels.storage import Storage
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.plan.gathers import outgrown_at
from gradwire.core.protocol.exchanges import Gather
from gradwire.core.protocol.halves import AllGather
from gradwire.core.simulate import NumpyOps, lock_step
from gradwire.core.simulate.lock_step import _LockStep
from tests.bounds import relative

OPS = NumpyOps()
BLOCKS = [name for name, codec in CODECS.items() if isinstance(codec, BlockCodec)]
#: Of codecs with a scale, how many scales the largest element of a block is; as a rule codes are
#: the whole numbers up to there.
LARGEST = {name: codec.largest for name, codec in CODECS.items() if isinstance(codec, Scaled)}
#: Largest error of an element, of the largest of its block: half of what lies between two
#: neighbours. In 4 bits 8/8 with the other sign becomes 7/8. Two bits keep the mean size of each
#: kind.
ERROR = {name: 1 / (2 * largest) for name, largest in LARGEST.items()}
ERROR |= {
    "float8_e4m3fn": 1 / 28,
    "int4": 1 / 8,
    "e3m0": 1 / 4,
    "int2": 1,
    "float32": 0,
    "bfloat16": 2**-8,
    "float16": 2**-11,
}


def through(name, rows, dither=None):
    with np.errstate(all="ignore"):
        fields = CODECS[name].encode(OPS, rows, dither)
        return CODECS[name].decode(OPS, *fields), fields


#: Numbers that each codec has, with 1 the largest of them.
EXACT = {name: [0.0, 0.5, 1.0, 0.75] for name in CODECS} | {
    **{name: np.arange(largest + 1) / largest for name, largest in LARGEST.items()},
    "e3m0": [0.0, *(2.0**-i for i in range(7))],
    "int2": [0.25, 1.0],
    "float8_e4m3fn": np.arange(127, dtype=np.uint8).view("float8_e4m3fn").astype(np.float32) / 448,
    "int4": np.arange(8) / 8,  # 1 with the sign of the largest alone
}
#: By which they are whole numbers.
WHOLE = LARGEST | {"int4": 1, "e3m0": 1}


@given(st.sampled_from(sorted(CODECS)), st.integers(1, 4), st.integers(0, 2**31))
def test_what_is_exactly_representable_survives(name, rows, seed):
    rng = np.random.default_rng(seed)
    x = rng.choice(EXACT[name], (rows, 128)) * rng.choice([-1, 1], (rows, 128))
    x[:, 0] = rng.choice([-1, 1], rows)
    scales = WHOLE.get(name, 1) * 2.0 ** rng.integers(-20, 8, (rows, 1))
    x = (x * scales).astype(np.float16 if name == "float16" else np.float32).astype(np.float32)
    np.testing.assert_array_equal(through(name, x)[0], x)


floats = st.floats(-(2.0**60), 2.0**60, width=32)


@given(
    st.sampled_from(sorted(set(CODECS) - {"float16"})),
    hnp.arrays(np.float32, (3, 16), elements=floats),
)
def test_nothing_is_rounded_farther_than_halfway(name, x):
    got, fields = through(name, x)
    assert sum(y.nbytes for y in fields) == 3 * CODECS[name].width(16)
    largest = np.abs(x).max(axis=1, keepdims=True)
    # And the scale, which is rounded up to 16 bits; what is smaller than the least scale is
    # nothing.
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
    each = [
        split_at(x, t)
        for t in (size.max(1, keepdims=True) / 2, np.sqrt((size**2).mean(1, keepdims=True)))
    ]
    squares = np.min([((y - x) ** 2).sum(1) for y in each], axis=0)
    best = np.sqrt(squares.sum()) / np.linalg.norm(x)
    # Magnitudes are counted in 255ths of the largest.
    assert relative(through("int2", x)[0], x) == pytest.approx(best, rel=0.005)
    assert best < 0.98 * min(float(relative(y, x)) for y in each) or kind in (
        "normal",
        "laplace",
        "half zeros",
    )
    # Max 1960, "Quantizing for minimum distortion", table I: the four best levels leave 0.1175 of
    # the squares
    if kind == "normal":
        assert relative(through("int2", x)[0], x) < math.sqrt(0.1175)


@pytest.mark.parametrize("kind", ["normal", "laplace", "t3"])
def test_four_bits_use_all_codes(kind):
    """15 even steps leave a seventh more of every element than 16 do."""
    x = values(kind)
    scale = np.abs(x).max(1, keepdims=True) / 7
    assert relative(through("int4", x)[0], x) < 0.91 * relative(np.rint(x / scale) * scale, x)
    codes = through("int4", x)[1][0]
    assert (
        {int(c) for c in np.unique(codes & 15)}
        == {int(c) for c in np.unique(codes >> 4)}
        == set(range(16))
    )


@given(st.sampled_from(["int2", "int4"]), st.integers(0, 2**31), st.integers(-60, 60))
def test_a_few_bits_do_not_depend_on_the_scale_nor_on_what_fills_up(name, seed, exponent):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, (2, 128)).astype(np.float32)
    codes = through(name, x)[1][0]
    np.testing.assert_array_equal(through(name, x * np.float32(2.0**exponent))[1][0], codes)
    # Zeros at the end cost nothing of the others' mean sizes, of which they have no part.
    x[:, 100:] = 0
    got = through(name, x)[0]
    assert relative(got[:, :100], x[:, :100]) < (0.7 if name == "int2" else 0.4)


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if codec.dithers])
def test_rounding_by_chance_is_right_on_average_with_chances_of_each_replica_and_step(name):
    """Of 400 elements rounded 1,000 times. The mean error has a standard deviation of at most 1/2 ·
    1/sqrt(1000) of a code, so that one of 400 is beyond 5 of them in fewer than one of 4,000 runs;
    and the seeds are fixed."""
    x = np.random.default_rng(0).uniform(-1, 1, (5, 80)).astype(np.float32)
    x[:, 0] = 1
    coder = [Coder(OPS, CODECS[name], Noise(key=7, step=step)) for step in range(1000)]
    mean = sum(c.decode_rows(c.encode_rows(x, 1)).astype(np.float64) for c in coder) / 1000
    bound = 5 * 0.5 / math.sqrt(1000) / LARGEST[name]
    assert np.abs(mean - x).max() < bound
    # And by chance: to the nearest, the mean error would be that of one rounding.
    assert np.abs(through(name, x)[0] - x).max() > bound
    coders = [Coder(OPS, CODECS[name], Noise(key=7, step=step)) for step in range(4)]
    codes = [c.encode_rows(x, who)[0].tobytes() for c in coders for who in range(4)]
    assert len(set(codes)) == 16
    assert Coder(OPS, CODECS[name], Noise(key=7, step=2)).encode_rows(x, 0)[0].tobytes() == codes[8]


shapes = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(0, 40), max_size=2).map(tuple), min_size=1
)


@given(shapes, st.sampled_from(sorted(CODECS)), st.integers(1, 5), st.integers(0, 2**31))
def test_a_mean_depends_on_nothing_but_its_own_tensor(shapes, name, replicas, seed):
    """Not on what is sent beside it, and so not on buckets; and it is rounded twice at most,
    whatever the number of replicas."""
    rng = np.random.default_rng(seed)
    own = [
        [rng.normal(size=s).astype(np.float32) for s in shapes.values()] for _ in range(replicas)
    ]

    def mean(*which):
        coders = [Coder(OPS, CODECS[name]) for _ in own]
        return lock_step([c.mean([x[k] for k in which]) for c, x in zip(coders, own, strict=True)])

    together = mean(*range(len(shapes)))
    for k, of_all in enumerate(zip(*together, strict=True)):
        np.testing.assert_array_equal(of_all, [of_all[0]] * replicas)
        np.testing.assert_array_equal(mean(k)[0][0], of_all[0])
        if of_all[0].size:
            largest, right = (
                max(np.abs(x[k]).max() for x in own),
                np.mean([x[k] for x in own], axis=0),
            )
            assert np.abs(of_all[0] - right).max() <= 2 * largest * (ERROR[name] + 2**-14)


class Joining(NumpyOps):
    """Where arrays lie in memory differs from replica to replica, and from call to call."""

    def __init__(self, rng):
        super().__init__()
        self.rng = rng

    def join_order(self, arrays):
        return self.rng.permutation(len(arrays)).tolist()


@given(
    st.lists(st.integers(1, 400), min_size=4, max_size=8), st.integers(2, 4), st.integers(0, 2**31)
)
def test_a_mean_does_not_depend_on_where_arrays_lie(sizes, replicas, seed):
    rng = np.random.default_rng(seed)
    own = [[rng.normal(size=n).astype(np.float32) for n in sizes] for _ in range(replicas)]

    def results(*ops):
        coders = [Coder(each, CODECS["int8"]) for each in ops]
        means = lock_step([c.mean(x) for c, x in zip(coders, own, strict=True)])
        both = lock_step(
            [
                c.mean_and_sent(x, [(i % replicas,) for i in range(len(x))])
                for c, x in zip(coders, own, strict=True)
            ]
        )
        return [[*mean, *again, *sent] for mean, (again, sent) in zip(means, both, strict=True)]

    in_any_order = results(*[Joining(rng) for _ in own])
    for found, right in zip(in_any_order, results(*[OPS] * replicas), strict=True):
        for x, y in zip(found, right, strict=True):
            np.testing.assert_array_equal(x, y)


def test_the_table_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    rows = re.findall(r'^\| `"(\w+)"` \| .+ \| ([\d.]+) \| ([\d.]+) % \|$', page, re.MULTILINE)
    named = {
        name for name in CODECS if f'"{name}"' in (Quantize.__doc__ or "")
    }  # to users; a codec may be tried before it is
    assert {name for name, *_ in rows} == named - {"float32"}
    assert len(rows) > 5
    rng = np.random.default_rng(0)
    own = [{"w": rng.normal(size=(512, 512)).astype(np.float32)} for _ in range(4)]
    right = np.mean([x["w"] for x in own], axis=0)
    for name, bits, off in rows:
        algorithm = WireDtype(AllReduce(), name)
        mean = Simulator(algorithm, {"w": (512, 512)}, 4, dtype="float32").step(own)["w"]
        assert np.linalg.norm(mean - right) / np.linalg.norm(right) == pytest.approx(
            float(off) / 100, rel=0.2
        )
        p = plan({"w": (512, 512)}, algorithm)
        assert p.wire_bytes / p.dense_bytes == float(bits) / 32


SOME_SHAPES = st.lists(st.integers(1, 23), max_size=4).map(tuple)
SIZES = st.integers(1, 40) | st.tuples(st.integers(1, 9), st.integers(1, 9))
METHODS = [
    TopK(3, per=16),
    TopK(0.1, per=(4, 5)),
    TopK(4, per=40, bits=2),
    TopK(0.1, per=30, bits=4),
    TopK(2, per=30, bits=8),
    Sign(),
    Sign(per="row"),
    Sign(per="column", magnitudes=2),
]


@given(shape=SOME_SHAPES, per=SIZES)
def test_blocks_hold_each_element_once(shape, per):
    blocks = blocks_of("w", shape, per)
    x = np.arange(1.0, math.prod(shape) + 1).reshape(shape)
    cut = blocks.cut(OPS, x)
    assert cut.shape == (blocks.count, blocks.length)
    assert blocks.length <= (per if isinstance(per, int) else math.prod(per))
    np.testing.assert_array_equal(np.sort(cut[cut > 0]), np.arange(1, x.size + 1))
    np.testing.assert_array_equal(blocks.joined(cut), x)
    # In each block less than one element is filled up, and in each strip less than one row.
    assert cut.size - blocks.strips * blocks.rows * blocks.columns < blocks.count
    assert blocks.strips * blocks.rows * blocks.columns - x.size < max(
        1, blocks.strips * blocks.columns
    )
    assert blocks.cut(AbstractOps(), AbstractArray(shape, "float32")).shape == cut.shape


@given(
    piece=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3).map(tuple),
    per=st.sampled_from([1, 2, 4, 8, 32, (1, 4), (2, 2), (4, 4), (4, 2), (3, 4)]),
    axis=st.integers(0, 2),
    pieces=st.integers(2, 4),
)
@example(piece=(12, 4, 8), per=(4, 4), axis=1, pieces=4)
@example(piece=(12, 16, 4), per=(4, 4), axis=2, pieces=2)
@example(piece=(2, 2, 16), per=(4, 4), axis=1, pieces=4)
@example(piece=(8, 6), per=(4, 4), axis=1, pieces=2)
@example(piece=(2, 8, 4), per=(4, 4), axis=0, pieces=4)
@example(piece=(8, 8), per=(4, 4), axis=1, pieces=2)
@example(piece=(8, 1), per=(4, 4), axis=1, pieces=4)
@example(piece=(8, 2, 2), per=(4, 4), axis=2, pieces=2)
@example(piece=(12, 8), per=16, axis=1, pieces=2)
def test_blocks_of_pieces_are_said_to_be_those_of_the_tensor_only_if_they_are(
    piece, per, axis, pieces
):
    axis %= len(piece)
    shape = (*piece[:axis], piece[axis] * pieces, *piece[axis + 1 :])
    x = np.arange(1, math.prod(shape) + 1).reshape(shape)
    whole, part = blocks_of("w", shape, per), blocks_of("w", piece, per)
    alike = whole.are_those_of(part, axis)
    if alike:
        own, expected = (
            np.concatenate([part.cut(OPS, each) for each in np.split(x, pieces, axis)]),
            whole.cut(OPS, x),
        )
        np.testing.assert_array_equal(
            own[np.argsort(own[:, 0])], expected[np.argsort(expected[:, 0])]
        )
    if isinstance(per, tuple) and len(piece) == 2 and per[0] > 1:
        assert alike or any(side % one for side, one in zip(piece, per, strict=True))


@given(data=st.data(), length=st.integers(1, 5000) | st.sampled_from([2**20, 2**24 - 1, 2**24]))
def test_positions_come_back_from_as_few_bits_as_the_block_needs(data, length):
    index = np.array(
        [*data.draw(st.lists(st.integers(0, length - 1), max_size=30)), length - 1], np.int32
    )
    sent = OPS.pack_integers(index, bits_of(length))
    assert sent.nbytes == -(-index.size * bits_of(length) // 8)
    assert 2 ** bits_of(length) >= length > 2 ** bits_of(length) // 2
    np.testing.assert_array_equal(OPS.unpack_integers(sent, bits_of(length), index.shape), index)


class JoiningStorage(Storage):
    max_joined = 600


class JoiningOps(NumpyOps):
    storage = JoiningStorage()


class Alone(TopK):
    """Which compresses each tensor by itself."""

    def compress_together(self, ops, x, memory, context):
        return None


@pytest.mark.parametrize(
    "algorithm",
    [TopK(8, per=64), TopK(3, per=(8, 8), mean="senders"), TopK(4, per=(4, 5), bits=2)],
    ids=repr,
)
@given(world=st.integers(1, 3), seed=st.integers(0, 99))
def test_blocks_of_several_tensors_sent_as_one_are_those_of_each(algorithm, world, seed):
    shapes = {
        "a": (16, 16),
        "b": (8, 32),
        "c": (3, 7),
        "d": (64,),
        "e": (8, 10),
        "f": (24, 32),
        "g": (32, 8),
        "h": (16, 5),
    }
    rng = np.random.default_rng(seed)
    alone = Alone(**{each.name: getattr(algorithm, each.name) for each in fields(algorithm)})
    apart = Simulator(alone, shapes, world, dtype="float32")
    together = [
        Simulator(algorithm, shapes, world, dtype="float32", ops=ops())
        for ops in (NumpyOps, JoiningOps)
    ]
    for _ in range(2):
        gradients = [
            {n: rng.normal(size=s).astype("float32") for n, s in shapes.items()}
            for _ in range(world)
        ]
        expected = apart.step(gradients)
        for joined in together:
            np.testing.assert_equal(joined.step(gradients), expected)
            np.testing.assert_equal(
                [s.tensors for s in joined.states], [s.tensors for s in apart.states]
            )
            assert joined.traffic.nbytes == apart.traffic.nbytes
            assert max(len(r.arrays) for r in joined.requests if isinstance(r, Gather)) < max(
                len(r.arrays) for r in apart.requests if isinstance(r, Gather)
            )


def test_large_tensors_are_joined_with_their_like_alone():
    """Of 600 elements `JoiningStorage` joins, each of 256 is large."""
    shapes = {"a": (16, 16), "b": (4, 16), "c": (32, 8), "d": (16, 16), "e": (8, 8), "f": (16, 8)}
    x = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    parts = TopK(8, per=64)._group_by_matrix(JoiningOps(), x, StepContext(step=0))
    assert [names for names, _ in parts] == [["a", "d"], ["b"], ["c"], ["e", "f"]]


@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
@settings(max_examples=12)
@given(
    shapes=st.lists(SOME_SHAPES, min_size=1, max_size=3),
    world=st.integers(1, 3),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_size_is_sent_as_planned_and_nothing_is_lost(algorithm, shapes, world, seed, data):
    names = {"scalar": (), "none": (0, 3), **{f"w{i}": shape for i, shape in enumerate(shapes)}}
    rng = np.random.default_rng(seed)
    simulator = Simulator(algorithm, names, world, dtype="float32")
    planned = plan(names, algorithm, world_size=world)
    error = dict.fromkeys(names, 0.0)
    for _ in range(2):
        gradients = [
            {n: rng.normal(size=s).astype("float32") for n, s in names.items()}
            for _ in range(world)
        ]
        averages = simulator.step(gradients)
        assert simulator.traffic.nbytes == planned.wire_bytes
        for name, average in averages.items():
            states = [state.tensors.get(name, {}).get("error", 0.0) for state in simulator.states]
            kept = np.mean(states, axis=0)
            mean = np.mean([g[name] for g in gradients], axis=0)
            np.testing.assert_allclose(average + kept, mean + error[name], rtol=0, atol=5e-5)
            error[name] = kept
    before = [
        {n: m["error"].copy() for n, m in state.tensors.items()} for state in simulator.states
    ]
    name = data.draw(st.sampled_from([n for n, s in names.items() if math.prod(s)]))
    gradients = [{n: np.zeros(s) for n, s in names.items()} for _ in range(world)]
    where = data.draw(st.integers(0, math.prod(names[name]) - 1))
    gradients[-1][name].reshape(-1)[where] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    assert not np.isfinite(simulator.step(gradients)[name]).all()
    for state, kept in zip(simulator.states, before, strict=True):
        for n, memory in state.tensors.items():
            np.testing.assert_array_equal(memory["error"], kept[n])


@settings(max_examples=12)
@given(seed=st.integers(0, 99))
@pytest.mark.parametrize(
    ("bits", "values"), [(2, [2, 2, -5, 5]), (4, [8, 1, -6, 3]), (8, [-127, 0, 1, 64])]
)
def test_values_of_a_few_sizes_survive_in_as_many_bits(bits, values, seed):
    rng = np.random.default_rng(seed)
    blocks = np.zeros((6, 40))
    for block in blocks:
        block[rng.choice(40, 4, replace=False)] = rng.permutation(values) * 2.0 ** rng.integers(
            -3, 4
        )
    simulator = Simulator(TopK(4, per=40, bits=bits), {"w": (6, 40)}, 1, dtype="float32")
    np.testing.assert_array_equal(simulator.step([{"w": blocks}])["w"], blocks)
    assert not simulator.states[0].tensors["w"]["error"].any()


def test_what_is_gathered_grows_with_the_replicas_and_the_plan_says_how_far():
    shapes = {"w": (512, 256)}
    for replicas in (2, 8, 32):
        # 64 of 4096: values of 4 bytes, positions of 12 bits.
        assert (
            plan(shapes, TopK(64, per=(64, 64)), world_size=replicas).wire_bytes
            == replicas * 2048 * (4 + 1.5) / 2
        )
        assert (
            plan(shapes, Sign(), world_size=replicas).wire_bytes
            == replicas * (512 * 256 / 8 + 4) / 2
        )
    # With values of 2 bits and two scales for each block, 146 times fewer than float32 but for the
    # scales.
    assert plan(shapes, TopK(64, bits=2), world_size=2).wire_bytes == 32 * (64 * 14 / 8 + 8)
    for algorithm in (TopK(64), TopK(64, bits=2), Sign()):
        limit = plan(shapes, algorithm, world_size=2).outgrown_at
        eight_bits = plan(shapes, WireDtype(gradwire.AllReduce(), "int8")).wire_bytes
        assert plan(shapes, algorithm, world_size=limit - 1).wire_bytes <= eight_bits
        assert plan(shapes, algorithm, world_size=limit).wire_bytes > eight_bits
    assert plan(shapes, TopK(64), world_size=2).outgrown_at == 25
    assert "from 25 on this sends more than an average in 8 bits would" in str(
        plan(shapes, TopK(64), world_size=2)
    )


def average_on_the_first(algorithm, gradients):
    """Its first step on the first of so many replicas. The others go as far as what all gather, so
    that cost grows with them and not with their square."""
    specs = {"w": Spec(gradients[0].shape, "float32")}
    states = [algorithm.init(OPS, specs) for _ in gradients]
    programs = [
        algorithm.step(OPS, {"w": x.copy()}, state, 0)
        for x, state in zip(gradients, states, strict=True)
    ]
    driver, answers = _LockStep(OPS, [], None), [None] * len(programs)
    try:
        while True:
            asked = [
                program.send(answer) for program, answer in zip(programs, answers, strict=False)
            ]
            everybody = asked * (len(gradients) // len(asked))
            answers = type(asked[0]).simulate(everybody, driver)[: len(programs)]
            if isinstance(asked[0], Gather | AllGather):
                for program in programs[1:]:
                    program.close()
                del programs[1:]
    except StopIteration as stop:
        return stop.value[0]["w"]


@pytest.mark.parametrize(
    ("algorithm", "replicas"),
    [
        *((WireDtype(AllReduce(), "int8"), replicas) for replicas in (2, 8, 64)),
        # parts of each for each
        pytest.param(WireDtype(AllReduce(), "int8"), 512, marks=pytest.mark.slow),
        *(
            (algorithm, replicas)
            for algorithm in (TopK(4, per=64), Sign())
            for replicas in (2, 8, 64, 512)
        ),
    ],
    ids=repr,
)
def test_sums_of_many_replicas_are_those_in_float64(algorithm, replicas):
    """Codes round by as much on 512 replicas as on two; what is gathered is added up as the mean of
    what each would send alone."""
    rng = np.random.default_rng(replicas)
    gradients = list((1 + rng.normal(size=(replicas, 16, 16))).astype("float32"))
    found = average_on_the_first(algorithm, gradients).astype("float64")
    if isinstance(algorithm, WireDtype):
        # of 127 steps half of one, twice
        assert relative(found, np.mean(gradients, axis=0, dtype="float64")) < 0.02
        return
    alone = [average_on_the_first(algorithm, [x]) for x in gradients]
    assert relative(found, np.mean(alone, axis=0, dtype="float64")) < 3e-5


def test_local_sgd_is_planned_for_a_number_of_replicas_where_its_compressor_gathers():
    shapes, local = {"w": (512, 256)}, diloco(10, momentum=0, compressor=TopK(64))
    with pytest.raises(ValueError, match="depends on the number of replicas; say it"):
        plan(shapes, local)
    for replicas in (2, 8):
        planned = plan(shapes, local, world_size=replicas)
        assert planned.peak_bytes == plan(shapes, TopK(64), world_size=replicas).wire_bytes
        assert planned.outgrown_at == 25
    # One that names its groups knows.
    named = diloco({2: 5, ((0, 1, 2, 3),): 10}, momentum=0, compressor=TopK(64))
    assert plan(shapes, named).steps[-1].nbytes == plan(shapes, TopK(64), world_size=4).wire_bytes
    with pytest.raises(ValueError, match="no partition of the replicas 0 to 7"):
        plan(shapes, named, world_size=8)


def test_small_tensors_stay_as_they_are():
    specs = {"w": Spec((64, 64)), "b": Spec((3,)), "s": Spec(()), "none": Spec((0, 4))}
    for algorithm in (TopK(64), TopK(1 / 64), Sign()):
        assert "w" in algorithm.init(OPS, specs).tensors
        assert not {"s", "none"} & algorithm.init(OPS, specs).tensors.keys()
    # 64 of 384 elements is more than half of their bytes, with the positions; so are two values for
    # each of three.
    assert not TopK(64).init(OPS, {"w": Spec((12, 8))}).tensors
    assert not Sign(per="column", magnitudes=2).init(OPS, {"w": Spec((3, 40))}).tensors


def test_the_table_on_the_page_is_what_the_plan_says():
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    rows = re.findall(
        r"^\| `(.+?)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d-]+) \|$", page, re.MULTILINE
    )
    assert len(rows) >= 7
    for code, *figures in rows:
        algorithm = eval(code, vars(gradwire))
        planned = [
            plan({"w": (2048, 512)}, algorithm, world_size=replicas) for replicas in (2, 8, 32)
        ]
        assert figures == [
            *(f"{p.wire_bytes:,}" for p in planned),
            str(planned[0].outgrown_at or "-"),
        ], code


# --- what `Quantize` sends, and who rounds what ---

MODELS = st.dictionaries(
    st.text("abc.0123456789", min_size=1, max_size=4),
    st.lists(st.integers(1, 70), min_size=1, max_size=2).map(tuple)
    | st.sampled_from([(768,), (64, 64), (129, 257)]),
    min_size=1,
    max_size=12,
)


def sent(algorithm, specs, replicas) -> int:
    return dry_run(algorithm, specs, replicas).traffic[0].nbytes


@given(
    shapes=MODELS,
    copies=st.integers(1, 40),
    dtype=st.sampled_from(sorted(CODECS)),
    replicas=st.sampled_from([2, 3, 8, 64, 512, 4096]),
    gradients=st.sampled_from(["float32", "bfloat16"]),
    chance=st.booleans(),
)
@example({"m": (64, 64)}, 2000, "int8", 4096, "float32", False)
@example({"v": (256,)}, 2000, "int4", 512, "float32", True)
@example({"w": (128 * 64 + 1,), "v": (768,)}, 3, "bfloat16", 64, "float32", False)
def test_quantize_sends_what_an_average_in_its_codes_does_and_never_more_than_dense(
    shapes, copies, dtype, replicas, gradients, chance
):
    specs = {
        f"{name}{i}": Spec(shape, gradients)
        for name, shape in shapes.items()
        for i in range(copies)
    }
    codes, dense = (sent(a, specs, replicas) for a in (WireDtype(AllReduce(), dtype), AllReduce()))
    chance = chance and CODECS[dtype].dithers
    found = sent(Quantize(dtype, stochastic=chance), specs, replicas)
    assert found <= dense
    if sum(spec.size for spec in specs.values()) >= 256 * len(specs):
        assert found <= 1.03 * codes or found <= 1.03 * dense <= codes


@given(
    rows=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 10**6)), min_size=1, max_size=6),
    replicas=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_each_row_is_in_one_share_and_shares_differ_by_what_is_dealt(rows, replicas, seed):
    members = tuple((n, first % replicas) for n, first in rows)
    order = np.random.default_rng(seed).permutation(len(rows))
    starts = np.zeros(len(rows), int)
    starts[order] = np.cumsum([0, *(rows[i][0] for i in order)])[:-1]
    shares = Shares(replicas, members, tuple(starts.tolist()))
    places, taken = shares.received().make(), shares.sent().make()
    np.testing.assert_array_equal(taken[places], np.arange(sum(n for n, _ in rows)))
    np.testing.assert_array_equal(
        shares.owners()[:, 0] * shares.each + shares.places().make(), places
    )
    assert len(taken) == shares.sent().n == replicas * shares.each
    for replica in range(replicas):
        own = [
            np.arange(start + o.begin, start + o.begin + o.rows)
            for start, o in zip(starts, shares.of(replica), strict=True)
        ]
        np.testing.assert_array_equal(np.concatenate(own), shares.own(replica).make())
    # The last share of a tensor that is divided evenly may be filled up.
    filled = sum(is_even(n, replicas) and n % replicas > 0 for n, _ in rows)
    assert 0 <= shares.each - max(shares.own(replica).n for replica in range(replicas)) <= filled


@pytest.mark.parametrize("options", [{}, {"stochastic": True}, {"dtype": "bfloat16"}], ids=str)
@given(
    cuts=st.lists(st.integers(0, 8), max_size=3),
    order=st.permutations(range(9)),
    replicas=st.sampled_from([2, 3, 4]),
)
@settings(max_examples=10)
def test_neither_buckets_nor_order_change_a_bit(options, cuts, order, replicas):
    shapes = {
        f"p{i}": shape
        for i, shape in enumerate(
            [(64, 64), (300,), (7,), (1000,), (33, 40), (5, 5), (640,), (130,), (2,)]
        )
    }
    algorithm = Quantize(**{"dtype": "int4", "seed": 3} | options)
    rng = np.random.default_rng(0)
    names = [f"p{i}" for i in order]
    bounds = sorted({0, *cuts, len(names)})
    buckets = [names[i:j] for i, j in itertools.pairwise(bounds)]
    whole, apart = (Simulator(algorithm, shapes, replicas, dtype="float32") for _ in range(2))
    for _ in range(3):
        gradients = [
            {n: rng.normal(size=s).astype("float32") for n, s in shapes.items()}
            for _ in range(replicas)
        ]
        right = whole.step(gradients)
        programs = [
            [
                algorithm.step(
                    OPS,
                    {n: g[n].copy() for n in names},
                    state.of(dict.fromkeys(names)),
                    apart.steps,
                )
                for names in buckets
            ]
            for g, state in zip(gradients, apart.states, strict=True)
        ]
        for of_bucket in zip(*programs, strict=True):
            for (means, after), state in zip(lock_step(list(of_bucket)), apart.states, strict=True):
                state.tensors.update(after.tensors)
                for name, mean in means.items():
                    np.testing.assert_array_equal(mean, right[name])
        apart.steps += 1
    for one, other in zip(whole.states, apart.states, strict=True):
        for name in shapes:
            np.testing.assert_array_equal(one.tensors[name]["error"], other.tensors[name]["error"])


def test_what_is_smaller_as_it_is_travels_exactly():
    """A vector of 50 among 8 replicas: a block each would be 8 blocks."""
    shapes = {"w": (512, 512), "v": (50,), "s": ()}
    rng = np.random.default_rng(0)
    gradients = [
        {n: rng.normal(size=s).astype("float32") for n, s in shapes.items()} for _ in range(8)
    ]
    replicas = Simulator(Quantize("int8"), shapes, 8, dtype="float32")
    means = replicas.step(gradients)
    for name in ("v", "s"):
        np.testing.assert_allclose(
            means[name], np.mean([g[name] for g in gradients], axis=0), rtol=1e-5, atol=1e-6
        )
        assert not any(state.tensors[name]["error"].any() for state in replicas.states)
    assert all(state.tensors["w"]["error"].any() for state in replicas.states)


def test_what_gathers_says_when_it_stops_paying_and_what_does_not_never_does():
    small = {f"m{i}": Spec((64, 64)) for i in range(200)}
    for algorithm in (
        Quantize("int8"),
        Quantize("int4"),
        WireDtype(AllReduce(), "int8"),
        AllReduce(),
        PowerSGD(2),
        WireDtype(PowerSGD(16, min_compression_rate=1), "int8"),
    ):
        assert outgrown_at(algorithm, small) is None
    found = outgrown_at(TopK(16, per=64), small)
    eight_bits = WireDtype(AllReduce(), "int8")
    assert sent(TopK(16, per=64), small, found - 1) <= sent(eight_bits, small, found - 1)
    assert sent(TopK(16, per=64), small, found + 1) > sent(eight_bits, small, found + 1)
