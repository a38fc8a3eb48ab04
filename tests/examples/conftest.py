"""The examples as their users run them: scripts, in processes of their own, most of them forked."""

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import launch
from tests.launch import LIMIT

EXAMPLES = launch.ROOT / "examples"
#: A model small enough to train in no time.
TINY = ["--width=32", "--layers=1", "--context=16", "--batch-size=2", "--eval-windows=4"]


@dataclass
class Started:
    """A running command, and what it says."""

    process: launch.Process
    mark: str
    log: Path

    def finish(self, timeout: float = LIMIT) -> str:
        """Its output, once it has ended well."""
        output = self.output(timeout)
        assert self.process.returncode == 0, output[-6000:]
        assert not self.left_behind()
        return output

    def output(self, timeout: float = LIMIT) -> str:
        """All it has said, once it has ended."""
        self.process.wait(timeout)
        return self.log.read_text()

    def alive(self) -> list[int]:
        """Its processes, children of children included."""
        return launch.marked(self.mark)

    def left_behind(self) -> list[int]:
        """Its processes, once they have had a moment to end."""
        deadline = time.monotonic() + 60
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive

    def wait_for(self, condition: Callable[[], object], timeout: float = LIMIT) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, (
                f"not after {timeout} s:\n{self.log.read_text()[-2000:]}"
            )
            assert self.process.poll() is None, self.output()[-6000:]
            time.sleep(0.02)

    def kill(self) -> None:
        """As by a power cut: all its processes at once, with no time to clean up."""
        launch.end_all(self.mark)
        self.process.wait()


@pytest.fixture(scope="session")
def xla_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same little programs are run again and again: XLA compiles each once."""
    return tmp_path_factory.mktemp("xla")


@pytest.fixture
def start(
    xla_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Started]]:
    """Start a command line; whatever it has started is gone after the test."""
    everything: list[Started] = []
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(xla_cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def starter(*command: str | Path, python: str = "", **env: str) -> Started:
        mark, log = uuid.uuid4().hex, tmp_path_factory.mktemp("log") / "log"
        # Compile fast, not well. And no number of devices: the scripts say themselves how many they
        # want.
        flags = {launch.MARK: mark, "XLA_FLAGS": launch.quickly_compiled(launch.xla_flags())}
        process = launch.start(*command, log=str(log), env=cache | flags | env, python=python)
        everything.append(Started(process, mark, log))
        return everything[-1]

    try:
        yield starter
    finally:
        for started in everything:
            started.kill()


@contextmanager
def examples_importable() -> Iterator[None]:
    """The scripts' own folder comes first on the path of a script."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in (set(sys.modules) - before) & {p.stem for p in EXAMPLES.glob("*.py")}:
            del sys.modules[name]
