"""Random histories, one after the other, for as long as one likes: `make soak`.

Everything in a history is drawn from its seed. One that fails prints it, and is repeated by

    python -m tests.soak.simulation --only compression --seed 1234 --histories 1
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable

from tests.soak import arrival, compression, local, sharded

__all__ = ["KINDS", "Failure", "simulate"]

#: A seed → the number of steps that were simulated; raises if something does not hold.
History = Callable[[int], int]

KINDS: dict[str, History] = {
    "compression": compression.run,
    "arrival": arrival.run,
    "local": local.run,
    "sharded": sharded.run,
}


class Failure(AssertionError):
    """A history in which something did not hold, and how to see it again."""


def simulate(kind: str, seed: int, run: History | None = None) -> int:
    """One history of this kind. Returns its steps; raises Failure with the seed."""
    try:
        return (run or KINDS[kind])(seed)
    except Exception as error:
        again = f"python -m tests.soak.simulation --only {kind} --seed {seed} --histories 1"
        raise Failure(f"{kind}, seed {seed}: {type(error).__name__}: {error}\nagain: {again}") from error


def soak(kinds: Iterable[str], seed: int, *, histories: int | None = None, minutes: float = 1.0) -> None:
    """Histories of all these kinds in turn, from this seed on: so many, or for so long."""
    steps, began = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0.0)
    start, done = time.monotonic(), 0
    while done < histories if histories is not None else time.monotonic() - start < 60 * minutes:
        for kind in steps:
            before = time.process_time()
            steps[kind] += simulate(kind, seed + done)
            began[kind] += time.process_time() - before
        done += 1
    for kind, count in steps.items():
        print(f"{kind:12} {count:>10,} steps, {count / max(began[kind], 1e-9):>6,.0f} for each second of one core")
    print(f"seeds {seed} to {seed + done - 1}: all held, {time.monotonic() - start:.0f} s")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    p.add_argument("--histories", type=int, help="how many of each kind, instead of how long")
    p.add_argument("--seed", type=int, help="of the first history; default: another one each time")
    p.add_argument("--only", choices=list(KINDS), action="append", help="only this kind; may be given several times")
    args = p.parse_args()
    seed = args.seed if args.seed is not None else int(time.time()) % (1 << 30)
    try:
        soak(args.only or list(KINDS), seed, histories=args.histories, minutes=args.minutes)
    except Failure as failure:
        print(failure, file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
