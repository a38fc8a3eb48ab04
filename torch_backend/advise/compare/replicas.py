"""R replicas of a `Training` on one device, a step at a time: the real driver, or the real handle
of local SGD, and one model that they share.

The bits are those of R processes on the CPU that train with `Averager`, or with `local_sgd`, over
Gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.core.advise.compare.batches import endless
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.plan.dry_run import size_of
from gradwire.core.text.wording import some
from gradwire.torch_backend.advise.compare.generators import drawn, drawn_by, put_back
from gradwire.torch_backend.advise.compare.one_process import World
from gradwire.torch_backend.advise.compare.training import Training, held_out_losses, same_batch
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.local_sgd.buffers import averaged_by_default
from gradwire.torch_backend.local_sgd.checks import fitted
from gradwire.torch_backend.local_sgd.handle import LocalSGDHandle
from gradwire.torch_backend.local_sgd.moments import Moments
from gradwire.torch_backend.local_sgd.target import Target
from gradwire.torch_backend.ops.full_precision import plain_arithmetic
from gradwire.torch_backend.setup.assumptions import Assumptions
from gradwire.torch_backend.setup.consistency import algorithm_obstacle
from gradwire.torch_backend.setup.optimizer_state import weights_in
from gradwire.torch_backend.setup.registration import require_gradient_algorithm, tried

#: A parameter with its gradient and the moments of AdamW takes so many times its bytes.
OF_A_REPLICA = 4


class Replicas:
    """Replicas that average gradients: equal, so one set of parameters and one optimizer serve them
    all.

    Args:
        training: theirs.
        algorithm: how gradients are averaged.
        replicas: how many.
        seed: of what they draw.

    Attributes:
        rate: the largest learning rate of the last step.

    Raises:
        ValueError: what the algorithm refuses, by name; or there is no memory for so many.
    """

    def __init__(self, training: Training, algorithm: Any, replicas: int, seed: int) -> None:
        self.training, self.replicas = training, replicas
        self.parameters, self.device = training.parameters, training.device
        self.world = World(replicas)
        self.rate = 0.0
        require_memory(self._bytes_of(size_in_bytes(self.parameters)), replicas, self.device)
        self._buffers = [
            {name: b.detach().clone() for name, b in training.model.named_buffers()}
            for _ in range(replicas)
        ]
        self._generators = [drawn_by(rank, seed, self.device) for rank in range(replicas)]
        self._batches: list[Iterator[Any]] = [
            endless(partial(training.batches, rank, replicas)) for rank in range(replicas)
        ]
        self._first: Any = None
        self._compared = replicas == 1
        self._set_up(algorithm)

    def _set_up(self, algorithm: Any) -> None:
        self._optimizer, self._scheduler = self.training.made_optimizer()
        self._drivers = self._on_each(
            lambda rank: driver_of(algorithm, self.world.groups(rank), self.parameters)
        )

    def step(self) -> float:
        """A step of all replicas. Returns the mean of their losses."""
        losses, gradients = [], []
        for rank in range(self.replicas):
            with self._as(rank):
                losses.append(self._backward(rank))
                gradients.append({name: p.grad for name, p in self.parameters.items()})
        averages = self._averaged(self._drivers, gradients)
        with self._as(0):
            for name, p in self.parameters.items():
                p.grad = averages[0][name]
            self.rate = self._update(self._optimizer, self._scheduler)
        return float(np.mean(losses))

    @property
    def sent(self) -> int:
        """Bytes that each replica has sent so far."""
        return int(self._drivers[0].collectives.sent.nbytes)

    def held_out(self) -> list[float]:
        """The losses of the held-out windows, under what replicas have in common."""
        training = self.training
        assert training.evaluate is not None
        before, own = drawn(self.device), self._generators[0]
        with self._as(0):
            found = held_out_losses(training.model, partial(training.evaluate, training.model))
        self._generators[0] = own  # methods that are looked at in other steps draw the same
        put_back(before, self.device)
        return found

    def _on_each(self, function: Any) -> list[Any]:
        """Call it on each replica within one setting of arithmetic, which drivers would set and set
        back in turns."""
        with plain_arithmetic(self.device):
            return self.world.on_each(function)

    def _averaged(
        self, drivers: list[Driver], gradients: list[dict[str, Tensor | None]]
    ) -> list[dict[str, Tensor | None]]:
        """The averages for each replica; None of what no replica has used."""
        absent = [[name for name, g in own.items() if g is None] for own in gradients]
        given = [
            {
                name: torch.zeros_like(self.parameters[name]) if g is None else g
                for name, g in own.items()
            }
            for own in gradients
        ]
        count = any(absent)

        def add(rank: int) -> None:
            drivers[rank].add(
                given[rank], first=True, last=True, unused=absent[rank] if count else None
            )

        self._on_each(add)
        nobody = set.intersection(*map(set, absent))
        return [{name: None if name in nobody else g for name, g in own.items()} for own in given]

    def _backward(self, rank: int) -> float:
        """The gradients of a replica, in the parameters. Returns its loss."""
        training, losses = self.training, []
        training.model.zero_grad(set_to_none=True)
        for _ in range(training.accumulate):
            batch = next(self._batches[rank])
            self._require_shards(rank, batch)
            loss = training.loss_of(batch)
            (loss / training.accumulate if training.accumulate > 1 else loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        for name, p in self.parameters.items():
            if p.grad is not None and p.grad.is_sparse:
                raise ValueError(
                    f"the gradient of {name!r} is sparse; build the embedding with sparse=False"
                )
        return float(np.mean(losses))

    def _require_shards(self, rank: int, batch: Any) -> None:
        if self._compared:
            return
        if rank == 0:
            self._first = batch if self._first is None else self._first
            return
        self._compared = True
        if same_batch(self._first, batch):
            raise ValueError(
                f"batches(0, {self.replicas}) and batches(1, {self.replicas}) begin with the same"
                " batch; give each replica its own shard"
            )
        self._first = None

    def _update(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
        self.training.after_backward()
        rate = largest_rate(optimizer)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return rate

    @contextmanager
    def _as(self, rank: int) -> Iterator[None]:
        """Set the buffers and the random generators of a replica, within."""
        before = drawn(self.device)
        put_back(self._generators[rank], self.device)
        own = self._buffers[rank]
        with torch.no_grad():
            for name, b in self._named_buffers(rank).items():
                b.copy_(own[name])
        yield
        with torch.no_grad():
            for name, b in self._named_buffers(rank).items():
                own[name].copy_(b)
        self._generators[rank] = drawn(self.device)
        put_back(before, self.device)

    def _named_buffers(self, rank: int) -> dict[str, Tensor]:
        """The buffers of the model by name. Raises ValueError if they are not those with which
        training began."""
        found, own = dict(self.training.model.named_buffers()), self._buffers[rank]
        for name in found.keys() | own.keys():
            mine, theirs = own.get(name), found.get(name)
            if (
                mine is None
                or theirs is None
                or (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype)
            ):
                raise ValueError(
                    f"buffer {name!r} comes, goes or changes its shape or dtype in training, and"
                    " cannot be kept for each replica; register it once"
                )
        return found

    def _bytes_of(self, parameters: int) -> int:
        """What replicas take beside the model, of so many bytes of parameters: a gradient and a
        residual each."""
        return 2 * self.replicas * parameters


class LocalReplicas(Replicas):
    """Replicas that train by themselves: a set of parameters and an optimizer for each, which have
    their turns in the model."""

    def _set_up(self, algorithm: Any) -> None:
        self._sets = [
            {name: p.detach().clone() for name, p in self.parameters.items()}
            for _ in range(self.replicas)
        ]
        made = [self.training.made_optimizer() for _ in range(self.replicas)]
        self._optimizers, self._schedulers = [each[0] for each in made], [each[1] for each in made]
        buffers = self._buffers

        def handle(rank: int) -> tuple[LocalSGDHandle, OwnParameters]:
            return handle_of(
                algorithm,
                self.world.groups(rank),
                self._sets[rank],
                self.parameters,
                buffers[rank],
            )

        handles = self._on_each(handle)
        self._handles, self._targets = [each[0] for each in handles], [each[1] for each in handles]

    def step(self) -> float:
        drivers = [self._targets[rank].driver for rank in range(self.replicas)]
        losses, gradients = [], []
        for rank in range(self.replicas):
            with self._as(rank):
                losses.append(self._backward(rank))
                gradients.append({name: p.grad for name, p in self.parameters.items()})
                if drivers[rank] is None:
                    self._step_of(rank)
        if all(driver is not None for driver in drivers):
            averages = self._averaged(
                [driver for driver in drivers if driver is not None], gradients
            )
            for rank in range(self.replicas):
                with self._as(rank):
                    for name, p in self.parameters.items():
                        p.grad = averages[rank][name]
                    self._step_of(rank)
        self._on_each(lambda rank: self._handles[rank].step())
        return float(np.mean(losses))

    def _step_of(self, rank: int) -> None:
        self._handles[rank]._begin()
        self.rate = self._update(self._optimizers[rank], self._schedulers[rank])
        if self._handles[rank].steps == 0:
            self._refuse_weights_in(self._optimizers[rank])

    def _refuse_weights_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for an optimizer whose state, after its first step, holds weights: local
        SGD averages them with the parameters, and here nobody would."""
        masters, others = weights_in(optimizer, self.parameters.values())
        if kept := sorted(masters | others):
            name = type(optimizer).__name__
            raise ValueError(
                f"{name} keeps weights in its state, as {some(kept)}, which replicas in turns do"
                " not average: local SGD cannot be compared with it. Give torch.optim.AdamW or the"
                " like, on parameters in float32"
            )

    @property
    def sent(self) -> int:
        return int(self._handles[0].stats().bytes_sent)

    def held_out(self) -> list[float]:
        """The held-out loss under the outer parameters, if there are any, or the mean of those of
        the replicas."""
        own, self._sets = self._sets, [in_common(self._handles[0], self._sets)] * self.replicas
        try:
            return super().held_out()
        finally:
            self._sets = own

    @contextmanager
    def _as(self, rank: int) -> Iterator[None]:
        for name, p in self.parameters.items():
            p.data = self._sets[rank][name]
        with super()._as(rank):
            yield

    def _bytes_of(self, parameters: int) -> int:
        return OF_A_REPLICA * self.replicas * parameters


