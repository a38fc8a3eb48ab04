"""torch's enumeration of hooks, and its hook that does nothing: only the import line changes.

from gradwire.torch_backend import DDPCommHookType, register_ddp_comm_hook
register_ddp_comm_hook(DDPCommHookType.POWER_SGD_RANK2, ddp)
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the real
# objects.

from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket

from gradwire.torch_backend.compat.hooks import (
    PowerSGDState,
    allreduce_hook,
    batched_powerSGD_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    powerSGD_hook,
)
from gradwire.torch_backend.ddp.bucket_hook import as_it_is
from gradwire.torch_backend.engine.torch_modes import uncompiled


@uncompiled
def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average nothing: each rank goes on with its own gradients, and replicas drift apart. To see
    what communication costs a step.

    Args:
        _: ignored.
        bucket: that DDP hands over.

    Returns:
        A completed future of the bucket as it is.
    """
    return as_it_is(bucket.buffer())


def _register(hook: Any, model: Any, state: Any) -> None:
    model.register_comm_hook(state, hook)


def _register_low_rank(hook: Any, rank: int, model: Any, state: Any) -> None:
    model.register_comm_hook(PowerSGDState(state, matrix_approximation_rank=rank), hook)


def _refuse(name: str, model: Any, state: Any) -> None:
    raise ValueError(
        f"DDPCommHookType.{name} is not here: torch's quantization hooks gather every rank's"
        " gradient in full on every rank. BF16_COMPRESS halves the bytes, POWER_SGD saves more"
    )


class DDPCommHookType(Enum):
    """The hooks by torch's names. A value registers its hook:
    `DDPCommHookType.ALLREDUCE.value(model=ddp, state=process_group)`.

    PowerSGD averages in full for the first 1000 steps, as torch's does. `QUANTIZE_PER_TENSOR` and
    `QUANTIZE_PER_CHANNEL` raise ValueError.
    """

    # Tuples: a partial alone would become a method of the class.
    ALLREDUCE = (partial(_register, allreduce_hook),)
    FP16_COMPRESS = (partial(_register, fp16_compress_hook),)
    BF16_COMPRESS = (partial(_register, bf16_compress_hook),)
    QUANTIZE_PER_TENSOR = (partial(_refuse, "QUANTIZE_PER_TENSOR"),)
    QUANTIZE_PER_CHANNEL = (partial(_refuse, "QUANTIZE_PER_CHANNEL"),)
    POWER_SGD = (partial(_register_low_rank, powerSGD_hook, 1),)
    POWER_SGD_RANK2 = (partial(_register_low_rank, powerSGD_hook, 2),)
    BATCHED_POWER_SGD = (partial(_register_low_rank, batched_powerSGD_hook, 1),)
    BATCHED_POWER_SGD_RANK2 = (partial(_register_low_rank, batched_powerSGD_hook, 2),)
    NOOP = (partial(_register, noop_hook),)

    def __init__(self, register: Any) -> None:
        self._value_ = register


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: nn.Module, state: Any = None
) -> None:
    """Register one of torch's hooks, in gradwire's form.

    Examples:
        >>> import torch
        >>> from gradwire.torch_backend import DDPCommHookType, register_ddp_comm_hook
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 32))
        >>> register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, ddp)
        >>> ddp(torch.ones(2, 64)).sum().backward()
        >>> ddp.module.bias.grad[:2]
        tensor([2., 2.])

    Args:
        comm_hook_type: which.
        model: a DistributedDataParallel.
        state: the process group; None is the default group.

    Raises:
        TypeError: `comm_hook_type` is no member of gradwire's `DDPCommHookType`.
        ValueError: it is one of torch's quantization hooks.
    """
    given: object = comm_hook_type
    if not isinstance(given, DDPCommHookType):
        raise TypeError(
            f"comm_hook_type={given!r} is no member of gradwire.torch_backend.DDPCommHookType;"
            " import it from there, as this function"
        )
    register: Any = comm_hook_type.value
    register(model=model, state=state)
