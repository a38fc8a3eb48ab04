"""Ten minutes of chaos: `make chaos`. Replicas are killed, added, frozen and slowed down, and the
results go to benchmarks/results/chaos.json and .md.

    python -m tests.chaos --minutes 10
    python -m tests.chaos --auto             # of `Auto` alone, in the same files
    python -m tests.chaos --short FOLDER     # every kind of disturbance once, in half a minute; with --native by torch's own groups

A real lighthouse and four replicas over Gloo train a small model by DiLoCo in two fragments whose
compressed messages overlap with training. Then the same number of rounds is trained without chaos,
with five seeds. After that four ranks under torchrun choose their method while they train, and two
processes in JAX (`choosing.py`).
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from tests.chaos import attempt, choosing, verdict
from tests.chaos.arena import Arena

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WHAT = "diloco(12, fragments=2, overlap=3, compressor=PowerSGD(4))"
REPLICAS = 4
#: Seconds between two events, of which every second one is rarer than a kill.
BETWEEN = 20.0
RARE = ("two at once", "in flight", "freeze", "slow")


def disturb(arena: Arena, draw: random.Random, kind: str, seconds: float) -> None:
    """One event, and whoever was lost by it is replaced. One is frozen, or slow, for so long. All
    have the state before, which would be lost with the only ones that have it."""
    for name in arena.alive:
        arena.wait_until(name, 60)
    name = draw.choice(sorted(arena.alive))
    if kind == "freeze":
        arena.freeze(name, seconds / 2)
        return
    if kind == "in flight":
        arena.kill_in_flight(name)
    else:
        others = [draw.choice(sorted(arena.alive.keys() - {name}))] if kind == "two at once" else []
        arena.kill(name, *others)
        for _ in others:
            time.sleep(draw.uniform(0, seconds / 7))
            arena.add()
    if kind == "slow":
        slow = arena.add(slower=5.0)
        time.sleep(seconds)
        arena.kill(slow)
    time.sleep(draw.uniform(0, seconds / 7))
    arena.add()


def chaos(folder: Path, minutes: float, pace: float) -> dict:
    draw = random.Random(0)
    with Arena(folder, WHAT, 0, REPLICAS, int(60 * minutes) + 300, pace) as arena:
        arena.wait_for(5, 120)
        end, number = time.time() + 60 * minutes, 0
        while time.time() < end:
            began = time.time()
            disturb(arena, draw, RARE[number // 2 % 4] if number % 2 else "kill", BETWEEN)
            number += 1
            arena.wait_for(arena.rounds() + 2, 60)
            time.sleep(max(0.0, BETWEEN - (time.time() - began)))
        arena.finish(rounds := arena.rounds() + 4, 90)
        lines = list(arena.lines())
    return {
        "what": WHAT,
        "minutes": minutes,
        "rounds": rounds,
        "replicas started": len({line["name"] for line in lines}),
        "exit codes of those that lived to the end": sorted(set(arena.codes.values())),
        "rounds after which live replicas differed": verdict.unequal_rounds(lines),
        "longest pause between rounds, seconds": round(verdict.longest_pause(lines), 2),
        "events": verdict.by_kind(lines, arena.events),
        "loss": sorted(verdict.losses(lines)),
    }


def undisturbed(folder: Path, seed: int, rounds: int) -> float:
    with Arena(folder, WHAT, seed, REPLICAS, 900, 0.0) as arena:
        arena.finish(rounds, 800)
        (loss,) = verdict.losses(list(arena.lines()))
    return loss


def short(folder: Path, native: bool) -> None:
    """Of a schedule in fragments whose messages overlap, and of gradients in each step. Raises
    AssertionError for what must not be."""
    overlap = "diloco(6, fragments=2, overlap=2, compressor=PowerSGD(2))"
    for what, replicas, kinds in ((overlap, 4, RARE), ("PowerSGD(2, start_step=5)", 3, ("kill",))):
        with Arena(folder / str(replicas), what, 0, replicas, 120, 0.03, native) as arena:
            arena.wait_for(4, 60)
            for kind in kinds:
                disturb(arena, random.Random(0), kind, 11.0)
                newest = arena.events[-1][-1][0]
                arena.wait_for(arena.rounds() + 3, 40)
            arena.wait_until(newest, 30)
            arena.finish(arena.rounds() + 3, 40)
            lines, events = list(arena.lines()), arena.events
        assert not any(arena.codes.values()), arena.codes
        assert not verdict.unequal_rounds(lines)
        assert max(verdict.lost(lines, events).values()) <= 1, verdict.by_kind(lines, events)
        healed = verdict.healing(lines)
        asked = {line["name"] for line in lines if line["event"] == "asks"}
        assert {newest} <= healed.keys() <= asked, healed
        # One or two on a quiet machine. Where a newcomer waits for a processor, the others go on.
        assert max(healed.values()) <= 6, healed
        (loss,) = verdict.losses(lines)
        print(
            f"{what}: {len(events)} events, healed after {sorted(healed.values())} rounds, loss {loss:.3f}",
            flush=True,
        )


def events_table(rows: dict) -> str:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    events = "\n".join(
        f"| {k} | {' | '.join(str(row.get(c, '–')) for c in columns)} |" for k, row in rows.items()
    )
    return f"| event | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n{events}"


def table(found: dict) -> str:
    rows, loss, calm = found["events"], found["loss"], found["losses undisturbed"]
    return f"""# Ten minutes of chaos

