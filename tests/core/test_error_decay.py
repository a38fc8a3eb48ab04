"""Error feedback with a decay: what is left out is multiplied by it in every step."""

import numpy as np
import pytest

from gradwire import PowerSGD, Simulator, WireDtype
from gradwire.core.simulate import NumpyOps, PoisonOps
from gradwire.core.state.checkpoint import head
from gradwire.testing import ConformanceError, check

SHAPES = {"w": (12, 5), "v": (7, 8), "b": (5,)}
DECAY = 0.75


@pytest.mark.parametrize("ops", [NumpyOps, PoisonOps])
@pytest.mark.parametrize(
    "algorithm",
    [
        PowerSGD(1, error_feedback=DECAY),
        PowerSGD(1, error_feedback=DECAY, half_step=True),
        PowerSGD(1, error_feedback=DECAY, square=True),  # whose rest is computed after the message, not meanwhile
        PowerSGD(1, error_feedback=DECAY, warm_start=False),
    ],
    ids=repr,
)
def test_the_error_is_what_was_left_out_times_the_decay(algorithm, ops):
    """One replica receives what it has sent, so all of it is seen from outside."""
    rng = np.random.default_rng(0)
    simulator = Simulator(algorithm, SHAPES, replicas=1, ops=ops())
    for step in range(6):
        before = {name: memory["error"].copy() for name, memory in simulator.states[0].tensors.items()}
        gradient = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
        if step == 3:
            gradient["v"][0, 0] = np.nan
        average = simulator.step([gradient])
        for name, error in before.items():
            expected = error if step == 3 else DECAY * (gradient[name] + error - average[name])
            assert np.abs(error).max() > 1e-3 or step == 0
            np.testing.assert_allclose(simulator.states[0].tensors[name]["error"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_error_keeps_its_dtype(dtype):
    simulator = Simulator(PowerSGD(1, error_feedback=DECAY), SHAPES, replicas=2, dtype=dtype)
    simulator.step([{name: np.ones(shape, "float32") for name, shape in SHAPES.items()}] * 2)
    assert simulator.states[0].tensors["w"]["error"].dtype.name == dtype


def test_a_decay_of_one_is_none_at_all():
    assert PowerSGD(2, error_feedback=1) == PowerSGD(2, error_feedback=1.0) == PowerSGD(2)
    assert repr(PowerSGD(2, error_feedback=1.0)) == "PowerSGD(rank=2)"  # so that a state of the one is one of the other
    assert repr(PowerSGD(2, error_feedback=0.95)) == "PowerSGD(rank=2, error_feedback=0.95)"
    assert head("compressor", repr(PowerSGD(2, error_feedback=1.0)), 0) == head("compressor", repr(PowerSGD(2)), 0)


def test_what_decays_is_lost_for_good():
    assert not PowerSGD(2).biased
    assert PowerSGD(2, error_feedback=0.95).biased
    # In each step a known part of the error; what else is lost, the kit finds.
    assert any(line.startswith("conservation") for line in check(PowerSGD(2, error_feedback=0.95)))

    class Forgetful(PowerSGD):
        def _decayed(self, ops, error):
            return ops.scale_each([error], ops.asarray(0.5, "float64"))[0]

    with pytest.raises(ConformanceError, match="its promise of conservation"):
        check(Forgetful(2, error_feedback=0.95), world_sizes=(2,))
    assert not any(
        line.startswith("conservation") for line in check(WireDtype(PowerSGD(2, error_feedback=0.95), "float16"))
    )
