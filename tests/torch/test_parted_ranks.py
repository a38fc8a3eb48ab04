"""Ranks that part in the middle of training, or die: whoever waits in vain raises in time, and is
told where each rank is. (Without torchrun, which would end them first.)"""

import json
import os
import re
import signal
import sys
import time
from datetime import timedelta
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from gradwire import AllReduce, PowerSGD, diloco
from gradwire.torch_backend import compress_replicas, local_sgd
from gradwire.torch_backend.engine.groups.whereabouts import Whereabouts, _all
from tests.launch import ROOT, start
from tests.torch.doors import FORMS
from tests.torch.models import loss_on, mlp
from tests.torch.training import fit, sgd

RANKS, TIMEOUT = 3, 16.0
#: Of what comes before, on a busy machine.
PATIENCE = 140.0
#: Steps that all take. Then rank 2 does as it likes.
BEFORE = 3
METHOD = PowerSGD(rank=2)


#: Doors that others know as well.
KNOWN = {
    "DDP": "PowerSGD",
    "DDP with Auto": "Auto",
    "DataParallel": "DataParallel, PowerSGD",
    "Averager": "Averager",
    "ZeroOptimizer": "ZeroOptimizer, averaging",
}


def behind(door, model, group):
    """The module to be called, its optimizer, and the handle."""
    if door in KNOWN:
        return FORMS[KNOWN[door]](SimpleNamespace(group=group), model)
    optimizer = sgd(model)
    if door == "local_sgd":
        return (
            model,
            optimizer,
            local_sgd(model, optimizer, diloco(1, compressor=METHOD), process_group=group),
        )
    from torch.distributed.device_mesh import DeviceMesh  # most ranks need not load it
    from torch.distributed.fsdp import fully_shard

    alone = [dist.new_group([r]) for r in range(RANKS)][dist.get_rank()]
    groups, ranks = [group or dist.group.WORLD, alone], torch.arange(RANKS).view(-1, 1)
    mesh = DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    return model, sgd(model), compress_replicas(model, METHOD, mesh["replicate"])


class Stepped:
    """A front door as what its user calls in each step: `step(number)`, and its handle."""

    def __init__(self, door, group):
        self.model = mlp(40, 36, 32, 28)
        self.module, self.optimizer, self.handle = behind(door, self.model, group)

    def step(self, number):
        fit(self.module, self.optimizer, dist.get_rank(), [number], loss_on(40))


STOPPED, KILLED = "stops", "is killed in a backward pass"
#: What rank 2 does after three steps; what the others are told of it, and of themselves.
FAULTS = {
    "skips a backward pass": ("rank 2: 4 steps of … done, … messages sent", 5),
    "reconfigures alone": (
        "rank 2: 3 steps of … done, … messages sent, come to reconfigure() or unregister()",
        4,
    ),
    "leaves": ("rank 2 (left): 3 steps of … done, … messages sent", 4),
    STOPPED: ("rank 2 (not heard of for … s): 3 steps of … done, … messages sent", 4),
}
OTHERS = "ranks [0, 1]: in step {} of …, waiting for message …, a … of … bytes"
#: Each door with one fault, and one door with all.
ROWS = [("DDP", fault) for fault in FAULTS]
ROWS += [
    ("DataParallel", "skips a backward pass"),
    ("Averager", "leaves"),
    ("compress_replicas", STOPPED),
]
ROWS += [("ZeroOptimizer", "skips a backward pass")]
ROWS += [
    ("local_sgd", "skips a backward pass"),
    ("local_sgd", "reconfigures alone"),
    ("DDP", KILLED),
]
ROWS += [("DDP with Auto", "skips a backward pass"), ("DDP with Auto", KILLED)]
QUICK = [("DDP", KILLED)]


def pattern(text):
    return re.escape(text).replace("…", "[^;]*")


def table():
    """As it stands in docs/how-to/several-nodes.md."""
    lines = ["| rank 2 | the others are told | tried with |", "|---|---|---|"]
    for fault, (told, step) in FAULTS.items():
        doors = ", ".join(door for door, its in ROWS if its == fault)
        lines.append(f"| {fault} | `{OTHERS.format(step)}; {told}` | {doors} |")
    return "\n".join(lines)


def part(fault, stepped):
    """What rank 2 does after the steps that all take."""
    if fault == "skips a backward pass":
        stepped.step(BEFORE + 1)
    elif fault == "reconfigures alone":
        other = diloco(1) if hasattr(stepped.handle, "local") else AllReduce()
        stepped.handle.reconfigure(other)
    elif fault == STOPPED:
        for one in _all():  # or it might not have been heard of yet
            one.note()
        signal.raise_signal(signal.SIGSTOP)
    elif fault == KILLED:
        stepped.model[2].weight.register_hook(lambda _: signal.raise_signal(signal.SIGKILL))
        stepped.step(BEFORE)


