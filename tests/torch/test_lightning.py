"""The callback of Lightning at the edges of a training. What it saves and restores:
test_tools_checkpoints.py."""

from types import SimpleNamespace

import pytest

from gradwire import PowerSGD

pytest.importorskip("pytorch_lightning")
from gradwire.torch_backend.integrations import LightningCompression


class Strategy:
    def save_checkpoint(self, *_):
        pass

    remove_checkpoint = save_checkpoint


def new():
    """A callback, and a trainer that begins to fit."""
    return LightningCompression(PowerSGD(2)), SimpleNamespace(strategy=Strategy())


def test_a_training_begins_without_what_a_validation_has_loaded():
    """Lightning restores callbacks for `validate(ckpt_path=…)` too. What is loaded for the training
    itself comes after its setup."""
    callback, trainer = new()
    callback.load_state_dict({"step": 3})
    callback.setup(trainer, None, "validate")
    assert callback.state_dict() == {"step": 3}
    callback.setup(trainer, None, "fit")
    assert callback.state_dict() == {}
    callback.load_state_dict({"step": 5})
    assert callback.state_dict() == {"step": 5}


@pytest.mark.parametrize("every", [0, 50])
def test_figures_are_logged_as_often_as_is_said(every):
    """0: never, as with barebones=True."""
    callback, trainer = new()
    logged = []
    logger = SimpleNamespace(log_metrics=lambda figures, step: logged.append(step))
    callback._compression.handle = SimpleNamespace(
        stats=lambda: SimpleNamespace(scalars=lambda: {"steps": 1.0})
    )
    for step in (49, 50, 50, 100):
        trainer.global_step, trainer.log_every_n_steps = step, every
        trainer.loggers, trainer.is_global_zero = [logger], True
        callback.on_train_batch_end(trainer)
    assert logged == ([50, 100] if every else [])


def test_a_checkpoint_after_an_exception_waits_for_nobody(tmp_path):
    """It may be one rank's alone, and others would never come."""
    callback, trainer = new()
    callback.setup(trainer, None, "fit")

    def nobody():
        raise AssertionError("ranks meet")

    callback._compression.handle = SimpleNamespace(state_dict=nobody)
    callback.on_exception(trainer, None, RuntimeError())
    assert callback.state_dict() == {}
    trainer.strategy.save_checkpoint({"callbacks": {}}, tmp_path / "last.ckpt")
    callback.setup(trainer, None, "fit")
    callback.load_state_dict({"step": 5})
    assert callback.state_dict() == {"step": 5}
