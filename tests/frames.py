"""Room for Python's frames, so that deep calls cost what others do.

    with_room(function, *args)            # the same as function(*args)

Python keeps its frames in chunks of 16 KB. A call that finds no place in the last chunk maps
another one, and unmaps it as it returns. Where a loop stands at the end of a chunk, each of its
calls does so. JAX traces under some hundred frames, pytest adds fifty: one third of the time of
a test in JAX went there. A chunk is as large as its first frame asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
#: Places for objects, of which a frame takes some twenty. What nobody writes to takes no memory.
ROOM = 1 << 17


def with_room(function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Call `function` where the calls in it need no other chunk."""
    return function(*args, **options)


# Python rounds up to a power of two, and the frame itself uses nearly none of it.
with_room.__code__ = with_room.__code__.replace(co_stacksize=ROOM)
