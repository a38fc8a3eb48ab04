"""What the tests are run with: processes that are gone afterwards, `make test-portability`, `make
mutate`, and a compiler."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import torch

from gradwire.jax_backend import transforms
from gradwire.torch_backend.engine.driver import Driver
from tests import launch
from tests.bounds import (
    NOTED,
    move_inputs_of_jax,
    move_inputs_of_torch,
    note_comparisons,
    noting,
    too_near,
)
from tests.compiler import require_compiler
from tests.emulated import mutations
from tests.launch import LIMIT, ROOT, run_ranks
from tests.mutate import draw, everything, lines_of, mutated, places
from tests.portability import CONFIGURATIONS
from tests.torch import ranks

# --- launches -----------------------------------------------------------------------------------

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
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("about to hang", flush=True)
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


# One case after the other, each of which takes less than the limit, and one that takes more.
CASES = """
import time
from tests.torch.ranks import Cases
cases = Cases(__file__, ranks=2, timeout=15)

@cases.each(["1", "2"])
def seconds(world, variant):
    time.sleep(8)
    return world.rank

@cases.case
def hangs(world):
    time.sleep(600)

@cases.case
def after(world):
    return 0
"""


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_launch_shows_why_it_fails_and_leaves_no_process(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(FAILS)
    with pytest.raises(AssertionError, match="what went wrong on rank 1"):
        run_ranks(script, 2)
    script.write_text(HANGS)
    with pytest.raises(AssertionError, match=r"stopped after 15 s:\n(.*\n)*about to hang"):
        # in which they have begun, on a busy machine too
        run_ranks(script, 2, tmp_path, timeout=15)
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    deadline = time.monotonic() + 60
    while any(map(running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_cases_have_a_limit_each_and_keep_what_came_before(tmp_path: Path) -> None:
    """A file with many cases takes as long as it takes, on a slow machine too."""
    (script := tmp_path / "cases_of_a_test.py").write_text(CASES)
    cases = ranks.Cases(str(script), ranks=2, timeout=15)
    (folder := tmp_path / "results").mkdir()
    with cases.run(folder, 2, slow=True) as results:
        for variant in "12":
            assert results(f"seconds[{variant}]") == [0, 1]
        with pytest.raises(AssertionError, match=r"from ranks \[0, 1\]:\n.*stopped after 15 s"):
            results("hangs")
        with pytest.raises(AssertionError, match="no result of 'after'"):
            results("after")
        assert results("seconds[1]") == [0, 1]
        pids = [process.pid for process in results.launch.processes]
    assert not any(map(running, pids))


def test_an_interpreter_ends_with_the_test_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the process that is left fails whichever test is next when it is collected."""
    started: list[launch.Process] = []

    class Started(launch.Process):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def time_is_up(seconds: float) -> None:
        raise TimeoutError

    monkeypatch.delenv(launch.PYTHON, raising=False)
    monkeypatch.setattr(launch, "Process", Started)
    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=time_is_up))
    with pytest.raises(TimeoutError):
        launch.interpreter.__wrapped__()
    assert started[0].returncode is not None


#: Prints how often the system had to find memory for this process.
DEEP = """
import resource

def leaf():
    pass

def descend(depth):
    for _ in range(5_000):
        leaf()
    if depth:
        descend(depth - 1)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

descend(0)
before = faults()
descend(300)
found = faults() - before
print(found)
"""


def test_deep_calls_ask_the_system_for_no_memory() -> None:
    """Where a frame is the first that has no place, each call of it did."""
    exec(DEEP, (here := {}))
    forked = subprocess.run(
        [launch.interpreter(), "-c", DEEP], capture_output=True, text=True, check=True
    )
    assert here["found"] < 2_500
    assert int(forked.stdout) < 2_500


