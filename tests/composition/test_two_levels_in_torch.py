"""The rows of two levels in torch: four Gloo ranks in two nodes, of which the first two go on as
one node."""

from __future__ import annotations

from typing import Any

import pytest

from tests.composition.scenario import FEATURES, Played, replicas_of
from tests.composition.table import cells
from tests.composition.test_doors_in_torch import RUNS, play
from tests.methods import TWO_LEVELS
from tests.torch.ranks import Cases

cases = Cases(__file__, ranks=4)

ROWS = {f"{door}, {case}": (door, case) for door in RUNS for case in TWO_LEVELS}


@cases.each(ROWS, slow=ROWS)
def played(world: Any, row: tuple[str, str]) -> Played:
    return play(world, *row)


CELLS = cells(ROWS.values(), lambda case, door, feature: False)


@pytest.mark.parametrize(("door", "case", "feature"), CELLS)
def test_cell(results: Any, door: str, case: str, feature: str) -> None:
    ranks = results(f"played[{door}, {case}]")
    training, moving = replicas_of(case)
    FEATURES[feature](case, door, ranks[: moving if feature == "other world size" else training])
