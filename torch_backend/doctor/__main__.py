"""A process of the doctor: `python -m gradwire.torch_backend.doctor JSON`. Rows go to the standard
output, a line each."""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.simulate.doctor.processes import received, say_machine, say_row
from gradwire.core.simulate.doctor.report import Section
from gradwire.torch_backend.doctor.checks import (
    check_kernels,
    check_messages,
    check_methods,
    join,
    note_unseen,
    of_first,
)
from gradwire.torch_backend.doctor.compiled_loops import check_loops
from gradwire.torch_backend.doctor.machine import facts
from gradwire.torch_backend.doctor.replayed_steps import check_replays


def main(arguments: dict[str, Any]) -> None:
    """Check what the arguments say: "kernels", or the ranks of a group."""
    warnings.simplefilter("ignore")
    device = torch.device(arguments["device"])
    say_machine(facts(device))
    part, until = arguments["part"], time.monotonic() + arguments["seconds"]
    if "library" not in arguments:
        section = Section(part, say_row, until)
        note_unseen(section, device, say_row)
        check_kernels(section, device, quick=arguments["quick"])
        if not arguments["quick"]:
            check_loops(section, device)
        return
    torch.set_num_threads(1)
    group = join(arguments["library"], device, arguments["seconds"])
    section = Section(part, say_row, until, of_first(device, group))
    algorithms = received(arguments["algorithms"])
    check_messages(section, group, device)
    check_methods(section, group, device, algorithms, loops=not arguments["quick"])
    check_replays(section, group, device, algorithms)
    if not section.broken:  # else others may wait for a message that does not come
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
