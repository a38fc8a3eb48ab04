"""What a program may ask for, and how it is run. A method imports from here:
`from gradwire.core.protocol import mean, together`.

**The design.** `await` needs no event loop. A program is a coroutine; whoever runs it calls
`.send(answers)` and gets the next request, until the coroutine returns. That is all a driver is: a
loop round `.send`, and one method for each class of request.

    program = algorithm.step(ops, gradients, state, 0)
    request = program.send(None)             # Reduce((p,), …): the program waits for the mean of p
    request = program.send((average,))       # it goes on with the answer, up to its next request

`together` is a program too. It runs many side by side and makes one request of their n-th requests,
so a method for one matrix is written for one matrix, and a model of 200 takes no more messages than
a model of one. Two levels, weights of replicas and shorter dtypes are programs round a program,
which ask for something else in its name.

A request is known in one place, its class: with no framework it says the bytes of its messages, its
answer on arrays without data, when two replicas ask for the same, and the answers for N replicas in
one process. That is all that the simulator, a plan and a wire dtype want to know. A backend has one
table, from the class of a request to the method that performs it. A new request is a class in one
of the files below, and a line in each table. One that sends is a subclass of `Collective`, which is
refused when the class is made if it does not say how it is asked between nodes, with weights, with
a shorter dtype, among some replicas, and how many bytes it sends.

**The words.**

- *program*: a coroutine on its way. *Request*: what it asks for by `await`. *Driver*: who answers.
- *collective request*: one that takes all replicas of a group, and sends: `reductions.py`,
  `exchanges.py`, `halves.py`. *Control request*: one about the step as a whole
  (`control_requests.py`). *Local request*: one that this replica answers by itself, at once
  (`local_requests.py`).
- *message*: what goes over the wire at one time: arrays of one dtype, for one request.
- *round*: the n-th messages of all programs of a step.
- *pending*: a request whose messages are on their way, and whose answers nobody has waited for yet.
- *fused*: made one request of several of the same class and group.
- *watched*: looked at when it arrives; `step_is_finite` tells whether all of it was finite.
- *groups*: a partition of the replicas; a request concerns the group that a replica is in.

**The warnings.** All replicas must ask for the same, in the same order: on a network anything else
is a hang, or wrong numbers, and only the simulator says so. An awaited answer may lie in memory
that the next step uses again. A coroutine that was made and not awaited does nothing.
`step_is_finite` is answered when nobody has anything more to send, so it comes last.
"""

from gradwire.core.protocol.control_requests import (
    branch,
    branch_on_phase,
    optimizer_step,
    step_is_finite,
    watch,
)
from gradwire.core.protocol.exchanges import all_to_all, all_to_all_parts, gather
from gradwire.core.protocol.halves import all_gather, reduce_scatter
from gradwire.core.protocol.local_requests import (
    local_norm,
    multiply,
    orthonormalize,
    replica_index,
    world_size,
)
from gradwire.core.protocol.programs import run, together
from gradwire.core.protocol.reductions import mean, mean_each, reduce_max, reduce_sum, sum_scalar
from gradwire.core.protocol.settings import setting
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
    "multiply",
    "optimizer_step",
    "orthonormalize",
    "reduce_max",
    "reduce_scatter",
    "reduce_sum",
    "replica_index",
    "replica_weights",
    "run",
    "setting",
    "step_is_finite",
    "sum_scalar",
    "together",
    "watch",
    "world_size",
]
