"""What somebody's own method may do, and what is said where it does something else."""

from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import pytest

from gradwire import (
    AllReduce,
    Compressor,
    LocalSGD,
    LocalSimulator,
    PowerSGD,
    Quantize,
    Sign,
    Simulator,
    TopK,
    TwoLevel,
    Weighted,
    WireDtype,
    diloco,
    plan,
)
from gradwire.core.advise.losses import known_losses
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol import branch, mean, mean_each
from gradwire.core.protocol.settings import setting
from gradwire.testing import check

SHAPES = {"w": (16, 8), "b": (4,)}
SPECS = {name: Spec(shape) for name, shape in SHAPES.items()}
PAIRS = ((0, 1), (2, 3))


@dataclass(frozen=True, kw_only=True, repr=False)
class Scaled(Compressor):
    """Averages, by a factor that the loop may say."""

    error_feedback: bool | float = False
    portable: bool = True

    def memory(self, ops, name, spec):
        return {"n": ops.cast(ops.iota(1), "int32").reshape(())} if spec.shape == (16, 8) else None

    async def compress(self, ops, name, x, memory, context):
        factor = await setting(ops, "factor", 1.0)
        average = await mean(x)
        if not self.portable:
            average = average.sum() * 0.0 + average
        return x, average * ops.cast(factor, ops.dtype_of(x)), {"n": memory["n"] + 1}


@dataclass(frozen=True, kw_only=True)
class Sometimes(AllReduce):
    """All of it in each fourth step, else a part, in pairs; or says in how many steps it comes
    round."""

    cycle: int = 1

    async def step(self, ops, gradients, state, step):
        async def whole(g):
            return await mean_each(g)

        async def part(g):
            return {n: await mean(x, groups=PAIRS) if n == "b" else x * 0.0 for n, x in g.items()}

        return await branch(step % 4 == 3, whole, part, dict(gradients)), state


def test_a_plan_knows_of_a_branch_by_the_number_of_the_step_both_sides():
    """Or each step, of a method that says after how many it comes round."""
    either, each = Sometimes(), Sometimes(cycle=4)
    assert plan(SHAPES, either, world_size=4).wire_bytes == 132 * 4
    assert plan(SHAPES, either, world_size=4).optional_bytes == 128 * 4
    assert dry_run(either, SPECS, 4).groups == dry_run(each, SPECS, 4).groups == [PAIRS]
    sent = [step.nbytes for step in plan(SHAPES, each, world_size=4).steps]
    simulator, seen = Simulator(each, SHAPES, 4, dtype="float32"), []
    for _ in range(4):
        simulator.step([{n: np.ones(s) for n, s in SHAPES.items()}] * 4)
        seen.append(simulator.traffic.nbytes)
    assert sent == seen == [16, 16, 16, 132 * 4]
    # where it begins is no branch by number
    begins = PowerSGD(2, start_step=3)
    assert plan(SHAPES, begins).optional_bytes == 0


@pytest.mark.parametrize(
    "algorithm",
    [
        Scaled(),
        Scaled(portable=False),
        WireDtype(Scaled(), "bfloat16"),
        TwoLevel(Scaled(), 2),
        TwoLevel(Scaled(portable=False), 2),
    ],
    ids=repr,
)
def test_settings_are_known_on_one_node_too_and_of_what_nobody_can_look_into(algorithm):
    simulator = Simulator(algorithm, SHAPES, 2, dtype="float32")
    ones = [{n: np.ones(s) for n, s in SHAPES.items()}] * 2
    scaled = not isinstance(algorithm, TwoLevel)  # which averages as it is within a node
    assert simulator.step(ones, settings={"factor": 0.5})["w"].max() == (0.5 if scaled else 1.0)
    for value, error in ((True, TypeError), ("0.5", TypeError), (None, TypeError)):
        with pytest.raises(error, match=f"factor={value!r} is no number"):
            simulator.step(ones, settings={"factor": value})
    with pytest.raises(ValueError, match="factor=nan"):
        simulator.step(ones, settings={"factor": float("nan")})
    if "portable" not in repr(algorithm):
        with pytest.raises(ValueError, match="does not ask for fcator; it asks for factor"):
            simulator.step(ones, settings={"fcator": 0.5})
    assert simulator.steps == 1


