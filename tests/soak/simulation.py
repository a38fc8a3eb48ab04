"""Random histories, one after the other, for as long as one likes: `make soak`.

Everything in a history is drawn from its seed. One that fails prints it, and is repeated by

    python -m tests.soak.simulation --only compression --seed 1234 --histories 1
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

from tests.soak import arrival, histories

#: A seed → the number of steps that were simulated; raises if something does not hold.
KINDS: dict[str, Callable[[int], int]] = {
    "compression": histories.compression,
    "arrival": arrival.run,
    "local": histories.local,
    "averages": histories.averages,
}


class Failure(AssertionError):
    """A history in which something did not hold, and how to see it again."""


def simulate(kind, seed, run=None):
    """One history of this kind. Returns its steps; raises Failure with the seed."""
    try:
        return (run or KINDS[kind])(seed)
    except Exception as error:
        notes = "".join(getattr(error, "__notes__", ()))
        again = f"python -m tests.soak.simulation --only {kind} --seed {seed} --histories 1"
        raise Failure(
            f"{kind}, seed {seed}: {type(error).__name__}: {error} {notes}\nagain: {again}"
        ) from error


def one_of_each(kinds, seed):
    """One history of each kind from this seed: how many steps."""
    return {kind: simulate(kind, seed) for kind in kinds}


def soak(kinds, seed, *, count, minutes, jobs):
    """Histories of all these kinds in turn, from this seed on: so many of each, or for so long; in
    so many processes."""
    steps, done, began = dict.fromkeys(kinds, 0), 0, time.monotonic()
    seeds = itertools.count(seed) if count is None else iter(range(seed, seed + count))
    with ProcessPoolExecutor(jobs) as pool:
        # Two for each process, so that none has to wait for its next.
        running = {pool.submit(one_of_each, kinds, s) for s in itertools.islice(seeds, 2 * jobs)}
        try:
            while running:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for one in ended:
                    steps = {kind: steps[kind] + number for kind, number in one.result().items()}
                if (done := done + len(ended)) // 500 > (done - len(ended)) // 500:
                    print(f"{done} histories, {sum(steps.values()):,} steps", flush=True)
                if count is not None or time.monotonic() - began < 60 * minutes:
                    running |= {
                        pool.submit(one_of_each, kinds, s)
                        for s in itertools.islice(seeds, len(ended))
                    }
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    elapsed = time.monotonic() - began
    for kind, n in steps.items():
        print(f"{kind:12} {n:>10,} steps")
    rate = f"{sum(steps.values()) / elapsed:,.0f} steps per second for {elapsed:.0f} s in {jobs} processes"
    print(f"seeds {seed} to {seed + done - 1}: all held; {rate}")


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    p.add_argument("--histories", type=int, help="how many of each kind, instead of how long")
    p.add_argument(
        "--seed",
        type=int,
        default=int(time.time()) % (1 << 30),
        help="default: another one each time",
    )
    p.add_argument(
        "--only",
        choices=list(KINDS),
        action="append",
        help="only this kind; may be given several times",
    )
    p.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes (default: one for each core)"
    )
    args = p.parse_args()
    try:
        soak(
            args.only or list(KINDS),
            args.seed,
            count=args.histories,
            minutes=args.minutes,
            jobs=args.jobs,
        )
    except Failure as failure:
        raise SystemExit(failure) from failure


if __name__ == "__main__":
    main()
