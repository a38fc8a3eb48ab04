"""Write a compression method in fifteen lines, and try it on a laptop: no torch, no JAX, no network.

python examples/write_your_own.py

The method projects each gradient matrix on a few random directions. All replicas draw the same directions, fresh ones each step, so only
the projection crosses the wire. `Compressor` adds error feedback, the dense start, steps with an inf, and tensors left uncompressed.
The same class then runs as a DDP hook (`gradwire.torch_backend.register_comm_hook(ddp, RandomProjection(rank=8))`) and as an
Optax transformation (`gradwire.jax_backend.average_gradients(RandomProjection(rank=8), axis_name="batch")`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import gradwire
from gradwire import LowRank, Moment, Spec
from gradwire.core.kernels import random
from gradwire.core.ops import A, Ops
from gradwire.core.requests import mean, orthonormalize


@dataclass(frozen=True, kw_only=True, repr=False)
class RandomProjection(gradwire.Compressor):
    rank: int

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        worthwhile = len(spec.shape) == 2 and self.rank < spec.shape[1]
        return {} if worthwhile else None  # {}: compressed, with nothing to remember. None: averaged as it is.

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], at: Moment
    ) -> tuple[LowRank[A], LowRank[A], dict[str, A]]:
        directions = random.uniform(ops, random.key(0, name), (self.rank, x.shape[1]), at.step)
        q = await orthonormalize(ops, ops.cast(directions, ops.dtype_of(x)))
        local = ops.matmul(q, x.mT)  # (rank, n): this replica's gradient, seen along the directions
        p = await mean(local)  # the only thing that is sent
        return LowRank(local, q), LowRank(p, q), memory


def main() -> None:
    shapes = {"weight": (256, 64), "bias": (256,)}
    targets = {name: np.random.default_rng(0).normal(size=shape) for name, shape in shapes.items()}
    print(f"{'after 200 steps on 4 replicas':30} {'sent, per replica':>20} {'per step':>14} {'error':>7}")
    for algorithm in (gradwire.AllReduce(), gradwire.PowerSGD(rank=8), RandomProjection(rank=8)):
        # The replicas descend to the same targets in lock step, each with noise of its own.
        simulator = gradwire.Simulator(algorithm, shapes, replicas=4)
        parameters = {name: np.zeros(shape) for name, shape in shapes.items()}
        noise = np.random.default_rng(1)
        sent = 0
        for _ in range(200):
            pull = {name: parameters[name] - targets[name] for name in shapes}
            gradients = [{name: g + 0.1 * noise.normal(size=g.shape) for name, g in pull.items()} for _ in range(4)]
            averages = simulator.step(gradients)  # raises if the replicas disagree about anything
            # Small steps: what a projection leaves out comes back by error feedback, but 64 / rank steps late.
            parameters = {name: parameters[name] - 0.03 * averages[name] for name in shapes}
            sent += simulator.traffic.nbytes
        error = np.linalg.norm(parameters["weight"] - targets["weight"]) / np.linalg.norm(targets["weight"])
        messages = f"{simulator.traffic.collectives} message{'s' * (simulator.traffic.collectives > 1)}"
        print(f"{algorithm!s:30} {sent:14,} bytes {messages:>14} {error:7.1%}")
    print()
    print(gradwire.plan(shapes, RandomProjection(rank=8)))


if __name__ == "__main__":
    main()
