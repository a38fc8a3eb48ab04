"""Fuzz everything that takes an option, a state, a text, a file or gradients, for as long as one
likes: `make fuzz`.

Everything that is drawn comes from the seed, which is counted up. All counts have to be 0.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from tests.fuzz import states, texts
from tests.fuzz.engine import GARBAGE, Found, cases, construct
from tests.fuzz.targets import TABLES
from tests.soak.simulation import Failure, simulate


def constructions(tables: Iterable[str], found: Found, seed: int = 0, share: float = 1.0) -> None:
    """So large a part of all options and values."""
    rng = random.Random(seed)
    for table in tables:
        for case in cases(TABLES[table]):
            if rng.random() < share:
                construct(*case, found)


def everything(seed: int, found: Found, *, share: float, each: int, count: int) -> None:
    """One round: so large a part of the constructions, so many states of each form and histories of
    each kind, so many texts and files."""
    constructions(TABLES, found, seed, share)
    states.histories(seed, found, each)
    for number in range(seed * each, (seed + 1) * each):  # with gradients as they should not be
        found.tried += 1
        try:
            simulate("averages", number)
        except Failure as error:
            found.add(GARBAGE, str(error))
    texts.expressions(seed, found, count)
    with TemporaryDirectory() as folder:
        texts.files(seed, found, count, Path(folder))


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m tests.fuzz", description="All counts have to be 0.")
    p.add_argument("--minutes", type=float, default=10)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found, began, seed = Found(), time.monotonic(), args.seed
    while seed == args.seed or time.monotonic() - began < 60 * args.minutes:
        faulthandler.dump_traceback_later(600, exit=True)  # where it hangs
        before = len(found.findings)
        # The values of options are all tried in the first round; what is drawn is another in each.
        everything(seed, found, share=1.0 if seed == args.seed else 0.02, each=40, count=3000)
        for kind, what in found.findings[before:]:
            print(f"seed {seed}: {kind}: {what}", flush=True)
        seed += 1
    counts = ", ".join(f"{kind} {count}" for kind, count in found.counts.items())
    print(
        f"{found.tried:,} tried in {time.monotonic() - began:.0f} s, seeds {args.seed} to {seed - 1}: {counts}"
    )
    dist.destroy_process_group()
    sys.exit(bool(found.findings))


if __name__ == "__main__":
    main()
