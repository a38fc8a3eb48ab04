"""docs/integrations.md, the table of local SGD, cell by cell: under DDP, accelerate, Lightning and
transformers' Trainer it trains as a reference that knows none of them: replicas in this process,
each with an optimizer of its own, averaged by hand."""

import copy
import functools
import re
import warnings
from contextlib import nullcontext

import pytest
import torch

from gradwire import LocalSGD
from gradwire.torch_backend import (
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    local_sgd,
    noop_hook,
)
from tests.launch import ROOT
from tests.torch.compare import relative, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.tools import (
    gpt2,
    lightning_fit,
    lightning_module,
    new_accelerator,
    new_trainer,
    quiet,
)
from tests.torch.training import hooked, sgd

RANKS = 2
STEPS = 8
#: Gradients are averaged in steps 0 and 1, parameters after steps 4 and 7.
SCHEDULE = LocalSGD(3, start_step=2)
DUE = (4, 7)
VOCABULARY, LENGTH = 24, 12

cases = Cases(__file__, ranks=RANKS)
pytestmark = pytest.mark.slow


with_momentum = functools.partial(sgd, momentum=0.9)


def mlp_model():
    return mlp(40, 36, 28)


def gpt2_model():
    return gpt2(VOCABULARY, LENGTH)


mlp_loss = loss_on(40)


def text(rank, part):
    generator = torch.Generator().manual_seed(1000 * rank + part)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[:, 0] = -100  # nobody predicts the first token, and the Trainer would count it
    return {"input_ids": tokens, "labels": labels}


def gpt2_loss(model, rank, part):
    return model(**text(rank, part)).loss


def result(model, handle):
    assert (handle.steps, handle.synchronized) == (STEPS, True)
    return weights(model)


def under_ddp(world, micro_batches):
    model = mlp_model()
    ddp, _ = hooked(model, None, world.group)
    optimizer = with_momentum(model)
    handle = local_sgd(ddp, optimizer, SCHEDULE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro_batches):
            with ddp.no_sync() if part < micro_batches - 1 else nullcontext():
                (mlp_loss(ddp, world.rank, step * micro_batches + part) / micro_batches).backward()
        optimizer.step()
    return result(model, handle)


def steps_of_accelerate(accelerator, wrapped, optimizer, rank, micro_batches):
    for part in range(STEPS * micro_batches):
        with accelerator.accumulate(wrapped):
            accelerator.backward(mlp_loss(wrapped, rank, part))
            optimizer.step()
            optimizer.zero_grad()


def under_accelerate(world, micro_batches):
    accelerator, model = new_accelerator(gradient_accumulation_steps=micro_batches), mlp_model()
    wrapped, optimizer = accelerator.prepare(model, with_momentum(model))
    handle = local_sgd(wrapped, optimizer, SCHEDULE)
    steps_of_accelerate(accelerator, wrapped, optimizer, world.rank, micro_batches)
    return result(model, handle)


def under_lightning(world, micro_batches):
    import pytorch_lightning as pl

    # What docs/integrations.md tells users of Lightning to write.
    (line,) = re.findall(
        r"`on_train_start`: `(local_sgd\(.*?, )LocalSGD\(8\)\)`",
        (ROOT / "docs" / "integrations.md").read_text(),
    )

    class Local(pl.Callback):
        def on_train_start(self, trainer, module):
            names = {
                "local_sgd": local_sgd,
                "trainer": trainer,
                "module": module,
                "schedule": SCHEDULE,
            }
            self.handle = eval(f"{line}schedule)", names)

    module = lightning_module(
        mlp_model(), lambda module, part: mlp_loss(module.net, world.rank, part), with_momentum
    )
    local, options = Local(), {"max_epochs": 1, "accumulate_grad_batches": micro_batches}
    ddp = {"broadcast_buffers": False}
    lightning_fit(module, RANKS, STEPS * micro_batches, ddp=ddp, callbacks=[local], **options)
    return result(module.net, local.handle)


def under_trainer(world, micro_batches):
    import transformers

    class Local(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.handle = local_sgd(self.trainer.model_wrapped, self.trainer.optimizer, SCHEDULE)

    model, local = gpt2_model(), Local()
    data = [text(world.rank, i) for i in range(STEPS * micro_batches)]
    options = {
        "ddp_broadcast_buffers": False,
        "max_steps": STEPS,
        "gradient_accumulation_steps": micro_batches,
    }
    new_trainer(
        model, world.folder / "trainer", local, with_momentum(model), data, **options
    ).train()
    return result(model, local.handle)


WRAPPERS = {
    "DDP": (under_ddp, mlp_model, mlp_loss),
    "accelerate": (under_accelerate, mlp_model, mlp_loss),
    "Lightning": (under_lightning, mlp_model, mlp_loss),
    "Trainer": (under_trainer, gpt2_model, gpt2_loss),
}
FEATURES = {"local_sgd": 1, "local_sgd and gradient accumulation": 3}
CELLS = {
    f"{wrapper}, {f}": (*WRAPPERS[wrapper], FEATURES[f]) for wrapper in WRAPPERS for f in FEATURES
}


@cases.each(CELLS)
def test_a_cell_of_local_sgd_trains_as_the_reference(world, variant):
    under, make, loss, micro_batches = variant
    with quiet():
        found = under(world, micro_batches)
    assert world.agree(found)
    right = reference(make, loss, micro_batches)
    assert relative(found, {n: right[n] for n in found}) < 1e-5


@functools.cache
def reference(make, loss, micro_batches, due=DUE, start_step=2):
    """The weights after training, by the book."""
    replicas = [make() for _ in range(RANKS)]
    optimizers = [with_momentum(model) for model in replicas]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            for rank, model in enumerate(replicas):
                model.zero_grad()
                for part in range(micro_batches):
                    (loss(model, rank, step * micro_batches + part) / micro_batches).backward()
            if step < start_step:
                average([[p.grad for p in model.parameters()] for model in replicas])
            for optimizer in optimizers:
                optimizer.step()
            if step in due:
                average([[p.detach() for p in model.parameters()] for model in replicas])
    return weights(replicas[0])


def average(lists):
    for tensors in zip(*lists, strict=True):
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)


def test_the_references_differ():
    """So that a cell in which nothing is averaged, or everything, or at other steps, would be
    noticed."""
    right = reference(mlp_model, mlp_loss, 1)
    for parts, due, start in (
        (1, (), 2),
        (1, tuple(range(STEPS)), 2),
        (1, (1, 4, 7), 0),
        (3, DUE, 2),
    ):
        assert relative(reference(mlp_model, mlp_loss, parts, due, start), right) > 1e-4


@cases.case
def test_torchs_names_for_local_sgd_under_accelerate(world):
    """`accelerator.prepare(PostLocalSGDOptimizer(optimizer, averager))`, with accumulation: the
    averager counts optimizer steps."""
    accelerator, model = new_accelerator(gradient_accumulation_steps=3), mlp_model()
    wrapper = PostLocalSGDOptimizer(with_momentum(model), PeriodicModelAverager(3, warmup_steps=1))
    unprepared = copy.copy(wrapper)
    wrapped, optimizer = accelerator.prepare(model, wrapper)
    wrapped.register_comm_hook(None, noop_hook)
    steps_of_accelerate(accelerator, wrapped, optimizer, world.rank, 3)
    assert unprepared.averager.step == STEPS
    assert world.agree(weights(model))
    assert (
        relative(weights(model), reference(mlp_model, mlp_loss, 3, due=(1, 4, 7), start_step=0))
        < 1e-5
    )
