"""When a schedule takes outer steps, and what of: ten lines of Python about one number for each
fragment."""

from __future__ import annotations

from gradwire import LocalSGD, diloco

RATE, MOMENTUM = 0.7, 0.9


def schedules(period: int, *, votes: bool = False) -> list[LocalSGD]:
    """Of this period, with every number of fragments and every overlap; that each have one vote at
    a time."""
    found = [
        diloco(period, fragments=fragments, overlap=overlap)
        for fragments in range(1, period + 1)
        for overlap in range(period)
        if not votes or overlap < period / fragments
    ]
    return found + [
        diloco(period, eager=True, fragments=f) for f in range(1, 2 if votes else period + 1)
    ]


def drift(step: int, fragment: int) -> float:
    """What the inner optimizer takes from a parameter in a step."""
    return 0.01 * (1 + (7 * step + 3 * fragment) % 5)


def by_hand(local: LocalSGD, steps: int) -> tuple[list[float], list[tuple[int, int]]]:
    """One number for each fragment, of one replica: parameters after so many steps, and after which
    step which fragment's outer step was."""
    count, merge = local.fragments, 0.5 if local.overlap else 0.0
    p, outer, speed, left = [1.0] * count, [1.0] * count, [0.0] * count, [0.0] * count
    taken = []
    for step in range(steps):
        for f in range(count):
            p[f] -= drift(step, f)
            # since it was due for the first time
            since = step + 1 - (f + 1) * local.period // count
            late = since - local.overlap
            for moves, leaves in (
                (late >= 0 and late % local.period == 0, False),
                (False, since % local.period == 0),
            ):
                if leaves and since >= 0:
                    left[f] = outer[f] - p[f]
                if moves or (leaves and since >= 0 and not local.overlap):
                    if moves and not local.overlap:
                        continue  # of what leaves in this very step
                    speed[f] = MOMENTUM * speed[f] + left[f]
                    outer[f] -= RATE * (left[f] + MOMENTUM * speed[f])
                    p[f] = merge * p[f] + (1 - merge) * outer[f]
                    taken.append((step, f))
    return p, taken
