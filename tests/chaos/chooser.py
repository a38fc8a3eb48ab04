"""One rank of a training that chooses its method under torchrun, and goes on from its last
checkpoint where it is started again. It writes a line for each step.

    torchrun … chooser.py FOLDER PACE [DECISIONS]

It ends before the step that the file FOLDER/stop names, once there is one. With
DECISIONS the methods are those in that file.
"""

import json
import os
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire import Auto
from gradwire.torch_backend import register_comm_hook
from tests.chaos.sorting import batch, digest, loss_of, new_model

#: Steps between two checkpoints.
BETWEEN = 10


def newest(folder: Path, ranks: int) -> tuple[int, int]:
    """The last attempt and step after which all ranks have saved; (0, 0): none."""
    found = [tuple(map(int, file.name.split(".")[:2])) for file in folder.glob("*.of*")]
    return max((each for each in found if found.count(each) == ranks), default=(0, 0))


def main(folder: Path, pace: float, decisions: str | None = None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    log = (folder / f"rank{rank}").open("a")
    model = new_model()
    # Buckets that stay as they are: else each attempt begins with others, and sums in another order.
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handle = register_comm_hook(ddp, Auto(loss="5%", decisions=decisions))
    attempt, found = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), [newest(folder, ranks)]
    dist.broadcast_object_list(found)
    ((before, begin),) = found
    if begin:
        saved = torch.load(folder / f"{before}.{begin}.of{rank}", weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["handle"])
    stop = folder / "stop"
    for step in count(begin):
        if stop.exists() and step >= int(stop.read_text()):
            break
        optimizer.zero_grad()
        loss_of(ddp, *batch(0, rank, step)).backward()
        optimizer.step()
        line = {
            "step": step,
            "rank": rank,
            "pid": os.getpid(),
            "attempt": attempt,
            "method": repr(handle.algorithm),
            "weights": digest(model.parameters()),
            "time": time.time(),
        }
        print(json.dumps(line), file=log, flush=True)
        if (step + 1) % BETWEEN == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "handle": handle.rank_state_dict(),
            }
            part = folder / f"{attempt}.{step + 1}.part{rank}"
            torch.save(state, part)
            part.rename(folder / f"{attempt}.{step + 1}.of{rank}")
        time.sleep(pace)
    dist.destroy_process_group()


if __name__ == "__main__":
    place, pause, *given = sys.argv[1:]
    main(Path(place), float(pause), *given)
