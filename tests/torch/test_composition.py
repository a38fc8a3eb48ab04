"""docs/integrations.md, cell by cell: what trains with PowerSGD under DDP, `DataParallel`, accelerate, Lightning or the Trainer trains as the simulator says.

Each wrapper runs the loop that its users write. What comes out is compared with a reference that knows none of them: replicas of the model in
this process, their gradients averaged by the simulator, and the feature applied by hand.
"""

import copy
import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from gradwire import PowerSGD, Simulator
from gradwire.torch_backend import DataParallel, PowerSGDState, integrations, powerSGD_hook
from tests.torch.compare import relative, same_bits, weights
from tests.torch.doors import FORMS
from tests.torch.models import TAKEN, Branches, branching_loss, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.tools import lightning_fit, lightning_module, new_accelerator, new_trainer, quiet
from tests.torch.training import hooked, sgd

RANKS = 2
ALGORITHM = PowerSGD(rank=2)
LR = 0.1
STEPS = 7
#: The step and rank of an overflow, in the cells with a GradScaler, whose scale doubles after two good steps.
OVERFLOW = (3, 1)

cases = Cases(__file__, ranks=RANKS)
pytestmark = pytest.mark.slow


@dataclass
class Feature:
    """A column of the table."""

    model: Callable[[], nn.Module] = lambda: mlp(40, 36, 32, 28)
    loss: Callable[..., Any] = field(default_factory=lambda: loss_on(40))
    ddp: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    max_norm: float | None = None
    scaler: bool = False
    compile: bool = False
    bucket_mb: float = 0.006


def some_branches(model, rank, part):
    """Each micro-batch takes other ones, or none."""
    return branching_loss(model, rank, part % len(TAKEN))


#: All that does not exclude another at once: what a wrapper does of them by itself it does here too.
MANY = "GradScaler, clipping, gradient accumulation, unused parameters"
FEATURES = {
    MANY: Feature(
        Branches, some_branches, {"find_unused_parameters": True}, micro_batches=2, max_norm=0.1, scaler=True
    ),
    "static_graph": Feature(ddp={"static_graph": True}),
    # No less, or torch.compile refuses. A compiled training step is tried below.
    "torch.compile": Feature(lambda: mlp(40, 520, 520, 28), compile=True, bucket_mb=1),
}


def new_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def part_loss(feature, model, rank, step, part):
    """Of one micro-batch. With a GradScaler, one of them overflows."""
    loss = feature.loss(model, rank, step * feature.micro_batches + part) / feature.micro_batches
    return loss * float("inf") if feature.scaler and (step, rank) == OVERFLOW else loss


def compiled(feature, model):
    # What the compiler makes of the graph does not matter here, only where it cuts it.
    return torch.compile(model, backend="aot_eager") if feature.compile else model


def result(model, handle):
    return {n.removeprefix("_orig_mod."): p for n, p in weights(model).items()}, handle.stats()


def plain_loop(world, feature, model, wrapped, handle, scaler):
    """The loop of a torch user."""
    optimizer = sgd(model)

    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(feature.micro_batches):
            with wrapped.no_sync() if part < feature.micro_batches - 1 else nullcontext():
                loss = part_loss(feature, wrapped, world.rank, step, part)
                (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        if feature.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), feature.max_norm)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return result(model, handle)


def under_ddp(world, feature):
    model, scaler = feature.model(), new_scaler() if feature.scaler else None
    ddp, handle = hooked(model, ALGORITHM, world.group, cap=feature.bucket_mb, grad_scaler=scaler, **feature.ddp)
    return plain_loop(world, feature, model, compiled(feature, ddp), handle, scaler)


def under_data_parallel(world, feature):
    """The model is compiled, and then wrapped."""
    model, scaler = feature.model(), new_scaler() if feature.scaler else None
    options = {"process_group": world.group, "bucket_cap_mb": feature.bucket_mb, "grad_scaler": scaler}
    wrapped = DataParallel(compiled(feature, model), ALGORITHM, **options, **feature.ddp)
    return plain_loop(world, feature, model, wrapped, wrapped.handle, scaler)


