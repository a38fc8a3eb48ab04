"""Small matrices of one shape, computed with as stacks: each comes out as it does in the simulator, which knows of no stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire
from gradwire import PowerSGD
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.jax_backend import average_gradients
from gradwire.jax_backend.ops.batched_small import PART, STACK_BYTES, bundles_of
from tests.bounds import relative
from tests.jax.replicas import AXIS, Replicas, gradients

#: Nine of one shape, so many that they are unstacked in the way of many; tensors that are stacks themselves, and of several axes.
SHAPES = {
    **{f"m{i}": (16, 12) for i in range(9)},
    **{f"s{i}": (2, 16, 12) for i in range(2)},
    **{f"t{i}": (8, 2, 6) for i in range(2)},
    "alone": (12, 16),
    "bias": (16,),
}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def power(**options):
    return PowerSGD(**{"rank": 2, "min_compression_rate": 1.0, "stacked": {"s*": 1}, "transpose": ("t*",)} | options)


#: An error that decays is added to gradients at once, to small ones that would be a stack and to large ones, which are else multiplied without it.
DECAYS = power(error_feedback=0.5)
LARGE = {"large": (256, 256), "s_large": (2, 128, 256), "t_large": (256, 2, 128)}


def joined(algorithm):
    """The stacks of a step."""
    found = []

    def update(g, state):
        tensors = {n: {k: jnp.asarray(x, jnp.float32) for k, x in own.items()} for n, own in state.tensors.items()}
        alike = {
            n: algorithm.alike(n, SHAPES[n], {k: x for k, x in own.items() if k != "error"})
            for n, own in tensors.items()
        }
        found.append(bundles_of(g, tensors, alike.get, 1 << 16))
        return g

    specs = {name: gradwire.Spec(shape) for name, shape in SHAPES.items()}
    state = algorithm.init(NumpyOps(), specs)
    jax.eval_shape(lambda g: update(g, state), PARAMS)
    return set() if found[0] is None else set(found[0].names.values())


def test_what_is_joined():
    assert joined(power()) == {tuple(f"m{i}" for i in range(9)), ("s0", "s1"), ("t0", "t1")}
    # Of another rank, or of another view, they are not alike; with random factors each is drawn by its own name.
    assert tuple(f"m{i}" for i in range(1, 9)) in joined(power(rank={"m0": 1, "*": 2}))
    assert joined(power(rank={"*0": 2, "*": 0})) == set()
    assert joined(power(warm_start=False)) == set()


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        (power(), "pmap"),
        pytest.param(power(rank=5, half_step=True), "shard_map_vma", marks=pytest.mark.slow),
        pytest.param(DECAYS, "pmap", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_they_follow_the_simulator(algorithm, mode):
    rank = algorithm.rank
    assert isinstance(rank, int)
    shapes = SHAPES | (LARGE if algorithm in (DECAYS, power()) else {})
    oracle = gradwire.Simulator(algorithm, shapes, 2)
    run = Replicas(average_gradients(algorithm, axis_name=AXIS), {n: jnp.zeros(s) for n, s in shapes.items()}, 2, mode)
    for step in range(6):
        given = gradients(shapes, step, 2, rank)
        if step == 0:  # their factors are lost, and drawn anew by the name of each
            given = [own | {name: np.zeros((16, 12), np.float32) for name in ("m3", "m5")} for own in given]
        if step == 3:
            given[1]["m4"] = given[1]["m4"] * np.nan
        before = run.global_state().local.per_replica["error"]
        expected, got = oracle.step(given), run.update(given)
        error = run.global_state().local.per_replica["error"]
        for name in oracle.states[0].tensors:
            if step == 3:
                assert not np.isfinite(got[name]).any()
                assert np.array_equal(error[name], before[name])
                continue
            assert relative(got[name], expected[name]) <= 1e-4
            for replica, state in enumerate(oracle.states):
                kept = state.tensors[name]["error"]
                assert relative(error[name][replica], kept) <= 3e-4


def test_stacks_are_of_bounded_size_and_of_equal_length():
    """Those of one length share what is compiled."""
    names = [f"{i}" for i in range(24)]
    arrays = {n: jax.ShapeDtypeStruct((256, 255), jnp.float32) for n in names}
    found = []

    def traced(g):
        found.append(bundles_of(g, {n: {"error": x} for n, x in g.items()}, lambda name: "", 1 << 16))
        return g

    jax.eval_shape(traced, arrays)
    lengths = [len(members) for members in found[0].names.values()]
    assert sum(lengths) == 24
    assert len(set(lengths)) == 1
    assert max(lengths) * 256 * 255 * 4 <= max(STACK_BYTES, 24 * 256 * 255 * 4 // PART)
