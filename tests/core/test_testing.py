"""The conformance kit: methods that are right pass, and each promise has a method that breaks it."""

from dataclasses import dataclass

import numpy as np
import pytest

from gradwire import AllReduce, Compressor, PowerSGD, Sign, State, TopK, WireDtype
from gradwire.core.kernels.abstract import AbstractOps
from gradwire.core.protocol import branch, gather, mean, replica_index, world_size
from gradwire.testing import ConformanceError, check
from tests.methods import EVERY, VARIANTS
from tests.parity.cases import SHAPES

ALL = {
    "donation",
    "agreement",
    "plan",
    "non-finite step",
    "conservation",
    "warm-up",
    "half precision",
    "resumed state",
}


#: Two of one shape, which are sent together, a stack, and what is not compressed. A name that an option names is there too.
FEW = {name: SHAPES[name] for name in ("w", "v", "stack", "b", "s")}
BY_NAME = {"rank_by_name", "views", "views_half_step", "views_cold_start"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in VARIANTS else ()) for n in EVERY])
def test_every_method_keeps_its_promises(name):
    check(EVERY[name].algorithm, SHAPES if name in BY_NAME else FEW, world_sizes=(3,))


FORGETS, NO_WARM_UP = "conservation", "warm-up"


@pytest.mark.parametrize(
    ("algorithm", "lacking"),
    [
        (PowerSGD(2), set()),
        (PowerSGD(2, half_step=True, start_step=1, error_feedback=False), {FORGETS}),
        (PowerSGD(2, square=True, half_step=True), set()),
        (
            PowerSGD(2, square=True, error_feedback=0.75),
            set(),
        ),  # whose rest is computed after the message, not meanwhile
        (PowerSGD(2, half_step=True, error_feedback=0.75), set()),
        (PowerSGD(2, orthogonalization_epsilon=1e-3), set()),
        (PowerSGD(2, state_dtype="float16", max_norm=10.0), {FORGETS}),
        (PowerSGD(2, start_step=1, state_dtype="float32"), set()),
        (WireDtype(PowerSGD(2), "float16"), {FORGETS, NO_WARM_UP}),
        (WireDtype(PowerSGD(2, half_step=True), "bfloat16"), {FORGETS, NO_WARM_UP}),
        (WireDtype(PowerSGD(2), "int4"), {FORGETS, NO_WARM_UP}),
        (WireDtype(PowerSGD(2, half_step=True), "int2"), {FORGETS, NO_WARM_UP}),
        (AllReduce(), {"non-finite step", NO_WARM_UP, "resumed state"}),
        (WireDtype(AllReduce(), "bfloat16"), {"non-finite step", FORGETS, NO_WARM_UP, "resumed state"}),
        (WireDtype(TopK(1 / 16), "float16"), {FORGETS, NO_WARM_UP}),
        (TopK(1 / 16, start_step=1, state_dtype="float32", max_norm=10.0), {FORGETS}),
        (Sign(start_step=1, state_dtype="float32", error_feedback=0.9), set()),
    ],
    ids=lambda x: "" if isinstance(x, set) else repr(x),
)
def test_options_together_keep_the_promises_that_are_told(algorithm, lacking):
    assert {line.split(":")[0] for line in check(algorithm, world_sizes=(2,))} == ALL - lacking


@dataclass(frozen=True, kw_only=True, repr=False)
class Halves(Compressor):
    """Sends half of each element, and remembers the other half. What is wrong comes from subclasses."""

    def memory(self, ops, name, spec):
        return {"kept": ops.zeros((), spec.dtype)} if spec.shape else None

    async def compress(self, ops, name, x, memory, at):
        sent = x * 0.5
        return sent, await mean(sent), memory


class UsesWhatItGaveAway(Halves):
    async def compress(self, ops, name, x, memory, at):
        sent = x * 0.5
        doubled = ops.add(sent, sent, out=sent)
        return sent, await mean(doubled * 0.5), memory


