"""A rank that dies or stops answering: the others raise, in time, and nobody hangs. (Without torchrun, which would end them first.)"""

import itertools
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire import PowerSGD
from tests.forked import start
from tests.torch.models import loss_on, mlp
from tests.torch.training import hooked, paralleled, train

RANKS = 3
TIMEOUT = 6.0
#: Of what comes before. A rank that starts late is not lost: on a busy machine imports take long, and not on all ranks alike.
PATIENCE = 140.0
#: What rank 2 does in the middle of its third backward pass, and under which wrapper.
WAYS = {
    "killed": (signal.SIGKILL, hooked),
    "stopped": (signal.SIGSTOP, hooked),
    "stopped under DataParallel": (signal.SIGSTOP, paralleled),
}


def run(rank, way, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE)
    )
    # What torch loads when it is first used is loaded before time counts.
    train(hooked(mlp(40, 36, 32, 28))[0], loss_on(40), 1, local=False)
    model = mlp(40, 36, 32, 28)
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    fault, wrap = WAYS[way]
    ddp, _ = wrap(model, PowerSGD(rank=2), group, message_bytes=0)
    train(ddp, loss_on(40), 2, local=False)
    if rank == 2:
        model[2].weight.register_hook(lambda _: os.kill(os.getpid(), fault))
    start = time.monotonic()
    try:
        train(ddp, loss_on(40), [2], local=False)
    except RuntimeError as error:
        (folder / f"{rank}.txt").write_text(f"{time.monotonic() - start}\n{error}")
    # Not through the destructors of a group that has lost a member.
    os._exit(0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What the ranks of each way have left. All ways at once: most of the time is waiting."""
    made = {way: tmp_path_factory.mktemp("lost") for way in WAYS}
    started = {}
    try:
        for way, folder in made.items():
            (folder / "log").touch()
            started[way] = [
                start(Path(__file__), str(rank), way, str(folder), log=str(folder / "log")) for rank in range(RANKS)
            ]
        for first, second, _ in started.values():
            first.join(240)
            second.join(240)
    finally:
        for process in itertools.chain(*started.values()):
            process.kill()
            process.join()
    return made


@pytest.mark.parametrize("way", WAYS)
def test_the_others_raise_within_the_timeout(folders, way):
    for rank in (0, 1):
        report = folders[way] / f"{rank}.txt"
        assert report.exists(), f"rank {rank} did not raise:\n{(folders[way] / 'log').read_text()}"
        seconds, error = report.read_text().split("\n", 1)
        assert float(seconds) < PATIENCE / 2  # it was the group's own timeout
        # The first to notice ends, and the other may learn of that instead.
        assert re.search(r"(closed|reset) by peer|timed out|timeout", error, re.IGNORECASE), error


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
