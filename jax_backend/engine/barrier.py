"""A place where the processes of `jax.distributed` meet on the host, before a program that all of
them must run.

A program that some processes never start makes the others wait, without a word. The coordination
service can be asked who is there. Nothing is put on a device.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax

from gradwire.jax_backend.jax_internals import coordination_client

logger = logging.getLogger(__name__)

#: Seconds after which processes that have not come are named in the log; again after ten times as
#: many.
PATIENCE = 10.0
#: Seconds after which a process stops waiting: one of them may have been writing a large model
#: meanwhile.
LONGEST = 1800.0

_held: Counter[str] = Counter()


def await_processes(caller: str, arrays: Any) -> None:
    """Wait until all processes that have a part of these arrays make the same call. Does nothing
    where one process has them whole, inside of a trace, and where JAX has no coordination service.

    Args:
        caller: what all of them must call.
        arrays: a tree. What is no array of several processes says nothing.

    Raises:
        RuntimeError: some have not come in half an hour, or have called something else. It names
            them.
    """
    if jax.process_count() == 1:
        return
    own = jax.process_index()
    leaves = [
        x
        for x in jax.tree.leaves(arrays)
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    ]
    devices: set[Any] = {
        device for sharding in {x.sharding for x in leaves} for device in sharding.device_set
    }
    processes = {device.process_index for device in devices}
    if own in processes:
        meet(caller, processes)


def meet(caller: str, processes: Iterable[int]) -> None:
    """Wait until all of these processes, of which this is one, make the same call. See
    `await_processes`."""
    every, own, client = sorted(set(processes)), jax.process_index(), coordination_client()
    if len(every) == 1 or client is None:
        return
    group = hashlib.sha256(str(every).encode()).hexdigest()[:16]
    place = f"gradwire/{group}/{_held[group]}"
    complete, mine = f"{place}/complete", f"{place}/came/{own}"
    client.key_value_set(mine, caller, allow_overwrite=True)
    try:
        if own == every[0]:
            began = time.monotonic()
            for process in every:
                _wait(client, f"{place}/came/{process}", place, caller, every, began)
            client.key_value_set(complete, json.dumps(_came(client, place)), allow_overwrite=True)
        callers = json.loads(_wait(client, complete, place, caller, every, time.monotonic()))
    except BaseException:
        # who comes later must not take this process for one that waits
        client.key_value_delete(mine)
        raise
    _held[group] += 1
    if own == every[0]:  # all have come, so nobody reads of the call before
        client.key_value_delete(f"gradwire/{group}/{_held[group] - 2}")
    if len(set(callers.values())) > 1:
        calls = ", ".join(
            f"process {process} {called}"
            for process, called in sorted(callers.items(), key=_number)
        )
        raise RuntimeError(
            f"processes make different calls, each of which all must make together: {calls}. Make"
            " them on all processes in the same order, not under `if jax.process_index() == 0`"
        )


def _wait(client: Any, key: str, place: str, caller: str, every: list[int], began: float) -> str:
    """What is stored under a key, when it is."""
    said = PATIENCE
    while True:
        try:
            return str(client.blocking_key_value_get(key, int(1000 * PATIENCE)))
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
        waited = time.monotonic() - began
        came = _came(client, place)
        missing = [process for process in every if str(process) not in came]
        if missing and waited >= LONGEST:
            raise RuntimeError(
                f"{caller}: process {jax.process_index()} has waited in vain for processes"
                f" {missing}. {_advice(caller)}"
            )
        if missing and waited >= said:
            say_missing(caller, missing)
            said *= 10


def say_missing(caller: str, missing: list[int]) -> None:
    """Name in the log the processes that have not made a call that all must make."""
    own = jax.process_index()
    logger.warning(
        "%s: process %d waits for processes %s. %s", caller, own, missing, _advice(caller)
    )


def _advice(caller: str) -> str:
    return f"All processes must call {caller}, and not only those of `if jax.process_index() == 0`"


def _came(client: Any, place: str) -> dict[str, str]:
    """Number of a process that has come → what it calls."""
    found = client.key_value_dir_get(f"{place}/came/")
    return {key.rpartition("/")[2]: called for key, called in found}


def _number(item: tuple[str, str]) -> int:
    return int(item[0])
