"""Optimizers that a rank cannot step for its part of the model are refused by name in every form;
and all others are taken."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire.torch_backend as gw
from gradwire import LocalSGD
from gradwire.torch_backend.engine.groups import barrier
from tests.torch.models import mlp

pytestmark = pytest.mark.usefixtures("alone")


class Own(torch.optim.Optimizer):
    """What the optimizers of these tests have in common: a rate, and `move(group, parameters with
    gradients)`."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.move(group, [p for p in group["params"] if p.grad is not None])

    def move(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            p.sub_(p.grad, alpha=group["lr"])


class Clipped(Own):
    """The norm of all gradients is at most 1."""

    def move(self, group: dict[str, Any], params: list[Tensor]) -> None:
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad * (1 / norm).clamp(max=1), alpha=group["lr"])


class Adapted(Own):
    """SGD with D-adaptation: its rate grows from 1e-6, by sums over all parameters (Defazio and
    Mishchenko 2023)."""

    def move(self, group: dict[str, Any], params: list[Tensor]) -> None:
        norm = sum(float(p.grad.square().sum()) for p in params) ** 0.5
        rate = group.setdefault("d", 1e-6) / group.setdefault("first", norm)
        sums = [self.state[p].setdefault("sum", torch.zeros_like(p)) for p in params]
        group["gained"] = group.get("gained", 0.0) + rate * sum(
            float((p.grad * s).sum()) for p, s in zip(params, sums, strict=True)
        )
        for p, s in zip(params, sums, strict=True):
            s.add_(p.grad, alpha=rate)
        if length := sum(float(s.square().sum()) for s in sums) ** 0.5:
            group["d"] = max(group["d"], 2 * group["gained"] / length)
        for p, s in zip(params, sums, strict=True):
            p.sub_(s)


class OneRate(Own):
    """The rate is one number for all, the mean of all squares so far."""

    def move(self, group: dict[str, Any], params: list[Tensor]) -> None:
        group["sum"] = group.get("sum", 0.0) + sum(
            float(p.grad.square().mean()) for p in params
        ) / len(params)
        for p in params:
            p.sub_(p.grad, alpha=group["lr"] / group["sum"] ** 0.5)


class ProdigyLike(Own):
    pass


ProdigyLike.__name__ = "ProdigyOfMine"


