"""What is remembered: under a compressor of a user, in its dtype, of clipped gradients, and in
steps with an inf or NaN where it is easily lost."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

from gradwire import Compressor, PowerSGD, Quantize, Sign, Simulator, TwoLevel, Weighted, WireDtype
from gradwire.core.algorithm import with_inner
from gradwire.core.protocol import mean
from gradwire.core.simulate import NumpyOps, PoisonOps
from tests.methods import METHODS


@dataclass(frozen=True, kw_only=True, repr=False)
class Threshold(Compressor):
    """Keeps the elements above a part of the largest; in dense arrays. Counts its steps in a memory
    that all replicas share."""

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
    """The rest `x - sent` in bfloat16, where NumPy's products of array and number come out in
    float32."""
    for dtype, ops, decay in itertools.product(
        ("bfloat16", "float16"), (NumpyOps(), PoisonOps()), (True, 0.5)
    ):
        simulator = Simulator(
            Threshold(error_feedback=decay), {"w": (3,)}, replicas=2, dtype=dtype, ops=ops
        )
        simulator.step([{"w": [4.0, 1.0, -3.0]}, {"w": [4.0, 1.0, -3.0]}])
        error = simulator.states[1].tensors["w"]["error"]
        assert error.dtype.name == dtype
        np.testing.assert_array_equal(error.astype(float), [0, decay, 0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"half_step": True}, {"square": True}, {"warm_start": False}]
)
def test_state_dtype_means_that_all_arithmetic_is_in_that_dtype(dtype, options):
    """Half-precision gradients with float32 memory: as if they had been float32, except for the
    result's last rounding, which the errors hold."""
    shape, rng = (16, 12), np.random.default_rng(0)
    wide = Simulator(PowerSGD(2, **options), {"w": shape}, replicas=2, dtype="float32")
    half = Simulator(
        PowerSGD(2, state_dtype="float32", **options), {"w": shape}, replicas=2, dtype=dtype
    )
    for _ in range(6):
        gradients = [{"w": rng.normal(size=shape).astype(dtype)} for _ in range(2)]
        result = half.step(gradients)["w"]
        assert result.dtype.name == dtype
        average = wide.step(gradients)["w"]
        np.testing.assert_array_equal(result, average.astype(dtype))
        assert half.traffic == wide.traffic
        for a, b in zip(half.states, wide.states, strict=True):
            b.tensors["w"]["error"] = b.tensors["w"]["error"] + (
                average - result.astype(np.float32)
            )
            for key in b.tensors["w"]:
                assert a.tensors["w"][key].dtype == np.float32
                np.testing.assert_array_equal(a.tensors["w"][key], b.tensors["w"][key])


def widened(algorithm, dtype="float32"):
    """The algorithm with memory of this dtype."""
    if isinstance(algorithm, Compressor):
        return replace(algorithm, state_dtype=dtype)
    return with_inner(algorithm, lambda inner: widened(inner, dtype))


def lost(algorithm, dtype, steps, shape=(24, 16), replicas=4):
    """Of the sum of all mean gradients, the part that is in neither the averages nor the mean
    error."""
    simulator, rng = (
        Simulator(algorithm, {"w": shape}, replicas, dtype=dtype),
        np.random.default_rng(0),
    )
    total, summed, base = 0.0, 0.0, rng.standard_normal(shape)
    for _ in range(steps):
        gradients = (base + rng.standard_normal((replicas, *shape))).astype(dtype)
        total += simulator.step([{"w": x} for x in gradients])["w"].astype(float)
        summed += gradients.astype(float).mean(0)
    error = np.mean([state.tensors["w"]["error"].astype(float) for state in simulator.states], 0)
    return np.linalg.norm(total + error - summed) / np.linalg.norm(summed)


#: Whose averages and errors add up to the gradients; what is said of parameters by name has no
#: other program.
WHOLE = {
    name: method.algorithm
    for name, method in METHODS.items()
    if isinstance(method.algorithm, Compressor)
    and not method.algorithm.biased
    and not name.startswith(("views", "rank_by"))
}


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WHOLE)
def test_of_gradients_in_16_bits_memory_in_32_loses_nothing(name, dtype):
    algorithm = replace(WHOLE[name], start_step=0)
    # whose maximum counts all alike
    ways = (algorithm,) if name == "int8" else (algorithm, Weighted(algorithm))
    for each in ways:
        assert lost(widened(each), dtype, steps=20) < 1e-6
    assert lost(algorithm, dtype, steps=20) > 1e-5


