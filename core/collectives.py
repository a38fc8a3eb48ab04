"""Moved to `gradwire.core.requests`; these names stay here for one version."""

import importlib
import warnings
from typing import Any

_MOVED = {
    "all_finite": "requests.step_is_finite",
    "all_gather": "requests.all_gather",
    "branch": "requests.branch",
    "branch_on_phase": "requests.branch_on_phase",
    "mean": "requests.mean",
    "means": "requests.mean_each",
    "orthonormalize": "requests.orthonormalize",
    "reduce_scatter": "requests.reduce_scatter",
    "replica": "requests.replica_index",
    "together": "programs.together",
    "total": "requests.sum_scalar",
}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, new = _MOVED[name].rpartition(".")
    warnings.warn(
        f"gradwire.core.collectives.{name} is gradwire.core.{module}.{new} now", DeprecationWarning, stacklevel=2
    )
    return getattr(importlib.import_module(f"gradwire.core.{module}"), new)
