"""The tests as other machines would run them: `make test-portability`, or `python -m
tests.portability [NAME ...] -- COMMAND`.

    make test-portability CONFIG="sse busy" ARGS="tests/jax -x"

A configuration is an environment for COMMAND, the cores that it may use, and company. The libraries
below PyTorch, JAX and NumPy choose their kernels by the processor, and so do their last bits; each
has a switch that makes it choose as on another one. One switch is not enough: `ATEN_CPU_CAPABILITY`
leaves matrix products to MKL, and `--xla_cpu_max_isa` leaves them to YNNPACK.

The last one, `bounds`, asks whether bounds of tests lie within reach of rounding, see
`tests/bounds.py`.

A configuration that fails does not stop the others. A table of all comes last; the exit status is 1
if any has failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.bounds import MOVED, NOTED, THREADS, too_near

#: XLA's matrix products: by Eigen, not by YNNPACK, whose kernels no switch but this one changes.
EIGEN = "--xla_cpu_experimental_ynn_fusion_type="


def processor(
    xla: str, aten: str, mkl: str, onednn: str, openblas: str, without: str
) -> dict[str, str]:
    """The switches of all libraries."""
    env = {
        "XLA_FLAGS": f"--xla_cpu_max_isa={xla} {EIGEN}",
        "ATEN_CPU_CAPABILITY": aten,
        "MKL_CBWR": mkl,
    }
    return env | {
        "ONEDNN_MAX_CPU_ISA": onednn,
        "OPENBLAS_CORETYPE": openblas,
        "NPY_DISABLE_CPU_FEATURES": without,
    }


@dataclass(frozen=True)
class Configuration:
    """What a machine looks like to the tests: `cores` of those that there are, or all; `busy`: a
    process beside the tests keeps each of all cores busy."""

    about: str
    env: dict[str, str] = field(default_factory=dict)
    cores: int | None = None
    busy: bool = False


_SSE = processor(
    "SSE4_2", "default", "SSE4_2", "SSE41", "Nehalem", "X86_V3,X86_V4,AVX512_ICL,AVX512_SPR"
)
_AVX2 = processor("AVX2", "avx2", "AVX2", "AVX2", "Haswell", "X86_V4,AVX512_ICL,AVX512_SPR")
CONFIGURATIONS = {
    "sse": Configuration("a processor with SSE4.2 only, for all libraries", _SSE),
    "avx2": Configuration("a processor with AVX2, for all libraries", _AVX2),
    "xla-sse": Configuration("SSE4.2 for XLA alone", {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}),
    "xla-avx": Configuration(
        "AVX for XLA alone: no fused multiply-add, as with SSE4.2, but float16",
        {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"},
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


#: As which `bounds` are recorded: see `tests/bounds.py`.
BOUNDS = {
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "two threads": {THREADS: "2"},
    "moved": {MOVED: "1"},
}


def bounds(command: Sequence[str]) -> list[str]:
    """Run pytest's `command` in each of these ways; the bounds that are within reach of rounding.
    What is compared to the bit fails where inputs are moved: only bounds count here."""
    capability = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    with tempfile.TemporaryDirectory() as folder:
        for name, env in BOUNDS.items():
            if name == "avx512" and "avx512f" not in capability:
                print("=== bounds, avx512: not run, since this machine has none", flush=True)
                continue
            print(f"\n=== bounds, {name}", flush=True)
            subprocess.run(command, env=os.environ | env | {NOTED: folder}, check=False)
        return too_near(Path(folder))


def run(
    configuration: Configuration, command: Sequence[str]
) -> tuple[int, dict[str, int], list[str]]:
    """Run pytest's `command` under `configuration`, on the same standard output. Its exit status;
    counts in pytest's words, and the tests that failed."""
    available = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as after:
        for _ in available if configuration.busy else ():
            spinning = after.enter_context(
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
            )
            after.callback(spinning.kill)
        after.callback(os.sched_setaffinity, 0, available)
        os.sched_setaffinity(0, set(sorted(available)[: configuration.cores]))
        words = [*command, f"--junitxml={folder}/report.xml"]
        done = subprocess.run(words, env=os.environ | configuration.env, check=False)
        return done.returncode, *_read(Path(folder, "report.xml"))


def _read(report: Path) -> tuple[dict[str, int], list[str]]:
    """The counts and the failed tests of a JUnit report; nothing if pytest did not come to write
    one."""
    if not report.exists():
        return {}, []
    cases = list(ET.parse(report).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    counts = {"passed": len(cases) - len(bad) - skipped, "failed": len(bad), "skipped": skipped}
    return counts, [f"{c.get('classname')}::{c.get('name')}" for c in bad]


def main(arguments: list[str]) -> int:
    p = argparse.ArgumentParser(
        prog="tests.portability", description=(__doc__ or "").splitlines()[0]
    )
    p.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="configurations: " + ", ".join([*CONFIGURATIONS, "bounds"]),
    )
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    names, command = (
        p.parse_args(arguments[:cut]).names or [*CONFIGURATIONS, "bounds"],
        arguments[cut + 1 :],
    )
    if unknown := [n for n in names if n not in (*CONFIGURATIONS, "bounds")]:
        p.error(
            f"no configuration {', '.join(unknown)}: there are {', '.join(CONFIGURATIONS)}, bounds"
        )
    if not command:
        p.error("give the command that runs the tests after --")
    available = len(os.sched_getaffinity(0))
    rows, status = [], 0
    for name in names:
        if name == "bounds":
            near = bounds(command)
            status |= bool(near)
            rows += [
                f"{name:14} {len(near)} within reach of rounding",
                *(f"    {bound}" for bound in near),
            ]
            continue
        configuration = CONFIGURATIONS[name]
        if (configuration.cores or 0) > available:
            rows.append(f"{name:14} not run: this machine has {available} cores")
            continue
        switches = " ".join(f"{k}={v!r}" for k, v in configuration.env.items())
        print(f"\n=== {name}: {configuration.about}\n{switches}".rstrip(), flush=True)
        begun = time.monotonic()
        code, counts, failed = run(configuration, command)
        status |= code != 0
        said = ", ".join(f"{n} {what}" for what, n in counts.items()) or f"ended with {code}"
        minutes = (time.monotonic() - begun) / 60
        rows += [f"{name:14} {said}, {minutes:.1f} min", *(f"    {test}" for test in failed)]
    print("\n=== summary", *rows, sep="\n", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
