from collections.abc import Iterator

import pytest

from gradwire.core.simulate.self_check import VARIABLE
from tests.emulated.build import shared_library


@pytest.fixture(scope="module", autouse=True)
def _built() -> Iterator[None]:
    """Before ranks start, each of which would wait for the build. They check nothing by themselves:
    what is computed is what is tested here."""
    shared_library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "0")
        yield
