"""Everything that DDP can do to gradients: `AllReduce` by hook and `DataParallel` equal plain DDP bit for bit, and PowerSGD equals the simulator."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD, plan
from tests.torch.compare import same_bits, weights
from tests.torch.models import Branches, Checkpointed, Layers, Loss, branching_loss, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import Trace, collective_payloads, distance, hooked, paralleled, train

cases = Cases(__file__, ranks=2)

ALGORITHM = PowerSGD(rank=2)


#: Two micro-batches a step, of which the first is accumulated: a branch may be taken in that one only.
TAKEN = [
    *((("left", "right"), ("left", "right")), (("left", "right"), ("left", "right"))),
    *((("left",), ()), ((), ())),
    *(((), ("right",)), ((), ())),
    *(((), ()), ((), ())),
    *(((), ("left",)), (("right",), ("left", "right"))),
]


def any_rank_takes(step: int, parameter: str) -> bool:
    """In any of the micro-batches of a step."""
    branch = parameter.split(".")[0]
    return branch == "trunk" or any(branch in one for one in itertools.chain(*TAKEN[2 * step : 2 * step + 2]))


def odd():
    """Parameters without dimensions and without elements, a weight that comes twice, weights that lie in memory channel by channel and column by column."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 24, 3), nn.Tanh(), nn.Flatten(1), nn.Linear(96, 40)
    ).to(memory_format=torch.channels_last)
    parts = {
        "scale": torch.tensor(1.5),
        "shift": torch.tensor(-0.5),
        **{"nothing": torch.empty(0), "no_rows": torch.empty(0, 4), "no_columns": torch.empty(4, 0)},
        "weight": torch.randn(32, 40).t() / 6,
    }
    first, second = nn.Linear(40, 40), nn.Linear(40, 40)
    second.weight = first.weight
    assert not body[2].weight.is_contiguous()

    def forward(self, x):
        y = self.body(x.view(-1, 4, 4, 4).contiguous(memory_format=torch.channels_last))
        y = self.second(torch.tanh(self.first(torch.tanh(y)))) @ self.weight
        return y * self.scale + self.shift + self.nothing.sum() + self.no_rows.sum() + self.no_columns.sum()

    parameters = {name: nn.Parameter(x) for name, x in parts.items()}
    return Layers(forward, **parameters, body=body, first=first, second=second)


def mixed():
    """Layers of three dtypes."""
    layers = mlp(40, 36, 32, 28, 24)
    layers = nn.ModuleList([layers[0], layers[2].double(), layers[4].bfloat16(), layers[6]])

    def forward(self, x):
        return functools.reduce(lambda x, layer: torch.tanh(layer(x.to(layer.weight.dtype))), self.layers, x)

    return Layers(forward, layers=layers)


