"""The launcher of the tests: a failure is shown, and nothing is left running."""

import psutil
import pytest

from tests.launch import torchrun

pytestmark = pytest.mark.slow

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
print("about to hang", flush=True)
with open(f"{sys.argv[1]}/{os.environ['RANK']}.new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(file.name, file.name.removesuffix(".new"))  # it is there when it is whole
time.sleep(600)
"""


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_failing_rank_ends_the_launch_and_shows_why(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    with pytest.raises(AssertionError, match="what went wrong on rank 1"):
        torchrun(script, 2)


def test_a_launch_out_of_time_leaves_no_process(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    started = [tmp_path / rank for rank in "01"]
    for seconds in (5, 30, 120):  # on a busy machine ranks take long to start
        with pytest.raises(AssertionError, match=rf"stopped after {seconds} s:\n") as stopped:
            torchrun(script, 2, str(tmp_path), timeout=seconds)
        if all(file.exists() for file in started):
            break
    assert "about to hang" in str(stopped.value)
    pids = [int(pid) for file in started for pid in file.read_text().split()]
    assert len(pids) == 4
    assert not any(running(pid) for pid in pids)
