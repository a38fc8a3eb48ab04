"""Train a byte-level Transformer with DistributedDataParallel, its gradients compressed by
gradwire.

torchrun --nproc_per_node=2 examples/train_torch.py --rank 4
"""

import argparse
import io
import os
import time
from dataclasses import replace
from typing import Any

import checkpoints
import flags
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_torch import Transformer
from report import Report
from text import VOCABULARY, Text, load
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend
from gradwire import AllReduce, LocalSGD, PowerSGD, diloco
from gradwire.torch_backend import CommHook, LocalSGDHandle, ZeroOptimizer


def start() -> torch.device:
    """Join the other processes of `torchrun`, or be the only one. A GPU for each process if there
    are so many, else CPUs."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= processes:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    return device


def resumes_everywhere(args: argparse.Namespace, device: torch.device) -> bool:
    """Whether all processes have found a checkpoint; none may go on where others begin."""
    found = torch.tensor(float(args.resume), device=device)
    dist.all_reduce(found)
    if 0 < found < dist.get_world_size():
        raise SystemExit(
            f"{args.checkpoint} is there on some nodes only; put it where all of them read it"
        )
    return bool(found)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank = dist.get_rank()
    text = load(args.text, context=args.context)
    torch.manual_seed(args.seed)
    model = Transformer(VOCABULARY, args.context, args.width, args.layers, args.heads).to(device)
    ddp = DistributedDataParallel(model)

    settings: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.01}
    optimizer: torch.optim.Optimizer
    if args.zero:
        optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    handle = communicate(ddp, optimizer, args)
    done, seconds = 0, 0.0
    if resumes_everywhere(args, device):
        done, seconds = restore(args, model, optimizer, handle)

    show = rank == 0
    with Report(args.steps, done, args.metrics if show else None, args.progress and show) as report:
        for step in range(done, args.steps):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = flags.learning_rate(step, args)
            inputs, targets = tensors(
                text.batch(args.seed, step, rank, args.batch_size, args.context), device
            )
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            # After backward the gradients are the averages, the same on all ranks: so is what
            # clipping does to them.
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            trained = loss.item()
            seconds += time.perf_counter() - began

            done, last = step + 1, step + 1 == args.steps
            if last and isinstance(handle, LocalSGDHandle) and not handle.synchronized:
                handle.synchronize()  # the replicas end as one model
            validation = (
                evaluate(model, text, args, device) if done % args.eval_every == 0 or last else None
            )
            sent = (
                [handle.stats(), optimizer.stats()]
                if isinstance(optimizer, ZeroOptimizer)
                else [handle.stats()]
            )
            totals: dict[str, Any] = {
                "bytes_sent": sum(s.bytes_sent for s in sent),  # of the whole run: states hold it
                "collectives": sum(s.collectives for s in sent),
                "seconds": seconds,
                "compress_seconds": sent[0].compress_seconds,
                "compiled_loops": sent[0].compiled_loops,
            }
            report.step(done, trained, validation, **totals)
            if args.checkpoint and (done % args.checkpoint_every == 0 or last):
                save(args, done, seconds, model, optimizer, handle)


def communicate(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, args: argparse.Namespace
) -> CommHook | LocalSGDHandle:
    """What a training script gains: one call, and the loop stays as it is."""
    powersgd = (
        PowerSGD(rank=args.rank, half_step=args.half_step) if args.compress == "powersgd" else None
    )
    if args.local_sgd is not None:
        local = LocalSGD(args.local_sgd, start_step=args.start_step, compressor=powersgd)
        return gradwire.torch_backend.local_sgd(ddp, optimizer, local)
    if args.diloco is not None:
        local = diloco(args.diloco, start_step=args.start_step, compressor=powersgd)
        return gradwire.torch_backend.local_sgd(ddp, optimizer, local)
    if powersgd is not None:
        powersgd = replace(powersgd, start_step=args.start_step)
    return gradwire.torch_backend.register_comm_hook(ddp, powersgd or AllReduce())


@torch.no_grad()
def evaluate(
    model: Transformer, text: Text, args: argparse.Namespace, device: torch.device
) -> float:
    """Mean loss on held-out text; each rank computes its share (under local SGD, with its own
    weights)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs, targets = tensors(
        text.validation_batch(rank, world, args.eval_windows, args.context), device
    )
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    total = torch.stack([loss, torch.full_like(loss, targets.numel())])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def tensors(batch: tuple[Any, Any], device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(batch[0]).to(device), torch.from_numpy(batch[1]).to(device)


def save(
    args: argparse.Namespace,
    done: int,
    seconds: float,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    handle: CommHook | LocalSGDHandle,
) -> None:
    """One file for all ranks, which any number of them can continue. The compression error differs
    between ranks, and under local SGD everything does: that goes on with the same number."""
    local = isinstance(handle, LocalSGDHandle)
    ranks: list[Any] = [None] * dist.get_world_size()
    if isinstance(handle, LocalSGDHandle):
        mine = {
            "compressor": handle.rank_state_dict(),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        dist.gather_object(mine, ranks if dist.get_rank() == 0 else None)
        compressor = None
    else:
        compressor = handle.gathered_state_dict("all")
    # A sharded optimizer's state is gathered to the state of a plain one.
    optimizer_state = (
        optimizer.consolidated_state_dict(to=0)
        if isinstance(optimizer, ZeroOptimizer)
        else optimizer.state_dict()
    )
    if dist.get_rank() == 0:
        state = {
            "step": done,
            "seconds": seconds,
            "model": model.state_dict(),
            "optimizer": optimizer_state,
        }
        state |= {"ranks": ranks} if local else {"compressor": compressor}
        content = io.BytesIO()
        torch.save(state, content)
        checkpoints.write(args.checkpoint, content.getvalue())


def restore(
    args: argparse.Namespace,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    handle: CommHook | LocalSGDHandle,
) -> tuple[int, float]:
    content = io.BytesIO(checkpoints.read(args.checkpoint))
    state = torch.load(content, map_location="cpu", weights_only=True)
    mine, before = state, len(state.get("ranks", []))
    if isinstance(handle, LocalSGDHandle) != bool(before):
        raise SystemExit(
            f"{args.checkpoint} is of a run {'with' if before else 'without'} local SGD; resume it as that"
        )
    if before:
        if before != dist.get_world_size():
            raise SystemExit(
                f"{args.checkpoint} holds the weights of {before} processes and there are {dist.get_world_size()} now; resume with "
                f"--nproc_per_node={before}"
            )
        mine = state["ranks"][dist.get_rank()]
    try:
        handle.load_state_dict(mine["compressor"])
    except ValueError as error:
        raise SystemExit(f"{args.checkpoint} does not fit: {error}") from None
    model.load_state_dict(mine["model"])
    optimizer.load_state_dict(mine["optimizer"])
    return state["step"], state["seconds"]


def main() -> None:
    p = flags.parser(__doc__)
    args = flags.check(p.parse_args(), p)
    device = start()
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
