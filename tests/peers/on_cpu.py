"""Tests that were written for GPUs, on CPUs: a rank's GPU is the CPU. Without NCCL, and without anything that asks a GPU what it does."""

from functools import wraps

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed

FACTORIES = ("empty", "full", "ones", "rand", "randn", "tensor", "zeros")


def skip_nothing_for_gpus():
    """To be called before the tests are imported, which are decorated when they are defined."""
    common_distributed.skip_if_lt_x_gpu = _enough
    common_distributed.skip_if_no_gpu = _enough(1)
    common_distributed.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}


def cpu_in_place_of_gpus():
    """To be called in a rank: the tests' helpers are compiled when they are imported, and would not compile with this."""
    for name in ("set_device", "synchronize"):
        setattr(torch.cuda, name, lambda device=None: None)
    torch.cuda.current_device = lambda: 0
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = lambda self, device=None: self
        owner.to = _at_cpu(owner.to)
    for name in FACTORIES:
        setattr(torch, name, _at_cpu(getattr(torch, name)))
    DistributedDataParallel.__init__ = _without_device_ids(DistributedDataParallel.__init__)


def small_inputs(tests):
    """`test_ddp_uneven_inputs` takes some hundred steps with convolutions of images of 1000 x 1000, 25 seconds each on a CPU: nothing else keeps it
    from its end. Here images are of 32 x 32. Its matrix of 1000 x 1000 is one of 64 x 64, for a PowerSGD of full rank."""
    made, linear = tests.DDPUnevenTestInput, torch.nn.Linear(64, 64, bias=False)

    def smaller(**options):
        if options["name"] == "large_conv_model":
            options["inp"] = options["inp"][..., :32, :32]
        elif options["name"].startswith("small_model"):
            options |= {"inp": options["inp"][..., :64], "model": linear}
        return made(**options)

    tests.DDPUnevenTestInput = smaller


def _enough(*args, **kwargs):
    def decorator(test):
        @wraps(test)
        def wrapper(*args, **kwargs):
            return test(*args, **kwargs)

        return wrapper

    return decorator


def _is_gpu(device):
    return type(device) is int or str(device).startswith("cuda")


def _at_cpu(function):
    @wraps(function)
    def wrapper(*args, **kwargs):
        if "device" in kwargs and _is_gpu(kwargs["device"]):
            kwargs["device"] = "cpu"
        if function.__name__ == "to" and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        return function(*args, **kwargs)

    return wrapper


def _without_device_ids(init):
    @wraps(init)
    def wrapper(self, *args, **kwargs):
        init(self, *args, **{k: v for k, v in kwargs.items() if k not in ("device_ids", "output_device")})

    return wrapper
