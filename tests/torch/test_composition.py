"""docs/works-together.md: what trains with PowerSGD under DDP, `DataParallel`, accelerate,
Lightning or the Trainer trains as the simulator says; compiled too.

Each wrapper runs the loop that its users write, with all features at once that do not exclude each
other: a GradScaler, clipping, gradient accumulation and unused parameters. What comes out is
compared with a reference that knows none of them: replicas of the model in this process, their
gradients averaged by the simulator, and the features applied by hand.
"""

import copy
import os
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from gradwire import PowerSGD, Simulator
from gradwire.torch_backend import DataParallel, PowerSGDState, integrations, powerSGD_hook
from tests.compiler import require_compiler
from tests.torch.compare import relative, same_bits, weights
from tests.torch.doors import FORMS
from tests.torch.models import TAKEN, Branches, batches_on, loss_on, mlp, off_the_sine
from tests.torch.ranks import Cases
from tests.torch.tools import lightning_fit, lightning_module, new_accelerator, new_trainer, quiet
from tests.torch.training import distance, hooked, paralleled, sgd, train

RANKS = 2
ALGORITHM = PowerSGD(rank=2)
LR = 0.1
STEPS = 7
MICRO_BATCHES = 2
MAX_NORM = 0.1
UNUSED = {"find_unused_parameters": True}
#: The step and rank of an overflow, whereupon the scale is halved. It doubles after two good steps.
OVERFLOW = (3, 1)
INPUTS = batches_on(40)

cases = Cases(__file__, ranks=RANKS)
pytestmark = pytest.mark.slow


def new_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def parts(how):
    """The micro-batches of a step. With a static graph torch cannot accumulate: an assertion of its
    reducer fails."""
    return 1 if how == "static_graph" else MICRO_BATCHES


@torch.compiler.disable  # else a program would be compiled for each number of a micro-batch
def part_of(rank, part, how, micro_batches=None, overflow=True):
    """Of one micro-batch the inputs, which branches it takes, and a factor of its loss: each takes
    others, or none; or all, if the graph is static. One of them overflows."""
    micro_batches = micro_batches or parts(how)
    taken = TAKEN[0] if how == "static_graph" else TAKEN[part % len(TAKEN)]
    overflows = overflow and (part // micro_batches, rank) == OVERFLOW
    factor = torch.tensor(float("inf") if overflows else 1.0) / micro_batches
    return INPUTS(rank, part if how == "static_graph" else part % len(TAKEN)), taken[rank], factor


def loss_of(model, rank, x, taken, factor):
    return off_the_sine(model(x, taken), x, rank) * factor


def part_loss(model, rank, part, how, **of):
    return loss_of(model, rank, *part_of(rank, part, how, **of))


def scaled(model, rank, part, how):
    """For tools that divide the loss by the number of micro-batches themselves."""
    return part_loss(model, rank, part, how) * parts(how)


#: What is done besides: DDP is told that the graph is always the same, or the model is compiled, or
#: a function with forward and backward pass in it.
BESIDES = ("static_graph", "compiled model", "compiled step")


def cap(how):
    """Of DDP's buckets, in MiB. No less, or torch.compile refuses."""
    return 1 if "compiled" in how else 0.006


def of_ddp(how):
    return {"static_graph": True} if how == "static_graph" else UNUSED


def compiled(what, how="compiled model", when="compiled model"):
    # What the compiler makes of the graph does not matter here, only where it cuts it.
    return torch.compile(what, backend="aot_eager") if how == when else what


def plain_loop(world, model, wrapped, scaler, how):
    """The loop of a torch user."""
    optimizer, wrapped = sgd(model), compiled(wrapped, how)

    def forward_and_backward(*part):
        scaler.scale(loss_of(wrapped, world.rank, *part)).backward()

    forward_and_backward = compiled(forward_and_backward, how, "compiled step")
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(parts(how)):
            with wrapped.no_sync() if part + 1 < parts(how) else nullcontext():
                forward_and_backward(*part_of(world.rank, step * parts(how) + part, how))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()


def under_ddp(world, model, how):
    scaler = new_scaler()
    ddp, handle = hooked(
        model, ALGORITHM, world.group, cap=cap(how), grad_scaler=scaler, **of_ddp(how)
    )
    plain_loop(world, model, ddp, scaler, how)
    return handle


def under_data_parallel(world, model, how):
    wrapped, handle = paralleled(
        model, ALGORITHM, world.group, grad_scaler=(scaler := new_scaler()), **UNUSED
    )
    plain_loop(world, model, wrapped, scaler, how)
    return handle


def under_accelerate(world, model, how):
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = new_accelerator(
        gradient_accumulation_steps=parts(how),
        dynamo_backend="aot_eager" if how == "compiled model" else None,
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1, **of_ddp(how))],
    )
    assert accelerator.num_processes == RANKS
    accelerator.scaler = new_scaler()  # as mixed_precision="fp16" does on a GPU
    wrapped, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    handle = integrations.AcceleratorCompression(accelerator, wrapped, ALGORITHM).handle

    def forward_and_backward(*part):
        accelerator.backward(loss_of(wrapped, world.rank, *part) * parts(how))

    forward_and_backward = compiled(forward_and_backward, how, "compiled step")
    for part in range(STEPS * parts(how)):
        with accelerator.accumulate(wrapped):
            forward_and_backward(*part_of(world.rank, part, how))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return handle