@pytest.mark.parametrize("in_ci", [False, True])
def test_without_a_compiler_tests_say_so_and_fail_in_ci(
    monkeypatch: pytest.MonkeyPatch, in_ci: bool
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler -O2")
    monkeypatch.setenv("CI", "1" if in_ci else "")
    with pytest.raises(
        pytest.fail.Exception if in_ci else pytest.skip.Exception, match="'/no/such/compiler'"
    ):
        require_compiler("the emulated accelerator")


# --- other machines -----------------------------------------------------------------------------

#: In place of pytest: it writes down what it and its processes see, and a report of a test that
#: failed.
PROBE = """
import json, os, sys
from pathlib import Path

def note(process):
    where = Path(__file__).with_name(f"{process}-{os.environ.get('ATEN_CPU_CAPABILITY')}")
    where.write_text(json.dumps([dict(os.environ), len(os.sched_getaffinity(0))]))

if __name__ == "__main__":
    if not sys.argv[-1].startswith("--junitxml="):
        note(sys.argv[-1])
    else:
        import tests.conftest
        from tests.launch import jax_processes, run_ranks
        note("tests")
        run_ranks(__file__, 1, "rank")
        jax_processes(__file__, 1, "jax")
        report = '<r><testcase/><testcase classname="a" name="b"><failure/></testcase></r>'
        Path(sys.argv[-1].partition("=")[2]).write_text(report)
        sys.exit(1)
"""


@pytest.mark.slow
def test_switches_reach_every_process_and_failures_are_told(tmp_path: Path) -> None:
    (probe := tmp_path / "probe.py").write_text(PROBE)
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=7",
        "PYTHONPATH": str(ROOT),
    }
    env = {
        k: v for k, v in env.items() if k not in ("GRADWIRE_TEST_XLA_FLAGS", "ATEN_CPU_CAPABILITY")
    }

    def portability(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.portability", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT
        )

    # no such row, no command
    assert portability("see", "--", "true").returncode == portability("sse").returncode == 2
    done = portability("sse", "cores-1", "--", sys.executable, str(probe))
    assert done.returncode == 1, done.stderr
    first, failed, second, _ = done.stdout.split("=== summary\n")[1].splitlines()
    assert first.startswith("sse            1 passed, 1 failed, 0 skipped, "), done.stdout
    assert (failed.strip(), second[:7]) == ("a::b", "cores-1")
    for process, devices in (("tests", 4), ("rank", 4), ("jax", 1)):
        count = f"--xla_force_host_platform_device_count={devices}"
        seen, cores = json.loads((tmp_path / f"{process}-default").read_text())
        expected = dict(CONFIGURATIONS["sse"].env)
        given = [*expected.pop("XLA_FLAGS").split(), count]
        assert seen["XLA_FLAGS"].split()[: len(given)] == given  # and what makes compilation quick
        assert {name: seen[name] for name in expected} == expected
        assert cores == len(os.sched_getaffinity(0))
        seen, cores = json.loads((tmp_path / f"{process}-None").read_text())
        assert (cores, seen["XLA_FLAGS"].split()[0]) == (1, count)


def test_bounds_within_reach_of_rounding_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the line where they stand. What codes lose is no rounding, unless it differs a little
    from one processor to another."""
    monkeypatch.setenv(NOTED, str(tmp_path))
    assert noting(3e-8) < 1e-6
    assert noting(4e-8) < 1e-6
    assert noting(0.03) < 0.05
    for value in (0.0499, 0.04995):
        assert noting(value) < 0.05
    assert max(noting(1e-9), noting(2e-9)) <= 1e-7
    here = Path(__file__).relative_to(ROOT)
    lines = [line.partition(": ")[0] for line in too_near(tmp_path)]
    first = lines and int(lines[0].rpartition(":")[2])
    assert lines == [f"{here}:{first}", f"{here}:{first + 3}"]
    monkeypatch.delenv(NOTED)
    assert type(noting(1.0)) is float


def test_comparisons_of_libraries_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With how much of their tolerance is used. What is compared for many lines is noted for each
    of them."""
    monkeypatch.setenv(NOTED, str(tmp_path))
    note_comparisons(monkeypatch.setattr)

    def assert_near(x: float) -> None:
        np.testing.assert_allclose(x, 2.0, rtol=1e-6)

    for distance in (1e-8, 1e-7):  # within 30 times, and not
        assert_near(2.0 + distance)
        assert np.allclose([1.0, 2.0 + distance], [1.0, 2.0], rtol=1e-6, atol=0)
        tensors = [torch.tensor(x, dtype=torch.float64) for x in (2.0 + distance, 2.0)]
        torch.testing.assert_close(*tensors, rtol=1e-6, atol=0)
        assert torch.allclose(*tensors, rtol=1e-6, atol=0)
        assert 2.0 + distance == pytest.approx(2.0, rel=1e-6)
        if distance == 1e-8:
            assert too_near(tmp_path) == []
    found = too_near(tmp_path)
    assert [line.partition(": ")[0].partition(":")[0] for line in found] == [
        str(Path(__file__).relative_to(ROOT))
    ] * 5
    assert all("1e-06 is within reach of 5e-08" in line for line in found)


