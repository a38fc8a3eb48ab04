"""A step with an inf or NaN: what `gradwire.testing.check` asks of every method, and the soak of random ones, in places where it is easily lost."""

import itertools

import numpy as np
import pytest

from gradwire import AllReduce, PowerSGD, Quantize, Sign, Simulator, TwoLevel, WireDtype

SHAPES = {"w": (12, 10), "conv": (8, 3, 4), "b": (12,), "scalar": ()}
INF = np.inf


def gradients(rng, filled=()):
    """Random ones of three replicas; `filled`: (replica, name) → the number in all places."""
    step = [{k: rng.normal(size=s) for k, s in SHAPES.items()} for _ in range(3)]
    for (replica, name), value in dict(filled).items():
        step[replica][name] = np.full(SHAPES[name], value)
    return step


@pytest.mark.parametrize(
    ("algorithm", "filled"),
    [
        (PowerSGD(2), {(0, "w"): INF, (1, "w"): -INF}),  # opposite infinities do not cancel
        # Finite on every replica, but not its product with the factor; finite in float32, beyond 65504.
        (PowerSGD(2, min_compression_rate=0.1), {(r, "w"): 3e38 for r in range(3)}),
        (WireDtype(PowerSGD(2), "float16"), {(1, "w"): 1e6}),
        (WireDtype(PowerSGD(2), "float16"), {(1, "b"): 1e6}),
        (PowerSGD(2, half_step=True), {(1, "b"): np.nan}),  # alone, it stops the phase
        (PowerSGD(2, state_dtype="float64"), {(2, "scalar"): -INF}),
        (WireDtype(PowerSGD(2), "bfloat16"), {(0, "conv"): np.nan}),
    ],
)
def test_all_replicas_skip_it_with_no_more_messages(algorithm, filled):
    rng = np.random.default_rng(0)
    simulator = Simulator(algorithm, SHAPES, replicas=3, dtype="float32")
    simulator.step(gradients(rng))
    before = [state.map(lambda x: x.tobytes()) for state in simulator.states]  # -0.0 is not 0.0
    averages = simulator.step(gradients(rng, filled))
    assert all(np.isnan(averages[name]).all() for name in simulator.states[0].tensors)
    assert not any(np.isfinite(averages[name]).any() for _, name in filled)
    assert [state.map(lambda x: x.tobytes()) for state in simulator.states] == before
    traffic = simulator.traffic
    assert all(np.isfinite(g).all() for g in simulator.step(gradients(rng)).values())
    assert simulator.traffic == traffic


@pytest.mark.parametrize("algorithm", [AllReduce(), PowerSGD(2, start_step=9)], ids=repr)
def test_an_uncompressed_step_passes_the_bad_number_on(algorithm):
    step = gradients(np.random.default_rng(0))
    step[2]["b"][4] = np.nan
    averages = Simulator(algorithm, SHAPES, replicas=3).step(step)
    assert np.isnan(averages["b"]).sum() == 1
    assert np.isfinite(averages["w"]).all()


#: What becomes of every third gradient: one that is finite, and so large that the error which it leaves may overflow in a later step.
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
    """A step that is not finite leaves the error as it is, and it may be the error that is not sent."""
    largest = float(np.finfo(dtype).max)
    for (kind, where), seed in itertools.product(OUTLIERS.items(), (0, 1, 3)):
        rng = np.random.default_rng([seed, *kind.encode()])
        simulator = Simulator(algorithm, {"w": (32, 32)}, replicas=4, dtype=dtype)
        for step in range(13):
            given = [{"w": (0.01 * rng.normal(size=(32, 32))).astype(dtype)} for _ in range(4)]
            if 4 <= step < 10:
                size = largest * rng.choice([1.0, 0.5, 0.1])
                for g in given[: 4 if seed % 2 else 1]:
                    g["w"][where] = size * (rng.choice([-1, 1], (32, 32))[where] if seed % 3 == 0 else 1)
            average = simulator.step(given)["w"]
        assert np.isfinite(average).all(), (kind, seed)
