"""`PowerSGD` is the paper's algorithm, as one screen of NumPy has it: step by step the same averages and the same errors."""

import runpy

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import PowerSGD, Simulator
from tests.examples.conftest import EXAMPLES, examples_importable

with examples_importable():
    from power_sgd_on_one_screen import power_sgd, side_by_side

STEPS = 5


@settings(max_examples=25)
@given(
    n=st.integers(4, 20),
    m=st.integers(4, 20),
    rank=st.integers(1, 4),
    replicas=st.integers(1, 3),
    signal=st.sampled_from(["full rank", "lower rank", "zero"]),
    seed=st.integers(0, 99),
)
def test_gradwire_computes_what_is_on_the_screen(n, m, rank, replicas, signal, seed):
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(n, max(1, rank - 1)))  # the same on all replicas: of a lower rank are their averages, too

    def gradient():
        if signal == "lower rank":
            return left @ rng.normal(size=(left.shape[1], m))
        return rng.normal(size=(n, m)) * (signal == "full rank")

    given = [[{"w": gradient(), "b": rng.normal(size=n)} for _ in range(replicas)] for _ in range(STEPS)]
    simulator = Simulator(PowerSGD(rank, min_compression_rate=1e-3), {"w": (n, m), "b": (n,)}, replicas)
    q = simulator.states[0].tensors["w"]["q"].T.copy()
    seen = [[] for _ in range(replicas)]

    def train(replica, all_reduce_mean):
        errors, qs = {"w": np.zeros((n, m))}, {"w": q}
        for step in range(STEPS):
            averages = power_sgd(given[step][replica], errors, qs, all_reduce_mean)
            seen[replica].append({**averages, "error": errors["w"]})

    side_by_side(replicas, train)
    for step in range(STEPS):
        averages = simulator.step(given[step])
        for state, expected in zip(simulator.states, [own[step] for own in seen], strict=True):
            for name in ("w", "b"):
                np.testing.assert_allclose(averages[name], expected[name], rtol=0, atol=1e-9)
            np.testing.assert_allclose(state.tensors["w"]["error"], expected["error"], rtol=0, atol=1e-9)


def test_it_converges(capsys):
    runpy.run_path(str(EXAMPLES / "power_sgd_on_one_screen.py"), run_name="__main__")
    errors = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert errors[0] == 1
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02
