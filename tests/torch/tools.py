"""Lightning, accelerate and Hugging Face's Trainer in tests: small, on CPUs, and without what they
say about the machine."""

import logging
import warnings
from contextlib import contextmanager

import torch

LOGGERS = ("pytorch_lightning", "lightning.pytorch", "accelerate", "transformers")


@contextmanager
def quiet():
    """Their warnings and notes are not shown, nor anybody's warnings."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def new_accelerator(**options):
    """As if there had been none in this process."""
    from accelerate import Accelerator

    _forget_accelerators()
    return Accelerator(cpu=True, **options)


def _forget_accelerators():
    from accelerate import state

    for each in (state.AcceleratorState, state.GradientState, state.PartialState):
        each._reset_state()


def gpt2(vocabulary, length):
    """Random, of one layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {
        "vocab_size": vocabulary,
        "n_positions": length,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
    }
    dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, use_cache=False)
    )


def new_trainer(
    model, folder, callback, optimizer, batches=None, loss=None, dataset=None, **options
):
    """A Trainer, of batches as they are given, or of examples; with `loss(model, batch)`, or the
    model's own. `callback.trainer` is it."""
    import transformers

    transformers.logging.set_verbosity_error()
    _forget_accelerators()

    class Trainer(transformers.Trainer):
        if batches is not None:

            def get_train_dataloader(self):
                return torch.utils.data.DataLoader(batches, batch_size=None)

        if loss is not None:

            def compute_loss(self, model, inputs, *args, **kwargs):
                return loss(model, inputs)

    usual = {
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "ddp_backend": "gloo",
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, **usual | options,
    )  # fmt: skip
    constant = optimizer and torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    callbacks = [callback] if callback else None
    trainer = Trainer(
        model,
        arguments,
        callbacks=callbacks,
        optimizers=(optimizer, constant),
        train_dataset=dataset,
    )
    if callback:
        callback.trainer = trainer
    return trainer


def lightning_module(net, loss, optimizer):
    """That trains on `loss(module, number of the batch)`, with `optimizer(module)`."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _):
            return loss(self, int(batch))

        def configure_optimizers(self):
            return optimizer(self)

    return Module()


def lightning_fit(module, ranks, batches, *, strategy=None, checkpoint=None, ddp=None, **options):
    """Train on CPUs, with numbers for batches, without files and bars; returns the trainer. `ddp`:
    options of the strategy."""
    from pytorch_lightning import Trainer
    from pytorch_lightning.strategies import DDPStrategy

    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=(strategy or DDPStrategy)(process_group_backend="gloo", **ddp or {}),
        use_distributed_sampler=False,
        **dict.fromkeys(
            ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
        ),
        **options,
    )
    trainer.fit(
        module, torch.utils.data.DataLoader(range(batches), batch_size=None), ckpt_path=checkpoint
    )
    return trainer
