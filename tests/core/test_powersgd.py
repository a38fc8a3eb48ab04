"""PowerSGD against the paper's algorithm in float64 with QR; its options, its orthonormalization
against SVD and QR, and its random numbers."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.epfml import HalfSteps
from gradwire import AllReduce, PowerSGD, Quantize, Sign, Simulator, TopK, TwoLevel, WireDtype, plan
from gradwire.core.kernels import random
from gradwire.core.kernels.gram_schmidt import gram_schmidt, refresh
from gradwire.core.protocol.local_requests import Orthonormalize
from gradwire.core.protocol.reductions import Reduce
from gradwire.core.simulate import NumpyOps

STEPS = 6
OPS = NumpyOps()
seeds = st.integers(0, 2**32 - 1)
worlds = st.integers(1, 4)
ranks = st.integers(1, 6)
#: Compresses whatever is a matrix: the reference below has no rule about sizes.
ALWAYS = {"min_compression_rate": 1e-3}


def gradients_of(seed, shape, world, steps=STEPS):
    """[step][replica]: one part common to all replicas and steps, one common to all steps, one of
    its own."""
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=shape), rng.normal(size=(world, *shape))
    return [[common + own[r] + rng.normal(size=shape) for r in range(world)] for _ in range(steps)]


def simulate(algorithm, gradients):
    """The averaged gradients and the errors of all replicas, step by step."""
    shape = gradients[0][0].shape
    simulator = Simulator(algorithm, {"w": shape}, replicas=len(gradients[0]))
    start = {k: v.copy() for k, v in simulator.states[0].tensors["w"].items()}
    trace = []
    for step in gradients:
        average = simulator.step([{"w": g} for g in step])["w"]
        trace.append((average, [s.tensors["w"].get("error") for s in simulator.states]))
    return start, trace


def transmit(inputs, q):
    """Algorithm 1 of the paper: inputs (n, m) of all replicas and Q (m, r) to P, each replica's Q,
    and the mean Q."""
    p = np.linalg.qr(np.mean([m @ q for m in inputs], axis=0))[0]
    local = [m.T @ p for m in inputs]
    return p, local, np.mean(local, axis=0)


def powersgd(gradients, q, *, remembers=True, fresh=None, present=1.0):
    """Updates and errors. `q` (m, r) of the first step; `fresh(step)` draws it anew for each.
    `present`: 0 where a matrix is filled up."""
    errors, trace = [np.zeros_like(g) for g in gradients[0]], []
    for step, local in enumerate(gradients):
        inputs = [g + e for g, e in zip(local, errors, strict=True)]
        p, own, mean_q = transmit(inputs, fresh(step) if fresh else q)
        if remembers:
            errors = [present * (m - p @ o.T) for m, o in zip(inputs, own, strict=True)]
        trace.append((p @ mean_q.T * present, errors))
        q = mean_q
    return trace


def half_steps(gradients, q, *, present=1.0):
    """The two factors in turn, of which the other one's basis is known to everyone."""
    p, errors, trace = None, [np.zeros_like(g) for g in gradients[0]], []
    for step, local in enumerate(gradients):
        inputs = [g + e for g, e in zip(local, errors, strict=True)]
        basis = np.linalg.qr(p if step % 2 else q)[0]
        if step % 2 == 0:
            sent = [m @ basis @ basis.T for m in inputs]
            p = np.mean([m @ basis for m in inputs], axis=0)
        else:
            sent = [basis @ basis.T @ m for m in inputs]
            q = np.mean([m.T @ basis for m in inputs], axis=0)
        errors = [present * (m - s) for m, s in zip(inputs, sent, strict=True)]
        trace.append((np.mean(sent, axis=0) * present, errors))
    return trace


def assert_same(trace, expected, *, errors=True, tolerance=1e-9):
    scale = tolerance * max(np.abs(u).max() for u, _ in expected)
    for (update, error), (expected_update, expected_error) in zip(trace, expected, strict=True):
        np.testing.assert_allclose(update, expected_update, rtol=0, atol=scale)
        if errors:
            np.testing.assert_allclose(error, expected_error, rtol=0, atol=scale)


