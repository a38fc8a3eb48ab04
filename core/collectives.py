"""Moved to `gradwire.core.requests` and `gradwire.core.programs`; the old names stay here for one version."""

from gradwire.core.deprecated import old_names

__getattr__ = old_names(
    __name__,
    {
        "all_finite": "gradwire.core.requests.step_is_finite",
        "all_gather": "gradwire.core.requests.all_gather",
        "branch": "gradwire.core.requests.branch",
        "branch_on_phase": "gradwire.core.requests.branch_on_phase",
        "mean": "gradwire.core.requests.mean",
        "means": "gradwire.core.requests.mean_each",
        "orthonormalize": "gradwire.core.requests.orthonormalize",
        "reduce_scatter": "gradwire.core.requests.reduce_scatter",
        "replica": "gradwire.core.requests.replica_index",
        "together": "gradwire.core.programs.together",
        "total": "gradwire.core.requests.sum_scalar",
    },
)
