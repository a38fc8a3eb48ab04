"""Everything that DDP can do to gradients: `AllReduce` equals plain DDP bit for bit, and PowerSGD equals the simulator."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD, plan
from gradwire.torch_backend import register_comm_hook
from tests.torch.ranks import Cases
from tests.torch.training import (
    TAKEN,
    Branches,
    Checkpointed,
    Loss,
    Trace,
    branching_loss,
    collective_payloads,
    loss_on,
    mlp,
    oracle,
    relative,
    same_bits,
    train,
)

cases = Cases(__file__, ranks=2)
results = cases.fixture()

ALGORITHM = PowerSGD(rank=2)


def any_rank_takes(step: int, parameter: str) -> bool:
    branch = parameter.split(".")[0]
    return branch == "trunk" or any(branch in taken for taken in TAKEN[step])


#: Two micro-batches a step, of which the first is accumulated: a branch may be taken in that one only.
TAKEN_IN_PARTS = [
    (("left", "right"), ("left", "right")),
    (("left", "right"), ("left", "right")),
    (("left",), ()),
    ((), ()),
    ((), ("right",)),
    ((), ()),
    ((), ()),
    ((), ()),
    ((), ("left",)),
    (("right",), ("left", "right")),
]


def any_rank_takes_in_parts(step: int, parameter: str) -> bool:
    branch = parameter.split(".")[0]
    both = [*TAKEN_IN_PARTS[2 * step], *TAKEN_IN_PARTS[2 * step + 1]]
    return branch == "trunk" or any(branch in taken for taken in both)


class Odd(nn.Module):
    """Parameters without dimensions and without elements."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 4))
        self.body = mlp(40, 32, 32)
        self.no_columns = nn.Parameter(torch.empty(4, 0))
        self.shift = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x):
        nothing = self.nothing.sum() + self.no_rows.sum() + self.no_columns.sum()
        return self.body(x * self.scale) + self.shift + nothing


class Tied(nn.Module):
    """The same weight twice."""

    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = mlp(40, 40), nn.Linear(40, 40), nn.Linear(40, 40)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(self.body(x))))


