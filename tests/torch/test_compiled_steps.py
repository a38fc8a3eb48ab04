"""A training step that is compiled as a whole, `@torch.compile def step(x, y): …`, with every hook, wrapper and form of optimizer.

With the backend "aot_eager", which compiles everything and changes no arithmetic, the weights are the same bits as without compiling.
"""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import gradwire.torch_backend as gw
from gradwire import PowerSGD
from tests.torch.compare import same_bits, weights
from tests.torch.doors import FORMS
from tests.torch.models import mlp
from tests.torch.ranks import Cases
from tests.torch.training import hooked

pytestmark = pytest.mark.slow

STEPS = 5

cases = Cases(__file__, ranks=2)

#: Of each kind of compiled program one: where the graph breaks, and what of the optimizer is in it.
KINDS = (
    *("PowerSGD", "hook_with_zero_step_interleaved", "ZeroOptimizer", "ZeroOptimizer, averaging"),
    *("DataParallel, PowerSGD", "Averager", "local_sgd"),
)


def trained(world, form, backend) -> dict[str, Any]:
    """Weights after some steps; compiled, unless `backend` is None."""
    torch._dynamo.reset()
    counters.clear()
    model = mlp(24, 40, 16)
    module, optimizer, _kept = FORMS[form](world, model)

    def step(x, y):
        optimizer.zero_grad()
        loss = (module(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = step if backend is None else torch.compile(step, backend=backend)
    for i in range(STEPS):
        data = torch.Generator().manual_seed(100 * i + world.rank)
        x = torch.randn(16, 24, generator=data)
        run(x, torch.sin(3 * x[:, :16]))
    assert (counters["frames"]["ok"] > 0) is (backend is not None)  # something was compiled
    return weights(model)


@cases.each(KINDS)
def test_a_compiled_step_has_the_bits_of_the_step_as_written(world, form):
    plain = trained(world, form, None)
    assert same_bits(trained(world, form, "aot_eager"), plain)
    assert not same_bits(plain, dict(mlp(24, 40, 16).named_parameters()))


@cases.case
def test_compiled_autograd_is_refused(world):
    """As DDP refuses it: a backward pass whose end nobody hears of would leave gradients as they are."""
    torch._dynamo.reset()
    model = gw.DataParallel(mlp(24, 16), PowerSGD(2), process_group=world.group)
    compiled_autograd = torch._dynamo.config.patch(compiled_autograd=True)
    with compiled_autograd, pytest.raises(RuntimeError, match="compiled_autograd = False"):
        torch.compile(lambda x: model(x).square().mean().backward(), backend="aot_eager")(torch.randn(4, 24))


@cases.case
def test_a_pass_that_is_discarded_in_a_compiled_step_leaves_no_trace(world):
    torch._dynamo.reset()
    ddp, handle = hooked(mlp(24, 40, 16), PowerSGD(2), world.group, cap=25)

    @torch.compile(backend="aot_eager")
    def step(x):
        loss = ddp(x).square().mean()
        with handle.discarded():
            loss.backward()
        return loss

    x = torch.randn(8, 24)
    ddp(x).square().mean().backward()
    before = handle.rank_state_dict()
    step(x)
    assert same_bits(before, handle.rank_state_dict())
    assert before["step"] == 1
