"""Train one small language model four times and compare: in torch and in JAX, with whole gradients
and with PowerSGD.

python examples/demo.py            # about a minute on two free cores
python examples/demo.py --all      # four minutes

Two replicas each, on the CPU: two torch processes (Gloo, torchrun) and two JAX devices (pmap).
Everything it writes is below runs/. With --all it first asks whether compression helps on this
machine, trains for longer, and in torch also with local SGD and with DiLoCo. A few steps of
PowerSGD without compiled loops show what these save.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picture import draw
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
#: Seconds without a sign of life after which a training counts as stuck. The first sign comes after
#: XLA has compiled.
STUCK = 240
#: Environment without compiled loops.
UNCOMPILED = {"NUMBA_DISABLE_JIT": "1"}
#: Bits per second of a network on which compression matters.
SLOW_NETWORK = 100e6

#: What is compared: its name and the flags that ask for it.
METHODS = {
    "none": ("plain", ["--compress=none"]),
    "powersgd": ("PowerSGD", ["--compress=powersgd"]),
    "local_sgd": ("local SGD", ["--compress=none", "--local-sgd=8"]),
    "diloco": ("DiLoCo", ["--compress=none", "--diloco=8"]),
}
RUNS = [(framework, method) for framework in ("torch", "JAX") for method in ("none", "powersgd")]
#: What --all adds, and how many steps a training has with it and without.
MORE = [("torch", "local_sgd"), ("torch", "diloco")]
STEPS = {True: 150, False: 40}


@dataclass
class Run:
    """One training: what it is called, and what it has told so far."""

    framework: str
    method: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.framework}, {METHODS[self.method][0]}"

    @property
    def file(self) -> Path:
        return (
            self.folder
            / f"{self.framework.lower()}-{self.method}{'-uncompiled' if self.environment else ''}.jsonl"
        )

    def command(self, flags: list[str]) -> list[str]:
        script = {
            "torch": torchrun("train_torch.py"),
            "JAX": [sys.executable, str(HERE / "train_flax.py"), "--devices=2"],
        }[self.framework]
        return [
            *script,
            *METHODS[self.method][1],
            f"--metrics={self.file}",
            "--no-progress",
            *flags,
        ]

    def read(self) -> bool:
        """Take in the lines that are new; whether there were any."""
        told = self.file.read_text().splitlines(keepends=True) if self.file.exists() else []
        new = [json.loads(line) for line in told[len(self.lines) :] if line.endswith("\n")]
        self.lines += new
        return bool(new)

    @property
    def last(self) -> dict[str, Any]:
        return self.lines[-1]

    @property
    def validation(self) -> list[tuple[float, float]]:
        """(bytes sent so far, loss on held-out text)."""
        return [(line["bytes_sent"], line["val_loss"]) for line in self.lines if "val_loss" in line]

    @property
    def seconds_per_step(self) -> float:
        """The median: JAX compiles in its first step."""
        clock: list[float] = [0.0, *(line["seconds"] for line in self.lines)]
        return statistics.median(b - a for a, b in itertools.pairwise(clock))


class TrainingFailed(Exception):
    pass


class Stopped(Exception):
    pass


#: Signals that ask the demo to end. They are only noted: an exception out of a handler could come
#: just when a process has been started and nobody knows of it yet.
stop_signals: list[int] = []


def torchrun(script: str) -> list[str]:
    """Start it twice. By the name that needs no PATH, on a port of its own."""
    module = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
    ]
    return [sys.executable, *module, str(HERE / script)]


def train(run: Run, flags: list[str]) -> Iterator[None]:
    """Run one training, and come back now and then until it is over."""
    run.file.unlink(missing_ok=True)
    yield from watched(
        run.name, run.command(flags), run.file.with_suffix(".stderr"), run.read, run.environment
    )


def ask(folder: Path, flags: list[str], console: Console) -> None:
    """Print what `gradwire advise` says of this machine, and of a slow network."""
    said, answer = folder / "advice.stderr", folder / "advice.txt"
    before = 0

    def moved() -> bool:
        nonlocal before
        before, last = said.stat().st_size, before
        return before != last

    command = [*torchrun("advise.py"), f"--slow={SLOW_NETWORK}", f"--to={answer}", *flags]
    with (
        console.status("measuring the network and each method")
        if console.is_terminal
        else nullcontext()
    ):
        for _ in watched("the advice", command, said, moved):
            pass
    console.print(answer.read_text(), markup=False, highlight=False, soft_wrap=True)


def watched(
    name: str,
    command: list[str],
    errors: Path,
    moved: Callable[[], bool],
    environment: dict[str, str] | None = None,
) -> Iterator[None]:
    """Run a command whose output goes to a file, and come back now and then until it is over.
    `moved`: has it shown a sign of life since the last call?"""
    with errors.open("w") as stderr, process(command, stderr, environment or {}) as child:
        alive = time.monotonic()
        while child.poll() is None:
            time.sleep(0.2)
            if stop_signals:
                raise Stopped
            if moved():
                alive = time.monotonic()
            elif time.monotonic() - alive > STUCK:
                raise TrainingFailed(
                    f"{name} has not moved for {STUCK} s; its stderr is in {errors}"
                )
            yield
    moved()
    yield
    if child.returncode:
        # After the tracebacks of the process that failed, and of the other, which missed it,
        # torchrun adds long reports of its own.
        said = errors.read_text(errors="replace").splitlines()
        own = list(itertools.takewhile(lambda line: "torch/distributed/elastic" not in line, said))
        tail = "\n".join((own or said)[-80:])
        raise TrainingFailed(
            f"{name} failed with exit status {child.returncode}. The end of {errors}:\n\n{tail}"
        )


@contextmanager
def process(
    command: list[str], stderr: Any, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which is gone with all its children when the block is
    left, however it is left."""
    # One thread per torch process, on the CPU even where there are GPUs: the same demo everywhere.
    env = (
        os.environ
        | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        | environment
    )
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stderr,
        stderr=stderr,
        env=env,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()  # torchrun takes its workers down with it
            try:
                child.wait(timeout=60)  # it gives them 30 s
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def table(runs: list[Run]) -> Table:
    result = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    result.add_column("", no_wrap=True)
    for heading in (
        "validation\nloss", "sent per\nreplica", "fewer\nbytes", "collectives\nper step", "time\nper step", "time",
    ):  # fmt: skip
        result.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        whole = next(r for r in runs if r.framework == run.framework and r.method == "none")
        result.add_row(
            run.name,
            f"{run.validation[-1][1]:.3f}",
            f"{run.last['bytes_sent'] / 1e6:,.1f} MB",
            f"{whole.last['bytes_sent'] / run.last['bytes_sent']:.1f}×",
            f"{run.last['collectives'] / run.last['step']:.2g}",
            f"{run.seconds_per_step * 1e3:.0f} ms",
            f"{run.last['seconds']:.0f} s",
            style="bold" if run.method == "powersgd" else "",
        )
    return result


