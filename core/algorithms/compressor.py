"""Any compressor, with a memory of its error (Seide et al. 2014; Karimireddy et al. 2019, "Error
feedback fixes SignSGD").

Subclass `Compressor` to write a method: `memory` says which tensors it compresses, `compress` does
it for **one** tensor. This file adds the rest, once for all methods: error feedback, warm-up steps,
steps with an inf or NaN, tensors that stay uncompressed.

    x = gradient + error
    sent, received = compress(x)        # this replica's part, the mean of all parts
    error = β · (x - sent)              # local: what this replica has not sent yet. β is
                                        # 1 unless `error_feedback` says less
    gradient = received                 # in its dtype; what a cast takes from it is added
                                        # to the error, if that has more bits
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from gradwire.core.algorithm import State, Stepped, check_specs
from gradwire.core.algorithms.shared.clipping import clipped
from gradwire.core.kernels.payloads import PAYLOADS, Dense, LowRank, Payload, Residual, payloads_of
from gradwire.core.ops import ITEMSIZE, A, Bundled, FloatDtype, Ops, Spec
from gradwire.core.protocol import branch, branch_on_phase, mean_each, step_is_finite, together
from gradwire.core.protocol.programs import Program
from gradwire.core.text.options import AtLeast0, Positive, check_options, more_than
from gradwire.core.text.wording import configured

T = TypeVar("T")

ERROR = "error"
PHASE = "phase"


class Hints(NamedTuple):
    """What a backend may know of a method in order to be fast. No hint changes what is sent, or a
    result by more than rounding.

    Attributes:
        linear: `compress` only multiplies `x` by thin matrices and sends `LowRank`s. JAX hands it
            gradient and error unadded (`gradwire.core.ops.Ops.add_each`), since (G + E) Q = G Q + E
            Q: `PowerSGD` takes 0.01 gradients of temporary memory there, where `pmean` takes 1.00,
            and at rank 1 less time (docs/evidence.md).
        recompute: gradient and error are better added a second time, for the new error, than kept
            in memory while messages travel: on a TPU that spares `TopK` a gradient of memory for a
            pass over it.
        elementwise: devices of a slice may each compress any piece of a tensor: see
            `Compressor.splittable`. What they would gather first are whole gradients, and with
            pieces nothing.
    """

    linear: bool = False
    recompute: bool = False
    elementwise: bool = False


class StepContext(NamedTuple):
    """When a step happens: `step` (an int or a traced int32 scalar) and `phase`, an int below the
    compressor's `phases`. And with which memory: `state`. `stacks`: of what `compress_together` is
    given, the name of each stack → the names of the tensors in it, along a leading axis.

    `q = await mean(local, overlap=context.residual(LowRank(p, local)))` lets a driver compute the
    residual while the last message is on its way. That is written over `x`, of which no more use
    may be made.

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
    state: State[Any] = State()
    stacks: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def residual(self, sent: Any) -> Residual[Any] | None:
        """The residual of the tensor, for the `overlap` of a `mean`.

        Args:
            sent: what this replica sends, as a `LowRank` of the tensor's shape. Anything else:
                there is nothing to compute ahead.

        Returns:
            What a driver computes while the message is on its way. None where no error is kept, or
            `sent` is no `LowRank`.
        """
        if self.left is None or not isinstance(sent, PAYLOADS):
            return None
        self.left.sent = sent
        return self.left


class _Lot(NamedTuple, Generic[A]):
    """What a step works with, by name: `x` is to be compressed, gradient and error; `rest` is not.
    The memory; of each stack the names of its members."""

    x: dict[str, Residual[A]]
    rest: dict[str, A]
    tensors: Mapping[str, Mapping[str, A]]
    bundled: Bundled[A] | None
    step: Any
    state: State[A]


class _Exchanged(NamedTuple, Generic[A]):
    """What the messages of a step have brought, by name: what this replica `sent`, the new memory,
    the averages that are not multiplied out, and those that are."""

    sent: dict[str, Payload[A]]
    memory: dict[str, dict[str, A]]
    received: dict[str, Payload[A]]
    averages: dict[str, A]


