"""The conformance kit: methods that are right pass, and each promise has a method that breaks it;
and donation under `PoisonOps`, which it rests on."""

from dataclasses import dataclass

import numpy as np
import pytest

from gradwire import AllReduce, Compressor, PowerSGD, Sign, State, TopK, WireDtype
from gradwire.core.kernels.abstract import AbstractOps, NotPortable
from gradwire.core.protocol import branch, gather, mean, replica_index, world_size
from gradwire.core.simulate import NumpyOps, PoisonOps, lock_step
from gradwire.testing import ConformanceError, check
from tests.methods import EVERY, VARIANTS
from tests.parity.cases import SHAPES

#: Two of one shape, which are sent together, a stack, and what is not compressed. A name that an
#: option names is there too.
FEW = {name: SHAPES[name] for name in ("w", "v", "stack", "b", "s")}
BY_NAME = {"rank_by_name", "views", "views_half_step", "views_cold_start"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in VARIANTS else ()) for n in EVERY]
)
def test_every_method_keeps_its_promises(name):
    check(EVERY[name].algorithm, SHAPES if name in BY_NAME else FEW, world_sizes=(3,))


FORGETS, NO_WARM_UP, NEVER_FAILS, NO_STATE = (
    "conservation",
    "warm-up",
    "non-finite step",
    "resumed state",
)
ALL = {
    "donation",
    "agreement",
    "plan",
    NEVER_FAILS,
    FORGETS,
    NO_WARM_UP,
    "half precision",
    NO_STATE,
}


@pytest.mark.parametrize(
    ("algorithm", "lacking"),
    [
        (PowerSGD(2, half_step=True, start_step=1, error_feedback=False), {FORGETS}),
        (PowerSGD(2, square=True, half_step=True), set()),
        # the rest is computed after the message, not meanwhile
        (PowerSGD(2, square=True, error_feedback=0.75), set()),
        (PowerSGD(2, half_step=True, error_feedback=0.75, orthogonalization_epsilon=1e-3), set()),
        (PowerSGD(2, state_dtype="float16", max_norm=10.0), {FORGETS}),
        (PowerSGD(2, start_step=1, state_dtype="float32"), set()),
        (WireDtype(PowerSGD(2, half_step=True), "bfloat16"), {FORGETS, NO_WARM_UP}),
        (WireDtype(PowerSGD(2, half_step=True), "int2"), {FORGETS, NO_WARM_UP}),
        (AllReduce(), {NEVER_FAILS, NO_WARM_UP, NO_STATE}),
        (WireDtype(AllReduce(), "bfloat16"), {NEVER_FAILS, FORGETS, NO_WARM_UP, NO_STATE}),
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
    """Sends half of each element, and remembers the other half; `broken` says what it does
    wrong."""

    broken: str = ""

    def memory(self, ops, name, spec):
        return {"kept": ops.zeros((), spec.dtype)} if spec.shape else None

    async def compress(self, ops, name, x, memory, at):
        sent = x * 0.5
        if self.broken == "favours":
            return sent, await mean(sent) + 1.0 * await replica_index(), memory
        if self.broken == "uses what it gave away":
            doubled = ops.add(sent, sent, out=sent)
            return sent, await mean(doubled * 0.5), memory
        if self.broken == "sends more" and not isinstance(ops, AbstractOps):
            await mean(sent)
        if self.broken == "swallows":
            sent = ops.where(x < 1e30, ops.where(x > -1e30, x, 0.0), 0.0) * 0.5
        if self.broken == "overflows unseen":  # what arrives is looked at, and not its sum
            (everyone,) = await gather(x * 0.75)
            return (
                x * 0.75,
                sum(everyone[other] for other in range(await world_size())) / await world_size(),
                memory,
            )
        return x if self.broken == "forgets" else sent, await mean(sent), memory

    async def step(self, ops, gradients, state, step):
        early = Halves(start_step=0) if self.broken == "ignores the start" else self
        averages, state = await Compressor.step(early, ops, gradients, state, step)
        if self.broken == "widens":
            averages = {
                n: ops.cast(x, "float32") if ops.dtype_of(x) == "float16" else x
                for n, x in averages.items()
            }
        if self.broken == "grows":
            state = State(state.shared | {"more": ops.zeros((), "int32")}, state.tensors)
        return averages, state


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("uses what it gave away", "donation: .*is something used after `out=`"),
        ("favours", "agreement: the averaged gradient of '.*' differs: replicas \\[1\\] disagree"),
        ("sends more", "the plan: step .* bytes"),
        (
            "swallows",
            "a non-finite step: inf in '.*' on one replica comes out finite: it was swallowed",
        ),
        (
            "overflows unseen",
            "a non-finite step: after an average of '.*' that overflowed, the memory",
        ),
        ("forgets", "conservation: .*neither averaged nor remembered.*biased = True"),
        ("widens", "half precision: .* comes out as float32"),
        ("grows", "a resumed state"),
        ("ignores the start", "a warm-up: .* is not the uncompressed average"),
    ],
)
def test_a_broken_promise_is_named(broken, message):
    with pytest.raises(ConformanceError, match=f"its promise of {message}"):
        check(Halves(broken=broken), world_sizes=(2,))