def under_accelerate(world, feature):
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = new_accelerator(
        gradient_accumulation_steps=feature.micro_batches,
        dynamo_backend="aot_eager" if feature.compile else None,
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1, **feature.ddp)],
    )
    assert accelerator.num_processes == RANKS
    if feature.scaler:  # as mixed_precision="fp16" does on a GPU
        accelerator.scaler = new_scaler()
    model = feature.model()
    wrapped, optimizer = accelerator.prepare(model, sgd(model))
    if feature.scaler:
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    handle = integrations.AcceleratorCompression(accelerator, wrapped, ALGORITHM).handle

    for step in range(STEPS):
        for part in range(feature.micro_batches):
            with accelerator.accumulate(wrapped):
                # accelerate divides the loss by the number of micro-batches itself.
                accelerator.backward(part_loss(feature, wrapped, world.rank, step, part) * feature.micro_batches)
                if accelerator.sync_gradients and feature.max_norm is not None:
                    accelerator.clip_grad_norm_(wrapped.parameters(), feature.max_norm)
                optimizer.step()
                optimizer.zero_grad()
    return result(model, handle)


def under_lightning(world, feature):
    from pytorch_lightning.plugins.precision import MixedPrecision

    def loss(module, number):
        # Lightning divides the loss by the number of micro-batches itself.
        step, part = divmod(number, feature.micro_batches)
        return part_loss(feature, module.net, world.rank, step, part) * feature.micro_batches

    module = lightning_module(feature.model(), loss, sgd)

    class Float32(MixedPrecision):
        """The loss scaling of "16-mixed", without casts, so that there is something to compare."""

        def autocast_context_manager(self):
            return torch.autocast("cpu", enabled=False)

    compression = integrations.LightningCompression(ALGORITHM)
    plugins = [Float32("16-mixed", "cpu", scaler=new_scaler())] if feature.scaler else None
    lightning_fit(
        compiled(feature, module),
        RANKS,
        STEPS * feature.micro_batches,
        ddp={"bucket_cap_mb": feature.bucket_mb, **feature.ddp},
        plugins=plugins,
        callbacks=[compression],
        max_epochs=1,
        accumulate_grad_batches=feature.micro_batches,
        gradient_clip_val=feature.max_norm,
    )
    return result(module.net, compression.handle)


