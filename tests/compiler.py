"""What needs a C++ compiler, which not every machine has."""

from __future__ import annotations

import os
import shlex
import shutil

import pytest


def require_compiler(what: str) -> None:
    """Without a compiler the calling test is skipped, and says why; in CI it fails."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is not None:
        return
    reason = f"{what} needs a C++ compiler, and there is no {compiler!r}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
