"""What error feedback brings back: gradients that were dropped, and outliers, with and without the
remedies of docs/error-feedback.md.

    python benchmarks/error_feedback.py             # two minutes; writes benchmarks/results/error-feedback.json and prints tables
    python benchmarks/error_feedback.py --steps 24 --output /tmp/error-feedback.json

Two Gloo ranks train small MLPs under DDP. Half-way, one batch of rank 0 has its loss multiplied by
10,000 and random targets; the average is clipped to norm 1, or a step whose average is longer than
10 is skipped. "disturbed" are the steps, from that batch on, in which the loop clips, or skips. In
a GAN the discriminator has a hook, and the generator's loss passes through it; its optimizer is
given true averages, so that all ways see the same weights.
"""

from __future__ import annotations

import argparse
import itertools
import platform
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import REPLICAS, on_ranks, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import Algorithm, PowerSGD
from gradwire.torch_backend import CommHook, register_comm_hook

STEPS = 140
OUTPUT = Path(__file__).parent / "results" / "error-feedback.json"

SUBJECTS: dict[str, Algorithm | None] = {
    "DDP": None,
    "rank 1": PowerSGD(1),
    "rank 4": PowerSGD(4),
    "rank 4, half-step": PowerSGD(4, half_step=True),
    "rank 1, max_norm=1": PowerSGD(1, max_norm=1.0),
    "rank 4, max_norm=1": PowerSGD(4, max_norm=1.0),
    "rank 4, half-step, max_norm=1": PowerSGD(4, half_step=True, max_norm=1.0),
}
#: How the generator's loss passes through the discriminator.
WAYS = ("as usual", "discarded", "no_sync", "module")


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def wrapped(
    model: nn.Module, algorithm: Algorithm | None
) -> tuple[DistributedDataParallel, CommHook | None]:
    ddp = DistributedDataParallel(model)
    return ddp, None if algorithm is None else register_comm_hook(ddp, algorithm)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Vectors, and the same vectors sorted."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    return x, x.sort(-1).values


def outlier(
    algorithm: Algorithm | None, *, skip: bool, steps: int = STEPS, forget: bool = False
) -> list[int]:
    """Train through one bad batch. Returns the steps in which the average was clipped to norm 1 or,
    with `skip`, the step was left out because the average was longer than 10. With `forget` the
    compression error is forgotten then."""
    torch.manual_seed(0)
    model = mlp(32, 128, 128, 32)
    ddp, handle = wrapped(model, algorithm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    bad, disturbed = steps // 2, []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        out = ddp(x)
        loss = (out - y).square().mean()
        if step == bad and dist.get_rank() == 0:
            target = 3 * torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
            loss = 1e4 * (out - target).square().mean()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), float("inf") if skip else 1.0))
        if norm > (10 if skip else 1) and step >= bad:
            disturbed.append(step)
            if forget and handle is not None:
                handle.forget()
            if skip:
                continue
        optimizer.step()
    return disturbed


def dropped(remedy: str, algorithm: Algorithm | None) -> float:
    """Norm of the gradient of a loss that is zero, after another gradient has been dropped."""
    torch.manual_seed(0)
    model = mlp(32, 128, 128, 32)
    ddp, handle = wrapped(model, algorithm)
    (x, y), (z, t) = batch(0), batch(1)
    with handle.discarded() if handle and remedy == "discarded" else nullcontext():
        (1000 * (ddp(x) - y).square().mean()).backward()
    model.zero_grad()
    if handle and remedy == "forget":
        handle.forget()
    (0 * (ddp(z) - t).square().mean()).backward()
    return float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))


def gan(way: str, algorithm: Algorithm, steps: int) -> float:
    """How far the sum of what the discriminator's hook gives is from the sum of the true averages
    of its gradients, in units of an average one. Error feedback keeps that bounded."""
    torch.manual_seed(0)
    generator, discriminator = mlp(16, 64, 32), mlp(32, 64, 64, 1)
    g, _ = wrapped(generator, None)
    d, handle = wrapped(discriminator, algorithm)
    of_g = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.99))
    of_d = torch.optim.Adam(discriminator.parameters(), 1e-3, betas=(0.5, 0.99))
    weights = list(discriminator.parameters())
    drift, norms = torch.zeros(sum(p.numel() for p in weights)), []
    for step in range(steps):
        real, z = batch(step)[1], batch(steps + step)[0][:, :16]
        of_d.zero_grad()
        fake = g(z).detach()
        local = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
        true = torch.autograd.grad(local, weights)
        for x in true:
            dist.all_reduce(x)
            x.div_(REPLICAS)
        (F.softplus(-d(real)).mean() + F.softplus(d(fake)).mean()).backward()
        given = [p.grad for p in weights if p.grad is not None]
        drift += torch.cat([(a - b).flatten() for a, b in zip(given, true, strict=True)])
        norms.append(float(torch.cat([x.flatten() for x in true]).norm()))
        for p, x in zip(weights, true, strict=True):
            p.grad = x
        of_d.step()
        of_g.zero_grad()
        judge = discriminator if way == "module" else d
        with d.no_sync() if way == "no_sync" else nullcontext():
            loss = F.softplus(-judge(g(z))).mean()
        with handle.discarded() if handle and way == "discarded" else nullcontext():
            loss.backward()
        of_g.step()
    return float(drift.norm()) * len(norms) / sum(norms)


def measured(steps: int) -> dict[str, Any]:
    return {
        "disturbed_clipped": {
            n: len(outlier(a, skip=False, steps=steps)) for n, a in SUBJECTS.items()
        },
        "disturbed_skipped": {
            n: len(outlier(a, skip=True, steps=steps)) for n, a in SUBJECTS.items()
        },
        "disturbed_skipped_forgetting": {
            n: len(outlier(a, skip=True, steps=steps, forget=True))
            for n, a in list(SUBJECTS.items())[:4]
        },
        "norm_of_a_zero_loss": {
            **{
                f"rank 1, {remedy}": dropped(remedy, PowerSGD(1))
                for remedy in ("nothing", "discarded", "forget")
            },
            "DDP": dropped("nothing", None),
        },
        "gan_drift": {
            f"rank {r}, {way}": gan(way, PowerSGD(r), steps) for r in (1, 2, 4) for way in WAYS
        },
        "gan_drift_of_a_longer_run": {
            f"rank 1, {way}": gan(way, PowerSGD(1), 5 * steps) for way in WAYS[:2]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    found = on_ranks(measured, args.steps)
    for title, values in found.items():
        print(title)
        for name, value in values.items():
            print(f"  {name:32} {value:.4g}")
    save(
        {"machine": platform.machine(), "torch": torch.__version__, "steps": args.steps, **found},
        args.output,
    )


if __name__ == "__main__":
    main()
