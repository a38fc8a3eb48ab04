"""Known answers of messages: what each kind of request brings to each replica, of numbers that tell
who sent them.

right = answers(3)                                # of each replica, name → array, by NumPy
found = run(messages(ops, given(rank, 3)))        # by a backend's driver
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import gradwire.core.protocol as ask
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.ops import Ops
from gradwire.core.simulate.doctor.report import Fault
from gradwire.core.simulate.lock_step import lock_step

NDArray = npt.NDArray[Any]
N = 12


def given(replica: int, replicas: int) -> dict[str, NDArray]:
    """What one replica sends: numbers that no other replica has, whole and small, so that sums are
    exact in any order."""
    x = np.arange(N, dtype=np.float32) + 100 * replica
    return {
        "x": x,
        "rows": np.stack([x + 1000 * to for to in range(replicas)]),
        "bytes": ((np.arange(N) * 7 + 31 * replica) % 251).astype(np.uint8),
    }


async def messages(ops: Ops[Any], x: dict[str, Any]) -> dict[str, Any]:
    """A program that asks for everything, and returns what it was answered."""
    own, size = x["x"], await ask.world_size()
    gathered, codes = await ask.gather(own, x["bytes"])
    (exchanged,) = await ask.all_to_all(x["rows"])
    (joined,) = await ask.all_gather([own], [(N,) * size])
    (part,) = await ask.reduce_scatter([x["rows"].reshape((-1,))], [(N,) * size])
    return {
        "mean": await ask.mean(own),
        "sum": await ask.reduce_sum(own),
        "sum of integers": await ask.reduce_sum(ops.cast(own, "int32")),
        "maximum": await ask.reduce_max(own),
        "gather": gathered,
        "gather of bytes": codes,
        "all-to-all": exchanged,
        "all-gather": joined,
        "reduce-scatter": part,
        "index": ops.iota(1) + await ask.replica_index(),
    }


def answers(replicas: int) -> list[dict[str, NDArray]]:
    """What each replica ought to be answered."""
    return lock_step(
        [messages(NumpyOps(), given(replica, replicas)) for replica in range(replicas)]
    )


def require_right(found: dict[str, Any], replica: int, replicas: int) -> str:
    """How many kinds of messages were right. Raises Fault, naming the first that was not, and whose
    numbers came instead."""
    right = answers(replicas)[replica]
    for name, expected in right.items():
        mine = np.asarray(found[name])
        if mine.shape != np.shape(expected) or not np.allclose(mine, expected, rtol=1e-6, atol=0):
            raise Fault(
                f"{name} on replica {replica} of {replicas} is {_some(mine)}, not"
                f" {_some(np.asarray(expected))}"
            )
    return f"{len(right)} kinds"


def _some(x: NDArray) -> str:
    flat = x.reshape(-1)
    return f"{flat[:: max(1, flat.size // 6)].tolist()[:6]}, shape {list(x.shape)}"
