"""Each paper's algorithm, rendered from the paper in plain NumPy, and the line that says it here:
the same numbers, round by round.

Replica r has the loss |A_r x - y_r|² / 2 of its own, for the columns of a matrix and for a vector.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradwire import AllReduce, LocalSimulator, Quantize, Sign, Simulator, TopK, WireDtype, diloco

REPLICAS, ROUNDS = 3, 12
SHAPES = {"w": (8, 32), "b": (16,)}


def losses(seed=0):
    """(replica, parameters) → gradients."""
    rng = np.random.default_rng(seed)
    own = {
        (r, name): (np.eye(s[0]) + 0.2 * rng.normal(size=(s[0], s[0])), rng.normal(size=s))
        for r in range(REPLICAS)
        for name, s in SHAPES.items()
    }
    return lambda r, x: {n: own[r, n][0].T @ (own[r, n][0] @ x[n] - own[r, n][1]) for n in SHAPES}


def started():
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def assert_same(ours, theirs, atol=1e-9):
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name], x, rtol=0, atol=atol)


def kept_in_tiles(x, k, side, quantized):
    """The k largest of each tile, or of each stretch of a vector."""
    kept, length = np.zeros_like(x), side if x.ndim == 2 else side**2
    for corner in np.ndindex(*(-(-n // length) for n in x.shape)):
        tile = tuple(slice(length * i, length * (i + 1)) for i in corner)
        chosen = np.abs(x[tile]) >= np.sort(np.abs(x[tile]).ravel())[-k]
        kept[tile][chosen] = quantized(x[tile][chosen])
    return kept


def scale_of(x, largest):
    """By which the largest element is `largest`, in 16 bits, rounded up."""
    return (np.float32(np.abs(x).max() / largest).view(np.int32) + 255 & -256).view(np.float32)


def in_two_bits(values):
    """A sign and one of two sizes: the mean of those above a threshold, or that of the others. Of
    half the largest and the root mean square it is the one with the smaller error, of magnitudes in
    255ths of the largest."""
    size = np.abs(values)
    parts = np.rint(size / scale_of(size, 255))

    def means(x, large):
        return np.where(large, x[large].mean(), x[~large].mean() if not large.all() else 0)

    thresholds = 255 / 2, np.sqrt((parts**2).mean())
    splits = [parts > threshold for threshold in thresholds]
    best = min(splits, key=lambda large: np.sum((parts - means(parts, large)) ** 2))
    return np.sign(values) * means(size, best)


def test_sparse_loco_in_two_bits():
    """Sarfi et al. 2025, arXiv 2508.15706, Algorithm 1: H inner steps, e ← βe + Δ, the largest of e
    are quantized, sent and taken off it, θ ← θ - α · mean. The mean of an element is over those who
    have sent it, as in the authors' code (`test_sparse_loco_is_its_authors`)."""
    beta, k, side = 0.95, 4, 4
    e = {n: [np.zeros(s)] * REPLICAS for n, s in SHAPES.items()}

    def averaged(n, deltas):
        e[n] = [beta * own + delta for own, delta in zip(e[n], deltas, strict=True)]
        sent = [kept_in_tiles(own, k, side, in_two_bits) for own in e[n]]
        e[n] = [own - s for own, s in zip(e[n], sent, strict=True)]
        return np.sum(sent, axis=0) / np.maximum(1, np.count_nonzero(sent, axis=0))

    compressor = TopK(k, per=(side, side), bits=2, mean="senders", error_feedback=beta)
    # codes are of float32
    diloco_rounds(diloco(5, lr=1.0, momentum=0, compressor=compressor), averaged, 1.0, 0, 1e-5)
    assert np.abs(e["w"]).max() > 0.01


def test_sparse_loco_is_its_authors():
    """Their code on three replicas, round by round: what each owes, and the parameters.
    `sparse_loco.py` beside the numbers runs it."""
    rounds = json.loads((Path(__file__).parent / "authors" / "sparse_loco.json").read_text())[
        "rounds"
    ]
    shapes = {n: np.shape(x) for n, x in rounds[0]["parameters"].items()}
    compressor = TopK(3, per=(4, 4), mean="senders", error_feedback=0.95)
    zeros = {n: np.zeros(s) for n, s in shapes.items()}
    simulator = LocalSimulator(
        diloco(1, lr=1.0, momentum=0, compressor=compressor), zeros, REPLICAS
    )
    for their in rounds:
        own = their["differences"]
        simulator.step(
            [zeros] * REPLICAS, lambda r, x, g, own=own: {n: x[n] - np.array(own[r][n]) for n in x}
        )
        for r, errors in enumerate(their["errors"]):
            # Theirs decays before the next difference is added, ours when it is stored.
            decayed = {n: 0.95 * np.array(x) for n, x in errors.items()}
            assert_same(
                {n: m["error"] for n, m in simulator.states[r].tensors.items()}, decayed, 1e-12
            )
            assert_same(simulator.parameters[r], their["parameters"], 1e-12)
    over_all = Simulator(replace(compressor, mean="replicas"), shapes, REPLICAS).step(
        rounds[0]["differences"]
    )
    assert np.linalg.norm(rounds[0]["parameters"]["w"]) > 1.5 * np.linalg.norm(over_all["w"])


BLOCK = 128


def blockwise(quantized):
    """Of each 128 elements by themselves."""

    def of(x):
        flat = x.ravel()
        return np.concatenate(
            [quantized(flat[i : i + BLOCK]) for i in range(0, flat.size, BLOCK)]
        ).reshape(x.shape)

    return of


