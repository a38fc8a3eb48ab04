"""A process of the doctor: `python -m gradwire.jax_backend.doctor JSON`. Rows go to the standard
output, a line each."""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradwire.core.simulate.doctor.processes import received, say_machine, say_row
from gradwire.core.simulate.doctor.report import Section, unseen_row
from gradwire.jax_backend.doctor.checks import MAPS, check_kernels, check_messages, check_methods
from gradwire.jax_backend.doctor.machine import facts, unseen

#: Replicas on the devices of one process.
MOST = 4


def main(arguments: dict[str, Any]) -> None:
    """Check what the arguments say: this process's devices, or those of several processes."""
    warnings.simplefilter("ignore")
    part, until = arguments["part"], time.monotonic() + arguments["seconds"]
    algorithms = received(arguments["algorithms"])
    if "coordinator" in arguments:
        local = {"local_device_ids": arguments["devices"]} if arguments.get("devices") else {}
        jax.distributed.initialize(
            arguments["coordinator"], arguments["processes"], arguments["process"], **local
        )
        say_machine(facts())
        section = Section(part, say_row, until, _of_first)
        check_messages(section, "shard_map", jax.devices())
        check_methods(section, "shard_map", jax.devices(), algorithms)
        return
    say_machine(facts())
    devices = jax.local_devices()[:MOST]
    if name := unseen():
        say_row(unseen_row(part, name))
    for driver in MAPS:
        section = Section(f"{part}, {len(devices)} × {driver}", say_row, until)
        check_messages(section, driver, devices)
        check_methods(section, driver, devices, algorithms)
    check_kernels(Section(f"{part}, kernels", say_row, until), quick=arguments["quick"])


def _of_first(own: bool) -> bool:
    """What the first process thinks."""
    return bool(multihost_utils.broadcast_one_to_all(np.int32(own)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
