"""`gradwire.doctor`: is it right here? Known answers of kernels, messages and algorithms, on this
machine or on the ranks of a launcher."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradwire.core.simulate.doctor.methods import SECONDS, chosen
from gradwire.core.simulate.doctor.processes import Job, as_host, free_port, run_job, sent
from gradwire.core.simulate.doctor.report import FAULT, NOTE, Report, Row
from gradwire.core.text.options import checked

#: Frameworks that are looked for, and what each has to have beside it.
FRAMEWORKS: dict[str, tuple[str, ...]] = {"torch": (), "jax": ("optax",)}
#: Of ranks on GPUs of their own, at most; on CPUs, and where several share a GPU.
MOST, SHARED = 4, 2
#: Devices of a CPU for `pmap` and `shard_map`.
CPU_DEVICES = 4


@checked
def doctor(
    algorithms: Sequence[Any] | None = None,
    *,
    quick: bool = False,
    output: str | Path | None = None,
    show: Callable[[Row], object] = print,
) -> Report:
    """Check that gradwire computes here what it computes elsewhere: every kernel, codec, message
    and algorithm beside its known answers.

        report = gradwire.doctor(quick=True)
        assert not report.faults

    Alone it starts processes of its own: in torch over Gloo, and over NCCL on as many GPUs as there
    are, or two on one; in JAX on the devices of one process, by `pmap` and `shard_map`, and between
    two processes. On a CPU torch runs with its compiled loops too. Under `torchrun` it takes the
    ranks that there are, and also compares what they run on.

    Args:
        algorithms: what to try; of two levels, the one between nodes. None: all that are shipped;
            if `quick`, one that sends codes, one that multiplies, one that sends signs.
        quick: within a minute, instead of six; and nothing is compiled for torch.
        output: a JSON file, written after each check. None: none.
        show: is called with each row.

    Raises:
        TypeError: an algorithm is none, or a schedule; or of one's own class, which other processes
            cannot import.
        RuntimeError: neither torch nor jax is installed.
        OSError: the file cannot be written.
    """
    methods = chosen(algorithms, quick)
    if os.environ.get("RANK", "0") == "0":
        report = Report(path=None if output is None else Path(output), show=show)
    else:  # one file, and one that speaks
        report = Report(show=lambda row: None)
    report.save()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        examine = importlib.import_module("gradwire.torch_backend.doctor.launched").examine
        examine(methods, report, seconds=SECONDS[quick], quick=quick)
        return report
    installed = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    if not installed:
        raise RuntimeError(
            "gradwire.doctor() needs torch or jax: pip install 'gradwire[torch]' or 'gradwire[jax]'"
        )
    algorithms_sent = sent(methods)
    end = time.monotonic() + SECONDS[quick]
    lacking = NOTE if len(installed) > 1 else FAULT
    jobs = [_jobs(name, algorithms_sent, quick, report, lacking) for name in installed]
    # One framework's processes wait for messages while the other's compile.
    chains = _Chains(report, end)
    chains.run([each for each in jobs if each])
    return report


def _jobs(
    name: str, algorithms: str, quick: bool, report: Report, lacking: str
) -> Sequence[Callable[[float], Job]]:
    """What is checked with a framework; nothing, and a row that says why, where it is not whole. It
    is a fault that it cannot be loaded, and `lacking` that it lacks something."""
    absent = [each for each in FRAMEWORKS[name] if importlib.util.find_spec(each) is None]
    if absent:
        said = (
            f"{name} is here without {', '.join(absent)}, which gradwire needs there: left out;"
            f" pip install 'gradwire[{name}]'"
        )
        report.add(Row(name, "installation", lacking, said))
        return []
    try:
        return _JOBS[name](algorithms, quick)
    except Exception as error:  # of the framework, which cannot be loaded
        said = f"it cannot be loaded: {type(error).__name__}: {error}"
        report.add(Row(name, "installation", FAULT, said))
        return []


class _Chains:
    """Threads that each run some jobs, one after the other. None outlasts `run`."""

    def __init__(self, report: Report, end: float) -> None:
        self._report, self._end = report, end
        self._stop = threading.Event()
        self._errors: list[BaseException] = []

    def run(self, several: Sequence[Sequence[Callable[[float], Job]]]) -> None:
        """Run all chains. Raises what a caller's `show` raises, or ctrl-C."""
        # Not `join`: until Python 3.13, one that ctrl-C interrupts takes the thread for ended.
        ended = [threading.Event() for _ in several]
        threads = [
            threading.Thread(target=self._run, args=chain, daemon=True)
            for chain in zip(several, ended, strict=True)
        ]
        try:
            for thread in threads:
                thread.start()
            for each in ended:
                each.wait()
        finally:
            self._stop.set()
            for thread, each in zip(threads, ended, strict=True):
                if thread.ident is not None:
                    each.wait()
        if self._errors:
            raise self._errors[0]

    def _run(self, jobs: Sequence[Callable[[float], Job]], ended: threading.Event) -> None:
        try:
            for left, make in zip(range(len(jobs), 0, -1), jobs, strict=True):
                if not self._stop.is_set():
                    # What one job leaves of its time is for the next.
                    seconds = (self._end - time.monotonic()) * (1 if left == 1 else 1.5 / left)
                    self._run_one(make(max(1.0, seconds)))
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()
        finally:
            ended.set()

    def _run_one(self, job: Job) -> None:
        try:
            run_job(job, self._report.add, self._report.add_machine, self._stop)
        except OSError as error:
            self._report.add(Row(job.part, "start", FAULT, f"{type(error).__name__}: {error}"))