def run_all(runs: list[Run], steps: int, flags: list[str], console: Console) -> None:
    columns = (
        TextColumn("{task.fields[name]:<15}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = [progress.add_task("", total=steps, name=run.name, start=False) for run in runs]
        for run, task in zip(runs, tasks, strict=True):
            if not console.is_terminal:
                console.print(f"{run.name} …")
            progress.start_task(task)
            for _ in train(run, flags):
                if run.lines:
                    loss = f"loss {run.validation[-1][1]:.3f}" if run.validation else ""
                    sent = f"sent {run.last['bytes_sent'] / 1e6:,.1f} MB"
                    progress.update(task, completed=run.last["step"], description=f"{loss}  {sent}")
                else:
                    progress.update(task, description="starting")
            progress.stop_task(task)
            if not console.is_terminal:
                console.print(
                    f"  {run.last['step']} steps, loss {run.validation[-1][1]:.3f}, {run.last['seconds']:.0f} s"
                )


def compiled_loops(run: Run, steps: int, flags: list[str], console: Console) -> str:
    """What compiled loops save of a step of PowerSGD, in words: of a few steps more without them,
    where there were such loops."""
    if not run.last["compiled_loops"]:
        return "PowerSGD ran without compiled loops in torch: pip install '.[cpu]' brings numba, which compiles them."
    without, few = Run(run.framework, run.method, run.folder, UNCOMPILED), max(1, steps // 8)
    with (
        console.status("PowerSGD without compiled loops") if console.is_terminal else nullcontext()
    ):
        for _ in train(without, [*flags, f"--steps={few}", f"--eval-every={few}"]):
            pass
    fast, slow = (f"{each.last['compress_seconds'] * 1e3:.1f} ms" for each in (run, without))
    return f"In torch, compressing takes {fast} of a step of PowerSGD with the loops that numba compiles, and {slow} without them, in {few} steps."


#: The last lines.
NEXT = """What to do next:
  your network   torchrun --nnodes=2 … --no-python {gradwire} probe      on each of two machines (docs/advise.md)
  your model     {gradwire} advise my_model:build --probe probe.json --step-ms 180
  your training  two lines in torch (docs/tutorials/torch.md), one link of a chain in JAX (docs/tutorials/jax.md)"""


def command_line() -> str:
    """How `gradwire` is called from here: `make demo` has it in an environment that may not be
    active."""
    beside = Path(sys.executable).parent / "gradwire"
    return (
        "gradwire" if shutil.which("gradwire") or not beside.exists() else os.path.relpath(beside)
    )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--all",
        action="store_true",
        help="advice for this machine, six trainings, and what compiled loops save",
    )
    p.add_argument(
        "--steps",
        type=int,
        help=f"of each training (default: {STEPS[False]}, with --all {STEPS[True]})",
    )
    p.add_argument("--rank", type=int, default=4, help="of PowerSGD (default: 4)")
    p.add_argument(
        "--out",
        type=Path,
        default=Path("runs"),
        metavar="FOLDER",
        help="where to write (default: runs)",
    )
    p.add_argument(
        "flags",
        nargs="*",
        metavar="FLAG",
        help="after --: more flags for the training scripts, see their --help",
    )
    args = p.parse_args()
    if args.steps is None:
        args.steps = STEPS[args.all]
    if args.steps < 1:
        p.error(f"--steps {args.steps} must be at least 1")

    console = Console()
    folder = args.out / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    runs = [Run(framework, method, folder) for framework, method in RUNS + MORE * args.all]
    flags = [
        f"--steps={args.steps}",
        f"--rank={args.rank}",
        f"--eval-every={max(5, args.steps // 25)}",
        *args.flags,
    ]
    began = time.monotonic()
    before = [
        (s, signal.signal(s, lambda s, _: stop_signals.append(s)))
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]
    try:
        if args.all:
            console.print(
                "Will it help on this machine? Two processes, the model that is trained below:\n"
            )
            ask(folder, flags, console)
        console.print(
            f"{'Six' if args.all else 'Four'} trainings, in which nobody has to believe a prediction:\n"
        )
        run_all(runs, args.steps, flags, console)
        loops = compiled_loops(runs[1], args.steps, flags, console) if args.all else ""
    except Stopped:
        console.print("stopped")
        raise SystemExit(128 + stop_signals[0]) from None
    except TrainingFailed as error:
        console.print(f"\n{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None

    for number, handler in before:
        signal.signal(number, handler)

    console.print()
    console.print(table(runs))
    whole, compressed = (8 * run.last["bytes_sent"] / SLOW_NETWORK for run in runs[:2])
    network = f"{SLOW_NETWORK / 1e6:.0f} Mbit/s"
    console.print(
        f"Between two machines at {network} these gradients travel for {whole:,.0f} s, compressed for {compressed:,.1f} s.",
        soft_wrap=True,
    )
    if loops:
        console.print(loops, soft_wrap=True, markup=False, highlight=False)
    picture = args.out / "demo.png"
    draw(runs, f"The same model and text for the same {args.steps} steps, on 2 replicas", picture)
    console.print(
        f"The picture is {picture}. All of it took {time.monotonic() - began:.0f} s.\n",
        soft_wrap=True,
    )
    console.print(
        NEXT.format(gradwire=command_line()), markup=False, highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    main()
