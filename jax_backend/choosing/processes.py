"""What processes tell each other about times of steps, and what they begin with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from gradwire.jax_backend.axes.outside_meshes import outside_meshes
from gradwire.jax_backend.engine.barrier import meet
from gradwire.jax_backend.state.same_state import DIGEST, same_everywhere
from gradwire.jax_backend.state.types import spec


class Messages:
    """Numbers of which all processes learn the largest, some steps later, so that none waits."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.alone = len({device.process_index for device in devices}) == 1
        mesh = Mesh(np.array(devices), ("all",))
        self._rows = NamedSharding(mesh, spec("all"))
        self._largest = jax.jit(lambda x: x.max(axis=0), out_shardings=NamedSharding(mesh, spec()))
        self._own = sum(device.process_index == jax.process_index() for device in devices)

    @outside_meshes
    def send(self, numbers: Sequence[float]) -> Callable[[], Sequence[float]]:
        """Send this process's own; what is returned gives the largest of all."""
        if self.alone:
            return lambda own=list(numbers): own  # type: ignore[misc]
        rows = np.tile(np.asarray(numbers, np.float32), (self._own, 1))
        array = jax.make_array_from_process_local_data(self._rows, rows)  # type: ignore[no-untyped-call]
        found = self._largest(array)
        return lambda: [float(x) for x in np.asarray(found)]


def same_process(devices: Sequence[jax.Device]) -> int:
    """How many devices that follow each other are of one process; 1 if not each process has so
    many, or if it has all."""
    processes = [device.process_index for device in devices]
    near = len(processes) // len(set(processes))
    runs = [set(processes[i : i + near]) for i in range(0, len(processes), near)]
    return (
        near if 1 < len(runs) == len(set(processes)) and all(len(run) == 1 for run in runs) else 1
    )


@outside_meshes
def said_by_the_first(what: str, make: Callable[[], str]) -> str:
    """A text that the first process makes, on all of them. Raises ValueError on all if it cannot be
    made there, and RuntimeError where processes are missing, see `meet`."""
    meet("AutoStep", range(jax.process_count()))
    text = ""
    if jax.process_index() == 0:
        try:
            text = "+" + make()
        except (OSError, ValueError) as error:
            text = f"-{what}: {error}"
    if jax.process_count() > 1:
        given = np.frombuffer(text.encode(), np.uint8)
        length = int(multihost_utils.broadcast_one_to_all(np.asarray(given.size, np.int32)))
        padded = np.zeros(length, np.uint8)
        padded[: given.size] = given[:length]
        text = np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes().decode()
    if text[0] == "-":
        raise ValueError(text[1:])
    return text[1:]


@outside_meshes
def same_on_all(text: str) -> bool:
    """Whether all processes give the same text. Raises RuntimeError where processes are missing,
    see `meet`."""
    if jax.process_count() == 1:
        return True
    meet("AutoStep", range(jax.process_count()))
    own = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=DIGEST).digest(), np.uint8)
    return bool(same_everywhere(own).all())
