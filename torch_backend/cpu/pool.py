"""A pool of as many threads as torch has, for loops that are serial and leave the interpreter's
lock.

Not numba's own: of its layers one aborts when two threads call it at once, and another hangs in a
process that was forked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

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
    todo = _Parts(pairwise(ends), loop)
    try:
        for _ in range(parts - 1):
            _threads(parts - 1).submit(todo.work)
    except RuntimeError:  # the interpreter ends, or there are as many threads as there may be
        pass
    todo.work()
    todo.wait()


class _Parts:
    """Ranges of rows, each of which is done once, by whoever comes for it."""

    def __init__(self, parts: Iterable[tuple[int, int]], loop: Callable[[int, int], None]) -> None:
        self._left, self._loop = list(parts), loop
        self._active = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def work(self) -> None:
        """Do what is left."""
        while True:
            with self._changed:
                if not self._left:
                    return
                part = self._left.pop()
                self._active += 1
            try:
                self._loop(*part)
            except BaseException as error:
                self._error = error
            finally:
                with self._changed:
                    self._active -= 1
                    self._changed.notify_all()

    def wait(self) -> None:
        """Wait until others have done theirs. Raises what one of them has raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._active)
        if self._error is not None:
            raise self._error


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