def test_inputs_are_moved_by_one_unit_in_the_last_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up and down; of 16 bits, whose units are no rounding of a processor, nothing is."""
    move_inputs_of_torch(monkeypatch.setattr)
    move_inputs_of_jax(monkeypatch.setattr)
    x = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    gradients = {"w": torch.from_numpy(x.copy()), "half": torch.from_numpy(x).bfloat16()}
    half = gradients["half"].clone()
    with pytest.raises(AttributeError):  # nothing is driven: it has been moved before
        Driver.add(object(), gradients, first=True, last=True)  # type: ignore[arg-type]
    leaves = transforms.flatten({"w": jnp.asarray(x)}).leaves
    for moved in (gradients["w"].numpy(), np.asarray(leaves["w"])):
        off = moved.view(np.int32) - x.view(np.int32)
        assert (abs(off) <= 2).all()
        assert (off > 0).mean() == pytest.approx(0.5, abs=0.2)
        assert (off < 0).mean() == pytest.approx(0.5, abs=0.2)
    assert gradients["half"].equal(half)


# --- mutations ----------------------------------------------------------------------------------

SOURCE = '''
def f(x: int = 2, *, y: bool = True) -> int:
    """Text."""
    if x < 1 and not y:
        raise ValueError(f"{x + 1}")
    total: float = -x * 3
    while y:
        print(total)
        total += 1 if x is None else 2
    return total
'''


@pytest.mark.slow
def test_each_place_is_another_program() -> None:
    found = places(SOURCE)
    programs = {ast.unparse(ast.parse(mutated(SOURCE, number))) for number in range(len(found))}
    assert len(programs) == len(found)
    assert ast.unparse(ast.parse(SOURCE)) not in programs
    assert sorted(line for line, _ in found) == [2, 2, *[4] * 5, *[6] * 3, 7, 8, *[9] * 4]


def test_the_lines_that_tests_have_to_reach() -> None:
    """All of a statement; of what runs as the file is imported, the functions that it is for."""
    source = f"LIMIT = (\n  1 +\n  2)\n{SOURCE}\n\ndef g():\n  return (\n    LIMIT)\n\nclass A:\n  n: int = 3\n  def h(self):\n    pass\n"
    expected = {
        2: {1, 2, 3, 18},
        5: {*range(5, 14)},
        7: {7},
        11: {11},
        18: {17, 18},
        21: {20, 21, 22, 23},
    }
    for line, lines in expected.items():
        assert lines_of(source, line) >= lines, line
    assert lines_of(source, 11) == {11}


@pytest.mark.slow
def test_a_seed_draws_the_same_from_all_rooms_and_as_many_as_are_asked_for() -> None:
    drawn = draw(1, 60)
    assert drawn == draw(1, 60)
    assert drawn != draw(2, 60)
    assert {m.file.rpartition("/")[0] for m in draw(1, 1000)} == set(everything())
    for mutation in drawn[:20]:
        source = (ROOT / mutation.file).read_text()
        assert ast.dump(ast.parse(mutated(source, mutation.number))) != ast.dump(ast.parse(source))
    for count in (1, 59, 61, 397):
        assert len({(m.file, m.number) for m in draw(1, count)}) == count
    few = "core/codecs"
    assert len(draw(1, 10**6, few)) == sum(map(len, everything(few).values()))


@pytest.mark.slow
def test_each_mutation_for_the_accelerator_has_one_place() -> None:
    for name, mutation in mutations.MUTATIONS.items():
        file, source = mutations.mutated(mutation)
        assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(file.read_text())), name
    for function, pattern in (("Pending.wait", "self.nowhere()"), ("nobody", "X")):
        with pytest.raises(ValueError, match=rf"0 (places of|functions called) {function}"):
            mutations.mutated(mutations.Mutation(function, pattern, "pass", mutations.SHARDED))


def test_a_pattern_becomes_something_else() -> None:
    source = ast.unparse(ast.parse(SOURCE))
    for pattern, becomes, expected in (
        ("x < 1", "x <= 1", "    if x <= 1 and (not y):\n"),
        (
            "total += X",
            "total += 2 * (X)\nprint(X)",
            "total += 2 * (1 if x is None else 2)\n        print(1 if x is None else 2)\n",
        ),
        ("while X:\n    print(Y)\n    Z += A", "print(X, Y)", "    print(y, total)\n    return"),
    ):
        changed, places = mutations.changed(source, pattern, becomes)
        assert places == 1
        assert expected in changed
    assert mutations.changed(source, "X is not None", "X")[1] == 0
