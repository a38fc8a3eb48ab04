"""`Auto` under DDP: times of steps, one small message for them, and another driver in the same step
on all ranks.

What is chosen is decided by `gradwire.core.advise.choosing.chooser.Chooser`, or was by the run
whose decisions are repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.protocol.groups import Groups
from gradwire.core.state.checkpoint import StateMismatch
from gradwire.core.text.units import time_of
from gradwire.torch_backend.advise.method_cost import method_cost
from gradwire.torch_backend.cpu.compiled import loops_for
from gradwire.torch_backend.engine.cuda_graphs import capturing
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.gathered_objects import gathered_by_all
from gradwire.torch_backend.engine.groups.nodes import nodes_of
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.monitor.timers import Moment, seconds_between
from gradwire.torch_backend.monitor.watcher import moment_on
from gradwire.torch_backend.setup.consistency import require_same_on_all_ranks
from gradwire.torch_backend.setup.registration import tried
from gradwire.torch_backend.torch_internals import store_of

logger = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Choice:
    """Among what a DDP may choose.

    Attributes:
        methods: uncompressed averages first.
        groups: in which they average.
        decisions: of the run that is repeated; None: there is none.
        log: where decisions are written, on this rank.
    """

    methods: Sequence[Algorithm]
    groups: ProcessGroups
    decisions: Decisions | None
    log: Path | None


def choice_for(
    auto: Auto, parameters: Mapping[str, Tensor], groups: ProcessGroups, device: torch.device
) -> Choice:
    """Find and try out the methods, and make their groups. To be called on all ranks.

    Raises:
        ValueError: on all ranks, if they find different methods, a comparison or decisions cannot
            be read, or ranks come and go.
    """
    group, specs = groups.whole, specs_of(parameters)
    obstacle = ""
    methods: list[Algorithm] = []
    partitions: list[Groups] = []
    if store_of(group) is None:
        obstacle = (
            "Auto() compares times of ranks that stay, and those of this process group come and go;"
            " give one method"
        )
    try:
        near = nodes_of(group, device)
    except ValueError:  # machines with different numbers of ranks
        near = 1
    every = gathered_by_all(near, group, device)  # of which some may not know
    near = near if all(each == near for each in every) else 1
    try:
        for method in methods_of(auto, specs, group.size(), near):
            trial = tried(method, specs, group.size(), device)
            if trial.obstacle:
                if group.rank() == 0:
                    logger.info("Auto leaves %s out: %s", name_of(method), trial.obstacle)
                continue
            methods.append(method)
            partitions += trial.groups
    except (OSError, ValueError) as error:
        obstacle = str(error)
    order: list[int] = []
    if group.rank() == 0 and not obstacle:
        try:
            order = expected_order(
                auto, methods, lambda method: method_cost(method, specs, group.size(), device)
            )
        except (OSError, ValueError) as error:
            obstacle = f"probe={str(auto.probe)!r}: {error}"
    order, (text, unreadable) = gathered_by_all((order, _read(auto, group.rank())), group, device)[
        0
    ]
    methods = [methods[number] for number in order] if len(order) == len(methods) else methods
    decisions = None
    try:
        decisions = None if text is None else Decisions(methods, text)
    except ValueError as error:
        unreadable = str(error)
    if unreadable:
        obstacle = (
            obstacle
            or f"decisions={str(auto.decisions)!r}: {unreadable}. Remove it, and another is written"
        )
    settings = {"methods of Auto": str(methods), "groups": str(partitions)}
    require_same_on_all_ranks(group, settings, {}, obstacle, device)
    for method in methods:  # now, and not in a step for which other ranks wait
        loops_for(method, specs, device)
    log = (
        Path(auto.decisions)
        if auto.decisions is not None and text is None and group.rank() == 0
        else None
    )
    return Choice(methods, groups.also(dict.fromkeys(partitions)), decisions, log)


def _read(auto: Auto, rank: int) -> tuple[str | None, str]:
    """The decisions that are repeated, or why they cannot be."""
    if rank != 0 or auto.decisions is None:
        return None, ""
    try:
        return read_or_begin(Path(auto.decisions)) or None, ""
    except (OSError, ValueError) as error:
        return None, str(error)


@dataclass
class _Step:
    """When the step before ended, None if nobody knows, and when this one began and ended."""

    timed: bool
    shared: bool
    before: Moment
    begin: Moment
    end: Moment = None


class Choosing:
    """The methods of one DDP, one after the other.

    Args:
        choice: among what.
        driver: gives the one at work.
        use: puts another in its place.

    Attributes:
        changes: of the method that is chosen. Those for a trial are in the log of decisions alone.
    """

    def __init__(
        self, choice: Choice, driver: Callable[[], Driver], use: Callable[[Driver], None]
    ) -> None:
        self._choice, self._driver, self._use = choice, driver, use
        device = driver().ops.device
        self._device = device
        self._alone = len(choice.methods) == 1 or driver().process_group.size() == 1
        self._on_host = device.type in ("cpu", "meta")
        self._number = 0
        self._loops: dict[int, Any] = {}
        self.changes: list[Chosen] = []
        self._restart(0, driver().memory.steps)

    def _restart(self, number: int, step: int) -> None:
        """Go on with a method, from this step on; what is known of times is forgotten."""
        self._number = number
        self._chooser = Chooser(len(self._choice.methods), number, step)
        self._step: _Step | None = None
        self._ended: _Step | None = None
        self._last: Moment = None
        self._times = StepTimes()
        self._message: tuple[Any, Tensor] | None = None
        self._note_change(step, number)

    @property
    def _methods(self) -> Sequence[Algorithm]:
        return self._choice.methods

    # --- a step

    def before_step(self, step: int) -> None:
        """The first gradients of a step have come. Raises RuntimeError while a CUDA graph captures
        it."""
        driver = self._driver()
        if capturing():
            chosen = name_of(self._methods[self._chooser.chosen])
            raise RuntimeError(
                "Auto() chooses the method of each step, and a CUDA graph repeats one: fix the"
                f" method that it has chosen, {chosen}. handle.reconfigure(...) on all ranks before"
                " the capture does"
            )
        self._step = None
        if driver.discarding:  # a part of the iteration in which it is
            return
        if driver.measurement is not None or self._alone:
            self._last = None
            return
        if self._choice.decisions is not None:
            number = self._choice.decisions.at(step)
            if number != self._number:
                self._note_change(step, number)
        else:
            number = self._chooser.advance()
            self._step = _Step(self._chooser.timed, self._chooser.shared, self._last, self._now())
        if number != self._number:
            self._change(step, number)

    def after_step(self) -> None:
        """It has come to its end on this rank.

        Raises:
            RuntimeError: another rank does not answer.
        """
        if self._number not in self._loops:
            self._loops[self._number] = self._driver().ops.loops  # what ranks have agreed on
        step, self._step = self._step, None
        if step is None:
            return
        step.end = self._last = self._now()
        self._read_message()
        # On a device the step before has ended by now, or nearly: the host waits for no other.
        ended, self._ended = (step, None) if self._on_host else (self._ended, step)
        if ended is not None:
            self._measure(ended)

    def _measure(self, step: _Step) -> None:
        if step.before is not None:
            outside, whole = (
                self._seconds(step.before, moment) for moment in (step.begin, step.end)
            )
            self._times.add(outside, whole, step.timed)
        if step.shared:
            self._send()

    def _send(self) -> None:
        """Tell all ranks what a step takes here: they go by the slowest, and by none if it has no
        time."""
        own = self._times.take()
        mine = [0.0, 1.0] if own is None else [own, 0.0]
        message = torch.tensor(mine, dtype=torch.float64, device=self._device)
        work = dist.all_reduce(
            message, dist.ReduceOp.MAX, group=self._driver().process_group, async_op=True
        )
        self._message = work, message

    def _read_message(self) -> None:
        if self._message is None:
            return
        (work, message), self._message = self._message, None
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"Auto(): a rank does not answer when times of steps are compared: {error}"
            ) from error
        seconds, missing = message.tolist()
        before = len(self._chooser.changes)
        self._chooser.observe(None if missing else seconds)
        for change in self._chooser.changes[before:]:
            self._note_change(
                change.step,
                change.method,
                f"{time_of(change.seconds)} and {time_of(change.before)}",
            )

    def _note_change(self, step: int, number: int, times: str = "") -> None:
        method = name_of(self._methods[number])
        if self.changes and self._driver().process_group.rank() == 0:
            logger.info(change_in_words(step, method, self.changes[-1].method, times))
        self.changes.append(Chosen(step, number, method))

    def _now(self) -> Moment:
        return perf_counter() if self._on_host else moment_on(self._device)

    def _seconds(self, begin: Moment, end: Moment) -> float:
        if not self._on_host:
            end.synchronize()
        return seconds_between(begin, end)

    # --- another method

    def _change(self, step: int, number: int) -> None:
        """Another driver goes on from this one's memory. What of it has no place there is added to
        the next gradients."""
        old = self._driver()
        new = self._made(number)
        new.owed.errors.update({**old.owed.errors, **_left_over(old, new)})
        new.continue_from(old)
        if number in self._loops:  # else ranks compare what they go on from, once for each method
            new.ops.loops = self._loops[number]
            new.take_as_compared()
        self._use(new)
        self._number = number
        self._write(step, number)

    def _made(self, number: int) -> Driver:
        old = self._driver()
        scaler = old.memory.scale.scaler
        return old.successor(
            self._methods[number],
            self._choice.groups,
            message_bytes=old.message_bytes,
            grad_scaler=scaler,
        )

    def _write(self, step: int, number: int) -> None:
        if self._choice.log is not None:
            trial, chosen = self._chooser.trial, self._methods[self._chooser.chosen]
            line = Decisions.line(step, self._methods[number], trial, chosen)
            self._choice = replace(self._choice, log=appended(self._choice.log, line))

    def loaded(self, state: Mapping[str, Any], strict: bool) -> StateMismatch:
        """Go on from a saved state with the method that it is of; times are measured anew. Returns
        what did not fit, and raises as `load_state_dict` does."""
        name = state.get("algorithm")
        numbers = [
            i for i, m in enumerate(self._methods) if name in (repr(m), repr(without_levels(m)))
        ]
        number = self._number if not numbers or self._number in numbers else numbers[0]
        old = self._driver()
        driver = old if number == self._number else self._made(number)
        difference = driver.load_state_dict(state, strict)
        if driver is not old:
            driver.be_told_as(old)
            self._use(driver)
        driver.owed.errors.clear()
        if self._message is not None:
            self._message[0].wait()
        self._restart(number, driver.memory.steps)
        self._write(driver.memory.steps, number)
        return difference


def _left_over(old: Driver, new: Driver) -> dict[str, Tensor]:
    """The compression errors that have no place in the other's memory, by parameter."""
    found = {}
    for name, memory in old.memory.state.tensors.items():
        there = new.memory.state.tensors.get(name, {})
        for key, x in memory.items():
            if key in old.algorithm.per_replica and not (
                key in there and there[key].shape == x.shape
            ):
                found[name] = x
    return found
