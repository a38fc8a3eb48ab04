"""The launcher of the tests: a failure is shown, and nothing is left running."""

import time
from pathlib import Path

import pytest

from tests.launch import torchrun

FAILS = """
import os, time
if os.environ["RANK"] == "1":
    raise RuntimeError("what went wrong on rank 1")
time.sleep(600)
"""

# A child in a session of its own, and a rank that does not end when it is asked to.
HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(f"{os.getpid()} {child.pid}")
print("about to hang", flush=True)
time.sleep(600)
"""


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_failing_rank_ends_the_launch_and_shows_why(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    with pytest.raises(AssertionError, match="what went wrong on rank 1"):
        torchrun(script, 2, timeout=90)


def test_a_launch_out_of_time_leaves_no_process(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"stopped after 25 s:\n(.*\n)*about to hang"):
        torchrun(script, 2, str(tmp_path), timeout=25)
    assert time.monotonic() - start < 50
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    assert not any(running(pid) for pid in pids)
