"""One host of the torch half of the network benchmark; started by `torchrun`. Prints its rows as
the last line.

A step is the backward pass of a model that hands given gradients over, their averaging, and nothing
else, but for subjects that are optimizers (ZeRO, DiLoCo). The subjects take turns, one step each.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, PowerSGD, WireDtype, diloco, plan
from gradwire.core.algorithm import Algorithm
from gradwire.torch_backend.engine.step import MESSAGE_BYTES

sys.path.insert(0, str(Path(__file__).parents[1]))
from given import HandedOver, drawn
from shapes import gpt
from subjects import ALONE, LEAST, RECOMMENDED, SMALL_GROUPS, Subject, parser, rows, sent_bytes

PERIOD = 10  # of DiLoCo
ONE_BUCKET = 1000.0  # MiB


def subjects(
    shapes: dict[str, tuple[int, ...]], given: dict[str, torch.Tensor], rank: int
) -> list[Subject]:
    dense = plan(shapes, AllReduce(), bucket_cap_mb=25)

    def ddp(cap: float = 25, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
        model = HandedOver(shapes)
        return DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=True
        )

    def backward(model: torch.nn.Module) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=False)
            model(given).backward()

        return step

    def plain() -> Subject:
        return Subject("DDP", backward(ddp()), dense.wire_bytes, len(dense.buckets))

    def bf16() -> Subject:
        model = ddp()
        model.register_comm_hook(None, gw.bf16_compress_hook)
        return Subject(
            "bf16_compress_hook", backward(model), dense.wire_bytes / 2, len(dense.buckets)
        )

    def coded(dtype: str) -> Subject:
        model, algorithm = ddp(), WireDtype(AllReduce(), dtype)
        gw.register_comm_hook(model, algorithm)
        expected = plan(shapes, algorithm, world_size=dist.get_world_size())
        return Subject(dtype, backward(model), expected.wire_bytes, 2 * len(dense.buckets))

    def torchs() -> Subject:
        model = ddp(ONE_BUCKET)  # with more than one it hangs on Gloo
        state = torch_powersgd.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, torch_powersgd.powerSGD_hook)
        expected = plan(shapes, PowerSGD(rank))
        return Subject(
            f"torch's powerSGD_hook, rank {rank}", backward(model), expected.wire_bytes, 3
        )

    def ours(name: str, algorithm: Algorithm, message_bytes: int = MESSAGE_BYTES) -> Subject:
        model = ddp()
        gw.register_comm_hook(model, algorithm, message_bytes=message_bytes)
        expected = plan(shapes, algorithm, world_size=dist.get_world_size())
        return Subject(name, backward(model), expected.wire_bytes, expected.collectives)

    def alone() -> Subject:
        """Everything that `PowerSGD` computes, with nobody to send it to."""
        model = ddp(group=dist.new_subgroups(1)[0])
        gw.register_comm_hook(model, PowerSGD(rank))
        return Subject(f"PowerSGD, rank {rank}, {ALONE}", backward(model), 0, 0)

    def zero() -> Subject:
        model = ddp()
        optimizer = gw.ZeroOptimizer(model.module.weights.items(), torch.optim.AdamW, lr=1e-3)
        model.register_comm_hook(None, gw.hook_with_zero_step(gw.allreduce_hook, model, optimizer))
        return Subject("ZeRO + AdamW", backward(model), dense.wire_bytes, 2 * len(dense.buckets))

    def local() -> Subject:
        model = ddp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gw.local_sgd(model, optimizer, diloco(PERIOD))

        def steps() -> None:
            for _ in range(PERIOD):
                optimizer.zero_grad()
                model(given).backward()
                optimizer.step()

        return Subject(
            f"DiLoCo + AdamW, every {PERIOD} steps",
            steps,
            dense.wire_bytes / PERIOD,
            1 / PERIOD,
            PERIOD,
        )

    return [
        plain(),
        bf16(),
        *map(coded, ("bfloat16", "int8", "int4")),
        torchs(),
        ours(f"PowerSGD, rank {rank}", PowerSGD(rank)),
        ours(f"PowerSGD, rank {rank}, {SMALL_GROUPS}", PowerSGD(rank), message_bytes=1 << 17),
        ours(f"PowerSGD, rank {rank}, half-step", PowerSGD(rank, half_step=True)),
        ours(RECOMMENDED, WireDtype(PowerSGD(16), "int8")),
        ours(LEAST, WireDtype(PowerSGD(4), "int8")),
        alone(),
        zero(),
        local(),
    ]


def measure(subject: Subject) -> tuple[float, float]:
    """Seconds and bytes on this host's interface, per step."""
    dist.barrier()
    bytes_before, began = sent_bytes(), time.perf_counter()
    subject.step()
    dist.barrier()  # a step is over when the slowest host is done
    return (time.perf_counter() - began) / subject.steps, (
        sent_bytes() - bytes_before
    ) / subject.steps


def main() -> None:
    args = parser().parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = gpt(layers=args.layers, vocabulary=args.vocabulary)
    given = drawn(shapes, seed=dist.get_rank())
    # Three rounds to warm up: DDP makes its buckets, and torch's hook begins, in the first.
    found = rows(
        subjects(shapes, given, args.rank), measure, args, hosts=dist.get_world_size(), warm_up=3
    )
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
