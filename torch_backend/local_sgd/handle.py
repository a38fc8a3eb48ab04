"""What `local_sgd` returns: the schedule at work, its statistics and its memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.core.algorithm import State
from gradwire.core.algorithms.shared.weighing import Weighing
from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.local_sgd.algorithm import DIFFERENCE, LocalSGD
from gradwire.core.local_sgd.alongside import mean_alongside
from gradwire.core.local_sgd.schedule import Turn
from gradwire.core.plan.advice import warn
from gradwire.core.plan.dry_run import size_of
from gradwire.core.protocol.programs import Program
from gradwire.core.protocol.settings import with_settings
from gradwire.core.protocol.weights import counted_weight
from gradwire.core.state.checkpoint import StateMismatch
from gradwire.core.state.skipped_steps import SAID_AFTER, SKIPPED_AVERAGES, RunOfSkips
from gradwire.torch_backend.cpu.compiled import CODES, loops_for
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.cuda_graphs import has_graphs, refuse_capture
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.barrier import LONGEST
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.groups.same_state import digest_of
from gradwire.torch_backend.engine.groups.whereabouts import Whereabouts
from gradwire.torch_backend.engine.host_scalars import Foreseen
from gradwire.torch_backend.engine.scheduler import run_alone
from gradwire.torch_backend.engine.step import keep
from gradwire.torch_backend.engine.torch_modes import outside_inference_mode, uncompiled
from gradwire.torch_backend.local_sgd.checks import averages_gradients, fitted, radial_obstacle
from gradwire.torch_backend.local_sgd.host_memory import HostMemory
from gradwire.torch_backend.local_sgd.in_flight import InFlight
from gradwire.torch_backend.local_sgd.moments import Broken, Moments
from gradwire.torch_backend.local_sgd.target import Target
from gradwire.torch_backend.monitor.profiler import span
from gradwire.torch_backend.monitor.report import Progress
from gradwire.torch_backend.monitor.stats import Stats
from gradwire.torch_backend.monitor.watcher import StepEnded, StepTimes, Watcher
from gradwire.torch_backend.ops.full_precision import plain_arithmetic
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.setup.assumptions import Assumptions
from gradwire.torch_backend.setup.consistency import meet_to_change, require_same_on_all_ranks
from gradwire.torch_backend.state.memory import Memory
from gradwire.torch_backend.state.rank_memory import ShardedState
from gradwire.torch_backend.state.settings import Settings
from gradwire.torch_backend.torch_internals import profiler_runs

T = TypeVar("T")


class LocalSGDHandle:
    """What `local_sgd` returns.

    Attributes:
        local: what is done, with "node" replaced by its size.
    """

    def __init__(
        self,
        local: LocalSGD,
        target: Target,
        buffers: Mapping[str, Tensor],
        moments: Moments,
        groups: ProcessGroups,
        assumed: Assumptions,
        message_bytes: int | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        self._replicas = groups.whole.size()
        self._assumed = assumed
        self._target = target
        self._parameters = target.parameters
        self._buffers = buffers
        self._moments = moments
        self._ops = TorchOps(next(iter(target.parameters.values())).device)
        self._message_bytes = message_bytes
        self._host = HostMemory(self._ops.device) if on_host else None
        self._leave_optimizer: Callable[[], None] = lambda: None
        self._registered = True
        self._weight = 1.0
        self._replay = has_graphs(self._ops.device)
        self._settings = Settings({}, self._ops.device)
        self._has_begun = False
        self._has_loaded = False
        self._equal_at = 0
        self._scheduled_from = 0
        self._averages = self._skipped_averages = 0
        self._unseen: tuple[Broken | None, Collection[Tensor]] = (None, ())
        self._foreseen = Foreseen(self._ops.device)
        self._dense = sum(spec.nbytes for spec in specs_of(self._parameters).values())
        self._gradients: Driver | None = None
        self._adopt(local, groups)
        self._average_gradients()

    def _adopt(self, local: LocalSGD, groups: ProcessGroups) -> None:
        """Do this from the next step on, with a memory that begins with the parameters as they
        are."""
        settings = Settings(self._target.settings_of(local), self._ops.device)
        settings.continue_from(self._settings)
        self.local, self._groups, self._settings = local, groups, settings
        self._assumed.remembers_weights = local.has_outer
        self._ops.loops = loops_for(local, specs_of(self._parameters), self._ops.device, CODES)
        self._collectives = Collectives(groups, self._ops)
        self._collectives.levels = levels_of(local)
        self._make_step = self._target.step_of(local)
        times = self._collectives.times = StepTimes(self._ops.device, local.cycle)
        self._watch = Watcher(
            repr(local), local.start_step, times, groups.whole, cycle=local.cycle, work="averaging"
        )
        state = self._initial_state()
        state = state if self._host is None else self._host.place(state)
        self._memory = Memory(local, state, self._target.placement(groups, self._ops.device))
        self._collectives.sent = self._memory.sent
        if self._host is not None:
            self._memory.wait = self._host.wait
        meeting = self._memory.placement.meetings[0]
        self._collectives.whereabouts = Whereabouts(
            meeting, repr(local), self._memory, self._collectives
        )
        self._in_flight = self._make_in_flight()
        self._memory.left = {} if local.delayed else None
        self._run_of_skips = RunOfSkips(
            repr(local), groups.whole.rank(), SAID_AFTER, SKIPPED_AVERAGES
        )

    def _make_in_flight(self) -> InFlight | None:
        """Make what keeps averages that are taken later. They have process groups of their own, so
        that nothing waits behind them."""
        if not self.local.delayed:
            return None
        specs, groups = specs_of(self._parameters), self._groups.anew()
        return InFlight(self.local, specs, groups, self._ops, self._make_step, self._collectives)

    def _average_gradients(self) -> None:
        """Average gradients as the schedule says, from the next step on."""
        old = self._gradients
        if old is None and not self._target.averages_always and not averages_gradients(self.local):
            self._target.average_none()
            return
        self._gradients = new = _Gradients(self, self._message_bytes)
        new.weight.fill_(self._weight)
        new.replays.wanted = self._replay
        self._target.average_by(new)

    @property
    def weight(self) -> float:
        """What this replica counts for in what leaves after the next step of the optimizer: its
        tokens since the last average, 0 if it is absent. 1 until it is set. Before `start_step`,
        and with a `subgroup`, gradients are weighed by it too.

            handle = local_sgd(model, optimizer, gradwire.diloco(100, weighted=True))
            handle.weight = tokens
            optimizer.step()

        Raises:
            TypeError, ValueError: it is no weight, the schedule is not `weighted`, or this handle
                is unregistered.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._require_registered()
        self._weight = counted_weight(
            weight, self.local, weighted=self.local.weighted, instead="give it weighted=True"
        )
        if self._gradients is not None:
            self._gradients.weight.fill_(self._weight)

    @property
    def replay(self) -> bool:
        """Whether averages of gradients are replayed as CUDA graphs, where somebody averages them:
        within a `subgroup`; on CUDA they are. See `Handle.replay`. Those of parameters, which come
        now and then, are not."""
        return self._replay if self._gradients is None else self._gradients.replays.wanted

    @replay.setter
    def replay(self, wanted: bool) -> None:
        self._replay = bool(wanted)
        if self._gradients is not None:
            self._gradients.replays.wanted = self._replay

    def set(self, **settings: float) -> None:
        """Tell the compressor something of the averages that leave from now on, until it is told
        otherwise: what it asks for with `await setting(ops, name, default)`. The same on every
        rank. It survives `reconfigure` where the other compressor asks for it too.

        Raises:
            TypeError: a value is no number.
            ValueError: the compressor does not ask for it, or this handle is unregistered. Nothing
                has been changed then.
        """
        self._require_registered()
        self._settings.say(settings, self.local)

    @property
    def steps(self) -> int:
        """Calls of `optimizer.step()` since registration, or since the beginning of the run that a
        loaded state is of."""
        return self._memory.steps

    def __repr__(self) -> str:
        """What it does, and what it has saved."""
        stats = self.stats()
        sent = stats.bytes_sent if stats.between_bytes is None else stats.between_bytes
        saved = f"{size_of(max(stats.dense_bytes - sent, 0))} saved" + (
            " between nodes" if stats.within_bytes else ""
        )
        spent = (
            f", {stats.compress_share:.0%} of a step spent averaging" if stats.step_seconds else ""
        )
        what = f"{self.local!r}: {len(self._parameters)} tensors, {size_of(self._dense)}"
        what = what if self._registered else f"unregistered; {what}"
        return f"{type(self).__name__}({what}; {stats.steps} steps, {saved}{spent})"

    def _initial_state(self) -> State[Tensor]:
        with torch.no_grad():
            parameters = {n: p.detach() for n, p in self._parameters.items()}
            return self.local.init(self._ops, parameters, self._replicas)

    def _begin(self) -> None:
        """Begin, before each step of the optimizer. Raises RuntimeError for what is not as it was
        registered."""
        self._note_found()
        self._assumed.require(self.steps)
        if not self._has_begun and self.local.has_outer:
            # Weights may have been loaded since registration: replicas part from what is there now.
            if self._assumed.unloaded is not None:
                self._follow_loaded(self._assumed.unloaded)
            self._begin_anew()
        elif self._assumed.unloaded is not None and not self._has_loaded and self.local.has_outer:
            self._follow_loaded(self._assumed.unloaded)
        elif not self._has_loaded:
            self._assumed.notice_written()
        self._has_begun, self._has_loaded, self._assumed.unloaded = True, False, None

    def _begin_anew(self) -> None:
        """Begin with a memory of the parameters as they are."""
        if self._host is None:
            self._memory.state = self._initial_state()
        else:
            self._host.store(self._initial_state(), self._memory.state, self._memory.state.tensors)

    def _follow_loaded(self, before: str) -> None:
        """Weights were loaded in the middle of training. If they are others than those `before`, so
        is what is remembered: replicas part from what is there now, on all ranks."""
        if (now := digest_of(self._parameters)) == before:
            return
        why = (
            "The model's load_state_dict() was called in the middle of training, and outer"
            " parameters are those of all ranks: load the same on all of them"
        )
        meeting = self._memory.placement.meetings[0]
        if meeting.come("weights that were loaded", why, now, longest=LONGEST):
            self.synchronize()  # a part of them, and the rest differs
        self._drop()
        self._begin_anew()
        self._memory.left = {} if self.local.delayed else None

    @uncompiled
    def step(self) -> None:
        """Count a step, and average if it is time to. `optimizer.step()` calls this; call it
        yourself if you gave no optimizer.

        Raises:
            RuntimeError: an optimizer calls this already; or under DDP's `join()`, where ranks step
                a different number of times; or captured in a CUDA graph; or unregistered; or
                parameters are not as they were at registration: frozen then, and with gradients
                now, or other tensors.
        """
        if not self._registered:
            raise RuntimeError(self._why_not())
        if self._moments.optimizer is not None:
            raise RuntimeError(
                "handle.step() counts a step, and so does each step of the"
                f" {type(self._moments.optimizer).__name__} that local_sgd was given; leave"
                " handle.step() out"
            )
        self._note_found()
        self._assumed.require(self.steps)
        self._end()

    def _end(self) -> None:
        """End each step of the optimizer, which `_begin` has let pass."""
        refuse_capture(lambda: f"{self.local!r}, whose schedule the host counts,")
        self._target.require_steps()
        times = self._watch.times
        if self._in_flight:  # something is on its way
            with torch.no_grad(), plain_arithmetic(self._ops.device), self._span("receive"):
                self._or_forget(self._in_flight.advance, self._memory.steps)
        if self.local.acts(self._memory.steps, self._replicas):
            start = times.now()
            with torch.no_grad(), plain_arithmetic(self._ops.device), self._span("average"):
                self._average()
            times.worked(start)
        self._memory.steps += 1
        if self.local.acts(self._memory.steps, self._replicas):
            self._moments.look_ahead()
        self._memory.sent.dense_bytes += self._dense
        self._watch.step_ended(StepEnded(self._memory.steps, self._progress))
        times.begin()  # a step reaches from one of the optimizer to the next
        self._assumed.stepped()

    def _span(self, part: str) -> AbstractContextManager[object]:
        """A range in torch's profiler, while one runs."""
        return span(self.local, part) if profiler_runs() else nullcontext()

    def _average(self) -> None:
        step = self._memory.steps
        turn = self._turn(step)
        state, used = self._fetch(turn)
        due = self._due(step)
        # In their logical order, so that memory means the same on every backend.
        params = {n: p.detach().contiguous() for n, p in self._parameters.items()}
        # a replica that has broken goes back to the outer parameters as a whole
        if self.local.has_outer:
            params = self._target.all_or_none(self._ops, params)
        extras: dict[str, dict[str, Tensor]] = {
            n: {"": b.detach().contiguous()} for n, b in self._buffers.items()
        }
        if due:
            extras |= self._moments.taken(due, followed=self.local.has_outer)
        arrived = {} if self._in_flight is None else self._or_forget(self._in_flight.arrived, step)
        taken: list[Tensor] = []
        program = self.local.average(
            self._ops,
            params,
            state,
            step,
            self._replicas,
            extras,
            arrived,
            turn,
            self._weight,
            taken,
        )
        program = with_settings(program, self._settings)
        after, state, others = self._or_forget(
            lambda program: run_alone(self._collectives, program, self._make_step),
            program,
            turn.arrives | turn.later,
        )
        if self.local.has_outer:
            self._moments.follow(after)
        for name, x in after.items():
            _put(self._parameters[name], x)
        for name, buffer in self._buffers.items():
            _put(buffer, others[name][""])
        state = self._keep(state, used)
        if self._in_flight is not None and self._memory.left is not None:
            for fragment in turn.arrives:
                del self._memory.left[fragment]
            self._in_flight.leave(step, state, self._settings)
            self._memory.left |= dict.fromkeys(self.local.leaving(step, self._replicas), step)
        self._moments.put({n: others[n] for n in others if n in self._parameters}, due)
        if self.local.has_outer:
            self._unseen = broken, _ = self._moments.broken(), taken
            flags = taken if broken is None else [broken.finite, *taken]
            self._foreseen.note({str(i): flag for i, flag in enumerate(flags)})
            if self._ops.device.type == "cpu":
                self._note_found()

    def _turn(self, step: int) -> Turn:
        """What happens after this step. Of what would arrive only what has left: nothing has, since
        this schedule began or since its message was lost."""
        turn, left = self.local.turn(step), self._memory.left
        if left is None:
            return turn
        arrives = frozenset(f for f in turn.arrives if left.get(f) == step - self.local.overlap)
        return replace(turn, arrives=arrives, later=frozenset(f for f in turn.later if f in left))

    def _or_forget(
        self, receive: Callable[[Any], T], what: Any, besides: Collection[int] = ()
    ) -> T:
        """What receives messages. What has left in a message that fails, or is sent `besides`, is
        forgotten: parameters still hold it, and the next difference will."""
        try:
            return receive(what)
        except BaseException:
            lost = set(besides) if self._in_flight is None else self._in_flight.lost | set(besides)
            self._forget(lost, eager=self.local.eager)
            if self._in_flight is not None:
                self._in_flight.lost = set()
            raise

    def _forget(self, fragments: Collection[int], *, eager: bool) -> None:
        """That differences of these are on their way. An `eager` replica has added its share of its
        own already, and takes it back in the next round by what it remembers."""
        if self._memory.left is None:
            return
        if eager:
            for fragment in fragments:
                self._memory.left.pop(fragment, None)
            return
        self._memory.wait()
        parts = self.local.parts(specs_of(self._parameters))
        for fragment in fragments:
            self._memory.left.pop(fragment, None)
            for name in parts[fragment]:
                if (kept := self._memory.state.tensors.get(name)) is not None:
                    kept[DIFFERENCE].zero_()

    def _note_found(self) -> None:
        """Note what the last averages have found: what is broken begins anew, and what was skipped
        is counted. On a device before the next step of the optimizer, when it has long come."""
        broken, taken = self._unseen
        self._unseen = (None, ())
        if broken is not None:
            broken.drop(self._foreseen.value(broken.finite))
        for ok in taken:
            self._averages += 1
            self._skipped_averages += not self._foreseen.value(ok)
            self._run_of_skips.seen(self._averages, self._skipped_averages)

    def _fetch(self, turn: Turn) -> tuple[State[Tensor], Collection[str]]:
        """The memory for the averages of this turn, where the parameters are; and whose is used in
        them."""
        memory, parts = self._memory.state, self.local.parts(specs_of(self._parameters))
        if self._host is None:
            return memory, set()
        longest = self.local.longest
        leave = {f for period, f in turn.due if period == longest}
        used = {
            name
            for f in (range(len(parts)) if turn.begins else leave | turn.arrives)
            for name in parts[f]
        }
        return (
            self._host.fetch(
                memory, used, outer=self._parameters if leave and len(parts) > 1 else ()
            ),
            used,
        )

    def _keep(self, state: State[Tensor], used: Collection[str]) -> State[Tensor]:
        """Take over the memory after an average. Returned is where a message finds its own, to
        which it may write."""
        if self._host is None:
            keep(state, self._memory.state)
            return self._memory.state
        memory = self._memory.state
        self._host.keep(state, memory, used)
        tensors = {
            name: {k: x.clone() for k, x in state.tensors[name].items()}
            for name in used
            if self.local.delayed
        }
        return State(memory.shared, tensors)

    def _due(self, step: int) -> Collection[str]:
        """Names of the parameters that are averaged after this step."""
        periods = [level.period for level in self.local.levels(self._replicas)]
        parts = self.local.parts(specs_of(self._parameters))
        return {
            name
            for number, names in enumerate(parts)
            if any(self.local.due(step, period, number) for period in periods)
            for name in names
        }

    @property
    def synchronized(self) -> bool:
        """Whether parameters (and averaged buffers) are the same on all ranks now, as they were
        left by the last step: then a checkpoint of one rank holds them for all. With several
        fragments they never are all at once after `start_step`, unless by `synchronize`."""
        if self.steps <= self.local.start_step and self._buffers:
            return self.steps == self._equal_at and not self._assumed.others_stepped
        return self._parameters_are_equal

    @property
    def _parameters_are_equal(self) -> bool:
        if self._assumed.others_stepped:
            return False
        if self.steps <= self.local.start_step or self.steps == self._equal_at:
            return True
        if (
            self.local.fragments > 1
            or self.local.delayed
            or self.local.merge
            or self.steps == self._scheduled_from
        ):
            return False
        of_all = [
            level.period for level in self.local.levels(self._replicas) if level.groups is None
        ]
        return any(self.local.due(self.steps - 1, period) for period in of_all)

    def synchronize(self) -> None:
        """Average all parameters and averaged buffers over all ranks now, whatever the schedule
        says: for the end of training, or before an evaluation. To be called on all ranks. Outer
        parameters and memories stay as they are. By weight, if the schedule is `weighted`."""
        start = self._watch.times.now()
        with torch.no_grad():
            parameters = {n: p.detach().contiguous() for n, p in self._parameters.items()}
            parameters = self._or_outer(parameters)
            beside = {n: {"": b.detach().contiguous()} for n, b in self._buffers.items()}
            weights = self._moments.weights()
            program: Program[Any] = mean_alongside(self._ops, parameters, beside | weights)
            if self.local.weighted:
                program = Weighing(self._ops, self._weight).run(program)
            averages, others = run_alone(self._collectives, program)
            for name, x in averages.items():
                _put(self._parameters[name], x)
            for name, buffer in self._buffers.items():
                _put(buffer, others[name][""])
            self._moments.put({name: others[name] for name in weights}, set())
        self._watch.times.worked(start)
        self._equal_at = self.steps
        self._assumed.stepped()

    def _or_outer(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """These, or the outer parameters, to which a replica goes back that has broken: with the
        next outer step, or before all are averaged as they are."""
        if not self.local.has_outer or self.steps < self.local.start_step:
            return parameters
        whole = self._target.all_or_none(self._ops, parameters)
        if self._ops.all_finite(*whole.values()):
            return parameters
        outer = self.outer_parameters()
        return {n: outer[n].to(p.dtype, copy=True) for n, p in parameters.items()}

    @outside_inference_mode
    def reconfigure(self, local: LocalSGD) -> StateMismatch:
        """Go on with another schedule, outer optimizer or compressor, from the next step on. To be
        called on all ranks, between steps.

            handle.reconfigure(diloco(500, compressor=WireDtype(AllReduce(), "bfloat16")))

        Memory is kept where it fits: outer parameters, velocities, a compressor's errors, factors
        of the same shape. Steps and statistics count on, so `start_step` means what it says.
        Parameters that differ between ranks are averaged first, as by `synchronize`, where the new
        schedule takes them to be equal: it makes outer parameters of them, or averages gradients of
        replicas that went their own ways. If it averages those of all replicas again (`start_step`
        is still to come), the optimizer's moments are made equal too, as by `unregister`.

        Args:
            local: what to do, the same on every rank. `buffers`, `moments` and `message_bytes` stay
                as they are.

        Returns:
            What of the memory did not fit.

        Raises:
            TypeError: no `LocalSGD`.
            ValueError: it cannot be served (named), or ranks ask for different things or are at
                different steps; on all ranks. Nothing has been changed then.
        """
        if why_not := self._why_not():
            raise ValueError(why_not)
        if not isinstance(local, LocalSGD):
            raise TypeError(f"local is a {type(local).__name__}; give LocalSGD(...) or diloco(...)")
        whole, before = self._groups.whole, self.local
        meet_to_change(self._memory.placement.meetings)
        fit_here = fitted(local, whole, self._parameters, averager=self._target.averages)
        local, why_not = (
            fit_here.local,
            fit_here.obstacle or radial_obstacle(fit_here.local, self._target),
        )
        settings = {"call": "reconfigure", "local": repr(local), "step": str(self.steps)}
        why_not = self._target.obstacle_of_all(why_not, repr(settings))
        require_same_on_all_ranks(whole, settings, {}, why_not, self._ops.device)
        warn(local, specs_of(self._parameters))

        subgroups = local.subgroups(self._replicas)
        if self.steps < local.start_step:
            self._make_equal()
        elif (local.has_outer and not before.has_outer) or subgroups not in (
            None,
            before.subgroups(self._replicas),
        ):
            self._synchronize_if_needed()
        equal, memory = self._parameters_are_equal, self._memory
        self._drop(for_good=True)
        self._adopt(local, self._groups.also(fit_here.groups))
        self._memory.steps = memory.steps
        self._memory.sent.count_from(memory.sent)
        difference = StateMismatch()
        if before.has_outer and self.steps >= before.start_step:  # there is one to go on with
            difference = self._memory.continue_from(memory)
            self._keep_on_their_way(before, memory.left or {})
        self._scheduled_from = self.steps
        if equal:
            self._equal_at = self.steps
        self._average_gradients()
        return difference

    def _keep_on_their_way(self, before: LocalSGD, left: Mapping[int, int]) -> None:
        """Keep those of the differences that have left with the schedule before that this one would
        have sent too, and would not have taken yet. Nobody has lost the others: parameters hold
        them."""
        local, specs = self.local, specs_of(self._parameters)
        if self._memory.left is None:
            return
        same = local.eager == before.eager and local.parts(specs) == before.parts(specs)
        kept = {
            f: step
            for f, step in left.items()
            if same
            and local.due(step, local.longest, f)
            and (local.eager or step + local.overlap >= self.steps)
        }
        self._forget(
            [f for f in range(local.fragments) if f not in kept],
            eager=before.eager and local.eager,
        )
        self._memory.left = kept

    @outside_inference_mode
    def unregister(self) -> None:
        """Take local SGD away: from the next step on gradients are averaged as they are, by DDP or
        between the replicas of a sharded model, and the optimizer steps as it does by itself. To be
        called on all ranks, between steps. `register_comm_hook`, `compress_replicas` or `local_sgd`
        may then be called on the same module again.

        Replicas are made equal for that, since they have gone their own ways: parameters and
        averaged buffers are averaged as by `synchronize`. The optimizer's moments are averaged too,
        or dropped with `moments="reset"`; what else it keeps (counters of steps, factors of other
        shapes) is that of the first rank. Of optimizers that were not given to `local_sgd` that is
        left to you. Gradients of a plain module are averaged by nobody.

        Statistics and memory stay readable, and are gone with the handle.

        Raises:
            ValueError: it has been unregistered before; or ranks call different things, or are at
                different steps.
        """
        meet_to_change(self._memory.placement.meetings)
        settings = {"call": "unregister", "step": str(self.steps)}
        require_same_on_all_ranks(
            self._groups.whole, settings, {}, self._why_not(), self._ops.device
        )
        self._drop(for_good=True)
        self._make_equal()
        self._leave_optimizer()
        self._assumed.leave()
        self._registered = False
        self._target.leave()

    def _drop(self, *, for_good: bool = False) -> None:
        """Forget what is on its way, of which the memory has what it is made of; and that anything
        ever was, `for_good`."""
        if self._in_flight is not None and for_good:
            self._in_flight.close()
            self._in_flight = None
        elif self._in_flight is not None:
            self._in_flight.drop()

    def _why_not(self) -> str:
        return (
            ""
            if self._registered
            else "this handle is unregistered; local_sgd(module, optimizer, local) gives a new one"
        )

    def _require_registered(self) -> None:
        """Raise ValueError for what would have no effect."""
        if why_not := self._why_not():
            raise ValueError(why_not)

    def _make_equal(self) -> None:
        """All replicas, so that with equal gradients they stay so."""
        self._synchronize_if_needed()
        if self.steps > self.local.start_step:
            with torch.no_grad():
                self._moments.make_equal(self._collectives)

    def _synchronize_if_needed(self) -> None:
        if not self.synchronized:
            self.synchronize()

    def stats(self) -> Stats:
        """Steps, bytes and collectives since registration, or since the beginning of the run that a
        loaded state is of, of gradients and parameters. `dense_bytes` is what averaging the
        gradients in each step would have sent. Steps that a rank skips are not counted, since each
        rank has its own; `skipped_averages` are. Times are of the last 50 steps, or of a whole
        cycle of the schedule: a step reaches from one of the optimizer to the next."""
        stats = self._watch.stats(self.steps, 0, self._memory.sent)
        self._note_found()
        if (gradients := self._gradients) is not None:
            stats = replace(
                stats,
                replayed_steps=gradients.replays.replayed,
                graph_bytes=gradients.replays.nbytes,
            )
        return replace(
            stats, skipped_averages=self._skipped_averages, compiled_loops=self._ops.loops.card
        )

    def _progress(self) -> Progress:
        sent = self._memory.sent
        return Progress(self._memory.steps, sent.between, sent.dense_bytes)

    def state_dict(self) -> dict[str, Any]:
        """The step and the memory of all ranks (outer parameters, velocities, the mean of a
        compressor's errors), for a checkpoint that any number of ranks can continue, together with
        the parameters of one of them. Every rank calls this, and every rank receives the same.

        Between two averages the parameters of one rank are not those of all, and what the others
        have learned since would be lost. So call `synchronize` before you save, or save when
        `synchronized`.

        Returns:
            Plain nested dictionaries of tensors on the CPU, numbers and strings, by parameter name.

        Raises:
            RuntimeError: on every rank, if parameters differ between ranks now; or some ranks have
                not called it within 10 minutes, or the timeout that the process group was given.
        """
        return self._state_dict()

    def _state_dict(self, *, sliced: bool = False) -> dict[str, Any]:
        if not self._parameters_are_equal:
            raise RuntimeError(
                f"after {self.steps} steps of {self.local!r} each rank has parameters of its own,"
                " and a checkpoint of one rank would lose what the others have learned since the"
                " last average. Call synchronize() on every rank before you save parameters and"
                " state, or save where handle.synchronized is true; or save rank_state_dict() with"
                " the parameters and the optimizer of each rank"
            )
        return self._memory.whole(sliced=sliced)

    def outer_parameters(self) -> dict[str, Tensor]:
        """The outer parameters by name, which is what the papers of DiLoCo evaluate:
        `torch.func.functional_call(model, handle.outer_parameters(), batch)`. They are the memory
        itself, or a copy of what is on the host, in `state_dtype`, not to be changed; of a sharded
        model this rank's blocks. The same on all ranks, but for `eager` ones.

        Raises:
            ValueError: plain averaging has none.
        """
        memory = self._memory.state
        return self.local.outer_parameters(
            memory if self._host is None else self._host.fetch(memory, (), self._parameters)
        )

    @property
    def sharded_state(self) -> ShardedState:
        """The state for `torch.distributed.checkpoint`: what `state_dict` gives, and where it does;
        and each rank's own memory as an entry of its own. As many ranks go on bit for bit, another
        number from the mean."""
        return ShardedState(self, lambda: self._memory)

    def rank_state_dict(self) -> dict[str, Any]:
        """The step and this rank's memory, copied where it is: to be saved on each rank, with its
        parameters and its optimizer, and loaded by the same rank of the same number of them.
        Communicates nothing."""
        return {**self._memory.own(), "synchronized": self._parameters_are_equal}

    @outside_inference_mode
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, or from the `rank_state_dict` of this rank. To be called on
        all ranks: it compares the step and the memory, so that none waits for averages that others
        have behind them.

        Raises:
            ValueError: on every rank, with nothing changed, if the state does not fit on one of
                them, or they differ; or after `unregister`.
            RuntimeError: some ranks have not called it within 10 minutes, or the timeout that the
                process group was given.
        """
        why_not, found = self._why_not(), None
        try:
            found = self._memory.fit(state)
        except ValueError as error:
            why_not = why_not or str(error)
        why_not = self._target.obstacle_of_all(why_not)
        together = (
            "load_state_dict() compares the step, so every rank calls it, with the same state"
        )
        self._memory.placement.meetings[0].come("load_state_dict()", together, longest=LONGEST)
        settings = (
            {}
            if found is None
            else {"step": str(found.steps), "state": found.digest, "left": str(found.left)}
        )
        require_same_on_all_ranks(self._groups.whole, settings, {}, why_not, self._ops.device)
        assert found is not None  # or there is an obstacle
        self._drop()
        self._unseen = (None, ())
        self._memory.take(found)
        if self._memory.left is not None:
            self._memory.left = self._left_by(self.steps) if found.left is None else found.left
        self._run_of_skips.restart()
        self._watch.restart()
        self._equal_at = self.steps if state.get("synchronized", "rank" not in state) else -1
        self._scheduled_from = 0 if self._equal_at == self.steps else self.steps
        self._has_begun = self._has_loaded = True

    def _left_by(self, steps: int) -> dict[int, int]:
        """The steps after which differences left that are on their way after so many, if the
        schedule has been this one long enough."""
        local = self.local
        since = max(0, steps - (local.longest if local.eager else local.overlap))
        return {
            f: step for step in range(since, steps) for f in local.leaving(step, self._replicas)
        }


class _Gradients(Driver):
    """Averages gradients under DDP, at the step that the handle counts: a backward pass more or
    less does not move the schedule."""

    def __init__(self, handle: LocalSGDHandle, message_bytes: int | None) -> None:
        specs = specs_of(handle._parameters)
        super().__init__(
            handle.local.gradients(handle._replicas),
            specs,
            handle._ops.device,
            handle._groups,
            message_bytes,
        )
        # DDP's reducer holds this driver, where Python cannot see what would lead back to DDP.
        self._handle = weakref.ref(handle)
        self.collectives.times = self.watch.times = handle._watch.times
        self.memory.sent = self.collectives.sent = handle._memory.sent
        self.watch.partial = True

    def add(
        self,
        gradients: Mapping[str, Tensor],
        *,
        first: bool,
        last: bool,
        unused: Collection[str] | None = None,
    ) -> None:
        if first and (handle := self._handle()) is not None:
            self.memory.steps = handle._memory.steps
        super().add(gradients, first=first, last=last, unused=unused)

    def _count_dense(self, gradients: Mapping[str, Tensor]) -> None:
        """The handle does, in each of its steps."""


def _put(tensor: Tensor, value: Tensor) -> None:
    if value.data_ptr() != tensor.data_ptr() or value.stride() != tensor.stride():
        tensor.detach().copy_(value)
