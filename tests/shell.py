"""Commands as pages print them, run by bash, with stand-ins for what a cluster has: several nodes, all of them this machine, and Slurm."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.launch import ROOT, end_all, environment
from tests.pages import blocks, path_of, replaced

#: The programs that are found first. Slurm's know what the pages use of them, and nothing else.
PROGRAMS = {
    "python": f'exec {sys.executable} "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "gradwire": f'exec {sys.executable} {ROOT}/tests/cli/commands.py "$@"',
    "scontrol": '[ "$1 $2" = "show hostnames" ] && tr , "\\n" <<< "$3"',
    "srun": """
nodes=()
for i in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$i "$@" & nodes+=($!); done
for node in "${nodes[@]}"; do wait $node || exit 1; done""",
}
#: What Slurm tells a job on two nodes.
SLURM = {"SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.1", "SLURM_NNODES": "2"}


def run_bash(script: str, folder: Path, env: Mapping[str, str] | None = None, timeout: float = 200) -> str:
    """Run a script in a folder; returns what it prints on its standard output, without Gloo's notes.

    Raises:
        AssertionError: it fails, or takes too long. No process is left.
    """
    programs, mark = folder / ".programs", uuid.uuid4().hex
    programs.mkdir(exist_ok=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    given = environment(mark)
    given |= {"PATH": f"{programs}:{given['PATH']}", "JAX_PLATFORMS": "cpu"} | dict(env or {})
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=given, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            printed, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end_all(mark)
            printed, errors = process.communicate(timeout=30)
        finally:
            end_all(mark)
    assert process.returncode == 0, f"{script}\nended with {process.returncode}:\n{printed[-3000:]}\n{errors[-3000:]}"
    return "".join(line for line in printed.splitlines(True) if not line.startswith("[Gloo]"))


def at_once(lines: Iterable[str]) -> str:
    """A script that starts these lines together, as somebody does on several nodes, and fails where one fails."""
    started = "\n".join(f"({line}) & nodes+=($!)" for line in lines)
    return f'nodes=()\n{started}\nfor node in "${{nodes[@]}}"; do wait $node || exit 1; done'


def command(page: str, number: int, instead: Mapping[str, str] | None = None) -> str:
    """One of all lines of bash of a page, see `command_lines`, in which other words stand `instead` of some."""
    text = command_lines("\n".join(blocks(path_of(page).read_text(), "bash")))[number]
    return replaced(page, text, instead)


def command_lines(text: str) -> list[str]:
    """The lines of a block of bash: those that go on are joined, and comments left out."""
    lines = [re.sub(r"(^|\s+)#.*", "", line) for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    return [line for line in lines if line]
