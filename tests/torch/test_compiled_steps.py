"""A training step that is compiled as a whole, `@torch.compile def step(x, y): …`, with every hook, wrapper and form of optimizer.

With the backend "aot_eager", which compiles everything and changes no arithmetic, the weights are the same bits as without compiling.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD, WireDtype, diloco
from tests.compiler import require_compiler
from tests.torch.compare import relative, same_bits, weights
from tests.torch.models import mlp
from tests.torch.ranks import Cases
from tests.torch.training import sgd

STEPS = 5
LR = 0.1

cases = Cases(__file__, ranks=2)

#: What is stepped: the module that is called, its optimizer, and whatever has to stay alive.
Form = tuple[nn.Module, torch.optim.Optimizer, Any]


def wrapped(world, model, **options):
    return DistributedDataParallel(model, process_group=world.group, **options)


def plain(world, model) -> Form:
    return wrapped(world, model), sgd(model), None


def algorithm(world, model, which) -> Form:
    ddp = wrapped(world, model)
    return ddp, sgd(model), gw.register_comm_hook(ddp, which)


def power_sgd(world, model, hook) -> Form:
    ddp, state = wrapped(world, model), gw.PowerSGDState(world.group, 2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, hook)
    return ddp, sgd(model), state


def stateless(world, model, hook) -> Form:
    ddp = wrapped(world, model)
    ddp.register_comm_hook(world.group, hook)
    return ddp, sgd(model), None


def post_local(world, model) -> Form:
    ddp = wrapped(world, model)
    alone = dist.new_subgroups(1)[0]
    ddp.register_comm_hook(gw.PostLocalSGDState(world.group, alone, 2), gw.post_localSGD_hook)
    averager = gw.PeriodicModelAverager(2, warmup_steps=2, process_group=world.group)
    return ddp, gw.PostLocalSGDOptimizer(sgd(model), averager), None


SGD = {"lr": LR, "momentum": 0.9}


def zero_hook(world, model, make) -> Form:
    ddp, zero, _ = zero_optimizer(world, model, average=False)
    ddp.register_comm_hook(world.group, make(gw.allreduce_hook, ddp, zero))
    return ddp, zero, None


def zero_optimizer(world, model, average) -> Form:
    """Behind DDP, or averaging gradients itself."""
    options = {"process_group": world.group, "average_gradients": average, **SGD}
    zero = gw.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, **options)
    return model if average else wrapped(world, model), zero, None


def data_parallel(world, model, which) -> Form:
    return gw.DataParallel(model, which, process_group=world.group), sgd(model), None


def local(world, model, which) -> Form:
    ddp, optimizer = wrapped(world, model), sgd(model)
    return ddp, optimizer, gw.local_sgd(ddp, optimizer, which)


def averager(world, model) -> Form:
    """Without DDP: called before each step."""
    average, optimizer = gw.Averager(PowerSGD(2), dict(model.named_parameters()), world.group), sgd(model)

    def before(*_: Any) -> None:
        average({name: p.grad for name, p in model.named_parameters()})

    optimizer.register_step_pre_hook(before)
    return model, optimizer, average


FORMS: dict[str, Callable[..., Form]] = {
    "DDP": plain,
    "AllReduce": partial(algorithm, which=AllReduce()),
    "PowerSGD": partial(algorithm, which=PowerSGD(2)),
    "PowerSGD, half-step, late": partial(algorithm, which=PowerSGD(2, half_step=True, start_step=1)),
    "WireDtype": partial(algorithm, which=WireDtype(PowerSGD(2), "bfloat16")),
    "powerSGD_hook": partial(power_sgd, hook=gw.powerSGD_hook),
    "batched_powerSGD_hook": partial(power_sgd, hook=gw.batched_powerSGD_hook),
    "bf16_compress_wrapper": partial(power_sgd, hook=gw.bf16_compress_wrapper(gw.powerSGD_hook)),
    "allreduce_hook": partial(stateless, hook=gw.allreduce_hook),
    "noop_hook": partial(stateless, hook=gw.noop_hook),
    "bf16_compress_hook": partial(stateless, hook=gw.bf16_compress_hook),
    "fp16_compress_hook": partial(stateless, hook=gw.fp16_compress_hook),
    "fp16_compress_wrapper": partial(stateless, hook=gw.fp16_compress_wrapper(gw.allreduce_hook)),
    "fp16_compress_wrapper of torch's": partial(stateless, hook=gw.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "post_localSGD_hook": post_local,
    "hook_with_zero_step": partial(zero_hook, make=gw.hook_with_zero_step),
    "hook_with_zero_step_interleaved": partial(zero_hook, make=gw.hook_with_zero_step_interleaved),
    "ZeroOptimizer": partial(zero_optimizer, average=False),
    "ZeroOptimizer, averaging": partial(zero_optimizer, average=True),
    "DataParallel": partial(data_parallel, which=AllReduce()),
    "DataParallel, PowerSGD": partial(data_parallel, which=PowerSGD(2)),
    "Averager": averager,
    "local_sgd": partial(local, which=LocalSGD(2, start_step=1)),
    "diloco": partial(local, which=diloco(2)),
}


#: The others differ from these in what is sent, not in what is compiled.
USUAL = ("PowerSGD", "hook_with_zero_step_interleaved")
SLOW = FORMS.keys() - set(USUAL)
#: Of each kind of compiled program one: where the graph breaks, and what of the optimizer is in it. Hooks are never compiled.
KINDS = (
    "DDP",
    "PowerSGD",
    "hook_with_zero_step_interleaved",
    "ZeroOptimizer",
    "ZeroOptimizer, averaging",
    "DataParallel, PowerSGD",
    "Averager",
    "local_sgd",
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


@cases.each(FORMS.keys(), slow=SLOW)
def test_a_compiled_step_has_the_bits_of_the_step_as_written(world, form):
    plain = trained(world, form, None)
    assert same_bits(trained(world, form, "aot_eager"), plain)
    assert not same_bits(plain, dict(mlp(24, 40, 16).named_parameters()))


@cases.each(KINDS, slow=KINDS)
def with_inductor(world, form):
    """It fuses, and so rounds otherwise."""
    from torch._inductor import config

    config.cpp.vec_isa_ok = False  # to look for vector instructions takes longer than all kernels do
    config.compile_threads = 1  # each rank would start processes that compile, which have to import torch
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(world.folder / "inductor")  # what a form has compiled serves the next
    plain, compiled = trained(world, form, None), trained(world, form, "inductor")
    assert world.agree(compiled) is world.agree(plain)  # some average nothing, or not in every step
    assert relative(compiled, plain) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("form", KINDS)
def test_inductor_trains_the_same(results, form):
    require_compiler("inductor")
    results(f"with_inductor[{form}]")


# The warning is the compiler's, looking at a loss.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd_is_refused(alone):
    """As DDP refuses it: a backward pass whose end nobody hears of would leave gradients as they are."""
    torch._dynamo.reset()
    model = gw.DataParallel(mlp(24, 16), PowerSGD(2))

    def step(x):
        model(x).square().mean().backward()

    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(RuntimeError, match="compiled_autograd = False"),
    ):
        torch.compile(step, backend="aot_eager")(torch.randn(4, 24))