@pytest.mark.parametrize("compressor", [Scaled(), None])
def test_local_simulators_refuse_settings_that_nobody_asks_for(compressor):
    local = LocalSGD(2, compressor=compressor)
    simulator = LocalSimulator(local, {n: np.ones(s) for n, s in SHAPES.items()}, 2)
    with pytest.raises(ValueError, match="does not ask for fcator"):
        simulator.step([{}, {}], lambda *_: {}, settings={"fcator": 0.5})


def test_what_cannot_be_looked_into_is_planned_as_an_average_in_local_sgd_too():
    local = LocalSGD(4, compressor=Scaled(portable=False))
    assert plan(SHAPES, local, world_size=2).wire_bytes == plan(SHAPES, LocalSGD(4)).wire_bytes
    with pytest.raises(AttributeError, match=r"LocalSGD\(.* is not portable: .*ops.abs\(x\)"):
        plan(SHAPES, LocalSGD(4, compressor=Wrong(how="abs")), world_size=2)


@dataclass(frozen=True, kw_only=True)
class Wrong(Compressor):
    how: str
    error_feedback: bool | float = False

    def memory(self, ops, name, spec):
        if spec.shape != (16, 8):
            return None
        kept = {"n": ops.cast(ops.iota(1), "int32").reshape(())}
        wrong = {"a list": [kept], "a number": {"n": 0}, "an array": kept["n"]}
        return wrong.get(self.how, kept)

    def compress(self, ops, name, x, memory, context):
        if self.how == "not async":
            return x, x, {}
        return self._compress(ops, x, memory)

    async def _compress(self, ops, x, memory):
        if self.how == "abs":
            return x, await mean(abs(x)), {}
        sent = mean(x) if self.how == "not awaited" else await mean(x)
        if self.how == "nothing":
            return await mean(x), None, {}
        return x, sent, {"cut": {"n": memory["n"] * 0.5}, "a count": {"n": 1}}.get(self.how, {})


