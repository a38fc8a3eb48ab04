"""`Auto` in JAX: a compiled step for each of a few methods, and which of them is called next.

A compiled step cannot change its method, so the choice lies outside. What is chosen is decided by
`gradwire.core.advise.choosing.chooser.Chooser`, or was by the run whose decisions are repeated.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.sharding import Mesh

from gradwire.core.advise.advice import name_of
from gradwire.core.advise.choosing.chooser import Chooser
from gradwire.core.advise.choosing.methods import (
    Auto,
    Chosen,
    Decisions,
    appended,
    change_in_words,
    expected_order,
    methods_of,
    read_or_begin,
)
from gradwire.core.advise.choosing.step_times import StepTimes
from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.compressor import ERROR
from gradwire.core.plan.advice import CompressionWarning
from gradwire.core.text.options import short
from gradwire.core.text.units import time_of
from gradwire.jax_backend.advise.method_cost import method_cost
from gradwire.jax_backend.axes.mapped_axis import AxisName, axes_of
from gradwire.jax_backend.checks import configuration_of
from gradwire.jax_backend.choosing.late_processes import LateProcesses
from gradwire.jax_backend.choosing.owed import OwedState, continued, with_owed
from gradwire.jax_backend.choosing.processes import (
    Messages,
    said_by_the_first,
    same_on_all,
    same_process,
)
from gradwire.jax_backend.choosing.step_ends import StepEnds
from gradwire.jax_backend.engine.barrier import meet
from gradwire.jax_backend.state.names import flatten, specs_of, stacks_of
from gradwire.jax_backend.state.placement import distribute, replicate
from gradwire.jax_backend.state.trees import by_parameter
from gradwire.jax_backend.state.types import known_number
from gradwire.jax_backend.transforms import average_gradients

logger = logging.getLogger("gradwire")

#: What makes a training of the transformation that averages: its state, as it is before
#: `distribute` or `replicate`, and its step, by `jax.jit` or `jax.pmap`.
Build = Callable[[optax.GradientTransformationExtraArgs], tuple[Any, Any]]

#: So many methods at most: each is one more program to compile.
MOST = 3
#: Steps between questions whether all have been compiled; and before the time of a step is asked
#: for, so that a device always has its next one.
ASKED, LATE = 4, 1
#: Of a compiled step: it is, it is not yet, and it never will be.
READY, WAITING, FAILED = 0.0, 1.0, 2.0
#: What JAX raises where numbers of an array are asked for that has shapes alone.
NUMBERS_ASKED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


class AutoStep:
    """A training that chooses among the methods of `gradwire.Auto` while it runs.

        def build(average):                          # the training as it is with one method
            tx = optax.chain(average, optax.adamw(3e-4))
            state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
            return state, jax.pmap(train_step, axis_name="data", donate_argnums=0)

        auto = AutoStep(gradwire.Auto(), build, axis_name="data")
        state = auto.init()
        for batch in batches:
            state, loss = auto.step(state, batch)

    It begins with uncompressed averages, and compiles the steps of the other methods meanwhile, in
    a thread. Then each averages some real steps; see
    `gradwire.core.advise.choosing.chooser.Chooser`. The slowest process counts, and all of them
    change in the same step. The state is moved between methods on its devices: the memory that both
    have stays, and a compression error that has no place any more is added to the next gradients
    once.

    Args:
        auto: among which methods, of which the first three count, uncompressed averages included,
            in their order; and the log of decisions.
        build: called once for each method. Everything but the averages must be the same in all
            calls. Arrays that its step uses, such as frozen weights, are best made outside, once.
        axis_name: of the replicas.
        mesh: of `jax.shard_map`; None for `jax.pmap`.

    Attributes:
        choices: (step, number, method), which one was chosen from which step on.
        compile_seconds: by method, what it took to compile its step; of uncompressed averages with
            the first step.

    Raises:
        TypeError: `auto` is no `gradwire.Auto`; `build` returns something else.
        ValueError: the state has no averages, or several; on all processes, if a comparison or
            decisions cannot be read.
        RuntimeError: some processes do not make one, see `distribute`.
    """

    def __init__(
        self, auto: Auto, build: Build, *, axis_name: AxisName, mesh: Mesh | None = None
    ) -> None:
        if not isinstance(auto, Auto):
            raise TypeError(
                f"auto={short(auto)} is no gradwire.Auto. One method needs no choice:"
                f" average_gradients(…, axis_name={axis_name!r})"
            )
        self._auto, self._build, self._axis, self._mesh = auto, build, axis_name, mesh
        devices = jax.devices() if mesh is None else list(mesh.devices.flat)
        axes = axes_of(axis_name)
        self._replicas = len(devices) if mesh is None else math.prod(mesh.shape[a] for a in axes)
        self._near = same_process(devices) if len(devices) == self._replicas else 1
        self._messages = Messages(devices)
        self._methods: list[Algorithm] = []
        self._errors: list[frozenset[str]] = []
        self._params: Any = None
        self._state: Any
        self._state, step = self._built(0)
        self._structures, self._steps = [_structure(self._state)], [step]
        for number in range(1, len(self._methods)):
            state, step = self._built_in_shapes(number)
            self._structures.append(_structure(state))
            self._steps.append(step)
        self._decisions, self._log = self._read_decisions()
        self._parts: dict[int, OwedState] = {}
        self._place = 0
        self._first: dict[int, bool] = {}
        self._known: set[Any] = set()
        self._compiled = [WAITING] * len(self._methods)
        self._ends = StepEnds()
        self._late = LateProcesses("AutoStep.step")
        self.choices: tuple[Chosen, ...] = ()
        self.compile_seconds: dict[str, float] = {}
        self._restart(0, 0)

    def _restart(self, number: int, at: int) -> None:
        """Go on with a method, from this step on; what is known of times is forgotten."""
        self._number, self._at = number, at
        self._next: Any = None
        self._chooser: Chooser | None = None
        self._order: list[int] = []
        self._compiling = WAITING not in self._compiled
        self._answer: tuple[int, Callable[[], Sequence[float]]] | None = None
        self._pending: deque[_Step] = deque()
        self._sent: deque[tuple[int, Callable[[], Sequence[float]]]] = deque()
        self._times = StepTimes()
        self._last: float | None = None

    @property
    def method(self) -> str:
        """How the method is written whose state `step` has returned, in a trial that of the trial:
        what `init` takes when the run is resumed from this state."""
        return name_of(self._methods[self._number])

    def init(self, method: str | None = None) -> Any:
        """The training state before the first step, on its devices; in several processes all must
        call this.

        Args:
            method: whose state it is, and with which the training goes on, as `method` says it;
                restore a saved state into this one. None: uncompressed averages.

        Raises:
            ValueError: it is none of the methods.
            RuntimeError: some processes do not call it, see `distribute`.
        """
        names = [name_of(m) for m in self._methods]
        if method is not None and method not in names:
            raise ValueError(
                f"method={method!r} is none of those that are chosen among: {', '.join(names)}"
            )
        state, self._state = self._state, None
        if state is None:
            leaves = jax.tree.leaves(self._built(0)[0], is_leaf=_is_ours)
            state = jax.tree.unflatten(self._structures[0], leaves)
        self._restart(0 if method is None else names.index(method), 0)
        return self._moved(self._placed(state, "AutoStep.init"), 0, self._number)

    def step(self, state: Any, *args: Any) -> Any:
        """Call the step of the method whose turn it is. Arguments and results are those of the
        steps that `build` returns, the state first.

        If a step is not done after ten seconds, the log names the processes that have not called
        it.

        Raises:
            RuntimeError: inside a function that is traced, such as one for `jax.jit`; or another
                process does not answer.
            ValueError: the state is not of this training.
        """
        leaves, given = jax.tree.leaves(state), jax.tree.leaves(args)
        if any(isinstance(x, jax.core.Tracer) for x in (*leaves, *given)):
            raise RuntimeError(
                "AutoStep.step chooses on the host which compiled step comes next, and cannot be"
                " part of a compiled one, such as a lax.scan over steps. Call it in a loop of"
                " Python; or fix the method that it has chosen,"
                f" {self.choices[-1].method if self.choices else self.method}:"
                " average_gradients(…) with that"
            )
        self._late.begins()
        after = None
        try:
            result, after = self._stepped(state, leaves, args, given)
        finally:
            self._late.returns(after)
        return result

    def _stepped(
        self, state: Any, leaves: Sequence[Any], args: Sequence[Any], given: Sequence[Any]
    ) -> tuple[Any, Any]:
        """What the step returns, and the array by which its end is known."""
        self._follow(state, leaves)
        number, timed, shared = self._number, False, False
        if self._decisions is not None:
            number = self._decisions.at(self._at)
            if number != self._number:
                self._note(self._at, number)
        elif self._chooser is not None:
            number = self._order[self._chooser.advance()]
            timed, shared = self._chooser.timed, self._chooser.shared
        kind = number, tuple(map(_kind_of, given))
        if number != self._number:
            state = self._moved(state, self._number, number)
        self._next = None  # a step that fails leaves a state of which nobody knows
        begin = perf_counter()
        result = self._steps[number](state, *args)
        if number != self._number:
            self._number = number
            self._write(self._at, number)
        new = kind not in self._known
        if new:  # a program was compiled, or found to be
            self._known.add(kind)
            self._first[number] = self._state_is_first(result)
            self.compile_seconds.setdefault(name_of(self._methods[number]), perf_counter() - begin)
        after = result[0] if self._first[number] else result
        self._next = jax.tree.leaves(after)[self._place]
        self._at += 1
        if self._decisions is None and len(self._methods) > 1:
            if self._chooser is None:
                self._prepare(after, args)
            else:
                end = self._ends.after(self._next)
                self._pending.append(_Step(timed and not new, shared, begin, end))
                self._measure()
        return result, self._next

    # --- the methods

    def _built(self, number: int) -> tuple[Any, Any]:
        """The state and the step with one of the methods."""
        made = self._build(with_owed(self._average(number), lambda: self._owed_to(number)))
        if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[1], "lower")):
            raise TypeError(
                f"build returned {short(made)}: return (state, step), with the step as jax.jit(…)"
                " or jax.pmap(…) makes it"
            )
        parts = [x for x in jax.tree.leaves(made[0], is_leaf=_is_ours) if _is_ours(x)]
        if len(parts) != 1:
            raise ValueError(
                f"the state that build returned holds {len(parts)} states of the averages that it"
                " was given: put these into one optax.chain, in front of the optimizer, and return"
                " what its init made as part of the state. nnx.split takes the types of an"
                " nnx.Optimizer away: split the model alone, and keep tx.init(params) beside its"
                " parameters, (params, opt_state)"
            )
        return made

    def _built_in_shapes(self, number: int) -> tuple[Any, Any]:
        """The same, with a state in shapes, unless an array that `build` has made is a part of the
        step, or `build` looks at numbers."""
        steps: list[Any] = []

        def shapes() -> Any:
            state, step = self._built(number)
            steps.append(step)
            return state

        try:
            with jax.checking_leaks():
                return jax.eval_shape(shapes), steps[-1]
        except NUMBERS_ASKED:
            pass
        except Exception as error:
            if not str(error).startswith("Leaked trace"):
                raise
        return self._built(number)

    def _average(self, number: int) -> optax.GradientTransformationExtraArgs:
        """The averages of a method, which are known when the parameters are."""

        def init(params: optax.Params) -> Any:
            self._find_methods(params)
            return _quiet(average_gradients(self._methods[number], axis_name=self._axis).init)(
                params
            )

        def update(updates: optax.Updates, state: Any, params: Any = None, **others: Any) -> Any:
            method = average_gradients(self._methods[number], axis_name=self._axis)
            return method.update(updates, state, params, **others)

        return optax.GradientTransformationExtraArgs(init, update)

    def _owed_to(self, number: int) -> frozenset[str]:
        """The parameters of which others have an error, and this method has none."""
        return frozenset[str]().union(*self._errors) - self._errors[number]

    def _find_methods(self, params: Any) -> None:
        if self._methods:
            return
        self._params = jax.tree.map(
            lambda x: _shape_of(x if isinstance(x, jax.Array) else jnp.asarray(x)), params
        )
        specs = specs_of(flatten(params).leaves, stacks_of(params))
        served: list[tuple[Algorithm, frozenset[str]]] = []
        for method in methods_of(self._auto, specs, self._replicas, self._near):
            try:
                made = jax.eval_shape(
                    _quiet(average_gradients(method, axis_name=self._axis).init), self._params
                )
            except ValueError as error:
                logger.info("Auto leaves %s out: %s", name_of(method), error)
                continue
            own = by_parameter(made.local.per_replica)
            served.append(
                (method, frozenset(name for name, memory in own.items() if ERROR in memory))
            )

        def order() -> str:
            methods = [method for method, _ in served]
            return json.dumps(
                expected_order(
                    self._auto, methods, lambda method: method_cost(method, specs, self._replicas)
                )
            )

        for number in json.loads(said_by_the_first("probe", order))[
            : MOST if self._replicas > 1 else 1
        ]:
            self._methods.append(served[number][0])
            self._errors.append(served[number][1])

    def _placed(self, state: Any, caller: str) -> Any:
        meet(caller, range(jax.process_count()))
        if self._mesh is None:
            return replicate(state, axis_name=axes_of(self._axis)[0])
        return distribute(state, self._mesh, self._axis)

    # --- another method

    def _moved(self, state: Any, before: int, number: int) -> Any:
        """The state, on its devices, for the step of another method."""
        if before == number:
            return state
        leaves = jax.tree.leaves(state, is_leaf=_is_ours)
        return jax.tree.unflatten(
            self._structures[number],
            [continued(x, self._fresh(number)) if _is_ours(x) else x for x in leaves],
        )

    def _part(self, number: int) -> OwedState:
        """The part of the state that belongs to the averages, before the first step. Rows of
        replicas are zeros: only their shapes are kept."""
        if number not in self._parts:
            made = with_owed(self._average(number), lambda: self._owed_to(number)).init(
                self._params
            )
            placed: OwedState = self._placed(made, "AutoStep.step")
            rows = jax.tree.map(_shape_of, (placed.inner.local, placed.owed))
            self._parts[number] = OwedState(placed.inner._replace(local=rows[0]), rows[1])
        return self._parts[number]

    def _fresh(self, number: int) -> OwedState:
        """The same in arrays, which may be donated."""

        def made_anew(x: Any) -> Any:
            return (
                jnp.copy(x)
                if isinstance(x, jax.Array)
                else jnp.zeros(x.shape, x.dtype, device=x.sharding)
            )

        fresh: OwedState = jax.tree.map(made_anew, self._part(number))
        return fresh

    def _prepare(self, state: Any, args: Sequence[Any]) -> None:
        """Compile the other steps in a thread, and begin to choose when all processes have."""
        if not self._compiling:
            self._compiling = True
            self._compiled[self._number] = READY
            waiting = [n for n, is_ in enumerate(self._compiled) if is_ == WAITING]
            lowered: dict[int, Any] = {}
            for n in waiting:
                try:
                    lowered[n] = self._lowered(n, state, args)
                except Exception as error:
                    self._leave_out(n, error)
            # Python's end waits for it: a process that ends within a compiler is aborted.
            threading.Thread(target=self._compile, args=(lowered,)).start()
        if self._answer is None and self._at % ASKED == 0:
            self._answer = self._at, self._messages.send(self._compiled)
        elif self._answer is not None and self._answer[0] < self._at:
            answers, self._answer = self._answer[1](), None
            if WAITING not in answers:
                self._order = [n for n, answer in enumerate(answers) if answer == READY]
                self._chooser = Chooser(len(self._order), self._order.index(self._number), self._at)

    def _lowered(self, number: int, state: Any, args: Sequence[Any]) -> Any:
        """The program of a step, not compiled yet. It is traced here, where the mesh is in
        context."""
        if self._mesh is None and jax.process_count() > 1:  # where `pmap` takes no shapes
            part, of = self._fresh(number), lambda x: x
        else:
            part, of = jax.tree.map(_shape_of, self._part(number)), _shape_of
        given = [
            part if _is_ours(x) else jax.tree.map(of, x)
            for x in jax.tree.leaves(state, is_leaf=_is_ours)
        ]
        whole = jax.tree.unflatten(self._structures[number], given)
        return self._steps[number].lower(whole, *jax.tree.map(of, args))

    def _leave_out(self, number: int, error: Exception) -> None:
        name = name_of(self._methods[number])
        logger.warning("Auto leaves %s out, whose step was not compiled: %s", name, error)
        self._compiled[number] = FAILED

    def _compile(self, lowered: dict[int, Any]) -> None:
        for number, program in lowered.items():
            if not threading.main_thread().is_alive():
                return
            name, began = name_of(self._methods[number]), perf_counter()
            try:
                program.compile()  # `jax.jit` finds it there when it is called
            except Exception as error:
                self._leave_out(number, error)
                continue
            self.compile_seconds[name] = perf_counter() - began
            self._compiled[number] = READY

    # --- times

    def _measure(self) -> None:
        """Take the time of the step before, and what the others have said of steps before that."""
        while len(self._pending) > LATE:
            step, before = self._pending.popleft(), self._last
            end = self._last = step.end()
            if before is not None:
                self._times.add(max(0.0, step.begin - before), end - before, step.timed)
            if step.shared:
                own = self._times.take()
                self._sent.append(
                    (self._at, self._messages.send([math.inf if own is None else own]))
                )
        while self._sent and (self._sent[0][0] < self._at or self._messages.alone):
            (seconds,) = self._sent.popleft()[1]()
            assert self._chooser is not None
            told = len(self._chooser.changes)
            self._chooser.observe(None if math.isinf(seconds) else float(seconds))
            for change in self._chooser.changes[told:]:
                times = f"{time_of(change.seconds)} and {time_of(change.before)}"
                self._note(change.step, self._order[change.method], times)

    def _follow(self, state: Any, leaves: Sequence[Any]) -> None:
        """Find out which step comes next: the one after the last, unless this is another state."""
        if (
            self._next is not None
            and self._place < len(leaves)
            and leaves[self._place] is self._next
        ):
            return
        parts = [x for x in jax.tree.leaves(state, is_leaf=_is_ours) if _is_ours(x)]
        if len(parts) != 1:
            raise ValueError(
                f"the state is {short(type(state).__name__)} without the averages of this training:"
                " give what init or step returned"
            )
        (part,) = parts
        own = [
            n
            for n, m in enumerate(self._methods)
            if configuration_of(m) in part.inner.configuration
        ]
        if not own:
            raise ValueError(
                f"the state is of {', '.join(part.inner.configuration)}; methods here are"
                f" {', '.join(map(name_of, self._methods))}. Restore it into init(method)"
            )
        # Methods without memory are of one configuration; a structure may tell them apart.
        alike = [n for n in own if _structure(state) == self._structures[n]] or own
        number = self._number if self._number in alike else alike[0]
        self._place = next(i for i, x in enumerate(leaves) if x is part.inner.step)
        at = known_number(part.inner.step)
        assert at is not None  # nothing is traced here
        if at == self._at and number == self._number and self._next is not None:
            return  # somebody has copied it
        self._restart(number, at)
        if self.choices or number:  # back to a state before, or on from one that was saved
            self._write(at, number)
        self._note(at, number)

    def _state_is_first(self, result: Any) -> bool:
        """Whether the state is the first of the results of a step, and not all of them."""
        for found, first in (
            (result, False),
            (result[0] if isinstance(result, (tuple, list)) and result else None, True),
        ):
            if _structure(found) == self._structures[self._number]:
                return first
        raise ValueError(
            "the step that build returned must return the state, or a tuple with the state first,"
            " of the structure that it was given"
        )

    def _note(self, step: int, number: int, times: str = "") -> None:
        """Note a method from a step on, in place of what was chosen for it and later ones before it
        failed, or before a state went back."""
        method, before = name_of(self._methods[number]), self.choices
        self.choices = tuple(choice for choice in before if choice.step < step)
        if not self.choices or self.choices[-1].number != number:
            self.choices = (*self.choices, Chosen(step, number, method))
        if before and before[-1].number != number and jax.process_index() == 0:
            logger.info(change_in_words(step, method, before[-1].method, times))

    # --- the log

    def _read_decisions(self) -> tuple[Decisions | None, Path | None]:
        """Those that are repeated, and where new ones are written."""
        path = None if self._auto.decisions is None else Path(self._auto.decisions)
        if not same_on_all(str(self._methods)):
            raise ValueError(
                "processes choose among different methods: here"
                f" {', '.join(map(name_of, self._methods))}. Give all the same Auto(…), and the"
                " same files"
            )
        text = said_by_the_first("decisions", lambda: "" if path is None else read_or_begin(path))
        if not text:
            return None, path if jax.process_index() == 0 else None
        try:
            return Decisions(self._methods, text), None
        except ValueError as error:
            raise ValueError(
                f"decisions={str(path)!r}: {error}. Remove it, and another is written"
            ) from error

    def _write(self, step: int, number: int) -> None:
        if self._log is not None:
            trial, chosen = 0, number
            if self._chooser is not None:
                trial, chosen = self._chooser.trial, self._order[self._chooser.chosen]
            line = Decisions.line(step, self._methods[number], trial, self._methods[chosen])
            self._log = appended(self._log, line)


@dataclass
class _Step:
    """When a step began on the host, and what waits for its end."""

    timed: bool
    shared: bool
    begin: float
    end: Callable[[], float]


def _quiet(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An `init` that does not say what a method would do better elsewhere: times decide, and nobody
    has asked for this one."""

    def made(params: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CompressionWarning)
            return init(params)

    return made


def _is_ours(x: Any) -> bool:
    return isinstance(x, OwedState)


def _structure(state: Any) -> Any:
    return jax.tree.structure(state, is_leaf=_is_ours)


def _kind_of(x: Any) -> Any:
    """What a step is compiled for: the shape and dtype of an array or number; anything else is
    static."""
    is_array = isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
    return (jnp.shape(x), jnp.result_type(x)) if is_array else x


def _shape_of(x: Any) -> Any:
    """The shape of an array, and how it lies; what is no array stays as it is."""
    if not isinstance(x, jax.Array):
        return x
    # One that nobody has placed goes where the others are.
    placed = not isinstance(x, jax.core.Tracer) and getattr(x, "committed", True)
    lies = x.sharding if placed else None
    kind: Any = jax.ShapeDtypeStruct
    return kind(x.shape, x.dtype, sharding=lies, weak_type=bool(getattr(x, "weak_type", False)))
