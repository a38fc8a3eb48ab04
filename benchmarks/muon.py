"""What an optimizer step with Muon takes when its matrices are divided among two replicas, beside
the plain one on each: in torch and in JAX.

    python benchmarks/muon.py                    # writes benchmarks/results/muon.json
    python benchmarks/muon.py --layers 1 --vocabulary 200 --repeats 1 --output /tmp/muon.json

Muon for the matrices of a GPT's layers, AdamW for the rest. A step begins with averaged gradients
and ends with new parameters on every replica; what it sends is measured by itself, as a gather of
as many bytes. Subjects take turns; the share is the median over rounds of (divided − message) /
plain, of which 1/2 would be perfect.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import REPLICAS, interleaved, last_line, on_ranks, save
from shapes import elements, gpt

HERE = Path(__file__).parent
PLAIN, DIVIDED, MESSAGE = SUBJECTS = ("plain", "divided", "message")
AXIS = "data"
Shapes = dict[str, tuple[int, ...]]


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--layers", type=int, default=6, help="of the GPT; 6 make 25 million parameters")
    p.add_argument("--vocabulary", type=int, default=12_000, help="of the GPT")
    p.add_argument("--width", type=int, default=512, help="of the GPT")
    p.add_argument("--repeats", type=int, default=9, help="timed steps of each")
    p.add_argument("--output", type=Path, default=HERE / "results" / "muon.json")
    p.add_argument("--jax-worker", action="store_true", help=argparse.SUPPRESS)
    return p.parse_args()


def is_muons(name: str) -> bool:
    """Whether Muon takes the parameter: a layer's matrix."""
    return name[0].isdigit() and name.endswith(("qkv_w", "out_w", "up_w", "down_w"))


def in_torch(shapes: Shapes, repeats: int) -> dict[str, list[float]]:
    """Seconds of steps, by subject. Every rank calls this."""
    import torch
    import torch.distributed as dist

    import gradwire.torch_backend as gw

    def parameters() -> dict[str, torch.nn.Parameter]:
        torch.manual_seed(0)
        made = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
        for p in made.values():
            p.grad = torch.randn_like(p)
        return made

    plain, divided = parameters(), parameters()
    matrices = [p for name, p in plain.items() if is_muons(name)]
    others = [p for name, p in plain.items() if not is_muons(name)]
    pair: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=1e-3),
        torch.optim.AdamW(others, lr=1e-3),
    ]
    muon, adamw = (torch.optim.Muon, {"lr": 1e-3}), (torch.optim.AdamW, {"lr": 1e-3})
    patterns = dict.fromkeys(filter(is_muons, shapes), (*muon, "parameter")) | {
        "*": (*adamw, "element")
    }
    zero = gw.ZeroOptimizer(list(divided.items()), patterns)
    part = torch.zeros(elements(shapes) // REPLICAS)
    whole = [torch.zeros_like(part) for _ in range(REPLICAS)]

    def both() -> None:
        for optimizer in pair:
            optimizer.step()

    return interleaved(
        {PLAIN: both, DIVIDED: zero.step, MESSAGE: lambda: dist.all_gather(whole, part)}, repeats
    )


def in_jax(shapes: Shapes, repeats: int) -> dict[str, list[float]]:
    """The same, on two CPU devices of this process."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    from gradwire.jax_backend import replicate, zero1

    def labels(params: Any) -> dict[str, str]:
        return {name: "muon" if is_muons(name) else "adamw" for name in params}

    muon, adamw = optax.contrib.muon(1e-3), optax.adamw(1e-3)
    plain = optax.multi_transform({"muon": muon, "adamw": adamw}, labels)
    common: dict[str, Any] = {"axis_name": AXIS, "replicas": REPLICAS, "averaged": True}
    kinds = {"muon": zero1(muon, shard="parameter", **common), "adamw": zero1(adamw, **common)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    gradients = jax.tree.map(lambda x: jnp.stack([jnp.cos(x)] * REPLICAS), params)

    def subject(tx: Any) -> Callable[[], None]:
        def step(state: Any, given: Any) -> Any:
            updates, new = tx.update(given, state[1], state[0])
            return optax.apply_updates(state[0], updates), new

        state = replicate((params, tx.init(params)), axis_name=AXIS)
        run = jax.pmap(step, axis_name=AXIS, donate_argnums=0)

        def once() -> None:
            nonlocal state
            state = jax.block_until_ready(run(state, gradients))

        return once

    part = jnp.zeros((REPLICAS, elements(shapes) // REPLICAS))
    gather = jax.pmap(lambda x: lax.all_gather(x, AXIS), axis_name=AXIS)
    divided = optax.multi_transform(kinds, labels)
    steps = {
        PLAIN: subject(plain),
        DIVIDED: subject(divided),
        MESSAGE: lambda: jax.block_until_ready(gather(part)),
    }
    return interleaved(steps, repeats)


def main() -> None:
    args = parse()
    shapes = gpt(args.layers, args.width, args.vocabulary)
    if args.jax_worker:
        print(json.dumps(in_jax(shapes, args.repeats)))
        return
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={REPLICAS}"
    measured = {
        "torch": on_ranks(in_torch, shapes, args.repeats),
        "jax": last_line(
            __file__, *sys.argv[1:], "--jax-worker", XLA_FLAGS=flags, JAX_PLATFORMS="cpu"
        ),
    }
    rows = []
    for backend, seconds in measured.items():
        rounds = list(zip(*(seconds[subject] for subject in SUBJECTS), strict=True))
        row = {
            "backend": backend,
            **{f"{s}_ms": statistics.median(seconds[s]) * 1e3 for s in SUBJECTS},
        }
        row["share"] = statistics.median(
            (divided - message) / plain for plain, divided, message in rounds
        )
        rows.append(row)
        print(
            f"{backend:<6}  plain {row['plain_ms']:8.1f} ms   divided {row['divided_ms']:8.1f} ms, of which the message {row['message_ms']:6.1f}   "
            f"{row['share']:.3f} of the plain step besides"
        )
    result = {
        "command": " ".join(["python benchmarks/muon.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}, jax {version('jax')}",
        "parameters": elements(shapes),
        "replicas": REPLICAS,
        "repeats": args.repeats,
        "rows": rows,
    }
    save(result, args.output)


if __name__ == "__main__":
    main()
