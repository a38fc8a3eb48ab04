"""The columns of torch: three Gloo ranks, of which the first two train and all three go on."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.state.checkpoint import gather
from gradwire.torch_backend import ZeroOptimizer, local_sgd
from tests.composition.scenario import (
    BAD,
    FEATURES,
    REPLICAS,
    STEPS,
    Moved,
    Played,
    algorithm_of,
    given,
    local_of,
    replicas_of,
    shapes_of,
)
from tests.composition.table import QUICK, cells, outcome
from tests.methods import METHODS, TWO_LEVELS, VARIANTS
from tests.parity.given import GivenGradients
from tests.torch.compare import relative, said
from tests.torch.ranks import Cases, variants
from tests.torch.training import hooked, paralleled

cases = Cases(__file__, ranks=3)

OPTIMIZER = {"lr": 0.1, "momentum": 0.5}


def arrays(x: Any) -> Any:
    """With copies as NumPy arrays in place of tensors."""
    if isinstance(x, dict):
        return {key: arrays(value) for key, value in x.items()}
    return x.detach().numpy().copy() if isinstance(x, Tensor) else x


class Run:
    """A model at a front door, fresh or with a checkpoint loaded."""

    def __init__(self, case: str, group: dist.ProcessGroup) -> None:
        self.case, self.group = case, group
        self.model = GivenGradients(
            {name: torch.zeros(shape) for name, shape in shapes_of(case).items()}
        )
        self.enter()

    def use(self, handle: Any) -> None:
        self.rank_state, self.whole_state = handle.rank_state_dict, handle.state_dict
        self.load_state = handle.load_state_dict

    def step(self, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.optimizer.zero_grad()
        self.wrapped({name: torch.from_numpy(g) for name, g in gradients.items()}).backward()
        averages = {name: p.grad for name, p in self.model.named_parameters()}
        if all(g.isfinite().all() for g in averages.values()):  # what a GradScaler asks
            averages = arrays(averages)
            self.optimizer.step()
        return arrays(averages)

    def weights(self) -> dict[str, np.ndarray]:
        return arrays(dict(self.model.named_parameters()))

    def memory(self) -> dict[str, Any]:
        state = self.rank_state()
        return arrays({**state["tensors"], "shared": state["shared"]})

    def saved(self) -> dict[str, Any]:
        """What every rank writes for itself."""
        return {
            "weights": self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "memory": self.rank_state(),
        }

    def whole(self) -> dict[str, Any]:
        """What one rank writes for all."""
        return {
            "weights": self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "memory": self.whole_state(),
        }

    def load(self, saved: dict[str, Any]) -> Run:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(torch.from_numpy(saved["weights"][name]))
        self.optimizer.load_state_dict(saved["optimizer"])
        self.load_state(saved["memory"])
        return self


class Hooked(Run):
    wrap = staticmethod(hooked)

    def enter(self) -> None:
        self.wrapped, handle = self.wrap(self.model, algorithm_of(self.case), self.group, cap=25)
        self.use(handle)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **OPTIMIZER)


class Sharded(Hooked):
    def enter(self) -> None:
        super().enter()
        options = {"process_group": self.group, **OPTIMIZER}
        self.optimizer = ZeroOptimizer(self.model.named_parameters(), torch.optim.SGD, **options)

    def saved(self) -> dict[str, Any]:
        return {
            "weights": self.weights(),
            "optimizer": self.optimizer.rank_state_dict(),
            "memory": self.rank_state(),
        }

    def whole(self) -> dict[str, Any]:
        self.optimizer.consolidate_state_dict(to=None)
        return super().whole()


class Paralleled(Hooked):
    wrap = staticmethod(paralleled)


class Local(Run):
    def enter(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        handle = local_sgd(
            self.model, self.optimizer, local_of(self.case), process_group=self.group
        )
        self.use(handle)

    def step(self, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        before = self.weights()
        for name, p in self.model.named_parameters():
            p.grad = torch.from_numpy(gradients[name])
        self.optimizer.step()
        return {name: before[name] - x for name, x in self.weights().items()}


RUNS = {"ddp": Hooked, "data_parallel": Paralleled, "zero": Sharded, "local_sgd": Local}
#: What differs from another method in numbers alone is tried at the first door: it is the same
#: program behind the others.
ROWS = {
    f"{door}, {case}": (door, case)
    for door in RUNS
    for case in METHODS
    if door == "ddp" or case in QUICK[door] or case not in VARIANTS
}
SLOW = [row for row, (door, case) in ROWS.items() if case not in QUICK[door]]


@cases.each(ROWS, slow=SLOW)
def played(world: Any, row: tuple[str, str]) -> Played:
    return play(world, *row)


def play(world: Any, door: str, case: str) -> Played:
    if outcome(case, door, "checkpoint") == "refused":
        return Played(refused=said(RUNS[door], case, world.group))
    (training, moving), mine, checkpoint = replicas_of(case), Played(), None
    pair, others = (dist.new_group(list(range(n))) for n in (training, moving))

    def of_this_rank(step: int) -> dict[str, np.ndarray]:
        return given(case, step, world.rank)

    if world.rank < training:
        run = RUNS[door](case, pair)
        mine.play(run, range(BAD + 1), of_this_rank)
        checkpoint = copy.deepcopy(
            {"own": run.saved(), "whole": run.whole()}
        )  # an optimizer gives what it goes on to change
        rest, mine.again = Played(), Played()
        rest.play(run, range(BAD + 1, STEPS), of_this_rank)
        mine.received, mine.weights = mine.received + rest.received, mine.weights + rest.weights
        mine.memory += rest.memory[1:]
        mine.again.play(
            RUNS[door](case, pair).load(checkpoint["own"]), range(BAD + 1, STEPS), of_this_rank
        )
    checkpoint, *_ = everyones = world.everyones(checkpoint)
    if world.rank >= moving:
        return mine
    run = RUNS[door](case, others).load(checkpoint["whole"])
    weights, memory = run.weights(), run.memory()
    if case in TWO_LEVELS:
        state = arrays(checkpoint["whole"]["memory"])
    else:
        ranks = [arrays(saved["own"]["memory"]) for saved in everyones[:training]]
        state = gather(NumpyOps(), ranks, algorithm_of(case).per_replica)
    mine.moved = Moved(state, weights, run.step(of_this_rank(BAD + 1)), memory)
    return mine


TRAINED = [
    case
    for door, case in ROWS.values()
    if door == "zero" and outcome(case, door, "checkpoint") == "works"
]
CELLS = cells(ROWS.values(), lambda case, door, feature: f"{door}, {case}" not in SLOW)


@pytest.mark.parametrize(("door", "case", "feature"), CELLS)
def test_cell(results: Any, door: str, case: str, feature: str) -> None:
    ranks = results(f"played[{door}, {case}]")
    FEATURES[feature](case, door, ranks if feature == "other world size" else ranks[:REPLICAS])


@pytest.mark.slow
@pytest.mark.parametrize(
    "door",
    [door for door in RUNS if outcome("all_reduce_buckets", door, "checkpoint") == "refused"],
)
def test_buckets_of_its_own_are_refused(results: Any, door: str) -> None:
    for rank in results(f"played[{door}, all_reduce_buckets]"):
        assert rank.refused.startswith(
            "ValueError: bucket_bytes=2048 of AllReduce(bucket_bytes=2048, "
        )
        assert (
            "set their size with bucket_cap_mb, of DistributedDataParallel or DataParallel"
            in rank.refused
        )


@pytest.mark.parametrize("case", variants(TRAINED, set(TRAINED) - {*QUICK["zero"]}))
def test_a_sharded_optimizer_does_what_the_optimizer_does(results: Any, case: str) -> None:
    mine, plain = (results(f"played[{door}, {case}]")[0] for door in ("zero", "ddp"))
    for step in range(STEPS):
        assert relative(mine.weights[step], plain.weights[step]) < 1e-5
