"""Any compressor, with a memory of what it left out (Seide et al. 2014; Karimireddy et al. 2019, "Error feedback fixes SignSGD").

Subclass `Compressor` to write a method: `memory` says which tensors it compresses, `compress` does it for **one** tensor. This file
adds the rest, once for all methods: error feedback, the dense start, steps with an inf or NaN, tensors that stay uncompressed.

    x = gradient + error
    sent, received = compress(x)        # this replica's part, the mean of all parts
    error = x - sent                    # local: what this replica has not said yet
    gradient = received
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, Generic, NamedTuple

from gradwire.core.algorithm import State, check_specs
from gradwire.core.clipping import clipped
from gradwire.core.ops import ITEMSIZE, A, Bundled, Ops, Spec, name_of_dtype
from gradwire.core.programs import Program, together
from gradwire.core.requests import branch, branch_on_phase, mean_each, step_is_finite

__all__ = ["Compressor", "LowRank", "Moment"]

ERROR = "error"
PHASE = "phase"


class LowRank(NamedTuple, Generic[A]):
    """The matrix `p.mT @ q`, not multiplied out: `p` (r, n) and `q` (r, m); or a tensor of `n*m` elements in that order.

    Or a stack of them: `p` (b, r, n) and `q` (b, r, m).
    """

    p: A
    q: A


def _nothing(sent: Any) -> Callable[[], None]:
    return lambda: None


class Moment(NamedTuple):
    """When a step happens: `step` (an int or a traced int32 scalar) and `phase`, an int below the compressor's `phases`.

    While the last message is on its way, `at.remainder(sent)` can compute what compression leaves out, if `compress` says so:
    `q = await mean(local, meanwhile=at.remainder(LowRank(p, local)))`. That is written over `x`, of which no more use may be made.
    """

    step: Any
    phase: int = 0
    remainder: Callable[[Any], Callable[[], None]] = _nothing


#: What `compress` returns of a tensor.
Exchange = tuple[A | LowRank[A], A | LowRank[A], dict[str, A]]


@dataclass(frozen=True, kw_only=True, repr=False)
class Compressor(abc.ABC):
    """Base of all compressing algorithms. See `examples/write_your_own.py` for one in fifteen lines.

    Args:
        start_step: number of steps that average uncompressed gradients first.
        error_feedback: add to each gradient what compression left out of the ones before.
        state_dtype: dtype of memory and factors, by name or as a framework has it: "float32", `torch.float32`. None: that of the gradient.
        max_norm: clip the gradient of each replica, before the error is added, to this 2-norm of the whole model: see
            `gradwire.core.clipping`. None: it is taken as it is. Steps before `start_step` remember nothing, and are not clipped.
    """

    start_step: int = 0
    error_feedback: bool = True
    state_dtype: Any = None
    max_norm: float | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and not (self.max_norm > 0 and math.isfinite(self.max_norm)):
            raise ValueError(f"max_norm={self.max_norm} must be a positive number, or None, which does not clip")
        if self.start_step < 0:
            raise ValueError(f"start_step={self.start_step} is negative; 0 compresses from the first step on")
        object.__setattr__(self, "state_dtype", name_of_dtype(self.state_dtype))
        if self.state_dtype is not None and self.state_dtype not in ITEMSIZE:
            raise ValueError(f"state_dtype={self.state_dtype!r} is not one of {', '.join(ITEMSIZE)}, or None")

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if f.default is MISSING or getattr(self, f.name) != f.default]
        options = sorted(changed, key=lambda f: f.default is not MISSING)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in options)})"

    @property
    def phases(self) -> int:
        """How many kinds of step alternate. The phase advances with every finite compressed step."""
        return 1

    @property
    def multiplies_only(self) -> bool:
        """Whether `compress` does nothing to `x` but what `gradwire.core.ops.Ops.add_each` calls multiplied, and sends `LowRank`s."""
        return False

    @property
    def biased(self) -> bool:
        """Whether something of the gradients is lost for good, see `gradwire.testing.check`. A method whose `received` is not the mean of `sent`
        says `biased = True`."""
        return not self.error_feedback or self.max_norm is not None

    @property
    def per_replica(self) -> frozenset[str]:
        return frozenset({ERROR})

    @property
    def cycle(self) -> int:
        return self.phases

    @abc.abstractmethod
    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """Initial memory of a tensor, equal on all replicas (may be empty), or None to leave the tensor uncompressed."""

    @abc.abstractmethod
    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], at: Moment
    ) -> tuple[A | LowRank[A], A | LowRank[A], dict[str, A]]:
        """Compress one tensor.

        An inf or NaN in `x` must reach a `mean`: products pass it on, comparisons may swallow it. That is how all replicas hear
        of it and skip the step; swallowed, it stays in the error for good.

        Args:
            ops: kernels.
            name: of the parameter.
            x: this replica's gradient (with its error); do not donate it.
            memory: from `memory`, or from the step before; do not donate it, the step may yet be undone.
            at: when.

        Returns:
            `sent`: what this replica contributed, of `x`'s shape; `received`: its mean over replicas; the new memory, equal on all
            replicas.
        """

    def alike(self, name: str, shape: tuple[int, ...], memory: Mapping[str, A]) -> Hashable | None:
        """What a tensor has in common with those that can be compressed as one stack with it, by `compress_stack`; None: nothing.

        Args:
            name: of the parameter.
            shape: of its gradient.
            memory: its own.
        """
        return None

    async def compress_stack(
        self, ops: Ops[A], names: tuple[str, ...], x: A, memory: dict[str, A], at: Moment
    ) -> tuple[A | LowRank[A], A | LowRank[A], dict[str, A]]:
        """`compress` for k tensors that are `alike`, of one shape: with arrays of a leading axis k, those in `memory` too.

        A backend asks for it where one large operation is worth more than many small ones (`gradwire.core.ops.Ops.bundled`).
        """
        raise NotImplementedError(f"{type(self).__name__} calls tensors alike, and has no compress_stack")

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        check_specs(specs)
        state: State[A] = State()
        if self.phases > 1:
            state.shared[PHASE] = ops.cast(ops.iota(1), "int32").reshape(())
        for name, spec in specs.items():
            kept = Spec(spec.shape, self.state_dtype or spec.dtype)
            memory = self.memory(ops, name, kept) if spec.size else None
            if memory is not None:
                state.tensors[name] = memory
                if self.error_feedback:
                    memory[ERROR] = ops.zeros(kept.shape, kept.dtype)
        return state

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> tuple[dict[str, A], State[A]]:
        async def dense(g: dict[str, A], s: dict[str, Any]) -> tuple[dict[str, A], dict[str, Any]]:
            return await mean_each(g, watched=False), s

        async def compressed(g: dict[str, A], s: dict[str, Any]) -> tuple[dict[str, A], dict[str, Any]]:
            if self.max_norm is not None:
                g = await clipped(ops, g, self.max_norm)
            bundled = self._bundled(ops, g, s["tensors"])
            if bundled is None:
                return await self._compressed(ops, g, s, step, {})
            joined = {"shared": s["shared"], "tensors": bundled.tensors}
            averages, new = await self._compressed(ops, bundled.gradients, joined, step, bundled.names)
            averages, tensors = bundled.apart(averages, new["tensors"])
            return averages, {"shared": new["shared"], "tensors": tensors}

        started = True if self.start_step == 0 else step >= self.start_step
        # Nested dictionaries, because both sides of a branch return arrays in the containers every framework knows.
        averages, new = await branch(
            started, compressed, dense, dict(gradients), {"shared": state.shared, "tensors": state.tensors}
        )
        return averages, State(new["shared"], new["tensors"])

    def _bundled(
        self, ops: Ops[A], gradients: dict[str, A], tensors: Mapping[str, Mapping[str, A]]
    ) -> Bundled[A] | None:
        if not (self.multiplies_only and self.error_feedback and self.state_dtype is None):
            return None

        def alike(name: str) -> Hashable | None:
            own = {key: value for key, value in tensors[name].items() if key != ERROR}
            return self.alike(name, tuple(gradients[name].shape), own)

        return ops.bundled(gradients, tensors, alike)

    async def _compressed(
        self,
        ops: Ops[A],
        gradients: dict[str, A],
        state: dict[str, Any],
        step: Any,
        stacks: Mapping[str, tuple[str, ...]],
    ) -> tuple[dict[str, A], dict[str, Any]]:
        """`stacks`: name that stands for a stack → names of its members."""
        tensors, shared = state["tensors"], dict(state["shared"])
        x = self._with_errors(ops, {name: g for name, g in gradients.items() if name in tensors}, tensors)
        own = {name: dict(tensors[name]) for name in x}
        for memory in own.values():
            memory.pop(ERROR, None)
        uncompressed = {name: g for name, g in gradients.items() if name not in tensors}
        early: set[str] = set()  # those of `x` of which only the remainder is left

        def remainder(name: str, sent: A | LowRank[A]) -> Callable[[], None]:
            def subtract() -> None:
                if not self.error_feedback or not isinstance(sent, LowRank):
                    return
                rest = _subtract_unpadded(ops, x[name], sent, x[name])
                if rest is not None:
                    x[name] = rest
                    early.add(name)

            return subtract

        async def exchange(phase: int) -> tuple[dict[str, Exchange[A]], dict[str, A]]:
            """All messages, in this phase or, if it is not the time for that one, in a later one."""

            # XLA copies what a branch returns, so nothing as large as a gradient is made here.
            async def now() -> tuple[dict[str, Exchange[A]], dict[str, A]]:
                programs: list[Program[Any]] = []
                for name in x:
                    at = Moment(step, phase, partial(remainder, name))
                    if name in stacks:
                        programs.append(self.compress_stack(ops, stacks[name], x[name], own[name], at))
                    else:
                        programs.append(self.compress(ops, name, x[name], own[name], at))
                results: list[Any] = await together([*programs, mean_each(uncompressed)])
                return dict(zip(x, results, strict=False)), results[-1]

            if phase == self.phases - 1:
                return await now()
            return await branch_on_phase(shared[PHASE], phase, now, partial(exchange, phase + 1))

        exchanged, averages = await exchange(0)
        # Nothing is committed before every average of the step is known to be finite. An inf or NaN in any replica's gradient
        # reaches everyone through the averages, so all replicas decide alike without another message.
        ok = await step_is_finite()
        after = self._settled(ops, ok, x, tensors, exchanged, early)
        for name, average in _expanded(ops, ok, {name: received for name, (_, received, _) in exchanged.items()}, x):
            averages[name] = average if self.state_dtype is None else ops.cast(average, ops.dtype_of(gradients[name]))
        if self.phases > 1:
            following = ops.where(shared[PHASE] < self.phases - 1, shared[PHASE] + 1, 0)
            shared[PHASE] = ops.where(ok, following, shared[PHASE])
        return {name: averages[name] for name in gradients}, {"shared": shared, "tensors": after}

    def _with_errors(
        self, ops: Ops[A], gradients: dict[str, A], tensors: Mapping[str, Mapping[str, A]]
    ) -> dict[str, A]:
        x = list(gradients.values())
        if self.state_dtype is not None:
            x = [ops.cast(g, self.state_dtype) for g in x]
        if self.error_feedback:
            x = ops.add_each(x, [tensors[name][ERROR] for name in gradients], multiplied=self.multiplies_only)
        return dict(zip(gradients, x, strict=True))

    def _settled(
        self,
        ops: Ops[A],
        ok: A,
        x: Mapping[str, A],
        tensors: Mapping[str, Mapping[str, A]],
        exchanged: Mapping[str, Exchange[A]],
        early: Collection[str],
    ) -> dict[str, dict[str, A]]:
        """The memory after the step. `early`: tensors of which `x` is the remainder already."""
        after = {name: dict(tensors[name]) for name in exchanged}
        changed: dict[str, list[tuple[str, A, A]]] = {}  # by key: so lie memories, and messages, side by side
        for name, (sent, _, new) in exchanged.items():
            for key, old in tensors[name].items():
                if key == ERROR and name not in early:
                    after[name][key] = ops.where_lazy(ok, partial(_subtract, ops, x[name], sent), old)
                    continue
                value = x[name] if key == ERROR else new[key]
                if value is not old:
                    changed.setdefault(key, []).append((name, value, old))
        for key, each in changed.items():
            names, news, olds = zip(*each, strict=True)
            for name, value in zip(names, ops.where_each(ok, news, olds), strict=True):
                after[name][key] = value
        return after


def _dense_shape(low_rank: LowRank[A]) -> tuple[int, ...]:
    """(n, m), or (b, n, m) of a stack."""
    *stack, _, n = low_rank.p.shape
    return (*stack, n, low_rank.q.shape[-1])


def _subtract(ops: Ops[A], x: A, sent: A | LowRank[A], out: A | None) -> A:
    if not isinstance(sent, LowRank):
        return ops.add(x, sent * -1.0, out=out)
    rest: A | None = _subtract_unpadded(ops, x, sent, out)
    if rest is not None:
        return rest
    dense, shape = _dense_shape(sent), tuple(x.shape)
    padded = ops.pad(x.reshape((-1,)), math.prod(dense)).reshape(dense)
    rest = ops.subtract_product(padded, sent.p, sent.q, out=padded)
    return rest.reshape((-1,))[: math.prod(shape)].reshape(shape)


def _subtract_unpadded(ops: Ops[A], x: A, sent: LowRank[A], out: A | None) -> A | None:
    """None if `x` was padded to be a matrix."""
    shape, matrix = x.shape, _dense_shape(sent)
    if shape == matrix:
        return ops.subtract_product(x, sent.p, sent.q, out=out)
    if math.prod(shape) != math.prod(matrix):
        return None
    destination = None if out is None else out.reshape(matrix)
    return ops.subtract_product(x.reshape(matrix), sent.p, sent.q, out=destination).reshape(shape)


def _expanded(
    ops: Ops[A], ok: A, received: Mapping[str, A | LowRank[A]], out: Mapping[str, A]
) -> Iterator[tuple[str, A]]:
    """What was received as dense tensors in `out`'s places; NaN throughout if the step was not finite, so that everyone skips it."""
    low_rank = {name: each for name, each in received.items() if isinstance(each, LowRank)}
    # NaN in the small factor is NaN everywhere in the product, even where the other factor is zero.
    factors = ops.nan_unless(ok, [each.q for each in low_rank.values()])
    for (name, each), q in zip(low_rank.items(), factors, strict=True):
        x, matrix = out[name], _dense_shape(each)
        shape = x.shape
        if shape == matrix:
            yield name, ops.matmul(each.p.mT, q, out=x)
        elif math.prod(shape) == math.prod(matrix):
            yield name, ops.matmul(each.p.mT, q, out=x.reshape(matrix)).reshape(shape)
        else:
            yield name, ops.matmul(each.p.mT, q).reshape((-1,))[: math.prod(shape)].reshape(shape)
    for name, dense in received.items():
        if not isinstance(dense, LowRank):
            yield name, ops.where(ok, dense, float("nan"), out=out[name])
