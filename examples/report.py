"""What a training script tells: JSON lines for programs, a progress bar (or plain lines, where
there is no terminal) for people."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Report:
    """Use as a context manager and call `step` after every step.

    Args:
        steps: of the whole run.
        done: steps of a run that is resumed. Lines that the log has beyond them were written after
            the checkpoint; they are dropped.
        log: file for the JSON lines. None: no log.
        progress: speak to people at all.
    """

    def __init__(self, steps: int, done: int, log: Path | None, progress: bool) -> None:
        self._steps, self._progress = steps, progress
        self._validation = float("nan")
        self._file: Any = None
        if log is not None:
            kept = log.read_text().splitlines(keepends=True) if done and log.exists() else []
            log.parent.mkdir(parents=True, exist_ok=True)
            # a line reaches the file as soon as it is written
            self._file = log.open("w", buffering=1)
            # A run that was killed may have left half a line.
            complete = [line for line in kept if line.endswith("\n")]
            self._file.writelines(line for line in complete if json.loads(line)["step"] <= done)
        self._bar: Any = None
        if progress and sys.stdout.isatty():
            try:
                from rich.progress import (
                    BarColumn,
                    MofNCompleteColumn,
                    Progress,
                    TextColumn,
                    TimeRemainingColumn,
                )
            except ImportError:
                return
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()
        if self._file:
            self._file.close()

    def step(
        self,
        step: int,
        loss: float,
        val_loss: float | None,
        *,
        bytes_sent: float,
        collectives: float,
        seconds: float,
        compress_seconds: float | None = None,
        compiled_loops: str = "",
    ) -> None:
        """Tell about a step. `step` counts from 1; bytes (per replica), collectives and seconds are
        totals so far. `compress_seconds` are those of one step, and `compiled_loops` says what
        numba has compiled for it."""
        line: dict[str, float | str] = {"step": step, "loss": loss}
        if val_loss is not None:
            self._validation = line["val_loss"] = val_loss
        line |= {"bytes_sent": bytes_sent, "collectives": collectives, "seconds": round(seconds, 4)}
        if compress_seconds is not None:
            line |= {"compress_seconds": compress_seconds, "compiled_loops": compiled_loops}
        if self._file:
            self._file.write(json.dumps(line) + "\n")
        told = f"loss {loss:.3f}  validation {self._validation:.3f}  sent {bytes_sent / 1e6:,.1f} MB  {seconds:.0f} s"
        if self._bar:
            self._bar.update(self._task, completed=step, description=told)
        elif self._progress and val_loss is not None:
            print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {told}", flush=True)
