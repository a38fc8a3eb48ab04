"""What an optimizer remembers of a parameter, when parameters are averaged: kept, averaged as well,
or dropped. Weights that it keeps go with the parameters in any case."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.local_sgd.alongside import mean_alongside
from gradwire.core.protocol.programs import Program
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups.barrier import Meeting
from gradwire.torch_backend.engine.groups.gathered_objects import gathered_by_all
from gradwire.torch_backend.engine.host_scalars import Foreseen
from gradwire.torch_backend.engine.scheduler import run_alone
from gradwire.torch_backend.fsdp.layout import local_part
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.workspace import dtype_name
from gradwire.torch_backend.setup.consistency import copy_from_first_rank
from gradwire.torch_backend.setup.optimizer_state import (
    STEPPED,
    MayBeWeights,
    has_two_modes,
    is_plain,
    may_be_weights,
    names_in,
)

#: A scalar parameter's moments look like it.
COUNTER = "step"
#: Averages at which ranks tell each other what their optimizers remember, until one of them
#: remembers something.
ATTEMPTS = 3
#: After the name of masters, of a number that travels beside them: whether they still are.
STILL = " still"
#: So much of it, by the weights of ranks, is all of them.
OF_ALL = 0.999
#: Why ranks may not come to that.
NOT_THERE = "Every rank takes equally many steps; those others have taken fewer, or have ended"


class Moments:
    """The moments of an optimizer: those tensors that it keeps for a parameter and that have its
    shape. Counters are left alone.

    Parameters are named, as the optimizer knows them; of a DTensor the local part is averaged.
    `what` is "keep", "average" or "reset". `group` None: of replicas that come and go, which tell
    each other nothing.

    Some optimizers keep weights in their state: masters in float32, from which the next step makes
    the parameters, whatever is in these; or the weights that a schedule-free one steps. They are
    averaged with the parameters, or moved as these are where an outer optimizer makes them.

    Attributes:
        optimizer: as given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, Tensor],
        what: str,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.optimizer = optimizer
        self._parameters = parameters
        self._what = what
        self._group = group
        self._keys: dict[str, torch.dtype | None] = {}
        self._masters: frozenset[str] = frozenset()
        self._weights: frozenset[str] = frozenset()
        self._own_attempts = 0 if optimizer is None or what == "reset" else ATTEMPTS
        self._attempts = 0 if group is None else self._own_attempts
        self._meeting = None if group is None or optimizer is None else Meeting(group)
        self._foreseen = Foreseen(next(iter(parameters.values())).device)
        self._ahead: MayBeWeights | None = None

    def expect_weights(self) -> None:
        """Expect weights of an optimizer that has two modes: those that it steps, as those of all
        replicas, which have nobody to ask. One that has not stepped yet counts as what its
        parameters are."""
        if has_two_modes(self.optimizer):
            self._keys, self._weights = {STEPPED: None}, frozenset({STEPPED})

    def taken(
        self, due: Collection[str], *, followed: bool = False
    ) -> dict[str, dict[str, Tensor]]:
        """The moments to be averaged, of the parameters that are: parameter → name of the moment →
        tensor. The same names and shapes on all ranks.

        A rank that has none yet (its optimizer skipped every step, or the parameter has received no
        gradient there) counts as zeros; of weights, as what its parameter is. `followed`: weights
        are not averaged, since `follow` moves them.
        """
        if not followed or self._what == "average":
            self._look()
        weights = frozenset() if followed else self._weights
        return self._taken(
            due, self._keys.keys() - self._weights | weights if self._what == "average" else weights
        )

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """The weights of all parameters, see `taken`."""
        if not self._keys and self.optimizer is not None and self._what != "reset":
            self._agree()
        return self._taken(self._parameters.keys(), self._weights)

    def look_ahead(self) -> None:
        """Look for weights after the step before an average, so that the host does not wait for it
        then."""
        wanted = (not self._keys and self._attempts) or (not self._weights and self._own_attempts)
        if wanted and self.optimizer is not None:
            self._ahead = may_be_weights(self.optimizer, self._parameters.values())
            self._foreseen.note({} if self._ahead.flags is None else {"weights": self._ahead.flags})

    def _found_weights(self) -> tuple[set[str], set[str]]:
        """See `MayBeWeights.weights`. The host waits where nobody has looked ahead, or something
        has come since."""
        assert self.optimizer is not None
        seen, self._ahead = self._ahead, None
        if seen is None or seen.names != names_in(self.optimizer, self._parameters.values()):
            seen = may_be_weights(self.optimizer, self._parameters.values())
        return seen.weights(None if seen.flags is None else self._foreseen.value(seen.flags))

    def _look(self) -> None:
        if not self._keys and self._attempts:
            self._attempts -= self._what == "keep"
            self._agree()

    def _found(self, masters: Collection[str], others: Collection[str]) -> None:
        self._masters |= set(masters)
        self._weights |= {*masters, *others}

    def _taken(self, due: Collection[str], keys: Collection[str]) -> dict[str, dict[str, Tensor]]:
        if self.optimizer is None or not keys:
            return {}
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        masters = sorted(self._masters & set(keys))
        return {
            name: {
                key: self._moment(p, key, self._keys[key]).detach().contiguous()
                for key in sorted(keys)
            }
            | {key + STILL: self._is_master(p, key) for key in masters}
            for name, p in self._parameters.items()
            if name in due and id(p) in stepped
        }

    def follow(self, parameters: Mapping[str, Tensor]) -> None:
        """Move weights as far, before these take the places of the parameters. So what rounding has
        kept from the parameters is not lost. It takes no message."""
        if not self._weights and self._own_attempts and self.optimizer is not None:
            self._own_attempts -= 1
            self._found(*self._found_weights())
        for name, new in parameters.items() if self._weights else ():
            p = self._parameters[name]
            before = local_part(p)
            mine = self._of(p)
            for x in [mine[key] for key in self._weights & mine.keys()]:
                moved = x + (new.to(x.dtype) - before.to(x.dtype))
                x.copy_(torch.where(moved.isfinite(), moved, new.to(x.dtype)))

    def put(self, averages: Mapping[str, Mapping[str, Tensor]], averaged: Collection[str]) -> None:
        """Take the averages over, where there is something to replace; or drop the moments of the
        parameters that were `averaged`. A parameter whose master was averaged is what that is,
        rounded once, where it was its master on all ranks: what looked like one may have been an
        average of weights that had only begun (ASGD, Lookahead)."""
        for name, moments in averages.items():
            p = self._parameters[name]
            mine = self._of(p)
            for key, value in moments.items():
                if key in mine:
                    mine[key].copy_(value)
                if key in self._masters:
                    own, taken = local_part(p), moments[key + STILL] > OF_ALL
                    own.copy_(torch.where(taken, value.to(own.dtype), own))
        if self._what == "reset" and self.optimizer is not None:
            for name in averaged:
                self.optimizer.state.pop(self._parameters[name], None)

    def broken(self) -> Broken | None:
        """The parameters of which the optimizer remembers inf or NaN, from which no step of its own
        leads back; None if it remembers nothing."""
        return (
            None if self.optimizer is None else broken_of(self.optimizer, self._parameters.values())
        )

    def make_equal(self, collectives: Collectives) -> None:
        """Let ranks that are given equal gradients take equal steps from now on: moments are
        averaged over all ranks, or dropped with "reset", and the rest of the optimizer's memory
        becomes that of the first rank. To be called on all ranks."""
        if self.optimizer is None:
            return
        everything = set(self._parameters)
        if self._what != "reset":
            if not self._keys:
                self._agree()
            taken = self._taken(everything, self._keys)
            program: Program[Any] = mean_alongside(collectives.ops, {}, taken)
            self.put(run_alone(collectives, program)[1], set())
        else:
            self.put({}, everything)
        self._copy_from_first_rank()

    def _copy_from_first_rank(self) -> None:
        assert self.optimizer is not None
        assert self._group is not None
        state, mine = self.optimizer.state, {}
        for name, p in self._parameters.items():
            mine[name] = {
                key: _Like.of(x) if _beside(p, x) else x for key, x in state.get(p, {}).items()
            }
        received: list[Tensor] = []
        device = next(iter(self._parameters.values())).device
        for name, kept in gathered_by_all(mine, self._group, device)[0].items():
            p = self._parameters[name]
            old, new = state.pop(p, {}), {}
            for key, x in kept.items():
                if isinstance(x, _Like):
                    new[key] = (
                        old[key]
                        if x == (_Like.of(old[key]) if _beside(p, old.get(key)) else None)
                        else x.empty(p)
                    )
                    received.append(local_part(new[key]))
                else:
                    new[key] = x
            if new:
                state[p] = new
        copy_from_first_rank(received, self._group)

    def _moment(self, parameter: Tensor, key: str, dtype: torch.dtype | None) -> Tensor:
        mine = self._of(parameter)
        if key not in mine and key in self._weights:
            return local_part(parameter).to(dtype or parameter.dtype)
        return mine[key] if key in mine else local_part(torch.zeros_like(parameter, dtype=dtype))

    def _is_master(self, parameter: Tensor, key: str) -> Tensor:
        """1 where the parameter is what the optimizer keeps under this name, rounded; else 0."""
        mine, own = self._of(parameter), local_part(parameter).detach()
        if key not in mine:
            return own.new_ones((), dtype=torch.float32)
        return (mine[key].to(own.dtype) == own).all().float()

    def _of(self, parameter: Tensor) -> dict[str, Tensor]:
        assert self.optimizer is not None
        kept = self.optimizer.state.get(parameter, {})
        return {
            key: local_part(x)
            for key, x in kept.items()
            if isinstance(x, Tensor)
            and is_plain(x)
            and x.is_floating_point()
            and x.shape == parameter.shape
            and key != COUNTER
        }

    def _agree(self) -> None:
        """Which moments there are, and which of them are weights. An optimizer makes them in its
        first step, which ranks need not take at the same time."""
        assert self.optimizer is not None
        mine: dict[str, str | None] = {}
        for p in self._parameters.values():
            mine |= {
                key: None if x.dtype == p.dtype else dtype_name(x.dtype)
                for key, x in self._of(p).items()
            }
        masters, others = self._found_weights()
        for theirs, *weights in self._gathered([mine, sorted(masters), sorted(others)]):
            self._keys |= {
                key: None if name is None else getattr(torch, name) for key, name in theirs.items()
            }
            self._found(*weights)
        self._keys = {key: self._keys[key] for key in sorted(self._keys)}

    def _gathered(self, mine: list[Any]) -> list[Any]:
        """What each rank says. Ranks meet where no device is asked."""
        assert self._meeting is not None
        if self._meeting.store is None and dist.get_world_size(self._group) > 1:
            return gathered_by_all(mine, self._group, next(iter(self._parameters.values())).device)
        card = json.dumps(mine)
        return [
            json.loads(card)
            for card in self._meeting.come("an average of local SGD", NOT_THERE, card) or [card]
        ]