@st.composite
def views(draw):
    """A shape, the options of a view, and the matrices of a tensor as they are cut out by hand."""
    if draw(st.booleans()):
        shape = draw(
            st.lists(st.integers(1, 6), min_size=1, max_size=4)
            .map(tuple)
            .filter(lambda s: np.prod(s) >= 4)
        )
        side = int(np.ceil(np.sqrt(np.prod(shape))))
        return (
            shape,
            {"square": True},
            lambda x: [np.pad(x.ravel(), (0, side**2 - x.size)).reshape(side, side)],
        )
    shape = draw(
        st.lists(st.integers(2, 5), min_size=2, max_size=4).map(tuple)
        | st.tuples(*[st.integers(2, 24)] * 2)
    )
    stacked = draw(st.integers(0, len(shape) - 2))
    rows, transposed = draw(st.integers(1, len(shape) - stacked - 1)), draw(st.booleans())
    count, n = (int(np.prod(shape[a:b])) for a, b in ((0, stacked), (stacked, stacked + rows)))
    options = {"stacked": {"w": stacked}, "rows": {"w": rows}, "transpose": ("w",) * transposed}
    return shape, options, lambda x: [m.T if transposed else m for m in x.reshape(count, n, -1)]


OPTIONS = [{}, {"half_step": True}, {"error_feedback": False}, {"warm_start": False}]


@settings(max_examples=100)
@given(seeds, views(), worlds, ranks, st.sampled_from(OPTIONS))
def test_a_tensor_is_its_matrices_each_as_in_the_paper(seed, view, world, rank, options):
    """Every factor that is drawn is that of its name, and of its step without a warm start. epfml's
    form of the error gives the same updates."""
    shape, seen, cut = view
    gradients = gradients_of(seed, shape, world)
    start, trace = simulate(PowerSGD(rank, seed=7, **seen, **options, **ALWAYS), gradients)
    remembers, key, inside = (
        "error_feedback" not in options,
        random.key(7, "w/q"),
        cut(np.ones(shape)),
    )
    factors = len(inside), min(rank, *inside[0].shape), inside[0].shape[1]
    for i, present in enumerate(inside):

        def fresh(step, i=i):
            return random.uniform(OPS, key, factors, step)[i].astype(float).T

        own = [[cut(g)[i] for g in local] for local in gradients]
        mine = [
            (cut(update)[i], [cut(e)[i] for e in errors] if remembers else errors)
            for update, errors in trace
        ]
        if "q" in start:
            np.testing.assert_array_equal(start["q"].reshape(factors)[i].T, fresh(None))
        if "half_step" in options:
            expected = half_steps(own, fresh(None), present=present)
            if "square" not in seen:  # which fills matrices up
                epfml = HalfSteps({"w": present.shape}, world, factors[1], seed=0)
                epfml.q = {"w": fresh(None)}
                assert_same(
                    mine,
                    [(epfml([{"w": g} for g in local])["w"], None) for local in own],
                    errors=False,
                )
        else:
            drawn = None if "q" in start else fresh
            expected = powersgd(own, fresh(None), remembers=remembers, fresh=drawn, present=present)
        assert_same(mine, expected, errors=remembers)


def test_a_stack_is_one_request_of_each_kind():
    shapes = {"layers": (12, 20, 16), "bias": (12, 16), "w": (20, 16)}
    simulator = Simulator(PowerSGD(2, stacked={"layers": 1, "bias": 1}), shapes, replicas=2)
    simulator.step([{k: np.ones(s) for k, s in shapes.items()}] * 2)
    sent = [[a.shape for a in r.arrays] for r in simulator.requests if isinstance(r, Reduce)]
    # The biases are twelve vectors and travel as they are.
    assert sent == [[(12, 2, 20), (2, 20), (12, 16)], [(12, 2, 16), (2, 16)]]
    orthonormalized = [
        [a.shape for a in r.arrays] for r in simulator.requests if isinstance(r, Orthonormalize)
    ]
    assert orthonormalized == [[(12, 2, 16), (2, 16)], [(12, 2, 20), (2, 20)]]


