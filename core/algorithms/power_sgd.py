"""PowerSGD: each gradient matrix travels as two thin factors (Vogels, Karimireddy and Jaggi 2019,
arXiv 1905.13727, Algorithm 1).

For a matrix M (n, m) and rank r, one step of power iteration from the factor of the step before:

    P = mean(M Q),  P orthonormal,  Q = mean(Mᵀ P),  M ≈ P Qᵀ

(n + m)·r numbers cross the wire instead of n·m. Factors are kept as **rows**, `p` (r, n) and `q`
(r, m): skinny products then stream through memory, and a factor is a contiguous piece of the
message. Of a stack of b matrices, (b, r, n) and (b, r, m).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from gradwire.core.algorithm import State
from gradwire.core.algorithms.compressor import ERROR, Compressor, Hints, StepContext
from gradwire.core.algorithms.shared.views import (
    StackedShape,
    View,
    reproducing,
    square_view,
    view_of,
)
from gradwire.core.kernels import random
from gradwire.core.kernels.payloads import LowRank, Residual
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec, reshape_if_needed
from gradwire.core.protocol import mean, multiply, orthonormalize, world_size
from gradwire.core.protocol.programs import Program
from gradwire.core.text.name_patterns import Patterns, matches, require_matches
from gradwire.core.text.options import AtLeast0, AtLeast1, at_least, more_than, share

#: So many replicas sum factors of 16 bits in those, with an error of 0.75 % in bfloat16. With 512
#: it would be 2 %, and with 4,096 nothing would be right: each addend is less than half a last bit.
SUMMED_IN_16_BITS = 64


@dataclass(frozen=True, kw_only=True, repr=False)
class PowerSGD(Compressor):
    """Low-rank gradient compression with warm start and error feedback.

    A tensor is a matrix, or a stack of matrices: see `gradwire.core.algorithms.shared.views`,
    `stacked` and `rows`. A matrix (n, m) is compressed at rank `r = min(n, m, rank)` iff `(n + m) *
    r * min_compression_rate < n * m`; everything else, vectors and stacks of vectors included,
    travels uncompressed in the same message. A step is two all-reduces for any number of tensors,
    or one with `half_step`.

    Send a matrix of 64 × 32 as factors of rank 2, (64 + 32) · 2 numbers:

        >>> import numpy as np
        >>> from gradwire import PowerSGD, Simulator
        >>> replicas = Simulator(PowerSGD(rank=2), {"w": (64, 32)}, replicas=4)
        >>> average = replicas.step([{"w": np.full((64, 32), r)} for r in range(4)])["w"]
        >>> float(average.mean().round(6)), replicas.traffic.collectives, replicas.traffic.nbytes
        (1.5, 2, 1536)

    Args:
        rank: of the approximation; or a mapping from patterns of parameter names (`fnmatch`, the
            first that matches decides) to ranks, 0 to leave those uncompressed. Parameters that
            match no pattern stay uncompressed: end with `"*": 4` for the rest.
        start_step: number of steps that average uncompressed gradients first.
        min_compression_rate: compress a tensor only if its elements shrink by more than this
            factor.
        warm_start: begin power iteration with the factor of the step before (Section 3 of the
            paper). Otherwise with a fresh random one.
        error_feedback: add to each gradient the compression error of the ones before; a number
            below 1 is a decay, see `Compressor`.
        half_step: one multiplication and one message per step, P and Q in turn (as epfml/powersgd
            does). Needs `warm_start`. It has a price:
            training falls apart at learning rates at which full steps train (docs/methods.md), the
            sooner the lower the rank. Clip gradients, or take full steps at half the rank, which
            send as much.
        stacked: patterns of the names of parameters that are stacks → number of leading axes that
            count layers or experts:
            `{"layers/*": 1, "*.experts.*": 1}`. Each matrix is compressed by itself, all of them in
            one product. In JAX what Flax knows of a stack is used where no pattern says it, see
            `gradwire.jax_backend.power_sgd`.
        rows: patterns of names → how many axes, after those of the stack, are the rows of the
            matrix. By default as many as make the factors smallest. `{"*": 1}` is torch's view,
            (shape[0], rest). Vectors are left alone.
        square: view each tensor as the smallest square matrix that holds it, zero-padded, vectors
            too; this is torch's `batched_powerSGD_hook`, per tensor instead of per bucket so that
            memory does not depend on the buckets.
        transpose: patterns of the names of parameters whose matrix is the transposed one. A Flax
            kernel (in, out) is then compressed exactly as torch's weight (out, in):
            `transpose=("*/kernel",)`. Which side is projected makes a difference.
        orthogonalization_epsilon: added to the norm of a row before division. Zero rows need none.
        seed: of the random initial factors.
        state_dtype: dtype of memory and factors. None: that of the gradient. More than 64 replicas
            send and sum factors of 16 bits in float32, since sums of 16 bits lose the addends of
            many; `WireDtype` sends them in 16 bits, and sums in float32. Orthonormalization is in
            float32 at least.
        max_norm: clip the gradient of each replica, before the error is added, to this 2-norm of
            the whole model, so that an outlier is not remembered (docs/error-feedback.md). None: it
            is taken as it is. Steps before `start_step` are not clipped.

    Raises:
        ValueError: naming the option, its value and the fix.
    """

    rank: (
        Annotated[int, at_least(1), "the usual ranks are 1 to 32"]
        | Mapping[str, Annotated[int, at_least(0), "0 leaves the parameters uncompressed"]]
    ) = field(kw_only=False)
    min_compression_rate: Annotated[float, more_than(0), "2.0 is usual"] = 2.0
    warm_start: bool = True
    half_step: bool = False
    stacked: Mapping[str, AtLeast0] = Patterns()
    rows: Mapping[str, AtLeast1] = Patterns()
    square: bool = False
    transpose: tuple[str, ...] = ()
    orthogonalization_epsilon: Annotated[float, share(most_open=True), "0 is right"] = 0.0
    seed: int = 0

    hints = Hints(linear=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("rank", "stacked", "rows"):
            given = getattr(self, option)
            if isinstance(given, Mapping) and not isinstance(given, Patterns):
                object.__setattr__(self, option, Patterns(given))
        if self.square and (self.stacked or self.rows):
            raise ValueError(
                "square=True sees every tensor as one square matrix; leave out stacked and rows, or"
                " square"
            )
        if self.half_step and not self.warm_start:
            raise ValueError("half_step=True alternates two kept factors and needs warm_start=True")

    @property
    def phases(self) -> int:
        """The number of kinds of step: 2 for half-steps, which send P and Q in turn; else 1."""
        return 2 if self.half_step else 1

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that `gradwire.Plan.notes` prints: the price of half-steps. Empty for full
        steps."""
        if not self.half_step:
            return ()
        return (
            (
                "half_step: training falls apart at learning rates at which full steps train (rank"
                " 1, SGD with momentum: 58 % accuracy where full steps have 96 %). Clip gradients,"
                " or take full steps at half the rank, which send as much. See docs/methods.md."
            ),
        )

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        """The state before the first step.

            >>> from gradwire import PowerSGD, Spec
            >>> from gradwire.core.kernels.numpy import NumpyOps
            >>> state = PowerSGD(rank=2).init(NumpyOps(), {"w": Spec((64, 32)), "b": Spec((64,))})
            >>> shapes = {name: memory.shape for name, memory in state.tensors["w"].items()}
            >>> shapes, "b" in state.tensors
            ({'q': (2, 32), 'error': (64, 32)}, False)

        Args:
            ops: kernels of the arrays' framework.
            specs: parameter name → shape and dtype of its gradient.

        Returns:
            For each compressed parameter what `memory` returns, and with error feedback `error`:
            zeros of the gradient's shape, in `state_dtype`. With `half_step` also the shared scalar
            `phase`. Other parameters have no entry.

        Raises:
            ValueError: a dtype that cannot be averaged, an option with more axes than a parameter
                has, or a pattern of `rank`, `stacked`, `rows` or `transpose` that matches no
                parameter.
        """
        options = {
            "rank": self.rank,
            "stacked": self.stacked,
            "rows": self.rows,
            "transpose": self.transpose,
        }
        for option, patterns in options.items():
            if not isinstance(patterns, int):
                require_matches(option, patterns, specs)
        return super().init(ops, specs)

    @functools.cached_property
    def _views(self) -> dict[tuple[str, tuple[int, ...], int], View | None]:
        """Patterns are looked up once for each parameter, not in every step."""
        return {}

    @functools.cached_property
    def _views_in_steps(self) -> dict[tuple[str, tuple[int, ...], tuple[int, ...] | None], View]:
        return {}

    def wanted_rank(self, name: str) -> int:
        """The rank that `rank` asks for by name, whatever the shape; 0 leaves the parameter
        uncompressed.

        Examples:
            >>> from gradwire import PowerSGD
            >>> PowerSGD({"*embed*": 0, "*": 4}).wanted_rank("embed.weight")
            0
        """
        return self.rank if isinstance(self.rank, int) else Patterns(self.rank).of(name) or 0

    def view_of(self, name: str, shape: tuple[int, ...]) -> View | None:
        """How a parameter is a batch of matrices, by `stacked`, `rows`, `square` and `transpose`.

            >>> from gradwire import PowerSGD
            >>> str(PowerSGD(rank=2, stacked={"layers/*": 1}).view_of("layers/up", (12, 512, 2048)))
            '12 × (512 | 2048)'

        Args:
            name: of the parameter.
            shape: of its gradient. A `gradwire.core.algorithms.shared.views.StackedShape` says
                where its stack ends; a pattern of `stacked` overrules it.

        Returns:
            The view; None for a vector, or a stack of vectors.

        Raises:
            ValueError: the shape has fewer axes than an option gives it.
        """
        hinted = getattr(shape, "stacked", 0) if self.warm_start else 0
        key = name, tuple(shape), hinted
        if key not in self._views:
            transposed = any(matches(name, pattern) for pattern in self.transpose)
            if self.square:
                self._views[key] = square_view(tuple(shape), transposed)
            else:
                stacked = Patterns(self.stacked).of(name)
                rows = Patterns(self.rows).of(name)
                self._views[key] = view_of(
                    name, shape, hinted if stacked is None else stacked, rows, transposed
                )
        return self._views[key]

    def rank_of(self, name: str, shape: tuple[int, ...]) -> int:
        """The rank of a parameter's factors, at most the shorter side; 0 if the parameter travels
        uncompressed.

        Examples:
            >>> from gradwire import PowerSGD
            >>> [PowerSGD(rank=4).rank_of("w", shape) for shape in ((64, 32), (64, 2), (64,))]
            [4, 0, 0]
        """
        wanted, size = self.wanted_rank(name), math.prod(shape)
        view = self.view_of(name, shape) if wanted and size else None
        return 0 if view is None else self._rank_in(view, wanted, size)

    def _rank_in(self, view: View, wanted: int, size: int) -> int:
        r = min(view.n, view.m, wanted)
        return (
            r
            if math.prod(view.stack) * (view.n + view.m) * r * self.min_compression_rate < size
            else 0
        )

    @property
    def memories(self) -> frozenset[str]:
        """The memories of a compressed tensor: `q` with a warm start, `p` too with half-steps,
        `error` with error feedback."""
        factors = ("q", "p") if self.half_step else ("q",)
        return frozenset(factors if self.warm_start else ()) | (
            {ERROR} if self.error_feedback else set()
        )

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """The factors that one parameter begins with.

            >>> from gradwire import PowerSGD, Spec
            >>> from gradwire.core.kernels.numpy import NumpyOps
            >>> memory = PowerSGD(rank=2, half_step=True).memory(NumpyOps(), "w", Spec((64, 32)))
            >>> {key: x.shape for key, x in memory.items()}
            {'q': (2, 32), 'p': (2, 64)}

        Args:
            ops: kernels of the arrays' framework.
            name: of the parameter, from which the random numbers are drawn.
            spec: shape and dtype of the memory.

        Returns:
            `q` (r, m), or (b, r, m) for a stack: uniform on (-1, 1), equal on all replicas and in
            all frameworks. With `half_step` also `p` (r, n), zeros. {} without a warm start. None
            for a parameter that travels uncompressed.
        """
        view = self.view_of(name, spec.shape)
        r = self.rank_of(name, spec.shape)
        if view is None or not r:
            return None
        if not self.warm_start:
            return {}
        n, m = view.sides
        q = random.uniform(ops, random.key(self.seed, f"{name}/q"), (*view.stack, r, m))
        memory = {"q": ops.cast(q, spec.dtype)}
        return (
            memory | {"p": ops.zeros((*view.stack, r, n), spec.dtype)} if self.half_step else memory
        )

    # Not a coroutine round a coroutine: each is resumed for every matrix.
    def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> Program[tuple[LowRank[A], LowRank[A], dict[str, A]]]:
        """One step of power iteration for one parameter (Algorithm 1 of the paper): two averages,
        or one in a half-step.

        Args:
            ops: kernels of the arrays' framework.
            name: of the parameter.
            x: gradient plus error, of the parameter's shape; not donated.
            memory: `q`, and `p` with `half_step`, from the step before; not donated.
            context: the step's number and its phase.

        Returns:
            What this replica sent and what all received, as factors; and the new memory, the
            averaged factor.
        """
        return self._compress(ops, (name,), x, memory, context)

    async def compress_stack(
        self, ops: Ops[A], names: tuple[str, ...], x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[LowRank[A], LowRank[A], dict[str, A]]:
        """`compress` for k parameters of one shape as one stack: every array has a leading axis
        k."""
        own = self._view_in(
            names[0], tuple(x.shape[1:]), {key: factor[0] for key, factor in memory.items()}
        )
        view = dataclasses.replace(own, batch=(len(names), *own.batch))
        factors = {
            key: reshape_if_needed(factor, (*view.stack, *factor.shape[-2:]))
            for key, factor in memory.items()
        }
        sent, received, new = await self._compress(ops, names, x, factors, context, view)
        changed = {
            key: reshape_if_needed(x, tuple(memory[key].shape))
            for key, x in new.items()
            if x is not factors[key]
        }
        return sent, received, memory | changed

    def alike(self, name: str, shape: tuple[int, ...], memory: Mapping[str, A]) -> View | None:
        """The parameter's view: parameters of equal views are compressed as one stack. None without
        a warm start, or where a view pads."""
        if not self.warm_start:
            return None  # Each begins with random factors of its own.
        view = self._view_in(name, shape, memory)
        return view if math.prod(view.shape) == math.prod(shape) else None

    async def _compress(
        self,
        ops: Ops[A],
        names: tuple[str, ...],
        x: A,
        memory: dict[str, A],
        context: StepContext,
        view: View | None = None,
    ) -> tuple[LowRank[A], LowRank[A], dict[str, A]]:
        """The factors of one tensor, or of several that `view` sees as one stack.

        A half-step projects the matrix on one factor of the step before and averages the other; a
        full step makes P first, and ends as the half-step that projects on P.
        """
        view = view or self._view_in(names[0], tuple(x.shape), memory)
        matrix = view.matrices(ops, x)
        wide = (
            ITEMSIZE[ops.dtype_of(matrix)] == 2 and await world_size(assumed=1) > SUMMED_IN_16_BITS
        )
        average_of: Callable[..., Program[A]] = (
            functools.partial(_mean_in_float32, ops) if wide else mean
        )
        on_q = self.half_step and context.phase == 0
        if self.half_step:
            basis = await self._basis(ops, names, "q" if on_q else "p", memory)
        else:
            if self.warm_start:
                q = await self._basis(ops, names, "q", memory)
            else:
                q = await self._drawn(ops, names[0], view, matrix, context)
            p = await average_of(await multiply(ops, q, matrix.mT))
            basis = await orthonormalize(ops, p, epsilon=self.orthogonalization_epsilon)
        local = await multiply(ops, basis, matrix.mT if on_q else matrix)
        low_rank: Callable[[A, A], LowRank[A]] = LowRank if on_q == view.transposed else _transposed
        sent = low_rank(basis, local)
        # That of a padded matrix would need memory of its own: it can wait.
        residual = None if self.square else context.residual(sent)
        average = await average_of(local, overlap=residual)
        new = {"p" if on_q else "q": average} if self.warm_start else {}
        return sent, low_rank(basis, average), memory | new

    def _basis(
        self, ops: Ops[A], names: tuple[str, ...], kind: str, memory: Mapping[str, A]
    ) -> Program[A]:
        """Orthonormal rows from a factor of the step before, `kind`; directions it has lost are
        drawn anew."""
        factor = memory[kind]
        shape, dtype = tuple(factor.shape), ops.dtype_of(factor)

        def draw() -> A:
            own = shape if len(names) == 1 else (shape[0] // len(names), *shape[1:])
            drawn = [
                random.uniform(ops, random.key(self.seed, f"{name}/{kind}"), own) for name in names
            ]
            return ops.cast(drawn[0] if len(names) == 1 else ops.stack(drawn).reshape(shape), dtype)

        fresh = ops.constant((self.seed, names, kind, shape, dtype), draw)
        return orthonormalize(
            ops, factor, fresh=fresh, epsilon=self.orthogonalization_epsilon, lasting=True
        )

    def _drawn(
        self, ops: Ops[A], name: str, view: View, matrix: A, context: StepContext
    ) -> Program[A]:
        """Orthonormal rows of this step alone."""
        shape = (*view.stack, min(view.n, view.m, self.wanted_rank(name)), view.sides[1])
        q = random.uniform(ops, random.key(self.seed, f"{name}/q"), shape, context.step)
        return orthonormalize(
            ops, ops.cast(q, ops.dtype_of(matrix)), epsilon=self.orthogonalization_epsilon
        )

    def _view_in(self, name: str, shape: tuple[int, ...], memory: Mapping[str, A]) -> View:
        """The view in a step: what a framework knew of a stack at `init` is known from the factor.
        Raises ValueError if the factor is of another view."""
        factor = tuple(memory["q"].shape) if "q" in memory else None
        key = name, shape, factor
        if key not in self._views_in_steps:
            self._views_in_steps[key] = self._view_with(name, shape, factor)
        return self._views_in_steps[key]

    def _view_with(self, name: str, shape: tuple[int, ...], factor: tuple[int, ...] | None) -> View:
        view = self.view_of(name, shape)
        if factor is not None:
            if (
                factor[:-2]
                and (view is None or not view.stack)
                and Patterns(self.stacked).of(name) is None
            ):
                stacked = (
                    next(
                        (k for k in range(len(shape)) if math.prod(shape[: k + 1]) == factor[0]), -1
                    )
                    + 1
                )
                view = self.view_of(name, StackedShape(shape, stacked))
            if view is None or (*factor[:-2], factor[-1]) != (*view.stack, view.sides[1]):
                options = reproducing(name, shape, factor)
                remedy = (
                    f"That memory is of {options}: give PowerSGD that"
                    if options
                    else "Make the state anew"
                )
                raise ValueError(
                    f"the memory of parameter {name!r} holds a factor of shape {factor}, and"
                    f" {self!r} views the parameter as {view or 'a vector'}. {remedy}"
                )
        assert view is not None  # else it would have no memory
        return view


async def _mean_in_float32(ops: Ops[A], x: A, overlap: Residual[A] | None = None) -> A:
    """The mean of factors of 16 bits, which travel in float32."""
    return ops.cast(await mean(ops.cast(x, "float32"), overlap=overlap), ops.dtype_of(x))


def _transposed(p: A, q: A) -> LowRank[A]:
    return LowRank(q, p)
