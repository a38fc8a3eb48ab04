"""What `gradwire.compare` trains, from what is written for Hugging Face's Trainer or for Lightning.

    def make():
        data = {"train_dataset": train, "eval_dataset": held_out}
        return training_of_trainer(Trainer(model_of(), arguments, **data))

    def make():
        return training_of_lightning(MyModule(), MyData(), gradient_clip_val=1.0)

Replicas share the model, and take the tool's batches in turns, as its processes would. Callbacks
are not called, and nothing is logged or saved.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.core.advise.compare.batches import endless
from gradwire.torch_backend.advise.compare.training import Training


def training_of_trainer(trainer: Any) -> Training:
    """The training of a `transformers.Trainer` that has not trained: its model, loss, data,
    optimizer, schedule, clipping and accumulation. Batches of the `eval_dataset` are the held-out
    windows.

    Where gradients are accumulated the loss is the mean of those of the batches, also where the
    Trainer weighs batches by their tokens.

    Args:
        trainer: with `max_steps`, which the schedule follows.

    Raises:
        TypeError: several `eval_dataset`s; or, when training begins, a schedule that follows a
            metric.
        ValueError: it has an optimizer already, of which replicas may need one each; `fp16`, whose
            loss scaler has no place here; or no `max_steps`.
    """
    args = trainer.args
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise ValueError(
            "trainer has an optimizer or a scheduler already; give it optimizer_cls_and_kwargs, or"
            " override create_optimizer"
        )
    if args.fp16:
        raise ValueError(
            "trainer.args.fp16=True scales the loss, which is not done here; set bf16=True, or"
            " neither"
        )
    if args.max_steps < 1:
        raise ValueError(
            f"trainer.args.max_steps={args.max_steps}; set it to the steps of the whole run, which"
            " the schedule follows"
        )
    if isinstance(trainer.eval_dataset, dict):
        raise TypeError(
            f"trainer.eval_dataset has {len(trainer.eval_dataset)} parts; give one of them"
        )

    trainer.model.train()  # as a trainer does: what was loaded is in `eval()`

    def optimizer(parameters: Any) -> Any:
        trainer.create_optimizer_and_scheduler(args.max_steps)
        made = trainer.optimizer, trainer.lr_scheduler
        trainer.optimizer = trainer.lr_scheduler = None
        return _stepped_by_itself(*made)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            found: Tensor = trainer.compute_loss(model, trainer._prepare_inputs(dict(batch)))
        return found

    def evaluate(model: nn.Module) -> list[Tensor]:
        return [loss(model, batch) for batch in trainer.get_eval_dataloader()]

    return Training(
        trainer.model,
        optimizer,
        _Dealt(trainer.get_train_dataloader),
        loss,
        _clipping(trainer.model, args.max_grad_norm),
        args.gradient_accumulation_steps,
        evaluate if trainer.eval_dataset is not None else None,
    )


def training_of_lightning(
    module: Any,
    data: Any = None,
    *,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
) -> Training:
    """The training of a `LightningModule`: what its `training_step` returns, by what
    `configure_optimizers` returns. What `validation_step` returns of each batch of `val_dataloader`
    is a held-out window; without either there are none.

    Args:
        module: with automatic optimization, and one optimizer.
        data: a `LightningDataModule`, or a `DataLoader` to train on. None: the module has loaders
            of its own.
        accumulate_grad_batches: as of Lightning's `Trainer`.
        gradient_clip_val: likewise; the norm is clipped.

    Raises:
        TypeError: several loaders to train or to validate on; when training begins: a schedule that
            follows a metric, or a step that returns no loss.
        ValueError: the module optimizes by hand; or, when training begins, it has several
            optimizers.
    """
    if not module.automatic_optimization:
        raise ValueError(
            "module.automatic_optimization=False; write its step as make(replica, replicas), see"
            " gradwire.compare"
        )
    loaders = module if data is None else data
    for each in (data, module):  # as Lightning does, in this order
        if hasattr(each, "setup"):
            each.prepare_data()
            each.setup("fit")
    if hasattr(module, "configure_model"):
        module.configure_model()
    dealt = _Dealt(
        _one_loader(loaders, "train_dataloader")
        if hasattr(loaders, "train_dataloader")
        else lambda: loaders
    )
    validates = _overridden(loaders, "val_dataloader") and _overridden(module, "validation_step")
    held_out: Any = _one_loader(loaders, "val_dataloader")() if validates else ()

    def step(name: str, model: Any, batch: Any, number: int) -> Tensor:
        batch = model.transfer_batch_to_device(batch, next(model.parameters()).device, 0)
        method = getattr(model, name)
        found = method(*(batch, number)[: len(inspect.signature(method).parameters)])
        found = found.get("loss") if isinstance(found, dict) else found
        if not isinstance(found, Tensor):
            raise TypeError(f"{name} returns a {type(found).__name__}; return the loss")
        return found

    def optimizer(parameters: Any) -> Any:
        return _scheduled(module.configure_optimizers(), dealt)

    def evaluate(model: nn.Module) -> list[Tensor]:
        return [
            step("validation_step", model, batch, number) for number, batch in enumerate(held_out)
        ]

    return Training(
        module,
        optimizer,
        dealt,
        lambda model, batch: step("training_step", model, batch, dealt.count),
        _clipping(module, gradient_clip_val or 0.0),
        accumulate_grad_batches,
        evaluate if validates else None,
    )


def _one_loader(loaders: Any, name: str) -> Callable[[], Any]:
    """What makes a loader. It raises TypeError for several."""

    def load() -> Any:
        made = getattr(loaders, name)()
        if isinstance(made, list | tuple | dict):
            raise TypeError(f"{name} returns {len(made)} loaders; give one of them")
        return made

    return load


class _Dealt:
    """The batches of one loader, which replicas take in turns.

    Attributes:
        epoch: how often the loader was begun, less one.
        count: batches that were taken.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load, self.epoch, self.count = load, -1, 0
        self._batches: Iterator[Any] | None = None
        self._dealt: list[deque[Any]] = []

    def __call__(self, replica: int, replicas: int) -> Iterable[Any]:
        if self._batches is None:
            self._batches = endless(partial(_Counted, self, self._load()))
            self._dealt = [deque() for _ in range(replicas)]
        while True:
            while not self._dealt[replica]:
                self._dealt[self.count % replicas].append(next(self._batches))
                self.count += 1
            yield self._dealt[replica].popleft()