def test_two_levels_lose_what_a_plain_average_within_a_node_rounds_off():
    found = {"float32": lost(TwoLevel(PowerSGD(2), 2), "float32", 20)}
    found |= {
        each: lost(widened(TwoLevel(PowerSGD(2), 2)), each, 20) for each in ("bfloat16", "float16")
    }
    assert found["float32"] < 1e-6 < 1e-5 < found["float16"] < found["bfloat16"] < 1e-3


def test_an_average_that_overflows_its_dtype_is_inf_and_leaves_a_finite_error():
    for ops in (NumpyOps(), PoisonOps()):
        algorithm = Threshold(part=0.7, state_dtype="float32")
        simulator = Simulator(algorithm, {"w": (2,)}, replicas=2, dtype="float16", ops=ops)
        found = []
        for _ in range(3):
            with np.errstate(over="ignore"):
                average = simulator.step([{"w": [40000.0, 65504.0]}] * 2)["w"]
            found.append([*average, *simulator.states[1].tensors["w"]["error"]])
        assert found == [[0, 65504, 40000, 0], [INF, 65504, 0, 0], [0, 65504, 40000, 0]]


SHAPES = {"w": (12, 10), "conv": (8, 3, 4), "b": (12,), "scalar": ()}
INF = np.inf


def gradients(rng, filled=(), scales=(1.0, 1.0, 1.0)):
    """Random ones of three replicas; `filled`: (replica, name) → the number in all places."""
    step = [{k: scale * rng.normal(size=s) for k, s in SHAPES.items()} for scale in scales]
    for (replica, name), value in dict(filled).items():
        step[replica][name] = np.full(SHAPES[name], value)
    return step


def norm(gradient):
    return float(np.sqrt(sum((g * g).sum() for g in gradient.values())))


def clipped(gradient, max_norm):
    factor = min(1.0, max_norm / norm(gradient))
    return {k: factor * g for k, g in gradient.items()}


def same(a, b, rtol=1e-12):
    return all(np.allclose(a[k], b[k], rtol=rtol, atol=1e-12) for k in b)


@pytest.mark.parametrize("options", [{}, {"half_step": True}, {"error_feedback": False}], ids=repr)
def test_it_is_clipping_by_hand(options):
    """Of each replica by itself, over all tensors, the uncompressed ones too."""
    clips, plain = PowerSGD(2, max_norm=20.0, **options), PowerSGD(2, **options)
    ours, by_hand, unclipped = (
        Simulator(algorithm, SHAPES, replicas=3) for algorithm in (clips, plain, plain)
    )
    rng = np.random.default_rng(0)
    for _ in range(5):
        step = gradients(rng, scales=(0.5, 1.0, 8.0))
        assert norm(step[0]) < 20 < norm(step[2])
        average = ours.step(step)
        assert same(average, by_hand.step([clipped(g, 20.0) for g in step]))
        assert not same(average, unclipped.step(step), rtol=0.1)
    for a, b in zip(ours.states, by_hand.states, strict=True):
        assert all(same(a.tensors[name], b.tensors[name]) for name in b.tensors)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_factor_beyond_half_precision(dtype):
    """1e-6 has hardly a digit in float16."""
    simulator = Simulator(PowerSGD(1, max_norm=1e-2), {"w": (40, 40)}, replicas=1, dtype=dtype)
    average = simulator.step([{"w": np.full((40, 40), 500.0)}])["w"].astype(np.float64)
    assert np.linalg.norm(average) == pytest.approx(1e-2, rel=5e-3)


