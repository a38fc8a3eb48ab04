"""What DDP calls in a step: a hook that hands its buckets to a driver.

Buckets come in ascending order. But with `skip_all_reduce_unused_params=True` DDP hands over none
of which the pass has used nothing, and that may be the first one or the last. So a pass begins with
the first bucket that comes, and has ended at the latest when autograd has: before DDP waits for the
futures.

The first pass with `static_graph=True` is another exception: DDP keeps its buckets, one for each
dtype, and hands them over when autograd has ended. Each is called bucket 0 there, and none of
several the last, so this pass ends with the last parameter.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the real
# objects.

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket

from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.engine.torch_modes import uncompiled
from gradwire.torch_backend.torch_internals import in_backward, in_node, queue_callback


class _Later(torch.futures.Future[Tensor]):
    """Completed by the thread that calls hooks, in the call for the last bucket: in an earlier call
    nobody may wait for it. `failed`: why it holds the gradients of this rank alone."""

    failed: Exception | None = None

    def wait(self) -> Tensor:
        if not self.done():
            raise RuntimeError(
                "a hook waits for the future of a bucket, which is completed in the call for the"
                " last bucket of the step: waiting would never end. Return it, or what its `then`"
                " returns"
            )
        return super().wait()


@dataclass(slots=True)
class Bucket:
    """What a `dist.GradBucket` says, and whether it is one of several that have been kept until
    autograd has ended. The original is only valid during the hook call."""

    index: int
    is_last: bool
    buffer: Tensor
    parameters: list[Tensor]
    gradients: list[Tensor]
    future: _Later
    kept: bool

    @classmethod
    def read(cls, bucket: GradBucket) -> "Bucket":
        """Raises ValueError for a sparse gradient."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ValueError(
                "the gradient is sparse; make it dense (`sparse=False` in the embedding) or leave"
                " it out of DDP"
            )
        parameters = bucket.parameters()
        gradients = [
            g if p.is_contiguous() else _laid_out_like(p, g)
            for p, g in zip(parameters, bucket.gradients(), strict=True)
        ]
        index, is_last = bucket.index(), bucket.is_last()
        return cls(
            index,
            is_last,
            buffer,
            parameters,
            gradients,
            new_future(buffer.device),
            index == 0 and not is_last and in_backward() and not in_node(),
        )


def _laid_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The view of a gradient as it lies: in a bucket that is as its parameter does (channels_last,
    transposed), but hooks are shown a contiguous view, with its elements in the wrong places."""
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())


def new_future(device: torch.device) -> _Later:
    """A future for a tensor on `device`. On CUDA its completion orders streams and makes no host
    wait."""
    return _Later() if device.type == "cpu" else _Later(devices=[device])


def as_it_is(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """What a hook returns that averages nothing."""
    future = new_future(buffer.device)
    future.set_result(buffer)
    return future


class BackwardPass:
    """The passes of one DDP, one after the other."""

    def __init__(self) -> None:
        self._number = 0
        # the bucket that came last; of a pass that has ended no other is awaited
        self._seen: float = math.inf
        # the parameters of a pass whose buckets have been kept
        self._kept: set[int] = set()

    def enter(self, index: int, is_last: bool, at_end: Callable[[], None]) -> bool:
        """A bucket has come. Returns whether it begins a pass; one that has failed halfway is
        followed by another without an end.

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

    def enter_kept(self, bucket: Bucket, parameters: int) -> tuple[bool, bool]:
        """A bucket that has been kept has come. Returns whether it begins a pass, as it does where
        one of its parameters has come in this one before; and whether it ends one, of so many
        parameters."""
        own = set(map(id, bucket.parameters))
        begins = not self._kept or not own.isdisjoint(self._kept)
        self._kept = own if begins else self._kept | own
        return begins, len(self._kept) == parameters

    def _await(self, number: int, at_end: Callable[[], None]) -> None:
        def passed() -> None:
            # A pass inside of another (reentrant checkpointing) ends in the middle of a node of
            # that, which brings the other buckets.
            if self._number == number and self._seen < math.inf and not in_node():
                self._seen = math.inf
                at_end()

        # The reducer queues what waits for the futures after its last bucket, so this comes first.
        queue_callback(passed)


