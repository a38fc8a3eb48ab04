"""A rank that dies or stops answering: the others raise, in time, and nobody hangs. (Without torchrun, which would end them first.)"""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire import PowerSGD
from gradwire.torch_backend import DataParallel, register_comm_hook
from tests.launch import end_all, environment
from tests.torch.training import loss_on, mlp, train

RANKS = 3
TIMEOUT = 6.0
#: Of what comes before. A rank that starts late is not lost: on a busy machine imports take long, and not on all ranks alike.
PATIENCE = 140.0
#: What rank 2 does in the middle of its third backward pass, and under which wrapper.
WAYS = {
    "killed": (signal.SIGKILL, "DDP"),
    "stopped": (signal.SIGSTOP, "DDP"),
    "stopped under DataParallel": (signal.SIGSTOP, "DataParallel"),
}


def run(rank, way, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=PATIENCE),
    )
    # What torch loads when it is first used is loaded before time counts.
    train(DistributedDataParallel(mlp(40, 36, 32, 28)), loss_on(40), 1, local=False)
    model = mlp(40, 36, 32, 28)
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    fault, wrapper = WAYS[way]
    if wrapper == "DDP":
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.006)
        register_comm_hook(ddp, PowerSGD(rank=2), message_bytes=0)
    else:
        ddp = DataParallel(model, PowerSGD(rank=2), process_group=group, bucket_cap_mb=0.006, message_bytes=0)
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


@pytest.mark.parametrize("way", WAYS)
def test_the_others_raise_within_the_timeout(way, tmp_path):
    mark = uuid.uuid4().hex
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), way, str(tmp_path)],
            env=environment(mark),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        output = "".join(p.communicate(timeout=240)[0] for p in processes[:2])
    finally:
        end_all(mark)
        for p in processes:
            p.wait(timeout=60)
            p.stdout.close()
    for rank in (0, 1):
        report = tmp_path / f"{rank}.txt"
        assert report.exists(), f"rank {rank} did not raise:\n{output}"
        seconds, error = report.read_text().split("\n", 1)
        assert float(seconds) < PATIENCE / 2  # it was the group's own timeout
        # The first to notice ends, and the other may learn of that instead.
        assert re.search(r"(closed|reset) by peer|timed out|timeout", error, re.IGNORECASE), error


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
