"""PowerSGD: each gradient matrix travels as two thin factors (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727, Algorithm 1).

For a matrix M (n, m) and rank r, one step of power iteration from the factor of the step before:

    P = mean(M Q),  P orthonormal,  Q = mean(Mᵀ P),  M ≈ P Qᵀ

(n + m)·r numbers cross the wire instead of n·m. Factors are kept as **rows**, `p` (r, n) and `q` (r, m): skinny products then
stream through memory, and a factor is a contiguous piece of the message.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gradwire.core import random
from gradwire.core.algorithm import State
from gradwire.core.collectives import mean, orthonormalize
from gradwire.core.error_feedback import Compressor, LowRank, Moment
from gradwire.core.ops import A, Ops, Spec, shaped

__all__ = ["PowerSGD"]


@dataclass(frozen=True, kw_only=True, repr=False)
class PowerSGD(Compressor):
    """Low-rank gradient compression with warm start and error feedback.

    A tensor is the matrix `(shape[0], rest)`. It is compressed at rank `r = min(n, m, rank)` iff
    `(n + m) * r * min_compression_rate < n * m`; everything else travels uncompressed in the same message. A step is two
    all-reduces for any number of tensors, or one with `half_step`.

    Args:
        rank: of the approximation; or a mapping from patterns of parameter names (`fnmatch`, the first that matches decides) to ranks,
            0 to leave those uncompressed. Parameters that match no pattern stay uncompressed: end with `"*": 4` for the rest.
        start_step: number of steps that average uncompressed gradients first.
        min_compression_rate: compress a tensor only if its elements shrink by more than this factor.
        warm_start: begin power iteration with the factor of the step before (Section 3 of the paper). Otherwise with a fresh random one.
        error_feedback: add to each gradient what compression left out of the ones before.
        half_step: one multiplication and one message per step, P and Q in turn (as epfml/powersgd does). Needs `warm_start`.
        square: view each tensor as the smallest square matrix that holds it, zero-padded, vectors too; this is torch's
            `batched_powerSGD_hook`, per tensor instead of per bucket so that memory does not depend on the buckets.
        transpose: patterns of the names of parameters whose matrix is the transposed one. A Flax kernel (in, out) is then compressed exactly
            as torch's weight (out, in): `transpose=("*/kernel",)`. Which side is projected makes a difference.
        orthogonalization_epsilon: added to the norm of a row before division. Zero rows need none.
        seed: of the random initial factors.
        state_dtype: dtype of memory and factors. None: that of the gradient. Orthonormalization is in float32 at least.

    Raises:
        ValueError: naming the option, its value and the fix.
    """

    rank: int | Mapping[str, int] = field(kw_only=False)
    min_compression_rate: float = 2.0
    warm_start: bool = True
    half_step: bool = False
    square: bool = False
    transpose: tuple[str, ...] = ()
    orthogonalization_epsilon: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rank, Mapping):
            for pattern, rank in self.rank.items():
                _check_rank(f"rank[{pattern!r}]", rank, 0, "0 leaves the parameters uncompressed")
        else:
            _check_rank("rank", self.rank, 1, "the usual ranks are 1 to 32")
        if not (self.min_compression_rate > 0 and math.isfinite(self.min_compression_rate)):
            raise ValueError(
                f"min_compression_rate={self.min_compression_rate} must be a positive number; 2.0 is usual"
            )
        if not 0 <= self.orthogonalization_epsilon < 1:
            raise ValueError(
                f"orthogonalization_epsilon={self.orthogonalization_epsilon} must be in [0, 1); 0 is right"
            )
        given: object = self.transpose  # one pattern alone, a str, would pass for a tuple of its letters
        if isinstance(given, str) or not all(isinstance(pattern, str) for pattern in self.transpose):
            raise TypeError(f"transpose={self.transpose!r} must be a tuple of patterns: ('*/kernel',)")
        object.__setattr__(self, "transpose", tuple(self.transpose))  # hashable, and one repr for lists and tuples
        if self.half_step and not self.warm_start:
            raise ValueError("half_step=True alternates two kept factors and needs warm_start=True")

    @property
    def phases(self) -> int:
        return 2 if self.half_step else 1

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        # No parameters, no pattern to miss: Optax makes a state for an empty tree, to see how it is built.
        if isinstance(self.rank, Mapping) and specs:
            for pattern in self.rank:
                if not fnmatch.filter(specs, pattern):
                    raise ValueError(
                        f"rank pattern {pattern!r} matches no parameter; the parameters are {', '.join(map(repr, specs))}"
                    )
        return super().init(ops, specs)

    def rank_of(self, name: str, shape: tuple[int, ...]) -> int:
        """The rank at which a parameter is compressed; 0 if it travels uncompressed."""
        if isinstance(self.rank, Mapping):
            wanted = next((r for pattern, r in self.rank.items() if fnmatch.fnmatchcase(name, pattern)), 0)
        else:
            wanted = self.rank
        size = math.prod(shape)
        if wanted == 0 or size == 0:
            return 0
        n, m = self._matrix_shape(shape)
        r = min(n, m, wanted)
        return r if (n + m) * r * self.min_compression_rate < size else 0

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        r = self.rank_of(name, spec.shape)
        if not r:
            return None
        if not self.warm_start:
            return {}
        n, m = self._matrix_shape(spec.shape)
        if self._is_transposed(name):
            n, m = m, n
        q = ops.cast(random.uniform(ops, random.key(self.seed, f"{name}/q"), (r, m)), spec.dtype)
        return {"q": q, "p": ops.zeros((r, n), spec.dtype)} if self.half_step else {"q": q}

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], at: Moment
    ) -> tuple[LowRank[A], LowRank[A], dict[str, A]]:
        shape = tuple(x.shape)
        n, m = self._matrix_shape(shape)
        matrix = shaped(x if n * m == math.prod(shape) else ops.pad(x.reshape((-1,)), n * m), (n, m))
        if self._is_transposed(name):
            return await self._factors(ops, name, shape, matrix.mT, memory, at, lambda p, q: LowRank(q, p))
        return await self._factors(ops, name, shape, matrix, memory, at, LowRank)

    async def _factors(
        self,
        ops: Ops[A],
        name: str,
        shape: tuple[int, ...],
        matrix: A,
        memory: dict[str, A],
        at: Moment,
        low_rank: Callable[[A, A], LowRank[A]],
    ) -> tuple[LowRank[A], LowRank[A], dict[str, A]]:
        if self.half_step and at.phase == 0:
            q = await self._basis(ops, f"{name}/q", memory["q"])
            local = ops.matmul(q, matrix.mT)
            sent = low_rank(local, q)
            p = await mean(local, meanwhile=at.remainder(sent))
            return sent, low_rank(p, q), {"q": memory["q"], "p": p}
        if self.half_step:
            p = await self._basis(ops, f"{name}/p", memory["p"])
        else:
            if self.warm_start:
                q = await self._basis(ops, f"{name}/q", memory["q"])
            else:
                r = self.rank_of(name, shape)
                fresh = random.uniform(ops, random.key(self.seed, f"{name}/q"), (r, matrix.shape[-1]), at.step)
                q = await self._orthonormal(ops, ops.cast(fresh, ops.dtype_of(matrix)))
            p = await mean(ops.matmul(q, matrix.mT))
            p = await self._orthonormal(ops, p)
        local = ops.matmul(p, matrix)
        sent = low_rank(p, local)
        q = await mean(local, meanwhile=at.remainder(sent))
        return sent, low_rank(p, q), {key: q if key == "q" else value for key, value in memory.items()}

    async def _basis(self, ops: Ops[A], name: str, factor: A) -> A:
        """Orthonormal rows from a factor of the step before; directions it has lost are drawn anew."""
        shape, dtype = tuple(factor.shape), ops.dtype_of(factor)

        def draw() -> A:
            return ops.cast(random.uniform(ops, random.key(self.seed, name), shape), dtype)

        fresh = ops.constant((self.seed, name, shape, dtype), draw)
        return await orthonormalize(ops, factor, fresh=fresh, epsilon=self.orthogonalization_epsilon)

    async def _orthonormal(self, ops: Ops[A], factor: A) -> A:
        return await orthonormalize(ops, factor, epsilon=self.orthogonalization_epsilon)

    def _is_transposed(self, name: str) -> bool:
        return bool(self.transpose) and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.transpose)

    def _matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        size = math.prod(shape)
        if self.square:
            side = math.isqrt(size - 1) + 1 if size else 0
            return side, side
        n = shape[0] if shape else 1
        return n, size // n if n else 0


def _check_rank(what: str, rank: object, least: int, hint: str) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"{what}={rank!r} must be an int")
    if rank < least:
        raise ValueError(f"{what}={rank} must be at least {least}; {hint}")
