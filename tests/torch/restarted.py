"""Run by torchrun with a restart: rank 1 is killed while a message of DiLoCo is on its way, and all go on from files of each rank. In the end they compare
with a run that nothing has interrupted, and print "the same bits"."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire import AllReduce, WireDtype, diloco
from gradwire.torch_backend import local_sgd
from tests.torch.compare import same_bits, weights
from tests.torch.models import loss_on, mlp

STEPS, SAVED_AFTER, KILLED_AFTER = 14, 8, 9
#: A difference leaves after step 7, and is taken after step 10.
LOCAL = diloco(4, overlap=3, compressor=WireDtype(AllReduce(), "int8"))
LOSS = loss_on(8)


class Run:
    def __init__(self) -> None:
        self.model = mlp(8, 7, 5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.handle = local_sgd(self.model, self.optimizer, LOCAL)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        LOSS(self.model, dist.get_rank(), step).backward()
        self.optimizer.step()

    def state(self) -> dict[str, object]:
        optimizer, handle = self.optimizer.state_dict(), self.handle.rank_state_dict()
        return {"model": weights(self.model), "optimizer": optimizer, "handle": handle}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    file = Path(sys.argv[1]) / f"{dist.get_rank()}.pt"
    first_time = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    run, first = Run(), 0
    if not first_time:
        saved, first = torch.load(file, weights_only=True), SAVED_AFTER + 1
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.handle.load_state_dict(saved["handle"])
    for step in range(first, STEPS):
        run.step(step)
        if step == SAVED_AFTER:
            torch.save(run.state(), file)
            dist.barrier()
        if first_time and step == KILLED_AFTER and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    twin = Run()
    for step in range(STEPS):
        twin.step(step)
    print(
        "the same bits" if same_bits(run.state(), twin.state()) else "others",
        "after" if first else "without",
        "restart",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
