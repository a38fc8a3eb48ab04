"""A small regression, the same in torch and in Flax: initial weights and data for the training-level parity test."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

WIDTHS = (16, 48, 32, 4)
STEPS, BATCH, RATE, MOMENTUM, RANK = 45, 16, 0.05, 0.9, 2


def weights() -> dict[str, np.ndarray[Any, Any]]:
    """torch's orientation, (out, in), in both frameworks: a transposed matrix is another one to power iteration."""
    rng = np.random.default_rng(0)
    made = {}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(WIDTHS)):
        made[f"weight{i}"] = (rng.standard_normal((n_out, n_in)) / np.sqrt(n_in)).astype(np.float32)
        made[f"bias{i}"] = np.zeros(n_out, np.float32)
    return made


PLANE = np.linalg.qr(np.random.default_rng(1).standard_normal((WIDTHS[0], RANK)))[0].T * [[3.0], [1.5]]


def batch(step: int, replica: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs near a plane: gradients have clearly the rank that is kept, or their last bits would decide what is sent (see `tests.methods.Method`)."""
    rng = np.random.default_rng([step + 1, replica])
    x = rng.standard_normal((BATCH, RANK)) @ PLANE + 0.05 * rng.standard_normal((BATCH, WIDTHS[0]))
    x = x.astype(np.float32)
    y = np.stack([np.sin(x[:, :4]).sum(1), x[:, 0] * x[:, 1], np.abs(x[:, 2]), x.mean(1)], axis=1)
    return x, y.astype(np.float32)
