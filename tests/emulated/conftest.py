import pytest

from tests.emulated.build import shared_library


@pytest.fixture(scope="module", autouse=True)
def _built():
    """Before ranks start, each of which would wait for the build."""
    shared_library()
