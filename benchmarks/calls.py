"""Python calls into gradwire's own files: of a registration, of a step, of a trace. A count, not a
time, so any machine gives the same.

    python benchmarks/calls.py                          # all of them
    python benchmarks/calls.py ddp-registration 50      # one, of a model of so many matrices

Matrices are 256×256 and the method is PowerSGD(4). In torch a process is alone, on Gloo; in JAX a
step is traced for two devices.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

#: Where Python finds them, which need not be here.
OURS = tuple(
    f"{folder}{os.sep}"
    for package in ("core", "torch_backend", "jax_backend")
    for folder in find_spec(f"gradwire.{package}").submodule_search_locations or ()  # type: ignore[union-attr]
)
#: What is counted, and for how many matrices.
SUBJECTS = {
    "ddp-registration": (1, 50),
    "ddp-step": (1,),
    "fsdp-registration": (1, 50),
    "diloco-average": (1,),
    "diloco-other-step": (1,),
    "jax-init": (1, 50),
    "jax-update-trace": (1, 50),
}


def calls_of(work: Callable[[], Any]) -> int:
    """Python calls of functions in gradwire's files while `work` runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def model_of(matrices: int) -> Any:
    from torch import nn

    return nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(matrices)])


def ddp(subject: str, matrices: int) -> int:
    """Registration on a DDP, or a step after two."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from gradwire import PowerSGD
    from gradwire.torch_backend import register_comm_hook

    with alone():
        module = DistributedDataParallel(model_of(matrices))
        if subject == "ddp-registration":
            return calls_of(lambda: register_comm_hook(module, PowerSGD(4)))
        register_comm_hook(module, PowerSGD(4))

        def step() -> None:
            module(torch.ones(2, 256)).sum().backward()

        for _ in range(2):
            step()
        return calls_of(step)


def fsdp(subject: str, matrices: int) -> int:
    """Registration on a model that FSDP2 has sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from gradwire import PowerSGD
    from gradwire.torch_backend import compress_replicas

    with alone():
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(model_of(matrices), mesh=mesh["shard"])
        return calls_of(lambda: compress_replicas(model, PowerSGD(4), mesh["replicate"]))


def diloco(subject: str, matrices: int) -> int:
    """A step that averages, and one that does not."""
    import torch

    import gradwire
    from gradwire.torch_backend import local_sgd

    with alone():
        model = model_of(matrices)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local_sgd(model, optimizer, gradwire.diloco(2, compressor=gradwire.PowerSGD(4)))
        model(torch.ones(2, 256)).sum().backward()
        for _ in range(5):
            optimizer.step()
        counts = {
            "diloco-average": calls_of(optimizer.step),
            "diloco-other-step": calls_of(optimizer.step),
        }
        return counts[subject]


def jax_calls(subject: str, matrices: int) -> int:
    """`init`, or a trace of `update`."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax
    import jax.numpy as jnp

    from gradwire.jax_backend import distribute, partition_specs, power_sgd

    params = {f"w{i}": jnp.ones((256, 256)) for i in range(matrices)}
    tx = power_sgd(4, axis_name="data")
    if subject == "jax-init":
        return calls_of(lambda: tx.init(params))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state = tx.init(params)
    specs = partition_specs(state, "data")
    state = distribute(state, mesh, "data")

    def update(gradients: Any, state: Any) -> Any:
        return tx.update(jax.tree.map(lambda g: g[0], gradients), state)

    shards: dict[str, Any] = {
        "in_specs": (jax.P("data"), specs),
        "out_specs": (jax.P(), specs),
        "check_vma": False,
    }
    given = {name: jnp.ones((2, *x.shape)) for name, x in params.items()}
    return calls_of(lambda: jax.jit(jax.shard_map(update, mesh=mesh, **shards)).trace(given, state))


COUNTED = {"ddp": ddp, "fsdp": fsdp, "diloco": diloco, "jax": jax_calls}


def count(subject: str, matrices: int) -> int:
    """In this process, which should not have run another subject: what is cached would not be
    counted."""
    return COUNTED[subject.partition("-")[0]](subject, matrices)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count Python calls into gradwire's files.")
    parser.add_argument("subject", nargs="?", choices=SUBJECTS)
    parser.add_argument("matrices", nargs="?", type=int, default=1)
    args = parser.parse_args()
    if args.subject is not None:
        print(
            json.dumps(
                {
                    "subject": args.subject,
                    "matrices": args.matrices,
                    "calls": count(args.subject, args.matrices),
                }
            )
        )
        return
    for subject, sizes in SUBJECTS.items():
        for matrices in sizes:
            command = [sys.executable, __file__, subject, str(matrices)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print(done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
