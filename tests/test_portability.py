"""`make test-portability`: its switches reach every process of the tests, and what fails is told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch import ROOT
from tests.portability import CONFIGURATIONS

#: A suite of one file, whose processes write down what they see.
SUITE = """
import os
from pathlib import Path

from tests.launch import jax_processes, run_ranks

PROBE = Path(__file__).with_name("probe.py")


def test_processes(monkeypatch):
    monkeypatch.setattr("sys.argv", ["probe.py", "pytest"])
    exec(PROBE.read_text(), {"__file__": str(PROBE)})
    run_ranks(PROBE, 1, "rank")
    jax_processes(PROBE, 1, "jax")


def test_that_fails():
    assert False
"""
PROBE = """
import json, os, sys
from pathlib import Path

where = Path(__file__).parent / f"{sys.argv[-1]}-{os.environ.get('ATEN_CPU_CAPABILITY')}"
where.write_text(json.dumps([dict(os.environ), len(os.sched_getaffinity(0))]))
"""
GIVEN = {
    k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "GRADWIRE_TEST_XLA_FLAGS", "ATEN_CPU_CAPABILITY")
}


def portability(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.portability", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=GIVEN | env, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_switches_reach_every_process_and_failures_are_told(tmp_path: Path) -> None:
    suite = tmp_path / "test_inner.py"
    suite.write_text(SUITE)
    (tmp_path / "probe.py").write_text(PROBE)
    command = [sys.executable, "-m", "pytest", "-n1", "-ptests.conftest", f"--rootdir={tmp_path}", suite]
    done = portability("sse", "cores-1", "--", *command, XLA_FLAGS="--xla_force_host_platform_device_count=7")
    assert done.returncode == 1, done.stdout
    first, *failed = done.stdout.split("=== summary\n")[1].split("cores-1")[0].splitlines()
    assert first.startswith("sse            1 passed, 1 failed, 0 skipped, "), done.stdout
    assert [line.strip() for line in failed] == ["test_inner::test_that_fails"]

    def seen(process: str, aten: str | None) -> Any:
        return json.loads((tmp_path / f"{process}-{aten}").read_text())

    for process, devices in (("pytest", 4), ("rank", 4), ("jax", 1)):
        env, cores = seen(process, "default")
        expected = dict(CONFIGURATIONS["sse"].env)
        given = [*expected.pop("XLA_FLAGS").split(), count(devices)]
        assert env["XLA_FLAGS"].split()[: len(given)] == given  # and what makes compilation quick
        assert {name: env[name] for name in expected} == expected
        assert cores == len(os.sched_getaffinity(0))
        env, cores = seen(process, None)
        assert cores == 1
        assert env["XLA_FLAGS"].split()[0] == count(devices)


def count(devices: int) -> str:
    return f"--xla_force_host_platform_device_count={devices}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["see", "--", "true"], "no configuration see: there are sse, avx2"), (["sse"], "after --")],
)
def test_what_means_nothing_is_refused(arguments: list[str], message: str) -> None:
    done = portability(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
