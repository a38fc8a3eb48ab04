"""One attempt of a rank that torchrun has started: it goes on from the last checkpoint, writes a
line for each step, and ends where it is told to.

    attempt = Attempt(folder)
    before = attempt.newest()                        # the last checkpoint: (attempt, step), or (0, 0)
    ...                                              # read attempt.file(before)
    for step in attempt.steps(before[1]):
        ...
        attempt.say(step, method, weights)
        if part := attempt.new_file(step):           # write it, then
            attempt.keep(part)

It ends before the step that the file FOLDER/stop names, once there is one.
"""

import json
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

#: Steps between two checkpoints.
BETWEEN = 10


class Attempt:
    """Of this rank; files are in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._log = (folder / f"rank{self.rank}").open("a")

    def newest(self) -> tuple[int, int]:
        """The last attempt and step after which all ranks have saved; (0, 0): none."""
        found = [tuple(map(int, file.name.split(".")[:2])) for file in self.folder.glob("*.of*")]
        return max((each for each in found if found.count(each) == self.ranks), default=(0, 0))

    def file(self, newest: tuple[int, int]) -> Path:
        """Of this rank, of the checkpoint that `newest` has found."""
        return self.folder / f"{newest[0]}.{newest[1]}.of{self.rank}"

    def new_file(self, step: int) -> Path | None:
        """What has to be written after this step, for `keep`; None: nothing."""
        saves = (step + 1) % BETWEEN == 0
        return self.folder / f"{self._number}.{step + 1}.part{self.rank}" if saves else None

    def keep(self, written: Path) -> None:
        written.rename(written.with_name(written.name.replace("part", "of")))

    def steps(self, begin: int) -> Iterator[int]:
        stop = self.folder / "stop"
        for step in count(begin):
            if stop.exists() and step >= int(stop.read_text()):
                return
            yield step

    def say(self, step: int, method: str, weights: str) -> None:
        line = {
            "step": step,
            "rank": self.rank,
            "pid": os.getpid(),
            "attempt": self._number,
            "method": method,
            "weights": weights,
            "time": time.time(),
        }
        print(json.dumps(line), file=self._log, flush=True)
