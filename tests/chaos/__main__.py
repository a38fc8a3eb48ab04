"""Ten minutes of chaos: `make chaos`. Replicas are killed, added, frozen and slowed down, and the results go to benchmarks/results/chaos.json and .md.

    python -m tests.chaos --minutes 10

A real lighthouse and four replicas over Gloo train a small model by DiLoCo in two fragments whose compressed messages overlap with training. Then the same number
of rounds is trained without chaos, with five seeds.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # what the first optimizer would import

from tests.chaos import verdict
from tests.chaos.arena import Arena

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WHAT = "diloco(12, fragments=2, overlap=3, compressor=PowerSGD(4))"
REPLICAS = 4
#: Seconds between two events.
BETWEEN = 20.0


def disturb(arena: Arena, draw: random.Random, number: int) -> None:
    """One event, and whoever was lost by it is replaced. Every fifth time something rarer than a kill."""
    kind = ("two at once", "in flight", "freeze", "slow")[number // 2 % 4] if number % 2 else "kill"
    name = draw.choice(sorted(arena.alive))
    if kind == "freeze":
        arena.freeze(name, 10.0)
        return
    if kind == "slow":
        arena.kill([name])
        name = arena.add(slower=5.0)
        time.sleep(BETWEEN)
        arena.kill([name])
    elif kind == "in flight":
        arena.kill_in_flight(name)
    elif kind == "two at once":
        other = draw.choice(sorted(arena.alive.keys() - {name}))
        arena.kill([name, other])
        time.sleep(draw.uniform(0, 3))
        arena.add()
    else:
        arena.kill([name])
    time.sleep(draw.uniform(0, 3))
    arena.add()


def chaos(folder: Path, minutes: float, pace: float) -> tuple[dict, int]:
    draw = random.Random(0)
    with Arena(folder, WHAT, 0, REPLICAS, int(60 * minutes) + 300, pace) as arena:
        arena.wait_for(5, 120)
        end, number = time.time() + 60 * minutes, 0
        while time.time() < end:
            began = time.time()
            disturb(arena, draw, number)
            number += 1
            arena.wait_for(arena.rounds() + 2, 60)
            time.sleep(max(0.0, BETWEEN - (time.time() - began)))
        rounds = arena.rounds() + 4
        arena.finish(rounds, 90)
        lines = list(arena.lines())
    codes = set(arena.codes.values())
    return {
        "minutes": minutes,
        "rounds": rounds,
        "replicas started": len({line["name"] for line in lines}),
        "exit codes of those that lived to the end": sorted(codes),
        "rounds after which live replicas differed": verdict.unequal_rounds(lines),
        "longest pause between rounds, seconds": round(verdict.longest_pause(lines), 2),
        "events": verdict.by_kind(lines, arena.events),
        "loss": sorted(verdict.losses(lines)),
    }, rounds


def undisturbed(folder: Path, seed: int, rounds: int) -> float:
    with Arena(folder, WHAT, seed, REPLICAS, 900, 0.0) as arena:
        arena.finish(rounds, 800)
        (loss,) = verdict.losses(list(arena.lines()))
    return loss


def table(found: dict) -> str:
    rows = found["events"]
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    text = f"""# Ten minutes of chaos

Made by `make chaos`. {found["what"]} on {REPLICAS} replicas, each a process, over Gloo and a real lighthouse: {found["rounds"]} rounds in
{found["minutes"]:g} minutes, and {found["replicas started"]} replicas started.

| event | {" | ".join(columns)} |
|---|{"---|" * len(columns)}
"""
    for kind, row in rows.items():
        text += f"| {kind} | {' | '.join(str(row.get(column, '–')) for column in columns)} |\n"
    loss, calm = found["loss"], found["losses undisturbed"]
    return (
        text
        + f"""
- Rounds after which live replicas held different bits of outer parameters: {len(found["rounds after which live replicas differed"])}.
- The longest pause between two rounds: {found["longest pause between rounds, seconds"]} s. A replica that says nothing for 2 s is given up, a message after 5 s.
- Loss after {found["rounds"]} rounds: {loss[0]:.6f}; undisturbed with seeds 0 to {len(calm) - 1}: {", ".join(f"{x:.6f}" for x in calm)}. The
  difference is {found["standard errors from undisturbed"]:+.2f} standard errors.
"""
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--pace",
        type=float,
        default=0.1,
        help="seconds between two steps, so that messages are rare enough for two cores",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found, rounds = chaos(Path(folder) / "chaos", arguments.minutes, arguments.pace)
        print(json.dumps(found, indent=1), flush=True)
        calm = [undisturbed(Path(folder) / str(seed), seed, rounds) for seed in range(arguments.seeds)]
    found = {"what": WHAT, **found, "losses undisturbed": calm}
    (loss,) = found["loss"]
    found["standard errors from undisturbed"] = round(verdict.deviation(loss, calm), 2)
    (RESULTS / "chaos.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "chaos.md").write_text(table(found))
    print(table(found))
    wrong = {
        "replicas differed": found["rounds after which live replicas differed"],
        "more than one round lost": [
            k for k, row in found["events"].items() if row["rounds lost by a survivor, at most"] > 1
        ],
        "more than two rounds to heal": [
            k for k, row in found["events"].items() if row.get("rounds to heal, at most", 0) > 2
        ],
        "an end by an error": [code for code in found["exit codes of those that lived to the end"] if code],
        "another loss": [] if abs(found["standard errors from undisturbed"]) <= 2 else [loss],
    }
    if wrong := {what: where for what, where in wrong.items() if where}:
        raise SystemExit(f"chaos has found: {wrong}")


if __name__ == "__main__":
    main()
