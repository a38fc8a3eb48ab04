"""PowerSGD on one screen: NumPy, one collective, and nothing to make it fast. The tests compare
`gradwire.PowerSGD` with it.

python examples/power_sgd_on_one_screen.py

Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727: Algorithm 1 (rank-r compression) inside
Algorithm 2 (error feedback), with the warm start of section 3.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Arrays = dict[str, Array]


def power_sgd(
    gradients: Arrays, errors: Arrays, qs: Arrays, all_reduce_mean: Callable[[Array], Array]
) -> Arrays:
    """One step of one replica. `qs[name]` (m, r) and `errors[name]` (n, m) are its memory of a
    matrix (n, m), and change; what has no q is an uncompressed average."""
    averages = {}
    for name, gradient in gradients.items():
        if name not in qs:
            averages[name] = all_reduce_mean(gradient)
            continue
        matrix = gradient + errors[name]
        p = all_reduce_mean(matrix @ qs[name])  # the same on all replicas, and so is its basis
        p, _ = np.linalg.qr(p)
        q = matrix.T @ p
        errors[name] = matrix - p @ q.T  # what this replica has not sent
        qs[name] = all_reduce_mean(q)
        averages[name] = p @ qs[name].T
    return averages


def side_by_side(replicas: int, train: Callable[[int, Callable[[Array], Array]], None]) -> None:
    """`train(rank, all_reduce_mean)` in a thread for each replica. In training, `all_reduce_mean`
    is `dist.all_reduce(x, dist.ReduceOp.AVG)`."""
    sent: list[Array] = [np.empty(0)] * replicas
    barrier = threading.Barrier(replicas, timeout=60)

    def replica(rank: int) -> None:
        def all_reduce_mean(x: Array) -> Array:
            sent[rank] = x
            barrier.wait()
            mean: Array = np.mean(sent, axis=0)
            barrier.wait()  # nobody sends again before all have read
            return mean

        train(rank, all_reduce_mean)

    with ThreadPoolExecutor(replicas) as pool:
        list(pool.map(replica, range(replicas)))


def main() -> None:
    target, rank, replicas = np.random.default_rng(0).normal(size=(64, 32)), 4, 4
    q = np.random.default_rng(1).normal(size=(32, rank))

    def train(replica: int, all_reduce_mean: Callable[[Array], Array]) -> None:
        noise, w = np.random.default_rng(replica), np.zeros_like(target)
        errors, qs = {"w": np.zeros_like(w)}, {"w": q}
        for step in range(301):
            if step % 100 == 0 and replica == 0:
                print(
                    f"step {step:3}: error {np.linalg.norm(w - target) / np.linalg.norm(target):.3f}"
                )
            gradient = w - target + 0.1 * noise.normal(size=w.shape)
            w -= 0.02 * power_sgd({"w": gradient}, errors, qs, all_reduce_mean)["w"]

    side_by_side(replicas, train)
    print(f"sent in each step: {rank * sum(target.shape)} numbers of {target.size}")


if __name__ == "__main__":
    main()
