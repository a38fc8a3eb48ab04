from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.core.simulate.self_check import VARIABLE
from tests.emulated.build import shared_library

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them are slow: to build the device takes most of a minute, and what trains on it are
    variants of what trains on the CPU."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _built() -> Iterator[None]:
    """Before ranks start, each of which would wait for the build. They check nothing by themselves:
    what is computed is what is tested here."""
    shared_library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "0")
        yield
