"""A backward pass as a hook of DDP sees it: which bucket begins it, and where it ends.

Buckets come in ascending order. But with `skip_all_reduce_unused_params=True` DDP hands over none of which the pass has used nothing, and that may be the first
one or the last. So a pass begins with the first bucket that comes, and has ended at the latest when autograd has: before DDP waits for the futures.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gradwire.torch_backend.torch_internals import in_backward, in_node, queue_callback


class BackwardPass:
    """The passes of one DDP, one after the other."""

    def __init__(self) -> None:
        self._number = 0
        self._seen: float = math.inf  # the bucket that came last; of a pass that has ended no other is awaited

    def enter(self, index: int, is_last: bool, at_end: Callable[[], None]) -> bool:
        """A bucket has come. Returns whether it begins a pass; one that has failed halfway is followed by another without an end.

        Args:
            index, is_last: of the bucket.
            at_end: called if the pass ends without its last bucket.
        """
        begins = index <= self._seen
        self._seen = math.inf if is_last else index
        self._number += begins
        # Outside of autograd, in DDP's `join()`, all buckets come.
        if begins and not is_last and in_backward():
            self._await(self._number, at_end)
        return begins

    def _await(self, number: int, at_end: Callable[[], None]) -> None:
        def passed() -> None:
            # A pass inside of another (reentrant checkpointing) ends in the middle of a node of that, which brings the other buckets.
            if self._number == number and self._seen < math.inf and not in_node():
                self._seen = math.inf
                at_end()

        # The reducer queues what waits for the futures after its last bucket, so this comes first.
        queue_callback(passed)
