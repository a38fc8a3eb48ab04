"""torchrun's command line for pages: one process for each node, whose ranks are forked as all
commands are.

    python tests/torchrun.py --nnodes=2 --node-rank=1 --master-addr=127.0.0.1 \\
        --master-port=29500 --nproc-per-node=2 train.py

The number of a node that meets others by `--rdzv-endpoint` is NODE, of the environment, or Slurm's.
Restarts, and what torchrun does besides, are torchrun's: what asks for a restart runs under it.
"""

import os
import sys
from pathlib import Path

from torch.distributed.run import get_args_parser

from tests.launch import Process, ended, free_port, of_rank

#: What pages call as `gradwire`, with few and small messages.
GRADWIRE = Path(__file__).parent / "cli" / "commands.py"


def main(given: list[str]) -> None:
    args = get_args_parser().parse_args(given)
    if int(args.max_restarts):
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *given])
    here, nodes = int(args.nproc_per_node), int(args.nnodes.partition(":")[0])
    node = int(
        os.environ.get("SLURM_NODEID", os.environ["NODE"]) if args.rdzv_endpoint else args.node_rank
    )
    address, _, port = (args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}").partition(
        ":"
    )
    script = str(GRADWIRE) if args.training_script == "gradwire" else args.training_script
    env = os.environ | {"OMP_NUM_THREADS": "1", "GROUP_RANK": str(node), "MASTER_ADDR": address}
    env["MASTER_PORT"] = port if nodes > 1 else str(free_port())  # which is taken at once
    command = [sys.executable, script, *args.training_script_args]
    ranks = [Process(command, env=env | of_rank(local, here, node, nodes)) for local in range(here)]
    ended(ranks)
    if any(rank.poll() for rank in ranks):  # the first that fails ends the others
        for rank in ranks:
            rank.kill()
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