@dataclass(frozen=True, kw_only=True, repr=False)
class Compressor(abc.ABC):
    """Base of all compressing algorithms. See `examples/write_your_own.py` for one in fifteen
    lines.

    Fields of a subclass are checked by their annotations, as these are: see
    `gradwire.core.text.options`.

    Examples:
        >>> from gradwire import Compressor, PowerSGD, TopK
        >>> isinstance(TopK(64), Compressor)
        True
        >>> PowerSGD(rank=4, start_step=1000, error_feedback=0.95, max_norm=1.0)
        PowerSGD(rank=4, start_step=1000, error_feedback=0.95, max_norm=1.0)

    Args:
        start_step: number of steps that average uncompressed gradients first.
        error_feedback: add to each gradient the compression error of the ones before. A number β, 0
            < β ≤ 1, is a decay: the error is multiplied by it in every step, so the error of k
            steps ago comes back as βᵏ of itself, and the rest is lost for good. True is 1: nothing
            is lost. With less, or False, the averages and the mean error do not add up to the
            gradients. SparseLoCo takes 0.95, MuLoCo 0.9 (docs/error-feedback.md).
        state_dtype: dtype of memory and factors, by name or as a framework has it: "float32",
            `torch.float32`. None: that of the gradient.
        max_norm: clip the gradient of each replica, before the error is added, to this 2-norm of
            the whole model: see `gradwire.core.algorithms.shared.clipping`. None: it is taken as it
            is. Steps before `start_step` remember nothing, and are not clipped.

    Raises:
        TypeError, ValueError: naming the option, its value and the fix.
    """

    start_step: AtLeast0 = 0
    error_feedback: (
        bool
        | Annotated[
            float,
            more_than(0, 1),
            "1 keeps all of the error, 0.95 is SparseLoCo's; False keeps none",
        ]
    ) = True
    state_dtype: FloatDtype | None = None
    max_norm: Positive | None = None

    #: For speed alone; those of most methods say nothing.
    hints = Hints()

    def __post_init__(self) -> None:
        check_options(self)
        if self.error_feedback == 1:
            object.__setattr__(self, "error_feedback", True)

    def __repr__(self) -> str:
        return configured(self)

    @property
    def phases(self) -> int:
        """How many kinds of step alternate. The phase advances with every finite compressed
        step."""
        return 1

    @property
    def biased(self) -> bool:
        """Whether something of the gradients is lost for good, see `gradwire.testing.check`: then
        the averages and the mean error no longer add up to the gradients, and a checkpoint of the
        mean error holds less than the run's errors. A method whose `received` is not the mean of
        `sent` says `biased = True`."""
        return self.error_feedback is not True or self.max_norm is not None

    @property
    def memories(self) -> frozenset[str] | None:
        """The names of what a compressed tensor remembers, if they are the same for all; None: that
        is not known before there are tensors."""
        return None

    @property
    def per_replica(self) -> frozenset[str]:
        """The names of memories that differ between replicas: the error alone."""
        return frozenset({ERROR})

    @property
    def _only_codes(self) -> bool:
        """Whether nothing is looked at of a large gradient, but the codes that are made of it: see
        `gradwire.core.ops.Ops.add_each`."""
        return False

    @property
    def _overshoots(self) -> bool:
        """Whether an error may be many times as large as what it is of: float16 ends at 65,504."""
        return False

    @property
    def cycle(self) -> int:
        """The number of steps after which what is sent repeats: `phases`."""
        return self.phases

    @abc.abstractmethod
    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """What the method remembers of one tensor before the first step. This also decides which
        tensors are compressed.

        Args:
            ops: kernels of the arrays' framework.
            name: of the parameter; random numbers are drawn from it, so that all replicas and
                frameworks draw the same.
            spec: shape and dtype of the memory: `state_dtype`, or the gradient's.

        Returns:
            Name → array, equal on all replicas; {} if nothing is remembered; None to leave the
            tensor uncompressed. The error is not
            among them: `init` adds it.
        """

    @abc.abstractmethod
    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A | LowRank[A], A | LowRank[A], dict[str, A]]:
        """Compress one tensor.

        An inf or NaN in `x` must reach a `mean`: products pass it on, comparisons may swallow it.
        That is how all replicas hear of it and skip the step; swallowed, it stays in the error for
        good.

        Args:
            ops: kernels.
            name: of the parameter. How much is sent must not depend on it, but through `memory`,
                or `rank_of` where a method has that: a plan looks at one tensor of each kind.
            x: this replica's gradient (with its error); do not donate it.
            memory: from `memory`, or from the step before; do not donate it, the step may yet be
                undone.
            context: when.

        Returns:
            `sent`: what this replica contributed, of `x`'s shape; `received`: its mean over
            replicas; the new memory, equal on all replicas.
        """

    def compress_together(
        self,
        ops: Ops[A],
        x: Mapping[str, A],
        memory: Mapping[str, dict[str, A]],
        context: StepContext,
    ) -> Program[list[tuple[Any, Any, dict[str, A]]]] | None:
        """A program that does for all these tensors what `compress` does for each, in their order;
        None where that is no better. What comes back of a tensor must not depend on what is sent
        beside it. Arrays may be `gradwire.core.kernels.payloads.Coded`. Tensors that are `alike`
        may come as one array, see `StepContext.stacks`, and are answered as one."""
        return None

    def alike(self, name: str, shape: tuple[int, ...], memory: Mapping[str, A]) -> Hashable | None:
        """What a tensor, with this shape of its gradient and this memory of its own, has in common
        with those that `compress_stack`, or `compress_together`, can compress as one stack with it;
        None: nothing."""
        return None

    async def compress_stack(
        self, ops: Ops[A], names: tuple[str, ...], x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A | LowRank[A], A | LowRank[A], dict[str, A]]:
        """`compress` for k tensors that are `alike`, of one shape: with arrays of a leading axis k,
        those in `memory` too.

        A backend asks for it where one large operation costs less than many small ones
        (`gradwire.core.ops.Ops.bundle`).
        """
        raise NotImplementedError(
            f"{type(self).__name__} calls tensors alike, and has no compress_stack"
        )

    def splittable(self, name: str, shape: tuple[int, ...], axis: int | None, pieces: int) -> bool:
        """Whether the devices of a slice may each compress one of as many equal pieces of a tensor,
        as if all was compressed as one. Its memory has arrays of the tensor's shape alone, which
        are cut likewise.

        Args:
            name: of the tensor.
            shape: its shape.
            axis: along which it is cut. None: none can be, and the pieces are those of the flat
                tensor, filled up with zeros.
            pieces: how many. The mean magnitude of a piece (`gradwire.core.ops.Ops.mean_abs`) is
                that of all of them.
        """
        return self.hints.elementwise

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        """The state before the first step: `memory` of each tensor, and with error feedback
        `error`, zeros of the gradient's shape.

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
                for x in memory.values() if isinstance(memory, dict) else (None,):
                    if not hasattr(x, "shape"):
                        raise ValueError(
                            f"{type(self).__name__}.memory({name!r}) returns {memory!r}; return"
                            " arrays by name, such as {'n': ops.zeros((), 'float32')}, or None"
                        )
                if ERROR in memory:
                    raise ValueError(
                        f"{type(self).__name__}.memory({name!r}) makes {ERROR!r}, which is that of"
                        " error feedback; give it another name"
                    )
                state.tensors[name] = memory
                if self.error_feedback:
                    memory[ERROR] = ops.zeros(kept.shape, kept.dtype)
        return state

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> Stepped[A]:
        """Clip, add the error, compress every tensor side by side, and store what is left.
        Arguments and results are those of `Algorithm.step`.

        Before `start_step` all gradients are averaged as they are. If any replica's gradient holds
        inf or NaN, the averages of compressed tensors are NaN on all replicas, and the state is as
        before.
        """
        started = True if self.start_step == 0 else step >= self.start_step
        if not isinstance(started, bool) and (known := ops.truth(started)) is not None:
            started = known
        if started is False:
            return await mean_each(gradients, watched=False), state
        lot = self._with_errors(ops, await self._clipped(ops, gradients), state, step)

        async def dense() -> _Exchanged[A]:
            return _Exchanged({}, {}, {}, await mean_each(gradients, watched=False))

        kinds = [
            partial(self._exchange, ops, gradients, lot, phase) for phase in range(self.phases)
        ]
        # Where the step number is not known, both sides are traced and nothing is written in place.
        exchanged = await branch(started, partial(_in_phase, state.shared.get(PHASE), kinds), dense)
        # Nothing is committed before every average of the step is known to be finite. An inf or NaN
        # in any replica's gradient reaches everyone through the averages, so all replicas decide
        # alike without another message.
        finite = await step_is_finite()
        ok = finite if started is True else finite & started
        after = self._memory_after(ops, ok, lot, exchanged)
        averages = self._settled(ops, ok, finite, lot, exchanged, after)
        if lot.bundled is not None:
            averages, after = lot.bundled.apart(averages, after)
        if self.state_dtype is not None:
            self._cast_back(ops, gradients, averages, after)
        if started is not True:
            averages = {
                name: ops.where(started, each, exchanged.averages[name])
                for name, each in averages.items()
            }
        return {name: averages[name] for name in gradients}, State(
            self._next_phase(ops, ok, state.shared), after
        )

    async def _clipped(self, ops: Ops[A], gradients: Mapping[str, A]) -> dict[str, A]:
        return (
            dict(gradients)
            if self.max_norm is None
            else await clipped(ops, dict(gradients), self.max_norm)
        )

    def _with_errors(self, ops: Ops[A], g: dict[str, A], state: State[A], step: Any) -> _Lot[A]:
        """What is to be sent, before anything is: gradients of one layout as stacks, where that is
        better, plus what was not sent before."""
        # An error that decays is no such sum as a linear method may be handed.
        linear = self.hints.linear and self.error_feedback is True
        tensors: Mapping[str, Mapping[str, A]] = state.tensors
        bundled = None
        if ops.bundles and self.state_dtype is None:
            bundled = ops.bundle(g, tensors, partial(self._alike, g, tensors), multiplied=linear)
        if bundled is not None:
            g, tensors = bundled.gradients, bundled.tensors
        names = [name for name in g if name in tensors]
        rest = (
            {name: each for name, each in g.items() if name not in tensors}
            if len(names) < len(g)
            else {}
        )
        x = list(map(g.__getitem__, names))
        if self.state_dtype is not None:
            x = [ops.cast(each, self.state_dtype) for each in x]
        terms: list[Any] = [None] * len(x)
        if self.error_feedback:
            errors = [tensors[name][ERROR] for name in names]
            if self.hints.recompute and self.state_dtype is None:
                stacks = {} if bundled is None else bundled.names
                terms = [
                    None if n in stacks else both for n, *both in zip(names, x, errors, strict=True)
                ]
            x = ops.add_each(
                x, errors, multiplied=linear, coded=self._only_codes and self.error_feedback is True
            )
        sums = [Residual(ops, each, terms=own) for each, own in zip(x, terms, strict=True)]
        return _Lot(dict(zip(names, sums, strict=True)), rest, tensors, bundled, step, state)

    def _alike(
        self, gradients: Mapping[str, A], tensors: Mapping[str, Mapping[str, A]], name: str
    ) -> Hashable | None:
        if not any(_is_of_compress(type(self), x) for x in ("compress_stack", "compress_together")):
            return None
        own = {key: value for key, value in tensors[name].items() if key != ERROR}
        return self.alike(name, tuple(gradients[name].shape), own)

    async def _exchange(
        self, ops: Ops[A], gradients: Mapping[str, A], lot: _Lot[A], phase: int
    ) -> _Exchanged[A]:
        """All messages of a step in this phase. XLA copies what a branch returns, so nothing as
        large as a gradient is made here."""
        x = lot.x
        memories = {
            name: {key: m for key, m in lot.tensors[name].items() if key != ERROR} for name in x
        }
        stacks = {} if lot.bundled is None else lot.bundled.names
        context = StepContext(lot.step, phase, state=lot.state, stacks=stacks)
        joint = None
        if _is_of_compress(type(self), "compress_together"):
            joint = self.compress_together(
                ops, {name: left.x for name, left in x.items()}, memories, context
            )
        programs: list[Program[Any]] = [] if joint is None else [joint]
        # A kernel that computes the residual as it commits it takes no longer than one that commits
        # what was computed before.
        early = self.error_feedback and not (self.error_feedback is True and ops.late_residuals)
        for name, left in x.items() if joint is None else ():
            context = StepContext(lot.step, phase, left if early else None, lot.state)
            if name in stacks:
                programs.append(
                    self.compress_stack(ops, stacks[name], left.x, memories[name], context)
                )
            else:
                program = self.compress(ops, name, left.x, memories[name], context)
                if not hasattr(program, "send"):
                    raise ValueError(
                        f"{type(self).__name__}.compress returns a {type(program).__name__}; write"
                        " async def compress"
                    )
                programs.append(program)
        *each, averages = await together([*programs, mean_each(lot.rest)])
        if joint is None:
            for name, found in zip(x, each, strict=True):
                if name not in stacks:
                    self._require_promised(ops, name, gradients[name].shape, memories[name], found)
        for left in x.values():
            # computed by now, or not at all; of a traced branch, whose arrays end with it
            left.sent = None
        results: Any = each if joint is None else each[0]
        sent, means, memory = zip(*results, strict=True) if results else ((), (), ())
        received: dict[str, Payload[A]] = {}
        for name, mean in zip(x, means, strict=True):
            if isinstance(mean, PAYLOADS):
                received[name] = mean
            elif self.state_dtype is None and name not in stacks:
                averages[name] = mean
            else:  # of another dtype, or shape, than the average that a warm-up step has of it
                received[name] = Dense(mean)
        own = dict(zip(x, payloads_of(sent), strict=True))
        return _Exchanged(own, dict(zip(x, memory, strict=True)), received, averages)

    def _require_promised(
        self, ops: Ops[A], name: str, shape: tuple[int, ...], memory: Mapping[str, A], found: Any
    ) -> None:
        """Raise ValueError for what `compress` returns of a tensor and did not promise: arrays of
        other shapes would be broadcast, those of other dtypes cut off, and no error feedback could
        say so."""
        said = f"{type(self).__name__}.compress({name!r})"
        if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[2], Mapping):
            raise ValueError(f"{said} must return (sent, received, memory)")
        for what, array in zip(("sent", "received"), found[:2], strict=True):
            if hasattr(array, "send"):
                raise ValueError(f"{said} returns `{what}` that nobody has awaited; write await")
            if not isinstance(array, PAYLOADS) and not hasattr(array, "shape"):
                raise ValueError(f"{said} returns `{what}` {array!r}, which is no array")
            if not isinstance(array, PAYLOADS) and tuple(array.shape) != tuple(shape):
                raise ValueError(
                    f"{said} returns `{what}` of shape {tuple(array.shape)}; the tensor has"
                    f" {tuple(shape)}"
                )
        for key, array in found[2].items():
            if key not in memory:
                raise ValueError(f"{said} returns memory {key!r}, which `memory` does not make")
            if not hasattr(array, "shape"):
                raise ValueError(
                    f"{said} returns memory {key!r} {array!r}, which is no array; return one, such"
                    f" as memory[{key!r}] + 1"
                )
            if array.dtype != memory[key].dtype:
                made = ops.dtype_of(memory[key])
                raise ValueError(
                    f"{said} returns memory {key!r} of {ops.dtype_of(array)}; `memory` makes"
                    f" {made}. Write ops.cast(x, {made!r})"
                )
            if tuple(array.shape) != tuple(memory[key].shape):
                raise ValueError(
                    f"{said} returns memory {key!r} of shape {tuple(array.shape)}; `memory` makes"
                    f" {tuple(memory[key].shape)}"
                )

    def _memory_after(
        self, ops: Ops[A], ok: A, lot: _Lot[A], exchanged: _Exchanged[A]
    ) -> dict[str, dict[str, A]]:
        """The memory after the step, but for errors."""
        after = {name: dict(lot.tensors[name]) for name in lot.x}

        def note(key: str, names: Iterable[str], values: Sequence[A]) -> None:
            for name, value in zip(names, values, strict=True):
                after[name][key] = value

        # By key: so lie memories, and messages, side by side.
        for key in dict.fromkeys(chain.from_iterable(exchanged.memory.values())):
            new = {
                n: own[key]
                for n, own in exchanged.memory.items()
                if key in own and own[key] is not after[n][key]
            }
            note(key, new, ops.where_each(ok, list(new.values()), [after[n][key] for n in new]))
        return after

    def _settled(
        self,
        ops: Ops[A],
        ok: A,
        finite: A,
        lot: _Lot[A],
        exchanged: _Exchanged[A],
        after: dict[str, dict[str, A]],
    ) -> dict[str, A]:
        """All averages, in the arrays of `x`; NaN throughout if the step was not finite, so that
        everyone skips it. Errors are noted in the memory `after` the step."""
        left: list[Residual[A]] = []
        received: list[Any] = []
        sent: list[Any] = []
        errors: list[A] = []
        for name, each in lot.x.items():
            left.append(each)
            received.append(exchanged.received.get(name) or Dense(exchanged.averages[name]))
            if self.error_feedback:
                sent.append(exchanged.sent[name])
                errors.append(after[name][ERROR])
        if self.error_feedback:
            rests, dense = ops.settle(
                ok, finite, left, sent, errors, received, decay=float(self.error_feedback)
            )
            if self._overshoots:
                rests = [_finite_in_float16(ops, rest) for rest in rests]
            for name, rest in zip(lot.x, rests, strict=True):
                after[name][ERROR] = rest
        else:
            dense = ops.dense_or_nan(finite, received, [each.x for each in left])
        return exchanged.averages | dict(zip(lot.x, dense, strict=True))

    def _cast_back(
        self,
        ops: Ops[A],
        gradients: Mapping[str, A],
        averages: dict[str, A],
        after: Mapping[str, dict[str, A]],
    ) -> None:
        """Averages in the dtypes of their gradients, and errors with what that takes from them, in
        the place of those that are there."""
        dtypes = {name: ops.dtype_of(gradients[name]) for name in after}
        size = ITEMSIZE[str(self.state_dtype)] if self.error_feedback else 0
        shorter = [name for name, dtype in dtypes.items() if ITEMSIZE[dtype] < size]
        xs, errors = [averages[name] for name in shorter], [after[name][ERROR] for name in shorter]
        cast = ops.cast_each(
            xs, [dtypes[name] for name in shorter], errors, decay=float(self.error_feedback)
        )
        for name, x, error in zip(shorter, *cast, strict=True):
            averages[name], after[name][ERROR] = x, error
        averages |= {name: ops.cast(averages[name], dtype) for name, dtype in dtypes.items()}

    def _next_phase(self, ops: Ops[A], ok: A, shared: Mapping[str, A]) -> dict[str, A]:
        if self.phases == 1:
            return dict(shared)
        following = ops.where(shared[PHASE] < self.phases - 1, shared[PHASE] + 1, 0)
        return {**shared, PHASE: ops.where(ok, following, shared[PHASE])}


async def _in_phase(counter: Any, kinds: Sequence[Callable[[], Program[T]]], first: int = 0) -> T:
    """Run the kind of step that the counter names: one of the table, from the `first` on."""
    if first == len(kinds) - 1:
        return await kinds[first]()
    return await branch_on_phase(
        counter, first, kinds[first], partial(_in_phase, counter, kinds, first + 1)
    )


def _finite_in_float16(ops: Ops[A], error: A) -> A:
    """An error, which is donated, without what is inf in float16, for which the next step of all
    replicas would not be finite."""
    if ops.dtype_of(error) != "float16":
        return error
    # what NumPy makes of an array without axes is a number, which nobody can write to
    place = error if error.shape else None
    return ops.where(ops.abs(error) < math.inf, error, 0.0, out=place)


@functools.cache
def _is_of_compress(kind: type, several: str) -> bool:
    """Whether what does many tensors at once does what `compress` does: not where a subclass has a
    `compress` of its own, and inherits the other."""
    first = next(each for each in kind.__mro__ if not {"compress", several}.isdisjoint(vars(each)))
    return several in vars(first)
