"""When a bucket may be sent: what DDP's C++ reducer decides, as a state machine with no I/O in it.

Gradients become ready one by one during a backward pass, in any order. A bucket is launched once it
is full **and** all earlier ones have been launched, so every rank launches the same buckets in the
same order whatever its gradients did. Whoever owns the gradients calls the methods and launches
what they return.

    reducer = Reducer(["a", "b", "c"], buckets=[[2], [0, 1]])
    reducer.begin()      # []       a backward pass begins
    reducer.ready(1)     # []
    reducer.ready(2)     # [0]
    reducer.ready(0)     # [1]
    reducer.end()        # []       and is over; raises if something is missing
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradwire.core.text.wording import some


class Reducer:
    """Counts down the gradients of each bucket, pass by pass.

    Args:
        names: of all parameters.
        buckets: indices of the parameters in each bucket, in the order in which buckets are to be
            launched; `rebuild` changes them.

    Attributes:
        active: between `begin` and `end`.
        arrived: the parameters whose gradients arrived in the current or last pass that was not
            accumulating, in that order.

    Raises:
        ValueError: a parameter is in no bucket or in several, or a bucket is empty.
    """

    def __init__(self, names: Sequence[str], buckets: Sequence[Sequence[int]]) -> None:
        self.names = list(names)
        self.buckets: list[list[int]] = []
        self.active = False
        self.arrived: list[int] = []
        self._accumulating = False
        self._done: set[int] = set()
        self._unused: set[int] = set()
        self._missing: list[int] = []  # per bucket: how many are neither ready nor unused
        self._next = 0
        self._bucket_of: list[int] = []
        self.rebuild(buckets)

    def rebuild(self, buckets: Sequence[Sequence[int]]) -> None:
        """Other buckets from the next pass on. All ranks must be given the same.

        Raises:
            ValueError: as the constructor; nothing is changed then.
            RuntimeError: a pass is under way.
        """
        if self.active:
            raise RuntimeError("buckets cannot be rebuilt during a backward pass")
        bucket_of: dict[int, int] = {}
        for number, bucket in enumerate(buckets):
            if not bucket:
                raise ValueError(f"bucket {number} is empty")
            for i in bucket:
                if not 0 <= i < len(self.names):
                    raise ValueError(f"bucket {number} holds parameter {i} of {len(self.names)}")
                if i in bucket_of:
                    raise ValueError(
                        f"parameter {self.names[i]!r} is in buckets {bucket_of[i]} and {number}"
                    )
                bucket_of[i] = number
        left_out = [name for i, name in enumerate(self.names) if i not in bucket_of]
        if left_out:
            raise ValueError(f"{_listed(left_out)} in no bucket")
        self.buckets = [list(bucket) for bucket in buckets]
        self._bucket_of = [bucket_of[i] for i in range(len(self.names))]

    def begin(self, unused: Iterable[int] = (), *, accumulating: bool = False) -> list[int]:
        """A backward pass begins. Returns the buckets to launch now, in order: those of unused
        parameters only.

        Args:
            unused: parameters that are known to receive no gradient in it, on this rank. They count
                as ready.
            accumulating: gradients are only added up; nothing is launched until a pass without
                this.

        Raises:
            RuntimeError: the pass before has not ended.
        """
        if self.active:
            raise RuntimeError(
                "a backward pass has begun before the last one ended; call end() or abandon() first"
            )
        self.active, self._accumulating = True, accumulating
        self._done = set()
        if accumulating:
            return []
        self.arrived = []
        self._next = 0
        self._missing = [len(bucket) for bucket in self.buckets]
        self._unused = set(unused)
        for i in self._unused:
            self._mark_done(i)
        return self._launchable()

    def ready(self, i: int) -> list[int]:
        """Parameter `i` has its gradient. Returns the buckets to launch now, in order.

        Raises:
            RuntimeError: no pass is under way, or the parameter is ready already or was to be
                unused; it is named.
        """
        if not self.active:
            raise RuntimeError(
                f"parameter {self.names[i]!r} is ready, but no backward pass has begun"
            )
        if self._accumulating:
            return []
        if i in self._done:
            raise RuntimeError(self._why_not_again(i))
        self.arrived.append(i)
        # Most gradients complete no bucket: those pay for nothing more.
        return self._launchable() if self._mark_done(i) else []

    def missing(self) -> list[int]:
        """Parameters of this pass that are neither ready nor unused, in the order of the
        buckets."""
        if not self.active or self._accumulating:
            return []
        return [i for bucket in self.buckets for i in bucket if i not in self._done]

    def end(self, *, missing_are_unused: bool = False) -> list[int]:
        """The backward pass is over. `missing_are_unused`: what has no gradient by now is taken as
        unused. Returns the buckets to launch now, in order:
        the rest.

        Raises:
            RuntimeError: no pass is under way, or parameters are missing; they are named. The pass
                is over in any case.
        """
        if not self.active:
            raise RuntimeError("a backward pass has ended that never began")
        missing = self.missing()
        self.active = False
        if self._accumulating:
            return []
        if missing and not missing_are_unused:
            names = [self.names[i] for i in missing]
            waiting = len(self.buckets) - self._next
            raise RuntimeError(
                f"{_listed(names)} without a gradient at the end of the backward pass, so {waiting}"
                f" of {len(self.buckets)} buckets could not be averaged, and other ranks may wait"
                " for them. Either the forward pass does not use them in every step, or the loss"
                " does not depend on all outputs: pass find_unused_parameters=True. If they are to"
                " stay as they are, set requires_grad=False before wrapping the module."
            )
        for i in missing:
            self._mark_done(i)
        return self._launchable()

    def abandon(self) -> None:
        """Forget a pass that failed. Harmless if none is under way."""
        self.active = False

    def arrival_order(self) -> list[int]:
        """All parameters: first those that arrived in the last pass, as they came, then the others
        in the order of the buckets."""
        came = set(self.arrived)
        return self.arrived + [i for bucket in self.buckets for i in bucket if i not in came]

    def _mark_done(self, i: int) -> bool:
        """True if that completes a bucket."""
        self._done.add(i)
        bucket = self._bucket_of[i]
        self._missing[bucket] -= 1
        return not self._missing[bucket]

    def _why_not_again(self, i: int) -> str:
        if i in self._unused:
            return (
                f"parameter {self.names[i]!r} received a gradient, but the outputs of the forward"
                " pass do not depend on it. A loss must be computed from what forward returns:"
                " return that part of it too, instead of keeping it in an attribute. Reentrant"
                " activation checkpointing hides parameters from find_unused_parameters: use"
                " `checkpoint(..., use_reentrant=False)`."
            )
        return (
            f"parameter {self.names[i]!r} received a second gradient in one backward pass, after"
            " the first was handed over to be averaged. This happens when a parameter is used in"
            " several segments of reentrant activation checkpointing: use `checkpoint(...,"
            " use_reentrant=False)`; or accumulate (`no_sync`) and average in a later pass."
        )

    def _launchable(self) -> list[int]:
        first = self._next
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._next += 1
        return list(range(first, self._next))


def _listed(names: Sequence[str]) -> str:
    """ "parameter 'a' is", "parameters 'a', 'b' and 7 more are"."""
    return f"parameter {names[0]!r} is" if len(names) == 1 else f"parameters {some(names, 8)} are"
