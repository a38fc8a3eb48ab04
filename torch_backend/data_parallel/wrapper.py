"""`DataParallel`: data-parallel training of any torch module, in Python that can be read.

model = gradwire.torch_backend.DataParallel(model, PowerSGD(rank=4))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.buckets.assignment import bucket_limits
from gradwire.core.checkpoint import StateMismatch
from gradwire.torch_backend.approximation import Approximation
from gradwire.torch_backend.data_parallel.backward import BackwardReducer
from gradwire.torch_backend.drive import Driver, specs_of
from gradwire.torch_backend.handle import Handle, discarding, measuring
from gradwire.torch_backend.newcomers import Newcomers
from gradwire.torch_backend.own_memory import ShardedState
from gradwire.torch_backend.process_groups import given_or_default
from gradwire.torch_backend.rank_checks import copy_from_first_rank, describe, obstacle, require_initialized
from gradwire.torch_backend.registration import (
    announce,
    in_one_line,
    prepared,
    reconfigured,
    require_gradient_algorithm,
)
from gradwire.torch_backend.sharded import INSTEAD, is_fsdp
from gradwire.torch_backend.stats import Stats
from gradwire.torch_backend.two_levels import on_nodes

ALL_REDUCE = AllReduce()


def _divided(algorithm: Algorithm) -> bool:
    """Plain averaging sends the buckets as they are, so gradients can be divided on their way into them."""
    return type(algorithm) is AllReduce


def _bucket_by_bucket(driver: Driver, message_bytes: int | None) -> None:
    """Where nothing is compressed each bucket is a message, unless the user has said otherwise."""
    if message_bytes is None and not driver.memory.state.tensors:
        driver.message_bytes = 0


class DataParallel(nn.Module):
    """A module whose gradients are averaged over all ranks during the backward pass, by any algorithm.

        model = DataParallel(model)
        model(x).sum().backward()        # model.module's gradients are averages now

    It does what `DistributedDataParallel` does, step for step: with the default algorithm its gradients are the same bits on Gloo, in the
    same buckets, and its state dict has the same keys. All that decides anything is Python: `gradwire.core.buckets.reducer` and
    `gradwire.core.buckets.assignment`.

    **Use `DistributedDataParallel` with `register_comm_hook` instead** for: `torch.compile` of the wrapped model, uneven inputs (`join`),
    `static_graph`, sparse gradients, mixed-precision wrappers, models that spread over several devices, or very many small parameters
    (this runs some Python for each). Use this one to see or change how gradients are reduced, where a tool has taken DDP's only hook, for
    gradients through several backward passes, or where DDP's conditions on the forward pass are in the way.

    Gradients are views of the buckets: what `p.grad` was after one step is overwritten by the next, `zero_grad()` or not. Each backward
    pass averages, whether the forward pass went through this wrapper or not, unless the last forward pass through it was under
    `no_sync`. A backward pass raises, on the ranks concerned, if parameters had no gradient in it and `find_unused_parameters` is off.

    Examples:
        >>> import gradwire, torch
        >>> from gradwire.torch_backend import DataParallel
        >>> model = DataParallel(torch.nn.Linear(512, 512), gradwire.PowerSGD(rank=4))
        >>> model(torch.ones(2, 512)).sum().backward()
        >>> model.stats().bytes_sent, model.buckets()
        (18432, [['bias', 'weight']])

    Args:
        module: gradients of float dtypes, dense, on one device. Parameters and buffers are overwritten with rank 0's.
        algorithm: what to run, the same on every rank.
        process_group: whose ranks are averaged over; None is the default group.
        bucket_cap_mb: size of a bucket in MiB; a bucket exceeds it by less than one parameter.
        first_bucket_mb: size of the first one in MiB, small so that communication begins early. (DDP takes 1 MiB unless it is told
            `bucket_cap_mb`, which then holds for the first one too.)
        find_unused_parameters: a backward pass may leave parameters out, not the same ones on all ranks. Costs a walk over the autograd
            graph in each forward pass and one small message in each step; on CUDA the host waits for it where this rank left parameters out.
            A parameter that no rank used keeps the gradient it had, usually None. Buckets are not rebuilt then.
        broadcast_buffers: overwrite buffers with rank 0's before the first forward pass, and each that follows a training step.
        message_bytes: buckets are collected until their payload has so many bytes, and then share one message. None: where an
            algorithm compresses, 1 MiB (32 MiB on an accelerator); else each bucket is a message. With two levels, what travels inside a node
            counts a 32nd.
        grad_scaler: see `register_comm_hook`.

    Attributes:
        module: the module.
        process_group: whose ranks are averaged over.

    Raises:
        TypeError: `module` is not a module, or is a DistributedDataParallel, or sharded by FSDP; or `algorithm` is no algorithm.
        ValueError: nothing to train, something cannot be served (named), or ranks differ in what they wrap (said how, on all ranks).
    """

    def __init__(
        self,
        module: nn.Module,
        algorithm: Algorithm = ALL_REDUCE,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        first_bucket_mb: float = 1,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        message_bytes: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__()
        if is_fsdp(module):
            raise TypeError(
                f"module is a {type(module).__name__}, sharded by FSDP, which averages by itself. {INSTEAD}"
            )
        if not isinstance(module, nn.Module) or isinstance(module, DistributedDataParallel):
            raise TypeError(f"module is a {type(module).__name__}; wrap the model itself, an nn.Module")
        require_gradient_algorithm(algorithm)
        require_initialized(dict(module.named_parameters()))
        limits = bucket_limits(bucket_cap_mb, first_bucket_mb)
        group = given_or_default(process_group)
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ValueError(
                "module has no parameter with requires_grad=True, so there is nothing to average; use it as it is"
            )
        algorithm = on_nodes(algorithm, group, next(iter(parameters.values())).device)
        settings = {
            "bucket_cap_mb": str(bucket_cap_mb),
            "first_bucket_mb": str(first_bucket_mb),
            "find_unused_parameters": str(find_unused_parameters),
            "broadcast_buffers": str(broadcast_buffers),
            "message_bytes": str(message_bytes),
            "grad_scaler": str(grad_scaler is not None),
        }
        described = describe(dict(module.named_parameters())) | describe(dict(module.named_buffers()), "buffer")
        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        why_not = obstacle(module, algorithm, parameters)
        groups, trial = prepared(algorithm, parameters, group, settings, why_not, described=described, frozen=frozen)
        copy_from_first_rank([*module.parameters(), *module.buffers()], group)
        device = next(iter(parameters.values())).device
        specs, divided = specs_of(parameters), _divided(algorithm)
        driver = Driver(algorithm, specs, device, groups, message_bytes, grad_scaler=grad_scaler, divided=divided)
        announce(driver, trial)
        self._message_bytes = message_bytes
        _bucket_by_bucket(driver, message_bytes)
        self.module = module
        self._newcomers = Newcomers(module, parameters.values(), wrapper="DataParallel")
        self._reducer = BackwardReducer(driver, parameters, limits, find_unused_parameters)
        self.process_group = group
        self._synchronizing = True
        self._broadcast_buffers = broadcast_buffers
        self._buffers_may_differ = broadcast_buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Arguments and result are its own; buffers are broadcast first where `broadcast_buffers` says so."""
        training = torch.is_grad_enabled()
        if training:
            self._newcomers.look(self._reducer.driver.memory.steps)
            self._reducer.before_forward()
        if self._buffers_may_differ:
            copy_from_first_rank(list(self.module.buffers()), self.process_group)
        outputs = self.module(*args, **kwargs)
        if training:
            self._reducer.after_forward(outputs, accumulating=not self._synchronizing)
        self._buffers_may_differ = training and self._synchronizing and self._broadcast_buffers
        return outputs

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that averages gradients; `reconfigure` changes it."""
        return self._reducer.driver.algorithm

    def extra_repr(self) -> str:
        """What it compresses and what it has saved, in one line, for `print(model)`."""
        return in_one_line(self._reducer.driver)

    def reconfigure(self, algorithm: Algorithm) -> StateMismatch:
        """Go on with another algorithm from the next step on; see `CommHook.reconfigure`. With `AllReduce()` nothing is compressed any
        more."""
        old = self._reducer.driver
        settings = {"call": "reconfigure"}
        options: dict[str, Any] = {"message_bytes": self._message_bytes, "divided": _divided(algorithm)}
        driver, difference = reconfigured(old, algorithm, settings, **options)
        _bucket_by_bucket(driver, self._message_bytes)
        self._reducer.use(driver)
        return difference

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backward passes of forward passes in this context add up gradients and send nothing. The first pass after it
        averages the sum."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def buckets(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order in which buckets are sent. They change once, after the first step."""
        return self._reducer.buckets

    def stats(self) -> Stats:
        """Steps, bytes and collectives since construction, of averaging; without the broadcasts."""
        return self._reducer.driver.stats()

    def error_norm(self) -> float:
        """The 2-norm of what compression has left out so far on this rank, as `CommHook.error_norm`: a Python float, for which the host waits on CUDA."""
        return self._reducer.driver.error_norm()

    @contextmanager
    def measured(self) -> Iterator[Approximation]:
        """The next step is compared with a full average of the same gradients, see `CommHook.measured`."""
        with measuring(self._reducer.driver) as found:
            yield found

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Backward passes in this context leave no trace in the compressor's memory, see `CommHook.discarded`."""
        with discarding(lambda: self._reducer.driver):
            yield

    def forget(self, names: str | Iterable[str] | None = None) -> None:
        """Set to zero what compression has left out so far, see `CommHook.forget`."""
        self._reducer.driver.forget(names)

    def compressor_state_dict(self) -> dict[str, Any]:
        """The compressor memory of all ranks, as `CommHook.state_dict` gives it; every rank calls this. The module's weights are in `state_dict`."""
        return self._reducer.driver.memory.whole()

    @property
    def sharded_compressor_state(self) -> ShardedState:
        """The compressor memory for `torch.distributed.checkpoint`, see `CommHook.sharded_state`."""
        return ShardedState(Handle(self._reducer.driver), self._reducer.driver.memory)

    def rank_compressor_state_dict(self) -> dict[str, Any]:
        """This rank's compressor memory, as `CommHook.rank_state_dict` gives it: for the same rank of as many, bit for bit. Communicates nothing."""
        return self._reducer.driver.memory.own()

    def gathered_compressor_state_dict(self, errors: str = "mean", to: int | None = 0) -> dict[str, Any] | None:
        """The compressor memory of all ranks, as `CommHook.gathered_state_dict` gives it. Every rank calls this.

        Args:
            errors: "mean" keeps one copy of what compression left out, "all" that of every rank, for a run that goes on bit for bit.
            to: the rank that receives it, the others receive None; None: all ranks do.
        """
        return self._reducer.driver.memory.portable(errors, to)

    def load_compressor_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> StateMismatch:
        """Continue from any of these states; see `CommHook.load_state_dict`. Raises ValueError, with nothing changed, if it does not fit."""
        return self._reducer.driver.load_state_dict(state, strict)