Made by `make chaos`. {found["what"]} on {REPLICAS} replicas, each a process, over Gloo and a real lighthouse: {found["rounds"]} rounds in
{found["minutes"]:g} minutes, and {found["replicas started"]} replicas started.

{events_table(rows)}

- Rounds after which live replicas held different bits of outer parameters: {len(found["rounds after which live replicas differed"])}.
- The longest pause between two rounds: {found["longest pause between rounds, seconds"]} s. A replica that says nothing for 2 s is given up, a message after 5 s.
- Loss after {found["rounds"]} rounds: {loss[0]:.6f}; undisturbed with seeds 0 to {len(calm) - 1}: {", ".join(f"{x:.6f}" for x in calm)}. The
  difference is {found["standard errors from undisturbed"]:+.2f} standard errors.

## Trainings that choose their method

Under torchrun, which starts all ranks again when one is lost. There is a checkpoint after each {attempt.BETWEEN} steps.

{"".join(auto_table(backend, found["auto"][backend]) for backend in choosing.SCRIPTS)}"""


def auto_table(backend: str, found: dict) -> str:
    name, ranks = {
        "torch": ('torch, `Auto(loss="5%")`', "ranks over Gloo"),
        "jax": ('JAX, `AutoStep(Auto(loss="5%"), …)`', "processes with one device each"),
    }[backend]
    return f"""### {name}

{found["steps"]} steps on {choosing.SCRIPTS[backend][1]} {ranks}. The methods were {", ".join(f"`{name}`" for name in found["methods"])}, in turn {found["changes of the method"] + 1} times.

{events_table(found["events"])}

- Steps in which ranks had different methods: {len(found["steps in which ranks had different methods"])}; after which they had different weights: {len(found["steps after which ranks had different weights"])}.
- The weights after each step are, bit for bit, those of a run that nobody disturbed and that has the methods of this one: {"yes" if found["the weights are those of the undisturbed run"] else "no"}.

"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--pace", type=float, default=0.1, help="seconds between two steps, for two cores"
    )
    parser.add_argument("--auto", action="store_true", help="this part alone")
    parser.add_argument("--short", type=Path, metavar="FOLDER")
    parser.add_argument("--native", action="store_true")
    arguments = parser.parse_args()
    if arguments.short:
        short(arguments.short, arguments.native)
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.auto:
            found = json.loads((RESULTS / "chaos.json").read_text())
        else:
            found = chaos(Path(folder) / "chaos", arguments.minutes, arguments.pace)
            print(json.dumps(found, indent=1), flush=True)
            (loss,) = found["loss"]
            calm = [
                undisturbed(Path(folder) / str(seed), seed, found["rounds"])
                for seed in range(arguments.seeds)
            ]
            found["losses undisturbed"] = calm
            found["standard errors from undisturbed"] = round(verdict.deviation(loss, calm), 2)
        count = max(1, round(60 * arguments.minutes / 2 / BETWEEN))
        kinds = [choosing.KINDS[n % len(choosing.KINDS)] for n in range(count)]
        found["auto"] = {
            backend: choosing.disturbed(
                backend, Path(folder) / backend, kinds, BETWEEN / 2, arguments.pace / 4
            )
            for backend in choosing.SCRIPTS
        }
    (RESULTS / "chaos.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "chaos.md").write_text(table(found))
    print(table(found))
    lost, heal = "rounds lost by a survivor, at most", "rounds to heal, at most"
    off = found["standard errors from undisturbed"]
    wrong = {
        "replicas differed": found["rounds after which live replicas differed"],
        "more than one round lost": [k for k, row in found["events"].items() if row[lost] > 1],
        "more than two rounds to heal": [
            k for k, row in found["events"].items() if row.get(heal, 0) > 2
        ],
        "an end by an error": [
            code for code in found["exit codes of those that lived to the end"] if code
        ],
        "another loss": found["loss"] if abs(off) > 2 else [],
        **{
            f"{backend}: {what}": where
            for backend, auto in found["auto"].items()
            for what, where in choosing.wrong(auto).items()
        },
    }
    if wrong := {what: where for what, where in wrong.items() if where}:
        raise SystemExit(f"chaos has found: {wrong}")


if __name__ == "__main__":
    main()
