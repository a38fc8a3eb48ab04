"""How long messages take between the devices of an axis, measured with the requests that algorithms
make.

jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
print(gradwire.jax_backend.probe(mesh, "data"))
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradwire.core.advise.probe import (
    ROWS,
    Probe,
    measure,
    message,
    message_shape,
)
from gradwire.core.protocol.groups import Groups
from gradwire.core.text.options import AtLeast1, checked
from gradwire.jax_backend.advise.step_time import ready
from gradwire.jax_backend.axes.mapped_axis import AxisName, axes_of
from gradwire.jax_backend.axes.outside_meshes import outside_meshes
from gradwire.jax_backend.engine.barrier import meet
from gradwire.jax_backend.engine.driver import drive


@checked
@outside_meshes
def probe(mesh: Mesh, axis_name: AxisName, *, nodes: AtLeast1 | None = None) -> Probe:
    """Measure latency and bandwidth along an axis, in some seconds. Each process calls it; all of
    them are told the same.

    Args:
        mesh: of all devices.
        axis_name: the axis of the replicas, or several that they span together.
        nodes: on how many machines they are, in order. None: as many as there are processes.

    Raises:
        ValueError: the mesh has no such axis; a single replica; or nodes of different sizes.
    """
    axes = axes_of(axis_name)
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(
            f"axis_name={axis_name!r}: the mesh has the axes {tuple(mesh.shape)}, and no"
            f" {missing[0]!r}"
        )
    replicas = math.prod(mesh.shape[axis] for axis in axes)
    if nodes is None:
        nodes = len({device.process_index for device in mesh.devices.flat})
        nodes = nodes if replicas % nodes == 0 else 1
    meet("probe", {device.process_index for device in mesh.devices.flat})
    kind = mesh.devices.flat[0].device_kind
    return measure(_Prober(mesh, axes, replicas), "jax", kind, replicas, nodes)


class _Prober:
    def __init__(self, mesh: Mesh, axes: tuple[str, ...], replicas: int) -> None:
        self._mesh = mesh
        self._axes = axes
        self._replicas = replicas
        self._compiled: dict[Any, Callable[[], Any]] = {}

    def __call__(
        self,
        nbytes: int,
        groups: Groups | None,
        *,
        exchange: bool = False,
        products: int = 0,
        repeats: int = 1,
    ) -> float:
        run = self._ready(nbytes, groups, exchange, products)
        found = []
        for _ in range(repeats):
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("gradwire.probe")
            began = time.perf_counter()
            run()
            found.append(time.perf_counter() - began)
        slowest = statistics.median(found)
        if jax.process_count() > 1:
            slowest = float(np.max(multihost_utils.process_allgather(np.float32(slowest))))
        return slowest

    def _ready(
        self, nbytes: int, groups: Groups | None, exchange: bool, products: int
    ) -> Callable[[], Any]:
        """A message, and products of matrices meanwhile, compiled and run once."""
        key = nbytes, groups, exchange, products
        if key not in self._compiled:
            size = len(groups[0]) if groups else self._replicas
            shape = message_shape(nbytes, size, exchange=exchange)
            spec = PartitionSpec(self._axes)  # type: ignore[no-untyped-call]
            rows = NamedSharding(self._mesh, spec)
            x = jax.jit(lambda: jnp.zeros((self._replicas, *shape)), out_shardings=rows)()

            def on_each(x: jax.Array) -> Any:
                sent = (
                    drive(message(x[0], groups, exchange=exchange), self._axes) if nbytes else x[0]
                )
                matrix = jnp.full((ROWS, ROWS), 1.0 / ROWS) + x.reshape(-1)[0] * 0
                product: jax.Array = jax.lax.fori_loop(0, products, lambda _, y: matrix @ y, matrix)
                return sent[None], product[:1]

            mapped = jax.shard_map(
                on_each, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
            compiled = jax.jit(mapped).lower(x).compile()
            self._compiled = {key: lambda: ready(compiled(x))}  # one at a time: they are large
            self._compiled[key]()
        return self._compiled[key]
