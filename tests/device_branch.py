"""The same tests with the branch that gradwire takes for tensors on a device, where the host must not look at them: on tensors of the CPU.

    GRADWIRE_TEST_DEVICE_BRANCH=1 .venv/bin/pytest tests/torch      # `make test-device-branch`

Half of what runs on CUDA would otherwise never run in a test that looks at results in detail.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "GRADWIRE_TEST_DEVICE_BRANCH"
_KEPT: list[Any] = []


def take_if_asked() -> None:
    """For the rest of the process, if the environment says so."""
    if os.environ.get(VARIABLE) == "1":
        from benchmarks.dry import on_a_device

        _KEPT.append(on_a_device())  # one that nobody holds ends at once
        _KEPT[0].__enter__()
