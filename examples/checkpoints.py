"""Files that are whole or not there: written aside and put in their place at once, with a digest
that is checked before anything is read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

#: Ends every file, before the digest. `torch.load` reads such a file as well, and takes no notice
#: (nor would it of a flipped byte).
MARK = b"\nsha256 "


def write(path: Path, data: bytes) -> None:
    """At no moment is there half a checkpoint under this name, not even after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        file.write(data)
        file.write(MARK + hashlib.sha256(data).digest())
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    finally:
        os.close(folder)


def read(path: Path) -> bytes:
    """What was written. Ends the program if it is not all there, bit for bit."""
    content = path.read_bytes()
    data, mark, digest = content[: -32 - len(MARK)], content[-32 - len(MARK) : -32], content[-32:]
    if mark != MARK:
        raise SystemExit(
            f"{path} is cut off, or no checkpoint of these examples; resume from an older one"
        )
    if hashlib.sha256(data).digest() != digest:
        raise SystemExit(
            f"{path} is damaged: its content is not what was written; resume from an older one"
        )
    return data
