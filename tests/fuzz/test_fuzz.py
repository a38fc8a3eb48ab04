"""The short form of `make fuzz`, and whether it finds what is wrong."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from gradwire.core.algorithms import compressor
from gradwire.core.simulate import NumpyOps
from gradwire.core.state import checkpoint
from gradwire.core.zero import sharded_step
from tests.fuzz import histories, states, texts, world_sizes
from tests.fuzz.__main__ import constructions
from tests.fuzz.engine import (
    CHANGED,
    GARBAGE,
    LATE,
    NOT_NAMED,
    STUCK,
    VALUES,
    WRONG_CLASS,
    Found,
    Target,
    cases,
    construct,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def nothing(found):
    assert found.tried
    assert not found.findings, found.findings[:10]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("table", "share"), [("core", 0.06), ("torch", 0.03), ("jax", 0.03)])
def test_options(table, share):
    found = Found()
    constructions([table], found, 1, share)
    nothing(found)


@pytest.mark.usefixtures("alone")
def test_states():
    found = Found()
    states.histories(1, found, 4)
    nothing(found)


@pytest.mark.usefixtures("alone")
def test_other_world_sizes():
    found = Found()
    world_sizes.compressors(1, found, 40, ("torch",))
    world_sizes.compressors(1, found, 4, ("jax",))
    world_sizes.sharded(1, found, 60)
    world_sizes.resharded(1, found, 2)
    nothing(found)


@pytest.mark.usefixtures("alone")
def test_histories():
    found = Found()
    histories.histories(1, found, 6)
    nothing(found)


def test_texts_and_files(tmp_path):
    found = Found()
    texts.expressions(1, found, 600)
    texts.files(1, found, 600, tmp_path)
    nothing(found)


@dataclass
class Careless:
    """Takes what it is given, and looks at it later, or in some other way."""

    period: int
    late: bool = False

    def __post_init__(self):
        if not self.late and self.period < 1:
            raise ValueError("that is too few")

    def use(self):
        return 1 // self.period


def test_what_is_careless_is_found():
    found = Found()
    for late in (False, True):
        target = Target(Careless, {"period": 2, "late": late}, Careless.use)
        for value in (0, None, "x", {}):
            construct("Careless", target, "period", value, found)
    kinds = [kind for kind, _ in found.findings]
    assert kinds == [NOT_NAMED] * 4 + [LATE] * 4
    raised = Target(lambda period: period.upper())
    for _, _, option, value in cases({"upper": raised}):
        construct("upper", raised, option, value, found)
    strings = sum(isinstance(value, str | bytes) for value in VALUES)
    assert found.counts[WRONG_CLASS] == len(VALUES) - strings


@pytest.mark.usefixtures("alone")
def test_what_is_careless_of_states_is_found():
    memory = {"error": torch.zeros(2)}

    def load(state):
        memory.update(state)
        if "kind" in state:
            raise ValueError("kind")

    def trained():
        memory.clear()
        memory.update(error=torch.zeros(2))
        return states.Trained(lambda: None, load, lambda: memory, {})

    found = Found()
    for state in ({"kind": 1}, {"error": torch.full((2,), torch.nan)}, {"error": torch.ones(2)}):
        states.tried("memory", trained, trained(), state, found)
    assert [kind for kind, _ in found.findings] == [CHANGED, GARBAGE]


async def always():
    return np.asarray(True)


async def unfinite(ops, pieces, *options):
    return pieces, np.asarray(np.nan)


CARELESS = {
    "every step counts": (compressor, "step_is_finite", always, histories.averages, GARBAGE),
    "every outer step counts": (NumpyOps, "all_finite", lambda self, x: np.asarray(True), histories.locally, GARBAGE),
    "every sharded step counts": (NumpyOps, "all_finite", lambda self, x: np.asarray(True), histories.sharded, CHANGED),
    "no sharded step counts": (sharded_step, "clip_by_norm", unfinite, histories.sharded, STUCK),
}


@pytest.mark.parametrize("name", CARELESS)
def test_what_is_careless_in_histories_is_found(monkeypatch, name):
    owner, function, wrong, kind, expected = CARELESS[name]
    monkeypatch.setattr(owner, function, wrong)
    found = Found()
    for seed in range(30):
        kind(seed, found)
        if found.counts[expected]:
            return
    pytest.fail(f"only {found.counts}")


@pytest.mark.usefixtures("alone")
def test_what_is_careless_of_world_sizes_is_found(monkeypatch):
    """The first replica's error in place of the mean; and shards that are joined as they come."""
    found, joined = Found(), Found()
    monkeypatch.setattr(checkpoint, "mean_of_rows", lambda ops, rows: rows[:1])
    world_sizes.compressors(1, found, 10, ("torch",))
    first = world_sizes.gw.consolidate
    monkeypatch.setattr(world_sizes.gw, "consolidate", lambda shards: first([{**shards[0], "rank": 0, "replicas": 1}]))
    world_sizes.sharded(1, joined, 40)
    assert set(dict(found.findings)) == {GARBAGE}
    assert joined.counts[GARBAGE]
