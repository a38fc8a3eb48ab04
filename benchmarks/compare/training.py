"""The frontier's training, with its text, weights, schedule and windows, as `gradwire compare` is
given it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from frontier.runs import BETAS, MAX_NORM, WEIGHT_DECAY, Settings, new_model
from torch import Tensor, nn

from gradwire.torch_backend import Training


def training_of(settings: Settings, rate: float, seed: int) -> Training:
    """With this peak learning rate. Each of the windows counts by itself."""
    model = new_model(settings, seed)
    inputs, targets = map(
        torch.from_numpy, settings.text.validation_batch(0, 1, settings.windows, settings.context)
    )

    def optimizer(parameters: list[nn.Parameter]) -> Any:
        made = torch.optim.AdamW(parameters, lr=1.0, betas=BETAS, weight_decay=WEIGHT_DECAY)
        return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: settings.rate(step, rate))

    def batches(replica: int, replicas: int) -> Iterator[Any]:
        for step in itertools.count():
            batch = settings.text.batch(seed, step, replica, settings.batch, settings.context)
            yield tuple(map(torch.from_numpy, batch))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def evaluate(model: nn.Module) -> Tensor:
        each = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        return each.view(targets.shape).mean(1)

    def clip() -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    return Training(model, optimizer, batches, loss, after_backward=clip, evaluate=evaluate)
