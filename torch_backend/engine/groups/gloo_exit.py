"""Leaving a process while Gloo's threads put the last messages away.

A thread of Gloo destroys a message after those who waited for it went on. What Python has seen of a
message can only be destroyed under the interpreter's lock, and before Python 3.14 a thread that
asks for the lock of an interpreter that is shutting down ends the process: "terminate called
without an active exception". That takes a busy machine, and a script that leaves right after its
last message.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from functools import cache
from typing import Any

import torch.distributed as dist

#: Gloo has so many threads per process group, and each holds one message.
THREADS = 2
#: Long for a thread that only waits for the lock, short for somebody who waits for the prompt.
SECONDS = 0.05

#: The handles of the last messages from the CPU. Python holds them until others have been sent, so
#: that no thread destroys one that it has sent.
last_messages: deque[Any] = deque(maxlen=THREADS)


@cache
def leave_in_peace() -> None:
    """Let leaving this process, from now on, give Gloo's threads the lock and the time to end what
    others sent: torch itself, tools."""
    atexit.register(_pause)


def _pause() -> None:
    if dist.is_gloo_available():
        time.sleep(SECONDS)
