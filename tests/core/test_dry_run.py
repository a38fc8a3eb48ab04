"""One dry run of an algorithm answers everything that is asked of it."""

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass, field

import pytest

from gradwire import PowerSGD, Spec, TopK, WireDtype, plan
from gradwire.core.algorithms.shared.views import StackedShape
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.kernels import random
from gradwire.core.plan.dry_run import ATTRIBUTE, REMEMBERED, dry_run, summary
from gradwire.core.protocol.groups import UnknownWorldSize

SPECS = {"w": Spec((64, 32)), "v": Spec((32, 48)), "b": Spec((64,))}
SHAPES = {name: spec.shape for name, spec in SPECS.items()}


@dataclass(frozen=True)
class Counted(Wrapper):
    """Notes of which gradients it takes steps."""

    taken: list = field(default_factory=list, compare=False)

    def step(self, ops, gradients, state, step):
        self.taken.append(tuple(gradients))
        return self.algorithm.step(ops, gradients, state, step)


def test_a_step_of_each_kind_is_run_once_whatever_is_asked():
    algorithm = Counted(PowerSGD(2, half_step=True, start_step=3))
    dry = dry_run(algorithm, SPECS, 4)
    assert not algorithm.taken  # before anybody asks
    for _ in range(2):
        dry = dry_run(algorithm, dict(SPECS), 4)
        assert dry.requests
        assert dry.groups == []
        assert dry.stages[-1].total == summary(algorithm, SPECS, 4).wire_bytes
    assert len(algorithm.taken) == 3  # the dense one, and each half
    plan(SHAPES, algorithm, dtype="float32", world_size=4)
    before = len(algorithm.taken)
    plan(SHAPES, algorithm, dtype="float32", world_size=4)
    assert len(algorithm.taken) == before
    dry_run(algorithm, SPECS, 8).requests  # noqa: B018
    assert len(algorithm.taken) == before + 3


def test_stacks_and_patterns_in_another_order_are_other_runs():
    algorithm = PowerSGD(2)
    flat, stack = (dry_run(algorithm, {"w": Spec(shape)}) for shape in ((4, 64, 32), StackedShape((4, 64, 32), 1)))
    assert flat.memory.tensors["w"]["q"].shape != stack.memory.tensors["w"]["q"].shape
    first, last = PowerSGD(rank={"*": 1, "w": 4}), PowerSGD(rank={"w": 4, "*": 1})
    assert first == last
    assert [dry_run(each, SPECS).memory.tensors["w"]["q"].shape[0] for each in (first, last)] == [1, 4]


def test_some_of_the_gradients_are_those_of_the_whole_model():
    algorithm = PowerSGD(rank={"w": 2, "v": 3})
    dry = dry_run(algorithm, SPECS)
    alone = [dry.only([name]).stages[-1].total for name in SPECS]
    assert alone == [4 * 2 * (64 + 32), 4 * 3 * (32 + 48), 4 * 64]
    assert dry.only(SPECS) is dry
    assert dry.only(["v", "w"]) is dry.only(["w", "v"])


class Fails(PowerSGD):
    """Written for the tensors of one framework."""

    def compress(self, ops, name, x, memory, context):
        return x.sign()


def test_what_cannot_be_tried_still_has_its_memory():
    dry = dry_run(Fails(2), SPECS)
    assert set(dry.memory.tensors) == {"w", "v"}
    for _ in range(2):
        with pytest.raises(AttributeError, match="sign"):
            dry.steps  # noqa: B018
    with pytest.raises(UnknownWorldSize):
        dry_run(TopK(4, per=64), SPECS).steps  # noqa: B018


def test_runs_live_as_long_as_the_algorithm_and_are_few():
    algorithm = WireDtype(PowerSGD(2), "bfloat16")
    for world in range(2, 2 * REMEMBERED):
        dry_run(algorithm, SPECS, world)
    assert len(vars(algorithm)[ATTRIBUTE]) == REMEMBERED
    for other in (copy.copy(algorithm), copy.deepcopy(algorithm), pickle.loads(pickle.dumps(algorithm))):
        assert other == algorithm
        assert dry_run(other, SPECS, 2).algorithm is other
        assert dry_run(algorithm, SPECS, 2).algorithm is algorithm
    gone = weakref.ref(algorithm)
    del algorithm
    gc.collect(1)  # what is young
    assert gone() is None


@pytest.mark.parametrize("warm_start", [True, False])
def test_random_numbers_without_data_are_not_drawn(monkeypatch, warm_start):
    def mixed(x):
        raise AssertionError("a number was hashed")

    monkeypatch.setattr(random, "_mix", mixed)
    dry = dry_run(PowerSGD(2, warm_start=warm_start), SPECS)
    assert dry.cycle[0].by_number is not warm_start
