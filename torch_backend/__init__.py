"""gradwire for PyTorch: any algorithm as a communication hook of `DistributedDataParallel`, or in a
wrapper of our own.

    method = gradwire.WireDtype(gradwire.PowerSGD(16), "int8")

    ddp = DistributedDataParallel(model)
    gradwire.torch_backend.register_comm_hook(ddp, method)

    model = gradwire.torch_backend.DataParallel(model, method)

    # Sharded by FSDP2:
    gradwire.torch_backend.compress_replicas(model, method, mesh["replicate"])

by itself, between backward and step, for engines that take no hook: `Averager`;

and optimizers with sharded state: `ZeroOptimizer`.

The names of `torch.distributed.algorithms.ddp_comm_hooks` are here too, with torch's arguments.

**The design.** There is one engine, and everything above is a way to call it. `engine/step.py` is
one step in the order in which it happens: take gradients, group them, send, receive, commit, hand
over, report. `engine/scheduler.py` runs the programs of a step side by side;
`engine/collectives.py` performs what they ask for. `engine/driver.py` is what surrounds steps: how
the parts are made, a loaded memory, another algorithm. Hooks, wrappers, sharded models and
optimizers (`ddp/`, `fsdp/`, `zero/`, `local_sgd/`) decide when gradients are added and when a step
ends, and nothing else. What is compared between ranks before the first step is in `setup/`, what an
algorithm remembers in `state/`, and whoever looks on is in `monitor/`, told by one event.

**The words**, besides those of `gradwire.core`.

- *bucket*: gradients that DDP hands over at one time. *Group of buckets*: those whose payload is
  worth a message, the groups of `engine/step.py`; a group of ranks is always a *process group*, or
  one of the `groups` of a request.
- *driver*: an algorithm at work on this rank. *Handle*: what a user has of it.
- *scratch*: memory that a step uses, and the next one uses again.
- *captured*: launched into a CUDA graph. What the host decides then is decided for good.
- *discarded*: a step whose averages are used, and of which memory keeps nothing.
- *unused*: parameters that took no part in a forward pass; where no rank used one, its memory stays
  as it is.

**The warnings.** Nothing is launched from a callback: the order of collectives is a function of the
order of buckets, or ranks hang. On a device the host waits for nothing in a step; tests count its
waits. What a program returns may lie in a message, a bucket or scratch, so memory is copied where
it was before (`engine.step.owned`). DDP compares a hook's annotations with the real objects, keeps
its one hook for life, and rebuilds its buckets after the first step. What is private of torch, or
not in every torch, is named in `torch_internals.py` alone.
"""

from gradwire.torch_backend.advise.compare.training import Training
from gradwire.torch_backend.advise.probe import probe
from gradwire.torch_backend.compat.hooks import (
    PowerSGDState,
    allreduce_hook,
    batched_powerSGD_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    powerSGD_hook,
)
from gradwire.torch_backend.compat.local_sgd import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)
from gradwire.torch_backend.compat.registry import (
    DDPCommHookType,
    noop_hook,
    register_ddp_comm_hook,
)
from gradwire.torch_backend.compat.zero import ZeroRedundancyOptimizer
from gradwire.torch_backend.compat.zero_hooks import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from gradwire.torch_backend.ddp.averager import Averager
from gradwire.torch_backend.ddp.data_parallel import DataParallel
from gradwire.torch_backend.ddp.hook import CommHook, register_comm_hook
from gradwire.torch_backend.fsdp.replicas import ReplicaHandle, compress_replicas
from gradwire.torch_backend.local_sgd.api import local_sgd
from gradwire.torch_backend.local_sgd.elastic.api import elastic
from gradwire.torch_backend.local_sgd.elastic.gradients import ElasticGradients
from gradwire.torch_backend.local_sgd.elastic.schedules import ElasticLocalSGD
from gradwire.torch_backend.local_sgd.handle import LocalSGDHandle
from gradwire.torch_backend.monitor.fidelity import Approximation
from gradwire.torch_backend.monitor.stats import Stats
from gradwire.torch_backend.zero.optimizer import ZeroOptimizer
from gradwire.torch_backend.zero.state import consolidate

__all__ = [
    "Approximation",
    "Averager",
    "CommHook",
    "DDPCommHookType",
    "DataParallel",
    "ElasticGradients",
    "ElasticLocalSGD",
    "HierarchicalModelAverager",
    "LocalSGDHandle",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PowerSGDState",
    "ReplicaHandle",
    "Stats",
    "Training",
    "ZeroOptimizer",
    "ZeroRedundancyOptimizer",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "compress_replicas",
    "consolidate",
    "elastic",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "local_sgd",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "probe",
    "register_comm_hook",
    "register_ddp_comm_hook",
]
