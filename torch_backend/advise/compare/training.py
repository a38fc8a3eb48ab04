"""What a training consists of, as `gradwire.compare` is given it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch_backend.setup.consistency import require_initialized
from gradwire.torch_backend.torch_internals import leaves_of


def _nothing() -> None:
    """What happens between backward and step where nothing was given."""


@dataclass(frozen=True)
class Training:
    """A training in pieces, of which `gradwire.compare` makes steps of R replicas on one device.
    They share the model.

        def make():
            model = Transformer()
            return Training(
                model,
                optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
                batches=lambda replica, replicas: DataLoader(
                    data, 32, sampler=DistributedSampler(data, replicas, replica)
                ),
                loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
                after_backward=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                evaluate=lambda model: [F.cross_entropy(model(x), y) for x, y in held_out],
            )

    Args:
        model: on its device, not wrapped in DDP.
        optimizer: parameters → the optimizer, or (optimizer, scheduler), which is stepped after
            each step of the optimizer.
        batches: (replica, replicas) → the batches of a replica, each replica its own. What comes to
            an end is begun again.
        loss: (model, batch) → a scalar tensor.
        after_backward: called where gradients are averaged, before the optimizer: clipping.
        accumulate: batches for each step; their gradients are averaged.
        evaluate: model → the losses of held-out windows, two or more, the same windows each time;
            called without gradients, the model in `eval()`. None: there will be no verdicts.

    Raises:
        TypeError: an argument is something else, named.
        ValueError: a model that has nothing to train; fewer than one batch for a step.
    """

    model: nn.Module
    optimizer: Callable[[list[nn.Parameter]], Any]
    batches: Callable[[int, int], Iterable[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    after_backward: Callable[[], Any] = _nothing
    accumulate: int = 1
    evaluate: Callable[[nn.Module], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model is a {type(self.model).__name__}; give a torch.nn.Module")
        if isinstance(self.model, DistributedDataParallel):
            raise TypeError(
                "model is a DistributedDataParallel; give the module inside: replicas are in one"
                " process here"
            )
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is a {type(self.optimizer).__name__} already; give what makes it:"
                f" lambda parameters: {type(self.optimizer).__name__}(parameters, …), since"
                " replicas may need one each"
            )
        for name in ("optimizer", "batches", "loss", "after_backward"):
            if not callable(getattr(self, name)):
                raise TypeError(
                    f"{name} is a {type(getattr(self, name)).__name__}; give a function"
                )
        if self.evaluate is not None and not callable(self.evaluate):
            raise TypeError(
                f"evaluate is a {type(self.evaluate).__name__}; give a function, or None"
            )
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int):
            raise TypeError(f"accumulate={self.accumulate!r} must be an int")
        if self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate} must be at least 1")
        if not self.parameters:
            raise ValueError(
                "model has no parameter with requires_grad=True, so there is nothing to train"
            )
        require_initialized(self.parameters)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.parameters.values())).device

    def made_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        """An optimizer of the model's parameters, and its scheduler or None. Raises TypeError if it
        is none."""
        made = self.optimizer(list(self.parameters.values()))
        optimizer, scheduler = made if isinstance(made, tuple) else (made, None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer(parameters) returns a {type(optimizer).__name__}; return a torch"
                " optimizer"
            )
        return optimizer, scheduler

    def loss_of(self, batch: Any) -> Tensor:
        """The loss of a batch. Raises TypeError if it is none."""
        loss = self.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.dim():
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise TypeError(
                f"loss(model, batch) returns a {type(loss).__name__}{shape}; return a scalar tensor"
            )
        return loss


def held_out_losses(model: nn.Module, evaluate: Callable[[], Any]) -> list[float]:
    """What `evaluate` returns, without gradients and with the model in `eval()`; afterwards each
    module is as it was. Raises ValueError for fewer than two losses."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            found = evaluate()
    finally:
        for module, training in modes.items():
            module.training = training
    several = isinstance(found, Sequence) or (isinstance(found, Tensor) and found.dim() == 1)
    losses = [float(x) for x in found] if several else []
    if len(losses) < 2:
        raise ValueError(
            f"evaluate returns {found!r}; return the losses of several held-out windows, of which"
            " an interval can be made"
        )
    return losses


def same_batch(x: Any, y: Any) -> bool:
    """Whether two batches hold the same."""
    mine, theirs = (leaves_of(each) for each in (x, y))
    return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return a is b or (type(a) is type(b) and bool(np.array_equal(a, b)))