def run(rank, way, fault, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=PATIENCE),
    )
    # what torch loads when it is first used is loaded before time counts
    Stepped(way, None).step(0)
    dist.barrier()
    stepped = Stepped(way, dist.new_group(timeout=timedelta(seconds=TIMEOUT)))
    for step in range(BEFORE):
        stepped.step(step)
    begun = time.monotonic()
    try:
        if rank == 2:
            part(fault, stepped)
        else:
            for step in (BEFORE, BEFORE + 1):
                stepped.step(step)
    except RuntimeError as error:
        (folder / f"{rank}.json").write_text(json.dumps([time.monotonic() - begun, str(error)]))
    if rank == 2 and fault == "leaves":
        util._exit_function()  # as at the end of any process
    # Connections stay open: others wait until their time is up, as they do where a host is lost.
    time.sleep(4 * TIMEOUT)
    os._exit(0)


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    """What ranks were told in each row that runs. All rows at once: most of the time is waiting."""
    started, found = {}, {}
    tests = [
        item
        for item in request.session.items
        if item.path == Path(__file__) and "told" in item.fixturenames
    ]
    try:
        for row in (test.callspec.params["row"] for test in tests):
            folder = tmp_path_factory.mktemp("parted")
            (folder / "log").touch()
            log = str(folder / "log")
            started[row] = (
                folder,
                [start(Path(__file__), str(r), *row, str(folder), log=log) for r in range(RANKS)],
            )
        deadline = time.monotonic() + 200
        for row, (folder, _) in started.items():
            files = [folder / f"{rank}.json" for rank in range(2)]
            while not all(map(os.path.exists, files)):
                assert time.monotonic() < deadline, (
                    f"{row}: ranks raised nothing\n{(folder / 'log').read_text()[-4000:]}"
                )
                time.sleep(0.2)
        time.sleep(0.5)
        for row, (folder, _) in started.items():
            found[row] = {
                int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")
            }
    finally:
        for _, processes in started.values():
            for process in processes:
                process.kill()
                process.join()
    return found


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row in QUICK else pytest.mark.slow, id=" ".join(row))
        for row in ROWS
    ],
)
def test_the_others_are_told_where_each_rank_is(told, row):
    _, fault = row
    for rank in (0, 1):
        seconds, error = told[row][rank]
        assert seconds < PATIENCE / 2  # it was the group's own timeout
        if fault == KILLED:  # the first to notice ends, and the other may learn of that instead
            assert re.search(r"(closed|reset) by peer|timed out|timeout", error, re.IGNORECASE), (
                error
            )
            continue
        expected, step = FAULTS[fault]
        assert re.search(pattern(expected), error), error
        assert re.search(pattern(OTHERS.format(step)), error), error
    if fault == "reconfigures alone":  # it is told who has not come, and has sent nothing
        assert "rank 2 has waited in vain for ranks [0, 1]" in told[row][2][1]


class Counts:
    """What others may hold weakly."""


def whereabouts(store, rank, steps, sizes):
    """Of a rank of three that has sent messages of these sizes."""
    group = SimpleNamespace(store=store, rank=rank, size=3, name="meeting", doing="")
    memory, collectives = Counts(), Counts()
    memory.steps, collectives.sent, collectives.asked, collectives.last = (
        steps,
        SimpleNamespace(collectives=0),
        0,
        "",
    )
    for size in sizes:
        collectives.sent.collectives += 1
        collectives.last = f"Reduce of {size} bytes"
        collectives.asked = crc32(collectives.last.encode(), collectives.asked)
    one = Whereabouts(group, "Sign()", memory, collectives)
    one.note()
    return one, memory, collectives  # which it does not hold


@pytest.mark.parametrize(
    ("others", "differ"), [([8, 16], True), ([16, 8], False), ([16], False)], ids=str
)
def test_ranks_that_asked_for_different_messages_are_said_to(others, differ):
    """Where steps and numbers of messages are equal, which tell it otherwise."""
    store = dist.HashStore()
    held = [whereabouts(store, 0, 3, [16, 8]), whereabouts(store, 1, 3, others)]
    for one, *_ in held:
        found = one.report()
        assert ("asked for different messages" in found) == differ
        assert "rank 2 (never heard of)" in found


class Gone(dist.Store):
    """A store whose server has ended."""

    def set(self, *args):
        raise dist.DistNetworkError("broken pipe")

    check = get = set


def test_a_store_that_is_gone_is_said_and_not_asked_again():
    one, *_held = whereabouts(Gone(), 0, 3, [16])
    one.waits = True
    assert "broken pipe" in one.report()
    assert one not in _all()


def test_the_page_prints_this_table():
    assert table() in (ROOT / "docs" / "how-to" / "several-nodes.md").read_text()


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
