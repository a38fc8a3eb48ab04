"""Whether all processes have put the same state on their devices: of arrays that each makes for
itself, JAX would call equal what is not."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from gradwire.jax_backend.engine.barrier import meet
from gradwire.jax_backend.state.survey import Leaf, Survey

#: Bytes of a digest.
DIGEST = 16


def require_same(found: Survey, caller: str) -> None:
    """Compare what is to be equal on all replicas, where each process has an array of its own. All
    processes must call this, and all raise alike.

    Costs a hash of these arrays on the host, once, and a message of a few bytes. Of one process,
    and while a function is traced, there is nothing to compare.

    Raises:
        ValueError: naming the first array that differs.
        RuntimeError: see `await_processes`.
    """
    if jax.process_count() == 1 or any(
        isinstance(leaf.value, jax.core.Tracer) for leaf in found.leaves
    ):
        return
    meet(caller, range(jax.process_count()))
    own = [
        x
        for x in found.leaves
        if x.equal_everywhere and getattr(x.value, "is_fully_addressable", True)
    ]
    digests = np.stack([np.zeros(DIGEST, np.uint8), *map(_digest, own)])
    whole = np.frombuffer(hashlib.blake2b(digests.tobytes(), digest_size=DIGEST).digest(), np.uint8)
    if same_everywhere(whole).all():
        return
    name = "the number of arrays"
    if same_everywhere(np.asarray(len(digests))).all():
        name = own[int(np.argmin(same_everywhere(digests).all(axis=-1))) - 1].name
    raise ValueError(
        f"{caller}: {name} differs between processes, and everything but the memory of each replica"
        " must be the same on all of them. Make parameters from the same key everywhere,"
        " jax.random.key(0) and not jax.random.key(jax.process_index()), or restore the same"
        " checkpoint"
    )


def same_everywhere(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Find where all processes have the same numbers: booleans, of the shape of `x`."""
    every = np.asarray(multihost_utils.process_allgather(x))
    return np.asarray((every == every[:1]).all(axis=0))


def _digest(leaf: Leaf) -> np.ndarray[Any, Any]:
    x = leaf.value
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    host = np.asarray(x)
    head = f"{leaf.name} {host.shape} {host.dtype}".encode()
    found = hashlib.blake2b(head, digest_size=DIGEST)
    found.update(host.tobytes())
    return np.frombuffer(found.digest(), np.uint8)
