"""Write a compression method in fifteen lines, and try it on a laptop: no torch, no JAX, no
network.

python examples/write_your_own.py

The method averages a few random elements of each matrix (Stich, Cordonnier and Jaggi 2018,
"Sparsified SGD with memory", random-k). All replicas draw the same positions, fresh ones each step,
so only the values cross the wire. `Compressor` adds error feedback, warm-up steps, steps with an
inf, and tensors left uncompressed. `gradwire.testing.check` says whether a method keeps its
promises. The same class then runs as a DDP hook (`gradwire.torch_backend.register_comm_hook(ddp,
RandomElements(every=8))`) and as an Optax transformation
(`gradwire.jax_backend.average_gradients(RandomElements(every=8), axis_name="batch")`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import gradwire
from gradwire import Spec, StepContext
from gradwire.core.kernels import random
from gradwire.core.ops import A, Ops
from gradwire.core.protocol import mean


@dataclass(frozen=True, kw_only=True, repr=False)
class RandomElements(gradwire.Compressor):
    every: int

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        worthwhile = len(spec.shape) > 1 and spec.size >= self.every
        # {}: compressed, with nothing to remember. None: averaged as it is.
        return {} if worthwhile else None

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A, A, dict[str, A]]:
        shape = tuple(x.shape)
        flat = x.reshape((-1,))
        # a NaN reaches everyone, whether it is drawn or not
        flat = ops.where(ops.all_finite(flat), flat, math.nan)
        drawn = random.uniform(ops, random.key(0, name), tuple(flat.shape), context.step)
        index = ops.top_k(drawn, flat.shape[0] // self.every)
        sent = ops.take(flat, index)  # this replica's
        received = await mean(sent)  # the only thing that is sent
        return (
            _spread(ops, index, sent, flat, shape),
            _spread(ops, index, received, flat, shape),
            memory,
        )


def _spread(ops: Ops[A], index: A, values: A, like: A, shape: tuple[int, ...]) -> A:
    """These values at their places, and zeros elsewhere."""
    return ops.scatter_add(ops.zeros(tuple(like.shape), ops.dtype_of(like)), index, values).reshape(
        shape
    )


def main() -> None:
    shapes = {"weight": (256, 64), "bias": (256,)}
    targets = {name: np.random.default_rng(0).normal(size=shape) for name, shape in shapes.items()}
    print(
        f"{'after 200 steps on 4 replicas':30} {'sent, per replica':>20} {'per step':>14} {'error':>7}"
    )
    for algorithm in (gradwire.AllReduce(), gradwire.PowerSGD(rank=8), RandomElements(every=8)):
        # The replicas descend to the same targets in lock step, each with noise of its own.
        simulator = gradwire.Simulator(algorithm, shapes, replicas=4)
        parameters = {name: np.zeros(shape) for name, shape in shapes.items()}
        noise = np.random.default_rng(1)
        sent = 0
        for _ in range(200):
            pull = {name: parameters[name] - targets[name] for name in shapes}
            gradients = [
                {name: g + 0.1 * noise.normal(size=g.shape) for name, g in pull.items()}
                for _ in range(4)
            ]
            averages = simulator.step(gradients)  # raises if the replicas disagree about anything
            # Small steps: the residual comes back by error feedback, but about 8 steps late.
            parameters = {name: parameters[name] - 0.03 * averages[name] for name in shapes}
            sent += simulator.traffic.nbytes
        error = np.linalg.norm(parameters["weight"] - targets["weight"]) / np.linalg.norm(
            targets["weight"]
        )
        messages = (
            f"{simulator.traffic.collectives} message{'s' * (simulator.traffic.collectives > 1)}"
        )
        print(f"{algorithm!s:30} {sent:14,} bytes {messages:>14} {error:7.1%}")
    print()
    print(gradwire.plan(shapes, RandomElements(every=8)))


if __name__ == "__main__":
    main()
