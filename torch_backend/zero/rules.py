"""Which optimizer takes which parameters: one class for all, or several by patterns of names, each
with its options and its way to be divided.

ZeroOptimizer(
    model.named_parameters(),
    {
        "*emb*": (torch.optim.AdamW, {"lr": 3e-4}, "element"),
        "*.weight": (torch.optim.Muon, {"lr": 0.02}, "parameter"),
        "*": (torch.optim.AdamW, {"lr": 3e-4, "weight_decay": 0.0}, "element"),
    },
)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.core.ops import Spec
from gradwire.core.text.name_patterns import matches, require_matches
from gradwire.core.text.wording import some
from gradwire.torch_backend.torch_internals import MUON, NeedsTorch
from gradwire.torch_backend.zero.trials import (
    require_elementwise,
    require_parameterwise,
    require_savable,
    require_shardable,
)

WAYS = ("element", "parameter", "bucket")


@dataclass(frozen=True, eq=False)
class Rule:
    """An optimizer for some parameters.

    Attributes:
        optimizer_class: its class.
        options: its arguments.
        shard: how its parameters are divided, see `ZeroOptimizer`.
        subject: what messages call it.
    """

    optimizer_class: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    shard: str
    subject: str

    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """One of these groups."""
        return self.optimizer_class(groups, **self.options)

    def require_divisible(self, device: torch.device) -> None:
        """Raise ValueError for an optimizer that no rank can run for its part of the model, in
        pieces of parameters if so they are divided."""
        require_shardable(self.optimizer_class)
        require_savable(
            self.optimizer_class, self.options, device
        )  # first: what codes its state often compiles its step, and the next trial takes many
        (require_elementwise if self.shard == "element" else require_parameterwise)(
            self.optimizer_class, self.options, device
        )

    def work(self, spec: Spec) -> int:
        """What an update of a parameter costs, beside those of other rules: its elements;
        n·m·min(n, m) where a matrix is orthogonalized by the products of Newton-Schulz (Jordan et
        al. 2024, "Muon")."""
        options = inspect.signature(self.optimizer_class).parameters
        orthogonalizes = "ns_steps" in options or "muon" in self.optimizer_class.__name__.lower()
        return spec.size * min(spec.shape) if orthogonalizes and len(spec.shape) == 2 else spec.size


def rules_of(
    optimizer_class: Any,
    options: Mapping[str, Any],
    shard: str,
    groups: Sequence[dict[str, Any]],
    names: Mapping[Tensor, str],
    frozen: Iterable[str],
) -> tuple[list[dict[str, Any]], list[Rule]]:
    """Parameter groups, and the rule of each.

    Args:
        optimizer_class, options, shard: as `ZeroOptimizer` was given them.
        groups: of parameters, as they were given.
        names: of the parameters.
        frozen: names of those that are not trained. A pattern may be for them alone, and then makes
            no group.

    Raises:
        TypeError: no class of optimizers, or patterns beside what belongs into them.
        ValueError: `shard` is none that there is, a parameter without a pattern, or a pattern
            without a parameter.
    """
    if not isinstance(optimizer_class, Mapping):
        rule = Rule(
            _checked_class("optimizer_class", optimizer_class),
            options,
            _checked_way("shard", shard, WAYS),
            "",
        )
        return list(groups), [rule] * len(groups)
    if not optimizer_class:
        raise ValueError(
            "optimizer_class={} holds no pattern; give {pattern: (class, options, shard)}"
        )
    if options or shard != "element":
        given = sorted(options) or ["shard"]
        raise TypeError(
            f"{given[0]}= stands beside optimizer_class={{pattern: …}}; put it into the patterns:"
            " {pattern: (class, options, shard)}"
        )
    if len(groups) != 1 or groups[0].keys() != {"params"}:
        raise TypeError(
            "params holds parameter groups, and the patterns make them; give"
            " model.named_parameters()"
        )
    rules = {pattern: _parsed(pattern, entry) for pattern, entry in optimizer_class.items()}
    require_matches("optimizer_class", rules, [*names.values(), *frozen])
    taken: dict[str, list[Tensor]] = {pattern: [] for pattern in rules}
    unmatched = []
    for p, name in names.items():
        first = next((pattern for pattern in rules if matches(name, pattern)), None)
        if first is None:
            unmatched.append(name)
        else:
            taken[first].append(p)
    if unmatched:
        raise ValueError(
            f"optimizer_class has no pattern for {some(unmatched)}; add one, such as '*' at the end"
        )
    for pattern, own in taken.items():
        if not own and any(matches(name, pattern) for name in names.values()):
            raise ValueError(
                f"optimizer_class pattern {pattern!r} gets no parameter, since a pattern before it"
                " takes all of its own; the first that matches decides: put it further up, or"
                " leave it out"
            )
    return [{"params": own} for own in taken.values() if own], [
        rules[pattern] for pattern, own in taken.items() if own
    ]


def _parsed(pattern: Any, entry: Any) -> Rule:
    subject = f"optimizer_class[{pattern!r}]"
    if not isinstance(pattern, str):
        raise TypeError(f"{subject}: a pattern of parameter names is a string")
    if not (isinstance(entry, (tuple, list)) and len(entry) == 3):
        raise TypeError(
            f"{subject}={entry!r} is no (class, options, shard), such as (torch.optim.AdamW,"
            " {'lr': 1e-3}, 'element')"
        )
    optimizer_class, options, shard = entry
    if not isinstance(options, Mapping):
        raise TypeError(
            f"{subject}: options={options!r} is no dictionary of the optimizer's arguments"
        )
    return Rule(
        _checked_class(subject, optimizer_class),
        dict(options),
        _checked_way(subject, shard, WAYS[:2]),
        subject,
    )


def _checked_class(subject: str, given: Any) -> type[torch.optim.Optimizer]:
    if isinstance(given, str):
        if given == "Muon" and MUON.obstacle:
            raise NeedsTorch(f"{subject}: {MUON.obstacle}; give a class of your own")
        found = getattr(torch.optim, given, None)
        if found is None:
            raise ValueError(
                f"{subject}: torch {torch.__version__} has no torch.optim.{given}; give a class of"
                " your own"
            )
        given = found
    if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
        raise TypeError(f"{subject}={given!r} is no class of optimizers, such as torch.optim.AdamW")
    return given


def _checked_way(subject: str, given: Any, ways: Sequence[str]) -> str:
    if given not in ways:
        raise ValueError(f"{subject}={given!r} is not one of {', '.join(map(repr, ways))}")
    return str(given)


def misfit(
    rules: Sequence[Rule],
    groups: Sequence[dict[str, Any]],
    names: Mapping[Tensor, str],
    refused: Exception,
) -> Exception:
    """What one of several optimizers has `refused`, with its pattern, and with the parameter where
    it is about one."""
    for rule, group in zip(rules, groups, strict=True) if rules[0].subject else ():
        for p in group["params"]:
            try:
                rule.optimizer([{"params": [torch.nn.Parameter(p.detach().new_zeros(p.shape))]}])
            except Exception as error:
                about = f"refuses {names[p]!r} of shape {tuple(p.shape)}, or its options"
                return ValueError(
                    f"{rule.subject}: {rule.optimizer_class.__name__} {about}: {error}. The first"
                    " pattern that matches decides: put one for such parameters before it"
                )
    return refused


class Mixture(torch.optim.Optimizer):
    """Several optimizers as one, each with one of the parameter groups. Groups and state are
    theirs."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    @property  # type: ignore[override]
    def state(self) -> _States:
        """Parameter → what its optimizer remembers."""
        return _States(self.parts)

    @state.setter
    def state(self, value: object) -> None:
        """Set by `torch.optim.Optimizer`, for optimizers that keep it themselves."""

    def step(self, closure: Any = None) -> Any:
        """Step every part. `closure` is called first."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state as any optimizer does; the groups are those of the parts, in their order."""
        for part, group in zip(self.parts, state_dict["param_groups"], strict=True):
            own = {
                number: x for number, x in state_dict["state"].items() if number in group["params"]
            }
            part.load_state_dict({"state": own, "param_groups": [group]})
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class _States(Mapping[Tensor, Any]):
    """The states of several optimizers, to be read and set by parameter."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    def __getitem__(self, p: Tensor) -> Any:
        return next(part.state[p] for part in self._parts if p in part.state)

    def __setitem__(self, p: Tensor, value: Any) -> None:
        owner = next(
            part
            for part in self._parts
            if any(p is own for group in part.param_groups for own in group["params"])
        )
        owner.state[p] = value

    def __iter__(self) -> Iterator[Tensor]:
        return (p for part in self._parts for p in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def made(rules: Sequence[Rule], groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of these groups, each by its rule; where all have one rule, the plain one."""
    if all(rule is rules[0] for rule in rules):
        return rules[0].optimizer(groups)
    return Mixture([rule.optimizer([group]) for rule, group in zip(rules, groups, strict=True)])
