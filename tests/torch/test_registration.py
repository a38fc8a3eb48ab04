"""What is said when a model or an algorithm does not fit, before anything is changed; and what is noticed later."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD, WireDtype, Zero, diloco, shard_by_parameter
from gradwire.core.plan.dry_run import summary
from gradwire.core.protocol import mean, mean_each, optimizer_step, together
from gradwire.torch_backend.drive import specs_of
from gradwire.torch_backend.newcomers import EVERY
from tests.launch import ROOT
from tests.torch.compare import said, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.training import fit, hooked, sgd, train

pytestmark = pytest.mark.usefixtures("alone")

WIDTHS = (40, 36, 36, 28)
LOSS = loss_on(40)

DOORS = {
    "register_comm_hook": lambda model, algorithm: gw.register_comm_hook(DistributedDataParallel(model), algorithm),
    "DataParallel": gw.DataParallel,
    "Averager": lambda model, algorithm: gw.Averager(
        algorithm, {n: p for n, p in model.named_parameters() if p.requires_grad}
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("given", "is_a"),
    [(PowerSGD, "PowerSGD is a class"), ("powersgd", "'powersgd' is a str"), (None, "None is a NoneType")],
    ids=["a class", "a name", "None"],
)
def test_what_is_no_algorithm_is_said_alike_at_every_door(door, given, is_a):
    words = f"TypeError: algorithm={is_a} and no algorithm: give an instance, such as PowerSGD(rank=4)"
    assert said(DOORS[door], mlp(*WIDTHS), given).startswith(words)


def _zero(model):
    return Zero(shard_by_parameter(specs_of(dict(model.named_parameters())), 1))


ALL_DOORS = DOORS | {"local_sgd": lambda model, algorithm: gw.local_sgd(model, None, diloco(4, compressor=algorithm))}


@pytest.mark.parametrize("door", ALL_DOORS)
@pytest.mark.parametrize(
    "wrap", [lambda zero: zero, lambda zero: WireDtype(zero, "bfloat16")], ids=["Zero", "WireDtype"]
)
def test_what_only_an_optimizer_can_answer_is_refused_at_registration(door, wrap):
    model = mlp(*WIDTHS)
    words = "asks for OptimizerStep, which nobody answers while gradients are averaged; gradwire.torch_backend.ZeroOptimizer"
    assert words in said(ALL_DOORS[door], model, wrap(_zero(model)))


class OnTensorsAlone(AllReduce):
    """Cannot be tried without data, for what it does with the tensors."""

    async def step(self, ops, gradients, state, step):
        signs = {name: g.sign() for name, g in gradients.items()}
        await together([optimizer_step({}), mean(next(iter(signs.values())))])
        return signs, state


def test_what_cannot_be_tried_is_refused_by_name_when_it_asks():
    averager = gw.Averager(OnTensorsAlone(), {"w": torch.ones(3)})
    with pytest.raises(TypeError, match="the torch driver, which has no optimizer, cannot answer OptimizerStep"):
        averager({"w": torch.ones(3)})


LAZY = ALL_DOORS | {
    "ZeroOptimizer": lambda model, algorithm: gw.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW),
    "ZeroRedundancyOptimizer": lambda model, algorithm: gw.ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.AdamW
    ),
}


@pytest.mark.parametrize("door", LAZY)
def test_lazy_modules_are_refused_before_their_first_forward_pass(door):
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    words = "ValueError: parameter '0.weight' of a lazy module has no shape before the module's first forward pass"
    if door == "register_comm_hook":  # by DDP itself
        words = "Run a dummy forward pass to correctly initialize the modules"
    assert words in said(LAZY[door], model, PowerSGD(2))
    model(torch.ones(3, 5))
    LAZY[door](model, AllReduce())


class Counts(AllReduce):
    """How often its step is begun."""

    begun = 0

    async def step(self, ops, gradients, state, step):
        Counts.begun += 1
        return await super().step(ops, gradients, state, step)


@pytest.mark.parametrize("door", DOORS)
def test_an_algorithm_is_tried_out_once_also_where_that_is_logged(door, caplog):
    caplog.set_level("INFO", "gradwire")
    Counts.begun = 0
    DOORS[door](mlp(*WIDTHS), Counts())
    assert Counts.begun == 1
    assert any("6 tensors" in line and "1 message" in line for line in caplog.messages)


def test_only_reconfigure_changes_the_algorithm():
    _, handle = hooked(mlp(*WIDTHS), AllReduce())
    with pytest.raises(AttributeError, match="algorithm"):
        handle.algorithm = PowerSGD(1)
    handle.reconfigure(PowerSGD(1))
    assert handle.algorithm == PowerSGD(1)


class InHalves(AllReduce):
    """Averages in groups, which a registration has to make."""

    async def step(self, ops, gradients, state, step):
        return await mean_each(gradients, groups=((0,),)), state


def test_groups_of_a_compressor_are_made_for_local_sgd():
    model = mlp(*WIDTHS)
    handle = gw.local_sgd(model, None, diloco(1, compressor=InHalves()))
    handle.step()
    assert handle.steps == 1


@pytest.mark.parametrize("door", ["register_comm_hook", "DataParallel"])
def test_a_pattern_that_fits_frozen_parameters_only_says_so(door):
    model = mlp(*WIDTHS, frozen=[0])
    words = "rank pattern '0.*' fits frozen parameters only, '0.weight' and 1 more, which have no gradient to average; leave it out"
    assert words in said(DOORS[door], model, PowerSGD({"0.*": 1, "*": 2}))
    words = "'conv.*' matches no parameter; the parameters are '2.weight', "
    assert words in said(DOORS[door], model, PowerSGD({"conv.*": 1, "*": 2}))


def test_an_unmatched_pattern_of_a_large_model_is_a_short_message():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(90)])
    with pytest.raises(ValueError, match=r"and 175 more$") as refused:
        DOORS["DataParallel"](model, PowerSGD({"*conv*": 1, "*": 2}))
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("door", ["register_comm_hook", "DataParallel"])
def test_optimizers_in_the_backward_pass_are_refused_before_anything_is_changed(door):
    with warnings.catch_warnings():  # of torch, about its own
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = mlp(*WIDTHS)
    _apply_optimizer_in_backward(torch.optim.SGD, model[2].parameters(), {"lr": 0.1})
    said = r"parameter '2\.weight' is stepped by an optimizer in the backward pass.*; step after the backward pass"
    with pytest.raises(ValueError, match=said):
        DOORS[door](model, PowerSGD(2))
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=said):
        gw.register_comm_hook(ddp, PowerSGD(2))
    assert not ddp._comm_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda: hooked(mlp(*WIDTHS, frozen=[0]), PowerSGD(2))[0], "DistributedDataParallel"),
        (lambda: gw.DataParallel(mlp(*WIDTHS, frozen=[0]), PowerSGD(2)), "DataParallel"),
    ],
    ids=["DDP", "DataParallel"],
)
def test_parameters_that_are_thawed_later_are_spoken_of_once(wrap, name):
    wrapped = wrap()
    train(wrapped, LOSS, 3, local=False)
    wrapped.module[0].requires_grad_(True)
    train(wrapped, LOSS, range(3, EVERY), local=False)
    said = f"nobody averages the gradients of '0.weight', '0.bias'.*when {name} wrapped the model"
    with pytest.warns(UserWarning, match=said) as caught:
        train(wrapped, LOSS, 1, local=False)
    assert len(caught) == 1
    train(wrapped, LOSS, EVERY + 1, local=False)  # where a warning would be an error


def test_a_registration_that_the_reducer_refuses_leaves_nothing_behind():
    ddp = DistributedDataParallel(mlp(*WIDTHS), find_unused_parameters=True)
    ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can only be called once"):
            gw.register_comm_hook(ddp, PowerSGD(2))
        assert not ddp._comm_hooks
        assert not any(p._post_accumulate_grad_hooks for p in ddp.parameters())


def test_parameters_that_are_thawed_after_zero_was_made_are_refused():
    model = mlp(*WIDTHS, frozen=[0])
    zero = gw.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    fit(model, zero, 0, [0], LOSS)
    before = weights(model)
    model[0].requires_grad_(True)
    words = r"parameter '0\.weight' has a gradient, and required none when this ZeroOptimizer was made"
    with pytest.raises(ValueError, match=words):
        fit(model, zero, 0, [1], LOSS)
    assert same_bits(before, weights(model))


@pytest.mark.parametrize("shard", ["element", "parameter", "bucket"])
@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.LBFGS, r"^LBFGS evaluates the loss by itself.*cannot be sharded\. Use LBFGS itself$"),
        (torch.optim.SparseAdam, r"^SparseAdam takes sparse gradients.*Use Adam, with sparse=False in the embedding$"),
    ],
    ids=["LBFGS", "SparseAdam"],
)
def test_optimizers_that_no_cut_serves(shard, optimizer, said):
    with pytest.raises(ValueError, match=said):
        gw.ZeroOptimizer(mlp(*WIDTHS).named_parameters(), optimizer, shard=shard)


def test_each_evaluation_of_lbfgs_is_a_step_of_compression():
    """As docs/composition.md says."""
    ddp, handle = hooked(mlp(*WIDTHS), PowerSGD(2))
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=5)
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = LOSS(ddp, 0, 0)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert handle.stats().steps == evaluations > 1


class Wrapper(torch.optim.Optimizer):
    """A tool's optimizer that has hooks no more than accelerate's."""

    def __init__(self, optimizer):
        self.inner = optimizer

    @property
    def param_groups(self):
        return self.inner.param_groups


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            lambda model: Wrapper(torch.optim.SGD(model.parameters())),
            "TypeError: optimizer is a Wrapper, which takes no step hooks",
        ),
        (lambda model: model.parameters(), "TypeError: optimizer is a generator; give one of torch.optim, or None"),
        (lambda model: torch.optim.SGD(mlp(3, 3).parameters()), "that are not in module"),
    ],
    ids=["a wrapper", "no optimizer", "of another model"],
)
def test_a_failed_registration_of_local_sgd_leaves_nothing_behind(optimizer, words):
    model = mlp(*WIDTHS)
    ddp = DistributedDataParallel(model)
    assert words in said(gw.local_sgd, ddp, optimizer(model), LocalSGD(4))
    assert not ddp._comm_hooks
    right = sgd(model)
    handle = gw.local_sgd(ddp, right, LocalSGD(4))
    fit(ddp, right, 0, [0], LOSS)
    assert handle.steps == 1


def test_a_post_local_optimizer_is_wrapped_by_accelerate_and_not_the_other_way_round():
    from accelerate.optimizer import AcceleratedOptimizer

    accelerated_like = type("AcceleratedOptimizer", (Wrapper,), {})  # without accelerate's global state
    assert AcceleratedOptimizer.__name__ == accelerated_like.__name__
    sgd = torch.optim.SGD(mlp(3, 3).parameters())
    words = r"optim is a AcceleratedOptimizer; give the optimizer itself.*accelerator\.prepare"
    with pytest.raises(TypeError, match=words):
        gw.PostLocalSGDOptimizer(accelerated_like(sgd), gw.PeriodicModelAverager(2))
    assert gw.PostLocalSGDOptimizer(sgd, gw.PeriodicModelAverager(2)).optim is sgd


def test_the_line_in_the_page_is_that_of_gpt_2():
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    line = str(summary(PowerSGD(rank=4), specs_of(dict(model.named_parameters()))))
    page = (ROOT / "docs" / "handles.md").read_text()
    assert f"INFO:gradwire:{line}\n" in page
    assert f"CommHook({line}; 1000 steps, " in page


def test_all_reduce_says_nothing_of_views():
    """A log line of plain averaging, and no warning."""
    _, handle = hooked(mlp(*WIDTHS), AllReduce())  # where a warning would be an error
    words = "CommHook(AllReduce(): 6 tensors, 15.4 kB → 15.4 kB (1.0×), 1 message; 0 steps, 0 bytes saved)"
    assert repr(handle) == words
