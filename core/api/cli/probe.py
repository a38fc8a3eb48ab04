"""`gradwire probe`: joins the processes that a launcher has started, measures, and writes what was
found."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from gradwire.cli.models import BadArgument, require_folder
from gradwire.core.advise.probe import Probe

HOW = """a link has two ends, and here is one process. Start one for each replica, on every machine:
  torchrun --nproc-per-node=8 --no-python gradwire probe                                                     # torch, one machine
  torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --no-python gradwire probe
  gradwire probe --framework jax --coordinator HOST:1234 --processes 2 --process 0                           # JAX: and 1, on the other
JAX on several devices of one machine: gradwire probe --framework jax"""


def run_probe(
    framework: str | None,
    output: Path,
    nodes: int | None,
    backend: str | None,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
) -> None:
    """Measure, and write the probe on the first process. Raises BadArgument."""
    if framework is None:
        framework = (
            "jax"
            if coordinator is not None
            else "torch"
            if _of_launcher("WORLD_SIZE", 1) > 1
            else ""
        )
    _require_sense(framework, backend, coordinator, processes, process)
    # before anybody measures
    if _of_launcher("RANK", process or 0) == 0:
        require_folder("--output", output)
    try:
        if framework == "torch":
            found, first = _torch(nodes, backend)
        elif framework == "jax":
            found, first = _jax(nodes, coordinator, processes, process)
        else:
            raise BadArgument(HOW)
    except ValueError as error:
        raise BadArgument(str(error)) from error
    if first:
        print(found)
        try:
            found.save(output)
        except OSError as error:
            raise BadArgument(f"--output {output}: {error.strerror}") from error
        print(f"written to {output}; next: gradwire advise MODEL --probe {output} --step-ms …")


def _require_sense(
    framework: str,
    backend: str | None,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
) -> None:
    if framework not in ("torch", "jax", ""):
        raise BadArgument(f"--framework {framework} is unknown; give torch or jax")
    if backend not in (None, "nccl", "gloo"):
        raise BadArgument(f"--backend {backend} is unknown; give nccl or gloo")
    if backend is not None and framework == "jax":
        raise BadArgument(f"--backend {backend}: that is for torch; jax has its own")
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    named = [f"{option} {value}" for option, value in given.items() if value is not None]
    if named and framework == "torch":
        raise BadArgument(f"{named[0]}: that is for jax; torch reads what torchrun says")
    if named and len(named) < len(given):
        raise BadArgument(f"{named[0]}: give --coordinator, --processes and --process together")
    if process is not None and processes is not None and process >= processes:
        raise BadArgument(f"--process {process}: processes are numbered from 0 to {processes - 1}")


def _of_launcher(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, str(otherwise))
    if not text.isdecimal():
        raise BadArgument(
            f"{variable}={text!r} in the environment is no number: leave it to torchrun"
        )
    return int(text)


def _torch(nodes: int | None, backend: str | None) -> tuple[Probe, bool]:
    if _of_launcher("WORLD_SIZE", 1) < 2:
        raise BadArgument(HOW)
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    library = backend or ("nccl" if gpus else "gloo")
    if library == "nccl":
        torch.cuda.set_device(_gpu(gpus))
    try:
        dist.init_process_group(library)
    except dist.DistError as error:
        raise BadArgument(f"the processes of torchrun do not find each other: {error}") from error
    try:
        probe: Any = importlib.import_module("gradwire.torch_backend.advise.probe").probe
        return probe(nodes=nodes), dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def _gpu(gpus: int) -> int:
    """The GPU of this process. Raises BadArgument if there is none for each: NCCL takes two
    processes on one for an error, unless NCCL_HOSTID tells them apart."""
    local, processes = _of_launcher("LOCAL_RANK", 0), _of_launcher("LOCAL_WORLD_SIZE", 1)
    if not gpus:
        raise BadArgument(
            "--backend nccl: torch finds no GPU here, or has no NCCL; give --backend gloo"
        )
    if processes > gpus and "NCCL_HOSTID" not in os.environ:
        raise BadArgument(
            f"LOCAL_WORLD_SIZE={processes} processes on a machine with {gpus}"
            f" GPU{'s' * (gpus > 1)}, of which NCCL wants one for each: start {gpus}, or give"
            " --backend gloo, which sends from host memory"
        )
    return local % gpus


def _jax(
    nodes: int | None, coordinator: str | None, processes: int | None, process: int | None
) -> tuple[Probe, bool]:
    jax: Any = importlib.import_module("jax")
    if coordinator is not None:
        print(
            f"gradwire: process {process} waits for all {processes} at {coordinator}",
            file=sys.stderr,
            flush=True,
        )
        jax.distributed.initialize(coordinator, processes, process)
    if jax.device_count() < 2:
        raise BadArgument(HOW)
    mesh = jax.make_mesh((jax.device_count(),), ("replicas",))
    probe: Any = importlib.import_module("gradwire.jax_backend.advise.probe").probe
    return probe(mesh, "replicas", nodes=nodes), jax.process_index() == 0
