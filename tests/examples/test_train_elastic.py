"""The example trains at two sites, one of which is killed and comes back."""

import re
import subprocess
import sys
import time

import pytest

from tests.examples.conftest import EXAMPLES
from tests.forked import start
from tests.launch import ROOT, free_port

pytest.importorskip("torchft")
TINY = ("--width=32", "--layers=1", "--context=16", "--batch-size=4", "--rank=2", "--period=5", "--steps=100000")


@pytest.mark.slow
def test_a_site_that_is_killed_comes_back(tmp_path):
    port, started = free_port(), []
    env = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
    lighthouse = [sys.executable, ROOT / "tests" / "lighthouse.py", f"--bind=127.0.0.1:{port}", "--min_replicas=1"]

    def site(number, log):
        (tmp_path / log).touch()
        arguments = (f"--site={number}", f"--text={ROOT / 'README.md'}", *TINY)
        started.append(start(EXAMPLES / "train_elastic.py", *arguments, log=str(tmp_path / log), env=env))

    def wait_for(log, pattern):
        end = time.monotonic() + 120
        while not re.search(pattern, (tmp_path / log).read_text()):
            assert time.monotonic() < end, (tmp_path / log).read_text()[-1000:]
            time.sleep(0.1)

    with subprocess.Popen([*lighthouse, "--heartbeat_timeout_ms=1000"], stderr=subprocess.DEVNULL) as server:
        try:
            site(0, "first")
            wait_for("first", r"round 2 of 1 sites")
            site(1, "second")
            wait_for("second", r"of 2 sites")
            started[-1].kill()
            wait_for("first", r"of 2 sites(?s:.*)of 1 sites")
            site(1, "again")
            wait_for("again", r"of 2 sites")
        finally:
            for process in started:
                process.kill()
                process.join()
            server.kill()
    steps = {
        log: int(re.search(r"step (\d+),", (tmp_path / log).read_text())[1]) for log in ("first", "second", "again")
    }
    assert steps["first"] < steps["second"] < steps["again"]
