"""ml_dtypes teaches NumPy the name bfloat16. What the core computes here is the product, and not
what others are compared with."""

import os

import ml_dtypes  # noqa: F401
import pytest

from tests.bounds import MOVED, move_simulated


@pytest.fixture(autouse=MOVED in os.environ)
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    move_simulated(monkeypatch.setattr)
