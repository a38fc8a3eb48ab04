"""What a message of the torch backend tells its reader to write, written: a message without a row
fails, and so does advice that does not work.

What takes several ranks is in `advised.py`, and done in the launch of `test_refusals_on_ranks.py`.
"""

import inspect
import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, LocalSGD, OuterSGD, PowerSGD, Weighted, WireDtype, diloco
from gradwire.torch_backend.advise.compare.replicas import replicas_of
from gradwire.torch_backend.advise.compare.training import Training
from tests.told import advice, require_done
from tests.torch.advised import ON_RANKS
from tests.torch.compare import same_bits, weights
from tests.torch.models import Branches
from tests.torch.refused import ALGORITHM, LOSS, embedding, small
from tests.torch.training import fit, hooked, sgd

SKIP = "skip_all_reduce_unused_params"


def trained(module, optimizer, handle=None, steps=2):
    """Some steps, in which nothing is warned of, and which change the weights."""
    before = weights(module)
    with warnings.catch_warnings(action="error", category=UserWarning):
        for step in range(steps):
            fit(module, optimizer, 0, [step], LOSS)
            if handle is not None:
                handle.step()
    assert not same_bits(weights(module), before)


def in_pieces():
    training = Training(
        nn.Linear(4, 4),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        lambda replica, replicas: itertools.repeat(torch.full((2, 4), 1.0 + replica)),
        lambda net, x: net(x).square().mean(),
        accumulate=2,
    )
    replicas_of(training, AllReduce(), 2, 0).step()


def zero_of(model, optimizer=torch.optim.AdamW, **options):
    return gw.ZeroOptimizer(model.named_parameters(), optimizer, lr=0.1, **options)


def zero_steps_after_backward():
    skips = SKIP in inspect.signature(DistributedDataParallel).parameters
    for options in ({}, *([{SKIP: True}] if skips else [])):
        ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, **options)
        zero, before = zero_of(ddp.module), weights(ddp.module)
        LOSS(lambda x, ddp=ddp: ddp(x, ("left",)), 0, 0).backward()
        zero.step()
        assert not same_bits(weights(ddp.module), before)


def the_model_or_a_ddp():
    for module in (DistributedDataParallel(small()), small()):
        optimizer = sgd(module)
        gw.local_sgd(module, optimizer, LocalSGD(2))
        trained(module, optimizer)


def another_schedule():
    model = small()
    optimizer = sgd(model)
    handle = gw.local_sgd(model, optimizer, LocalSGD(2))
    for local in (LocalSGD(3), diloco(4)):
        handle.reconfigure(local)
        trained(model, optimizer)


def outer_steps():
    for outer in (partial(torch.optim.AdamW, lr=0.1), OuterSGD(0.5, 0.9)):
        model = small()
        optimizer = sgd(model)
        gw.local_sgd(model, optimizer, diloco(2, outer=outer))
        trained(model, optimizer)


class Wrapper(torch.optim.Optimizer):
    """A tool's optimizer, which takes no hooks."""

    def __init__(self, optimizer):
        self.inner = optimizer

    def zero_grad(self):
        self.inner.zero_grad()

    def step(self):
        self.inner.step()


def the_optimizer_that_steps():
    """That inside; or none, and a call after each step."""
    for known in (True, False):
        model = small()
        wrapper = Wrapper(sgd(model))
        handle = gw.local_sgd(model, wrapper.inner if known else None, LocalSGD(2))
        trained(model, wrapper, None if known else handle, steps=8)
        assert handle.steps == 8


def codes_in_zero():
    ddp = DistributedDataParallel(small())
    zero = zero_of(ddp.module, wire_dtype="int8")
    ddp.register_comm_hook(None, gw.hook_with_zero_step(gw.allreduce_hook, ddp, zero))
    trained(ddp, zero)
    ddp, _ = hooked(small(), WireDtype(AllReduce(), "int8"))
    trained(ddp, zero_of(ddp.module))


def codes_where_something_is_averaged():
    model = small()
    trained(model, zero_of(model, wire_dtype="int8", average_gradients=True))
    codes_in_zero()


def with_a_scaler():
    for in_hook in (True, False):
        ddp, scaler = DistributedDataParallel(small()), torch.amp.GradScaler("cpu", init_scale=8.0)
        zero, before = zero_of(ddp.module, average_gradients=False), weights(ddp.module)
        if in_hook:
            hook = gw.hook_with_zero_step(gw.allreduce_hook, ddp, zero, grad_scaler=scaler)
            ddp.register_comm_hook(None, hook)
        for step in range(2):
            zero.zero_grad()
            scaler.scale(LOSS(ddp, 0, step)).backward()
            scaler.step(zero)
            scaler.update()
        assert not same_bits(weights(ddp.module), before)


def patterns():
    model, adam = small(), (torch.optim.AdamW, {}, "element")
    mixture = {"0.*": adam, "*.weight": ("Muon", {}, "parameter"), "*": adam}
    trained(model, gw.ZeroOptimizer(model.named_parameters(), mixture))


