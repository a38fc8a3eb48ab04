"""One rank's part of a model under a sharded optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradwire.core.zero.sharding import Shards
from gradwire.torch_backend.zero.rules import Mixture, Rule, made


@dataclass
class Shard:
    """The pieces of parameters that a rank owns, and the optimizer that updates them.

    Attributes:
        rules: the optimizer of each group of parameters.
        parameters: whole, by name.
        group_names: the names of the parameters in each of its groups.
        options: of each group, as they were given.
        shards: who owns what.
        rank: in the process group.
        master_dtype: pieces are copies in this dtype; None: views of the parameters, where that is
            possible.
        pieces: by name, of what this rank owns something.
        optimizer: of the pieces.
    """

    rules: list[Rule]
    parameters: dict[str, Tensor]
    group_names: list[list[str]]
    options: list[dict[str, Any]]
    shards: Shards
    rank: int
    master_dtype: torch.dtype | None
    pieces: dict[str, torch.nn.Parameter] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.divide(self.shards)

    def divide(self, shards: Shards) -> None:
        """Own what these shards say, without any state."""
        self.shards = shards
        self.pieces = self._pieces(self.parameters)
        groups = [
            self._group(names, options)
            for names, options in zip(self.group_names, self.options, strict=True)
        ]
        self.optimizer = made(self.rules, groups)

    def add(
        self, parameters: Mapping[str, Tensor], options: dict[str, Any], shards: Shards
    ) -> None:
        """Take a further group of parameters. These shards divide the others as before."""
        self.shards = shards
        self.parameters.update(parameters)
        self.group_names.append(list(parameters))
        self.rules.append(self.rules[-1])
        self.options.append(options)
        self.pieces |= self._pieces(parameters)
        self.optimizer.add_param_group(self._group(list(parameters), options))

    def _pieces(self, names: Iterable[str]) -> dict[str, torch.nn.Parameter]:
        owned = ((name, *self.shards.owned(name, self.rank)) for name in names)
        return {
            name: torch.nn.Parameter(self._cut(name)) for name, start, stop in owned if start < stop
        }

    def _group(self, names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, "params": [self.pieces[name] for name in names if name in self.pieces]}

    def _cut(self, name: str) -> Tensor:
        p = self.parameters[name].detach()
        if self.shards.in_pieces(name):
            flat = self.of_whole(name, p)
            piece = flat.view((1,) * (p.ndim - 1) + (flat.numel(),)) if p.ndim else flat.view(())
        else:
            piece = p
        return piece if self.master_dtype is None else piece.to(self.master_dtype, copy=True)

    def of_whole(self, name: str, whole: Tensor) -> Tensor:
        """What this rank owns of a tensor like a parameter, flat. Elements are numbered in their
        logical order, whatever the strides."""
        start, stop = self.shards.owned(name, self.rank)
        return whole.reshape(-1)[start:stop]

    def take_changes(self, names: Iterable[str]) -> None:
        """Take weights that somebody has loaded into the module since."""
        for name in names:
            piece = self.pieces[name].detach()
            now = self.of_whole(name, self.parameters[name].detach()).view(piece.shape)
            if now.data_ptr() != piece.data_ptr():  # element by element, and unseen by the host
                torch.where(now == piece.to(now.dtype), piece, now.to(piece.dtype), out=piece)

    def trial(
        self, name: str, options: Mapping[str, Any]
    ) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
        """An optimizer of zeros like this rank's piece of a parameter, and those. `options` of its
        group."""
        stand_in = torch.nn.Parameter(torch.zeros_like(self.pieces[name]))
        stand_in.grad = torch.zeros_like(stand_in)
        kept = {
            key: value for key, value in options.items() if key not in ("params", "param_names")
        }
        return self.rule_of(name).optimizer([{**kept, "params": [stand_in]}]), stand_in

    @property
    def defaults(self) -> list[dict[str, Any]]:
        """The options of the optimizer of each group, where the group has no others."""
        inner = self.optimizer
        return (
            [part.defaults for part in inner.parts]
            if isinstance(inner, Mixture)
            else [inner.defaults] * len(self.rules)
        )

    def rule_of(self, name: str) -> Rule:
        """The rule of the group that the parameter is in."""
        return next(
            rule for rule, names in zip(self.rules, self.group_names, strict=True) if name in names
        )

    def first_state(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """What the first step makes an optimizer remember of this rank's piece of a parameter,
        tried out with zeros. `options` of its group."""
        trial, stand_in = self.trial(name, options)
        with torch.no_grad():
            trial.step()
        return dict(trial.state[stand_in])
