"""A sharded optimizer that steps inside the backward pass: torch's names, on Gloo and NCCL, from
the first step on.

zero = ZeroOptimizer(ddp.module.named_parameters(), torch.optim.AdamW, lr=3e-4)
ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
...
loss.backward()      # the parameters are updated
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the real
# objects.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.text.wording import some
from gradwire.torch_backend.compat.hooks import allreduce_hook, single
from gradwire.torch_backend.ddp.bucket_hook import BackwardPass, Bucket, raise_after_backward
from gradwire.torch_backend.engine.torch_modes import uncompiled
from gradwire.torch_backend.zero.optimizer import ZeroOptimizer

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroOptimizer,
    shard_buckets: bool = False,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Hook:
    """A communication hook that averages gradients and, when the last bucket has arrived, steps the
    sharded optimizer.

    With `allreduce_hook` a bucket's gradients are reduce-scattered to the owners as it arrives, and
    after the step the new parameters are gathered: the bytes of one all-reduce. Any other hook
    averages in its own way first. `zero.step()` may stay in the loop, where LR schedulers look for
    it: it does nothing.

    After the backward pass gradients are not averages but whatever communication has left there,
    and count for nothing; clear them before the next (`zero.zero_grad()`), as usual. A parameter
    that found no use in the step is updated as with a gradient of zeros.

    Examples:
        >>> import torch
        >>> from gradwire.torch_backend import ZeroOptimizer, allreduce_hook, hook_with_zero_step
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 32))
        >>> optimizer = ZeroOptimizer(ddp.module.named_parameters(), torch.optim.SGD, lr=0.5)
        >>> ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))
        >>> before = ddp.module.bias.detach().clone()
        >>> ddp(torch.ones(2, 64)).sum().backward()    # and takes the step, with the last bucket
        >>> torch.allclose(before - ddp.module.bias, torch.ones(32))
        True

    Args:
        hook: averages: `allreduce_hook`, `powerSGD_hook`, `bf16_compress_hook`, …, of gradwire or
            of torch. It receives the state that is registered with the result.
        ddp: the model. Its buckets may be rebuilt at any time.
        zero: with the parameters of `ddp`.
        shard_buckets: divide the parameters of one bucket among several ranks, if `zero` was made
            with `shard="bucket"`.
        grad_scaler: the scaler of the loss, if there is one. Gradients are unscaled before the
            step; a step in which some rank's gradients hold inf or NaN is skipped on all ranks,
            which all see NaN gradients then, so that `scaler.step(zero)` and `scaler.update()` do
            what they always do.

    Returns:
        A hook for `ddp.register_comm_hook(state of the inner hook, …)`.

    Raises:
        TypeError: arguments of other types.
        ValueError: parameters are not those of `ddp`, or options do not go together (named).
    """
    return _ZeroHook(
        hook, ddp, zero, shard_buckets, interleaved=False, grad_scaler=grad_scaler
    ).hook


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroOptimizer, shard_buckets: bool = False
) -> Hook:
    """The hook `hook_with_zero_step`, but each bucket's parameters are updated and gathered while
    the backward pass goes on.

    With hooks that end only when the last bucket has arrived, `powerSGD_hook` and other than
    `allreduce_hook`, updates begin then. The optimizer's `step` runs once per bucket, which is
    refused for optimizers that count steps for all parameters together. `max_grad_norm` and a
    `GradScaler` need all gradients before the first update: use `hook_with_zero_step`.

    A backward pass must not need a parameter after its gradient is complete. Autograd raises if it
    does ("modified by an inplace operation").

    Args, returns and raises: as `hook_with_zero_step`.
    """
    return _ZeroHook(hook, ddp, zero, shard_buckets, interleaved=True, grad_scaler=None).hook


def _require_together(ddp: DistributedDataParallel, zero: ZeroOptimizer) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp is a {type(ddp).__name__}; wrap the model first: DistributedDataParallel(model)"
        )
    if not isinstance(zero, ZeroOptimizer):
        raise TypeError(
            f"zero is a {type(zero).__name__}, not a gradwire.torch_backend.ZeroOptimizer"
        )
    if ddp.find_unused_parameters and not ddp.static_graph:
        raise ValueError(
            "find_unused_parameters=True: a parameter without a gradient would be updated as with"
            " zeros; call zero.step() after the backward pass instead"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "skip_all_reduce_unused_params=True leaves buckets out of a step, whose parameters"
            " nobody would update or send; leave it out, or call zero.step() after the backward"
            " pass instead"
        )
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    theirs = {
        p: n for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored
    }
    if absent := [name for p, name in theirs.items() if p not in zero.names]:
        raise ValueError(
            f"parameters {some(absent)} of ddp are not in zero; give it all of them, or freeze"
            " those"
        )
    if foreign := [name for p, name in zero.names.items() if p not in theirs]:
        raise ValueError(
            f"parameters {some(foreign)} of zero are not in ddp; nobody would average their"
            " gradients"
        )


class _ZeroHook:
    def __init__(
        self,
        hook: Hook,
        ddp: DistributedDataParallel,
        zero: ZeroOptimizer,
        shard_buckets: bool,
        *,
        interleaved: bool,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        _require_together(ddp, zero)
        self._inner = None if hook in (allreduce_hook, default_hooks.allreduce_hook) else hook
        self._zero = zero
        averaged = self._inner is not None
        self._step = zero.overlap(
            averaged=averaged,
            interleaved=interleaved,
            spread=shard_buckets,
            grad_scaler=grad_scaler,
        )
        self._waiting: list[Bucket] = []
        self._averages: list[torch.futures.Future[Any]] = []
        self._failed: Exception | None = None
        self._pass = BackwardPass()

    @uncompiled
    def hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """What DDP calls."""
        read = Bucket.read(bucket)
        first, last = read.index == 0, read.is_last
        if read.kept:
            first, last = self._pass.enter_kept(read, len(self._zero.names))
        if first:
            self._waiting, self._failed = [], None
        self._waiting.append(read)
        if self._failed is None:
            try:
                self._take(state, bucket, read, first=first, last=last)
            except Exception as error:
                self._failed = error
        if last:
            self._end()
        return read.future

    def _take(
        self, state: Any, bucket: GradBucket, read: Bucket, *, first: bool, last: bool
    ) -> None:
        if first:
            self._step.begin()
            self._averages = []
        if self._inner is None:
            self._add(read)
        else:
            self._averages.append(self._inner(state, bucket))
        if last:
            self._finish()

    def _add(self, bucket: Bucket) -> None:
        names = self._zero.names
        self._step.add(
            {names[p]: g for p, g in zip(bucket.parameters, bucket.gradients, strict=True)}
        )

    def _finish(self) -> None:
        averages, self._averages = self._averages, []
        for bucket, future in zip(self._waiting[: len(averages)], averages, strict=True):
            # All hooks of the step have been called, so every rank gets here after the same
            # messages.
            average = single(future.wait())
            if (failed := getattr(future, "failed", None)) is not None:
                raise failed
            if average.data_ptr() != bucket.buffer.data_ptr():
                bucket.buffer.copy_(average)
            self._add(bucket)
        if not self._zero.finish_step(self._step):
            for bucket in self._waiting:
                bucket.buffer.fill_(float("nan"))

    def _end(self) -> None:
        """Give DDP back all that it waits for, also where the step has failed: of a pass that does
        not end it would take no other."""
        waiting, self._waiting = self._waiting, []
        for bucket in waiting:
            bucket.future.set_result(bucket.buffer)
        failed, self._failed = self._failed, None
        if failed is not None:
            raise_after_backward(failed)