@pytest.mark.parametrize("half_step", [False, True])
@pytest.mark.parametrize(
    "poor", [np.zeros((16, 12)), np.outer(np.arange(16.0), np.ones(12))], ids=["zero", "rank 1"]
)
def test_directions_lost_to_a_poor_gradient_come_back(half_step, poor):
    """The surplus directions of the factor are drawn anew; power iteration never would."""
    rng = np.random.default_rng(0)
    rich = rng.normal(size=(16, 3)) @ rng.normal(size=(3, 12))
    simulator = Simulator(
        PowerSGD(3, half_step=half_step, error_feedback=False), {"w": (16, 12)}, replicas=2
    )
    for matrix, steps in ((poor, 4), (rich, 4 if half_step else 1)):
        for _ in range(steps):
            result = simulator.step([{"w": matrix}] * 2)["w"]
        np.testing.assert_allclose(result, matrix, atol=1e-9)


@example((4, 4), 1, 2)  # (4 + 4) * 1 * 2 = 16 is not less than 16
@given(
    st.lists(st.integers(0, 40), max_size=4).map(tuple),
    st.integers(1, 8),
    st.sampled_from([1, 2, 3]),
)
def test_a_tensor_is_compressed_iff_it_shrinks_by_more_than_the_rate(shape, rank, rate):
    # Of all the ways to cut the axes in two, the one with the smallest factors, and of those the
    # first.
    cuts = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))]
    n, m = min(cuts, key=sum, default=(1, 1))
    r = min(n, m, rank)
    expected = r if 0 < (n + m) * r * rate < n * m else 0
    assert PowerSGD(rank, min_compression_rate=rate).rank_of("w", shape) == expected


@pytest.mark.parametrize(
    ("size", "side"), [(1, 1), (4, 2), (5, 3), (10, 4), (2**40, 2**20), (2**40 + 1, 2**20 + 1)]
)
def test_square_is_the_smallest_that_holds_the_tensor(size, side):
    for rate, rank in (
        (1e-9, 1),
        (0.999, 1),
        (1.0, 0),
    ):  # of (side + side) * 1 * rate < size the last fails by equality
        found = PowerSGD(1, square=True, min_compression_rate=rate * size / (2 * side)).rank_of(
            "w", (size,)
        )
        assert found == rank


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        ({"layers.*": 2, "embed.weight": 3}, [3, 2, 2, 0]),
        ({"layers.1.*": 1, "layers.*": 2, "*": 4}, [4, 2, 1, 4]),
        ({"layers.*": 2, "layers.1.*": 1}, [0, 2, 2, 0]),
        ({"embed*": 0, "*": 4}, [0, 4, 4, 4]),
        ({"*.[01].*": 2}, [0, 2, 2, 0]),
        ({}, [0, 0, 0, 0]),
    ],
)
def test_the_first_pattern_that_matches_decides_and_the_unmatched_stay_dense(rank, expected):
    shapes = dict.fromkeys(
        ["embed.weight", "layers.0.weight", "layers.1.weight", "head.weight"], (40, 30)
    )
    tensors = Simulator(PowerSGD(rank), shapes, replicas=1).states[0].tensors
    assert [len(tensors[name]["q"]) if name in tensors else 0 for name in shapes] == expected