class _Counted:
    """A loader whose beginnings are counted."""

    def __init__(self, dealt: _Dealt, loader: Any) -> None:
        self._dealt, self._loader, self.sampler = dealt, loader, getattr(loader, "sampler", None)

    def __iter__(self) -> Iterator[Any]:
        self._dealt.epoch += 1
        yield from self._loader


def _step_each_epoch(optimizer: torch.optim.Optimizer, scheduler: Any, dealt: _Dealt) -> None:
    """Step a scheduler before the first step of the optimizer in each further epoch: that one has
    ended is known when the next one begins."""
    done = 0

    def before(*_: Any) -> None:
        nonlocal done
        while done < dealt.epoch:
            done += 1
            scheduler.step()

    optimizer.register_step_pre_hook(before)


def _scheduled(configured: Any, dealt: _Dealt) -> Any:
    """Optimizer and scheduler, or the former alone, of what `configure_optimizers` returns in any
    of its forms."""
    schedulers: Any = ()
    several = isinstance(configured, list | tuple)
    if several and len(configured) == 1 and isinstance(configured[0], dict):
        configured, several = configured[0], False
    if isinstance(configured, dict):
        configured, schedulers = configured["optimizer"], configured.get("lr_scheduler", ())
    elif several and len(configured) == 2 and isinstance(configured[0], list | tuple):
        configured, schedulers = configured
    optimizers = list(configured) if isinstance(configured, list | tuple) else [configured]
    schedulers = list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
    if (
        len(optimizers) != 1
        or len(schedulers) > 1
        or not isinstance(optimizers[0], torch.optim.Optimizer)
    ):
        raise ValueError(
            f"configure_optimizers returns {len(optimizers)} optimizers and {len(schedulers)}"
            " schedulers; return one optimizer, and one scheduler at most"
        )
    if not schedulers:
        return optimizers[0]
    found = schedulers[0] if isinstance(schedulers[0], dict) else {"scheduler": schedulers[0]}
    if found.get("frequency", 1) != 1:
        raise ValueError(f"the scheduler has frequency={found['frequency']}; leave it at 1")
    made = _stepped_by_itself(optimizers[0], found["scheduler"])
    if found.get("interval", "epoch") == "step":
        return made
    _step_each_epoch(*made, dealt)
    return optimizers[0]


def _stepped_by_itself(optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau follows a metric, which is not there; give a schedule that follows"
            " steps"
        )
    return optimizer, scheduler


def _clipping(model: nn.Module, norm: float) -> Callable[[], Any]:
    """What clips the gradients, if that is wanted."""
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), norm) if norm else None


def _overridden(thing: Any, name: str) -> bool:
    """Whether somebody wrote this method, of which Lightning's classes have one that does
    nothing."""
    method = getattr(type(thing), name, None)
    return method is not None and not method.__module__.startswith(
        ("lightning.", "pytorch_lightning.")
    )
