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

from gradwire.core.advise.probe import Probe, measure
from gradwire.core.programs import Groups
from gradwire.core.requests import all_to_all, reduce_sum
from gradwire.jax_backend.axis import AxisName, axes_of
from gradwire.jax_backend.driver import drive
from gradwire.jax_backend.timing import ready

ITEM = 4  # bytes of float32
#: Rows of the matrices that are multiplied while a message is on its way.
ROWS = 256


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
        self._compiled: dict[Any, Callable[[], None]] = {}

    def all_reduce(self, nbytes: int, groups: Groups | None, repeats: int) -> float:
        shape = (max(1, nbytes // ITEM),)
        return self._median(self._ready(("all_reduce", groups), shape, lambda x: self._sum(x, groups)), repeats)

    def exchange(self, nbytes: int, groups: Groups | None, repeats: int) -> float:
        size = len(groups[0]) if groups else self._replicas
        shape = (size, max(1, 2 * nbytes // ITEM // size))
        return self._median(
            self._ready(("exchange", groups), shape, lambda x: drive(_exchange(x, groups), self._axes)), repeats
        )

    def overlap(self, nbytes: int, groups: Groups | None) -> float:
        shape = (max(1, nbytes // ITEM),)

        def computed(x: jax.Array, times: int) -> jax.Array:
            matrix = jnp.full((ROWS, ROWS), 1.0 / ROWS) + x[:1] * 0
            product: jax.Array = jax.lax.fori_loop(0, times, lambda _, y: matrix @ y, matrix)
            return product[0, :1]

        def median_of(what: str, body: Callable[[jax.Array], Any], times: int = 0) -> float:
            return self._median(self._ready((what, groups, times), shape, body), 5)

        alone = median_of("alone", lambda x: self._sum(x, groups))
        unit = median_of("unit", lambda x: computed(x, 20)) / 20
        times = max(1, int(alone / unit))
        computing = median_of("computing", lambda x: computed(x, times), times)
        together = median_of("together", lambda x: (self._sum(x, groups), computed(x, times)), times)
        return (alone + computing - together) / min(alone, computing)

    def _sum(self, x: jax.Array, groups: Groups | None) -> jax.Array:
        return drive(_all_reduce(x, groups), self._axes)

    def _ready(self, key: Any, shape: tuple[int, ...], body: Callable[[jax.Array], Any]) -> Callable[[], None]:
        """Something compiled, to be run on an array of this shape on each replica."""
        if (key, shape) not in self._compiled:
            spec = PartitionSpec(self._axes)  # type: ignore[no-untyped-call]
            rows = NamedSharding(self._mesh, spec)
            x = jax.jit(lambda: jnp.zeros((self._replicas, *shape)), out_shardings=rows)()

            def on_each(x: jax.Array) -> Any:
                return jax.tree.map(lambda y: y[None], body(x[0]))

            mapped = jax.shard_map(on_each, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False)
            compiled = jax.jit(mapped).lower(x).compile()
            self._compiled = {(key, shape): lambda: _settle(compiled(x))}  # one at a time: they are large
            self._compiled[key, shape]()
        return self._compiled[key, shape]

    def _median(self, run: Callable[[], None], repeats: int) -> float:
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


def _settle(x: Any) -> None:
    ready(x)


async def _all_reduce(x: jax.Array, groups: Groups | None) -> jax.Array:
    return await reduce_sum(x, watched=False, groups=groups)


async def _exchange(x: jax.Array, groups: Groups | None) -> jax.Array:
    (received,) = await all_to_all(x, groups=groups)
    return received
