"""Ranges in torch's profiler, named after what is done: "gradwire: PowerSGD send". They cost nothing while no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from gradwire.torch_backend.torch_internals import profiler_runs

NOTHING: AbstractContextManager[None] = nullcontext()


def span(what: Any, part: str) -> AbstractContextManager[Any]:
    """A range for this part of the step of an algorithm, which may be wrapped (`WireDtype`)."""
    if not profiler_runs():
        return NOTHING
    while hasattr(what, "algorithm"):
        what = what.algorithm
    return profiler.record_function(f"gradwire: {type(what).__name__} {part}")
