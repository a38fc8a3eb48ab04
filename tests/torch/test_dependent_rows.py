"""Orthonormal rows of factors whose rows depend on each other, judged by singular values in float64; on the branch for devices."""

import itertools

import pytest
import torch

from benchmarks.dry import on_a_device
from gradwire.torch_backend.ops.kernels import TorchOps

#: Matrices of one shape.
BATCH = 50
#: What rounding leaves undecided, in parts of a row's norm: float32 rounds to 6e-8, and a row is a sum of many.
FLOOR = 2e-6
#: Of a row that comes after nearly dependent ones so much may be lost, which error feedback returns; in one of so many draws.
MOST, SELDOM = 1e-3, 1000


def deficient(r, n, g):
    """A factor of gradients with fewer rows that are not zero."""
    k = int(torch.randint(1, r + 1, (), generator=g))
    gradient = torch.zeros(BATCH, n, 48)
    gradient[:, :k] = torch.randn(BATCH, min(k, n), 48, generator=g)
    return torch.randn(BATCH, r, 48, generator=g) @ gradient.mT


def low_rank(r, n, g):
    k = int(torch.randint(1, r + 1, (), generator=g))
    return torch.randn(BATCH, r, k, generator=g) @ torch.randn(BATCH, k, n, generator=g)


def graded(r, n, g):
    """Singular values down to the floor, or below it."""
    left = torch.linalg.qr(torch.randn(BATCH, r, r, generator=g, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(BATCH, n, min(r, n), generator=g, dtype=torch.float64))[0]
    values = torch.logspace(0, -9 * float(torch.rand((), generator=g)), min(r, n), dtype=torch.float64)
    return (left[..., : min(r, n)] * values) @ right.mT


#: Others: tests/parity/test_kernels.py.
KINDS = (deficient, low_rank, graded)


def drawn(kind, dtype, seed):
    """(BATCH, r, n) of this dtype, of any scale."""
    g = torch.Generator().manual_seed(seed)
    r = int(torch.randint(1, 65 if seed % 2 else 9, (), generator=g))
    n = int(torch.randint(max(1, r // 2), 3 * r + 40, (), generator=g))
    scale = 10.0 ** (40 * float(torch.rand((), generator=g)) - 20)
    return (kind(r, n, g).double() * scale).to(dtype)


def judged(x, rows):
    """How far each matrix is from orthonormal or zero rows, what part of a row of `x` it does not span, and how much of that rounding explains."""
    x, rows = x.double(), rows.double()
    kept = torch.diag_embed(rows.any(-1).double())
    wrong = (rows @ rows.mT - kept).abs().amax((-1, -2))
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-300)
    lost = torch.linalg.vector_norm(x - x @ rows.mT @ rows, dim=-1).amax(-1)
    values = torch.linalg.svdvals(x)
    # The directions of a matrix that is known up to FLOOR are known up to that over the least of its singular values that are above it.
    least = torch.where(values > FLOOR, values, torch.inf).amin(-1)
    return wrong, lost, (FLOOR / least).clamp_min(FLOOR)


def orthonormal(x):
    return TorchOps(torch.device("cpu")).orthonormalize_each([x], [], 0.0)[0]


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(1000, 1009), marks=pytest.mark.slow)], ids=str)
def test_rows_are_orthonormal_or_zero_and_span_the_factor(seeds):
    found = []
    for seed, kind, dtype in itertools.product(seeds, KINDS, (torch.float32, torch.bfloat16)):
        x = drawn(kind, dtype, seed)
        with on_a_device():
            rows = orthonormal(x.float())  # bfloat16 would round the result to 4e-3
        wrong, lost, explained = judged(x, rows)
        where = kind.__name__, dtype, seed
        assert wrong.max() <= 1e-5, where
        assert (lost <= torch.maximum(explained, torch.tensor(MOST))).all(), where
        found.append(lost > explained)
    assert torch.cat(found).double().mean() <= 1 / SELDOM


def test_bfloat16_is_rounded_once():
    for seed in range(4):
        x = drawn(deficient, torch.bfloat16, seed)
        with on_a_device():
            rows, exact = orthonormal(x), orthonormal(x.float())
        assert rows.dtype == torch.bfloat16
        assert ((rows.float() - exact).abs() <= exact.abs() / 256).all()
