"""One of the torch processes: it trains run after run, under DDP on Gloo, and tells each thing it
knows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from frontier.runs import BETAS, MAX_NORM, MUON_RATE, WEIGHT_DECAY, Run, by_muon, new_model
from gradwire import LocalSGD


class Training:
    """A run that has begun."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = new_model(run.settings, run.seed)
        self.ddp = DistributedDataParallel(self.model)
        named = dict(self.model.named_parameters())
        matrices = {
            name: p for name, p in named.items() if run.subject.muon and by_muon(name, p.ndim)
        }
        self.rest = [p for name, p in named.items() if name not in matrices]
        adamw = torch.optim.AdamW(self.rest, betas=BETAS, weight_decay=WEIGHT_DECAY)
        #: Optimizers, and their learning rates to that of AdamW.
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [(adamw, 1.0)]
        if matrices:
            self.optimizers.append(
                (torch.optim.Muon(matrices.values(), weight_decay=WEIGHT_DECAY), MUON_RATE)
            )
        algorithm = run.subject.algorithm
        if isinstance(algorithm, LocalSGD):
            self.handle: Any = gw.local_sgd(self.ddp, adamw, algorithm)
        else:
            self.handle = gw.register_comm_hook(self.ddp, algorithm)

    def step(self, step: int) -> None:
        rate = self.run.settings.rate(step, self.run.rate)
        for optimizer, factor in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * rate
        inputs, targets = map(torch.from_numpy, self.run.batch(step, dist.get_rank()))
        self.model.zero_grad()
        F.cross_entropy(self.ddp(inputs).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.rest, MAX_NORM)
        for optimizer, _ in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def validation_loss(self) -> float:
        inputs, targets = map(torch.from_numpy, self.run.held_out(dist.get_rank()))
        local = self.run.subject.algorithm
        outer = (
            self.handle.outer_parameters()
            if isinstance(local, LocalSGD) and local.has_outer
            else {}
        )
        logits: Tensor = torch.func.functional_call(self.model, outer, inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()


def train(run: Run, tell: Callable[..., None]) -> None:
    training = Training(run)
    for step in range(run.settings.steps):
        training.step(step)
        if run.evaluated(step):
            tell(step=step + 1, loss=training.validation_loss())
    tell(done=True, bytes_sent=training.handle.stats().bytes_sent)


def time_steps(runs: list[Run], steps: int, tell: Callable[..., None]) -> None:
    """Seconds of each of so many steps of each run, one step of all of them in turn."""
    trainings = [Training(run) for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    for step in range(steps):
        for training, of in zip(trainings, seconds, strict=True):
            dist.barrier()
            began = time.perf_counter()
            training.step(step)
            of.append(time.perf_counter() - began)
        tell(step=step + 1)
    tell(seconds=seconds)


def work(tell_what: Callable[[Any], None], jobs: dict[str, Any]) -> None:
    """The jobs of `workers.events`. Every rank calls this."""
    runs = [Run.of(job) for job in jobs["runs"]]

    def tell(**what: Any) -> None:
        tell_what(what)

    if jobs["timed_steps"]:
        time_steps(runs, jobs["timed_steps"], tell)
        return
    for number, run in enumerate(runs):
        train(run, partial(tell, run=number))
        gc.collect()  # DDP, hook and parameters hold each other
