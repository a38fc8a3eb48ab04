"""Run as `jax_commands.py PORT PROCESS COUNT OUTPUT`: `gradwire probe` of one device in each
process."""

import sys

from gradwire.cli.app import main
from tests.cli.commands import few_and_small

if __name__ == "__main__":
    few_and_small()
    port, process, count, output = sys.argv[1:]
    joined = ["--coordinator", f"127.0.0.1:{port}", "--processes", count, "--process", process]
    main(["probe", "--framework", "jax", *joined, "--output", output])
