"""Every kind of disturbance once, in half a minute: `python -m tests.chaos.short FOLDER`, with `native` for torch's own groups. Raises AssertionError for
what must not be."""

import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # what the first optimizer would import

from tests.chaos import verdict
from tests.chaos.arena import Arena

#: Of a schedule in fragments whose messages overlap, and of gradients in each step.
WHAT = {
    "overlap": "diloco(6, fragments=2, overlap=2, compressor=PowerSGD(2))",
    "gradients": "PowerSGD(2, start_step=5)",
}


def lose(arena: Arena) -> None:
    """One while a message is on its way, and two at once; newcomers for all of them."""
    arena.kill_in_flight("replica0")
    arena.wait_for(arena.rounds() + 2, 30)
    arena.add()
    arena.wait_for(arena.rounds() + 3, 30)
    arena.kill(["replica1", "replica2"])
    arena.wait_for(arena.rounds() + 2, 30)
    arena.add()
    arena.wait_for(arena.rounds() + 3, 30)


def delay(arena: Arena) -> None:
    """One is frozen, longer than a message may take; another is slow."""
    arena.freeze("replica3", 6.0)
    arena.wait_for(arena.rounds() + 2, 30)
    slow = arena.add(slower=5.0)
    arena.wait_for(arena.rounds() + 4, 40)
    arena.kill([slow])
    arena.wait_for(arena.rounds() + 2, 30)


def main(folder: Path, native: bool) -> None:
    torch.set_num_threads(1)
    begun = time.time()
    for name, what in WHAT.items():
        with Arena(folder / name, what, 0, 4 if name == "overlap" else 3, 120, 0.03, native) as arena:
            arena.wait_for(4, 60)
            if name == "overlap":
                lose(arena)
                delay(arena)
            else:
                arena.kill(["replica1"])
                arena.wait_for(arena.rounds() + 2, 30)
                newcomer = arena.add()
                arena.wait_until(newcomer, 30)
            arena.finish(arena.rounds() + 3, 40)
            lines, events, codes = list(arena.lines()), arena.events, arena.codes
        assert not any(codes.values()), codes
        assert not verdict.unequal_rounds(lines)
        assert max(verdict.lost(lines, events).values()) <= 1, verdict.by_kind(lines, events)
        healed = verdict.healing(lines)
        assert healed
        assert max(healed.values()) <= 2, healed
        (loss,) = verdict.losses(lines)
        print(
            f"{name}: {len(events)} events, healed after {sorted(healed.values())} rounds, loss {loss:.3f}, {time.time() - begun:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), "native" in sys.argv[2:])
