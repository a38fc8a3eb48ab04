"""Known answers on a device: steps of an algorithm in compiled programs of the driver, against
NumPy's.

A replica alone on one device quantizes, decodes and makes errors as any does, and its program is
what XLA fuses. Where `init` is traced nothing can be looked at:
algorithms are noted, and looked at when a state of any is put on devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.ops import Spec
from gradwire.core.simulate.known_answers import KnownStep
from gradwire.core.simulate.lock_step import NDArray
from gradwire.core.simulate.self_check import Place, self_check
from gradwire.jax_backend.engine.driver import drive
from gradwire.jax_backend.ops.kernels import JaxOps

AXIS = "replicas"
OPS = JaxOps()

#: What `init` has met in this process.
_noted: dict[tuple[str, frozenset[str]], tuple[Algorithm, Mapping[str, Spec]]] = {}


def check_here(algorithm: Algorithm, specs: Mapping[str, Spec], like: Any = None) -> None:
    """Look at an algorithm where the arrays of a tree are, or else on the default device; while a
    function is traced, note it for `check_noted`.

    Raises:
        ValueError: what is wrong, see `gradwire.core.simulate.self_check.self_check`.
    """
    leaves = [*jax.tree.leaves(like), _made_here()]
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        first, *_ = arrays[0].sharding.device_set
        _check(algorithm, specs, _platform(first))
    # what has failed is refused here, and whoever takes another algorithm meets it no more
    _noted[repr(algorithm), frozenset(spec.dtype for spec in specs.values())] = algorithm, specs


def check_noted(device: jax.Device) -> None:
    """Look at all algorithms that this process has met, on a kind of device, unless a function is
    being traced. Raises as `check_here`."""
    if not isinstance(_made_here(), jax.core.Tracer):
        for algorithm, specs in list(_noted.values()):
            _check(algorithm, specs, _platform(device))


def _platform(device: Any) -> str:
    return str(device.platform)


def _made_here() -> jax.Array:
    """An array that is made on the default device; traced, if a function is."""
    with jax.transfer_guard("allow"):
        return jnp.zeros(())


def _check(algorithm: Algorithm, specs: Mapping[str, Spec], platform: str) -> None:
    device = jax.local_devices(backend=platform)[0]
    kind = f"{platform} ({device.device_kind})"
    place = Place(
        kind, f"jax {jax.__version__}, jaxlib {version('jaxlib')}", on_cpu=platform == "cpu"
    )
    if wrong := self_check(
        algorithm, specs, 1, place, lambda what, dtype: _Steps(what, dtype, device)
    ):
        raise ValueError(wrong)


class _Steps:
    def __init__(self, algorithm: Algorithm, dtype: str, device: jax.Device) -> None:
        self._algorithm, self._dtype, self._device = algorithm, dtype, device
        self._mesh = Mesh(np.array([device]), (AXIS,))
        self._compiled = jax.jit(self._mapped)

    def first_memory(self, specs: Mapping[str, Spec]) -> State[NDArray]:
        """What `init` makes."""
        with _plainly(self._mesh):
            memory: State[jax.Array] = State(*jax.jit(partial(self._begun, specs))())
            self._dtypes = memory.map(lambda x: x.dtype)
            return memory.map(_to_numpy)

    def step(self, known: KnownStep) -> tuple[list[dict[str, NDArray]], list[State[NDArray]]]:
        """The averages and the memory of the only replica."""
        (given,), (before,) = known.gradients, known.before
        dtypes = self._dtypes
        with _plainly(self._mesh):
            gradients = {name: self._array(x, self._dtype) for name, x in given.items()}
            shared = {key: self._array(x, dtypes.shared[key]) for key, x in before.shared.items()}
            tensors = {
                name: {key: self._array(x, dtypes.tensors[name][key]) for key, x in memory.items()}
                for name, memory in before.tensors.items()
            }
            number = jax.device_put(np.int32(known.number), self._device)
            averages, *after = self._compiled(gradients, shared, tensors, number)
            return [{name: _to_numpy(x) for name, x in averages.items()}], [
                State(*after).map(_to_numpy)
            ]

    def _begun(self, specs: Mapping[str, Spec]) -> Any:
        state: State[jax.Array] = self._algorithm.init(OPS, specs)
        return state.shared, state.tensors

    def _mapped(self, *given: Any) -> Any:
        everywhere = PartitionSpec()  # type: ignore[no-untyped-call]
        return jax.shard_map(
            self._step, mesh=self._mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )(*given)

    def _step(self, gradients: Any, shared: Any, tensors: Any, number: Any) -> Any:
        program = self._algorithm.step(OPS, gradients, State(shared, tensors), number)
        averages, after = drive(program, AXIS, given=gradients)
        return averages, after.shared, after.tensors

    def _array(self, x: NDArray, dtype: Any) -> jax.Array:
        placed: jax.Array = jax.device_put(x.astype(jnp.dtype(dtype)), self._device)
        return placed


def _to_numpy(x: jax.Array) -> NDArray:
    found = np.asarray(jax.device_get(x))
    return (
        found.astype(np.float32)
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        else found
    )


@contextmanager
def _plainly(mesh: Mesh) -> Iterator[None]:
    """Whatever the user's settings: steps that hold a NaN on purpose, arrays that come from the
    host, a mesh of one device."""
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.set_mesh(mesh),
    ):
        yield
