"""The flags that `train_torch.py` and `train_flax.py` share, and the learning rate, so that the two
runs can be compared."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

WARMUP = 20


def parser(description: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    wire = p.add_argument_group("what crosses the wire")
    wire.add_argument(
        "--compress",
        choices=["none", "powersgd"],
        default="powersgd",
        help="none averages gradients whole",
    )
    wire.add_argument(
        "--rank",
        type=int,
        default=4,
        help="of PowerSGD's factors: more is closer to no compression, and more bytes",
    )
    wire.add_argument(
        "--half-step",
        action="store_true",
        help="send one factor per step, in turn: half the bytes, one collective",
    )
    wire.add_argument(
        "--start-step",
        type=int,
        default=0,
        metavar="N",
        help="average whole gradients for the first N steps",
    )
    wire.add_argument(
        "--local-sgd",
        type=int,
        metavar="H",
        help="no gradients: average the parameters after every H steps (what --compress compresses are the differences)",
    )
    wire.add_argument(
        "--diloco",
        type=int,
        metavar="H",
        help="the same, with a Nesterov step in the direction of the averaged difference",
    )

    training = p.add_argument_group("training")
    training.add_argument(
        "--steps",
        type=int,
        default=300,
        help="optimizer steps in all, those before a checkpoint included",
    )
    training.add_argument(
        "--batch-size", type=int, default=4, help="windows of text per replica and step"
    )
    training.add_argument(
        "--lr",
        type=float,
        default=1e-3,
        help="peak learning rate of AdamW: linear warm-up, then cosine decay",
    )
    training.add_argument(
        "--zero",
        action="store_true",
        help="divide AdamW's state among the replicas: each updates its part and sends it",
    )
    training.add_argument(
        "--seed", type=int, default=0, help="of the initial weights and of the order of the text"
    )
    training.add_argument(
        "--text",
        type=Path,
        metavar="PATH",
        help="train on this file instead of Python's standard library",
    )

    model = p.add_argument_group("model")
    model.add_argument(
        "--width",
        type=int,
        default=256,
        help="of the residual stream; up to 64, or a multiple of 64",
    )
    model.add_argument("--layers", type=int, default=3, help="Transformer blocks")
    model.add_argument("--context", type=int, default=64, help="bytes the model sees at once")

    files = p.add_argument_group("files and progress")
    files.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="write model, optimizer and compressor memory to this file",
    )
    files.add_argument(
        "--checkpoint-every",
        type=int,
        default=100,
        metavar="N",
        help="steps between two checkpoints",
    )
    files.add_argument(
        "--resume",
        action="store_true",
        help="continue from --checkpoint, as if there had been no interruption",
    )
    files.add_argument(
        "--auto-resume",
        action="store_true",
        help="continue from --checkpoint if there is one, else begin: what to give when `torchrun --max-restarts` starts the script again",
    )
    files.add_argument(
        "--metrics",
        type=Path,
        metavar="PATH",
        help="write JSON lines here: step, losses, bytes, collectives, seconds so far",
    )
    files.add_argument(
        "--eval-every",
        type=int,
        default=20,
        metavar="N",
        help="steps between two evaluations on held-out text",
    )
    files.add_argument(
        "--eval-windows",
        type=int,
        default=32,
        metavar="N",
        help="windows of held-out text, shared by the replicas",
    )
    files.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="say how far the training is",
    )
    return p


def check(args: argparse.Namespace, p: argparse.ArgumentParser) -> argparse.Namespace:
    """Refuse at once what would fail later on."""
    for name in (
        "steps",
        "batch_size",
        "layers",
        "width",
        "context",
        "checkpoint_every",
        "eval_every",
        "eval_windows",
    ):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    for name in ("local_sgd", "diloco"):
        period = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        if period is not None and period < 1:
            p.error(f"{flag} {period} must be at least 1")
        if period is not None and args.zero:
            p.error(
                f"{flag} keeps a whole optimizer on each replica, and --zero divides one among them; give one of them"
            )
    if args.rank < 1 or args.start_step < 0 or args.seed < 0:
        p.error("--rank must be at least 1, --start-step and --seed at least 0")
    if args.compress != "powersgd" and args.half_step:
        p.error(f"--half-step is PowerSGD's, and --compress {args.compress} has none; leave it out")
    if args.local_sgd is not None and args.diloco is not None:
        p.error("--local-sgd and --diloco are two ways to do the same; give one of them")
    if args.width > 64 and args.width % 64:
        p.error(
            f"--width {args.width} is more than one head of 64 and no multiple of 64; {args.width // 64 * 64} is"
        )
    if args.auto_resume and args.checkpoint is None:
        p.error("--auto-resume needs --checkpoint PATH, the file to continue from")
    # No process of a machine writes one before all of them have come so far; of several machines
    # `train_torch.py` compares what they have found.
    args.resume = args.resume or (args.auto_resume and args.checkpoint.exists())
    if args.resume and args.checkpoint is None:
        p.error("--resume needs --checkpoint PATH, the file to continue from")
    if args.resume and not args.checkpoint.exists():
        p.error(
            f"--resume: there is no checkpoint at {args.checkpoint}; leave --resume out to start one"
        )
    args.heads = max(1, args.width // 64)
    return args


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear to the peak over the first steps, then half a cosine down to a twentieth of it."""
    decay = 0.5 * (1 + math.cos(math.pi * step / args.steps))
    return float(args.lr * min(1.0, (step + 1) / WARMUP) * (0.05 + 0.95 * decay))
