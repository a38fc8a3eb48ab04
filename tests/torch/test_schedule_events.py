"""Every schedule up to a period of twelve steps, whatever of it comes together in one step, counted
in outer steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradwire import LocalSimulator
from gradwire.torch_backend import local_sgd
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.local_sgd.elastic.quorum import Present
from gradwire.torch_backend.local_sgd.elastic.schedules import ElasticLocalSGD
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.setup.assumptions import Assumptions
from tests.parity.outer_steps import by_hand, drift, schedules
from tests.torch.models import Layers

PERIODS = range(1, 13)
#: By drivers, which take longer; a longer period has many more schedules, of the same kinds.
DRIVEN = [pytest.param(p, marks=() if p in (3, 5, 7) else pytest.mark.slow) for p in range(1, 10)]


def model_of(fragments: int) -> nn.Module:
    return Layers(
        None,
        **{
            f"layer{f:02}": nn.Parameter(torch.ones(1, dtype=torch.float64))
            for f in range(fragments)
        },
    )


class Quorum:
    """Of one replica, which says yes."""

    def __init__(self, group: Any) -> None:
        self.device, self.groups = torch.device("cpu"), ProcessGroups(group)
        self.collectives = Collectives(self.groups, TorchOps(self.device))
        self.manager: Any = SimpleNamespace(
            register_state_dict_fn=lambda *_: None, errored=lambda: None
        )
        self.sent = self.collectives.sent

    def meet(self, steps: int, *, joining: bool) -> Present:
        return Present(steps, counts=not joining, trained=not joining)

    def attempt(self, send: Any) -> Any:
        return send()

    def vote(self) -> bool:
        return True


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, handle: Any, steps: int) -> Any:
    """Parameters after so many steps, and the outer steps that were taken."""
    taken = []
    for step in range(steps):
        before = {n: x.clone() for n, x in handle.outer_parameters().items()}
        for f, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, drift(step, f))
        optimizer.step()
        after = handle.outer_parameters()
        taken += [(step, f) for f, n in enumerate(after) if not torch.equal(after[n], before[n])]
    return [float(p.detach()) for p in model.parameters()], taken


@pytest.mark.parametrize("period", PERIODS)
def test_elastic_takes_each_outer_step_once(alone: Any, period: int) -> None:
    for local in schedules(period, votes=True):
        model = model_of(local.fragments)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        own = dict(model.named_parameters())
        assumed = Assumptions("elastic", own, {}, model, optimizer, "", digest=lambda: "")
        quorum: Any = Quorum(alone)
        handle = ElasticLocalSGD(local, own, {}, optimizer, quorum, dict, assumed)
        parameters, taken = trained(model, optimizer, handle, 2 * period + local.overlap + 1)
        expected, events = by_hand(local, 2 * period + local.overlap + 1)
        assert taken == events, local
        np.testing.assert_allclose(parameters, expected, rtol=1e-9, err_msg=repr(local))


@pytest.mark.parametrize("period", DRIVEN)
def test_local_sgd_takes_each_outer_step_once(alone: Any, period: int) -> None:
    for local in schedules(period):
        model = model_of(local.fragments)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        parameters, taken = trained(
            model, optimizer, local_sgd(model, optimizer, local), 2 * period + local.overlap + 1
        )
        expected, events = by_hand(local, 2 * period + local.overlap + 1)
        assert taken == events, local
        np.testing.assert_allclose(parameters, expected, rtol=1e-9, err_msg=repr(local))


@pytest.mark.parametrize("period", DRIVEN)
def test_the_simulator_takes_each_outer_step_once(period: int) -> None:
    for local in schedules(period):
        names, steps = (
            [f"layer{f:02}" for f in range(local.fragments)],
            2 * period + local.overlap + 1,
        )
        simulator = LocalSimulator(local, {n: [1.0] for n in names}, 1)
        for step in range(steps):
            simulator.step(
                [{n: [drift(step, f)] for f, n in enumerate(names)}],
                lambda _, p, g: {n: p[n] - g[n] for n in p},
            )
        mine = [float(simulator.parameters[0][n][0]) for n in names]
        np.testing.assert_allclose(mine, by_hand(local, steps)[0], rtol=1e-9, err_msg=repr(local))
