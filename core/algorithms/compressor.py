"""Any compressor, with a memory of its error (Seide et al. 2014; Karimireddy et al. 2019, "Error feedback fixes SignSGD").

Subclass `Compressor` to write a method: `memory` says which tensors it compresses, `compress` does it for **one** tensor. This file
adds the rest, once for all methods: error feedback, warm-up steps, steps with an inf or NaN, tensors that stay uncompressed.

    x = gradient + error
    sent, received = compress(x)        # this replica's part, the mean of all parts
    error = β · (x - sent)              # local: what this replica has not said yet; β is 1 unless `error_feedback` says less
    gradient = received
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from gradwire.core.algorithm import State, Stepped, check_specs
from gradwire.core.algorithms.shared.clipping import clipped
from gradwire.core.codecs.codec import Coded
from gradwire.core.kernels.low_rank import LowRank, Residual, multiplied, subtracted, subtracted_if
from gradwire.core.ops import A, Bundled, FloatDtype, Ops, Spec, largest_error, wide_dtype
from gradwire.core.protocol import branch, branch_on_phase, mean_each, step_is_finite, together
from gradwire.core.protocol.programs import Program
from gradwire.core.text.options import AtLeast0, Positive, check_options, more_than
from gradwire.core.text.wording import configured

T = TypeVar("T")

ERROR = "error"
PHASE = "phase"


class StepContext(NamedTuple):
    """When a step happens: `step` (an int or a traced int32 scalar) and `phase`, an int below the compressor's `phases`.

    `q = await mean(local, overlap=context.residual(LowRank(p, local)))` lets a driver compute the residual while the last
    message is on its way. That is written over `x`, of which no more use may be made.

    Examples:
        >>> from gradwire import StepContext
        >>> StepContext(step=7).phase
        0
        >>> StepContext(step=7).residual(None) is None
        True
    """

    step: Any
    phase: int = 0
    left: Residual[Any] | None = None

    def residual(self, sent: Any) -> Residual[Any] | None:
        """The residual of the tensor, for the `overlap` of a `mean`.

        Args:
            sent: what this replica sends, as a `LowRank` of the tensor's shape. Anything else: there is nothing to compute ahead.

        Returns:
            What a driver computes while the message is on its way. None where no error is kept, or `sent` is no `LowRank`.
        """
        if self.left is None or not isinstance(sent, LowRank):
            return None
        self.left.sent = sent
        return self.left


class _Given(NamedTuple, Generic[A]):
    """What a step sends, by name: what is compressed, with its error, and what is not; the memory; of each stack the names of its members."""

    x: dict[str, Residual[A]]
    uncompressed: dict[str, A]
    tensors: Mapping[str, Mapping[str, A]]
    stacks: Mapping[str, tuple[str, ...]]
    step: Any


class _Exchanged(NamedTuple, Generic[A]):
    """What the messages of a step have brought, by name: what this replica `sent`, the new memory, the averages as factors, as codes and as they are."""

    sent: dict[str, A | LowRank[A] | Coded[A]]
    memory: dict[str, dict[str, A]]
    factors: dict[str, LowRank[A]]
    coded: dict[str, Coded[A]]
    averages: dict[str, A]


@dataclass(frozen=True, kw_only=True, repr=False)
class Compressor(abc.ABC):
    """Base of all compressing algorithms. See `examples/write_your_own.py` for one in fifteen lines.

    Fields of a subclass are checked by their annotations, as these are: see `gradwire.core.text.options`.

    Examples:
        >>> from gradwire import Compressor, PowerSGD, TopK
        >>> isinstance(TopK(64), Compressor)
        True
        >>> PowerSGD(rank=4, start_step=1000, error_feedback=0.95, max_norm=1.0)
        PowerSGD(rank=4, start_step=1000, error_feedback=0.95, max_norm=1.0)

    Args:
        start_step: number of steps that average uncompressed gradients first.
        error_feedback: add to each gradient the compression error of the ones before. A number β, 0 < β ≤ 1, is a decay: the error is
            multiplied by it in every step, so the error of k steps ago comes back as βᵏ of itself, and the rest is lost for good. True
            is 1: nothing is lost. With less, or False, the averages and the mean error do not add up to the gradients. SparseLoCo takes 0.95, MuLoCo 0.9 (docs/error-feedback.md).
        state_dtype: dtype of memory and factors, by name or as a framework has it: "float32", `torch.float32`. None: that of the gradient.
        max_norm: clip the gradient of each replica, before the error is added, to this 2-norm of the whole model: see
            `gradwire.core.algorithms.shared.clipping`. None: it is taken as it is. Steps before `start_step` remember nothing, and are not clipped.

    Raises:
        TypeError, ValueError: naming the option, its value and the fix.
    """

    start_step: AtLeast0 = 0
    error_feedback: (
        bool | Annotated[float, more_than(0, 1), "1 keeps all of the error, 0.95 is SparseLoCo's; False keeps none"]
    ) = True
    state_dtype: FloatDtype | None = None
    max_norm: Positive | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.error_feedback == 1:
            object.__setattr__(self, "error_feedback", True)

    def __repr__(self) -> str:
        return configured(self)

    @property
    def phases(self) -> int:
        """How many kinds of step alternate. The phase advances with every finite compressed step."""
        return 1

    @property
    def multiplies_only(self) -> bool:
        """Whether `compress` only multiplies `x` by thin matrices and sends `LowRank`s, as `PowerSGD` does; False unless a method says so.

        A backend may then hand it gradient and error unadded (`gradwire.core.ops.Ops.add_each`), since (G + E) Q = G Q + E Q: that saves a pass over
        memory.
        """
        return False

    @property
    def adds_twice(self) -> bool:
        """Whether gradient and error are better added a second time, for the new error, than kept in memory while messages travel."""
        return False

    @property
    def biased(self) -> bool:
        """Whether something of the gradients is lost for good, see `gradwire.testing.check`: then the averages and the mean error no longer add up to the
        gradients, and a checkpoint of the mean error holds less than the run's errors. A method whose `received` is not the mean of `sent` says
        `biased = True`."""
        return self.error_feedback is not True or self.max_norm is not None

    @property
    def memories(self) -> frozenset[str] | None:
        """The names of what a compressed tensor remembers, if they are the same for all; None: that is not known before there are tensors."""
        return None

    @property
    def per_replica(self) -> frozenset[str]:
        """The names of memories that differ between replicas: the error alone."""
        return frozenset({ERROR})

    @property
    def cycle(self) -> int:
        """After how many steps what is sent repeats: `phases`."""
        return self.phases

    @abc.abstractmethod
    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """What the method remembers of one tensor before the first step. This also decides which tensors are compressed.

        Args:
            ops: kernels of the arrays' framework.
            name: of the parameter; random numbers are drawn from it, so that all replicas and frameworks draw the same.
            spec: shape and dtype of the memory: `state_dtype`, or the gradient's.

        Returns:
            Name → array, equal on all replicas; {} if nothing is remembered; None to leave the tensor uncompressed. The error is not
            among them: `init` adds it.
        """

    @abc.abstractmethod
    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A | LowRank[A], A | LowRank[A], dict[str, A]]:
        """Compress one tensor.

        An inf or NaN in `x` must reach a `mean`: products pass it on, comparisons may swallow it. That is how all replicas hear
        of it and skip the step; swallowed, it stays in the error for good.

        Args:
            ops: kernels.
            name: of the parameter. How much is sent must not depend on it, but through `memory`,
                or `rank_of` where a method has that: a plan looks at one tensor of each kind.
            x: this replica's gradient (with its error); do not donate it.
            memory: from `memory`, or from the step before; do not donate it, the step may yet be undone.
            context: when.

        Returns:
            `sent`: what this replica contributed, of `x`'s shape; `received`: its mean over replicas; the new memory, equal on all
            replicas.
        """

    def compress_together(
        self, ops: Ops[A], x: Mapping[str, A], memory: Mapping[str, dict[str, A]], step: Any
    ) -> Program[list[tuple[Any, Any, dict[str, A]]]] | None:
        """A program that does for all these tensors what `compress` does for each, in their order; None where that is no better. What comes back of a
        tensor must not depend on what is sent beside it. Arrays may be `gradwire.core.codecs.codec.Coded` where an error is kept whole."""
        return None

    def alike(self, name: str, shape: tuple[int, ...], memory: Mapping[str, A]) -> Hashable | None:
        """What a tensor, with this shape of its gradient and this memory of its own, has in common with those that `compress_stack` can compress
        as one stack with it; None: nothing."""
        return None

    async def compress_stack(
        self, ops: Ops[A], names: tuple[str, ...], x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A | LowRank[A], A | LowRank[A], dict[str, A]]:
        """`compress` for k tensors that are `alike`, of one shape: with arrays of a leading axis k, those in `memory` too.

        A backend asks for it where one large operation costs less than many small ones (`gradwire.core.ops.Ops.bundled`).
        """
        raise NotImplementedError(f"{type(self).__name__} calls tensors alike, and has no compress_stack")

    def by_pieces(self, name: str, shape: tuple[int, ...], axis: int | None, pieces: int) -> bool:
        """Whether the devices of a slice may each compress one of as many equal pieces of a tensor, as if all was compressed as one. Its memory has arrays
        of the tensor's shape alone, which are cut likewise.

        Args:
            name: of the tensor.
            shape: its shape.
            axis: along which it is cut. None: none can be, and the pieces are those of the flat tensor, filled up with zeros.
            pieces: how many. The mean magnitude of a piece (`gradwire.core.ops.Ops.mean_abs`) is that of all of them.
        """
        return False

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        """The state before the first step: `memory` of each tensor, and with error feedback `error`, zeros of the gradient's shape.

        Args:
            ops: kernels of the arrays' framework.
            specs: parameter name → shape and dtype of its gradient.

        Raises:
            ValueError: a dtype that cannot be averaged, with the parameter's name.
        """
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

    async def step(self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any) -> Stepped[A]:
        """Clip, add the error, compress every tensor side by side, and store what is left. Arguments and results are those of `Algorithm.step`.

        Before `start_step` all gradients are averaged as they are. If any replica's gradient holds inf or NaN, the averages of compressed tensors are NaN
        on all replicas, and the state is as before.
        """
        started = True if self.start_step == 0 else step >= self.start_step
        if not isinstance(started, bool) and (known := ops.truth(started)) is not None:
            started = known
        if started is False:
            return await mean_each(gradients, watched=False), state
        g, tensors, shared = dict(gradients), state.tensors, dict(state.shared)
        if self.max_norm is not None:
            g = await clipped(ops, g, self.max_norm)
        stacks: Mapping[str, tuple[str, ...]] = {}
        bundled = self._bundled(ops, g, tensors)
        if bundled is not None:
            g, tensors, stacks = bundled.gradients, bundled.tensors, bundled.names
        x = self._with_errors(ops, {name: each for name, each in g.items() if name in tensors}, tensors)
        given = _Given(x, {name: each for name, each in g.items() if name not in tensors}, tensors, stacks, step)

        async def dense() -> _Exchanged[A]:
            return _Exchanged({}, {}, {}, {}, await mean_each(gradients, watched=False))

        phases = [partial(self._exchange, ops, gradients, given, phase) for phase in range(self.phases)]
        # Where the step number is not known, both sides are traced and nothing is written in place.
        exchanged = await branch(started, partial(_in_phase, shared.get(PHASE), phases), dense)
        # Nothing is committed before every average of the step is known to be finite. An inf or NaN in any replica's gradient
        # reaches everyone through the averages, so all replicas decide alike without another message.
        finite = await step_is_finite()
        ok = finite if started is True else finite & started
        if self.adds_twice and self.error_feedback and self.state_dtype is None:
            errors = [tensors[name][ERROR] for name in x]
            sums = ops.sum_again(ok, [each.x for each in x.values()], [g[name] for name in x], errors)
            x = {name: Residual(ops, each) for name, each in zip(x, sums, strict=True)}
        after = self._memory_after(ops, ok, x, tensors, exchanged)
        averages = self._averages(ops, finite, gradients, x, exchanged)
        if bundled is not None:
            averages, after = bundled.apart(averages, after)
        if started is not True:
            averages = {name: ops.where(started, each, exchanged.averages[name]) for name, each in averages.items()}
        if self.phases > 1:
            following = ops.where(shared[PHASE] < self.phases - 1, shared[PHASE] + 1, 0)
            shared[PHASE] = ops.where(ok, following, shared[PHASE])
        return {name: averages[name] for name in gradients}, State(shared, after)

    async def _exchange(self, ops: Ops[A], gradients: Mapping[str, A], given: _Given[A], phase: int) -> _Exchanged[A]:
        """All messages of a step in this phase. XLA copies what a branch returns, so nothing as large as a gradient is made here."""
        programs: list[Program[Any]] = []
        x = given.x
        # A kernel that computes the residual as it commits it takes no longer than one that commits what was computed before.
        early = self.error_feedback and not (self.error_feedback is True and ops.fused is not None)
        memories = {name: {key: m for key, m in given.tensors[name].items() if key != ERROR} for name in x}
        joint = self.compress_together(ops, {name: left.x for name, left in x.items()}, memories, given.step)
        for name, left in x.items() if joint is None else ():
            memory = memories[name]
            context = StepContext(given.step, phase, left if early else None)
            if name in given.stacks:
                programs.append(self.compress_stack(ops, given.stacks[name], left.x, memory, context))
            else:
                programs.append(self.compress(ops, name, left.x, memory, context))
        programs = programs if joint is None else [joint]
        *each, averages = await together([*programs, mean_each(given.uncompressed)])
        for left in x.values():
            left.sent = None  # computed by now, or not at all; of a traced branch, whose arrays end with it
        results: Any = each if joint is None else each[0]
        columns = zip(*results, strict=True) if results else ((), (), ())
        sent, received, new = (dict(zip(x, column, strict=True)) for column in columns)
        factors = {name: each for name, each in received.items() if isinstance(each, LowRank)}
        coded = {name: each for name, each in received.items() if isinstance(each, Coded)}
        dense = {
            name: self._like(ops, received[name], gradients[name])
            for name in x
            if name not in factors and name not in coded
        }
        return _Exchanged(sent, new, factors, coded, averages | dense)

    def _bundled(
        self, ops: Ops[A], gradients: dict[str, A], tensors: Mapping[str, Mapping[str, A]]
    ) -> Bundled[A] | None:
        if not (self.multiplies_only and self.error_feedback is True and self.state_dtype is None):
            return None

        def alike(name: str) -> Hashable | None:
            own = {key: value for key, value in tensors[name].items() if key != ERROR}
            return self.alike(name, tuple(gradients[name].shape), own)

        return ops.bundled(gradients, tensors, alike)

    def _with_errors(
        self, ops: Ops[A], gradients: dict[str, A], tensors: Mapping[str, Mapping[str, A]]
    ) -> dict[str, Residual[A]]:
        """What is to be sent of each tensor, before anything is."""
        x = list(gradients.values())
        if self.state_dtype is not None:
            x = [ops.cast(g, self.state_dtype) for g in x]
        if self.error_feedback:
            multiplied = self.multiplies_only and self.error_feedback is True  # an error that decays is no such sum
            x = ops.add_each(x, [tensors[name][ERROR] for name in gradients], multiplied=multiplied)
        return {name: Residual(ops, each) for name, each in zip(gradients, x, strict=True)}

    def _like(self, ops: Ops[A], average: A, gradient: A) -> A:
        return average if self.state_dtype is None else ops.cast(average, ops.dtype_of(gradient))

    def _memory_after(
        self,
        ops: Ops[A],
        ok: A,
        x: Mapping[str, Residual[A]],
        tensors: Mapping[str, Mapping[str, A]],
        exchanged: _Exchanged[A],
    ) -> dict[str, dict[str, A]]:
        """The memory after the step."""
        after = {name: dict(tensors[name]) for name in x}

        def commit(key: str, new: Mapping[str, A], limits: Sequence[float] = ()) -> None:
            # By key: so lie memories, and messages, side by side.
            kept = ops.where_each(ok, list(new.values()), [tensors[name][key] for name in new], limits=limits)
            for name, value in zip(new, kept, strict=True):
                after[name][key] = value

        for key in dict.fromkeys(chain.from_iterable(exchanged.memory.values())):
            new = {
                name: own[key]
                for name, own in exchanged.memory.items()
                if key in own and own[key] is not tensors[name][key]
            }
            if new:
                commit(key, new)
        if self.error_feedback:
            early = {name: self._decayed(ops, residual.x) for name, residual in x.items() if residual.computed}
            if early:
                commit(ERROR, early, [largest_error(ops, tensors[name][ERROR]) for name in early])
            late = [name for name in x if name not in early]
            dense = [name for name in late if not isinstance(exchanged.sent[name], (LowRank, Coded))]
            if dense and (errors := self._all_errors(ops, x, exchanged.sent, dense)) is not None:
                limits = [largest_error(ops, tensors[name][ERROR]) for name in dense]
                commit(ERROR, dict(zip(dense, errors, strict=True)), limits)
                late = [name for name in late if name not in dense]
            for name in late:
                error = tensors[name][ERROR]
                sent: Any = exchanged.sent[name]
                kept = self._fused_error_after(ops, ok, x[name].x, sent, error)
                if kept is None:
                    rest = partial(self._error_after, ops, x[name].x, sent)
                    kept = ops.where_lazy(ok, rest, error, limit=largest_error(ops, error))
                after[name][ERROR] = kept
        return after

    def _fused_error_after(self, ops: Ops[A], ok: A, x: A, sent: Any, error: A) -> A | None:
        """The error, where one kernel computes and commits it."""
        if ops.fused is None or self.error_feedback is not True:
            return None
        if isinstance(sent, LowRank):
            return subtracted_if(ops.fused, ok, x, sent, error)
        if not isinstance(sent, Coded) or sent.lost is None:
            return None
        return ops.fused.subtract_decoded_if(ok, x, sent.codes, sent.scales, sent.lost, sent.first, error)

    def _all_errors(
        self, ops: Ops[A], x: Mapping[str, Residual[A]], sent: Mapping[str, Any], names: Sequence[str]
    ) -> list[A] | None:
        """The compression errors of these, in their arrays, where they have to be computed in any case."""
        errors = ops.subtract_each([x[name].x for name in names], [sent[name] for name in names])
        return None if errors is None else [self._decayed(ops, each) for each in errors]

    def _error_after(self, ops: Ops[A], x: A, sent: A | LowRank[A], out: A | None) -> A:
        return self._decayed(ops, _less(ops, x, sent, out))

    def _decayed(self, ops: Ops[A], error: A) -> A:
        """The error of the next step, in the array of the residual of this one."""
        if self.error_feedback is True:
            return error
        dtype = wide_dtype(ops.dtype_of(error))
        decay = ops.constant(("decay", self.error_feedback, dtype), lambda: ops.asarray(self.error_feedback, dtype))
        return ops.scale_each([error], decay)[0]

    def _averages(
        self, ops: Ops[A], finite: A, gradients: Mapping[str, A], x: Mapping[str, Residual[A]], exchanged: _Exchanged[A]
    ) -> dict[str, A]:
        """All averages, in the arrays of `x`; NaN throughout if the step was not finite, so that everyone skips it."""
        averages = dict(exchanged.averages)
        # NaN in the small factor is NaN everywhere in the product, even where the other factor is zero.
        factors = ops.nan_unless(finite, [each.q for each in exchanged.factors.values()])
        for (name, each), q in zip(exchanged.factors.items(), factors, strict=True):
            averages[name] = self._like(ops, multiplied(ops, each.p, q, out=x[name].x), gradients[name])
        if exchanged.coded and ops.fused is not None:
            codes, scales, *_ = zip(*exchanged.coded.values(), strict=True)
            decoded = ops.fused.decoded_each(finite, codes, scales, [x[name].x for name in exchanged.coded])
            for name, average in zip(exchanged.coded, decoded, strict=True):
                averages[name] = self._like(ops, average, gradients[name])
        dense = [name for name in x if name not in exchanged.factors and name not in exchanged.coded]
        places = [x[name].x for name in dense] if self.state_dtype is None else None
        return averages | dict(
            zip(dense, ops.nan_unless(finite, [averages[name] for name in dense], out=places), strict=True)
        )


async def _in_phase(counter: Any, kinds: Sequence[Callable[[], Program[T]]], first: int = 0) -> T:
    """Run the kind of step that the counter names: one of the table, from the `first` on."""
    if first == len(kinds) - 1:
        return await kinds[first]()
    return await branch_on_phase(counter, first, kinds[first], partial(_in_phase, counter, kinds, first + 1))


def _less(ops: Ops[A], x: A, sent: A | LowRank[A], out: A | None) -> A:
    if isinstance(sent, LowRank):
        rest: A = subtracted(ops, x, sent, out=out)
        return rest

    if out is None:
        return x - sent  # in this shape, in which what it is made of and what is made of it are

    def rows(x: A, sent: A, out: A | None = None) -> A:
        return x - sent if out is None else ops.add(x, ops.multiply(sent, -1.0), out=out)

    flat = (math.prod(x.shape), 1)
    return ops.by_rows(rows, x.reshape(flat), sent.reshape(flat), out=out.reshape(flat)).reshape(tuple(x.shape))
