"""Algorithms that users write: what they keep is theirs, what they raise arrives, and one rank is a
world too."""

from dataclasses import dataclass

import pytest
import torch

from gradwire import AllReduce, Compressor, PowerSGD, State
from gradwire.core.protocol import mean, step_is_finite, together
from gradwire.torch_backend.engine.driver import Driver, specs_of
from tests.torch.compare import same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.training import distance, hooked, paralleled, train

pytestmark = pytest.mark.usefixtures("alone", "both_branches")

WIDTHS = (40, 36, 32, 28)

LOSS = loss_on(40)


@dataclass(frozen=True)
class Remembering:
    """Adds to each average the one before, and keeps the very array that it was answered."""

    donate: bool = False
    per_replica = frozenset()
    start_step = 0
    cycle = 1

    def init(self, ops, specs):
        return State(
            tensors={
                name: {"last": ops.zeros(spec.shape, spec.dtype)} for name, spec in specs.items()
            }
        )

    async def step(self, ops, gradients, state, step):
        answers = await together(
            mean(g, out=g if self.donate else None) for g in gradients.values()
        )
        averages = dict(zip(gradients, answers, strict=True))
        given = {name: average + state.tensors[name]["last"] for name, average in averages.items()}
        return given, State(
            state.shared, {name: {"last": average} for name, average in averages.items()}
        )


@dataclass(frozen=True)
class Momentum(Remembering):
    """Keeps the results of kernels, and what it averages in two rounds."""

    async def step(self, ops, gradients, state, step):
        async def one(name, g):
            average = await mean(ops.add(g, g))
            half = await mean(average * 0.5)
            ok = await step_is_finite()
            last = state.tensors[name]["last"]
            return ops.where(ok, ops.add(half, last * 0.5), last)

        moments = await together(one(name, g) for name, g in gradients.items())
        new = dict(zip(gradients, moments, strict=True))
        return new, State(state.shared, {name: {"last": moment} for name, moment in new.items()})


@dataclass(frozen=True, kw_only=True, repr=False)
class Signs(Compressor):
    """A compressor whose memory is the average that it received."""

    def memory(self, ops, name, spec):
        return {"received": ops.zeros(spec.shape, spec.dtype)} if len(spec.shape) == 2 else None

    async def compress(self, ops, name, x, memory, at):
        sent = ops.where(x > 0.0, memory["received"] * 0.5 + 0.01, memory["received"] * 0.5 - 0.01)
        received = await mean(sent)
        return sent, received, {"received": received}


ALGORITHMS = [
    Remembering(),
    Remembering(donate=True),
    Momentum(),
    Signs(),
    PowerSGD(2),
    AllReduce(),
]


@pytest.mark.parametrize("message_bytes", [0, 1 << 20])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda x: type(x).__name__)
def test_memory_is_the_algorithms_own_whatever_it_keeps_and_one_rank_is_a_world(
    algorithm, message_bytes
):
    ddp, handle = hooked(mlp(*WIDTHS), algorithm, message_bytes=message_bytes)
    trace = train(ddp, LOSS, 4)
    assert distance(algorithm, [trace]) < 1e-5
    assert algorithm != AllReduce() or same_bits(trace.given, trace.local)
    state = handle.rank_state_dict()
    train(ddp, LOSS, 1, local=False)
    assert algorithm == AllReduce() or not same_bits(
        handle.rank_state_dict()["tensors"], state["tensors"]
    )


class Mistake(Exception):
    pass


@dataclass(frozen=True)
class Failing(Remembering):
    """Raises in its second step, in one of three places."""

    where: str = "before any message"

    async def step(self, ops, gradients, state, step):
        if step == 1 and self.where == "before any message":
            raise Mistake(f"in step {step}")
        if step == 1 and self.where == "side by side":

            async def fail(g):
                await mean(g)
                raise Mistake(f"in step {step}")

            await together(fail(g) for g in gradients.values())
        result = await Remembering.step(self, ops, gradients, state, step)
        if step == 1:
            raise Mistake(f"in step {step}")
        return result


WHERE = ["before any message", "side by side", "in the end"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("wrap", [hooked, paralleled])
def test_an_exception_leaves_backward_as_it_is_and_training_goes_on(wrap, where):
    """Of this model, and of another."""
    runs = [
        wrap(mlp(*WIDTHS), algorithm, message_bytes=0)
        for algorithm in (Failing(where=where), Remembering())
    ]
    for wrapped, _ in runs:
        train(wrapped, LOSS, 1, local=False)
    (failing, handle), _ = runs
    before = handle.rank_state_dict()
    with pytest.raises(Mistake, match="in step 1"):
        train(failing, LOSS, [1], local=False)
    assert same_bits(handle.rank_state_dict(), before)
    handle.load_state_dict(before | {"step": 2})  # past the step in which it fails
    traces = [train(wrapped, LOSS, [2, 3], local=False) for wrapped, _ in runs]
    assert same_bits(*(trace.given for trace in traces))


@pytest.mark.parametrize("where", WHERE)
def test_the_driver_goes_on_after_an_exception_as_if_the_step_had_not_been(where, alone):
    parameters = dict(mlp(*WIDTHS).named_parameters())
    drivers = [
        Driver(algorithm, specs_of(parameters), torch.device("cpu"), alone, 0)
        for algorithm in (Failing(where=where), Remembering())
    ]

    def step(driver, number):
        torch.manual_seed(number)
        gradients = {name: torch.randn_like(p) for name, p in parameters.items()}
        names = list(gradients)
        for i, name in enumerate(names):
            driver.add({name: gradients[name]}, first=i == 0, last=i == len(names) - 1)
        return gradients

    failing, right = drivers
    assert same_bits(step(failing, 0), step(right, 0))
    with pytest.raises(Mistake):
        step(failing, 1)
    assert failing.memory.steps == 1
    failing.memory.steps = 2  # past the step in which it fails
    for number in (2, 3):
        assert same_bits(step(failing, number), step(right, number))
    assert same_bits(failing.memory.own()["tensors"], right.memory.own()["tensors"])
