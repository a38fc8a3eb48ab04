"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def is_written_through(path: Path) -> bool:
    """Whether it is a device or a pipe, which is written to and not replaced; so is /dev/stdout
    where that has been led to a file."""
    led = path.is_symlink() and os.path.abspath(path).startswith(("/dev/", "/proc/"))
    return path.exists() and (led or not path.is_file())


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write. It gets its name when all of it is on the disk; until then, and if writing
    it raises, what was there before stays. What is no file, /dev/stdout for one, is written to as
    it is.

    with whole_file("compressor.pt") as file:
        torch.save(state, file)

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path)
    if is_written_through(path):
        with path.open("wb") as file:
            yield file
        return
    # In the same folder: a file does not get to another disk at once.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    if hasattr(os, "O_DIRECTORY"):  # the new name, too
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
