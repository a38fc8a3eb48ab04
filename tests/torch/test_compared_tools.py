"""Trainings of Hugging Face's Trainer and of Lightning, as `gradwire.compare` has them, against what these train themselves in one process."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gradwire import AllReduce, LocalSGD
from gradwire.torch_backend.advise.compare.replicas import parameters_of, replicas_of
from gradwire.torch_backend.integrations import training_of_lightning, training_of_trainer
from tests.torch.compare import relative, weights
from tests.torch.tools import gpt2, lightning_module, new_trainer, quiet

os.environ["HF_HUB_OFFLINE"] = "1"

STEPS, ACCUMULATE = 7, 2
#: Fewer batches than are taken, so that a second epoch begins.
BATCHES = 10


def trained(training, algorithm, replicas):
    made = replicas_of(training, algorithm, replicas, 0)
    for _ in range(STEPS):
        made.step()
    return parameters_of(made, 0)


def texts(batch):
    ids = ((torch.arange(8) + 3) * (batch + 1) % 64)[None]
    return {"input_ids": ids, "labels": ids}


def trainer_of(folder, **options):
    usual = {"max_steps": STEPS, "max_grad_norm": 0.3, "gradient_accumulation_steps": ACCUMULATE, "ddp_backend": None}
    batches = list(map(texts, range(BATCHES)))
    return new_trainer(gpt2(64, 16), folder, None, None, batches, learning_rate=0.01, warmup_steps=2, **usual | options)


@pytest.mark.slow
@quiet()
def test_a_trainer_is_compared_as_it_trains(tmp_path):
    whole = trainer_of(tmp_path)
    whole.model_accepts_loss_kwargs = False  # it would weigh batches by their tokens, of which all have as many
    started = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    whole.train()
    found = trained(training_of_trainer(trainer_of(tmp_path)), AllReduce(), 1)
    assert relative(found, weights(whole.model)) < 1e-5
    assert relative(found, started) > 1e-2
    # Two replicas with half of the batches of a step each make the same steps.
    halves = trainer_of(tmp_path, gradient_accumulation_steps=1)
    halves.eval_dataset = [{name: x[0] for name, x in texts(batch).items()} for batch in range(16)]
    training = training_of_trainer(halves)
    assert relative(trained(training, AllReduce(), 2), weights(whole.model)) < 1e-5
    assert len(training.evaluate(training.model)) == 2  # of 8 texts each
    # Replicas that train by themselves have an optimizer each.
    trained(training_of_trainer(trainer_of(tmp_path)), LocalSGD(2), 2)
    with pytest.raises(ValueError, match="max_steps"):
        training_of_trainer(trainer_of(tmp_path, max_steps=-1))
    halves.create_optimizer()
    with pytest.raises(ValueError, match="optimizer"):
        training_of_trainer(halves)


def step_every_epoch(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.5)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]


def step_every_step(module):
    (optimizer,), (scheduler,) = step_every_epoch(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def module_of(optimizer=step_every_step):
    torch.manual_seed(0)

    def loss(module, batch):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(batch))
        return (module.net(x) - x.sin()).square().mean()

    return lightning_module(nn.Linear(6, 6), loss, optimizer)


def numbers():
    return DataLoader(range(BATCHES), batch_size=None)


@pytest.mark.slow
@quiet()
@pytest.mark.parametrize("optimizer", [step_every_step, step_every_epoch])
def test_a_module_of_lightning_is_compared_as_it_trains(optimizer):
    from pytorch_lightning import LightningDataModule, Trainer

    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    whole = module_of(optimizer)
    options = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 0.3}
    Trainer(accelerator="cpu", devices=1, max_steps=STEPS, **off, **options).fit(whole, numbers())

    class Data(LightningDataModule):
        def setup(self, stage):
            self.ready = stage

        def train_dataloader(self):
            assert self.ready == "fit"
            return numbers()

        def val_dataloader(self):
            return numbers()

    found = trained(training_of_lightning(module_of(optimizer), Data(), **options), AllReduce(), 1)
    assert relative(found, weights(whole)) < 1e-5
    assert relative(found, weights(module_of())) > 1e-2
    halves = training_of_lightning(module_of(optimizer), numbers(), gradient_clip_val=0.3)
    assert halves.evaluate is None
    assert relative(trained(halves, AllReduce(), 2), weights(whole)) < 1e-5
    validated = module_of(optimizer)
    type(validated).validation_step = lambda self, batch, number: {"loss": self.training_step(batch, number)}
    training = training_of_lightning(validated, Data())
    assert len(training.evaluate(training.model)) == BATCHES
    type(validated).validation_step = lambda self, batch: None
    with pytest.raises(TypeError, match="validation_step"):
        training.evaluate(training.model)


def plateau(module):
    (optimizer,), _ = step_every_epoch(module)
    return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


WRONG = [
    (lambda module: step_every_epoch(module)[0] * 2, ValueError, "configure_optimizers"),
    (lambda module: plateau(module)[1][0], ValueError, "optimizers"),
    (plateau, TypeError, "ReduceLROnPlateau"),
    (lambda module: {"optimizer": None}, ValueError, "configure_optimizers"),
]


@pytest.mark.parametrize(("optimizer", "error", "named"), WRONG)
def test_what_configures_no_optimizer_is_refused(optimizer, error, named):
    """By what a module has, whoever wrote it."""

    class Module(nn.Linear):
        automatic_optimization = True

        def configure_optimizers(self):
            return optimizer(self)

    with pytest.raises(error, match=named):
        training_of_lightning(Module(2, 2), numbers()).made_optimizer()
    with pytest.raises(ValueError, match="automatic_optimization"):
        training_of_lightning(SimpleNamespace(automatic_optimization=False))
