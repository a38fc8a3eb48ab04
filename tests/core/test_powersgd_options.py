"""Which tensors are compressed, at which rank, and which options are refused."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.ops import Spec
from gradwire.core.simulate import NumpyOps, Simulator


@given(st.lists(st.integers(0, 40), max_size=4).map(tuple), st.integers(1, 8), st.sampled_from([1, 2, 3]))
def test_a_tensor_is_compressed_iff_it_shrinks_by_more_than_the_rate(shape, rank, rate):
    # Of all the ways to cut the axes in two, the one with the smallest factors, and of those the first.
    cuts = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))]
    n, m = min(cuts, key=sum, default=(1, 1))
    r = min(n, m, rank)
    expected = r if 0 < (n + m) * r * rate < n * m else 0
    assert PowerSGD(rank, min_compression_rate=rate).rank_of("w", shape) == expected


def test_the_boundary_is_strict():
    assert PowerSGD(1).rank_of("w", (4, 4)) == 0  # (4 + 4) * 1 * 2 = 16 is not less than 16
    assert PowerSGD(1).rank_of("w", (4, 5)) == 1  # (4 + 5) * 1 * 2 = 18 is less than 20


@pytest.mark.parametrize(
    ("size", "side"), [(1, 1), (2, 2), (4, 2), (5, 3), (9, 3), (10, 4), (2**40, 2**20), (2**40 + 1, 2**20 + 1)]
)
def test_square_is_the_smallest_that_holds_the_tensor(size, side):
    always = PowerSGD(1, square=True, min_compression_rate=1e-9)
    assert always.rank_of("w", (size,)) == 1
    rate = size / (2 * side)  # (side + side) * 1 * rate < size fails by equality
    assert dataclasses.replace(always, min_compression_rate=rate).rank_of("w", (size,)) == 0
    assert dataclasses.replace(always, min_compression_rate=rate * 0.999).rank_of("w", (size,)) == 1


SHAPES = {"embed.weight": (40, 30), "layers.0.weight": (40, 30), "layers.1.weight": (40, 30), "head.weight": (40, 30)}


def ranks(rank):
    simulator = Simulator(PowerSGD(rank), SHAPES, replicas=1)
    tensors = simulator.states[0].tensors
    return [len(tensors[name]["q"]) if name in tensors else 0 for name in SHAPES]


def test_the_first_pattern_that_matches_decides_and_the_unmatched_stay_dense():
    assert ranks({"layers.*": 2, "embed.weight": 3}) == [3, 2, 2, 0]
    assert ranks({"layers.1.*": 1, "layers.*": 2, "*": 4}) == [4, 2, 1, 4]
    assert ranks({"layers.*": 2, "layers.1.*": 1}) == [0, 2, 2, 0]
    assert ranks({"embed*": 0, "*": 4}) == [0, 4, 4, 4]
    assert ranks({"*.[01].*": 2}) == [0, 2, 2, 0]
    assert ranks({}) == [0, 0, 0, 0]


def test_the_first_pattern_decides_how_a_tensor_is_seen():
    algorithm = PowerSGD(1, stacked={"a.*": 0, "*": 1}, rows={"b.x": 2, "*": 1})
    assert str(algorithm.view_of("a.x", (3, 4, 5))) == "3 | 4·5"
    assert str(algorithm.view_of("b.x", (3, 4, 5, 6))) == "3 × (4·5 | 6)"
    assert str(algorithm.view_of("c.x", (3, 4, 5, 6))) == "3 × (4 | 5·6)"
    assert algorithm.view_of("c.bias", (3, 4)) is None


def test_options_with_patterns_can_be_hashed():
    one, other = (PowerSGD({"*": 2}, stacked={"a": 1}, rows={"a": n}, transpose=["a"]) for n in (1, 2))
    assert len({one, dataclasses.replace(one), other}) == 2


def test_options_are_keywords_and_fixed():
    with pytest.raises(TypeError):
        PowerSGD(4, 1000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PowerSGD(4).rank = 5


def test_the_repr_is_what_was_changed():
    assert repr(PowerSGD(4)) == "PowerSGD(rank=4)"
    assert repr(PowerSGD(rank={"*": 2}, half_step=True)) == "PowerSGD(rank={'*': 2}, half_step=True)"
    algorithm = PowerSGD(4, start_step=10, seed=1)
    assert eval(repr(algorithm)) == algorithm


def test_epsilon_shortens_the_basis():
    """In a basis whose vectors have length c < 1, a matrix of low enough rank comes out as c squared times itself."""
    matrix = np.outer([0, 3.0, 4.0, 0, 0], np.ones(6))
    # P is (3, 4)/5 up to the factor 6 q·1; scaled to a largest element of 1 it has norm 5/4, so c = 1.25 / (1.25 + 0.25).
    algorithm = PowerSGD(1, orthogonalization_epsilon=0.25, error_feedback=False)
    result = Simulator(algorithm, {"w": (5, 6)}, replicas=2).step([{"w": matrix}] * 2)["w"]
    np.testing.assert_allclose(result, matrix * (1.25 / 1.5) ** 2, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"q": (3, 30), "error": (40, 5, 6)}),
        ({"stacked": {"w": 1}, "min_compression_rate": 0.1}, {"q": (40, 3, 6), "error": (40, 5, 6)}),
        (
            {"stacked": {"w": 1}, "min_compression_rate": 0.1, "half_step": True},
            {"q": (40, 3, 6), "p": (40, 3, 5), "error": (40, 5, 6)},
        ),
        ({"rows": {"w": 2}, "min_compression_rate": 1}, {"q": (3, 6), "error": (40, 5, 6)}),
        ({"error_feedback": False}, {"q": (3, 30)}),
        ({"warm_start": False}, {"error": (40, 5, 6)}),
        ({"half_step": True}, {"q": (3, 30), "p": (3, 40), "error": (40, 5, 6)}),
        ({"square": True}, {"q": (3, 35), "error": (40, 5, 6)}),
    ],
)
@pytest.mark.parametrize("state_dtype", [None, "float32", "bfloat16"])
def test_memory_has_these_names_shapes_and_dtypes(options, expected, state_dtype):
    algorithm = PowerSGD(3, state_dtype=state_dtype, **options)
    state = algorithm.init(NumpyOps(), {"w": Spec((40, 5, 6), "float16"), "b": Spec((40,), "float16")})
    assert set(state.tensors) == {"w"}
    assert {key: value.shape for key, value in state.tensors["w"].items()} == expected
    assert {value.dtype.name for value in state.tensors["w"].values()} == {state_dtype or "float16"}
    assert state.shared.keys() == ({"phase"} if algorithm.half_step else set())
    assert algorithm.per_replica == {"error"}
