import numpy as np
import pytest

from gradwire import AllReduce, PowerSGD, Quantize, Simulator, TopK, WireDtype, plan
from gradwire.core.algorithms.two_level import TwoLevel
from gradwire.testing import check

SHAPES = {"a": (24, 16), "b": (24,), "c": (12, 4, 3, 3), "d": (3, 8, 10), "e": (), "f": (30, 20), "none": (0, 4)}
UNEVEN = {"large": (96, 24), "small": (12, 10), "bias": (12,)}
def gradients(replicas, step=0, shapes=SHAPES):
    return [{n: np.random.default_rng([r, step, *n.encode()]).normal(size=s) for n, s in shapes.items()} for r in range(replicas)]
def of_nodes(given, near):
    return [{n: np.mean([given[r][n] for r in members], axis=0) for n in given[0]} for members in near]
@pytest.mark.parametrize(("nodes", "within"), [(2, 2), (2, 3), (1, 2), (3, 1)])
def test_mean(nodes, within):
    given = gradients(nodes * within)
    averages = Simulator(TwoLevel(AllReduce(), within), SHAPES, nodes * within).step(given)
    for name, x in averages.items():
        np.testing.assert_allclose(x, np.mean([g[name] for g in given], axis=0), rtol=1e-12, atol=1e-12)
@pytest.mark.parametrize("shapes", [SHAPES, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("algorithm", [PowerSGD(2), PowerSGD(2, half_step=True, start_step=1), PowerSGD(2, warm_start=False, max_norm=20.0),
    TopK(8, per=64), Quantize("int8", block=8), WireDtype(PowerSGD(2), "bfloat16"), WireDtype(AllReduce(), "int8"), WireDtype(PowerSGD(2), "int8")], ids=repr)
def test_oracle(algorithm, shapes):
    near = ((0, 2), (3, 1))
    two, one = Simulator(TwoLevel(algorithm, near), shapes, 4), Simulator(algorithm, shapes, 2)
    for step in range(4):
        given = gradients(4, step, shapes)
        mine, theirs = two.step(given), one.step(of_nodes(given, near))
        for name in shapes:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-9, atol=1e-9)
@pytest.mark.parametrize("name", ["a", "c", "f"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_nonfinite(name, bad):
    sim = Simulator(TwoLevel(PowerSGD(2, half_step=True), 2), SHAPES, 4)
    sim.step(gradients(4)); before = [s.map(np.array) for s in sim.states]
    given = gradients(4, 1); given[3][name].flat[0] = bad
    assert not np.isfinite(sim.step(given)[name]).all()
    for mine, theirs in zip(sim.states, before, strict=True):
        np.testing.assert_equal(mine.shared, theirs.shared); np.testing.assert_equal(mine.tensors, theirs.tensors)
@pytest.mark.parametrize("algorithm", [PowerSGD(2, start_step=2), AllReduce(), Quantize("int8"), TopK(8, per=64)], ids=repr)
def test_promises(algorithm):
    check(TwoLevel(algorithm, 2), UNEVEN, world_sizes=(2,))
def test_bytes():
    p = plan(SHAPES, TwoLevel(PowerSGD(2), 2), world_size=6, dtype="float32"); flat = plan(SHAPES, PowerSGD(2), dtype="float32")
    from gradwire import Spec
    from gradwire.core.plan.dry_run import dry_run
    two = TwoLevel(PowerSGD(2), 2)
    t = dry_run(two, {n: Spec(s) for n, s in SHAPES.items()}, 6).cycle[0].traffic
    near = t.in_groups(two.near(6)); far = t.in_groups(tuple(zip(*two.near(6))))
    print(near, far, 2*far[1], flat.wire_bytes, p.dense_bytes)
    assert abs(2 * far[1] - flat.wire_bytes) < 128