def test_options_are_keywords_fixed_hashed_and_shown_where_they_were_changed():
    with pytest.raises(TypeError):
        PowerSGD(4, 1000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PowerSGD(4).rank = 5
    one, other = (
        PowerSGD({"*": 2}, stacked={"a": 1}, rows={"a": n}, transpose=["a"]) for n in (1, 2)
    )
    assert len({one, dataclasses.replace(one), other}) == 2
    assert (
        repr(PowerSGD(rank={"*": 2}, half_step=True, seed=0))
        == "PowerSGD(rank={'*': 2}, half_step=True)"
    )
    # A decay of 1 is none at all, so that a state of the one is one of the other.
    assert (
        repr(PowerSGD(2, error_feedback=1.0))
        == repr(PowerSGD(2, error_feedback=1))
        == "PowerSGD(rank=2)"
    )
    assert repr(PowerSGD(2, error_feedback=0.95)) == "PowerSGD(rank=2, error_feedback=0.95)"


def test_epsilon_shortens_the_basis():
    """In a basis whose vectors have length c < 1, a matrix of low enough rank comes out as c
    squared times itself."""
    matrix = np.outer([0, 3.0, 4.0, 0, 0], np.ones(6))
    # P is (3, 4)/5 up to the factor 6 q·1; scaled to a largest element of 1 it has norm 5/4, so c =
    # 1.25 / (1.25 + 0.25).
    algorithm = PowerSGD(1, orthogonalization_epsilon=0.25, error_feedback=False)
    result = Simulator(algorithm, {"w": (5, 6)}, replicas=2).step([{"w": matrix}] * 2)["w"]
    np.testing.assert_allclose(result, matrix * (1.25 / 1.5) ** 2, atol=1e-12)


def orthonormal(x, epsilon=0.0):
    """Rows of one matrix."""
    return gram_schmidt(OPS, np.asarray(x)[None], epsilon)[0]


def with_conditioning(rng, r, n, conditioning):
    """(r, n) in float64 with the singular values 1, …, 1/conditioning."""
    left, _ = np.linalg.qr(rng.normal(size=(r, r)))
    right, _ = np.linalg.qr(rng.normal(size=(n, r)))
    return (left * np.geomspace(1, 1 / conditioning, r)) @ right.T


def gram(rows):
    rows = rows.astype(np.float64)
    return rows @ rows.T


def assert_zero_or_orthonormal(rows, tolerance=1e-5):
    kept = np.diag((np.abs(rows).max(axis=-1, initial=0) > 0).astype(float))
    np.testing.assert_allclose(gram(rows), kept, rtol=0, atol=tolerance)


sizes = st.tuples(st.integers(1, 16), st.integers(1, 200)).filter(lambda s: s[0] <= s[1])
conditionings = st.floats(0, 6).map(lambda e: 10**e)


@given(sizes, seeds, conditionings, st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_float32_rows_are_orthonormal_at_any_conditioning_and_scale(
    size, seed, conditioning, scale
):
    rng = np.random.default_rng(seed)
    x = (with_conditioning(rng, *size, conditioning) * scale).astype(np.float32)
    rows = orthonormal(x)
    assert rows.dtype == np.float32
    assert_zero_or_orthonormal(rows)
    # A row's part orthogonal to the others is at least the smallest singular value: far above what
    # counts as dependent.
    if conditioning <= 1e5:
        assert (np.diag(gram(rows)) > 0.5).all()
    # Nothing is lost: every row of x lies in the span.
    x = x.astype(np.float64) / scale
    outside = x - x @ rows.T.astype(np.float64) @ rows.astype(np.float64)
    assert (np.linalg.norm(outside, axis=1) <= 2e-6 * np.linalg.norm(x, axis=1)).all()


@given(sizes, seeds, st.floats(0, 3).map(lambda e: 10**e))
def test_float64_rows_are_those_of_qr(size, seed, conditioning):
    x = with_conditioning(np.random.default_rng(seed), *size, conditioning)
    q, r = np.linalg.qr(x.T)
    expected = (q * np.sign(np.diag(r))).T
    np.testing.assert_allclose(orthonormal(x), expected, rtol=0, atol=1e-12 * conditioning)


@given(st.integers(1, 40), seeds)
def test_dependent_rows_become_zero(n, seed):
    rng = np.random.default_rng(seed)
    a, b = np.eye(2, n + 1) + 0.1 * rng.uniform(-1, 1, size=(2, n + 1))
    x = np.stack([a, a, 0 * a, b, a + b, -3 * a, 2 * a - b]).astype(np.float32)
    rows = orthonormal(x)
    assert_zero_or_orthonormal(rows)
    np.testing.assert_array_equal(
        np.abs(rows).max(axis=1) > 0, [True, False, False, True, False, False, False]
    )


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_rank_deficient_input_of_any_kind_is_finite_and_the_same_each_time(n):
    rng = np.random.default_rng(0)
    sizes = [0, 1, 1e-30, 1e30, 1e-45, 3e38]
    low = [
        rng.normal(size=(4, 1)) * rng.normal(size=n),
        rng.normal(size=(4, 2)) @ rng.normal(size=(2, n)),
    ]
    for x in (
        *(np.full((4, n), size) for size in sizes),
        *low,
        rng.normal(size=(4, n)) * [[1e30], [1e-30], [1], [0]],
    ):
        rows = orthonormal(x.astype(np.float32))
        assert_zero_or_orthonormal(rows)
        np.testing.assert_array_equal(rows, orthonormal(x.astype(np.float32)))


@given(st.sampled_from([np.nan, np.inf, -np.inf]), seeds, st.integers(0, 3))
def test_a_row_that_is_not_finite_becomes_zero_and_spoils_no_other(bad, seed, where):
    x = np.random.default_rng(seed).normal(size=(4, 9)).astype(np.float32)
    broken, blank = x.copy(), x.copy()
    broken[where, seed % 9] = bad
    blank[where] = 0
    with np.errstate(invalid="ignore"):
        rows = orthonormal(broken)
    np.testing.assert_array_equal(rows, orthonormal(blank))
    np.testing.assert_array_equal(rows[where], 0)


@given(st.sampled_from([("bfloat16", 2e-2), ("float16", 3e-3)]), sizes, seeds)
def test_half_precision_is_computed_in_float32_and_rounded_once(half, size, seed):
    dtype, tolerance = half
    x = np.random.default_rng(seed).normal(size=size).astype(dtype)
    rows = orthonormal(x)
    assert rows.dtype.name == dtype
    np.testing.assert_array_equal(rows, orthonormal(x.astype(np.float32)).astype(dtype))
    assert_zero_or_orthonormal(rows.astype(np.float32), tolerance)


@pytest.mark.parametrize("shape", [(1, 0, 3), (2, 3, 0), (0, 2, 3)])
def test_empty_matrices_stay_empty(shape):
    assert gram_schmidt(OPS, np.zeros(shape)).shape == shape


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_refresh_replaces_only_negligible_rows(scale, dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3, 4, 8)) * scale).astype(dtype)
    fresh = rng.uniform(-1, 1, size=(3, 4, 8)).astype(dtype)
    x[0, 1] = x[2] = 0
    x[0, 3] = x[0, 3] * np.asarray(1e-7, dtype)
    x[1, 0] = x[1, 0] * np.asarray(1e-3, dtype)  # small, not negligible
    expected = x.copy()
    expected[0, [1, 3]], expected[2] = fresh[0, [1, 3]], fresh[2]
    np.testing.assert_array_equal(refresh(OPS, x, fresh), expected)


