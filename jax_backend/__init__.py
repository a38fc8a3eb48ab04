"""gradwire for JAX: Optax transformations that average gradients over replicas, compressed.

    from flax.training.train_state import TrainState
    from gradwire import PowerSGD, WireDtype
    from gradwire.jax_backend import average_gradients, replicate

    average = average_gradients(WireDtype(PowerSGD(16), "int8"), axis_name="data")
    tx = optax.chain(average, optax.adamw(3e-4))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = replicate(state, axis_name="data")

    def train_step(state, batch):                     # no pmean on the gradients
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=gradients), jax.lax.pmean(loss, "data")

    train_step = jax.pmap(train_step, axis_name="data", donate_argnums=0)

The same over a `Mesh`, where memory that differs between replicas needs a spec of its own:

    specs = partition_specs(state, "data")
    state = distribute(state, mesh, "data")
    places = {"in_specs": (specs, P("data")), "out_specs": (specs, P())}
    train_step = jax.jit(jax.shard_map(train_step, mesh=mesh, **places, check_vma=False))

With `check_vma=True` differentiate with respect to `mark_varying(state.params, "data")`.

`abstract_state(state, replicas, mesh, "data")` gives the shapes and shardings with which orbax
restores such a state, and with which a step is compiled ahead of time. `stats(state)` tells, inside
a step or outside, what is sent, how large the error is, and how many steps were skipped.

With the optimizer's state divided among the replicas, for no more bytes than an all-reduce:

    tx = zero1(optax.adamw(3e-4), axis_name="data", replicas=jax.device_count())

With replicas that train by themselves between averages of their parameters (see
`gradwire.jax_backend.local_sgd`):

    tx = diloco(optax.adamw(3e-4), 500, axis_name="data")

**The design.** An algorithm runs inside the traced training step. `transforms.py` is the Optax
transformation: it names the gradients, hands them to the algorithm with its memory, and puts
averages and memory back. `engine/driver.py` runs the program while JAX traces it, and turns each
request into a collective of `jax.lax`; `axes/` knows over which mapped axes replicas stand. What
Python decides here it decides once, when the step is compiled; what depends on a step is a
`lax.cond`. `state/` is where memory lies on the devices, and its saved forms.

**The words**, besides those of `gradwire.core`.

- *axis*: the mapped axis of `pmap` or `shard_map` along which replicas stand.
- *varying*: different on the devices along an axis. With `check_vma=True` JAX keeps account of it.
- *slice*: the devices among which the compiler divides one replica. *Lying*: how an array is
  divided among them.
- *record*, *account*: what a state says about its own making, and what it counts.

**The warnings.** Packing an array that the compiler has sharded makes XLA gather it whole. Under
`check_vma=True` the gradient with respect to parameters that do not vary arrives summed already.
XLA joins collectives as it likes, so messages are counted in the jaxpr. A traced value has no
truth: an `if` on it fails, and a step number is traced. `pmap` gives local gradients always. Memory
that differs between replicas (the error) needs a spec of its own, `partition_specs`.
"""

from gradwire.jax_backend.advise.compare import Training
from gradwire.jax_backend.advise.probe import probe
from gradwire.jax_backend.axes.mapped_axis import AxisName, mark_varying
from gradwire.jax_backend.choosing.auto_step import AutoStep
from gradwire.jax_backend.export import register_for_export
from gradwire.jax_backend.local_sgd.transform import LocalOptimizer, diloco, local_sgd
from gradwire.jax_backend.ops.kernels import JaxOps
from gradwire.jax_backend.state.checkpoint import from_portable, set_replicas, to_portable
from gradwire.jax_backend.state.flax_serialization import know_flax
from gradwire.jax_backend.state.names import parameter_shapes
from gradwire.jax_backend.state.placement import (
    abstract_state,
    distribute,
    partition_specs,
    replicate,
    unreplicate,
)
from gradwire.jax_backend.state.stacked import stack_replicas, this_replica
from gradwire.jax_backend.state.types import (
    Account,
    DataParallelState,
    LocalSGDState,
    PerReplica,
    Record,
)
from gradwire.jax_backend.stats import RelativeError, Stats, relative_error, stats
from gradwire.jax_backend.traffic import Collective, collective_traffic, total_traffic
from gradwire.jax_backend.transforms import all_reduce_mean, average_gradients, power_sgd
from gradwire.jax_backend.zero.state import ZeroState, reshard
from gradwire.jax_backend.zero.zero1 import clip_by_global_norm, zero1

__all__ = [
    "Account",
    "AutoStep",
    "AxisName",
    "Collective",
    "DataParallelState",
    "JaxOps",
    "LocalOptimizer",
    "LocalSGDState",
    "PerReplica",
    "Record",
    "RelativeError",
    "Stats",
    "Training",
    "ZeroState",
    "abstract_state",
    "all_reduce_mean",
    "average_gradients",
    "clip_by_global_norm",
    "collective_traffic",
    "diloco",
    "distribute",
    "from_portable",
    "local_sgd",
    "mark_varying",
    "parameter_shapes",
    "partition_specs",
    "power_sgd",
    "probe",
    "register_for_export",
    "relative_error",
    "replicate",
    "reshard",
    "set_replicas",
    "stack_replicas",
    "stats",
    "this_replica",
    "to_portable",
    "total_traffic",
    "unreplicate",
    "zero1",
]

know_flax()
