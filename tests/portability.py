"""The tests as other machines would run them: `make test-portability`, or `python -m tests.portability [NAME ...] -- COMMAND`.

    make test-portability CONFIG="sse busy" ARGS="tests/jax -x"

A configuration is an environment for COMMAND, the cores that it may use, and company. The libraries below PyTorch, JAX and NumPy choose their
kernels by the processor, and so do their last bits; each has a switch that makes it choose as on another one. One switch is not enough:
`ATEN_CPU_CAPABILITY` leaves matrix products to MKL, and `--xla_cpu_max_isa` leaves them to YNNPACK.

A configuration that fails does not stop the others. A table of all comes last; the exit status is 1 if any has failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

#: XLA's matrix products: by Eigen, not by YNNPACK, whose kernels no switch but this one changes.
EIGEN = "--xla_cpu_experimental_ynn_fusion_type="
SSE = {
    "XLA_FLAGS": f"--xla_cpu_max_isa=SSE4_2 {EIGEN}",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3,X86_V4,AVX512_ICL,AVX512_SPR",
}
AVX2 = {
    "XLA_FLAGS": f"--xla_cpu_max_isa=AVX2 {EIGEN}",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4,AVX512_ICL,AVX512_SPR",
}


@dataclass(frozen=True)
class Configuration:
    """What a machine looks like to the tests."""

    about: str
    env: dict[str, str] = field(default_factory=dict)
    #: The command may use this many of the cores; None: all.
    cores: int | None = None
    #: A process beside it keeps each of all cores busy.
    busy: bool = False


CONFIGURATIONS = {
    "sse": Configuration("a processor with SSE4.2 only, for all libraries", SSE),
    "avx2": Configuration("a processor with AVX2, for all libraries", AVX2),
    "xla-sse": Configuration("SSE4.2 for XLA alone", {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}),
    "xla-avx": Configuration(
        "AVX for XLA alone: no fused multiply-add, as with SSE4.2, but float16", {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"}
    ),
    "xla-avx2": Configuration("AVX2 for XLA alone", {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}),
    "aten-default": Configuration("no vectors for ATen alone", {"ATEN_CPU_CAPABILITY": "default"}),
    "xla-optimized": Configuration(
        "all that XLA compiles is optimized, in tests/jax too",
        {"XLA_FLAGS": "--xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true"},
    ),
    "cores-1": Configuration("one core", cores=1),
    "cores-2": Configuration("two cores", cores=2),
    "cores-4": Configuration("four cores", cores=4),
    "busy": Configuration("beside a process on each core that never waits", busy=True),
}


@dataclass(frozen=True)
class Result:
    """How a configuration went. `counts` is in pytest's words; `failed` names the tests."""

    status: int
    counts: dict[str, int]
    failed: list[str]
    seconds: float


def run(configuration: Configuration, command: Sequence[str]) -> Result:
    """Run pytest's `command` under `configuration`, on the same standard output."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _beside(configuration.busy):
        report = Path(folder, "report.xml")
        available = os.sched_getaffinity(0)
        with _affinity(set(sorted(available)[: configuration.cores])):
            status = subprocess.run(
                [*command, f"--junitxml={report}"], env=os.environ | configuration.env, check=False
            ).returncode
        counts, failed = _read(report)
    return Result(status, counts, failed, time.monotonic() - begin)


@contextmanager
def _affinity(cores: set[int]) -> Iterator[None]:
    """This process and what it starts run on `cores` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _beside(busy: bool) -> Iterator[None]:
    """One process per core that never waits, if `busy`."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in (os.sched_getaffinity(0) if busy else ())
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def _read(report: Path) -> tuple[dict[str, int], list[str]]:
    """The counts and the failed tests of a JUnit report; nothing if pytest did not come to write one."""
    if not report.exists():
        return {}, []
    cases = list(ET.parse(report).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    counts = {"passed": len(cases) - len(bad) - skipped, "failed": len(bad), "skipped": skipped}
    return counts, [f"{c.get('classname')}::{c.get('name')}" for c in bad]


def main(arguments: list[str]) -> int:
    p = argparse.ArgumentParser(prog="tests.portability", description=(__doc__ or "").splitlines()[0])
    p.add_argument("names", nargs="*", metavar="NAME", help="configurations: " + ", ".join(CONFIGURATIONS))
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    names, command = p.parse_args(arguments[:cut]).names or list(CONFIGURATIONS), arguments[cut + 1 :]
    if unknown := [n for n in names if n not in CONFIGURATIONS]:
        p.error(f"no configuration {', '.join(unknown)}: there are {', '.join(CONFIGURATIONS)}")
    if not command:
        p.error("give the command that runs the tests after --")
    available = len(os.sched_getaffinity(0))
    rows, status = [], 0
    for name in names:
        configuration = CONFIGURATIONS[name]
        if (configuration.cores or 0) > available:
            rows.append(f"{name:14} not run: this machine has {available} cores")
            continue
        switches = " ".join(f"{k}={v!r}" for k, v in configuration.env.items())
        print(f"\n=== {name}: {configuration.about}\n{switches}".rstrip(), flush=True)
        result = run(configuration, command)
        status |= result.status != 0
        counts = ", ".join(f"{n} {what}" for what, n in result.counts.items()) or f"ended with {result.status}"
        rows += [f"{name:14} {counts}, {result.seconds / 60:.1f} min", *(f"    {test}" for test in result.failed)]
    print("\n=== summary", *rows, sep="\n", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