WORD = 2**32


def lowbias32(x):
    """As its author prints it, on unsigned words."""
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ (x >> 16)


@given(
    st.integers(0, 2**63),
    st.text(max_size=20),
    st.integers(0, 2**31 - 1),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_numbers_are_the_hash_of_key_step_and_element(seed, name, step, shape):
    key = random.key(seed, name)
    assert -(2**31) <= key < 2**31
    numbers = random.uniform(OPS, key, tuple(shape), step)
    assert (numbers.dtype, numbers.shape) == (np.float32, tuple(shape))
    salt = lowbias32(lowbias32(step ^ key % WORD))
    for i, number in enumerate(numbers.reshape(-1)):
        bits = lowbias32(lowbias32(i ^ key % WORD) ^ salt) >> 8
        assert float(number) == (2 * bits + 1) / 2**24 - 1


# Every new shape is compiled.
@pytest.mark.parametrize(
    ("seed", "shape", "step"), [(0, (), 0), (3, (4, 0), 7), (99, (3, 4, 5), 2**31 - 1)]
)
def test_the_bits_are_equal_in_numpy_torch_and_jax(seed, shape, step):
    import jax
    import torch

    from gradwire.jax_backend.ops.kernels import JaxOps
    from gradwire.torch_backend.ops.kernels import TorchOps

    key = random.key(seed, "layers.0.weight/q")
    expected = random.uniform(OPS, key, shape, step)
    assert expected.shape == shape
    in_torch = random.uniform(TorchOps(torch.device("cpu")), key, shape, step)
    in_jax = random.uniform(JaxOps(), key, shape, step)
    traced = jax.jit(lambda s: random.uniform(JaxOps(), key, shape, s))(np.int32(step))
    for numbers in (in_torch.numpy(), np.asarray(in_jax), np.asarray(traced)):
        assert numbers.dtype == np.float32
        np.testing.assert_array_equal(numbers.view(np.int32), expected.view(np.int32))


def test_keys_depend_on_seed_and_name():
    assert (
        len({random.key(seed, name) for seed in range(20) for name in ("", "a", "b", "a/q", "0/a")})
        == 100
    )


@pytest.mark.parametrize("options", [{}, {"half_step": True}, {"warm_start": False}], ids=str)
def test_factors_of_16_bits_are_summed_in_float32_by_more_replicas_than_64(options):
    method = PowerSGD(2, **options)

    def sent(replicas, algorithm=method, dtype="bfloat16"):
        return plan(
            {"w": (64, 32), "b": (64,)}, algorithm, dtype=dtype, world_size=replicas
        ).wire_bytes

    factors = (64 + 32) * 2 // (2 if options.get("half_step") else 1)
    assert [sent(replicas) for replicas in (2, 64, 65)] == [
        2 * factors + 128,
        2 * factors + 128,
        4 * factors + 128,
    ]
    assert sent(65, WireDtype(method, "bfloat16")) == pytest.approx(sent(64), rel=0.1)
    between = plan(
        {"w": (64, 32)}, TwoLevel(method, within=5), dtype="bfloat16", world_size=65
    ).levels[1]
    assert between.node_bytes == pytest.approx(2 * factors, rel=0.1)  # of 13 nodes
    assert sent(65, dtype="float32") == sent(2, dtype="float32")


@pytest.mark.parametrize("replicas", [65, pytest.param(512, marks=pytest.mark.slow)])
def test_the_average_of_many_replicas_in_16_bits_is_as_near_as_that_of_few(replicas):
    """Of a matrix of rank 1, all of which is sent, whose replicas differ by twice its size."""
    draw = np.random.default_rng(0)
    rows, columns = (
        draw.standard_normal((replicas, 64, 1)) * 2 + 1,
        draw.standard_normal((1, 1, 32)),
    )
    given = (rows * columns).astype("float16")
    simulator = Simulator(PowerSGD(2), {"w": (64, 32)}, replicas=replicas, dtype="float16")
    average = simulator.step([{"w": each} for each in given])["w"].astype("float64")
    right = given.astype("float64").mean(axis=0)
    assert np.linalg.norm(average - right) < 30 * 2**-11 * np.linalg.norm(right)


@pytest.mark.parametrize("replicas", [2, 64, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("algorithm", "bound"),
    [
        (WireDtype(AllReduce(), "int8"), 0.03),
        (TopK(4, per=64), None),
        (Sign(), None),
        (Quantize("int8"), 0.03),
    ],
    ids=repr,
)
def test_the_error_of_an_average_does_not_grow_with_the_replicas(algorithm, bound, replicas):
    """Against float64, of gradients that differ by as much as they have in common. What `TopK` and
    `Sign` give is no average: it is compared with their own in float64."""
    draw = np.random.default_rng(0)
    given = draw.standard_normal((2, 64)) + draw.standard_normal((replicas, 2, 64))
    single, double = (
        Simulator(algorithm, {"w": (2, 64)}, replicas=replicas, dtype=dtype).step(
            [{"w": g.astype(dtype)} for g in given]
        )["w"]
        for dtype in ("float32", "float64")
    )
    right = double if bound is None else given.mean(axis=0)
    assert np.linalg.norm(single - right) < (bound or 1e-4) * np.linalg.norm(right)