def under_trainer(world, feature):
    import transformers

    class Scaled(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if feature.scaler:  # as fp16=True does on a GPU
                trainer.accelerator.native_amp, trainer.accelerator.state._mixed_precision = True, "fp16"

    def loss(model, inputs):
        # The Trainer divides the loss by the number of micro-batches itself.
        step, part = divmod(int(inputs["number"]), feature.micro_batches)
        return part_loss(feature, model, world.rank, step, part) * feature.micro_batches

    model = feature.model()
    trainer = new_trainer(
        model,
        world.folder / "trainer",
        Scaled(),
        sgd(model),
        [{"number": torch.tensor(i)} for i in range(STEPS * feature.micro_batches)],
        loss,
        max_steps=STEPS,
        gradient_accumulation_steps=feature.micro_batches,
        max_grad_norm=feature.max_norm or 0.0,
        ddp_bucket_cap_mb=1,
        torch_compile=feature.compile,
        torch_compile_backend="aot_eager" if feature.compile else None,
        **{f"ddp_{name}": value for name, value in feature.ddp.items()},
    )
    if feature.scaler:
        trainer.accelerator.scaler = new_scaler()
    compression = integrations.TrainerCompression(trainer, ALGORITHM)
    trainer.add_callback(compression)
    trainer.train()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    return result(model, compression.handle)


WRAPPERS = {
    "DDP": under_ddp,
    "DataParallel": under_data_parallel,
    "accelerate": under_accelerate,
    "Lightning": under_lightning,
    "Trainer": under_trainer,
}
CELLS = {f"{w}, {f}": (w, f) for w in WRAPPERS for f in FEATURES if (w, f) != ("DataParallel", "static_graph")}


@cases.each(CELLS)
def test_a_cell_that_works_trains_as_the_simulator_says(world, names):
    wrapper, feature = names
    column = FEATURES[feature]
    torch._dynamo.reset()
    counters.clear()
    with quiet():
        found, stats = WRAPPERS[wrapper](world, column)
    assert (counters["frames"]["ok"] > 0) is column.compile
    assert world.agree(found)
    assert relative(found, reference(feature, PREFIXES.get(names, ""))) < 1e-5
    assert stats.steps == STEPS  # one for each step, however many micro-batches it has
    assert stats.bytes_sent < stats.dense_bytes / 2
    assert stats.skipped_steps == int(column.scaler)


#: What comes before the names of parameters: memory belongs to names, and the first factor is drawn by them.
PREFIXES = {("Lightning", name): "net." for name in FEATURES} | {("DataParallel", "torch.compile"): "_orig_mod."}


@functools.cache
def reference(name, prefix=""):
    """The weights after training, by the book."""
    feature = FEATURES[name]
    model = feature.model()
    parameters = dict(model.named_parameters())
    simulator = Simulator(ALGORITHM, {prefix + n: tuple(p.shape) for n, p in parameters.items()}, RANKS)
    for step in range(STEPS):
        gradients, used = [], set()
        for rank in range(RANKS):
            twin = copy.deepcopy(model)
            for part in range(feature.micro_batches):
                part_loss(feature, twin, rank, step, part).backward()
            gradients.append({n: p.grad for n, p in twin.named_parameters()})
            used |= {n for n, g in gradients[-1].items() if g is not None}
        taken = {n: torch.zeros_like(p) for n, p in parameters.items() if n in used}
        local = [{prefix + n: (zero if g[n] is None else g[n]).numpy() for n, zero in taken.items()} for g in gradients]
        averages = {n.removeprefix(prefix): g for n, g in simulator.step(local).items()}
        norm = float(np.sqrt(sum((g * g).sum() for g in averages.values())))
        if not np.isfinite(norm):
            assert feature.scaler
            assert step == OVERFLOW[0]
            continue
        factor = LR if feature.max_norm is None else LR * min(1.0, feature.max_norm / norm)
        assert feature.max_norm is None or norm > feature.max_norm
        with torch.no_grad():
            for n, g in averages.items():
                parameters[n] -= factor * torch.from_numpy(g).to(parameters[n])
    return {n: p.detach() for n, p in parameters.items()}


@pytest.mark.parametrize("without", [{"max_norm": None}, {"micro_batches": 1}, {"scaler": False}], ids=str)
def test_the_references_differ(monkeypatch, without):
    """So that a cell in which a feature has no effect would be noticed."""
    monkeypatch.setitem(FEATURES, "without", replace(FEATURES[MANY], **without))
    assert relative(reference.__wrapped__("without"), reference(MANY)) > 1e-3


@cases.case
def test_torchs_names_are_what_lightning_takes(world):
    """`DDPStrategy(ddp_comm_state=…, ddp_comm_hook=…)`. Lightning registers the hook on CUDA only; this does on the CPU what it does there."""
    from pytorch_lightning.overrides.distributed import _register_ddp_comm_hook
    from pytorch_lightning.strategies import DDPStrategy

    class Strategy(DDPStrategy):
        def _register_ddp_hooks(self):
            hooks = (self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)
            _register_ddp_comm_hook(self.model, *hooks)

    def trained(**hook):
        loss = lambda module, step: loss_on(40)(module.net, world.rank, step)  # noqa: E731
        module = lightning_module(mlp(40, 36, 32, 28), loss, sgd)
        with quiet():
            lightning_fit(module, RANKS, STEPS, strategy=Strategy, ddp=hook, max_epochs=1)
        return weights(module.net)

    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=0)
    mine = trained(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook)
    assert world.agree(mine)
    assert 1e-4 < relative(mine, trained()) < 0.1  # compressed, and trained
    assert state.compression_stats()[0] > 2


# A training step that is compiled as a whole, `@torch.compile def step(x, y): …`, with every kind of hook, wrapper and optimizer.

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
def test_compiled_autograd_is_refused(world):
    """As DDP refuses it: a backward pass whose end nobody hears of would leave gradients as they are."""
    torch._dynamo.reset()
    model = DataParallel(mlp(24, 16), PowerSGD(2), process_group=world.group)
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
