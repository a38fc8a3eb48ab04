"""Where gradwire takes torch's place in torch's tests, and torch itself for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend
from gradwire import AllReduce, PowerSGD
from gradwire.torch_backend import allreduce_hook, register_comm_hook

#: Tests, by name, of what gradwire has under torch's names, too.
NAMES = "hook_parity|hook_logging|hook_pickling|model_averager|average_parameters|post_localSGD|ddp_uneven_inputs$"
#: Tests that make a DistributedDataParallel.
DDP = "ddp|DistributedDataParallel|accumulate_gradients|static_graph|grads_same|undefined_grad|sync_bn|verify_model"
#: Those of them that register a hook of their own, or what excludes one. A DistributedDataParallel
#: takes one.
OWN_HOOK = "hook_parity|hook_logging|hook_pickling|no_sync_allreduce|mixed_precision|optim_in_backward|with_optimizer"
NO_HOOK = rf"^(?!.*({OWN_HOOK})).*({DDP})"


@dataclass(frozen=True)
class Row:
    """One way to run the tests whose names a pattern finds: what stands in whose place, processes
    per test, and what is called in every rank with their module."""

    title: str
    ranks: int
    tests: str
    prepare: Callable[[ModuleType], None]


def _under_torchs_names(tests):
    """Every public name of gradwire that a module of torch has, too, in that module."""
    replaced = set()
    for module in vars(tests).values():
        if isinstance(module, ModuleType) and module.__name__.startswith("torch.distributed."):
            for name in gradwire.torch_backend.__all__:
                if hasattr(module, name):
                    setattr(module, name, getattr(gradwire.torch_backend, name))
                    replaced.add(name)
    expected = {
        "PowerSGDState",
        "powerSGD_hook",
        "post_localSGD_hook",
        "PeriodicModelAverager",
        "PostLocalSGDOptimizer",
    }
    assert replaced > expected, f"the tests use only {sorted(replaced)} of gradwire"


def _on_every_ddp(register):
    def prepare(tests):
        init = DistributedDataParallel.__init__

        @wraps(init)
        def with_hook(self, *args, **kwargs):
            init(self, *args, **kwargs)
            register(self)

        DistributedDataParallel.__init__ = with_hook
        # Some cases of one test bring a hook of their own, and get this one.
        case = tests.DDPUnevenTestInput
        tests.DDPUnevenTestInput = lambda **options: case(**options | {"hook": None})

    return prepare


def _lossless(ddp):
    register_comm_hook(ddp, PowerSGD(rank=2**20, min_compression_rate=1e-6), message_bytes=1000)


def _hooked(title, register):
    return Row(f"{title} on every DDP", 2, NO_HOOK, _on_every_ddp(register))


ROWS = {
    "torch": Row("torch alone", 2, f"{NAMES}|{DDP}", lambda tests: None),
    "names": Row(
        "gradwire under torch's names: hooks, averagers, post-local SGD",
        4,
        NAMES,
        _under_torchs_names,
    ),
    "torch's": _hooked(
        "torch's allreduce_hook",
        lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    ),
    "hook": _hooked(
        "gradwire's allreduce_hook", lambda ddp: ddp.register_comm_hook(None, allreduce_hook)
    ),
    "algorithm": _hooked(
        "register_comm_hook(ddp, AllReduce())", lambda ddp: register_comm_hook(ddp, AllReduce())
    ),
    "lossless": _hooked("PowerSGD of a rank that loses nothing", _lossless),
}
