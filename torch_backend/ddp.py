"""gradwire as a communication hook of `DistributedDataParallel`.

ddp = DistributedDataParallel(model)
handle = gradwire.torch_backend.register_comm_hook(ddp, PowerSGD(rank=4))
"""
# No `from __future__ import annotations`: DDP compares the hook's annotations with the real objects.

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.advice import warn
from gradwire.core.algorithm import Algorithm
from gradwire.torch_backend.agreement import describe, obstacle, require_same_on_all_ranks
from gradwire.torch_backend.drive import Driver, Stats, specs_of
from gradwire.torch_backend.handle import Handle
from gradwire.torch_backend.uncompiled import uncompiled

__all__ = ["Bucket", "BucketHook", "CommHook", "Stats", "new_future", "register_comm_hook"]


def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Algorithm,
    *,
    group_bytes: int | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> "CommHook":
    """Let `algorithm` average the gradients of a DDP module. The training loop stays as it is.

    To be called on all ranks, once, before the first backward pass; works with any bucket size, `find_unused_parameters`, `static_graph`,
    `gradient_as_bucket_view` and `no_sync`. It communicates once, to check that all ranks ask for the same.

    Args:
        ddp: the wrapped model, or what `torch.compile` has made of it. Gradients of float dtypes, dense, on one device.
        algorithm: what to run, the same on every rank: `PowerSGD(rank=4)`, `AllReduce()`, `WireDtype(...)`, your own.
        group_bytes: buckets are collected until their payload has so many bytes, and then share one message. None: 1 MiB; 32 MiB for
            compressed gradients on an accelerator, where messages are quick and kernels count.
        grad_scaler: the scaler of the loss. What compression left out is in units of scaled gradients and has to follow when the scale
            changes; without this it counts for too much, or too little, in the steps after.

    Returns:
        A handle with the hook's statistics and state.

    Warns:
        CompressionWarning: much stays uncompressed, or a tensor looks like a stack; see `gradwire.core.advice`.

    Raises:
        TypeError: `ddp` is not a DistributedDataParallel.
        ValueError: a parameter or option cannot be served (named), `ddp` has a hook already, or ranks ask for different things. The
            module is unchanged then.
    """
    ddp = getattr(ddp, "_orig_mod", ddp)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp is a {type(ddp).__name__}; wrap the model first: DistributedDataParallel(model)")
    parameters = _trained_parameters(ddp)
    group: dist.ProcessGroup = ddp.process_group
    settings = {
        "algorithm": repr(algorithm),
        "group_bytes": str(group_bytes),
        "grad_scaler": str(grad_scaler is not None),
    }
    device = next((p.device for p in parameters.values()), None)
    require_same_on_all_ranks(group, settings, describe(parameters), _obstacle(ddp, algorithm, parameters), device)
    device = next(iter(parameters.values())).device
    driver = Driver(algorithm, specs_of(parameters), device, group, group_bytes, grad_scaler=grad_scaler)
    warn(algorithm, driver.specs)
    handle = CommHook(driver, parameters, _note_used(ddp, parameters))
    ddp.register_comm_hook(None, handle.hook)
    return handle


@dataclass(slots=True)
class Bucket:
    """What a `dist.GradBucket` says. The original is only valid during the hook call."""

    index: int
    is_last: bool
    buffer: Tensor
    parameters: list[Tensor]
    gradients: list[Tensor]
    future: torch.futures.Future[Tensor]

    @classmethod
    def read(cls, bucket: GradBucket) -> "Bucket":
        """Raises ValueError for a sparse gradient."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ValueError(
                "the gradient is sparse; make it dense (`sparse=False` in the embedding) or leave it out of DDP"
            )
        parameters = bucket.parameters()
        gradients = [
            g if p.is_contiguous() else _laid_out_like(p, g)
            for p, g in zip(parameters, bucket.gradients(), strict=True)
        ]
        return cls(bucket.index(), bucket.is_last(), buffer, parameters, gradients, new_future(buffer.device))


def _laid_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """In a bucket a gradient lies in memory as its parameter does (channels_last, transposed), but hooks are shown a contiguous view, with
    its elements in the wrong places."""
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())


class BucketHook:
    """Hands DDP's buckets to a driver, and completes the futures that DDP waits for.

    A future may be completed after its hook call has returned. All of a step are completed in the call for its last bucket, where
    the driver finishes.

    Args:
        driver: does the work.
        names: of the parameters.
        used: parameters that have received a gradient since the last step; emptied here. None: nobody keeps count.
    """

    def __init__(self, driver: Driver, names: Mapping[Tensor, str], used: set[str] | None = None) -> None:
        self._driver = driver
        self._parameters = list(names)  # which live as long as their ids are in use here
        self._names = {id(p): name for p, name in names.items()}
        self._used = used
        self._waiting: list[Bucket] = []

    def __call__(self, bucket: Bucket) -> None:
        first = bucket.index == 0
        if first:
            self._waiting = []  # whatever a failed backward pass has left
        self._waiting.append(bucket)
        gradients = {self._names[id(p)]: g for p, g in zip(bucket.parameters, bucket.gradients, strict=True)}
        unused = None if self._used is None else gradients.keys() - self._used
        self._driver.add(gradients, first=first, last=bucket.is_last, unused=unused)
        if bucket.is_last:
            if self._used is not None:
                self._used.clear()
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.future.set_result(each.buffer)


class CommHook(Handle):
    """What `register_comm_hook` returns."""

    def __init__(self, driver: Driver, parameters: Mapping[str, Tensor], used: set[str] | None) -> None:
        super().__init__(driver)
        self._on_bucket = BucketHook(driver, {p: name for name, p in parameters.items()}, used)

    @uncompiled
    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The function that DDP calls, for tools that register hooks themselves. `state` is not used."""
        read = Bucket.read(bucket)
        self._on_bucket(read)
        return read.future


class _Later(torch.futures.Future[Tensor]):
    """Completed by the thread that calls hooks, in the call for the last bucket: in an earlier call nobody may wait for it."""

    def wait(self) -> Tensor:
        if not self.done():
            raise RuntimeError(
                "a hook waits for the future of a bucket, which is completed in the call for the last bucket of the step: waiting would never end. "
                "Return it, or what its `then` returns"
            )
        return super().wait()


def new_future(device: torch.device) -> torch.futures.Future[Tensor]:
    """A future for a tensor on `device`. On CUDA its completion orders streams and makes no host wait."""
    return _Later() if device.type == "cpu" else _Later(devices=[device])


def _trained_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    return {n: p for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored}


def _note_used(ddp: DistributedDataParallel, parameters: Mapping[str, Tensor]) -> set[str] | None:
    """A set that every parameter enters when its gradient is accumulated. The reducer keeps the same account, but cannot be asked for
    it while it runs a hook."""
    if not ddp.find_unused_parameters or ddp.static_graph:
        return None
    used: set[str] = set()
    for name, parameter in parameters.items():

        def note(_: Tensor, name: str = name) -> None:
            used.add(name)

        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    return used


def _obstacle(ddp: DistributedDataParallel, algorithm: Algorithm, parameters: Mapping[str, Tensor]) -> str:
    """Why this rank cannot take part; "" if it can."""
    if getattr(ddp, "_comm_hooks", None):
        return "ddp has a communication hook already, and DDP takes only one; wrap the model anew to change it"
    if getattr(ddp, "_use_python_reducer", False):
        return (
            'torch._dynamo.config.optimize_ddp="python_reducer" hands hooks single gradients instead of buckets; set it to '
            '"ddp_optimizer", the default, before the model is wrapped'
        )
    return obstacle(ddp.module, algorithm, parameters)