def model_of(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: mlp(40, 36, 32, 28).to(dtype)


@dataclass
class Scenario:
    """A model, what is done to it, and how near float64 its arithmetic comes, for how many steps.

    In the half precisions what error feedback carries on is itself rounded, and after some steps rounding is all that is compared. In a step four
    roundings, each by half an epsilon at most, follow one another (the input, P, Q, and what is given back): two epsilon.
    """

    model: Callable[[], nn.Module]
    loss: Loss = field(default_factory=lambda: loss_on(40))
    ddp: dict[str, Any] = field(default_factory=dict)
    steps: int = 5
    micro_batches: int = 1
    tolerance: float = 1e-5
    compared: int | None = None
    compresses: bool = True
    used: Callable[[int, str], bool] | None = None


HALF = {torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps, torch.float16: 2 * torch.finfo(torch.float16).eps}
UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
SCENARIOS = {
    "find_unused_parameters and no_sync": Scenario(
        Branches, partial(branching_loss, taken=TAKEN), UNUSED, micro_batches=2, used=any_rank_takes
    ),
    "no_sync and gradient_as_bucket_view": Scenario(model_of(torch.float32), loss_on(40, 6), VIEWS, micro_batches=4),
    "float64": Scenario(model_of(torch.float64), loss_on(40, dtype=torch.float64), tolerance=1e-12),
    **{
        str(dtype).removeprefix("torch."): Scenario(
            model_of(dtype), loss_on(40, dtype=dtype, spread=1.0), tolerance=tolerance, compared=2
        )
        for dtype, tolerance in HALF.items()
    },
    "several dtypes": Scenario(mixed, loss_on(40, spread=1.0), tolerance=HALF[torch.bfloat16], compared=2),
    "odd": Scenario(odd, loss_on(64), VIEWS),
    "nothing to compress": Scenario(lambda: mlp(5, 4, 3), loss_on(5), compresses=False),
    "reentrant checkpoint and static_graph": Scenario(
        lambda: Checkpointed(reentrant=True), loss_on(64), {"static_graph": True}
    ),
    "checkpoints of a layer that comes twice": Scenario(
        lambda: Checkpointed(reentrant=False, shared=True), loss_on(64)
    ),
}
#: `DataParallel` first: what was sent is looked at of the last.
WRAPPED = {
    "DataParallel": (paralleled, AllReduce()),
    "plain": (hooked, None),
    "all-reduce": (hooked, AllReduce()),
    "PowerSGD": (hooked, ALGORITHM),
}


@cases.each(SCENARIOS)
def test_all_reduce_equals_plain_ddp_and_power_sgd_the_simulator(world, scenario):
    traces = {}
    for how, (wrap, algorithm) in WRAPPED.items():
        options = {name: x for name, x in scenario.ddp.items() if how != "DataParallel" or name in UNUSED}
        # Groups of a few buckets each, so that groups of one step have to be kept apart.
        wrapped, handle = wrap(scenario.model(), algorithm, world.group, message_bytes=1200, **options)
        with collective_payloads() as sent:
            traces[how] = train(
                wrapped, scenario.loss, scenario.steps, micro_batches=scenario.micro_batches, local=how == "PowerSGD"
            )
        assert all(p.grad is None or p.grad.stride() == p.stride() for p in wrapped.parameters())
    # With two ranks a sum has only one order, however many gradients share a message.
    for how in ("all-reduce", "DataParallel"):
        assert same_bits(traces[how].given, traces["plain"].given)
        assert same_bits(traces[how].weights, traces["plain"].weights)
    trace, stats = traces["PowerSGD"], handle.stats()
    assert distance(ALGORITHM, world.everyones(trace), scenario.compared, used=scenario.used) < scenario.tolerance
    assert world.agree(trace.weights)
    assert all(w.isfinite().all() for w in trace.weights.values())
    assert (stats.steps, stats.skipped_steps) == (scenario.steps, 0)
    nbytes = sum(p.nbytes for p in sent)
    assert world.agree(nbytes)
    assert nbytes == stats.bytes_sent
    assert nbytes < stats.dense_bytes / 2 if scenario.compresses else nbytes == stats.dense_bytes
    if scenario.used is any_rank_takes:  # what no rank uses stays None
        assert {n.split(".")[0] for n, g in trace.given[3].items() if g is None} == {"left", "right"}


@cases.case
def test_join_with_uneven_inputs_equals_plain_ddp_and_the_simulator(world):
    """Rank 0 runs out of data after 3 steps, rank 1 goes on to 7."""
    traces = {}
    for how, algorithm in {"plain": None, "all-reduce": AllReduce(), "PowerSGD": ALGORITHM}.items():
        ddp, handle = hooked(mlp(40, 36, 32, 28), algorithm, world.group, message_bytes=0)
        with ddp.join():
            traces[how] = train(ddp, loss_on(40), 3 if world.rank == 0 else 7)
        traces[how].weights = weights(ddp.module)
    assert same_bits(traces["all-reduce"].weights, traces["plain"].weights)
    assert same_bits(traces["all-reduce"].given, traces["plain"].given)
    assert world.agree(traces["PowerSGD"].weights)
    assert handle.stats().steps == 7
    first, second = world.everyones(traces["PowerSGD"])
    first.local += [{n: torch.zeros_like(g) for n, g in first.local[0].items()}] * 4
    first.given = second.given
    assert distance(ALGORITHM, [first, second]) < 1e-5


@cases.case
def test_a_layer_frozen_after_wrapping_keeps_its_weights_and_memory_and_trains_again(world):
    """The second layer takes part in steps 0 to 2 and 6 to 8, and is frozen in between."""
    ddp, handle = hooked(mlp(40, 36, 32, 28), ALGORITHM, world.group, find_unused_parameters=True)
    whole, found = Trace(), []
    for steps in (range(3), range(3, 6), range(6, 9)):
        ddp.module[2].requires_grad_(steps.start != 3)
        trace = train(ddp, loss_on(40), steps)
        found.append((trace.weights, handle.rank_state_dict()["tensors"]["2.weight"]))
        ddp.module[2].zero_grad()
        whole.local += trace.local
        whole.given += trace.given
    (before, memory), (meanwhile, memory_then), (after, memory_after) = found
    assert same_bits(meanwhile["2.weight"], before["2.weight"])
    assert same_bits(memory_then, memory)
    assert not same_bits(meanwhile["0.weight"], before["0.weight"])
    assert not same_bits(after["2.weight"], before["2.weight"])
    assert not same_bits(memory_after, memory)
    assert world.agree(after)
    used = lambda step, n: n[0] != "2" or step not in (3, 4, 5)  # noqa: E731
    assert distance(ALGORITHM, world.everyones(whole), used=used) < 1e-5


@cases.case
def test_parameters_that_ddp_leaves_alone_have_no_memory_and_are_not_sent(world):
    """Those that it was told to, and those that were frozen before the model was wrapped."""
    model = mlp(40, 36, 32, 28)
    model[4].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp, handle = hooked(model, ALGORITHM, world.group)
    trace = train(ddp, loss_on(40), 3)
    averaged = {n: tuple(p.shape) for n, p in model.named_parameters() if n in ("0.bias", "2.weight", "2.bias")}
    assert list(handle.rank_state_dict()["tensors"]) == ["2.weight"]
    assert handle.stats().bytes_sent == 3 * plan(averaged, ALGORITHM).wire_bytes
    assert same_bits(trace.given[0]["0.weight"], trace.local[0]["0.weight"])
