"""Ranges in torch's profiler, named after what is done: "gradwire: PowerSGD send". Made while
`gradwire.torch_backend.torch_internals.profiler_runs`, and else not."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler


def span(what: Any, part: str) -> AbstractContextManager[Any]:
    """A range for this part of the step of an algorithm, which may be wrapped (`WireDtype`)."""
    while hasattr(what, "algorithm"):
        what = what.algorithm
    return profiler.record_function(f"gradwire: {type(what).__name__} {part}")
