"""A script may end right after its last step, with or without `destroy_process_group`."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.launch import end_all, environment

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")
def test_leaving_at_once() -> None:
    mark = uuid.uuid4().hex
    script = Path(__file__).with_name("leaving.py")
    try:
        done = subprocess.run(
            [sys.executable, str(script), "1"],
            env=environment(mark),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        end_all(mark)
    assert done.returncode == 0, done.stderr[-4000:]