class BucketHook:
    """Hands DDP's buckets to a driver, and completes the futures that DDP waits for.

    A future may be completed after its hook call has returned. All of a step are completed in the
    call for its last bucket, where the driver finishes; or when autograd has, if DDP leaves that
    bucket out.

    Attributes:
        used: parameters that have received a gradient since the last step; emptied here. None:
            nobody keeps count.
        at_start: called with the step's number when its first bucket comes.
        at_end: called when the step has ended.
    """

    at_start: Callable[[int], None] | None = None
    at_end: Callable[[], None] | None = None

    def __init__(
        self, driver: Driver, names: Mapping[Tensor, str], used: set[str] | None = None
    ) -> None:
        self.driver = driver
        self.names = names
        self._parameters = list(names)  # which live as long as their ids are in use here
        self._names = {id(p): name for p, name in names.items()}
        self.used = used
        self._waiting: list[Bucket] = []
        self._failed: Exception | None = None
        self._pass = BackwardPass()

    def __call__(self, bucket: Bucket) -> None:
        if bucket.kept:
            first, last = self._pass.enter_kept(bucket, len(self._parameters))
        else:
            first = self._pass.enter(bucket.index, bucket.is_last, self._end_without_last)
            last = bucket.is_last
        if first:
            self._waiting, self._failed = [], None  # whatever a failed backward pass has left
            if self.at_start is not None:
                try:
                    self.at_start(self.driver.memory.steps)
                except Exception as error:
                    self._failed = error
        self._waiting.append(bucket)
        gradients = {
            self._names[id(p)]: g for p, g in zip(bucket.parameters, bucket.gradients, strict=True)
        }
        self._add(gradients, first=first, last=last)
        if last:
            self._end()

    def _add(self, gradients: Mapping[str, Tensor], *, first: bool, last: bool) -> None:
        unused = None if self.used is None else gradients.keys() - self.used
        if self._failed is None:
            try:
                self.driver.add(gradients, first=first, last=last, unused=unused)
            except Exception as error:
                self._failed = error

    def _end_without_last(self) -> None:
        self._add({}, first=False, last=True)
        self._end()

    def _end(self) -> None:
        if self.used is not None:
            self.used.clear()
        waiting, self._waiting = self._waiting, []
        # whose traceback holds what the step has worked on
        failed, self._failed = self._failed, None
        for each in waiting:
            each.future.failed = failed
            each.future.set_result(each.buffer)
        if self.at_end is not None:
            try:
                self.at_end()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise_after_backward(failed)


def raise_after_backward(error: Exception) -> None:
    """Raise when the reducer has finished the backward pass, of which it would otherwise take no
    other; where none runs, as for a rank that has no more data (`join`), at once."""
    if not in_backward():
        raise error

    def last() -> None:
        raise error

    # The reducer queues its own callback when this hook has returned, so the first of ours comes
    # before that, and the second after it.
    queue_callback(lambda: queue_callback(last))


class Slot:
    """DDP keeps its one hook for life. It is this one's, and every bucket goes to whoever has the
    slot.

    Attributes:
        on_bucket: who has it.
        free: it is nobody's, and gradients are averaged as they are.
    """

    def __init__(self, on_bucket: BucketHook) -> None:
        self.on_bucket = on_bucket
        self.free = False

    @uncompiled
    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """What DDP calls. `state` is not used."""
        read = Bucket.read(bucket)
        self.on_bucket(read)
        return read.future

    def __reduce__(self) -> tuple[Any, ...]:
        """A DDP that is pickled or copied takes no hook along: the copy has a reducer of its own,
        which has none."""
        return LeftBehind, ()

    def take(self, on_bucket: BucketHook) -> None:
        """Give the slot to somebody. What the one before has sent and not finished comes to its
        end."""
        self.on_bucket.driver.abandon()
        self.on_bucket, self.free = on_bucket, False


class LeftBehind:
    """What stands in the place of a `Slot` that DDP had when it was pickled."""

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        raise RuntimeError(
            "this hook was left behind when its DDP was pickled; call register_comm_hook(ddp,"
            " algorithm) again"
        )
