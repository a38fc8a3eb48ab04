"""Two published methods on `gradwire.Compressor`, to read, to change, and to compare with those
that gradwire ships.

python examples/two_more_methods.py

`RandomProjection` averages each matrix along random orthonormal directions (Vogels, Karimireddy and
Jaggi 2019, arXiv 1905.13727, section 4.1). `TopRows` averages the rows whose averaged sketch is
longest (Chen et al. 2025, arXiv 2510.26709, "ARC-Top-K"), here with plain error feedback. Neither
sends an index: all replicas come to the same directions and rows. `examples/write_your_own.py` has
random-k, and explains how a method is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import gradwire
from gradwire import LowRank, Spec, StepContext
from gradwire.core.kernels import random
from gradwire.core.ops import A, Ops
from gradwire.core.protocol import mean, orthonormalize
from gradwire.testing import check


@dataclass(frozen=True, kw_only=True, repr=False)
class RandomProjection(gradwire.Compressor):
    rank: int = field(kw_only=False)

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        return {} if len(spec.shape) == 2 and spec.shape[1] > 2 * self.rank else None

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[LowRank[A], LowRank[A], dict[str, A]]:
        drawn = random.uniform(ops, random.key(0, name), (self.rank, x.shape[1]), context.step)
        q = await orthonormalize(ops, ops.cast(drawn, ops.dtype_of(x)))
        local = ops.matmul(q, x.mT)
        sent = LowRank(local, q)  # two factors: nothing as large as `x` is made
        received = await mean(local, overlap=context.residual(sent))
        return sent, LowRank(received, q), memory


@dataclass(frozen=True, kw_only=True, repr=False)
class TopRows(gradwire.Compressor):
    keep: int = field(kw_only=False)
    sketch: int = 4  # numbers for each row

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        return {} if len(spec.shape) == 2 and spec.shape[0] > 2 * self.keep else None

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A, A, dict[str, A]]:
        (n, m), dtype = x.shape, ops.dtype_of(x)
        drawn = random.uniform(ops, random.key(0, name), (m, self.sketch), context.step)
        # an inf or NaN in a row is in its sketch
        sketch = await mean(ops.matmul(x, ops.cast(drawn, dtype)))
        chosen = ops.top_k(ops.norm(sketch).reshape((-1,)), self.keep)
        index = (chosen.reshape((-1, 1)) * m + ops.iota(m).reshape((1, -1))).reshape((-1,))
        rows = ops.take(x.reshape((-1,)), index)

        def spread(rows: A) -> A:
            return ops.scatter_add(ops.zeros((n * m,), dtype), index, rows).reshape((n, m))

        return spread(rows), spread(await mean(rows)), memory


def main() -> None:
    for method in (RandomProjection(4), TopRows(8)):
        print(gradwire.plan({"weight": (256, 64), "bias": (256,)}, method))
        print("\n".join(check(method, {"weight": (24, 16), "bias": (24,)})), end="\n\n")


if __name__ == "__main__":
    main()