class Convolutions(nn.Module):
    """A network whose weights, and so whose gradients, lie in memory channel by channel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 24, 3), nn.Tanh(), nn.Flatten(1), nn.Linear(96, 8)
        ).to(memory_format=torch.channels_last)
        assert not self.body[2].weight.is_contiguous()

    def forward(self, x):
        return self.body(x.view(-1, 4, 4, 4).contiguous(memory_format=torch.channels_last))


class Transposed(nn.Module):
    """A weight that lies in memory column by column."""

    def __init__(self):
        super().__init__()
        self.body = mlp(40, 36, 32)
        self.weight = nn.Parameter(torch.randn(40, 32).t() / 6)

    def forward(self, x):
        return self.body(x) @ self.weight


class Mixed(nn.Module):
    """Layers of three dtypes."""

    def __init__(self):
        super().__init__()
        layers = mlp(40, 36, 32, 28, 24)
        self.layers = nn.ModuleList([layers[0], layers[2].double(), layers[4].bfloat16(), layers[6]])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def model_of(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: mlp(40, 36, 32, 28).to(dtype)


@dataclass
class Scenario:
    """A model, what is done to it, and how near float64 its arithmetic comes, for how many steps.

    In the half precisions what error feedback carries on is itself rounded, and after some steps rounding is all that is compared: NumPy's
    own bfloat16 is no nearer to float64. In a step four roundings, each by half an epsilon at most, follow one another (the input, P, Q, and
    what is given back), on whatever machine: two epsilon.
    """

    model: Callable[[], nn.Module]
    loss: Loss = field(default_factory=lambda: loss_on(40))
    ddp: dict[str, Any] = field(default_factory=dict)
    steps: int = 7
    micro_batches: int = 1
    tolerance: float = 1e-5
    compared: int | None = None
    compresses: bool = True
    used: Callable[[int, str], bool] | None = None


SCENARIOS = {
    "nothing special": Scenario(model_of(torch.float32)),
    "find_unused_parameters": Scenario(
        Branches, branching_loss, {"find_unused_parameters": True}, used=any_rank_takes, steps=len(TAKEN)
    ),
    "find_unused_parameters and no_sync": Scenario(
        Branches,
        partial(branching_loss, taken=TAKEN_IN_PARTS),
        {"find_unused_parameters": True},
        micro_batches=2,
        used=any_rank_takes_in_parts,
        steps=len(TAKEN_IN_PARTS) // 2,
    ),
    "static_graph": Scenario(model_of(torch.float32), ddp={"static_graph": True}),
    "gradient_as_bucket_view": Scenario(model_of(torch.float32), ddp={"gradient_as_bucket_view": True}),
    "no_sync": Scenario(model_of(torch.float32), loss_on(40, 6), micro_batches=4),
    "no_sync and gradient_as_bucket_view": Scenario(
        model_of(torch.float32), loss_on(40, 6), {"gradient_as_bucket_view": True}, micro_batches=4
    ),
    "float64": Scenario(model_of(torch.float64), loss_on(40, dtype=torch.float64), tolerance=1e-12),
    "bfloat16": Scenario(
        model_of(torch.bfloat16),
        loss_on(40, dtype=torch.bfloat16, spread=1.0),
        tolerance=2 * torch.finfo(torch.bfloat16).eps,
        compared=2,
    ),
    "float16": Scenario(
        model_of(torch.float16),
        loss_on(40, dtype=torch.float16, spread=1.0),
        tolerance=2 * torch.finfo(torch.float16).eps,
        compared=2,
    ),
    "several dtypes": Scenario(
        Mixed, loss_on(40, spread=1.0), tolerance=2 * torch.finfo(torch.bfloat16).eps, compared=2
    ),
    "no dimensions, no elements": Scenario(Odd),
    "tied weights": Scenario(Tied),
    "channels_last and gradient_as_bucket_view": Scenario(Convolutions, loss_on(64), {"gradient_as_bucket_view": True}),
    "a transposed weight": Scenario(Transposed),
    "nothing to compress": Scenario(lambda: mlp(5, 4, 3), loss_on(5), compresses=False),
    "checkpoint": Scenario(lambda: Checkpointed(reentrant=False), loss_on(64)),
    "reentrant checkpoint": Scenario(lambda: Checkpointed(reentrant=True), loss_on(64), {"static_graph": True}),
}


@cases.each(SCENARIOS)
def trained(world, scenario):
    seen = {}
    for how, algorithm in {"plain": None, "all-reduce": AllReduce(), "PowerSGD": ALGORITHM}.items():
        ddp = DistributedDataParallel(scenario.model(), process_group=world.group, bucket_cap_mb=0.006, **scenario.ddp)
        # Groups of a few buckets each, so that groups of one step have to be kept apart.
        handle = algorithm and register_comm_hook(ddp, algorithm, message_bytes=1200)
        with collective_payloads() as sent:
            trace = train(ddp, scenario.loss, scenario.steps, micro_batches=scenario.micro_batches)
        seen[how] = {
            "trace": trace,
            "bytes": sum(p.nbytes for p in sent),
            "stats": handle and handle.stats(),
            "dtypes": {n: str(p.dtype).removeprefix("torch.") for n, p in ddp.module.named_parameters()},
        }
    return seen


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_reduce_equals_plain_ddp(results, name):
    for rank in results(f"trained[{name}]"):
        # With two ranks a sum has only one order, however many gradients share a message.
        assert same_bits(rank["all-reduce"]["trace"].given, rank["plain"]["trace"].given)
        assert same_bits(rank["all-reduce"]["trace"].weights, rank["plain"]["trace"].weights)


@pytest.mark.parametrize("name", SCENARIOS)
def test_power_sgd_equals_the_simulator(results, name):
    scenario = SCENARIOS[name]
    ranks = results(f"trained[{name}]")
    expected = oracle(ALGORITHM, [r["PowerSGD"]["trace"] for r in ranks], used=scenario.used)
    for rank in ranks:
        compared = list(zip(rank["PowerSGD"]["trace"].given, expected, strict=True))[: scenario.compared]
        for given, right in compared:
            assert relative({n: g for n, g in given.items() if n in right}, right) < scenario.tolerance


@pytest.mark.parametrize("name", SCENARIOS)
def test_power_sgd_leaves_the_same_bits_on_all_ranks_and_has_compressed(results, name):
    scenario = SCENARIOS[name]
    first, second = (r["PowerSGD"] for r in results(f"trained[{name}]"))
    assert same_bits(first["trace"].weights, second["trace"].weights)
    assert all(w.isfinite().all() for w in first["trace"].weights.values())
    assert first["bytes"] == first["stats"].bytes_sent == second["bytes"]
    assert first["stats"].skipped_steps == 0
    assert first["stats"].steps == scenario.steps
    compressed = first["bytes"] < first["stats"].dense_bytes / 2
    assert compressed is scenario.compresses
    if not scenario.compresses:
        assert first["bytes"] == first["stats"].dense_bytes


def test_gradients_that_no_rank_uses_stay_none(results):
    (nobody,) = [step for step, taken in enumerate(TAKEN) if not any(taken)]
    for rank in results("trained[find_unused_parameters]"):
        given = rank["PowerSGD"]["trace"].given[nobody]
        assert {name.split(".")[0] for name, g in given.items() if g is None} == {"left", "right"}


@cases.each({"four micro-batches": 4, "one batch": 1})
def accumulated(world, micro_batches):
    def loss(model, rank, part):
        if micro_batches == 4:
            return loss_on(40, 6)(model, rank, part)
        return sum(loss_on(40, 6)(model, rank, 4 * part + i) for i in range(4)) / 4

    ddp = DistributedDataParallel(mlp(40, 36, 32), process_group=world.group, bucket_cap_mb=0.006)
    handle = register_comm_hook(ddp, ALGORITHM)
    trace = train(ddp, loss, 6, micro_batches=micro_batches, local=False)
    return {"weights": trace.weights, "stats": handle.stats()}


def test_accumulation_equals_one_large_batch_and_communicates_once(results):
    for four, one in zip(results("accumulated[four micro-batches]"), results("accumulated[one batch]"), strict=True):
        assert relative(four["weights"], one["weights"]) < 1e-6
        assert four["stats"] == one["stats"]
        assert four["stats"].steps == 6


JOINED = {"plain": None, "all-reduce": AllReduce(), "PowerSGD": ALGORITHM}


@cases.each(JOINED)
def uneven(world, algorithm):
    """Rank 0 runs out of data after 3 steps, rank 1 goes on to 7."""
    ddp = DistributedDataParallel(mlp(40, 36, 32, 28), process_group=world.group, bucket_cap_mb=0.006)
    handle = algorithm and register_comm_hook(ddp, algorithm, message_bytes=0)
    with ddp.join():
        trace = train(ddp, loss_on(40), 3 if world.rank == 0 else 7)
    trace.weights = {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    return {"trace": trace, "stats": handle and handle.stats()}


def test_join_with_uneven_inputs_equals_plain_ddp_and_the_simulator(results):
    plain, averaged, compressed = (results(f"uneven[{how}]") for how in JOINED)
    for mine, right in zip(averaged, plain, strict=True):
        assert same_bits(mine["trace"].weights, right["trace"].weights)
        assert same_bits(mine["trace"].given, right["trace"].given)
    first, second = (r["trace"] for r in compressed)
    assert same_bits(first.weights, second.weights)
    first.local += [{n: torch.zeros_like(g) for n, g in first.local[0].items()}] * 4
    expected = oracle(ALGORITHM, [first, second])
    for given, right in zip(second.given, expected, strict=True):
        assert relative(given, right) < 1e-5
    assert [r["stats"].steps for r in compressed] == [7, 7]


@cases.case
def frozen_for_a_while(world):
    """The second layer takes part in steps 0 to 2 and 6 to 8, and is frozen in between."""
    ddp = DistributedDataParallel(
        mlp(40, 36, 32, 28), process_group=world.group, bucket_cap_mb=0.006, find_unused_parameters=True
    )
    handle = register_comm_hook(ddp, ALGORITHM)
    layer = ddp.module[2]
    pieces, memories = [], []
    for steps in (range(3), range(3, 6), range(6, 9)):
        layer.requires_grad_(steps.start != 3)
        pieces.append(train(ddp, loss_on(40), steps))
        memories.append(handle.rank_state_dict()["tensors"]["2.weight"])
        layer.zero_grad()
    return {"pieces": pieces, "memories": memories}


def test_a_layer_frozen_after_wrapping_keeps_its_weights_and_memory_and_trains_again(results):
    ranks = results("frozen_for_a_while")
    for rank in ranks:
        before, meanwhile, after = rank["pieces"]
        assert same_bits(meanwhile.weights["2.weight"], before.weights["2.weight"])
        assert same_bits(rank["memories"][1], rank["memories"][0])
        assert not same_bits(meanwhile.weights["0.weight"], before.weights["0.weight"])
        assert not same_bits(after.weights["2.weight"], before.weights["2.weight"])
        assert not same_bits(rank["memories"][2], rank["memories"][0])
    assert same_bits(ranks[0]["pieces"][2].weights, ranks[1]["pieces"][2].weights)
    for rank in ranks:  # one long trace, in which the frozen layer is missing for three steps
        first, *others = rank["pieces"]
        for other in others:
            first.local += other.local
            first.given += other.given
    expected = oracle(
        ALGORITHM, [r["pieces"][0] for r in ranks], used=lambda step, n: n[0] != "2" or step not in (3, 4, 5)
    )
    for given, right in zip(ranks[0]["pieces"][0].given, expected, strict=True):
        assert relative(given, right) < 1e-5


@cases.case
def ignored_parameters(world):
    """Parameters that DDP was told to leave alone, and one that was frozen before it was wrapped."""
    model = mlp(40, 36, 32, 28)
    model[4].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp = DistributedDataParallel(model, process_group=world.group)
    handle = register_comm_hook(ddp, ALGORITHM)
    trace = train(ddp, loss_on(40), 3)
    return {"trace": trace, "memory": list(handle.rank_state_dict()["tensors"]), "stats": handle.stats()}


def test_parameters_that_ddp_leaves_alone_have_no_memory_and_are_not_sent(results):
    averaged = {name: tuple(p.shape) for name, p in mlp(40, 36, 32, 28).named_parameters() if name[0] in "02"}
    del averaged["0.weight"]
    for rank in results("ignored_parameters"):
        assert rank["memory"] == ["2.weight"]
        assert rank["stats"].bytes_sent == 3 * plan(averaged, ALGORITHM).wire_bytes
        assert same_bits(rank["trace"].given[0]["0.weight"], rank["trace"].local[0]["0.weight"])


@cases.case
def registered_late(world):
    """After two uncompressed steps, when buckets have been rebuilt."""
    ddp = DistributedDataParallel(mlp(40, 36, 32, 28), process_group=world.group, bucket_cap_mb=0.006)
    train(ddp, loss_on(40), 2, local=False)
    register_comm_hook(ddp, ALGORITHM, message_bytes=0)
    return train(ddp, loss_on(40), range(2, 6))


def test_a_hook_can_be_registered_between_steps(results):
    traces = results("registered_late")
    expected = oracle(ALGORITHM, traces)
    for trace in traces:
        for given, right in zip(trace.given, expected, strict=True):
            assert relative(given, right) < 1e-5


TWO = (ALGORITHM, PowerSGD(rank=1, half_step=True))


@cases.case
def two_wrappers(world):
    """Two wrapped models in one backward pass, each with an algorithm of its own."""
    models = [mlp(40, 36, 32, 40), mlp(40, 32, 28)]
    both = [DistributedDataParallel(m, process_group=world.group, bucket_cap_mb=0.006) for m in models]
    for ddp, algorithm in zip(both, TWO, strict=True):
        register_comm_hook(ddp, algorithm, message_bytes=0)
    traces = [Trace(), Trace()]
    for step in range(5):
        twins = copy.deepcopy(models)
        for first, second in (twins, both):
            for each in both:
                each.zero_grad()
            loss_on(40)(nn.Sequential(first, second), world.rank, step).backward()
        for trace, twin, model in zip(traces, twins, models, strict=True):
            trace.local.append({n: p.grad for n, p in twin.named_parameters()})
            trace.given.append({n: p.grad.clone() for n, p in model.named_parameters()})
    return traces


def test_two_wrapped_models_in_one_backward_pass_do_not_disturb_each_other(results):
    ranks = results("two_wrappers")
    for i, algorithm in enumerate(TWO):
        traces = [rank[i] for rank in ranks]
        for given, right in zip(traces[0].given, oracle(algorithm, traces), strict=True):
            assert relative(given, right) < 1e-5
        assert same_bits(traces[0].given, traces[1].given)


if __name__ == "__main__":
    cases.main()
