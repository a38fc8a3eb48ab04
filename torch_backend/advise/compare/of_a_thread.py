"""What torch keeps for each thread by itself, of which a replica's has what the user's has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch


def settings_of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """The current device and its stream, autocast and the default device. What is returned is
    called in another thread, within which they are these."""
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    stream = None if accelerator is None else torch.accelerator.current_stream()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    dtypes = {
        kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)
    }
    cached, default = torch.is_autocast_cache_enabled(), torch.get_default_device()

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as settings:
            if stream is not None:
                torch.accelerator.set_stream(stream)  # and its device
            for kind, dtype in dtypes.items():
                settings.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
            if default.type != "cpu":  # each call of torch takes longer under one
                settings.enter_context(default)
            yield

    return again
