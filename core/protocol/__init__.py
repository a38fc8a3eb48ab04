"""What a program may ask for, and how it is run. A method imports from here: `from gradwire.core.protocol import mean, together`.

A request is known in one place, its class: with no framework it says the bytes of its messages, its answer on arrays without data, when two replicas
ask for the same, and the answers for N replicas in one process. That is all that the simulator, a plan and a wire dtype want to know. A backend has one
table, from the class of a request to the method that performs it. A new request is a class in one of the three files, and a line in each table.
"""

from gradwire.core.protocol.collective_requests import (
    all_gather,
    all_to_all,
    all_to_all_parts,
    gather,
    mean,
    mean_each,
    reduce_max,
    reduce_scatter,
    reduce_sum,
    sum_scalar,
)
from gradwire.core.protocol.control_requests import branch, branch_on_phase, optimizer_step, step_is_finite, watch
from gradwire.core.protocol.local_requests import local_norm, orthonormalize, replica_index, world_size
from gradwire.core.protocol.programs import run, together
from gradwire.core.protocol.weights import replica_weights

__all__ = [
    "all_gather",
    "all_to_all",
    "all_to_all_parts",
    "branch",
    "branch_on_phase",
    "gather",
    "local_norm",
    "mean",
    "mean_each",
    "optimizer_step",
    "orthonormalize",
    "reduce_max",
    "reduce_scatter",
    "reduce_sum",
    "replica_index",
    "replica_weights",
    "run",
    "step_is_finite",
    "sum_scalar",
    "together",
    "watch",
    "world_size",
]