class OwnParameters(Target):
    """The parameters of one replica, whose gradients the driver here averages, if there is one."""

    averages = True
    driver: Driver | None = None

    def average_by(self, driver: Driver) -> None:
        self.driver = driver


def in_common(handle: LocalSGDHandle, sets: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The parameters that stand for all replicas of local SGD, whose own are `sets`: theirs where
    they are equal, the outer ones, or the mean."""
    if handle.synchronized:
        return dict(sets[0])
    if handle.local.has_outer and handle.steps > handle.local.start_step:
        return {name: x.to(sets[0][name].dtype) for name, x in handle.outer_parameters().items()}
    return {
        name: torch.stack([own[name].detach() for own in sets]).mean(0).to(x.dtype)
        for name, x in sets[0].items()
    }


def driver_of(algorithm: Any, groups: ProcessGroups, parameters: Mapping[str, Tensor]) -> Driver:
    """The driver of one replica. Raises ValueError for what the algorithm refuses, by name."""
    require_gradient_algorithm(algorithm)
    specs = specs_of(parameters)
    device = next(iter(parameters.values())).device
    why_not = algorithm_obstacle(algorithm, in_buckets=False)
    if why_not := why_not or tried(algorithm, specs, groups.whole.size(), device).obstacle:
        raise ValueError(why_not)
    driver = Driver(algorithm, specs, device, groups)
    driver.watch.logs = False
    return driver


def handle_of(
    local: LocalSGD,
    groups: ProcessGroups,
    own: Mapping[str, Tensor],
    stepped: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> tuple[LocalSGDHandle, OwnParameters]:
    """The handle of one replica, and its parameters, `own`, which the optimizer knows as `stepped`.
    Raises ValueError for what does not fit."""
    target = OwnParameters(own, groups.whole)
    fit_here = fitted(local, groups.whole, own, averager=True)
    if fit_here.obstacle:
        raise ValueError(fit_here.obstacle)
    moments = Moments(None, stepped, "keep", groups.whole)  # kept, as they are
    averaged = {name: b for name, b in buffers.items() if averaged_by_default(b)}
    nothing = Assumptions("compare", {}, {}, None, None, "")  # replicas take turns in one model
    handle = LocalSGDHandle(fit_here.local, target, averaged, moments, groups, nothing)
    handle._watch.logs = False
    return handle, target


def replicas_of(training: Training, algorithm: Any, replicas: int, seed: int) -> Replicas:
    """Replicas under a method. Raises as `Replicas`, and ValueError for nodes that are not given by
    numbers."""
    if getattr(algorithm, "mentions_nodes", False):
        raise ValueError(
            f"{algorithm!r}: replicas of one process are on no nodes; say who shares one by a"
            ' number in place of "node"'
        )
    kind = LocalReplicas if isinstance(algorithm, LocalSGD) else Replicas
    return kind(training, algorithm, replicas, seed)


def largest_rate(optimizer: torch.optim.Optimizer) -> float:
    """The largest learning rate of its groups; 0.0 without any."""
    return max(
        (float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=0.0
    )


def size_in_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The bytes of all of them."""
    return sum(x.numel() * x.element_size() for x in tensors.values())


def require_memory(needed: int, replicas: int, device: torch.device) -> None:
    """Raise ValueError if so many bytes are not free."""
    free = free_bytes(device)
    if free is not None and needed > free:
        raise ValueError(
            f"replicas={replicas} take about {size_of(needed)} on {device}, of which"
            f" {size_of(free)} are free; give fewer replicas"
        )


def free_bytes(device: torch.device) -> int | None:
    """The bytes of free memory; None where nobody says."""
    if device.type == "cuda":
        # What torch keeps of tensors that are gone is free too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        with open("/proc/meminfo") as file:
            return next(
                1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return None


def parameters_of(replicas: Replicas, rank: int) -> dict[str, Tensor]:
    """Those of one replica."""
    if isinstance(replicas, LocalReplicas):
        return replicas._sets[rank]
    return {name: p.detach() for name, p in replicas.parameters.items()}