def powers_of_two(x):
    """The nearest of 0, ±1, ±2, …, ±64 times a scale, which is that of the largest element in 16
    bits."""
    levels = scale_of(x, 64) * np.array([0.0, *(2.0**i for i in range(7))])
    nearest = np.abs(np.abs(x)[:, None] - levels).argmin(axis=1)
    return np.sign(x) * levels[nearest]


def diloco_rounds(local_sgd, averaged, outer_lr, momentum, atol, inner=5, lr=0.02):
    """DiLoCo as Douillard et al. 2023 have it (arXiv 2311.08105, Algorithm 1), with `averaged` for
    the mean of the differences of all replicas."""
    gradient, simulator = losses(), LocalSimulator(local_sgd, started(), REPLICAS)
    theta, velocity = started(), {n: np.zeros(s) for n, s in SHAPES.items()}
    for _ in range(ROUNDS):
        ends = [theta] * REPLICAS
        for _ in range(inner):
            gradients = [gradient(r, x) for r, x in enumerate(simulator.parameters)]
            simulator.step(gradients, lambda r, x, g: {n: x[n] - lr * g[n] for n in x})
            ends = [
                {n: x[n] - lr * g for n, g in gradient(r, x).items()} for r, x in enumerate(ends)
            ]
        for n in theta:
            delta = averaged(n, [theta[n] - end[n] for end in ends])
            velocity[n] = momentum * velocity[n] + delta
            theta = theta | {n: theta[n] - outer_lr * (momentum * velocity[n] + delta)}
        assert_same(simulator.parameters[0], theta, atol)


def test_streaming_diloco_in_four_bits():
    """Douillard et al. 2025, arXiv 2501.18512, section 2.3: differences in E3M0, summed in float32,
    with nothing remembered. Here the mean is rounded as well, on its way back."""
    q, local_sgd = (
        blockwise(powers_of_two),
        diloco(5, lr=0.4, compressor=WireDtype(AllReduce(), "e3m0")),
    )
    diloco_rounds(
        local_sgd, lambda n, deltas: q(np.mean([q(d) for d in deltas], axis=0)), 0.4, 0.9, 1e-5
    )


def test_muloco_in_two_bits():
    """Thérien et al. 2025, arXiv 2505.23725, section 3.3: e ← βe + Δ, what is sent of it is
    quantized and taken off. The authors round the mean too and remember nothing of that; here the
    replica does that has rounded it."""
    q, e = blockwise(in_two_bits), {(r, n): 0.0 for r in range(REPLICAS) for n in SHAPES}

    def averaged(n, deltas):
        x = [0.9 * e[r, n] + d for r, d in enumerate(deltas)]
        sent = [q(each) for each in x]
        mean = np.mean(sent, axis=0)
        missed = (mean - q(mean)).ravel()
        for r in range(REPLICAS):
            own = np.where(np.arange(missed.size) // BLOCK == r, missed, 0)
            e[r, n] = x[r] - sent[r] + REPLICAS * own.reshape(mean.shape)
        return q(mean)

    diloco_rounds(
        diloco(5, lr=0.7, compressor=Quantize("int2", error_feedback=0.9)), averaged, 0.7, 0.9, 1e-4
    )
    assert np.abs(e[0, "w"]).max() > 0.01


def rendered(sends, lr):
    """x ← x - mean(sent), e ← γg + e - sent: error feedback as the papers write it, with the
    learning rate inside."""
    gradient, x = losses(), started()
    e = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(REPLICAS)]
    trajectory = []
    for _ in range(ROUNDS):
        p = [{n: lr * g + e[r][n] for n, g in gradient(r, x).items()} for r in range(REPLICAS)]
        sent = {n: sends(n, [each[n] for each in p]) for n in x}
        e = [{n: p[r][n] - sent[n][r] for n in x} for r in range(REPLICAS)]
        x = {n: x[n] - np.mean(sent[n], axis=0) for n in x}
        trajectory.append(x)
    return trajectory


def ef_sign(name, p):
    """Karimireddy et al. 2019, arXiv 1901.09847, Algorithm 1, with several workers as in its
    section 6."""
    return [np.abs(x).sum() / x.size * np.sign(x) for x in p]


def one_bit(name, p):
    """Seide et al. 2014, section 3.1: threshold 0; each column has two values, the means of what
    they stand for. A vector is a column."""

    def column(c):
        above = c > 0
        return np.where(
            above, c[above].mean() if above.any() else 0, c[~above].mean() if not above.all() else 0
        )

    return [np.stack([column(c) for c in x.T], axis=1) if x.ndim == 2 else column(x) for x in p]


def top_k_with_memory(name, p):
    """Stich, Cordonnier and Jaggi 2018, arXiv 1809.07599, Algorithm 2, here with a block for each
    tensor."""
    k = round(0.05 * p[0].size) or 1
    return [np.where(np.abs(x) >= np.sort(np.abs(x).ravel())[-k], x, 0) for x in p]


@pytest.mark.parametrize(
    ("algorithm", "sends"),
    [
        (Sign(), ef_sign),
        (Sign(per="column", magnitudes=2), one_bit),
        (TopK(0.05), top_k_with_memory),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_methods_with_error_feedback(algorithm, sends):
    """SGD on averages of gradients."""
    lr, gradient, x, simulator = 0.05, losses(), started(), Simulator(algorithm, SHAPES, REPLICAS)
    expected, dense = rendered(sends, lr), rendered(lambda name, p: p, lr)
    for theirs in expected:
        average = simulator.step([gradient(r, x) for r in range(REPLICAS)])
        x = {n: x[n] - lr * average[n] for n in x}
        assert_same(x, theirs)
    assert np.abs(dense[-1]["w"] - x["w"]).max() > 1e-3
