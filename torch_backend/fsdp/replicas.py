"""gradwire between the replicas of a model that FSDP2 has sharded.

mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
for layer in model.layers:
    fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
method = WireDtype(PowerSGD(16), "int8")
handle = gradwire.torch_backend.compress_replicas(model, method, mesh["replicate"])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.ops import Spec
from gradwire.core.state.checkpoint import StateMismatch
from gradwire.core.text.options import OWN_CHECK, AtLeast0, checked
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.questions import Asked
from gradwire.torch_backend.engine.torch_modes import outside_inference_mode
from gradwire.torch_backend.fsdp.backward import ShardedBackward, hook_obstacle
from gradwire.torch_backend.fsdp.driver import ShardDriver, asked
from gradwire.torch_backend.fsdp.layout import Layout, obstacle_of_shards, replica_group
from gradwire.torch_backend.fsdp.units import warn_of_wide_shards
from gradwire.torch_backend.setup.consistency import (
    algorithm_obstacle,
    describe,
    meet_to_change,
    require_initialized,
    require_same_on_all_ranks,
)
from gradwire.torch_backend.setup.handle import Handle
from gradwire.torch_backend.setup.registration import (
    announce,
    prepared,
    require_gradient_algorithm,
    tried,
)
from gradwire.torch_backend.torch_internals import before_compile, steps_in_backward


@outside_inference_mode
@checked
def compress_replicas(
    model: Annotated[nn.Module, OWN_CHECK],
    algorithm: Algorithm,
    mesh: Annotated[DeviceMesh, OWN_CHECK],
    *,
    unused: bool = False,
    message_bytes: AtLeast0 | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> ReplicaHandle:
    """Let `algorithm` average the gradients of a sharded model over its replicas. The training loop
    stays as it is.

    `fully_shard` is called on layers and model with the inner axis of a mesh alone, so that FSDP
    knows of no replicas. It goes on to reduce gradients over the shards; what it leaves, the block
    of each parameter's gradient that this rank holds, is compressed as a matrix of its own and
    averaged with the same block of the other replicas, during the backward pass.

    To be called on all ranks, after `fully_shard` and before the first backward pass. It
    communicates, to check that all ranks ask for the same. Works with any `MixedPrecisionPolicy`
    (what is averaged has the dtype of the parameters), `reshard_after_forward`, prefetching,
    activation checkpointing, and several optimizers. With gradient accumulation all backward passes
    but the last run under `model.set_requires_gradient_sync(False)`,
    `model.set_requires_all_reduce(False)` or `model.set_is_last_backward(False)`.

    Args:
        model: sharded by `fully_shard`, all of its trained parameters over one axis of a mesh; or
            what `torch.compile` has made of it.
        algorithm: what to run, the same on every rank. Patterns of names in it are of the model's
            parameters.
        mesh: the axis of the replicas, `mesh["replicate"]`: its ranks hold the same block of the
            model.
        unused: a forward pass may leave parameters out on some replicas, experts for instance; they
            count as zeros. Costs a small message in each step, for which the host waits. What none
            has used keeps its gradient None.
        message_bytes: collect blocks until their payload has so many bytes, see
            `register_comm_hook`.
        grad_scaler: the scaler of the loss, see `register_comm_hook`.

    Returns:
        A handle with statistics and memory.

    Warns:
        CompressionWarning: see `register_comm_hook`; of the blocks, not of whole parameters. And on
            torch 2.15 and later, if FSDP reduces in a longer dtype than `param_dtype`, since
            `reduce_dtype` is None.

    Raises:
        TypeError: `model` is not sharded by FSDP2, `mesh` is no mesh, or `algorithm` is no
            algorithm.
        ValueError: torch averages over the replicas by itself (a 2-D mesh, `replicate`), or
            something else cannot be served (named); or ranks ask for different things; or torch is
            older than 2.7, and FSDP2 has no hook to use. The model is unchanged then.
    """
    require_gradient_algorithm(algorithm)
    refuse_levels(algorithm)
    model = before_compile(model)
    if isinstance(model, nn.Module):
        require_initialized(dict(model.named_parameters()))
    layout = Layout.of(model, replica_group(mesh))
    parts = layout.blocks()
    settings = {
        "message_bytes": str(message_bytes),
        "grad_scaler": str(grad_scaler is not None),
        "unused": str(unused),
        "shard": str(layout.shard),
    }
    obstacle = obstacle_of_shards(layout, repr(algorithm), _obstacle(model, layout, algorithm))
    described = describe(parts, "block of parameter")
    groups, trial = prepared(
        algorithm,
        parts,
        layout.replicas,
        settings,
        obstacle,
        described=described,
        frozen=layout.frozen,
    )
    driver = ShardDriver(
        algorithm, layout, specs_of(parts), groups, message_bytes, grad_scaler=grad_scaler
    )
    announce(driver, trial)
    warn_of_wide_shards(layout.units)
    return ReplicaHandle(driver, ShardedBackward(driver, layout, unused))


class ReplicaHandle(Handle):
    """What `compress_replicas` returns: a handle of this rank's blocks, and of the whole model's
    memory where that is saved and loaded.

    Its state has three forms, and `load_state_dict` takes each of them, and what a handle of DDP
    gives:

    - `state_dict()` is sharded as the model's own state is, for `torch.distributed.checkpoint`:
      `dcp.save({"model": model, "compressor": handle}, checkpoint_id=folder)`. Errors are the mean
      over the replicas, as DTensors that are laid out like the parameters. All else is small, and
      the same on every rank.
    - `gathered_state_dict(errors, to)` is the portable one, with each block under a name of its
      own, "layers.0.weight[128:256]". Ranks are counted shard by shard of the first replica, then
      of the next.
    - `rank_state_dict()` is this rank's, for the same rank of as many replicas and shards.

    The first two serve any number of replicas and of shards. With another number of shards blocks
    are cut anew. Errors are put together and cut again, so their mean stays what it was. A block
    begins with the factor of the one that it shares most rows with; factors of rows, which
    `half_step` has, begin anew.
    """

    _driver: ShardDriver
    instead = "compress_replicas(model, algorithm, mesh)"

    def __init__(self, driver: ShardDriver, backward: ShardedBackward) -> None:
        super().__init__(driver)
        self._backward = backward

    @outside_inference_mode
    def reconfigure(self, algorithm: Algorithm) -> StateMismatch:
        require_gradient_algorithm(algorithm)
        refuse_levels(algorithm)
        layout, driver = self._driver.layout, self._driver
        meet_to_change(driver.memory.placement.meetings)
        why_not = (
            self._why_not()
            or algorithm_obstacle(algorithm)
            or _sum_obstacle(algorithm, driver.specs, layout)
            or tried(algorithm, driver.specs, layout.replicas.size(), driver.ops.device).obstacle
        )
        why_not = obstacle_of_shards(layout, repr(algorithm), why_not)
        require_same_on_all_ranks(
            layout.replicas, {"call": "reconfigure"}, {}, why_not, driver.ops.device
        )
        return super().reconfigure(algorithm)

    reconfigure.__doc__ = Handle.reconfigure.__doc__

    def _use(self, driver: Driver) -> None:
        super()._use(driver)
        self._backward.use(driver)

    def unregister(self) -> None:
        """Give the gradients back: from the next step on replicas average them as they are, as on a
        2-D mesh, those of layers that were thawed since among them. To be called on all ranks,
        between steps. `compress_replicas` may then be called on the same model again.

        Statistics and memory stay readable, and are gone with the handle.

        Raises:
            ValueError: it has been unregistered before; or ranks call different things.
        """
        driver = self._driver
        settings = {"call": "unregister", "step": str(driver.memory.steps)}
        meet_to_change(driver.memory.placement.meetings)
        require_same_on_all_ranks(
            driver.process_group, settings, {}, self._why_not(), driver.ops.device
        )
        plain = Driver(
            AllReduce(), driver.specs, driver.ops.device, ProcessGroups(driver.process_group)
        )
        self._backward.use(plain)
        self._backward.free = True
        self._registered = False


def refuse_levels(algorithm: object) -> None:
    """Raise ValueError for two levels of replicas: FSDP has divided the model already, and each
    rank compresses its own blocks."""
    if without_levels(algorithm) is not algorithm:
        raise ValueError(
            f"{algorithm!r} averages inside a node, and FSDP has done so already, so that each rank"
            " compresses its own blocks. Shard within nodes, and give"
            f" {without_levels(algorithm)!r}"
        )


def _obstacle(model: nn.Module, layout: Layout, algorithm: Algorithm) -> str:
    """Why this rank cannot take part; "" if it can."""
    if why_not := hook_obstacle(model):
        return why_not
    parts = layout.blocks()
    devices = {x.device for x in parts.values()}
    if len(devices) > 1:
        return f"parameters are on {sorted(map(str, devices))}; one device per process is supported"
    if offloaded := _without_library(layout, next(iter(devices))):
        return offloaded
    if not any(x.numel() for x in parts.values()):
        return "this rank holds no part of any parameter; shard the model over fewer ranks"
    if stepping := [
        name for name, held in layout.held.items() if steps_in_backward(held.parameter)
    ]:
        return (
            f"parameter {stepping[0]!r} is stepped by an optimizer in the backward pass; step"
            " after it"
        )
    return _sum_obstacle(algorithm, specs_of(parts), layout) or algorithm_obstacle(algorithm)


def _sum_obstacle(algorithm: Algorithm, specs: Mapping[str, Spec], layout: Layout) -> str:
    """That an algorithm asks for what the shards do not add up; "" if it does not."""
    if Asked.SUM not in asked(algorithm, specs, layout):
        return ""
    return (
        f"{algorithm!r} asks for sum_scalar, a sum over the whole model, of which each rank holds a"
        " part"
    )


def _without_library(layout: Layout, device: torch.device) -> str:
    """Parameters that `CPUOffloadPolicy` keeps on the CPU have their gradients there, and NCCL
    cannot average those."""
    backend = dist.get_backend_config(layout.replicas)
    kinds = {pair.partition(":")[0] for pair in backend.split(",") if ":" in pair}
    if not kinds or device.type in kinds:
        return ""
    return (
        f"parameters are on the {device.type.upper()}, where CPUOffloadPolicy keeps them and their"
        " gradients, and the replicas' group has libraries "
        f"for {sorted(kinds)} alone. Make groups with both:"
        ' init_process_group("cpu:gloo,cuda:nccl")'
    )
