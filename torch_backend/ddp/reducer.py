"""Gradients of a backward pass, bucket by bucket into the driver while the pass goes on."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.buckets.assignment import assign_buckets
from gradwire.core.buckets.reducer import Reducer
from gradwire.core.ops import Spec
from gradwire.torch_backend.ddp.autograd_graph import reached, tensors_in
from gradwire.torch_backend.engine.collectives import share
from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.engine.scheduler import Running
from gradwire.torch_backend.engine.torch_modes import refuse_compiled_autograd, uncompiled
from gradwire.torch_backend.torch_internals import (
    add_gradient_hook,
    in_backward,
    queue_callback,
)


class BackwardReducer:
    """Watches gradients arrive, keeps them in flat buckets, and hands each bucket to a driver when
    its turn has come.

    Everything that it decides is decided by `gradwire.core.buckets.reducer.Reducer`; here are hooks
    and memory. Limits of buckets are in bytes.
    """

    def __init__(
        self,
        driver: Driver,
        parameters: Mapping[str, Tensor],
        limits: Sequence[int],
        find_unused: bool,
    ) -> None:
        self.driver = driver
        self.find_unused = find_unused
        self.accumulating = False
        self._limits = list(limits)
        self._parameters = list(parameters.values())
        self._number = {p: i for i, p in enumerate(self._parameters)}
        self._specs = [driver.specs[name] for name in parameters]
        self.use(driver)
        # Nobody knows yet in which order gradients come. Where parameters may be left out it can be
        # another one in every step: then it is taken to be the reverse of the order in the module,
        # for good. Elsewhere the first step is one bucket, to see the order.
        first_limits = self._limits if find_unused else [sys.maxsize]
        self._rebuilt = find_unused
        self._state = Reducer(list(parameters), self._assign(first_limits)[::-1])
        self._flats: list[Tensor] = []
        self._views: list[Tensor] = []
        self._reached: set[int] | None = None
        #: What the autograd engine calls at the end of a pass, and drops if the pass fails.
        self._ending: Callable[[], object] = lambda: None
        self._arrived: set[int] = set()
        self._absent: set[int] = set()
        self._hook()

    def use(self, driver: Driver) -> None:
        """Let this driver average from the next step on."""
        self.driver.abandon()
        self.driver = driver
        self._factors = [
            share(driver.process_group, p.dtype) if driver.divided else None
            for p in self._parameters
        ]

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order in which buckets are sent."""
        return [[self._state.names[i] for i in bucket] for bucket in self._state.buckets]

    @uncompiled
    def before_forward(self) -> None:
        """Forget what a failed backward pass has left behind. Hooks of users come first, also those
        that were registered later: they change a gradient before it leaves, as under DDP."""
        if not in_backward():
            for hooks, own in self._hooks:
                if len(hooks) > 1:
                    hooks[own] = hooks.pop(own)
            self._forget()

    def _forget(self) -> None:
        """Forget a pass that has not ended."""
        if self._state.active:
            self.driver.abandon()
        self._state.abandon()
        self._ending = lambda: None

    @uncompiled
    def after_forward(self, outputs: Any, *, accumulating: bool) -> None:
        """Prepare for the backward pass of these outputs."""
        self.accumulating = accumulating
        found = tensors_in(outputs)
        everything_unused = False
        if self.find_unused and not accumulating:
            if found.opaque:
                # Whatever is not seen may reach any parameter. Those without a gradient in the end
                # are the unused ones.
                self._reached = set(range(len(self._parameters)))
            else:
                now = reached(found.tensors, self._number)
                everything_unused = not now
                # Several forward passes may share a backward pass.
                self._reached = now | (self._reached or set())
        self_ref = weakref.ref(self)

        @uncompiled
        def on_output(_: Tensor) -> None:
            if (reducer := self_ref()) is not None:
                reducer._on_output(everything_unused)

        for tensor in found.tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(on_output)  # type: ignore[no-untyped-call]

    def _assign(self, limits: Sequence[int], order: Sequence[int] | None = None) -> list[list[int]]:
        keys = [(p.dtype, p.device) for p in self._parameters]
        return assign_buckets([s.nbytes for s in self._specs], limits, keys, order)

    def _hook(self) -> None:
        self_ref = weakref.ref(self)

        def hook(i: int) -> Callable[[Tensor], None]:
            @uncompiled
            def on_gradient(_: Tensor) -> None:
                if (reducer := self_ref()) is not None:
                    reducer._on_gradient(i)

            return on_gradient

        self._hooks = [add_gradient_hook(p, hook(i)) for i, p in enumerate(self._parameters)]
        weakref.finalize(self, _remove, self._hooks)
        # Held from now on, as DDP holds them: a node accumulates on the stream on which it was
        # made, and all have to be one stream's.
        self._accumulators = [p.expand_as(p).grad_fn.next_functions[0][0] for p in self._parameters]  # type: ignore[union-attr]

    def _on_output(self, everything_unused: bool) -> None:
        # A backward pass may run others inside it (reentrant checkpointing), and a callback runs at
        # the end of the innermost. The outputs belong to the outermost.
        self._watch_for_the_end()
        # no gradient will come, and the other ranks wait
        if everything_unused and not self._state.active:
            self._begin()

    def _on_gradient(self, i: int) -> None:
        self._watch_for_the_end()
        if not self._state.active:
            self._begin()
        launched = self._state.ready(i)
        if not self.accumulating:
            # autograd also ends with none: then the parameter was not used
            if not self.find_unused or self._parameters[i].grad is not None:
                self._arrived.add(i)
                self._into_bucket(i)
            if launched:
                self._launch(launched)

    def _watch_for_the_end(self) -> None:
        if self._ending() is None:
            self._forget()  # forward passes that went by the wrapper have not
            refuse_compiled_autograd()

            def end() -> None:
                self._end()

            self._ending = weakref.ref(end)
            queue_callback(end)

    def _begin(self) -> None:
        unused: set[int] = set()
        if not self.accumulating:
            self._allocate()
            self._arrived, self._absent = set(), set()
            if self._reached is not None:
                unused, self._reached = set(range(len(self._parameters))) - self._reached, None
        self._launch(self._state.begin(unused, accumulating=self.accumulating))

    @uncompiled
    def _end(self) -> None:
        self._ending = lambda: None
        if not self._state.active:  # `torch.autograd.grad`: no parameter was concerned
            return
        last = len(self._state.buckets) - 1
        remaining = self._state.end(missing_are_unused=self.find_unused)
        if self.accumulating:
            return
        self._launch([k for k in remaining if k != last])
        usage = self._send_bucket(last)
        self._give_to_absent(usage)
        if not self._rebuilt:
            self._rebuild()

    def _launch(self, buckets: Sequence[int]) -> None:
        # The last one ends the step and waits for all messages, so it is kept for the end of the
        # pass.
        for k in buckets:
            if k < len(self._state.buckets) - 1:
                self._send_bucket(k)

    def _send_bucket(self, k: int) -> Running[Tensor] | None:
        members = self._state.buckets[k]
        for i in members:
            if i not in self._arrived:
                if self._parameters[i].grad is None:
                    self._views[i].zero_()
                    self._absent.add(i)
                else:  # accumulated in earlier passes
                    self._into_bucket(i)
        last = k == len(self._state.buckets) - 1
        usage = None
        if last and self.find_unused:
            usage = self.driver.send_usage(
                [i not in self._absent for i in range(len(self._parameters))]
            )
        names = self._state.names
        self.driver.add(
            {names[i]: self._views[i] for i in members},
            first=k == 0,
            last=last,
            unused={names[i] for i in members if i in self._absent} if self.find_unused else None,
        )
        return usage

    def _give_to_absent(self, usage: Running[Tensor] | None) -> None:
        """A parameter that only other ranks used receives their average; one that nobody used stays
        without a gradient, so that an optimizer leaves it alone."""
        if usage is None:
            return
        usage.receive()
        if self._absent:
            for i, by_somebody in enumerate(usage.result.tolist()):
                if by_somebody and i in self._absent:
                    self._parameters[i].grad = self._views[i]

    def _into_bucket(self, i: int) -> None:
        parameter, view, factor = self._parameters[i], self._views[i], self._factors[i]
        gradient = parameter.grad
        if gradient is None:  # autograd has ended with none, or a hook has taken it away
            view.zero_()
            parameter.grad = view
            return
        if gradient is view:  # it was not cleared by zero_grad, or only set to zero
            if factor is not None:
                view.mul_(factor)
            return
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {self._state.names[i]!r} is sparse; make it dense"
            )
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of parameter {self._state.names[i]!r} has a graph of its own:"
                " backward(create_graph=True) cannot be averaged. Use torch.autograd.grad for the"
                " inner derivatives."
            )
        if factor is None:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)
        parameter.grad = view

    def _allocate(self) -> None:
        if self._views:
            return
        views: dict[int, Tensor] = {}
        for bucket in self._state.buckets:
            *offsets, size = accumulate((self._specs[i].size for i in bucket), initial=0)
            like = self._parameters[bucket[0]]
            flat = torch.empty(size, dtype=like.dtype, device=like.device)
            self._flats.append(flat)
            for i, offset in zip(bucket, offsets, strict=True):
                views[i] = _view_like(flat, offset, self._parameters[i], self._specs[i])
        self._views = [views[i] for i in range(len(self._parameters))]

    def _rebuild(self) -> None:
        """Buckets in the order in which rank 0's gradients came. Their memory is taken in the next
        pass, when that of the old ones is free."""
        self._rebuilt = True
        group = self.driver.process_group
        order = torch.tensor(
            self._state.arrival_order(), dtype=torch.int64, device=self.driver.ops.device
        )
        dist.broadcast(order, dist.get_global_rank(group, 0), group=group)
        self._state.rebuild(self._assign(self._limits, order.tolist()))
        self._flats, self._views = [], []


def _remove(added: Sequence[tuple[dict[int, Any], int]]) -> None:
    """Take hooks off parameters, which may outlive whoever has added them."""
    for hooks, own in added:
        hooks.pop(own, None)


def _view_like(flat: Tensor, offset: int, parameter: Tensor, spec: Spec) -> Tensor:
    """Laid out as the parameter is (channels_last, transposed), as autograd makes gradients."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + spec.size].view(spec.shape)
