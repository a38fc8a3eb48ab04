"""TopK and Sign: what their size may be, what they send, and what survives it."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire import Sign, Simulator, Spec, TopK, WireDtype, diloco, plan
from gradwire.core.algorithms.shared.sparse_blocks import bits_of, blocks_of, packed, unpacked
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps
from gradwire.core.simulate import NumpyOps

OPS = NumpyOps()
SHAPES = st.lists(st.integers(1, 23), max_size=4).map(tuple)
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


@given(shape=SHAPES, per=SIZES)
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
    assert blocks.strips * blocks.rows * blocks.columns - x.size < max(1, blocks.strips * blocks.columns)
    assert blocks.cut(AbstractOps(), AbstractArray(shape, "float32")).shape == cut.shape


def test_tiles_are_those_of_the_matrix():
    x = np.arange(8 * 12).reshape(8, 12)
    tiles = blocks_of("w", x.shape, (4, 6)).cut(OPS, x)
    rendered = [x[i : i + 4, j : j + 6] for i in (0, 4) for j in (0, 6)]
    assert [sorted(tile) for tile in tiles.tolist()] == [sorted(tile.ravel().tolist()) for tile in rendered]


@given(data=st.data(), length=st.integers(1, 5000) | st.sampled_from([2**20, 2**24 - 1, 2**24]))
def test_positions_come_back_from_as_few_bits_as_the_block_needs(data, length):
    index = np.array([*data.draw(st.lists(st.integers(0, length - 1), max_size=30)), length - 1], np.int32)
    sent = packed(OPS, index, length)
    assert sent.nbytes == -(-index.size * bits_of(length) // 8)
    assert 2 ** bits_of(length) >= length > 2 ** bits_of(length) // 2
    np.testing.assert_array_equal(unpacked(OPS, sent, length, index.shape), index)


@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
@settings(max_examples=12)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=3), world=st.integers(1, 3), seed=st.integers(0, 99), data=st.data()
)
def test_any_size_is_sent_as_planned_and_nothing_is_lost(algorithm, shapes, world, seed, data):
    names = {"scalar": (), "none": (0, 3), **{f"w{i}": shape for i, shape in enumerate(shapes)}}
    rng = np.random.default_rng(seed)
    simulator = Simulator(algorithm, names, world, dtype="float32")
    planned = plan(names, algorithm, world_size=world)
    error = dict.fromkeys(names, 0.0)
    for _ in range(2):
        gradients = [{n: rng.normal(size=s).astype("float32") for n, s in names.items()} for _ in range(world)]
        averages = simulator.step(gradients)
        assert simulator.traffic.nbytes == planned.wire_bytes
        for name, average in averages.items():
            states = [state.tensors.get(name, {}).get("error", 0.0) for state in simulator.states]
            kept = np.mean(states, axis=0)
            mean = np.mean([g[name] for g in gradients], axis=0)
            np.testing.assert_allclose(average + kept, mean + error[name], rtol=0, atol=1e-5)
            error[name] = kept
    before = [{n: m["error"].copy() for n, m in state.tensors.items()} for state in simulator.states]
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
@pytest.mark.parametrize(("bits", "values"), [(2, [2, 2, -5, 5]), (4, [8, 1, -6, 3]), (8, [-127, 0, 1, 64])])
def test_values_of_a_few_sizes_survive_in_as_many_bits(bits, values, seed):
    rng = np.random.default_rng(seed)
    blocks = np.zeros((6, 40))
    for block in blocks:
        block[rng.choice(40, 4, replace=False)] = rng.permutation(values) * 2.0 ** rng.integers(-3, 4)
    simulator = Simulator(TopK(4, per=40, bits=bits), {"w": (6, 40)}, 1, dtype="float32")
    np.testing.assert_array_equal(simulator.step([{"w": blocks}])["w"], blocks)
    assert not simulator.states[0].tensors["w"]["error"].any()


def test_what_is_gathered_grows_with_the_replicas_and_the_plan_says_how_far():
    shapes = {"w": (512, 256)}
    for replicas in (2, 8, 32):
        # 64 of 4096: values of 4 bytes, positions of 12 bits.
        assert plan(shapes, TopK(64, per=(64, 64)), world_size=replicas).wire_bytes == replicas * 2048 * (4 + 1.5) / 2
        assert plan(shapes, Sign(), world_size=replicas).wire_bytes == replicas * (512 * 256 / 8 + 4) / 2
    # With values of 2 bits and two scales for each block, 146 times fewer than float32 but for the scales.
    assert plan(shapes, TopK(64, bits=2), world_size=2).wire_bytes == 32 * (64 * 14 / 8 + 8)
    for algorithm in (TopK(64), TopK(64, bits=2), Sign()):
        limit = plan(shapes, algorithm, world_size=2).outgrown_at
        eight_bits = plan(shapes, WireDtype(gradwire.AllReduce(), "int8")).wire_bytes
        assert plan(shapes, algorithm, world_size=limit - 1).wire_bytes <= eight_bits
        assert plan(shapes, algorithm, world_size=limit).wire_bytes > eight_bits
    assert plan(shapes, TopK(64), world_size=2).outgrown_at == 25
    assert "from 25 on this sends more than an average in 8 bits would" in str(plan(shapes, TopK(64), world_size=2))


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
    # 64 of 384 elements is more than half of their bytes, with the positions; so are two values for each of three.
    assert not TopK(64).init(OPS, {"w": Spec((12, 8))}).tensors
    assert not Sign(per="column", magnitudes=2).init(OPS, {"w": Spec((3, 40))}).tensors


def test_the_table_on_the_page_is_what_the_plan_says():
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d-]+) \|$", page, re.MULTILINE)
    assert len(rows) >= 7
    for code, *figures in rows:
        algorithm = eval(code, vars(gradwire))
        planned = [plan({"w": (2048, 512)}, algorithm, world_size=replicas) for replicas in (2, 8, 32)]
        assert figures == [*(f"{p.wire_bytes:,}" for p in planned), str(planned[0].outgrown_at or "-")], code
