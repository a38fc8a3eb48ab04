"""How long messages take between the devices of an axis, measured with the requests that algorithms make.

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
    all_reduce_shape,
    all_reduced,
    exchange_shape,
    exchanged,
    measure,
    overlap_of,
)
from gradwire.core.protocol.groups import Groups
from gradwire.jax_backend.axis import AxisName, axes_of
from gradwire.jax_backend.driver import drive
from gradwire.jax_backend.timing import ready


def probe(mesh: Mesh, axis_name: AxisName, *, nodes: int | None = None) -> Probe:
    """Measure latency and bandwidth along an axis, in some seconds. Each process calls it; all of them are told the same.

    Args:
        mesh: of all devices.
        axis_name: the axis of the replicas, or several that they span together.
        nodes: on how many machines they are, in order. None: as many as there are processes.

    Raises:
        ValueError: the mesh has no such axis; a single replica; or nodes of different sizes.
    """
    axes = axes_of(axis_name)
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(f"axis_name={axis_name!r}: the mesh has the axes {tuple(mesh.shape)}, and no {missing[0]!r}")
    replicas = math.prod(mesh.shape[axis] for axis in axes)
    if nodes is None:
        nodes = len({device.process_index for device in mesh.devices.flat})
        nodes = nodes if replicas % nodes == 0 else 1
    kind = mesh.devices.flat[0].device_kind
    return measure(_Prober(mesh, axes, replicas), "jax", kind, replicas, nodes)


class _Prober:
    def __init__(self, mesh: Mesh, axes: tuple[str, ...], replicas: int) -> None:
        self._mesh = mesh
        self._axes = axes
        self._replicas = replicas
        self._compiled: dict[Any, Callable[[], Any]] = {}

    def all_reduce(self, nbytes: int, groups: Groups | None, repeats: int) -> float:
        run = self._ready(("all_reduce", groups), all_reduce_shape(nbytes), lambda x: self._sum(x, groups))
        return self._median(run, repeats)

    def exchange(self, nbytes: int, groups: Groups | None, repeats: int) -> float:
        size = len(groups[0]) if groups else self._replicas
        shape = exchange_shape(nbytes, size)
        run = self._ready(("exchange", groups), shape, lambda x: drive(exchanged(x, groups), self._axes))
        return self._median(run, repeats)

    def overlap(self, nbytes: int, groups: Groups | None) -> float:
        shape = all_reduce_shape(nbytes)

        def computed(x: jax.Array, times: int) -> jax.Array:
            matrix = jnp.full((ROWS, ROWS), 1.0 / ROWS) + x[:1] * 0
            product: jax.Array = jax.lax.fori_loop(0, times, lambda _, y: matrix @ y, matrix)
            return product[0, :1]

        def median_of(what: str, body: Callable[[jax.Array], Any], times: int = 0) -> float:
            return self._median(self._ready((what, groups, times), shape, body), 5)

        return overlap_of(
            median_of("alone", lambda x: self._sum(x, groups)),
            lambda times: median_of("computing", lambda x: computed(x, times), times),
            lambda times: median_of("together", lambda x: (self._sum(x, groups), computed(x, times)), times),
        )

    def _sum(self, x: jax.Array, groups: Groups | None) -> jax.Array:
        return drive(all_reduced(x, groups), self._axes)

    def _ready(self, key: Any, shape: tuple[int, ...], body: Callable[[jax.Array], Any]) -> Callable[[], Any]:
        """Something compiled, to be run on an array of this shape on each replica."""
        if (key, shape) not in self._compiled:
            spec = PartitionSpec(self._axes)  # type: ignore[no-untyped-call]
            rows = NamedSharding(self._mesh, spec)
            x = jax.jit(lambda: jnp.zeros((self._replicas, *shape)), out_shardings=rows)()

            def on_each(x: jax.Array) -> Any:
                return jax.tree.map(lambda y: y[None], body(x[0]))

            mapped = jax.shard_map(on_each, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False)
            compiled = jax.jit(mapped).lower(x).compile()
            self._compiled = {(key, shape): lambda: ready(compiled(x))}  # one at a time: they are large
            self._compiled[key, shape]()
        return self._compiled[key, shape]

    def _median(self, run: Callable[[], Any], repeats: int) -> float:
        """Seconds, in the slowest process."""
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
