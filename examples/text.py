"""Real text as bytes, on every machine: by default the source of the running Python's standard
library.

A batch is a function of (seed, step, replica) alone. So torch and JAX train on the same bytes, and
a resumed run sees exactly what the uninterrupted run would have seen, with no data loader state to
save.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int64]

#: Not the standard library's own prose: packages of others, test data, and tables of characters.
SKIP = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
VOCABULARY = 256


@dataclass(frozen=True)
class Text:
    train: Bytes
    validation: Bytes

    def batch(
        self, seed: int, step: int, replica: int, size: int, context: int
    ) -> tuple[Tokens, Tokens]:
        """Random windows: inputs and targets (the next byte), both (size, context)."""
        starts = np.random.default_rng([seed, step, replica]).integers(
            0, len(self.train) - context, size
        )
        return _windows(self.train, starts, context)

    def validation_batch(
        self, replica: int, replicas: int, windows: int, context: int
    ) -> tuple[Tokens, Tokens]:
        """This replica's share of `windows` windows spread evenly over the held-out text: the same
        ones at every evaluation."""
        starts = np.linspace(0, len(self.validation) - context - 1, windows).astype(np.int64)
        return _windows(self.validation, starts[replica::replicas], context)


def load(path: Path | None = None, *, context: int, limit: int = 4_000_000) -> Text:
    """Read the text and split it.

    Args:
        path: one file, whose last tenth is held out. None: the standard library, of which every
            tenth file is held out.
        context: length of the windows that will be asked for.
        limit: read at most about this many bytes.

    Raises:
        SystemExit: there is no text, or too little of it; the message names the fix.
    """
    if path is not None:
        try:
            everything = path.read_bytes()[:limit]
        except OSError as error:
            raise SystemExit(f"--text {path}: {error.strerror}") from error
        split = len(everything) * 9 // 10
        train, validation = everything[:split], everything[split:]
    else:
        train, validation = _standard_library(limit)
    if min(len(train), len(validation)) <= context + 1:
        raise SystemExit(
            f"--text {path or 'of the standard library'} is too short: {len(train)} bytes to train on and {len(validation)} held out, "
            f"for windows of {context} bytes. Give a longer file with --text, or a shorter --context."
        )
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8))


def _standard_library(limit: int) -> tuple[bytes, bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in root.rglob("*.py") if SKIP.isdisjoint(p.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = [], []
    total = 0
    for number, path in enumerate(sorted(files, key=lambda p: p.relative_to(root).as_posix())):
        source = path.read_bytes()
        parts[number % 10 == 9].append(source)
        total += len(source)
        if total >= limit:
            break
    return b"".join(parts[0]), b"".join(parts[1])


def _windows(text: Bytes, starts: npt.NDArray[np.int64], context: int) -> tuple[Tokens, Tokens]:
    windows = text[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]
