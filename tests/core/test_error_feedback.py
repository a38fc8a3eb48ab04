"""Error feedback as a part of its own: under a compressor written by a user, in its dtype, and with a decay."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from gradwire.core.algorithms.compressor import Compressor
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.protocol import mean
from gradwire.core.simulate import NumpyOps, PoisonOps, Simulator
from gradwire.core.state.checkpoint import head
from gradwire.testing import ConformanceError, check


@dataclass(frozen=True, kw_only=True, repr=False)
class Threshold(Compressor):
    """Keeps the elements above a part of the largest; in dense arrays. Counts its steps in a memory that all replicas share."""

    part: float = 0.5

    def memory(self, ops, name, spec):
        return {"count": ops.zeros((1,), spec.dtype)}

    async def compress(self, ops, name, x, memory, at):
        limit = ops.max_abs(ops.max_abs(x.reshape((1, -1))).mT).reshape(()) * self.part
        # Asked this way round, a NaN is not small: it is sent, and everyone hears of it.
        small = (limit > x) & (x > limit * -1)
        sent = ops.where(~small, x, 0.0)
        return sent, await mean(sent), {"count": memory["count"] + 1}


def test_a_compressors_own_memory_counts_only_finite_compressed_steps():
    simulator = Simulator(Threshold(start_step=2), {"w": (3,)}, replicas=2)
    counts = []
    for value in (1.0, 1.0, 1.0, np.nan, 1.0):
        simulator.step([{"w": [1.0, 2.0, value]}, {"w": [1.0, 2.0, 3.0]}])
        counts.append(float(simulator.states[0].tensors["w"]["count"][0]))
    assert counts == [0, 0, 1, 1, 2]


def test_half_precision_gradients_under_dense_compressors():
    """The rest `x - sent` in bfloat16, where NumPy's products of array and number come out in float32."""
    for dtype, ops, decay in itertools.product(("bfloat16", "float16"), (NumpyOps(), PoisonOps()), (True, 0.5)):
        simulator = Simulator(Threshold(error_feedback=decay), {"w": (3,)}, replicas=2, dtype=dtype, ops=ops)
        simulator.step([{"w": [4.0, 1.0, -3.0]}, {"w": [4.0, 1.0, -3.0]}])
        error = simulator.states[1].tensors["w"]["error"]
        assert error.dtype.name == dtype
        np.testing.assert_array_equal(error.astype(float), [0, decay, 0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"half_step": True}, {"square": True}, {"warm_start": False}])
def test_state_dtype_means_that_all_arithmetic_is_in_that_dtype(dtype, options):
    """Half-precision gradients with float32 memory: as if they had been float32, except for the result's last rounding."""
    shape, rng = (16, 12), np.random.default_rng(0)
    wide = Simulator(PowerSGD(2, **options), {"w": shape}, replicas=2, dtype="float32")
    half = Simulator(PowerSGD(2, state_dtype="float32", **options), {"w": shape}, replicas=2, dtype=dtype)
    for _ in range(6):
        gradients = [{"w": rng.normal(size=shape).astype(dtype)} for _ in range(2)]
        result = half.step(gradients)["w"]
        assert result.dtype.name == dtype
        np.testing.assert_array_equal(result, wide.step(gradients)["w"].astype(dtype))
        assert half.traffic == wide.traffic
        for a, b in zip(half.states, wide.states, strict=True):
            for key in b.tensors["w"]:
                assert a.tensors["w"][key].dtype == np.float32
                np.testing.assert_array_equal(a.tensors["w"][key], b.tensors["w"][key])


def test_a_decay_of_one_is_none_at_all():
    assert PowerSGD(2, error_feedback=1) == PowerSGD(2, error_feedback=1.0) == PowerSGD(2)
    assert repr(PowerSGD(2, error_feedback=1.0)) == "PowerSGD(rank=2)"  # so that a state of the one is one of the other
    assert repr(PowerSGD(2, error_feedback=0.95)) == "PowerSGD(rank=2, error_feedback=0.95)"
    assert head("compressor", repr(PowerSGD(2, error_feedback=1.0)), 0) == head("compressor", repr(PowerSGD(2)), 0)


def test_what_decays_is_lost_for_good():
    assert not PowerSGD(2).biased
    assert PowerSGD(2, error_feedback=0.95).biased

    class Forgetful(PowerSGD):
        def _decayed(self, ops, error):
            return ops.scale_each([error], ops.asarray(0.5, "float64"))[0]

    with pytest.raises(ConformanceError, match="its promise of conservation"):
        check(Forgetful(2, error_feedback=0.95), world_sizes=(2,))