def under_lightning(world, model, how):
    from pytorch_lightning.plugins.precision import MixedPrecision

    class Float32(MixedPrecision):
        """The loss scaling of "16-mixed", without casts, so that there is something to compare."""

        def autocast_context_manager(self):
            return torch.autocast("cpu", enabled=False)

    compression = integrations.LightningCompression(ALGORITHM)
    module = lightning_module(
        model, lambda module, part: scaled(module.net, world.rank, part, how), sgd
    )
    lightning_fit(
        compiled(module, how),
        RANKS,
        STEPS * parts(how),
        ddp={"bucket_cap_mb": cap(how), **of_ddp(how)},
        plugins=[Float32("16-mixed", "cpu", scaler=new_scaler())],
        callbacks=[compression],
        max_epochs=1,
        accumulate_grad_batches=parts(how),
        gradient_clip_val=MAX_NORM,
    )
    return compression.handle


def under_trainer(world, model, how):
    import transformers

    class Scaled(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):  # as fp16=True does on a GPU
            trainer.accelerator.native_amp, trainer.accelerator.state._mixed_precision = (
                True,
                "fp16",
            )

    trainer = new_trainer(
        model,
        world.folder / "trainer",
        Scaled(),
        sgd(model),
        [{"number": torch.tensor(i)} for i in range(STEPS * parts(how))],
        lambda model, inputs: scaled(model, world.rank, int(inputs["number"]), how),
        max_steps=STEPS,
        gradient_accumulation_steps=parts(how),
        max_grad_norm=MAX_NORM,
        ddp_bucket_cap_mb=1,
        torch_compile=how == "compiled model",
        torch_compile_backend="aot_eager" if how == "compiled model" else None,
        **{f"ddp_{name}": x for name, x in of_ddp(how).items()},
    )
    trainer.accelerator.scaler = new_scaler()
    compression = integrations.TrainerCompression(trainer, ALGORITHM)
    trainer.add_callback(compression)
    trainer.train()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    return compression.handle


#: And what comes before the names of parameters there: memory belongs to names, and the first
#: factor is drawn by them.
WRAPPERS = {
    "DDP": (under_ddp, ""),
    "DataParallel": (under_data_parallel, ""),
    "accelerate": (under_accelerate, ""),
    "Lightning": (under_lightning, "net."),
    "Trainer": (under_trainer, ""),
}


#: Who trains so. The Trainer has a training step of its own; each wrapper is compiled once at
#: least, which takes seconds: `DataParallel` in a step with all features, and its model by itself
#: in `test_a_compiled_model_trains_as_the_simulator_says`.
USED = {
    "": tuple(WRAPPERS),
    "static_graph": ("DDP", "accelerate"),
    "compiled model": ("DDP", "Lightning", "Trainer"),
    "compiled step": ("DDP", "DataParallel", "accelerate"),
}
assert set(USED) == {"", *BESIDES}
CELLS = {f"{w}, {how}" if how else w: (w, how) for how, wrappers in USED.items() for w in wrappers}


@cases.each(CELLS)
def test_all_features_at_once_train_as_the_simulator_says(world, cell):
    (wrapper, prefix), how, model = WRAPPERS[cell[0]], cell[1], Branches()
    torch._dynamo.reset()
    counters.clear()
    with quiet():
        stats = wrapper(world, model, how).stats()
    assert (counters["frames"]["ok"] > 0) is ("compiled" in how)
    assert world.agree(weights(model))
    # all have the same bits
    assert world.rank or relative(weights(model), reference(prefix, how)) < 1e-5
    assert stats.steps == STEPS  # one for each step, however many micro-batches it has
    assert stats.bytes_sent < stats.dense_bytes / 2
    assert stats.skipped_steps == 1


def reference(prefix="", how="", max_norm=MAX_NORM, **loss):
    """The weights after training, by the book."""
    model, micro_batches = Branches(), loss.get("micro_batches", parts(how))
    parameters = dict(model.named_parameters())
    simulator = Simulator(
        ALGORITHM, {prefix + n: tuple(p.shape) for n, p in parameters.items()}, RANKS
    )
    for step in range(STEPS):
        gradients, used = [], set()
        for rank in range(RANKS):
            twin = copy.deepcopy(model)
            for part in range(micro_batches):
                part_loss(twin, rank, step * micro_batches + part, how, **loss).backward()
            gradients.append({n: p.grad for n, p in twin.named_parameters()})
            used |= {n for n, g in gradients[-1].items() if g is not None}
        taken = {n: torch.zeros_like(p) for n, p in parameters.items() if n in used}
        local = [
            {prefix + n: (zero if g[n] is None else g[n]).numpy() for n, zero in taken.items()}
            for g in gradients
        ]
        averages = {n.removeprefix(prefix): g for n, g in simulator.step(local).items()}
        norm = float(np.sqrt(sum((g * g).sum() for g in averages.values())))
        if not np.isfinite(norm):
            assert step == OVERFLOW[0]
            continue
        assert norm > MAX_NORM
        with torch.no_grad():
            for n, g in averages.items():
                parameters[n] -= (
                    LR * min(1.0, max_norm / norm) * torch.from_numpy(g).to(parameters[n])
                )
    return {n: p.detach() for n, p in parameters.items()}


