"""Lightning, accelerate and Hugging Face's Trainer in tests: without what they say about the machine."""

import logging
import warnings
from contextlib import contextmanager

__all__ = ["lightning_trainer", "quiet"]

LOGGERS = ("pytorch_lightning", "lightning.pytorch", "accelerate", "transformers")


@contextmanager
def quiet():
    """Their warnings and notes are not shown, nor anybody's warnings."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def lightning_trainer(ranks, **options):
    """On CPUs, with data as they are given, without files and bars."""
    from pytorch_lightning import Trainer

    return Trainer(
        accelerator="cpu",
        devices=ranks,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
