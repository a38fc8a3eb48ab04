"""The emulated accelerator in Python: a torch device `emu`, its streams, and a record of what went wrong on it.

    from tests.emulated.device import DEVICE, core, stream, watched

Importing this renames torch's PrivateUse1 for the life of the process, so tests do it in processes of their own.
"""

from __future__ import annotations

import atexit
import importlib.util
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from tests.emulated.build import NAME, shared_library
from tests.launch import ROOT

#: Operations, fewer than a step has. The host runs ahead of the device by about a step, and does not feel a wait for what was before.
LONG_AGO = 40
#: Where gradwire's code is.
OURS = tuple(f"{ROOT / folder}/" for folder in ("core", "torch_backend"))


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
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, device=None: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module("emu", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device("emu", 0)


@dataclass(frozen=True)
class Event:
    """Something that the device has seen, and who caused it: lines of gradwire, innermost last. Empty if none of it was running."""

    what: str
    where: tuple[str, ...]


@dataclass
class Watched:
    """What the device has seen since the last `clear`.

    Attributes:
        problems: races, memory written while a message was on its way, memory freed while in use.
        waits: of the host for the device.
    """

    problems: list[Event] = field(default_factory=list)
    waits: list[Event] = field(default_factory=list)

    def clear(self) -> None:
        self.problems.clear()
        self.waits.clear()

    def races(self) -> list[Event]:
        """Problems but for memory that is freed early, which torch itself does where several streams meet."""
        return [event for event in self.problems if "is freed while" not in event.what]

    def wait(self, why: str, since: int) -> None:
        """The host waits for something after which so many operations have been launched: after many, it has long come."""
        if since < LONG_AGO:
            self.waits.append(_event(why))

    def own_waits(self) -> list[Event]:
        """Waits inside gradwire."""
        return [event for event in self.waits if event.where]


def _event(what: str) -> Event:
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(OURS)]
    return Event(what, tuple(f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}" for f in frames[-4:]))


core = _load()
DEVICE = _register()
watched = Watched()
core.watch(lambda what: watched.problems.append(_event(what)), watched.wait)
atexit.register(core.watch, None, None)


@contextmanager
def stream(number: int) -> Iterator[None]:
    """Within, this stream is the current one of the thread. 0 is the default stream."""
    before = core.use_stream(number)
    try:
        yield
    finally:
        core.use_stream(before)