@dataclass(frozen=True, kw_only=True, repr=False)
class Forgiven(Compressor):
    """Does something to a vector that NumPy forgives."""

    what: str

    def memory(self, ops, name, spec):
        return {}

    async def compress(self, ops, name, x, memory, at):
        FORGIVEN[self.what][0](ops, x.reshape((-1,)))
        return x, await mean(x), memory


def positions(ops, *numbers, dtype="int32"):
    return ops.asarray(numbers, dtype)


FORGIVEN = {
    "from the end": (
        lambda ops, x: ops.take(x, positions(ops, 0, -1)),
        r"ops.take: position -1 is none of",
    ),
    "beyond": (
        lambda ops, x: ops.scatter_add(x * 1, positions(ops, len(x)), x[:1]),
        r"ops.scatter_add: position \d",
    ),
    "wide": (
        lambda ops, x: ops.take(x, positions(ops, 0, dtype="int64")),
        "positions are int64; make them int32",
    ),
    "counted": (lambda ops, x: ops.multiply(x > 0, 2.0), "ops.multiply: bool is no number"),
    "a number": (
        lambda ops, x: ops.abs(ops.add(1.0, 2.0)),
        r"ops.add: 1.0 is a float; give an array",
    ),
    "numbers alone": (
        lambda ops, x: ops.where(x > 0, 1.0, -1.0),
        r"ops.where: 1.0 is a float; give an array",
    ),
    "no truths": (
        lambda ops, x: ops.where(x, x, 0.0),
        "ops.where: the condition is float64; compare",
    ),
    "two dtypes": (
        lambda ops, x: ops.matmul(x.reshape((1, -1)), ops.cast(x, "float32").reshape((-1, 1))),
        "ops.matmul: float64 and float32; cast one of them",
    ),
    "backwards": (
        lambda ops, x: x[::-1],
        "a slice that goes backwards is not in every framework; .* ops.take",
    ),
    "a list": (
        lambda ops, x: x[[0, 1]],
        "an index of type list is not in every framework; .* ops.take",
    ),
    "those above": (
        lambda ops, x: x[x > 0],
        "an index of type AbstractArray is not in every framework",
    ),
    "a branch": (
        lambda ops, x: x if x[0] > 0 else -1.0 * x,
        "a condition on what x holds .* ops.where",
    ),
    "no row": (lambda ops, x: ops.row(x.reshape((1, -1)), 1), "ops.row: row 1 is none of 1"),
}