class Favours(Halves):
    async def compress(self, ops, name, x, memory, at):
        sent = x * 0.5
        return sent, await mean(sent) + 1.0 * await replica_index(), memory


class SendsMoreThanPlanned(Halves):
    async def compress(self, ops, name, x, memory, at):
        sent = x * 0.5
        if not isinstance(ops, AbstractOps):
            await mean(sent)
        return sent, await mean(sent), memory


class AsksForMoreByTheData(Halves):
    async def compress(self, ops, name, x, memory, at):
        async def once():
            return await mean(x * 0.5)

        async def twice():
            await mean(x * 0.5)
            return await mean(x * 0.5)

        largest = ops.max_abs((await mean(x * 1.0)).reshape((1, -1))).reshape(())
        return x * 0.5, await branch(largest > 1.0, once, twice), memory


class SwallowsNaN(Halves):
    async def compress(self, ops, name, x, memory, at):
        sent = ops.where(x < 1e30, ops.where(x > -1e30, x, 0.0), 0.0) * 0.5
        return sent, await mean(sent), memory


class OverflowsUnseen(Halves):
    """What arrives is looked at, and not its sum."""

    async def compress(self, ops, name, x, memory, at):
        sent = x * 0.75
        (everyone,) = await gather(sent)
        total = everyone[0]
        for other in range(1, await world_size()):
            total = total + everyone[other]
        return sent, total / await world_size(), memory


class Forgets(Halves):
    async def compress(self, ops, name, x, memory, at):
        return x, await mean(x * 0.5), memory


class Widens(Halves):
    async def step(self, ops, gradients, state, step):
        averages, state = await Halves.step(self, ops, gradients, state, step)
        wide = {name: ops.cast(x, "float32") if ops.dtype_of(x) == "float16" else x for name, x in averages.items()}
        return wide, state


class GrowsItsMemory(Halves):
    async def step(self, ops, gradients, state, step):
        averages, state = await Halves.step(self, ops, gradients, state, step)
        return averages, State(state.shared | {"more": ops.zeros((), "int32")}, state.tensors)


class IgnoresTheStart(Halves):
    async def step(self, ops, gradients, state, step):
        averages, state = await Halves(start_step=0).step(ops, gradients, state, step)
        return averages, state


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (UsesWhatItGaveAway(), "its promise of donation: .*is something used after `out=`"),
        (Favours(), "its promise of agreement: the averaged gradient of '.*' differs: replicas \\[1\\] disagree"),
        (SendsMoreThanPlanned(), "its promise of the plan: step .* bytes"),
        (
            SwallowsNaN(),
            "its promise of a non-finite step: inf in '.*' on one replica comes out finite: it was swallowed",
        ),
        (OverflowsUnseen(), "its promise of a non-finite step: after an average of '.*' that overflowed, the memory"),
        (Forgets(), "its promise of conservation: .*neither averaged nor remembered.*biased = True"),
        (Widens(), "its promise of half precision: .* comes out as float32"),
        (GrowsItsMemory(), "its promise of a resumed state"),
        (IgnoresTheStart(), "its promise of a warm-up: .* is not the plain average"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Compressor) else "",
)
def test_a_broken_promise_is_named(bad, message):
    with pytest.raises(ConformanceError, match=message):
        check(bad, world_sizes=(2,))


def test_a_method_that_sends_by_its_data_stays_within_its_plan():
    check(AsksForMoreByTheData(), world_sizes=(2,))


def test_a_vote_is_no_mean_and_may_say_so():
    class Declared(Forgets):
        biased = True

    assert not any(line.startswith("conservation") for line in check(Declared(), world_sizes=(1,)))


def test_own_shapes_and_numbers_of_replicas_are_taken():
    seen = set()

    class Looks(Halves):
        async def compress(self, ops, name, x, memory, at):
            seen.add((name, tuple(np.shape(x))))
            return await Halves.compress(self, ops, name, x, memory, at)

    check(Looks(), {"a": (3, 5)}, world_sizes=(2,))
    assert {shape for name, shape in seen if name == "a"} == {(3, 5)}
