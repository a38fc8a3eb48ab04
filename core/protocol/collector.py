"""Python's collector of cycles, at rest while programs run.

    with AT_REST:
        ...

Thousands of tensors are as many coroutines that are alive at once. The collector would go through
all of them again and again, and through everything else that the process holds: of 10,000 tensors
that is a third of a step. Nothing here makes cycles that it would have to find.
"""

from __future__ import annotations

import gc
import os
import threading


class _AtRest:
    """A context in which the collector does not run, in any thread; they may lie in each other and
    beside each other. After the last of them it is as it was before the first."""

    def __init__(self) -> None:
        self.began_again()

    def began_again(self) -> None:
        """Nothing is within: what a process begins with."""
        self._lock, self._within, self._ran = threading.RLock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                self._ran = gc.isenabled()
                gc.disable()
            self._within += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within and self._ran:
                gc.enable()

    def forked(self) -> None:
        """The child of a fork begins anew: only the thread that forked goes on in it, and nobody
        would leave what others were within."""
        ran = self._within and self._ran
        self.began_again()
        if ran:
            gc.enable()


#: Of this process.
AT_REST = _AtRest()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=AT_REST.forked)
