"""`Auto`, and `AutoStep` in JAX, under torchrun while ranks are killed, two at once and in the middle of trials too, and
frozen: what it has to show.

All ranks have the same method in every step. Whoever is lost, all begin again and go on from the
last checkpoint. The weights in the end are, bit for bit, those of a run that nobody has disturbed
and that has the methods of this one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from tests.chaos.arena import written
from tests.chaos.attempt import BETWEEN
from tests.launch import ROOT, end_all, environment, interpreter

#: By backend: the script of a rank, and how many there are.
SCRIPTS = {"torch": ("chooser.py", 4), "jax": ("chooser_jax.py", 2)}
KINDS = ("kill", "freeze", "kill", "kill two at once", "kill", "kill in a trial")
#: Seconds for which a rank is frozen.
FROZEN = 2.0

Lines = list[dict[str, Any]]


class Training:
    """Ranks under torchrun, which starts all again when one is lost."""

    def __init__(
        self, backend: str, folder: Path, pace: float, decisions: Path | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.mark = folder, uuid.uuid4().hex
        script, self.ranks = SCRIPTS[backend]
        command = [
            *(interpreter(), "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={self.ranks}", "--max-restarts=1000", "--monitor-interval=0.1"),
            *(str(Path(__file__).with_name(script)), str(folder), str(pace)),
            *([str(decisions)] if decisions else []),
        ]
        with (folder / "log").open("w") as out:
            # Else ranks that begin again may find addresses of those that are gone in the store.
            env = environment(self.mark) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        end_all(self.mark)

    def lines(self) -> Lines:
        """What ranks have written, in the order of time."""
        return written(self.folder.glob("rank*"))

    def alive(self) -> list[int]:
        """Processes of the last attempt in which all ranks have taken a step."""
        pids: dict[int, dict[int, int]] = defaultdict(dict)
        for line in self.lines():
            pids[line["attempt"]][line["rank"]] = line["pid"]
        last = max(pids, default=None)
        return [*pids[last].values()] if last is not None and len(pids[last]) == self.ranks else []

    def disturb(self, kind: str, draw: random.Random) -> float:
        """When it was done."""
        end = time.time() + 30
        while kind == "kill in a trial" and time.time() < end and not self._in_a_trial():
            time.sleep(0.02)
        lost = draw.sample(self.alive(), 2 if kind == "kill two at once" else 1)
        for pid in lost:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)
        done = time.time()
        if kind == "freeze":
            time.sleep(FROZEN)
            os.kill(lost[0], signal.SIGCONT)
        return done

    def _in_a_trial(self) -> bool:
        """Whether the last steps are a few of one method."""
        methods = [line["method"] for line in self.lines() if line["rank"] == 0][-8:]
        return len(set(methods)) > 1 and methods[-1] != methods[-2]

    def wait_for_steps(self, step: int, limit: float) -> None:
        """Raise AssertionError if this step does not come in time, or the training ends."""
        end = time.time() + limit
        while not any(line["step"] >= step for line in self.lines()):
            late = time.time() >= end or self.process.poll() is not None
            assert not late, f"no step {step}:\n{(self.folder / 'log').read_text()[-4000:]}"
            time.sleep(0.1)

    def begun_again(self, lost: list[int], limit: float) -> None:
        """Wait until all ranks are others than these."""
        end = time.time() + limit
        while not (alive := self.alive()) or alive == lost:
            assert time.time() < end, (self.folder / "log").read_text()[-4000:]
            time.sleep(0.1)

    def finish(self, step: int, limit: float) -> int:
        """Let all end before this step; the exit code."""
        part = self.folder / "stop.part"
        part.write_text(str(step))
        part.rename(self.folder / "stop")
        return self.process.wait(limit)


def disturbed(
    backend: str, folder: Path, kinds: Sequence[str], between: float, pace: float
) -> dict[str, Any]:
    """What a training shows that is disturbed in these ways, with so many seconds between two of
    them."""
    draw, events = random.Random(0), []
    with Training(backend, folder / "disturbed", pace) as training:
        training.wait_for_steps(20, 120)
        for kind in kinds:
            time.sleep(draw.uniform(0.5, 1.5) * between)
            alive = training.alive()
            events.append((training.disturb(kind, draw), kind))
            if kind != "freeze":
                training.begun_again(alive, 120)
        steps = training.lines()[-1]["step"] + 40
        code, lines = training.finish(steps, 300), training.lines()
    log = folder / "decisions.jsonl"
    log.write_text("".join(decisions(lines)))
    calm_folder = folder / "undisturbed"
    calm_folder.mkdir()
    (calm_folder / "stop").write_text(str(steps))
    with Training(backend, calm_folder, 0.0, log) as training:
        calm_code, calm = training.process.wait(300), training.lines()
    return {
        "steps": steps,
        "events": by_kind(lines, events),
        "changes of the method": len(log.read_text().splitlines()) - 1,
        "exit codes": sorted({code, calm_code}),
        "steps in which ranks had different methods": unequal(lines, "method"),
        "steps after which ranks had different weights": unequal(lines, "weights"),
        "the weights are those of the undisturbed run": weights(lines) == weights(calm),
        "methods": sorted({line["method"] for line in lines}),
    }


def unequal(lines: Lines, what: str) -> list[tuple[int, int]]:
    """Attempts and steps in which ranks had not all the same."""
    seen = defaultdict(set)
    for line in lines:
        seen[line["attempt"], line["step"]].add(line[what])
    return [where for where, found in seen.items() if len(found) > 1]


def last_of_each_step(lines: Lines) -> Lines:
    """What counted in the end: a step that was taken again counts as it was the last time."""
    found: dict[int, dict[str, Any]] = {}
    for line in sorted(lines, key=lambda line: (line["attempt"], line["step"])):
        found[line["step"]] = line
    return [found[step] for step in sorted(found)]


def weights(lines: Lines) -> list[str]:
    return [line["weights"] for line in last_of_each_step(lines)]


def decisions(lines: Lines) -> list[str]:
    """The log of a run that has these methods from its beginning."""
    found, before = [], None
    for line in last_of_each_step(lines):
        if line["method"] != before:
            before = line["method"]
            found.append(json.dumps({"step": line["step"], "method": before}) + "\n")
    return found


def by_kind(lines: Lines, events: list[tuple[float, str]]) -> dict[str, dict[str, float]]:
    """A row for each kind of event. Steps that are lost are taken again."""
    rows = {}
    for kind in dict.fromkeys(kind for _, kind in events):
        pauses, lost = [], []
        for begin, _ in (event for event in events if event[1] == kind):
            before = [line for line in lines if line["time"] <= begin]
            after = [line for line in lines if line["time"] > begin + (kind == "freeze")]
            if before and after and kind != "freeze":
                after = [line for line in after if line["attempt"] > before[-1]["attempt"]]
            if before and after:
                pauses.append(after[0]["time"] - begin)
                lost.append(before[-1]["step"] + 1 - after[0]["step"])
        rows[kind] = {
            "times": len(pauses),
            "steps taken again, at most": max(lost),
            "seconds to the next step, median": round(median(pauses), 2),
            "seconds to the next step, at most": round(max(pauses), 2),
        }
    return rows


def wrong(found: dict) -> dict[str, Any]:
    """What must not be."""
    again = "steps taken again, at most"
    return {
        what: where
        for what, where in {
            "ranks had different methods": found["steps in which ranks had different methods"],
            "ranks had different weights": found["steps after which ranks had different weights"],
            "an end by an error": [code for code in found["exit codes"] if code],
            "other weights than undisturbed": not found[
                "the weights are those of the undisturbed run"
            ],
            "more lost than since a checkpoint": [
                kind for kind, row in found["events"].items() if row[again] > BETWEEN + 1
            ],
            "one method alone": len(found["methods"]) < 2,
        }.items()
        if where
    }
