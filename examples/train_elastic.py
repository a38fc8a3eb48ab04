"""Train a byte-level Transformer at sites that come and go: DiLoCo among those that are there,
under torchft.

torchft_lighthouse --bind "[::]:29510" --min_replicas 2 &
export TORCHFT_LIGHTHOUSE=http://localhost:29510
python examples/train_elastic.py --site 0 & python examples/train_elastic.py --site 1

Kill a site, and start it again: it goes on where the others are.
"""

import argparse
import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model_torch import Transformer
from text import VOCABULARY, load
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo

from gradwire import PowerSGD, diloco
from gradwire.torch_backend import elastic


def manager_of(site: int) -> Any:
    """Of this process, which is all of its site. The address of the lighthouse is in
    TORCHFT_LIGHTHOUSE."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),  # how long a message may take
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        quorum_timeout=timedelta(hours=1),  # how long to wait for the other sites
        # and how often within it to look for a lighthouse that was started anew
        quorum_retries=1000,
        replica_id=f"site{site}",
        hostname=socket.gethostname(),  # by which the others find this site
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )


def train(args: argparse.Namespace) -> None:
    text = load(args.text, context=args.context)
    model = Transformer(VOCABULARY, args.context, args.width, args.layers, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=args.warmup)

    manager = manager_of(args.site)
    manager.register_state_dict_fn(
        "schedule", schedule.load_state_dict, schedule.state_dict
    )  # a newcomer receives it too
    handle = elastic(
        model, optimizer, diloco(args.period, compressor=PowerSGD(rank=args.rank)), manager
    )
    while handle.steps < args.steps:
        # The position in the data is that of the run, and each site has its own part of them.
        batch = text.batch(0, handle.steps, args.site, args.batch_size, args.context)
        inputs, targets = map(torch.from_numpy, batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rounds = handle.rounds
        optimizer.step()
        schedule.step()
        if handle.rounds > rounds:
            sites = manager.num_participants()
            print(
                f"site {args.site}: step {handle.steps}, round {handle.rounds} of {sites} sites, loss {loss.item():.3f}",
                flush=True,
            )
    print(handle, flush=True)
    manager.shutdown()


if __name__ == "__main__":
    # Else ctrl-C waits for the thread that looks for other sites, for an hour.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--site", type=int, required=True, help="its number, for its part of the data"
    )
    parser.add_argument(
        "--text", type=Path, help="a file to train on; default: the source of the standard library"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--period", type=int, default=20, help="steps between two averages")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=20)
    train(parser.parse_args())