class Broken:
    """The parameters of which an optimizer remembers inf or NaN: found where that is, and looked at
    later, so that nobody waits for a device."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], finite: Tensor
    ) -> None:
        self._optimizer, self._parameters, self.finite = optimizer, parameters, finite

    def drop(self, finite_ones: Tensor | None = None) -> None:
        """Let the optimizer begin anew with these parameters. `finite_ones`: a copy of `finite` on
        the host."""
        for p, finite in zip(
            self._parameters,
            (self.finite if finite_ones is None else finite_ones).tolist(),
            strict=True,
        ):
            if finite:
                continue
            # which makes this when it is built, and never again
            if isinstance(self._optimizer, torch.optim.Adagrad):
                groups = self._optimizer.param_groups
                group = next(
                    group for group in groups if any(p is each for each in group["params"])
                )
                self._optimizer.state[p]["sum"].fill_(group["initial_accumulator_value"])
            else:
                self._optimizer.state.pop(p, None)


def broken_of(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Broken | None:
    """See `Moments.broken`."""
    # Counters may be on the host.
    kept = {
        p: [x for x in _floating(optimizer.state[p]) if x.device == p.device]
        for p in parameters
        if p in optimizer.state
    }
    kept = {p: tensors for p, tensors in kept.items() if tensors}
    if not kept:
        return None
    flags = [TorchOps(p.device).all_finite(*tensors) for p, tensors in kept.items()]
    return Broken(optimizer, list(kept), torch.stack([ok.to(flags[0].device) for ok in flags]))


def _floating(x: Any) -> list[Tensor]:
    """All floating tensors in it, of a DTensor the local part."""
    if isinstance(x, Tensor):
        return [local_part(x)] if x.is_floating_point() and x.numel() else []
    if isinstance(x, Mapping):
        x = x.values()
    return (
        [y for each in x for y in _floating(each)]
        if isinstance(x, (list, tuple, ValuesView))
        else []
    )


@dataclass(frozen=True)
class _Like:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _Like:
        return cls(tuple(x.shape), x.dtype)

    def empty(self, parameter: Tensor) -> Tensor:
        """One where the parameter is, and sharded as that is, if it has its shape."""
        if self.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=self.dtype)
        return torch.empty(self.shape, dtype=self.dtype, device=parameter.device)


def _beside(parameter: Tensor, x: object) -> bool:
    """Whether it is a plain tensor on the parameter's device; counters may be on the host."""
    return isinstance(x, Tensor) and is_plain(x) and x.device == parameter.device
