"""docs/composition.md, the table of local SGD, cell by cell: under DDP, accelerate, Lightning and transformers' Trainer it trains as a reference
that knows none of them: replicas in this process, each with an optimizer of its own, averaged by hand."""

import copy
import functools
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire import LocalSGD
from gradwire.torch_backend import PeriodicModelAverager, PostLocalSGDOptimizer, local_sgd, noop_hook
from tests.torch.ranks import Cases
from tests.torch.tools import lightning_trainer, quiet
from tests.torch.training import loss_on, mlp, relative, same_bits

RANKS = 2
STEPS = 8
#: Gradients are averaged in steps 0 and 1, parameters after steps 4 and 7.
SCHEDULE = LocalSGD(3, start_step=2)
DUE = (4, 7)
VOCABULARY, LENGTH = 24, 12

cases = Cases(__file__, ranks=RANKS)
results = cases.fixture()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def mlp_model():
    return mlp(40, 36, 28)


def mlp_loss(model, rank, part):
    return loss_on(40)(model, rank, part)


def gpt2():
    """Small and random."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 2}
    dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, use_cache=False))


def text(rank, part):
    generator = torch.Generator().manual_seed(1000 * rank + part)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[:, 0] = -100  # nobody predicts the first token, and the Trainer would count it
    return {"input_ids": tokens, "labels": labels}


def gpt2_loss(model, rank, part):
    return model(**text(rank, part)).loss


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def under_ddp(world, micro_batches):
    model = mlp_model()
    ddp = DistributedDataParallel(model, process_group=world.group)
    optimizer = sgd(model)
    handle = local_sgd(ddp, optimizer, SCHEDULE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro_batches):
            with ddp.no_sync() if part < micro_batches - 1 else nullcontext():
                (mlp_loss(ddp, world.rank, step * micro_batches + part) / micro_batches).backward()
        optimizer.step()
    return weights(model), handle.steps, handle.synchronized


def accelerator(micro_batches):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)


def steps_of_accelerate(accelerator, wrapped, optimizer, rank, micro_batches):
    for part in range(STEPS * micro_batches):
        with accelerator.accumulate(wrapped):
            accelerator.backward(mlp_loss(wrapped, rank, part))
            optimizer.step()
            optimizer.zero_grad()


def under_accelerate(world, micro_batches):
    accelerate, model = accelerator(micro_batches), mlp_model()
    wrapped, optimizer = accelerate.prepare(model, sgd(model))
    handle = local_sgd(wrapped, optimizer, SCHEDULE)
    steps_of_accelerate(accelerate, wrapped, optimizer, world.rank, micro_batches)
    return weights(model), handle.steps, handle.synchronized


def under_lightning(world, micro_batches):
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp_model()

        def training_step(self, batch, _):
            return mlp_loss(self.net, world.rank, int(batch))

        def configure_optimizers(self):
            return sgd(self)

    class Local(pl.Callback):
        """What docs/composition.md tells users of Lightning to write."""

        def on_train_start(self, trainer, module):
            self.handle = local_sgd(trainer.strategy.model, module.optimizers(), SCHEDULE)

    module, local = Module(), Local()
    lightning_trainer(
        RANKS,
        strategy=DDPStrategy(process_group_backend="gloo", broadcast_buffers=False),
        callbacks=[local],
        max_epochs=1,
        accumulate_grad_batches=micro_batches,
    ).fit(module, torch.utils.data.DataLoader(range(STEPS * micro_batches), batch_size=None))
    return weights(module.net), local.handle.steps, local.handle.synchronized


def under_trainer(world, micro_batches):
    import transformers
    from accelerate.state import AcceleratorState, GradientState, PartialState

    transformers.logging.set_verbosity_error()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()

    class Local(transformers.TrainerCallback):
        """What docs/composition.md tells users of the Trainer to write."""

        def on_train_begin(self, args, state, control, **kwargs):
            self.handle = local_sgd(self.trainer.model_wrapped, self.trainer.optimizer, SCHEDULE)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):  # the same batches as the other wrappers
            parts = [text(world.rank, i) for i in range(STEPS * micro_batches)]
            return torch.utils.data.DataLoader(parts, batch_size=None)

    model, local = gpt2(), Local()
    arguments = transformers.TrainingArguments(
        output_dir=str(world.folder / "trainer"),
        use_cpu=True,
        ddp_backend="gloo",
        ddp_broadcast_buffers=False,
        max_steps=STEPS,
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    optimizer = sgd(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    local.trainer = Trainer(model, arguments, callbacks=[local], optimizers=(optimizer, constant))
    local.trainer.train()
    return weights(model), local.handle.steps, local.handle.synchronized


WRAPPERS = {
    "DDP": (under_ddp, mlp_model, mlp_loss),
    "accelerate": (under_accelerate, mlp_model, mlp_loss),
    "Lightning": (under_lightning, mlp_model, mlp_loss),
    "Trainer": (under_trainer, gpt2, gpt2_loss),
}
FEATURES = {"local_sgd": 1, "local_sgd and gradient accumulation": 3}
CELLS = {f"{wrapper}, {feature}": (wrapper, feature) for wrapper in WRAPPERS for feature in FEATURES}


@cases.each(CELLS)
def cell(world, names):
    wrapper, feature = names
    with quiet():
        return WRAPPERS[wrapper][0](world, FEATURES[feature])


@functools.cache
def reference(make, loss, micro_batches, due=DUE, start_step=2):
    """The weights after training, by the book."""
    replicas = [make() for _ in range(RANKS)]
    optimizers = [sgd(model) for model in replicas]
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


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_local_sgd_trains_as_the_reference(results, name):
    wrapper, feature = CELLS[name]
    _, make, loss = WRAPPERS[wrapper]
    (first, steps, synchronized), (second, *_) = results(f"cell[{name}]")
    assert same_bits(first, second)
    assert (steps, synchronized) == (STEPS, True)
    right = reference(make, loss, FEATURES[feature])
    assert relative(first, {n: right[n] for n in first}) < 1e-5


def test_the_references_differ():
    """So that a cell in which nothing is averaged, or everything, or at other steps, would be noticed."""
    right = reference(mlp_model, mlp_loss, 1)
    for other in (
        reference(mlp_model, mlp_loss, 1, due=()),
        reference(mlp_model, mlp_loss, 1, due=tuple(range(STEPS))),
        reference(mlp_model, mlp_loss, 1, due=(1, 4, 7), start_step=0),
        reference(mlp_model, mlp_loss, 3),
    ):
        assert relative(other, right) > 1e-4


@cases.case
def post_local_optimizer(world):
    """`accelerator.prepare(PostLocalSGDOptimizer(optimizer, averager))`, with accumulation: the averager counts optimizer steps."""
    accelerate, model = accelerator(3), mlp_model()
    wrapper = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(3, warmup_steps=1))
    unprepared = copy.copy(wrapper)
    wrapped, optimizer = accelerate.prepare(model, wrapper)
    wrapped.register_comm_hook(None, noop_hook)
    steps_of_accelerate(accelerate, wrapped, optimizer, world.rank, 3)
    return weights(model), unprepared.averager.step


def test_torchs_names_for_local_sgd_under_accelerate(results):
    (first, steps), (second, _) = results("post_local_optimizer")
    assert steps == STEPS
    assert same_bits(first, second)
    assert relative(first, reference(mlp_model, mlp_loss, 3, due=(1, 4, 7), start_step=0)) < 1e-5


if __name__ == "__main__":
    cases.main()