def _torch_jobs(algorithms: str, quick: bool) -> list[Callable[[float], Job]]:
    machine = importlib.import_module("gradwire.torch_backend.doctor.machine")
    device, module = machine.first_device(), "gradwire.torch_backend.doctor"
    gpus = importlib.import_module("torch").cuda.device_count() if device.type == "cuda" else 0

    def kernels(seconds: float) -> Job:
        part = f"torch, kernels, {device.type}"
        return Job(
            part,
            module,
            [{"part": part, "device": str(device), "seconds": seconds, "quick": quick}],
            [{}],
            seconds,
        )

    def ranks(library: str, devices: list[str]) -> Callable[[float], Job]:
        shared = len(set(devices)) < len(devices) and library == "nccl"
        kind = devices[0].partition(":")[0] + (", one GPU" if shared else "")

        def job(seconds: float) -> Job:
            part, port = f"torch, {len(devices)} ranks, {library}, {kind}", str(free_port())
            arguments = [
                {
                    "part": part,
                    "device": d,
                    "seconds": seconds,
                    "quick": quick,
                    "library": library,
                    "algorithms": algorithms,
                }
                for d in devices
            ]
            environment = [
                _of_rank(r, len(devices), port) | _alone_on_gpu(r, shared)
                for r in range(len(devices))
            ]
            return Job(part, module, arguments, environment, seconds)

        return job

    jobs: list[Callable[[float], Job]] = []
    if gpus:
        jobs.append(
            ranks(
                "nccl",
                [f"cuda:{i}" for i in range(min(gpus, MOST))] if gpus > 1 else ["cuda:0"] * SHARED,
            )
        )
    if not (gpus and quick):
        jobs.append(ranks("gloo", ["cpu"] * SHARED))
    return [*jobs, kernels]


def _jax_jobs(algorithms: str, quick: bool) -> list[Callable[[float], Job]]:
    module, gpus = "gradwire.jax_backend.doctor", _gpus()
    on_cpu = f"--xla_force_host_platform_device_count={CPU_DEVICES}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {on_cpu}".strip()
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def devices(seconds: float) -> Job:
        arguments = {"part": "jax", "seconds": seconds, "algorithms": algorithms, "quick": quick}
        return Job("jax", module, [arguments], [{"XLA_FLAGS": flags, **memory}], seconds)

    def processes(seconds: float) -> Job:
        part, coordinator = f"jax, {SHARED} processes", f"127.0.0.1:{free_port()}"
        arguments = [
            {
                "part": part,
                "seconds": seconds,
                "algorithms": algorithms,
                "coordinator": coordinator,
                "processes": SHARED,
                "process": i,
                "devices": [i % gpus] if gpus else [],
            }
            for i in range(SHARED)
        ]
        one = {"XLA_FLAGS": flags.replace(f"count={CPU_DEVICES}", "count=1"), **memory}
        return Job(
            part,
            module,
            arguments,
            [one | _alone_on_gpu(i, gpus == 1) for i in range(SHARED)],
            seconds,
        )

    return [devices, processes] if _several_processes() else [devices]


_JOBS: dict[str, Callable[[str, bool], list[Callable[[float], Job]]]] = {
    "torch": _torch_jobs,
    "jax": _jax_jobs,
}


def _of_rank(rank: int, size: int, port: str) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(n) for name, n in place.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # no launcher keeps a store at that port
    }


def _alone_on_gpu(number: int, shared: bool) -> dict[str, str]:
    return as_host(number) if shared else {}


def _gpus() -> int:
    """NVIDIA's devices of this machine, as far as this process may see them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return (
        len([each for each in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", each)])
        if os.path.isdir("/dev")
        else 0
    )


def _several_processes() -> bool:
    """Whether two processes of one machine may both have devices: on a TPU one has them all."""
    return importlib.util.find_spec("libtpu") is None or bool(_gpus())
