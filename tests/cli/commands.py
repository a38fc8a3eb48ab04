"""Run as `commands.py PLAN|PROBE|ADVISE …`, on each rank: a command of gradwire, with few and small messages."""

import sys

from gradwire.cli.app import main
from gradwire.core.advise import probe


def few_and_small() -> None:
    """From now on, in this process."""
    probe.SIZES = probe.SIZES[:3]
    probe.REPEATED = 0.002


if __name__ == "__main__":
    few_and_small()
    main(sys.argv[1:])
