"""Sites that come and go, by torchft: DiLoCo with compressed differences among those that are there.

torchft_lighthouse --bind "[::]:29500" --min_replicas 2 &
export TORCHFT_LIGHTHOUSE=http://localhost:29500
python examples/scripts/torchft_sites.py --site 0 & python examples/scripts/torchft_sites.py --site 1

Kill a site, and start it again: it receives everything from another, and goes on with it.
"""

import argparse
import signal
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo

from gradwire import TopK, diloco
from gradwire.torch_backend import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--site", type=int, required=True)
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()

model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)

signal.signal(signal.SIGINT, signal.SIG_DFL)  # else ctrl-C waits for the thread that looks for other sites
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of this site alone
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),  # how long a message may take
    load_state_dict=None,
    state_dict=None,
    min_replica_size=1,
    use_async_quorum=False,
    quorum_timeout=timedelta(hours=1),  # how long to wait for the other sites
    quorum_retries=1000,  # and how often within it to look for a lighthouse that was started anew
    replica_id=f"site{args.site}",
    hostname=socket.gethostname(),  # by which the others find this site
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
)
manager.register_state_dict_fn("schedule", schedule.load_state_dict, schedule.state_dict)  # a newcomer receives it too
sparse = TopK(64, per=(64, 64), bits=2, mean="senders", error_feedback=0.95)  # a 64th of the elements: SparseLoCo
local = diloco(20, lr=1.0, momentum=0, compressor=sparse)
handle = elastic(model, optimizer, local, manager)  # the line that is added; the loop is that of one site

while handle.steps < args.steps:
    # Your data, at the position of the run and of this site: here points, and in which of ten sectors each lies.
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * handle.steps + args.site))
    y = torch.atan2(x[:, 0], x[:, 1]).add(3.1416).mul(10 / 6.2832).long().clamp(0, 9)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    rounds = handle.rounds
    optimizer.step()
    schedule.step()
    if handle.rounds > rounds:
        sites = manager.num_participants()
        print(f"step {handle.steps}, round {handle.rounds} of {sites} sites, loss {loss.item():.3f}", flush=True)
print(handle, flush=True)
manager.shutdown()
