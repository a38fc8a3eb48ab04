"""A pool of as many threads as torch has, for loops that are serial and leave the interpreter's
lock.

Not numba's own: of its layers one aborts when two threads call it at once, and another hangs in a
process that was forked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_size = 0


def over_rows(rows: int, least: int, loop: Callable[[int, int], None]) -> None:
    """Call `loop(begin, end)` for parts of so many rows, of `least` rows or more, side by side; and
    wait for all of them."""
    parts = min(torch.get_num_threads(), rows // max(1, least))
    if parts < 2:
        loop(0, rows)
        return
    ends = [rows * i // parts for i in range(parts + 1)]
    try:
        others = [_threads(parts - 1).submit(loop, *ends[i : i + 2]) for i in range(1, parts)]
    except RuntimeError:  # the interpreter ends, and starts no thread any more
        loop(0, rows)
        return
    try:
        loop(0, ends[1])
    finally:
        for other in others:
            other.result()


def _threads(number: int) -> ThreadPoolExecutor:
    global _pool, _size
    with _lock:
        if _pool is None or _size < number:
            _pool, _size = ThreadPoolExecutor(number, "gradwire"), number
        return _pool


def _begin_anew() -> None:
    """Make threads anew in a process that was forked: they are not, and another one may have held
    the lock."""
    global _lock, _pool, _size
    _lock, _pool, _size = threading.Lock(), None, 0


os.register_at_fork(after_in_child=_begin_anew)
