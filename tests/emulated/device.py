"""The emulated accelerator in Python: a torch device `emu`, its streams, and a record of what went
wrong on it.

    from tests.emulated.device import DEVICE, core, stream, watched

Importing this renames torch's PrivateUse1 for the life of the process, so tests do it in processes
of their own: ranks.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from tests.emulated.build import NAME, shared_library
from tests.emulated.watched import MAKES, UNORDERED, Watched, event_of

# what ranks return would do it too, if classes of this file were in it
if "RANK" not in os.environ:
    raise ImportError(
        "tests.emulated.device is for ranks: it changes torch for all tests that the process runs after it"
    )


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(NAME, shared_library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _register() -> torch.device:
    torch.utils.rename_privateuse1_backend("emu")
    module: Any = ModuleType("torch.emu")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: core.HOME + 1
    module.current_device = core.current_device
    module.set_device = lambda device: core.set_device(
        torch.device(device).index if not isinstance(device, int) else device
    )
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, device=None: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module("emu", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device("emu", core.HOME)


core = _load()
DEVICE = _register()
watched = Watched()
core.watch(
    lambda what: watched.problems.append(event_of(what)),
    watched.wait,
    watched.launched,
    UNORDERED | MAKES,
)
atexit.register(core.watch, None, None, None, set())


def event() -> torch.Event:
    """This point of the current stream."""
    here = torch.Event(DEVICE)
    here.record(torch.accelerator.current_stream(DEVICE))
    return here


@contextmanager
def stream(number: int) -> Iterator[None]:
    """Within, this stream is the current one of the thread. 0 is the default stream."""
    before = core.use_stream(number)
    try:
        yield
    finally:
        core.use_stream(before)
