"""The emulated accelerator in Python: a torch device `emu`, its streams, and a record of what went wrong on it.

    from tests.emulated.device import DEVICE, core, stream, watched

Importing this renames torch's PrivateUse1 for the life of the process, so tests do it in processes of their own.
"""

from __future__ import annotations

import atexit
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import gradwire.core
import gradwire.torch_backend
from tests.emulated.build import NAME, shared_library

#: Operations, fewer than a step has. The host runs ahead of the device by about a step, and does not feel a wait for what was before.
LONG_AGO = 40
#: Where gradwire's code is.
OURS = tuple(f"{Path(str(room.__file__)).parent}/" for room in (gradwire.core, gradwire.torch_backend))
#: Kernels that add in any order on CUDA, so that ranks may differ in the last bit.
UNORDERED = {"scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add", "index_add_"}
UNORDERED |= {"bincount", "histc", "cumsum"}
#: Kernels that make constants.
MAKES = {"fill_", "arange", "eye", "linspace", "full", "ones", "tril", "triu"}


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


@dataclass(frozen=True)
class Event:
    """Something that the device has seen, and who caused it: lines of gradwire, innermost last. Empty if none of it was running."""

    what: str
    where: tuple[str, ...]


@dataclass
class Watched:
    """What the device has seen since the last `clear`."""

    #: Races, memory written while a message was on its way, memory used again while in use, kernels of gradwire that add in any order.
    problems: list[Event] = field(default_factory=list)
    #: Of the host for the device.
    waits: list[Event] = field(default_factory=list)
    #: Kernels of gradwire that make constants.
    made: list[Event] = field(default_factory=list)

    def clear(self) -> None:
        for events in (self.problems, self.waits, self.made):
            events.clear()

    def launched(self, name: str) -> None:
        """A kernel of `UNORDERED` or `MAKES`."""
        event = _event(f"{name} adds in any order" if name in UNORDERED else name)
        if event.where:
            (self.problems if name in UNORDERED else self.made).append(event)

    def wait(self, why: str, since: int) -> None:
        """The host waits for something after which so many operations have been launched: after many, it has long come."""
        if since < LONG_AGO:
            self.waits.append(_event(why))

    def own_waits(self) -> list[Event]:
        """Waits inside gradwire."""
        return [event for event in self.waits if event.where]


def _event(what: str) -> Event:
    frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_stack(sys._getframe())]
    ours = [f"{'/'.join(file.split('/')[-2:])}:{line}" for file, line in frames if file.startswith(OURS)]
    return Event(what, tuple(reversed(ours[:4])))


core = _load()
DEVICE = _register()
watched = Watched()
core.watch(lambda what: watched.problems.append(_event(what)), watched.wait, watched.launched, UNORDERED | MAKES)
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
