"""`DataParallel`: data-parallel training of any torch module, in Python that can be read.

model = gradwire.torch_backend.DataParallel(model, WireDtype(PowerSGD(16), "int8"))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.buckets.assignment import Mebibytes, bucket_limits
from gradwire.core.state.checkpoint import StateMismatch
from gradwire.core.text.options import OWN_CHECK, AtLeast0, checked
from gradwire.torch_backend.ddp.reducer import BackwardReducer
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.nodes import on_nodes
from gradwire.torch_backend.engine.groups.process_groups import given_or_default
from gradwire.torch_backend.engine.torch_modes import outside_inference_mode
from gradwire.torch_backend.monitor.watcher import UnknownParameters
from gradwire.torch_backend.setup.consistency import (
    copy_from_first_rank,
    describe,
    obstacle,
    require_initialized,
)
from gradwire.torch_backend.setup.handle import Handle
from gradwire.torch_backend.setup.registration import (
    announce,
    in_one_line,
    prepared,
    reconfigured,
    require_gradient_algorithm,
)
from gradwire.torch_backend.setup.sharded_models import INSTEAD, is_fsdp

ALL_REDUCE = AllReduce()


def _divided(algorithm: Algorithm) -> bool:
    """Plain averaging sends the buckets as they are, so gradients can be divided on their way into
    them."""
    return type(algorithm) is AllReduce


def _bucket_by_bucket(driver: Driver, message_bytes: int | None) -> None:
    """Send each bucket as a message where nothing is compressed, unless the user has said
    otherwise."""
    if message_bytes is None and not driver.memory.state.tensors:
        driver.message_bytes = 0


class ParallelHandle(Handle):
    """What a `DataParallel` has as its `handle`: see `CommHook`, whose methods these are."""

    def __init__(self, reducer: BackwardReducer, message_bytes: int | None) -> None:
        super().__init__(reducer.driver)
        self._reducer = reducer
        self._message_bytes = message_bytes

    def reconfigure(self, algorithm: Algorithm) -> StateMismatch:
        options: dict[str, Any] = {
            "message_bytes": self._message_bytes,
            "divided": _divided(algorithm),
        }
        driver, difference = reconfigured(
            self._driver, algorithm, {"call": "reconfigure"}, **options
        )
        _bucket_by_bucket(driver, self._message_bytes)
        self._reducer.use(driver)
        self._driver = driver
        return difference

    reconfigure.__doc__ = Handle.reconfigure.__doc__


class DataParallel(nn.Module):
    """A module whose gradients are averaged over all ranks during the backward pass, by any
    algorithm.

        model = DataParallel(model)
        model(x).sum().backward()        # model.module's gradients are averages now

    It does what `DistributedDataParallel` does, step for step: with the default algorithm its
    gradients are the same bits on Gloo, in the same buckets, and its state dict has the same keys.
    All that decides anything is Python: `gradwire.core.buckets.reducer` and
    `gradwire.core.buckets.assignment`.

    **Use `DistributedDataParallel` with `register_comm_hook` instead** for: `torch.compile` of the
    wrapped model, uneven inputs (`join`), `static_graph`, sparse gradients, mixed-precision
    wrappers, models that spread over several devices, or very many small parameters (this runs some
    Python for each). Use this one to see or change how gradients are reduced, where a tool has
    taken DDP's only hook, for gradients through several backward passes, or where DDP's conditions
    on the forward pass are in the way.

    Gradients are views of the buckets: what `p.grad` was after one step is overwritten by the next,
    `zero_grad()` or not. Each backward pass averages, whether the forward pass went through this
    wrapper or not, unless the last forward pass through it was under `no_sync`. A backward pass
    raises, on the ranks concerned, if parameters had no gradient in it and `find_unused_parameters`
    is off.

    Examples:
        >>> import gradwire, torch
        >>> from gradwire.torch_backend import DataParallel
        >>> method = gradwire.WireDtype(gradwire.PowerSGD(16), "int8")
        >>> model = DataParallel(torch.nn.Linear(512, 512), method)
        >>> model(torch.ones(2, 512)).sum().backward()
        >>> model.handle.stats().bytes_sent, model.buckets()
        (17424, [['bias', 'weight']])

    Args:
        module: gradients of float dtypes, dense, on one device. Parameters and buffers are
            overwritten with rank 0's.
        algorithm: what to run, the same on every rank.
        process_group: whose ranks are averaged over; None is the default group.
        bucket_cap_mb: size of a bucket in MiB; a bucket exceeds it by less than one parameter.
        first_bucket_mb: size of the first one in MiB, small so that communication begins early.
            (DDP takes 1 MiB unless it is told `bucket_cap_mb`, which then holds for the first one
            too.)
        find_unused_parameters: a backward pass may leave parameters out, not the same ones on all
            ranks. Costs a walk over the autograd graph in each forward pass and one small message
            in each step; on CUDA the host waits for it where this rank left parameters out. A
            parameter that no rank used keeps the gradient it had, usually None. Buckets are not
            rebuilt then.
        message_bytes: buckets are collected until their payload has so many bytes, and then share
            one message. None: where an algorithm compresses, 1 MiB (4 MiB on an accelerator); else
            each bucket is a message. With two levels, what travels inside a node counts a 32nd.
        grad_scaler: see `register_comm_hook`.

    Attributes:
        module: the module.
        handle: statistics and memory of the algorithm, and everything else that a `CommHook` does
            but `unregister`: `reconfigure(AllReduce())` ends compression. The module's weights are
            in `state_dict()`, the compressor's memory in `handle.state_dict()`.
        process_group: whose ranks are averaged over.

    Raises:
        TypeError: `module` is not a module, or is a DistributedDataParallel, or sharded by FSDP; or
            `algorithm` is no algorithm.
        ValueError: nothing to train, something cannot be served (named), or ranks differ in what
            they wrap (said how, on all ranks).
    """

    @outside_inference_mode
    @checked
    def __init__(
        self,
        module: Annotated[nn.Module, OWN_CHECK],
        algorithm: Algorithm = ALL_REDUCE,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: Mebibytes = 25,
        first_bucket_mb: Mebibytes = 1,
        find_unused_parameters: bool = False,
        message_bytes: AtLeast0 | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__()
        if is_fsdp(module):
            raise TypeError(
                f"module is a {type(module).__name__}, sharded by FSDP, which averages by itself."
                f" {INSTEAD}"
            )
        if not isinstance(module, nn.Module) or isinstance(module, DistributedDataParallel):
            raise TypeError(
                f"module is a {type(module).__name__}; wrap the model itself, an nn.Module"
            )
        require_gradient_algorithm(algorithm)
        require_initialized(dict(module.named_parameters()))
        limits = bucket_limits(bucket_cap_mb, first_bucket_mb)
        group = given_or_default(process_group)
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ValueError(
                "module has no parameter with requires_grad=True, so there is nothing to average;"
                " use it as it is"
            )
        algorithm = on_nodes(algorithm, group, next(iter(parameters.values())).device)
        settings = {
            "bucket_cap_mb": str(bucket_cap_mb),
            "first_bucket_mb": str(first_bucket_mb),
            "find_unused_parameters": str(find_unused_parameters),
            "message_bytes": str(message_bytes),
            "grad_scaler": str(grad_scaler is not None),
        }
        described = describe(dict(module.named_parameters())) | describe(
            dict(module.named_buffers()), "buffer"
        )
        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        why_not = obstacle(module, algorithm, parameters)
        groups, trial = prepared(
            algorithm, parameters, group, settings, why_not, described=described, frozen=frozen
        )
        copy_from_first_rank([*module.parameters(), *module.buffers()], group)
        device = next(iter(parameters.values())).device
        specs, divided = specs_of(parameters), _divided(algorithm)
        driver = Driver(
            algorithm,
            specs,
            device,
            groups,
            message_bytes,
            grad_scaler=grad_scaler,
            divided=divided,
        )
        announce(driver, trial)
        _bucket_by_bucket(driver, message_bytes)
        self.module = module
        then = "DataParallel wrapped the model. Wrap it anew"
        self._unknown = UnknownParameters(module, parameters.values(), then=then)
        self._reducer = BackwardReducer(driver, parameters, limits, find_unused_parameters)
        self.handle = ParallelHandle(self._reducer, message_bytes)
        self.process_group = group
        self._synchronizing = True
        self._buffers_may_differ = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Arguments and result are its own. Buffers are rank 0's in the first
        forward pass, and in each that follows a step."""
        training = torch.is_grad_enabled()
        if training:
            self._unknown.look(self._reducer.driver.memory.steps)
            self._reducer.before_forward()
        if self._buffers_may_differ:
            copy_from_first_rank(list(self.module.buffers()), self.process_group)
        outputs = self.module(*args, **kwargs)
        if training:
            self._reducer.after_forward(outputs, accumulating=not self._synchronizing)
        self._buffers_may_differ = training and self._synchronizing
        return outputs

    def extra_repr(self) -> str:
        """What it compresses and what it has saved, in one line, for `print(model)`."""
        return in_one_line(self._reducer.driver)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backward passes of forward passes in this context add up gradients and send
        nothing. The first pass after it averages the sum."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def buckets(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order in which buckets are sent. They
        change once, after the first step."""
        return self._reducer.buckets