@pytest.mark.parametrize("what", FORGIVEN)
def test_what_numpy_alone_forgives_is_refused(what):
    with pytest.raises((TypeError, ValueError, NotPortable), match=FORGIVEN[what][1]):
        check(Forgiven(what=what, error_feedback=False), {"w": (8, 8)}, world_sizes=(2,))


def test_a_decay_of_which_more_is_lost_is_a_broken_promise():
    assert not PowerSGD(2).biased
    assert PowerSGD(2, error_feedback=0.95).biased

    class Forgetful(PowerSGD):
        def _settled(self, ops, ok, finite, lot, exchanged, after):
            averages = super()._settled(ops, ok, finite, lot, exchanged, after)
            for memory in after.values():
                memory["error"] = ops.where(ok, ops.multiply(memory["error"], 0.5), memory["error"])
            return averages

    with pytest.raises(ConformanceError, match="its promise of conservation"):
        check(Forgetful(2, error_feedback=0.95), world_sizes=(2,))


def test_who_sends_by_the_data_stays_within_the_plan_and_a_vote_that_says_so_is_no_mean():
    seen = set()

    class Declared(Halves):
        biased = True

        async def compress(self, ops, name, x, memory, at):
            async def once():
                return await mean(x * 0.5)

            async def twice():
                await mean(x * 0.5)
                return await mean(x * 0.5)

            seen.add((name, tuple(np.shape(x))))
            largest = ops.max_abs((await mean(x * 1.0)).reshape((1, -1))).reshape(())
            return x, await branch(largest > 1.0, once, twice), memory

    assert not any(
        line.startswith("conservation")
        for line in check(Declared(), {"a": (3, 5)}, world_sizes=(1, 2))
    )
    assert {shape for name, shape in seen if name == "a"} == {(3, 5)}  # own shapes are taken


def arrays():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(4, 4)),
        "y": rng.normal(size=(4, 4)),
        "thin": rng.normal(size=(2, 4)),
    }


TRUE, FALSE = np.array(True), np.array(False)
KERNELS = {
    "add": lambda ops, x, y, thin: ops.add(x, y, out=x),
    "divide": lambda ops, x, y, thin: ops.divide(x, y, out=x),
    "matmul": lambda ops, x, y, thin: ops.matmul(y, y, out=x),
    "subtract_product": lambda ops, x, y, thin: ops.subtract_product(y, thin, thin, out=x),
    "where": lambda ops, x, y, thin: ops.where(y > 0, y, 0.0, out=x),
    "where_lazy, true": lambda ops, x, y, thin: ops.where_lazy(
        TRUE, lambda out: ops.add(y, y, out=out), x
    ),
    "where_lazy, false": lambda ops, x, y, thin: ops.where_lazy(FALSE, lambda out: y, x),
    "add_each": lambda ops, x, y, thin: ops.add_each([x], [y])[0],
    "scale_each": lambda ops, x, y, thin: ops.scale_each([x], y[0, 0])[0],
    "where_each, true": lambda ops, x, y, thin: ops.where_each(TRUE, [y], [x])[0],
    "where_each, false": lambda ops, x, y, thin: ops.where_each(FALSE, [y], [x])[0],
    "orthonormalize": lambda ops, x, y, thin: ops.orthonormalize(x[None], 0.0)[0],
    "set_row": lambda ops, x, y, thin: ops.set_row(x[None], 1, thin[None, :1])[0],
    "mean": lambda ops, x, y, thin: lock_step([mean(x, out=x), mean(y + 0)], ops)[0],
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_donated_array_is_poisoned_and_the_result_is_right(kernel):
    a, b = arrays(), arrays()
    usual, poisoned = kernel(NumpyOps(), **a), kernel(PoisonOps(), **b)
    np.testing.assert_array_equal(poisoned, usual)
    assert np.isnan(b["x"]).all()
    assert not np.shares_memory(poisoned, b["x"])
    for name in ("y", "thin"):  # what was not donated
        np.testing.assert_array_equal(b[name], arrays()[name])
