"""Makes sparse_loco.json: what the code of SparseLoCo's authors makes of a few pseudo-gradients.
`test_recipes` compares it with gradwire.

    git clone https://github.com/QErywan/RobustDiLoCo && git -C RobustDiLoCo checkout 8b86e08
    pip install einops
    python tests/core/authors/sparse_loco.py RobustDiLoCo > tests/core/authors/sparse_loco.json

The class `SparseLoCo` in src/tplr/sparseloco.py there is a copy of the authors' (MIT License,
Copyright 2025 tplr.ai), as tplr-ai/CCLoco@c01a785 has it too. Three replicas run it as it is on
Gloo, in float64, with lr 1 and without quantization. None of its code is here.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

REPLICAS, ROUNDS, SIDE, KEPT, DECAY = 3, 3, 4, 3, 0.95
#: Tiles of 4 × 4 fill both.
SHAPES = {"w": (8, 12), "v": (4, 8)}


def differences(replica, step):
    """How far a replica has come in a round: in thousandths, and partly as far as the others."""
    common, own = (
        torch.Generator().manual_seed(seed) for seed in (1000 + step, 100 * step + replica)
    )
    drawn = {
        name: torch.randn(shape, generator=common, dtype=torch.float64)
        + torch.randn(shape, generator=own, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    return {name: torch.round(1000 * x) / 1000 for name, x in drawn.items()}


def run(replica, checkout, folder):
    sys.path.insert(0, str(Path(checkout) / "src" / "tplr"))
    from sparseloco import SparseLoCo

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=replica, world_size=REPLICAS
    )
    parameters = {
        name: torch.nn.Parameter(torch.zeros(s, dtype=torch.float64)) for name, s in SHAPES.items()
    }
    optimizer = SparseLoCo(
        parameters.values(), lr=1.0, error_decay=DECAY, top_k=KEPT, chunk_size=SIDE
    )
    rounds = []
    for step in range(ROUNDS):
        given = differences(replica, step)
        for name, p in parameters.items():
            p.grad = given[name].clone()
        optimizer.step()
        seen = {
            "difference": given,
            "error": {name: optimizer.state[p]["error_buffer"] for name, p in parameters.items()},
            "parameter": {name: p.detach() for name, p in parameters.items()},
        }
        rounds.append(
            {what: {name: x.tolist() for name, x in of.items()} for what, of in seen.items()}
        )
    (Path(folder) / f"{replica}.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", help="of RobustDiLoCo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (os.path.abspath(parser.parse_args().checkout), folder), REPLICAS)
        by_replica = [
            json.loads((Path(folder) / f"{replica}.json").read_text())
            for replica in range(REPLICAS)
        ]
    about = {
        "source": "QErywan/RobustDiLoCo@8b86e08 src/tplr/sparseloco.py, class SparseLoCo, as shipped",
        "license": "MIT License, Copyright (c) 2025 tplr.ai",
        "made by": "tests/core/authors/sparse_loco.py",
        "options": {
            "lr": 1.0,
            "error_decay": DECAY,
            "top_k": KEPT,
            "chunk_size": SIDE,
            "use_quantization": False,
        },
    }
    rounds = [
        {
            "differences": [own["difference"] for own in of_each],
            "errors": [own["error"] for own in of_each],
            "parameters": of_each[0]["parameter"],  # the same on all
        }
        for of_each in zip(*by_replica, strict=True)
    ]
    print(json.dumps({"about": about, "rounds": rounds}))


if __name__ == "__main__":
    main()