WRONG = {
    "not async": "compress returns a tuple; write async def compress",
    "not awaited": "returns `received` that nobody has awaited; write await",
    "a list": r"memory\('w'\) returns \[.*\]; return arrays by name",
    "a number": r"memory\('w'\) returns \{'n': 0\}; return arrays by name",
    "an array": r"memory\('w'\) returns .*; return arrays by name",
    "nothing": r"compress\('w'\) returns `received` None, which is no array",
    "a count": r"compress\('w'\) returns memory 'n' 1, which is no array; return one, such as",
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("how", WRONG)
def test_what_an_own_method_does_wrong_is_named(how):
    for run in (plan, check):
        with pytest.raises(ValueError, match=WRONG[how]):
            run(*((SHAPES, Wrong(how=how)) if run is plan else (Wrong(how=how), SHAPES)))


def test_what_memory_holds_after_a_step_is_what_it_held_before():
    """Its dtype: a count that becomes a fraction would be cut off."""
    message = r"returns memory 'n' of float\d\d; `memory` makes int32. Write ops.cast\(x, 'int32'\)"
    with pytest.raises(ValueError, match=message):
        check(Wrong(how="cut"), SHAPES)
    # and a count stays in a step that is not finite
    simulator = Simulator(Scaled(), SHAPES, 2, dtype="float32")
    for x in (1.0, np.nan, 1.0):
        simulator.step([{n: np.full(s, x) for n, s in SHAPES.items()}] * 2)
    assert simulator.states[0].tensors["w"]["n"] == 2


def test_check_knows_two_levels_wherever_they_are_and_memory_in_bfloat16():
    for algorithm in (
        WireDtype(TwoLevel(PowerSGD(2), 2), "int8"),
        Weighted(TwoLevel(PowerSGD(2), 2)),
        TwoLevel(PowerSGD(2), PAIRS),
        PowerSGD(2, state_dtype="bfloat16"),
        Quantize("int8", state_dtype="bfloat16"),
    ):
        assert check(algorithm, world_sizes=(2,))
    with pytest.raises(ValueError, match="world_sizes is empty"):
        check(PowerSGD(2), world_sizes=())


def test_measured_losses_are_those_of_our_own_methods():
    class Sign(AllReduce):
        def __repr__(self):
            return "Sign()"

    @dataclass(frozen=True)
    class Int8(Quantize):
        dtype: str = "int8"

    known = {"theirs": Sign(), "inside": WireDtype(Sign(), "int8"), "rounds": Int8()}
    assert not known_losses(known).methods


@pytest.mark.parametrize("base", [PowerSGD(2), TopK(2, per=16), Sign(), Quantize("int8")], ids=repr)
def test_a_compress_of_ones_own_is_what_a_method_does_of_many_tensors_too(base):
    class Halved(type(base)):
        async def compress(self, ops, name, x, memory, context):
            sent, received, after = await super().compress(ops, name, x, memory, context)
            seen.append(name)
            return sent, received, after

    seen: list[str] = []
    options = {each.name: getattr(base, each.name) for each in fields(base) if each.init}
    simulator = Simulator(Halved(**options), {"a": (16, 8), "b": (16, 8)}, 2)
    simulator.step([{"a": np.ones((16, 8)), "b": np.ones((16, 8))}] * 2)
    assert sorted(seen) == ["a", "a", "b", "b"]


class Viewed(Scaled):
    def view_of(self, name, shape):
        return "as it is"


def test_a_plan_says_how_an_own_method_sees_tensors():
    assert plan(SHAPES, Viewed()).tensors[0].view == "as it is"


@pytest.mark.parametrize("radial", [("head.*",), True])
def test_local_sgd_looks_for_patterns_in_the_whole_model_not_in_a_fragment(radial):
    names = ("layers.0.w", "layers.1.w", "head.w")
    local = diloco(4, fragments=3, radial=radial)
    simulator = LocalSimulator(local, {n: np.ones((4, 2)) for n in names}, 2)
    gradients = [{n: np.full((4, 2), r + 1.0) for n in names} for r in range(2)]
    for _ in range(8):
        simulator.step(gradients, lambda r, p, g: {n: p[n] - 0.1 * g[n] for n in p})
    assert simulator.steps == 8
    assert plan(dict.fromkeys(names, (4, 2)), local, world_size=2).wire_bytes > 0


def test_local_simulators_refuse_gradients_and_updates_of_other_shapes_and_names():
    start = {"w": np.zeros(3), "v": np.zeros(2)}
    simulator = LocalSimulator(LocalSGD(2), start, 2)
    right = {"w": np.ones(3), "v": np.ones(2)}
    cases = (
        ({"w": np.ones((3, 1))}, right, r"replica 0: gradient of 'w' has shape \(3, 1\)"),
        ({"x": np.ones(3)}, right, "replica 0: gradient of 'x', which is no parameter"),
        (right, {"w": np.ones(3)}, "replica 0: update returns no 'v'; return all parameters"),
        (right, right | {"v": np.ones(())}, r"replica 0: update of 'v' has shape \(\)"),
    )
    for gradients, update, message in cases:
        with pytest.raises(ValueError, match=message):
            simulator.step([gradients, gradients], lambda *_, update=update: update)
    np.testing.assert_equal(simulator.parameters, [start] * 2)
    assert simulator.steps == 0


def test_plans_of_groups_are_asked_about_their_own_number_of_replicas():
    found = plan({"w": (64, 64)}, LocalSGD({4: 2, "all": 8}), world_size=8)
    assert found.seconds(8, 1e-4, 1e9, nodes=2) > 0
    for world_size in (4, 16):
        for ask in (
            lambda n: found.seconds(n, 1e-4, 1e9, nodes=2),
            lambda n: found.link_bytes(n, nodes=2),
            lambda n: found.hops(n, 1e-4, 1e9),
        ):
            with pytest.raises(ValueError, match=f"groups of 8 .*world_size={world_size}"):
                ask(world_size)


def test_patterns_in_another_order_are_another_configuration():
    first, second = PowerSGD({"*embed*": 0, "*": 4}), PowerSGD({"*": 4, "*embed*": 0})
    assert first != second
    assert first == PowerSGD({"*embed*": 0, "*": 4})
    assert hash(first) == hash(PowerSGD({"*embed*": 0, "*": 4}))


def test_what_makes_an_outer_optimizer_has_a_name_without_addresses():
    local = diloco(10, outer=partial(sum, partial(max, 1), key=lambda x: x, start=2))
    assert " at 0x" not in repr(local)
    assert "<lambda>" in repr(local)
    assert "start=2" in repr(local)


def test_local_sgd_in_an_algorithms_place_is_called_so():
    with pytest.raises(TypeError, match="is local SGD and no algorithm: local_sgd"):
        Simulator(diloco(10), {"w": (3,)}, 2)
