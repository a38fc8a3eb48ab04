"""Gradients of a sharded model's backward pass, unit by unit into one driver while the pass goes
on.

FSDP calls a hook when the gradients of a unit have been reduced over the shards, and puts them into
`.grad` when that returns. So the hook takes nothing: when the next unit's is called, the gradients
before are in their places, summed with those of earlier micro-batches, divided, in the dtype of the
parameter. From there the driver takes them. When the pass is over it has all, finishes, and writes
the averages where the gradients were.

The first pass shows in which order units come; from then on each is handed over when those before
it have been. The order is that of replica 0, for all replicas of this shard. Gradients that
`CPUOffloadPolicy` moves to the CPU are handed over at the end of the pass.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.text.wording import some
from gradwire.torch_backend.ddp.autograd_graph import tensors_in
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.torch_modes import refuse_compiled_autograd, uncompiled
from gradwire.torch_backend.fsdp.layout import Layout, local_part
from gradwire.torch_backend.fsdp.units import accumulating
from gradwire.torch_backend.torch_internals import in_backward, queue_callback

#: Where a model keeps the one whom FSDP's hooks call. FSDP keeps hooks for life.
ATTRIBUTE = "_gradwire_backward"

#: What to do when a model has other parameters than it had.
ANEW = (
    "Call handle.unregister(), and the same again; load_state_dict(state, strict=False) takes the"
    " memory of compress_replicas over"
)


def hook_obstacle(model: nn.Module) -> str:
    """Why nobody else may hook the units of a model; "" if somebody may."""
    before: ShardedBackward | None = getattr(model, ATTRIBUTE, None)
    if before is None or before.free:
        return ""
    return (
        "model has replicas whose gradients are averaged already. unregister() of the handle that"
        " compress_replicas or local_sgd returned makes place for another, and reconfigure(...)"
        " changes it"
    )


class ShardedBackward:
    """Watches the units of a sharded model, and hands their gradients to a driver. There must be no
    `hook_obstacle`.

    Args:
        driver: averages.
        layout: of the model.
        find_unused: a backward pass may leave parameters out.

    Attributes:
        driver, layout, find_unused: as given.
        free: it averages for nobody's handle, and may be closed.
        takes_thawed: while it is free, it averages gradients of layers that were thawed since as
            well.
        closed: it does nothing more.
    """

    free = False
    takes_thawed = True
    closed = False

    def __init__(self, driver: Driver, layout: Layout, find_unused: bool) -> None:
        predecessor: ShardedBackward | None = getattr(layout.model, ATTRIBUTE, None)
        if predecessor is not None:
            predecessor.close()
        setattr(layout.model, ATTRIBUTE, self)
        self.driver = driver
        self.layout = layout
        self.find_unused = find_unused
        device = layout.device
        self._stream: Any = (
            None if device.type == "cpu" else torch.get_device_module(device).Stream(device=device)
        )
        # of the units that are handed over as they come; the others at the end
        self._order: list[int] = []
        self._known = False
        self._forget_pass()
        self_ref = weakref.ref(self)

        def hook(k: int) -> Callable[[Tensor], None]:
            @uncompiled
            def on_unit(reduced: Tensor) -> None:
                if (backward := self_ref()) is not None and not backward.closed:
                    if not reduced.is_cpu:
                        # FSDP casts, adds or copies it on this stream, and lets go of it before
                        # that has happened.
                        reduced.record_stream(torch.accelerator.current_stream(reduced.device))
                    backward._on_unit(k)

            return on_unit

        for k, unit in enumerate(layout.units):
            unit.hook(hook(k), self._stream)

        @uncompiled
        def before(*_: Any) -> None:
            if (backward := self_ref()) is not None:
                backward._before_forward()

        @uncompiled
        def after(_module: Any, _inputs: Any, outputs: Any) -> None:
            if (backward := self_ref()) is not None:
                backward._after_forward(outputs)

        self._forward_hooks = [
            layout.model.register_forward_pre_hook(before),
            layout.model.register_forward_hook(after),
        ]

    def use(self, driver: Driver) -> None:
        """Let this driver average from the next step on."""
        self.driver.abandon()
        self.driver = driver

    def close(self) -> None:
        """Make place for another, which hooks the units anew. Gradients are averaged by nobody in
        between."""
        self.closed = True
        self.driver.abandon()
        for hook in self._forward_hooks:
            hook.remove()

    def _forget_pass(self) -> None:
        #: What the autograd engine calls at the end of a pass, and drops if the pass fails.
        self._ending: Callable[[], object] = lambda: None
        self._landing: int | None = None
        self._came: list[int] = []
        self._handed: set[int] = set()
        self._zeros: dict[str, Tensor] = {}
        self._begun = False
        self._accumulating: bool | None = None
        self._reaches_leaves = False

    def _before_forward(self) -> None:
        """Forget what a failed backward pass has left behind, and take in what is thawed, where no
        handle minds."""
        if in_backward():
            return
        self._forget_failed()
        if (
            self.free
            and self.takes_thawed
            and any(p.requires_grad for p in self.layout.frozen.values())
        ):
            # Another, which hooks units that had no trained parameters too. The model keeps it.
            layout = self.layout.thawed()
            groups = ProcessGroups(layout.replicas)
            plain = Driver(AllReduce(), specs_of(layout.blocks()), layout.device, groups)
            ShardedBackward(plain, layout, self.find_unused).free = True

    def _forget_failed(self) -> None:
        """Forget a pass that has not come to its end."""
        if self._begun:
            self.driver.abandon()
        self._forget_pass()

    def _after_forward(self, outputs: Any) -> None:
        # A backward pass may run others inside it (reentrant checkpointing), and a callback runs at
        # the end of the innermost. The outputs belong to the outermost.
        self_ref = weakref.ref(self)

        @uncompiled
        def on_output(_: Tensor) -> None:
            if (backward := self_ref()) is not None:
                backward._watch_for_the_end()

        # `torch.autograd.grad` is no step. It accumulates into no leaf, whereas `backward()` comes
        # to all of them, on a replica that has used no trained parameter too.
        @uncompiled
        def on_leaf(_: Any) -> None:
            if (backward := self_ref()) is not None:
                backward._reaches_leaves = True

        for tensor in tensors_in(outputs).tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(on_output)  # type: ignore[no-untyped-call]
                if self.find_unused:
                    _a_leaf_below(tensor.grad_fn).register_prehook(on_leaf)

    def _watch_for_the_end(self) -> None:
        if self._ending() is None:
            # No hook was called before a forward pass of `register_fsdp_forward_method`.
            self._forget_failed()
            refuse_compiled_autograd()
            ending = _Ending(self._end)
            self._ending = weakref.ref(ending)
            queue_callback(ending)

    def _on_unit(self, k: int) -> None:
        self._watch_for_the_end()
        self._land()
        self._landing = k
        if k in self._handed:
            name = self.layout.units[k].name
            raise RuntimeError(
                f"module {name!r} received gradients again in one backward pass, after the first"
                " had been handed over to be averaged. It did so once in the first pass, and is"
                " called more often now; call it equally often in each step, or accumulate:"
                " model.set_requires_all_reduce(False) for all backward passes of a step but the"
                " last"
            )

    def _land(self) -> None:
        """The gradients of the unit that came last are in their places by now."""
        if self._landing is None:
            return
        k, self._landing = self._landing, None
        self._came.append(k)
        if self._accumulating is None:
            self._accumulating = accumulating(self.layout.units)
        if not self._accumulating:
            came = set(self._came)
            for unit in self._order[len(self._handed) :]:
                if unit not in came:
                    break
                self._hand_over(unit)

    def _hand_over(self, k: int) -> None:
        """Hand over to the driver the gradients of a unit whose turn it is and that is not the
        last."""
        self._handed.add(k)
        gradients, absent = self._gradients(self.layout.units[k].parameters)
        if absent and not self.find_unused:
            self._refuse_absent(absent)
        if gradients:
            self._add(gradients, absent, last=False)

    def _add(self, gradients: dict[str, Tensor], absent: list[str], *, last: bool) -> None:
        first, self._begun = not self._begun, True
        self.driver.add(
            gradients, first=first, last=last, unused=absent if self.find_unused else None
        )

    @uncompiled
    def _end(self) -> None:
        with self._on_stream():
            self._land()
            came = self._came
            nothing_used = self.find_unused and self._reaches_leaves
            is_step = not self._accumulating and (came or nothing_used)
            if is_step and not came:
                is_step = not accumulating(self.layout.units)
            try:
                if is_step:
                    self._refuse_unknown()
                    self._finish()
                    if not self._known:
                        self._learn(came)
            finally:
                self._forget_pass()

    def _finish(self) -> None:
        held, units = self.layout.held, self.layout.units
        missing = [k for k in range(len(units)) if k not in self._handed]
        _, absent = self._gradients([name for k in missing for name in units[k].parameters])
        if absent and not self.find_unused:
            self._refuse_absent(absent)
        # one by one, as on ranks where they have come in time
        for k in self._order[len(self._handed) :]:
            self._hand_over(k)
        usage = None
        if self.find_unused:
            usage = self.driver.send_usage([h.parameter.grad is not None for h in held.values()])
        gradients, absent = self._gradients(
            [
                name
                for k, unit in enumerate(units)
                if k not in self._handed
                for name in unit.parameters
            ]
        )
        if gradients or self._begun:
            self._add(gradients, absent, last=True)
        if usage is not None:
            # A parameter that other replicas used receives their average; one that nobody used
            # stays without a gradient.
            usage.receive()
            for (name, h), by_somebody in zip(held.items(), usage.result.tolist(), strict=True):
                if by_somebody and name in self._zeros:
                    h.parameter.grad = h.distributed(self._zeros[name])

    def _gradients(self, names: list[str]) -> tuple[dict[str, Tensor], list[str]]:
        """This rank's gradients of parameters that are not frozen now; zeros for those that have
        none, whose names are returned as well."""
        found, absent = {}, []
        for name in names:
            p = self.layout.held[name].parameter
            if p.grad is not None:
                found[name] = local_part(p.grad)
            elif p.requires_grad:
                found[name] = self._zeros.setdefault(name, torch.zeros_like(local_part(p)))
                absent.append(name)
        return found, absent

    def _refuse_absent(self, absent: list[str]) -> NoReturn:
        """The other replicas would take other messages for those of these parameters."""
        self.driver.abandon()
        if gone := [name for name in absent if not self.layout.holds(name)]:
            raise RuntimeError(
                f"parameters {some(gone)} have no gradient, and their modules are in model no more:"
                f" they were removed, or replaced, after compress_replicas, or local_sgd. {ANEW}"
            )
        raise RuntimeError(
            f"parameters {some(absent)} have no gradient at the end of the backward pass, and"
            " the other replicas may wait for them. If a forward pass may leave parameters"
            " out, say so: compress_replicas(..., unused=True). If they are frozen, set"
            " requires_grad=False on all ranks"
        )

    def _refuse_unknown(self) -> None:
        """Gradients that nobody averages would let replicas drift apart."""
        layout = self.layout
        held = {id(h.parameter) for h in layout.held.values()}
        # names cost several times as much as this look, which each step takes
        if not any(
            p is not None and p.grad is not None and id(p) not in held
            for module in layout.model.modules()
            for p in module._parameters.values()
        ):
            return
        unknown = [
            name
            for name, p in layout.model.named_parameters()
            if p.grad is not None and id(p) not in held and not layout.holds(name)
        ]
        if unknown:
            self.driver.abandon()
            raise RuntimeError(
                f"parameters {some(unknown)} have gradients that nobody averages: they were frozen,"
                " or their modules were not there, when compress_replicas, or local_sgd, was"
                f" called. {ANEW}"
            )

    def _learn(self, came: list[int]) -> None:
        """Learn in which order units are handed over from now on. Those that came more than once in
        a pass wait for its end, as does the last one."""
        self._known = True
        times = Counter(came)
        mine = [k for k in dict.fromkeys(came) if times[k] == 1][:-1]
        if self.layout.offloaded:
            # gradients are on their way to pinned memory, and FSDP waits for them at the end of the
            # pass
            mine = []
        group = self.driver.process_group
        order = torch.full(
            (len(self.layout.units),), -1, dtype=torch.int64, device=self.driver.ops.device
        )
        order[: len(mine)] = torch.tensor(mine, dtype=torch.int64, device="cpu")
        dist.broadcast(order, dist.get_global_rank(group, 0), group=group)
        self._order = [k for k in order.tolist() if k >= 0]

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Work on the stream where gradients were put in their places. Who comes after the pass
        waits for it."""
        return nullcontext() if self._stream is None else _Stream(self._stream)


def _a_leaf_below(node: Any) -> Any:
    """Some node of the autograd graph that has nothing below it."""
    while below := [each for each, _ in node.next_functions if each is not None]:
        node = below[-1]
    return node


class _Ending:
    """A callback that the autograd engine is given to call another, `end`, after all of FSDP's.

    FSDP has one for each outermost unit, in which units come whose inputs need no gradient. By the
    time the first one is called all of them are queued, so what is queued then comes last. The
    engine holds this object until `end` has been called, or the pass has failed.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        queue_callback(self._last)

    def _last(self) -> None:
        self._end()


class _Stream:
    """A stream on which work goes, within, after what is on the current one; the current one waits
    for it in the end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._within = torch.get_device_module(stream.device).stream(stream)

    def __enter__(self) -> None:
        self._outside = torch.get_device_module(self._stream.device).current_stream(
            self._stream.device
        )
        self._stream.wait_stream(self._outside)
        self._within.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._within.__exit__(*error)
        self._outside.wait_stream(self._stream)
