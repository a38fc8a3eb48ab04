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

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from tests.soak import arrival, compression, local, sharded

#: A seed → the number of steps that were simulated; raises if something does not hold.
History = Callable[[int], int]

KINDS = {"compression": compression.run, "arrival": arrival.run, "local": local.run, "sharded": sharded.run}


class Failure(AssertionError):
    """A history in which something did not hold, and how to see it again."""


def simulate(kind, seed, run=None):
    """One history of this kind. Returns its steps; raises Failure with the seed."""
    try:
        return (run or KINDS[kind])(seed)
    except Exception as error:
        again = f"python -m tests.soak.simulation --only {kind} --seed {seed} --histories 1"
        raise Failure(f"{kind}, seed {seed}: {type(error).__name__}: {error}\nagain: {again}") from error


def histories(kinds, seed):
    """One history of each kind from this seed: how many steps, and the seconds of processor time that they took."""
    found = {}
    for kind in kinds:
        began = time.process_time()
        steps = simulate(kind, seed)
        found[kind] = steps, time.process_time() - began
    return found


def soak(kinds, seed, *, count, minutes, jobs):
    """Histories of all these kinds in turn, from this seed on: so many of each, or for so long; in so many processes."""
    steps, busy, done = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0.0), 0
    seeds = itertools.count(seed) if count is None else iter(range(seed, seed + count))
    began = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool, _progress() as progress:
        task = progress.add_task("histories", total=60 * minutes if count is None else count, steps=0)
        # Two for each process, so that none has to wait for its next.
        running = {pool.submit(histories, kinds, s) for s in itertools.islice(seeds, 2 * jobs)}
        try:
            while running:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for one in ended:
                    for kind, (number, seconds) in one.result().items():
                        steps[kind] += number
                        busy[kind] += seconds
                    done += 1
                elapsed = time.monotonic() - began
                if count is not None or elapsed < 60 * minutes:
                    running |= {pool.submit(histories, kinds, s) for s in itertools.islice(seeds, len(ended))}
                progress.update(task, completed=elapsed if count is None else done, steps=sum(steps.values()))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    elapsed = time.monotonic() - began
    for kind, n in steps.items():
        print(f"{kind:12} {n:>10,} steps, {n / max(busy[kind], 1e-9):>6,.0f} for each second of one core")
    print(
        f"seeds {seed} to {seed + done - 1}: all held; {sum(steps.values()) / elapsed:,.0f} steps per second for {elapsed:.0f} s"
        f" in {jobs} processes"
    )


def _progress():
    return Progress(
        *("{task.description}", BarColumn(), "{task.fields[steps]:,} steps", TimeElapsedColumn()),
        console=Console(stderr=True),
        transient=True,
    )


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    p.add_argument("--histories", type=int, help="how many of each kind, instead of how long")
    p.add_argument("--seed", type=int, help="of the first history; default: another one each time")
    p.add_argument("--only", choices=list(KINDS), action="append", help="only this kind; may be given several times")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one for each core)")
    args = p.parse_args()
    seed = args.seed if args.seed is not None else int(time.time()) % (1 << 30)
    try:
        soak(args.only or list(KINDS), seed, count=args.histories, minutes=args.minutes, jobs=args.jobs)
    except Failure as failure:
        raise SystemExit(failure) from failure
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
