"""Half-steps of PowerSGD as epfml/powersgd takes them (Vogels, Karimireddy and Jaggi 2019), in
NumPy and with nothing of gradwire's: an oracle.

Factors are orthonormalized by QR, and the error is what was not received.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Tree = dict[str, npt.NDArray[Any]]


class HalfSteps:
    """Averages of gradients, one matrix after the other.

    Args:
        shapes: parameter name → shape. Matrices are compressed.
        replicas: how many.
        rank: of the approximation.
        seed: of the first factors.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], replicas: int, rank: int, seed: int
    ) -> None:
        random = np.random.default_rng(seed)
        self.matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        self.q = {name: random.standard_normal((m, rank)) for name, (_, m) in self.matrices.items()}
        self.p = {name: random.standard_normal((n, rank)) for name, (n, _) in self.matrices.items()}
        self.errors = [
            {name: np.zeros(shape) for name, shape in self.matrices.items()}
            for _ in range(replicas)
        ]
        self.step = 0

    def __call__(self, gradients: list[Tree]) -> Tree:
        averages: Tree = {
            name: np.mean([g[name] for g in gradients], axis=0) for name in gradients[0]
        }
        for name in self.matrices:
            given = [g[name] + error[name] for g, error in zip(gradients, self.errors, strict=True)]
            if self.step % 2 == 0:
                q = np.linalg.qr(self.q[name])[0]
                self.p[name] = np.mean([m @ q for m in given], axis=0)
                received = self.p[name] @ q.T
            else:
                p = np.linalg.qr(self.p[name])[0]
                self.q[name] = np.mean([m.T @ p for m in given], axis=0)
                received = p @ self.q[name].T
            for error, m in zip(self.errors, given, strict=True):
                error[name] = m - received
            averages[name] = received
        self.step += 1
        return averages
