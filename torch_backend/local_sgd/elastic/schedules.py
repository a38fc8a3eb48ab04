"""Local SGD and DiLoCo among replicas that come and go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.core.algorithm import State, Stepped
from gradwire.core.local_sgd.algorithm import DIFFERENCE, WEIGHT, LocalSGD
from gradwire.core.local_sgd.schedule import Turn
from gradwire.core.protocol.settings import with_settings
from gradwire.core.state.skipped_steps import SAID_AFTER, SKIPPED_AVERAGES, RunOfSkips
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.engine.scheduler import Step, run_alone
from gradwire.torch_backend.engine.step import keep
from gradwire.torch_backend.local_sgd.elastic.handle import ElasticHandle
from gradwire.torch_backend.local_sgd.elastic.quorum import LOST, Present, Quorum
from gradwire.torch_backend.local_sgd.host_memory import HostMemory
from gradwire.torch_backend.local_sgd.in_flight import InFlight
from gradwire.torch_backend.local_sgd.moments import Moments, broken_of
from gradwire.torch_backend.local_sgd.optimizer_hooks import step_on_every_rank
from gradwire.torch_backend.ops.full_precision import plain_arithmetic
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.setup.assumptions import Assumptions


class ElasticLocalSGD(ElasticHandle):
    """What `elastic` returns for a schedule: each average of parameters is a round. Where the vote
    is against it, a replica trains on from where it is, and its next difference holds the work of
    both periods."""

    def __init__(
        self,
        local: LocalSGD,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        quorum: Quorum,
        rest: Callable[[], Mapping[str, Tensor]],
        assumed: Assumptions,
        *,
        on_host: bool = False,
    ) -> None:
        self.local = local
        self._specs = specs_of(parameters)
        self._parts = local.parts(self._specs)
        self._late = local.longest if local.eager else local.overlap
        self._in_flight: InFlight | None = None
        # of each replica its own, but for weights
        self._moments = Moments(optimizer, parameters, "keep", None)
        if not local.has_outer:
            self._moments.expect_weights()
        #: Of the message that is on its way.
        self._left: _Left | None = None
        state = local.init(
            TorchOps(quorum.device), {n: p.detach() for n, p in parameters.items()}, 1
        )
        #: Of the outer steps of a round, whether they could be taken; and how many could not, of
        #: all.
        self._finite: list[Tensor] = []
        self._averages = self._skipped_averages = 0
        self._run_of_skips = RunOfSkips(repr(local), 0, SAID_AFTER, SKIPPED_AVERAGES)
        self._host = HostMemory(quorum.device) if on_host else None
        state = state if self._host is None else self._host.place(state)
        super().__init__(local, state, parameters, buffers, optimizer, quorum, rest, assumed)
        if self._host is not None:
            self._memory.wait = self._host.wait
        took_part = False
        while self._joining and self._left is None:
            took_part = self._round()
        self._memory.steps += took_part
        step_on_every_rank(optimizer, lambda: None, self._after_step)

    def outer_parameters(self) -> dict[str, Tensor]:
        """The outer parameters by name, as `LocalSGDHandle.outer_parameters`.

        Raises:
            ValueError: plain averaging has none.
        """
        state = self._memory.state
        return self.local.outer_parameters(
            state if self._host is None else self._host.fetch(state, (), self._parameters)
        )

    def _copied(self, names: Collection[str] | None = None) -> State[Tensor]:
        if self._host is None or names is None:
            return super()._copied(names)
        state = self._memory.state
        fetched = self._host.fetch(
            state, names, outer=self._parameters if len(self._parts) > 1 else ()
        )
        return State(
            {key: x.clone() for key, x in state.shared.items()},
            {n: dict(m) for n, m in fetched.tensors.items()},
        )

    def _own(self) -> frozenset[str]:
        compressor = self.local.compressor
        return frozenset({DIFFERENCE, WEIGHT}) | (
            frozenset() if compressor is None else frozenset(compressor.per_replica)
        )

    def _receive(self, given: Mapping[str, Any]) -> None:
        super()._receive(given)
        for kept in self._memory.state.tensors.values():  # what has left of it, left by another way
            if DIFFERENCE in kept:
                kept[DIFFERENCE].zero_()

    def _after_step(self) -> None:
        step = self.steps
        if self._left is not None:
            self._receive_rounds(step)
        if self._left is not None and step - self._left.step >= self._late:
            self._arrive(step)
        if due := self._due(step):
            if (
                self.local.eager
                and self._left is None
                and not self.local.round(step, self._late, due[0])
            ):
                # of the first difference each knows only its own
                self._take(self._average(Present(step), {}))
            self._round()
        self._memory.steps += 1
        self._assumed.stepped()  # with the averages

    def _due(self, step: int) -> list[int]:
        """Fragments whose averages, or whose messages, begin after this step."""
        return [f for f in range(len(self._parts)) if self.local.due(step, self.local.longest, f)]

    def _round(self) -> bool:
        """The quorum, and the average or the message of what is due. Returns whether replicas have
        trained before."""
        present = self.quorum.meet(self.steps, joining=self._joining)
        if present is not None:
            self._memory.steps = present.steps
        if present is None or not present.trained:
            self._vote(None)
            return False
        if self.local.delayed:
            self._left = self.quorum.attempt(lambda: self._leave(present))
            if self._left is None:
                self._vote(None)
        else:
            self._vote(self.quorum.attempt(lambda: self._average(present, self._buffers)))
        return True

    def _vote(self, after: _After | None) -> bool:
        """Take what a round has made, if the vote is for it."""
        taken = self.quorum.vote()
        self._joining = self._joining and not taken
        if taken and after is not None:
            self._take(after)
            self._note_skipped()
        self._finite.clear()
        return taken

    def _note_skipped(self) -> None:
        """Note what an average has left as it was since it was not finite; and what an optimizer
        remembers of that goes."""
        for ok in self._finite:
            self._averages += 1
            self._skipped_averages += not ok
            self._run_of_skips.seen(self._averages, self._skipped_averages)
        if self.local.has_outer:
            self._drop_broken()

    def _drop_broken(self) -> None:
        """What the optimizer remembers of inf and NaN: it begins anew."""
        if broken := broken_of(self._optimizer, self._parameters.values()):
            broken.drop()

    def _take(self, after: _After) -> None:
        with torch.no_grad():
            self._moments.follow(after.parameters)
            for name, x in after.parameters.items():
                self._parameters[name].copy_(x)
            self._moments.put(after.weights, set())
            for name, kept in after.state.tensors.items():
                if WEIGHT in kept and WEIGHT not in self._memory.state.tensors[name]:
                    del kept[WEIGHT]  # of a round in which somebody did not count
            self._keep(after.state)

    def _keep(self, state: State[Tensor]) -> None:
        if self._host is None:
            return keep(state, self._memory.state)
        memory = self._memory.state
        used = [
            n
            for n, kept in state.tensors.items()
            if all(x is not memory.tensors[n][k] for k, x in kept.items())
        ]
        self._host.keep(state, memory, used)

    @torch.no_grad()
    def _average(
        self,
        present: Present,
        buffers: Mapping[str, Tensor],
        state: State[Tensor] | None = None,
        arrived: Mapping[int, Stepped[Tensor]] | None = None,
        turn: Turn | None = None,
    ) -> _After:
        """What the schedule makes of parameters and memory after this step, or what of it is in
        this `turn`. Neither is touched; averaged buffers are written over."""
        step, local = present.steps, self._local(present)
        if state is None:
            state = self._copied({n for f in self._due(step) for n in self._parts[f]})
        parameters = {
            n: p.detach().clone(memory_format=torch.contiguous_format)
            for n, p in self._parameters.items()
        }
        extras = {n: {"": b.detach().contiguous()} for n, b in buffers.items()}
        weights = (
            {}
            if local.has_outer
            else self._moments.taken({n for f in self._due(step) for n in self._parts[f]})
        )
        extras |= weights
        collectives, replicas = self.quorum.collectives, self.quorum.groups.whole.size()
        weight = self._weight * present.counts
        with plain_arithmetic(self._ops.device):
            program = local.average(
                self._ops,
                parameters,
                state,
                step,
                replicas,
                extras,
                arrived,
                turn,
                weight,
                self._finite,
            )
            after, memory, others = run_alone(collectives, with_settings(program, self._settings))
        for name, b in buffers.items():
            b.copy_(others[name][""])
        return _After(after, memory, {name: others[name] for name in weights})

    def _local(self, present: Present) -> LocalSGD:
        """The schedule, in which replicas have weights where they do not count alike."""
        return self.local if present.all_count else replace(self.local, weighted=True)

    # ---- averages that are taken later than their differences leave

    def _leave(self, present: Present) -> _Left:
        step, quorum, local = present.steps, self.quorum, self._local(present)
        state = self._copied({n for f in self._due(step) for n in self._parts[f]})
        if not self.local.eager:
            leaves = replace(self.local.turn(step), arrives=frozenset())
            after = self._average(present, self._buffers, state, turn=leaves)
            state = after.state
            # Of a replica that has broken, which goes back to its outer parameters, whatever the
            # vote will be.
            for name, x in after.parameters.items():
                self._parameters[name].detach().copy_(x)
        elif local.weighted:
            for kept in state.tensors.values():
                if DIFFERENCE in kept:
                    weight = self._weight * present.counts
                    kept[WEIGHT] = torch.tensor(
                        weight, dtype=torch.float32, device=self._ops.device
                    )
        self._in_flight = InFlight(
            local, self._specs, quorum.groups, self._ops, Step, quorum.collectives
        )
        with torch.no_grad(), plain_arithmetic(self._ops.device):
            self._in_flight.leave(step, state, self._settings)
        return _Left(step, present, state)

    def _receive_rounds(self, step: int) -> None:
        """Receive those rounds of the message on its way that have had their time."""
        assert self._in_flight is not None
        flight = self._in_flight
        if self.quorum.manager.errored() is None:
            with torch.no_grad(), plain_arithmetic(self._ops.device):
                self.quorum.attempt(lambda: flight.advance(step))

    def _arrive(self, step: int) -> None:
        assert self._in_flight is not None
        assert self._left is not None
        flight, left = self._in_flight, self._left
        self._left = self._in_flight = None
        after = None
        if self.quorum.manager.errored() is None:
            with torch.no_grad(), plain_arithmetic(self._ops.device):
                arrived = self.quorum.attempt(lambda: flight.arrived(step))
            if arrived is not None:
                # What leaves after this step too does so in a round of its own.
                arrives = (
                    None if self.local.eager else replace(self.local.turn(step), due=frozenset())
                )
                after = self._average(
                    replace(left.present, steps=step), {}, left.state, arrived, arrives
                )
        with suppress(*LOST):
            flight.drop()
        self._vote(after)

    def _drop_message(self) -> None:
        # Without a vote, on all replicas: the next quorum begins as if this one had not been.
        flight, self._left, self._in_flight = self._in_flight, None, None
        if flight is not None:
            with suppress(*LOST):
                flight.drop()


@dataclass(frozen=True)
class _Left:
    """A message that is on its way: after which step it has left, among whom, and the memory that
    it is made of."""

    step: int
    present: Present
    state: State[Tensor]


@dataclass(frozen=True)
class _After:
    """What a round has made: parameters, memory, and averages of what an optimizer keeps of
    weights."""

    parameters: dict[str, Tensor]
    state: State[Tensor]
    weights: dict[str, dict[str, Tensor]]
