"""Algorithms that treat every element alike, on replicas that are divided among devices: each device averages a piece of every array by itself.

An average in codes cuts arrays into blocks, exchanges and gathers them. What is exchanged or gathered XLA would gather first where axes are left to it,
and with it the gradients of the whole model. In a map that is manual over those axes too it has nothing to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.quantize import Quantize
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.requests import step_is_finite, watch
from gradwire.jax_backend.axis import AxisName, tracked
from gradwire.jax_backend.driver import drive
from gradwire.jax_backend.maps import is_manual
from gradwire.jax_backend.slices import by_pieces, compiler_axes, lying_alike


def in_pieces(algorithm: Algorithm, axis_name: AxisName) -> Algorithm:
    """The algorithm by pieces, if it can be done so and replicas are divided among devices; else itself. To be asked inside the map."""
    coded = isinstance(algorithm, WireDtype) and isinstance(algorithm.algorithm, AllReduce)
    alike = coded or isinstance(algorithm, Quantize)
    return _InPieces(algorithm, axis_name) if alike and compiler_axes() and is_manual(axis_name) else algorithm


@dataclass(frozen=True)
class _InPieces:
    algorithm: Algorithm
    axis_name: AxisName

    @property
    def per_replica(self) -> frozenset[str]:
        return self.algorithm.per_replica

    @property
    def start_step(self) -> int:
        return self.algorithm.start_step

    @property
    def cycle(self) -> int:
        return self.algorithm.cycle

    def init(self, ops: Any, specs: Any) -> Any:
        return self.algorithm.init(ops, specs)

    async def step(
        self, ops: Any, gradients: Mapping[str, Any], state: State[Any], step: Any
    ) -> tuple[dict[str, Any], State[Any]]:
        across = compiler_axes()

        def on_device(arrays: Any, tensors: Any, shared: Any, step: Any) -> Any:
            async def program() -> Any:
                results = await self.algorithm.step(ops, arrays, State(shared, tensors), step)
                return results, await step_is_finite()

            (averages, after), finite = drive(program(), self.axis_name, across=across)
            return averages, after.tensors, (after.shared, finite)

        given = gradients, state.tensors, state.shared, step
        averages, memory, (shared, finite) = by_pieces(on_device, *given, check_vma=tracked(self.axis_name))
        await watch(jnp.where(finite, 0.0, jnp.nan))
        tensors = {name: lying_alike(own, dict.fromkeys(own, gradients[name])) for name, own in memory.items()}
        arrays: dict[str, jax.Array] = lying_alike(averages, gradients)
        return arrays, State(shared, tensors)