def parameters_left_whole():
    for shard in ("parameter", "bucket"):
        model = small()
        trained(model, zero_of(model, torch.optim.Adafactor, shard=shard))


def adam_of_an_embedding():
    model = embedding(sparse=False)
    zero = zero_of(model, torch.optim.Adam)
    model(torch.arange(4)).sum().backward()
    zero.step()


def all_in_the_first_step():
    if SKIP not in inspect.signature(DistributedDataParallel).parameters:
        return
    for asked in (False, True):
        options = {"find_unused_parameters": True, SKIP: True}
        ddp, _ = hooked(Branches(), PowerSGD(2) if asked else None, **options)
        if not asked:
            ddp.register_comm_hook(gw.PowerSGDState(None, 2, 0), gw.powerSGD_hook)
        for taken in (("left",), ("right",)) if asked else (("left", "right"), ("left",)):
            ddp.zero_grad()
            LOSS(lambda x, ddp=ddp, taken=taken: ddp(x, taken), 0, 0).backward()
        assert all(p.grad is not None for p in ddp.module.trunk.parameters())


def weighted():
    model = small()
    gw.local_sgd(model, sgd(model), LocalSGD(2, weighted=True)).weight = 3.0


def weighted_averages():
    hooked(small(), Weighted(ALGORITHM))[1].weight = 3.0


def may_be_unused():
    average = gw.Averager(AllReduce(), {"w": torch.zeros(3), "b": torch.zeros(2)}, unused=True)
    assert average({"w": torch.ones(3), "b": None})["w"].tolist() == [1.0] * 3


ALONE = {
    "Give {} the optimizer whose step() is called (of a wrapper, such as SAM, the one inside)": the_optimizer_that_steps,
    "Use Adam, with sparse=False in the embedding": adam_of_an_embedding,
    "call handle.step() after each step": the_optimizer_that_steps,
    "call zero.step() after the backward pass instead": zero_steps_after_backward,
    "give LocalSGD(...) or diloco(...)": another_schedule,
    "give Weighted({}) on all ranks": weighted_averages,
    "give a DistributedDataParallel(model), or the model itself": the_model_or_a_ddp,
    "give allreduce_hook, or leave it out and register WireDtype(algorithm, {})": codes_in_zero,
    "give it weighted=True": weighted,
    "give model.named_parameters()": patterns,
    "give the optimizer that it wraps, or None and call handle.step() after each step": the_optimizer_that_steps,
    "give the pieces, Training(..., accumulate=2)": in_pieces,
    "give what makes a torch.optim.Optimizer of parameters, or OuterSGD(…)": outer_steps,
    "pass average_gradients=True without DDP, or with DDP make hook_with_zero_step(allreduce_hook, ddp, optimizer)": codes_where_something_is_averaged,
    "pass may leave parameters out, say so: Averager(..., unused=True)": may_be_unused,
    "pass the scaler to hook_with_zero_step(..., grad_scaler=scaler), or let DDP average the gradients (average_gradients=False)": with_a_scaler,
    "use all of them in this step, or gradwire.torch_backend.register_comm_hook(ddp, PowerSGD(rank)), which asks the model": all_in_the_first_step,
    "use shard='parameter' or shard='bucket', which leave parameters whole, if it treats each parameter by itself": parameters_left_whole,
}
THAWED = "tests/torch/test_local_sgd.py::test_layers_that_are_thawed_need_another_handle"
ELSEWHERE = {
    "Call handle.unregister(), and the same again": THAWED,
    "Call handle.unregister(), and {}": THAWED,
    "Use warm_start=True, or do not capture the backward pass": "tests/torch/test_capture.py::test_a_replay_is_a_step",
    "call it before, and step() without it": "tests/torch/test_elastic.py::"
    "test_a_closure_is_refused_where_gradients_are_averaged_before_the_step",
    "call register_comm_hook(ddp, algorithm) again": "tests/torch/test_compat.py::"
    "test_a_ddp_that_is_pickled_or_copied_leaves_its_hook_behind",
    "give Weighted(…) or weighted=True to all of them": "tests/torch/test_elastic.py::test_replicas_weigh_what_they_say",
    "give the optimizer itself, and let the tool wrap what comes of it: accelerator.prepare(PostLocalSGDOptimizer(optimizer, averager))": "tests/torch/test_local_sgd_composition.py::"
    "test_torchs_names_for_local_sgd_under_accelerate",
    "set bf16=True, or neither": "tests/torch/test_compare.py::test_a_trainer_is_compared_as_it_trains",
    "write its step as make(replica, replicas), see gradwire.compare": "tests/torch/test_compare.py::test_a_step_of_the_users_own_has_the_bits_of_processes",
}
ROWS = ALONE | ELSEWHERE


def test_every_advice_has_a_row():
    assert advice("torch_backend") == set(ROWS | ON_RANKS)


@pytest.mark.parametrize("told", ROWS)
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::gradwire.CompressionWarning")
def test_advice_works(told):
    require_done(ROWS[told])