class Noisy(Own):
    def move(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class TwoWeights(Own):
    """Averages of weights are put into the parameters for an evaluation, and taken out again."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


class Coded(torch.Tensor):
    """Knows as many operations as training takes."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor) -> None:
        self.values_ = values.half()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Coded(args[0].values_.float())
        raise NotImplementedError(f"{func}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Coded, (self.values_.float(),)


class CodedState(Own):
    def move(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if p.numel() >= 4096:  # as torchao's 8-bit optimizers do
                self.state[p].setdefault("buffer", Coded(torch.zeros_like(p)))
        super().move(group, params)


FORMS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "element": lambda m, cls: gw.ZeroOptimizer(m.named_parameters(), cls, lr=0.1),
    "averaging": lambda m, cls: gw.ZeroOptimizer(
        m.named_parameters(), cls, lr=0.1, average_gradients=True
    ),
    "parameter": lambda m, cls: gw.ZeroOptimizer(
        m.named_parameters(), cls, lr=0.1, shard="parameter"
    ),
    "bucket": lambda m, cls: gw.ZeroOptimizer(m.named_parameters(), cls, lr=0.1, shard="bucket"),
    "pattern": lambda m, cls: gw.ZeroOptimizer(
        m.named_parameters(),
        {"0*": ("SGD", {"lr": 0.1}, "element"), "*": (cls, {"lr": 0.1}, "parameter")},
    ),
    "torch's name": lambda m, cls: gw.ZeroRedundancyOptimizer(m.parameters(), cls, lr=0.1),
    "torch's, in a hook": lambda m, cls: gw.ZeroRedundancyOptimizer(
        m.parameters(), functools.partial(cls, lr=0.1), overlap_with_ddp=True
    ),
    "to be set later": lambda m, cls: gw.ZeroOptimizer(
        m.named_parameters(), cls, lr=0.0, shard="parameter"
    ),
}
REFUSED = {
    Clipped: "off by|pieces",
    Adapted: "off by|pieces",
    OneRate: "off by|pieces",
    ProdigyLike: "one step size for all parameters",
    TwoWeights: r"train\(\) and eval\(\)",
    CodedState: "Coded, which cannot be copied",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_what_ranks_cannot_step_apart_or_save_is_refused_by_name(cls: Any, form: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[cls]) as raised:
        FORMS[form](mlp(6, 5, 3), cls)
    assert cls.__name__ in str(raised.value)


@pytest.mark.parametrize("form", ["element", "parameter"])
@pytest.mark.parametrize(
    "name",
    ["SGD", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"],
)
def test_torchs_own_are_taken(name: str, form: str) -> None:
    FORMS[form](mlp(6, 5, 3), getattr(torch.optim, name))


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, Noisy])
def test_what_mixes_elements_or_draws_random_numbers_is_taken_by_parameter(cls: Any) -> None:
    FORMS["parameter"](mlp(6, 5, 3), cls)
    with pytest.raises(ValueError, match="pieces"):
        FORMS["element"](mlp(6, 5, 3), cls)


def test_the_programs_random_numbers_are_left_alone() -> None:
    model = mlp(6, 5, 3)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    gw.ZeroOptimizer(model.named_parameters(), Noisy, lr=0.3, shard="parameter")
    assert torch.equal(before, torch.get_rng_state())


def test_local_sgd_averages_no_moments_that_cannot_be_joined() -> None:
    model = mlp(6, 5, 3)
    with pytest.raises(
        ValueError, match="moments='average': CodedState remembers 'buffer' as a Coded"
    ):
        gw.local_sgd(model, CodedState(model.parameters()), LocalSGD(2), moments="average")


def test_a_copy_would_belong_to_other_parameters() -> None:
    model = mlp(6, 5, 3)
    optimizer = gw.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW)
    for copied in (copy.deepcopy, pickle.dumps, lambda x: copy.deepcopy((model, x))):
        with pytest.raises(TypeError, match=r"ZeroOptimizer cannot be copied.*load state_dict\(\)"):
            copied(optimizer)


def test_a_complex_parameter_is_named() -> None:
    parameters = {"phase": nn.Parameter(torch.zeros(3, dtype=torch.complex64))}
    for made in (gw.ZeroOptimizer, gw.ZeroRedundancyOptimizer):
        with pytest.raises(ValueError, match=r"'phase' is complex64.*view_as_real"):
            made(parameters.items(), torch.optim.AdamW)


CHANGES = {
    "another dtype": lambda model, optimizer: model.half(),
    "another shape": lambda model, optimizer: setattr(model[0].bias, "data", torch.zeros(2)),
    "by hand": lambda model, optimizer: optimizer.param_groups[0]["params"].append(
        nn.Parameter(torch.zeros(2))
    ),
}


@pytest.mark.parametrize("form", ["element", "averaging", "parameter", "torch's name"])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_are_others_are_refused_in_the_step(change: str, form: str) -> None:
    model = mlp(6, 5, 3)
    optimizer = FORMS[form](model, torch.optim.SGD)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    CHANGES[change](model, optimizer)
    with pytest.raises(RuntimeError, match=r"Optimizer was called.* Make a new Zero"):
        optimizer.step()


def test_groups_that_are_added_are_known() -> None:
    model, more = mlp(6, 5, 3), mlp(3, 2)
    optimizer = FORMS["torch's name"](model, torch.optim.SGD)
    optimizer.add_param_group({"params": list(more.parameters())})
    more(model(torch.ones(2, 6))).sum().backward()
    optimizer.step()


def test_a_group_waits_as_long_as_it_was_told() -> None:
    waits = lambda longest: barrier.patience_of(longest, timedelta(seconds=7200))  # noqa: E731
    assert waits(barrier.LONGEST) == waits(None) == timedelta(seconds=7200)
    assert barrier.patience_of(barrier.LONGEST, timedelta(seconds=60)) == timedelta(seconds=60)
    for default in barrier.BY_DEFAULT:
        assert barrier.patience_of(barrier.LONGEST, default) == barrier.LONGEST
        assert barrier.patience_of(None, default) == default
