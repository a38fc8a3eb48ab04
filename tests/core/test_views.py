"""How a tensor is a batch of matrices: the default, what is counted, and there and back."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import PowerSGD, Simulator, Spec, plan
from gradwire.core.algorithms.shared.views import StackedShape, View, reproducing, view_of
from gradwire.core.simulate import NumpyOps
from gradwire.core.state import checkpoint

shapes = st.lists(st.integers(1, 6), min_size=2, max_size=5).map(tuple)


@given(shapes, st.data())
def test_no_other_cut_sends_less(shape, data):
    """And of equals it is the one with the fewest row axes."""
    stacked = data.draw(st.integers(0, len(shape) - 2))
    view = view_of("w", shape, stacked)
    assert view.batch == shape[:stacked]
    others = [math.prod(shape[stacked:cut]) + math.prod(shape[cut:]) for cut in range(stacked + 1, len(shape))]
    cut = stacked + 1 + others.index(min(others))
    assert (view.rows, view.columns) == (shape[stacked:cut], shape[cut:])


def test_a_shape_that_knows_of_its_stack_is_a_shape():
    shape = StackedShape((12, 64, 128), 1)
    assert shape == (12, 64, 128)
    assert pickle.loads(pickle.dumps(shape)).stacked == 1
    assert str(PowerSGD(4).view_of("w", shape)) == "12 × (64 | 128)"
    # The user knows better.
    assert str(PowerSGD(4, stacked={"w": 0}).view_of("w", shape)) == "12·64 | 128"
    # Without a factor to know it by, a later step could not tell.
    assert str(PowerSGD(4, warm_start=False).view_of("w", shape)) == "12·64 | 128"
    (tensor,) = plan({"w": shape}, PowerSGD(4)).tensors
    assert tensor.wire_bytes == 12 * (64 + 128) * 4 * 4


@given(st.sampled_from([{}, {"half_step": True}, {"transpose": ("w",)}]))
def test_what_the_framework_knew_at_init_is_known_in_every_step(options):
    shape, algorithm = (3, 2, 10, 16), PowerSGD(1, **options)
    hinted, told = (Simulator(a, {"w": shape}, 2) for a in (algorithm, PowerSGD(1, stacked={"w": 2}, **options)))
    for state in hinted.states:
        memory = algorithm.init(NumpyOps(), {"w": Spec(StackedShape(shape, 2), "float64")}).tensors["w"]
        state.tensors["w"] = memory
    rng = np.random.default_rng(0)
    for _ in range(3):
        given = [{"w": rng.normal(size=shape)} for _ in range(2)]
        np.testing.assert_array_equal(hinted.step(given)["w"], told.step(given)["w"])
    assert hinted.states[0].tensors["w"]["q"].shape[:2] == (6, 1)


@given(shapes, st.booleans(), st.data())
def test_the_options_that_gave_a_factor_are_found(shape, transposed, data):
    stacked = data.draw(st.integers(0, len(shape) - 2))
    rows = data.draw(st.integers(1, len(shape) - stacked - 1))
    view = View(shape[:stacked], shape[stacked : stacked + rows], shape[stacked + rows :], transposed)
    factor = (*view.stack, 2, view.sides[1])
    options = eval(f"dict({reproducing('w', shape, factor)})")
    again = (PowerSGD(1, transpose=("w",) * turned, **options).view_of("w", shape) for turned in (False, True))
    assert (view.stack, view.sides[1]) in [(found.stack, found.sides[1]) for found in again]


def test_a_state_of_another_view_is_refused_with_what_to_do():
    """Of the first axis and the rest, as every tensor was seen once."""
    before, now = PowerSGD(2, rows={"conv": 1}), PowerSGD(2)
    specs = {"conv": Spec((8, 3, 16), "float64"), "w": Spec((20, 16), "float64")}
    old, new = (a.init(NumpyOps(), specs) for a in (before, now))
    saved = {"format": 1, "kind": "compressor", "algorithm": repr(now), "step": 3, "shared": {}, "tensors": old.tensors}
    kept, difference = checkpoint.fit(saved, repr(now), new)
    assert not difference.algorithm
    assert "'q': ('float', (2, 48))" in str(difference)
    assert "'q': ('float', (2, 16))" in str(difference)
    assert "give PowerSGD rows={'conv': 1} to go on with those" in str(difference)
    assert set(kept.tensors["conv"]) == {"error"}  # what can be kept without
    # With that option it fits, though the state knows nothing of it.
    kept, difference = checkpoint.fit(saved, repr(before), old)
    assert not difference
    assert set(kept.tensors["conv"]) == {"error", "q"}
    # Other options still count.
    assert checkpoint.fit(saved, repr(PowerSGD(2, rows={"conv": 1}, seed=1)), old)[1].algorithm
    assert not checkpoint.fit(
        saved | {"algorithm": "WireDtype(PowerSGD(rank=2), 'bfloat16')"},
        "WireDtype(PowerSGD(rank=2, stacked={'w': 0}), 'bfloat16')",
        old,
    )[1]


@pytest.mark.parametrize("half_step", [False, True])
def test_a_step_with_memory_of_another_view_is_refused_by_name(half_step):
    simulator = Simulator(PowerSGD(2, half_step=half_step), {"conv": (8, 3, 16)}, 1)
    old = Simulator(PowerSGD(2, rows={"conv": 1}, half_step=half_step), {"conv": (8, 3, 16)}, 1)
    simulator.states[0].tensors = old.states[0].tensors
    with pytest.raises(ValueError, match=r"memory of parameter 'conv' holds a factor of shape \(2, 48\).*'conv': 1}"):
        simulator.step([{"conv": np.ones((8, 3, 16))}])