@pytest.mark.parametrize(
    "without", [{"max_norm": 1e9}, {"micro_batches": 1}, {"overflow": False}], ids=str
)
def test_the_references_differ(without):
    """So that a wrapper under which a feature has no effect would be noticed."""
    assert relative(reference(**without), reference()) > 1e-3


@cases.case
def test_torchs_names_are_what_lightning_takes(world):
    """`DDPStrategy(ddp_comm_state=…, ddp_comm_hook=…)`. Lightning registers the hook on CUDA only;
    this does on the CPU what it does there."""
    from pytorch_lightning.overrides.distributed import _register_ddp_comm_hook
    from pytorch_lightning.strategies import DDPStrategy

    class Strategy(DDPStrategy):
        def _register_ddp_hooks(self):
            _register_ddp_comm_hook(
                self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper
            )

    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=0)
    found = []
    for hook in ({}, {"ddp_comm_state": state, "ddp_comm_hook": powerSGD_hook}):
        loss = lambda module, step: loss_on(40)(module.net, world.rank, step)  # noqa: E731
        module = lightning_module(mlp(40, 36, 32, 28), loss, sgd)
        with quiet():
            lightning_fit(module, RANKS, STEPS, strategy=Strategy, ddp=hook, max_epochs=1)
        found.append(weights(module.net))
    plain, mine = found
    assert world.agree(mine)
    assert 1e-4 < relative(mine, plain) < 0.1  # compressed, and trained
    assert state.compression_stats()[0] > 2


# Compiled: the model, and a training step as a whole, `@torch.compile def step(x, y): …`, with
# every kind of hook, wrapper and optimizer.


#: In buckets of 1 MiB. No less, or torch.compile refuses.
COMPILED = {
    "DDP": lambda world, model: compiled(hooked(model, ALGORITHM, world.group, cap=1)[0]),
    "DataParallel": lambda world, model: compiled(
        paralleled(model, ALGORITHM, world.group, cap=1)[0]
    ),
    "DataParallel of a compiled model": lambda world, model: paralleled(
        compiled(model), ALGORITHM, world.group, cap=1
    )[0],
}


@cases.each(COMPILED)
def test_a_compiled_model_trains_as_the_simulator_says(world, wrap):
    torch._dynamo.reset()
    counters.clear()
    trace = train(wrap(world, mlp(40, 520, 520, 28)), loss_on(40), 4)
    assert counters["frames"]["ok"] > 0
    assert world.agree(trace.weights)
    assert distance(ALGORITHM, world.everyones(trace)) < 1e-5


#: Of each kind of compiled program one: where the graph breaks, and what of the optimizer is in it.
KINDS = (
    *("PowerSGD", "hook_with_zero_step_interleaved", "ZeroOptimizer", "ZeroOptimizer, averaging"),
    *("DataParallel, PowerSGD", "Averager", "local_sgd"),
)


def stepped(world, form, backend) -> dict[str, Any]:
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
    for i in range(5):
        data = torch.Generator().manual_seed(100 * i + world.rank)
        x = torch.randn(16, 24, generator=data)
        run(x, torch.sin(3 * x[:, :16]))
    assert (counters["frames"]["ok"] > 0) is (backend is not None)  # something was compiled
    return weights(model)


@cases.each(KINDS)
def test_a_compiled_step_has_the_bits_of_the_step_as_written(world, form):
    plain = stepped(world, form, None)
    assert same_bits(stepped(world, form, "aot_eager"), plain)
    assert not same_bits(plain, dict(mlp(24, 40, 16).named_parameters()))


@cases.case
def with_inductor(world):
    """It fuses, and so rounds otherwise."""
    from torch._inductor import config

    # to look for vector instructions takes longer than all kernels do
    config.cpp.vec_isa_ok = False
    # each rank would start processes that compile, which have to import torch
    config.compile_threads = 1
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(world.folder / "inductor")
    plain, compiled = (stepped(world, "PowerSGD", backend) for backend in (None, "inductor"))
    assert world.agree(compiled)
    assert relative(compiled, plain) < 1e-4


def test_inductor_trains_the_same(results):
    require_compiler("inductor")
    results("with_inductor")


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


@cases.case
def test_compiled_autograd_is_refused(world):
    """As DDP refuses it: a backward pass whose end nobody hears of would leave gradients as they
    are."""
    torch._dynamo.reset()
    model = DataParallel(mlp(24, 16), PowerSGD(2), process_group=world.group)
    compiled_autograd = torch._dynamo.config.patch(compiled_autograd=True)
    with compiled_autograd, pytest.raises(RuntimeError, match="compiled_autograd = False"):
        torch.compile(lambda x: model(x).square().mean().backward(), backend="aot_eager")(
            torch.randn(4, 24)
        )
