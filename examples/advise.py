"""Ask whether compression helps here, before the model of `train_torch.py` is trained: what
`gradwire probe` and `gradwire advise` do, as functions.

torchrun --nproc_per_node=2 examples/advise.py
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import flags
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_torch import Transformer
from text import VOCABULARY
from train_torch import start

import gradwire
import gradwire.torch_backend
from gradwire.advising import method_costs, model_specs
from gradwire.core.advise.probe import ALL, SIZES, Level, Probe

#: Seconds that a message takes to the next machine on a slow network, besides its bytes.
HOP = 100e-6


def main() -> None:
    p = flags.parser(__doc__)
    p.add_argument(
        "--slow",
        type=float,
        default=100e6,
        metavar="RATE",
        help="bits per second of a slow network",
    )
    p.add_argument(
        "--to", type=Path, metavar="PATH", help="write the answer to this file, and do not print it"
    )
    args = flags.check(p.parse_args(), p)
    device = start()
    try:
        here = gradwire.torch_backend.probe()  # all ranks
        first = dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
    if first:
        answer = ask(here, args, device)
        args.to.write_text(answer) if args.to else print(answer, end="")


def ask(here: Probe, args: argparse.Namespace, device: torch.device) -> str:
    """What to do on this network, and what on a slow one. What methods cost on this device is
    measured once."""
    model = Transformer(VOCABULARY, args.context, args.width, args.layers, args.heads).to(device)
    costs = method_costs(model_specs(model, here.framework), here, progress=told)
    step = training_step(model, args, device)
    advice = gradwire.advise(model, here, step, costs=costs)
    elsewhere = gradwire.advise(model, slow(here, args.slow), step, costs=costs)
    _table, recommendation = str(elsewhere).split("\n\n")
    return f"{advice}\n\nBetween two machines at {args.slow / 1e6:g} Mbit/s:\n{recommendation}\n"


def training_step(
    model: Transformer, args: argparse.Namespace, device: torch.device
) -> Callable[[], None]:
    """A step of one replica alone, which sends nothing."""
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(args.batch_size, args.context, dtype=torch.long, device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step


def slow(here: Probe, rate: float) -> Probe:
    """The same device on a network whose messages of n bytes take so long, and overlap with what is
    computed meanwhile."""
    messages = tuple((n, 2 * HOP + 8 * n / rate) for n in SIZES)
    return Probe(
        here.framework, here.device, 2, 2, (Level(ALL, 2, messages, messages, overlap=1.0),)
    )


def told(methods: Iterable[Any]) -> Iterator[Any]:
    """The methods, each named while it is measured."""
    for method in methods:
        print(f"measuring {method}", file=sys.stderr, flush=True)
        yield method


if __name__ == "__main__":
    main()
