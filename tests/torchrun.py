"""torchrun's command line for pages: one process for each node, which imports what every rank would and forks them.

    python tests/torchrun.py --nnodes=2 --node-rank=1 --master-addr=127.0.0.1 --master-port=29500 --nproc-per-node=2 train.py

The number of a node that meets others by `--rdzv-endpoint` is NODE, of the environment. Restarts, and what torchrun does besides, are torchrun's: what
asks for a restart runs under it.
"""

import os
import runpy
import signal
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from torch.distributed.run import get_args_parser

from tests.launch import ROOT, free_port

#: What pages call as `gradwire`, with few and small messages.
GRADWIRE = ROOT / "tests" / "cli" / "commands.py"


def environment(args: Any) -> dict[str, str]:
    """Of all ranks of this node."""
    ranks, nodes = int(args.nproc_per_node), int(args.nnodes.partition(":")[0])
    address, _, port = (args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}").partition(":")
    return {
        **{"WORLD_SIZE": str(ranks * nodes), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"},
        **{"GROUP_RANK": os.environ["NODE"] if args.rdzv_endpoint else str(args.node_rank)},
        **{"MASTER_ADDR": address, "MASTER_PORT": port if nodes > 1 else str(free_port())},
    }


def run(script: str, arguments: list[str]) -> None:
    """In this process, as Python would."""
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def main(given: list[str]) -> None:
    args = get_args_parser().parse_args(given)
    if int(args.max_restarts):
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *given])
    for name in ("torch._dynamo", "torch.nn.parallel", "gradwire.torch_backend"):
        import_module(name)
    env, script = environment(args), args.training_script  # a port that is free now is taken at once
    ranks = []
    for local in range(int(args.nproc_per_node)):
        if (rank := os.fork()) == 0:
            first = int(env["GROUP_RANK"]) * int(args.nproc_per_node)
            os.environ |= env | {"RANK": str(first + local), "LOCAL_RANK": str(local)}
            run(str(GRADWIRE) if script == "gradwire" else script, args.training_script_args)
            sys.exit()
        ranks.append(rank)
    for _ in ranks:
        if os.wait()[1]:  # the first that fails ends the others
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
