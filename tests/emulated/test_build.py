"""Where there is no compiler the emulated accelerator is left out and says so, but never in CI."""

import pytest

from tests.emulated.build import shared_library


@pytest.mark.parametrize("in_ci", [False, True])
def test_without_a_compiler(monkeypatch, in_ci):
    monkeypatch.setenv("CXX", "/no/such/compiler -O2")
    monkeypatch.setenv("CI", "1" if in_ci else "")
    outcome = pytest.fail.Exception if in_ci else pytest.skip.Exception
    with pytest.raises(outcome, match="needs a C\\+\\+ compiler, and there is no '/no/such/compiler'"):
        shared_library()
