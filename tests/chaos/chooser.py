"""One rank of a training that chooses its method under torchrun, see `attempt.py`.

    torchrun … chooser.py FOLDER PACE [DECISIONS]

With DECISIONS the methods are those in that file.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire import Auto
from gradwire.torch_backend import register_comm_hook
from tests.chaos.attempt import Attempt
from tests.chaos.sorting import batch, digest, loss_of, new_model


def main(folder: Path, pace: float, decisions: str | None = None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    attempt, model = Attempt(folder), new_model()
    # Buckets that stay as they are: else each attempt begins with others, and sums in another order.
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handle = register_comm_hook(ddp, Auto(loss="5%", decisions=decisions))
    found = [attempt.newest()]
    dist.broadcast_object_list(found)
    (newest,) = found
    if newest[1]:
        saved = torch.load(attempt.file(newest), weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["handle"])
    for step in attempt.steps(newest[1]):
        optimizer.zero_grad()
        loss_of(ddp, *batch(0, attempt.rank, step)).backward()
        optimizer.step()
        attempt.say(step, repr(handle.algorithm), digest(model.parameters()))
        if part := attempt.new_file(step):
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "handle": handle.rank_state_dict(),
            }
            torch.save(state, part)
            attempt.keep(part)
        time.sleep(pace)
    dist.destroy_process_group()


if __name__ == "__main__":
    place, pause, *given = sys.argv[1:]
    main(Path(place), float(pause), *given)