@pytest.mark.parametrize(
    ("algorithm", "filled"),
    [
        (PowerSGD(2), {(0, "w"): INF, (1, "w"): -INF}),  # opposite infinities do not cancel
        # Finite on every replica, but not its product with the factor; finite in float32, beyond
        # 65504.
        (PowerSGD(2, min_compression_rate=0.1), {(r, "w"): 3e38 for r in range(3)}),
        (WireDtype(PowerSGD(2), "float16"), {(1, "w"): 1e6}),
        (WireDtype(PowerSGD(2), "float16"), {(1, "b"): 1e6}),
        (PowerSGD(2, half_step=True), {(1, "b"): np.nan}),  # alone, it stops the phase
        (PowerSGD(2, state_dtype="float64"), {(2, "scalar"): -INF}),
        (WireDtype(PowerSGD(2), "bfloat16"), {(0, "conv"): np.nan}),
        # What is not finite, or has a norm that overflows, is not clipped to something that is:
        # here and in every other tensor.
        *(
            (PowerSGD(2, max_norm=1.0), {(1, name): x})
            for name, x in (("w", INF), ("b", -INF), ("scalar", np.nan))
        ),
        (PowerSGD(2, max_norm=1.0), {(0, name): 1e25 for name in SHAPES}),
    ],
)
def test_all_replicas_skip_it_with_no_more_messages(algorithm, filled):
    rng = np.random.default_rng(0)
    simulator = Simulator(algorithm, SHAPES, replicas=3, dtype="float32")
    simulator.step(gradients(rng))
    before = [state.map(lambda x: x.tobytes()) for state in simulator.states]  # -0.0 is not 0.0
    averages = simulator.step(gradients(rng, filled))
    clips = getattr(algorithm, "max_norm", None) is not None
    assert all(
        np.isnan(averages[name]).all()
        for name in (SHAPES if clips else simulator.states[0].tensors)
    )
    assert not any(np.isfinite(averages[name]).any() for _, name in filled)
    assert [state.map(lambda x: x.tobytes()) for state in simulator.states] == before
    traffic = simulator.traffic
    assert all(np.isfinite(g).all() for g in simulator.step(gradients(rng)).values())
    assert simulator.traffic == traffic


#: What becomes of every third gradient: one that is finite, and so large that the error which it
#: leaves may overflow in a later step.
OUTLIERS = {"row": np.s_[3], "column": np.s_[:, 5], "all": np.s_[:]}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "algorithm",
    [
        PowerSGD(2),
        PowerSGD(2, half_step=True),
        WireDtype(PowerSGD(2, half_step=True), "int8"),
        TwoLevel(PowerSGD(2, half_step=True), within=2),
        PowerSGD(2, warm_start=False),
        Sign(),
        Quantize("int4"),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_training_goes_on_after_outliers(algorithm, dtype):
    """A step that is not finite leaves the error as it is, and it may be the error that is not
    sent."""
    largest = float(np.finfo(dtype).max)
    for (kind, where), seed in itertools.product(OUTLIERS.items(), (0, 1, 3)):
        rng = np.random.default_rng([seed, *kind.encode()])
        simulator = Simulator(algorithm, {"w": (32, 32)}, replicas=4, dtype=dtype)
        for step in range(13):
            given = [{"w": (0.01 * rng.normal(size=(32, 32))).astype(dtype)} for _ in range(4)]
            if 4 <= step < 10:
                size = largest * rng.choice([1.0, 0.5, 0.1])
                for g in given[: 4 if seed % 2 else 1]:
                    g["w"][where] = size * (
                        rng.choice([-1, 1], (32, 32))[where] if seed % 3 == 0 else 1
                    )
            average = simulator.step(given)["w"]
        assert np.isfinite(average).all(), (kind, seed)


@pytest.mark.parametrize(("dtype", "replicas", "largest"), [("int4", 64, 6e4), ("int2", 16, 2e4)])
def test_errors_of_quantized_float16_gradients_stay_finite(dtype, replicas, largest):
    """Where the second rounding, times the number of replicas, is beyond float16."""
    shapes = {"m": (64, 128), "scalar": ()}
    simulator = Simulator(Quantize(dtype), shapes, replicas, dtype="float16", ops=PoisonOps())
    rng = np.random.default_rng(0)
    for _ in range(2):
        gradients = rng.uniform(-largest, largest, (replicas, 64, 128)).astype(np.float16)
        with np.errstate(over="ignore"):
            given = [{"m": each, "scalar": each[0, 0]} for each in gradients]
            average = simulator.step(given)["m"]
        assert np.isfinite(average).all()
        errors = [state.tensors["m"]["error"] for state in simulator.states]
        assert all(np.isfinite(error).all() for error in errors)
        assert any((error == 0).any() for error in errors)
        largest = 100.0  # the errors are near the largest number by now
