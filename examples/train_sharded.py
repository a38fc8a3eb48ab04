"""Train a byte-level Transformer sharded by FSDP2 within each replica, and compressed by gradwire
between replicas.

torchrun --nproc_per_node=4 examples/train_sharded.py --replicas 2 --rank 4
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_torch import Transformer
from text import VOCABULARY, load
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire import PowerSGD
from gradwire.torch_backend import ReplicaHandle, compress_replicas


def train(args: argparse.Namespace, device: torch.device) -> None:
    replicas, ranks = args.replicas, dist.get_world_size()
    if ranks % replicas:
        raise SystemExit(f"--replicas {replicas} does not divide the {ranks} processes")
    mesh = init_device_mesh(
        device.type, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard")
    )

    torch.manual_seed(0)  # every replica begins with the same weights
    model = Transformer(VOCABULARY, args.context, args.width, args.layers, heads=4).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    handle = compress_replicas(model, PowerSGD(rank=args.rank), mesh["replicate"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.resume:
        restore(args.resume, model, optimizer, handle)
    text = load(context=args.context)
    for step in range(handle.stats().steps, args.steps):
        batch = text.batch(0, step, dist.get_rank(), args.batch_size, args.context)
        inputs, targets = (torch.from_numpy(x).to(device) for x in batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(shown := loss.detach() / ranks)
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {shown.item():.3f}", flush=True)
    if args.checkpoint:
        save_checkpoint(parts(model, optimizer, handle), checkpoint_id=args.checkpoint)
    if dist.get_rank() == 0:
        print(handle)


def parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, handle: ReplicaHandle
) -> dict[str, Any]:
    """What a checkpoint holds, in pieces that any number of replicas and of shards can read."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "compressor": handle}


def restore(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, handle: ReplicaHandle
) -> None:
    state = parts(model, optimizer, handle)
    load_checkpoint(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--replicas",
        type=int,
        default=2,
        help="the processes are so many replicas of the model; the others shard it",
    )
    p.add_argument("--rank", type=int, default=4, help="of PowerSGD")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--context", type=int, default=64)
    p.add_argument("--batch-size", type=int, default=8, help="windows for each process")
    p.add_argument("--checkpoint", type=Path, help="write a checkpoint to this folder in the end")
    p.add_argument(
        "--resume", type=Path, help="go on from a checkpoint, of any number of replicas and shards"
    )
    args = p.parse_args()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
