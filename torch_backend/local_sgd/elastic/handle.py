"""What `elastic` returns: what one replica remembers, and what a newcomer receives of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.protocol.weights import counted_weight
from gradwire.torch_backend.cpu.compiled import CODES, loops_for
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.engine.groups.same_state import digest_of
from gradwire.torch_backend.local_sgd.elastic.quorum import Quorum, on_host
from gradwire.torch_backend.monitor.stats import Sent
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.setup.assumptions import Assumptions
from gradwire.torch_backend.state.memory import Memory, Replicated
from gradwire.torch_backend.state.settings import Settings, asked_by

#: Under which a `Manager` keeps what belongs to a handle.
KEY = "gradwire"


def rest_of(module: nn.Module, but: Collection[Tensor]) -> dict[str, Tensor]:
    """What a model is besides these tensors: frozen parameters, and buffers of any dtype."""
    known = {id(x) for x in but}
    return {
        n: x for n, x in (*module.named_parameters(), *module.named_buffers()) if id(x) not in known
    }


class ElasticHandle:
    """What `elastic` returns.

    Attributes:
        quorum: the present members.
    """

    def __init__(
        self,
        what: Algorithm | LocalSGD,
        state: State[Tensor],
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        quorum: Quorum,
        rest: Callable[[], Mapping[str, Tensor]],
        assumed: Assumptions,
    ) -> None:
        self.quorum, self._rest, self._assumed = quorum, rest, assumed
        self._trains_on = False  # steps have been taken since it came, or since a state was loaded
        optimizer.register_step_pre_hook(self._require)
        optimizer.register_step_post_hook(self._note)
        self._parameters, self._buffers, self._optimizer = parameters, buffers, optimizer
        self._ops = TorchOps(quorum.device)
        self._ops.loops = loops_for(what, specs_of(parameters), quorum.device, CODES)
        self._memory = Memory(what, state, _OneReplica(quorum.device))
        quorum.sent = self._memory.sent
        self._joining = True
        self._weight = 1.0
        self._settings = Settings({}, quorum.device)
        quorum.manager.register_state_dict_fn(KEY, self._receive, self._give)

    def _require(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise RuntimeError before each step for what is not as it was when this replica came."""
        self._assumed.require(self.steps)
        self._assumed.remembers_weights = getattr(self._memory.algorithm, "has_outer", False)
        before, remembers = (
            self._assumed.unloaded,
            self._trains_on and self._assumed.remembers_weights,
        )
        if before is not None and remembers and digest_of(self._parameters) != before:
            raise RuntimeError(
                "weights were loaded into the module in the middle of training, and outer"
                " parameters are of those before, which would pull them back: load the state that"
                " was saved with them into the handle, too, on all replicas; or end the run, and"
                " begin another with these weights"
            )
        if remembers:
            self._assumed.notice_written()
        self._assumed.unloaded = None

    def _note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note that a step has ended."""
        self._assumed.stepped()
        self._trains_on = not self._joining

    @property
    def steps(self) -> int:
        """How far the run has come, in steps of the optimizer: the position in the data that a
        newcomer goes on from."""
        return self._memory.steps

    @property
    def rounds(self) -> int:
        """Averages that counted, of the whole run; the first is the one in which the first replicas
        met."""
        return int(self.quorum.manager.current_step())

    @property
    def sent(self) -> Sent:
        """Messages and bytes of this replica, also before it went on from a saved state."""
        return self._memory.sent

    @property
    def weight(self) -> float:
        """What this replica counts for in the averages that leave from now on: 1, or the tokens
        that it has seen, say. It may be set where the algorithm is `Weighted(…)` or the schedule
        `weighted`. In the round in which a replica comes it counts for nothing.

        Raises:
            TypeError, ValueError: it is no weight, or all replicas count alike.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        what = self._memory.algorithm
        instead = "give Weighted(…) or weighted=True to all of them"
        self._weight = counted_weight(
            weight, what, weighted=getattr(what, "weighted", False), instead=instead
        )

    def set(self, **settings: float) -> None:
        """Tell the algorithm, or a schedule's compressor, something of the averages that leave from
        now on, until it is told otherwise: what it asks for with `await setting(ops, name,
        default)`. Each replica's own loop says it, a newcomer's too, the same on all of them.

        Raises:
            TypeError: a value is no number.
            ValueError: it does not ask for it. Nothing has been changed then.
        """
        what, specs = self._memory.algorithm, specs_of(self._parameters)
        if not self._settings:
            asks, given = (
                (what.compressor, what.kept(specs)) if isinstance(what, LocalSGD) else (what, specs)
            )
            asked = asked_by(asks, given, self.quorum.groups.whole.size())
            self._settings = Settings(asked, self._ops.device)
        self._settings.say(settings, what)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._memory.algorithm!r}: {self.steps} steps, {self.rounds}"
            " rounds)"
        )

    def state_dict(self) -> dict[str, Any]:
        """The step and the memory of this replica, copied to the CPU: for a checkpoint, with its
        parameters, its optimizer and `manager.state_dict()`. That of any replica serves all.
        Communicates nothing."""
        lent = self._memory.lent()
        return {**lent, **_copied_to_host(lent["shared"], lent["tensors"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. Load the state of one replica on all of them, or on none.

        Raises:
            ValueError: it is no such state or does not fit, said how. Nothing has been changed
                then.
        """
        found = self._memory.fit(state)
        self._drop_message()
        self._memory.take(found)
        self._trains_on = False

    def _drop_message(self) -> None:
        """Drop what is on its way, if anything is."""

    def _own(self) -> Collection[str]:
        """Names of the memories that a newcomer begins with zeros."""
        return self._memory.per_replica

    def _give(self) -> dict[str, Any]:
        """What another replica takes over. Copies, since training goes on while it is sent."""
        self._memory.wait()
        memory = self._memory.state
        return {
            "asks": self.quorum.asks,
            "steps": self.steps,
            **_copied_to_host(memory.shared, memory.tensors, without=self._own()),
            "parameters": {name: on_host(p) for name, p in self._parameters.items()},
            "buffers": {name: on_host(b) for name, b in self._buffers.items()},
            "rest": {name: on_host(x) for name, x in self._rest().items()},
            "optimizer": _on_host(self._optimizer.state_dict()),
        }

    def _receive(self, given: Mapping[str, Any]) -> None:
        """What another replica gives. Its compression error stays its own: zeros, of a newcomer."""
        self.quorum.healed = True
        if given["asks"] != self.quorum.asks:
            return  # it will be refused when all have said what they ask for
        self._memory.steps = given["steps"]
        self._memory.wait()
        self._optimizer.load_state_dict(given["optimizer"])
        with torch.no_grad():
            for name, x in given["parameters"].items():
                self._parameters[name].copy_(x)
            for name, x in given["buffers"].items():
                self._buffers[name].copy_(x)
            rest = self._rest() if self._joining else {}  # each replica's own since then
            for name in rest.keys() & given["rest"].keys():
                rest[name].copy_(given["rest"][name])
            for key, x in given["shared"].items():
                self._memory.state.shared[key].copy_(x)
            for name, kept in given["tensors"].items():
                for key, x in kept.items():
                    self._memory.state.tensors[name][key].copy_(x)

    def _copied(self, names: Collection[str] | None = None) -> State[Tensor]:
        """The memory, of which that of the parameters with these names is a copy; None: of all. A
        round works on it, and is taken if the vote is for it."""
        state = self._memory.state
        return State(
            {key: x.clone() for key, x in state.shared.items()},
            {
                n: (
                    {key: x.clone() for key, x in m.items()}
                    if names is None or n in names
                    else dict(m)
                )
                for n, m in state.tensors.items()
            },
        )


def _on_host(state: Any) -> Any:
    """A copy of an optimizer's state, its tensors on the CPU: one by one, so that a device never
    has them twice."""
    if isinstance(state, Tensor):
        return on_host(state)
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(_on_host, state))
    return copy.deepcopy(state)


def _copied_to_host(
    shared: Mapping[str, Tensor],
    tensors: Mapping[str, Mapping[str, Tensor]],
    without: Collection[str] = (),
) -> dict[str, Any]:
    """A memory, `without` those of some names."""
    return {
        "shared": {key: on_host(x) for key, x in shared.items()},
        "tensors": {
            n: {key: on_host(x) for key, x in m.items() if key not in without}
            for n, m in tensors.items()
        },
    }


class _OneReplica(Replicated):
    """A group for a memory that is saved by one replica for itself: the others may be gone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.meetings, self.pieces = [], {}
