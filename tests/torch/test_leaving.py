"""A script may end right after its last step, with or without `destroy_process_group`."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.launch import end_all, environment
from tests.torch import leaving

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")
def test_leaving_at_once(tmp_path: Path) -> None:
    mark, command = uuid.uuid4().hex, [sys.executable, leaving.__file__, str(tmp_path)]
    try:
        done = subprocess.run(command, env=environment(mark), capture_output=True, text=True, timeout=240, check=False)
    finally:
        end_all(mark)
    assert done.returncode == 0, done.stderr[-4000:]
