"""The short form of `make fuzz`, and whether it finds what is wrong."""

from dataclasses import dataclass

import pytest
import torch

from tests.fuzz import states, texts
from tests.fuzz.__main__ import constructions
from tests.fuzz.engine import (
    CHANGED,
    GARBAGE,
    LATE,
    NOT_NAMED,
    VALUES,
    WRONG_CLASS,
    Found,
    Target,
    cases,
    construct,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "fuzz",
    [
        lambda found, folder: constructions(["core"], found, 1, 0.06),
        lambda found, folder: constructions(["torch", "jax"], found, 1, 0.03),
        lambda found, folder: states.histories(1, found, 4),
        lambda found, folder: texts.expressions(1, found, 600),
        lambda found, folder: texts.files(1, found, 600, folder),
    ],
    ids=["options of the core", "options", "states", "expressions", "files"],
)
def test_nothing_is_found(fuzz, tmp_path):
    fuzz(found := Found(), tmp_path)
    assert found.tried
    assert not found.findings, found.findings[:10]


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


def test_what_is_careless_of_options_is_found():
    found = Found()
    for late in (False, True):
        target = Target(Careless, {"period": 2, "late": late}, Careless.use)
        for value in (0, None, "x", {}):
            construct("Careless", target, "period", value, found)
    assert [kind for kind, _ in found.findings] == [NOT_NAMED] * 4 + [LATE] * 4
    raised = Target(lambda period: period.upper())
    for case in cases({"upper": raised}):
        construct(*case, found)
    assert found.counts[WRONG_CLASS] == len(VALUES) - sum(
        isinstance(value, str | bytes) for value in VALUES
    )


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

    found, good = Found(), {"error": torch.ones(2)}
    for state, right in (
        ({"kind": 1}, None),
        ({"error": torch.full((2,), torch.nan)}, None),
        (good, False),
        (good, True),
    ):
        states.tried("memory", trained, trained(), state, found, right)
    assert [kind for kind, _ in found.findings] == [CHANGED, GARBAGE, GARBAGE]
