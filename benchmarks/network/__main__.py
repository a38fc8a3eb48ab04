"""Step time over real (shaped) links: two or four hosts in network namespaces, torch under
`torchrun` and JAX under `jax.distributed`.

    python benchmarks/network                          # writes benchmarks/results/network.json and docs/network.png
    python benchmarks/network --hosts 2 --per-host 2   # two levels, in benchmarks/results/network-two-levels.json
    python benchmarks/network --layers 1 --vocabulary 200 --rates 100mbit --hosts 2 --repeats 1 --training-steps 0 --output /tmp/n.json --picture ""

Linux, as root; it makes its own hosts and takes them away again. Elsewhere it says so and prints
what the α-β model predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab import PORT, Lab, obstacle
from subjects import ALONE, SMALL_GROUPS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results"
sys.path.insert(0, str(HERE.parent))
from measuring import save  # noqa: E402
from shapes import elements, gpt  # noqa: E402

UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}
#: Seconds that a message takes to the next host when the link is idle, for predictions: a bridge on
#: one machine.
LATENCY = 1e-4
TRAININGS = {
    "plain": ["--compress=none"],
    "PowerSGD, rank 4": ["--rank=4"],
    "PowerSGD, rank 4, half-step": ["--rank=4", "--half-step"],
}


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python benchmarks/network",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--layers", type=int, default=6, help="of the GPT; 6 make 25 million parameters")
    p.add_argument("--vocabulary", type=int, default=12_000, help="of the GPT")
    p.add_argument("--rank", type=int, default=4, help="of PowerSGD")
    p.add_argument(
        "--rates",
        nargs="+",
        default=["100mbit", "1gbit", "10gbit", "unlimited"],
        help="of the links, as tc has it; or 'unlimited'",
    )
    p.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="numbers of hosts")
    p.add_argument(
        "--per-host",
        type=int,
        default=1,
        help="ranks on each host, on its loopback; with more than one, two levels of torch's ranks are measured beside one",
    )
    p.add_argument("--backends", nargs="+", default=["torch", "jax"], choices=["torch", "jax"])
    p.add_argument("--repeats", type=int, default=5, help="timed steps of each subject")
    p.add_argument(
        "--training-steps", type=int, default=60, help="of the trainings at 100 Mbit/s; 0: none"
    )
    p.add_argument(
        "--output", type=Path, help="benchmarks/results/network.json, or network-two-levels.json"
    )
    p.add_argument("--picture", default=str(ROOT / "docs" / "network.png"), help="'' draws none")
    args = p.parse_args()
    args.output = args.output or RESULTS / (
        "network.json" if args.per_host == 1 else "network-two-levels.json"
    )
    return args


def bytes_per_second(rate: str) -> float:
    if rate == "unlimited":
        return sys.float_info.max  # `Plan.seconds` refuses infinity
    if rate[-4:] not in UNITS or not rate[:-4].replace(".", "", 1).isdigit():
        raise SystemExit(f"--rates {rate}: give it as 100mbit or 1gbit, or 'unlimited'")
    return float(rate[:-4]) * UNITS[rate[-4:]]


def torchrun(lab: Lab, host: int, *script: str, ranks: int = 1) -> list[str]:
    return [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={lab.hosts}",
            f"--node-rank={host}",
        ),
        *(f"--nproc-per-node={ranks}", f"--master-addr={lab.address(0)}", f"--master-port={PORT}"),
        *(f"--local-addr={lab.address(host)}", *script),
    ]


def steps(args: argparse.Namespace, backend: str, hosts: int, rate: str) -> list[dict[str, Any]]:
    """The rows of one launch."""
    options = [
        *(
            "--layers",
            str(args.layers),
            "--vocabulary",
            str(args.vocabulary),
            "--rank",
            str(args.rank),
        ),
        *("--repeats", str(args.repeats), "--rate", str(bytes_per_second(rate))),
    ]
    with Lab(hosts, None if rate == "unlimited" else rate) as lab:

        def command(host: int) -> list[str]:
            if args.per_host > 1:
                return torchrun(
                    lab, host, str(HERE / "worker_two_levels.py"), *options, ranks=args.per_host
                )
            if backend == "torch":
                return torchrun(lab, host, str(HERE / "worker_torch.py"), *options)
            where = ["--host", str(host), "--hosts", str(hosts)]
            return [sys.executable, str(HERE / "worker_jax.py"), *options, *where]

        rows: list[dict[str, Any]] = json.loads(
            lab.run(command, timeout=1800)[0].strip().splitlines()[-1]
        )
    return [{"backend": backend, "hosts": hosts, "rate": rate, **row} for row in rows]


def trainings(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Loss against time of real trainings on two hosts at 100 Mbit/s."""
    curves = {}
    for name, flags in TRAININGS.items():
        with Lab(2, "100mbit") as lab, tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / "metrics.jsonl"
            options = [
                *flags,
                f"--steps={args.training_steps}",
                "--eval-every=10",
                f"--metrics={metrics}",
            ]
            command = [str(ROOT / "examples" / "train_torch.py"), *options, "--no-progress"]
            lab.run(lambda host: torchrun(lab, host, *command), timeout=1800)  # noqa: B023
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        curves[name] = [
            {"seconds": line["seconds"], "val_loss": line["val_loss"]}
            for line in lines
            if "val_loss" in line
        ]
        print(f"{name}: {args.training_steps} steps in {lines[-1]['seconds']:.0f} s", flush=True)
    return curves


def show(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        if "cpu_ms" in r:
            print(
                f"{r['hosts']} hosts  {r['rate']:>9}  {r['subject']:<32}  {r['cpu_ms']:9.1f} ms of a processor",
                flush=True,
            )
            continue
        planned = r["planned_wire_bytes"]
        to_plan = f"{r['wire_bytes'] / planned:5.3f} of the plan" if planned else "none planned"
        print(
            f"{r['backend']:<5}  {r['hosts']} hosts  {r['rate']:>9}  {r['subject']:<32}  {r['step_ms']:9.1f} ms"
            f"  {r['ratio_to_plain']:6.3f} of plain  wire {r['wire_bytes'] / 1e6:8.2f} MB ({to_plan})"
            f"  at least {r['wire_ms']:8.1f} ms on the wire",
            flush=True,
        )


def goals(rows: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """What the library promises of torch on two hosts, beside what was measured, rate by rate; at
    100 Mbit/s with the groups that such a link wants."""
    found = []
    name = f"PowerSGD, rank {rank}"
    for rate in dict.fromkeys(r["rate"] for r in rows):
        of = {
            r["subject"]: r
            for r in rows
            if (r["backend"], r["hosts"], r["rate"]) == ("torch", 2, rate)
        }
        if name not in of:
            continue
        whole, half, theirs = (
            of[name],
            of[f"{name}, half-step"],
            of[f"torch's powerSGD_hook, rank {rank}"],
        )
        full = of[f"{name}, {SMALL_GROUPS}"] if rate == "100mbit" else whole
        floor = max(of[f"{name}, {ALONE}"]["step_ms"], full["wire_ms"])
        measured = [
            (
                "step, to torch's hook",
                full["step_ms"] / theirs["step_ms"],
                {"1gbit": 0.35}.get(rate, 0.55),
            ),
            (
                "step, to DDP",
                full["ratio_to_plain"],
                {"100mbit": 1 / 25, "unlimited": 0.9}.get(rate),
            ),
            (
                "step, to the larger of computing and wire",
                full["step_ms"] / floor,
                1.15 if rate == "100mbit" else None,
            ),
            ("bytes, to the plan", full["wire_bytes"] / full["planned_wire_bytes"], 1.03),
            ("half-step: bytes, to the full step", half["wire_bytes"] / whole["wire_bytes"], 0.65),
            (
                "half-step: collectives, to the full step",
                half["collectives"] / whole["collectives"],
                0.5,
            ),
            (
                "int8: step, to DDP",
                of["int8"]["ratio_to_plain"],
                {"1gbit": 0.35, "unlimited": 1.2}.get(rate),
            ),
            ("int4: step, to DDP", of["int4"]["ratio_to_plain"], {"unlimited": 1.2}.get(rate)),
            (
                "int4: step, to int8",
                of["int4"]["step_ms"] / of["int8"]["step_ms"],
                {"1gbit": 1.0}.get(rate),
            ),
            (
                "int8: step, to the bf16 hook",
                of["int8"]["step_ms"] / of["bf16_compress_hook"]["step_ms"],
                {"1gbit": 1.0}.get(rate),
            ),
            ("int8: bytes, to DDP", of["int8"]["wire_bytes"] / of["DDP"]["wire_bytes"], 0.27),
            ("int4: bytes, to DDP", of["int4"]["wire_bytes"] / of["DDP"]["wire_bytes"], 0.15),
        ]
        found += [
            {"rate": rate, "what": what, "measured": value, "goal": goal}
            for what, value, goal in measured
        ]
    return found


def goals_of_two_levels(rows: list[dict[str, Any]], per_host: int) -> list[dict[str, Any]]:
    """What two levels promise on two hosts, beside what was measured."""
    found = []
    for rate in dict.fromkeys(r["rate"] for r in rows):
        of = {r["subject"]: r for r in rows if (r["hosts"], r["rate"]) == (2, rate)}
        if not of:
            continue
        plain, flat, two = of["DDP"], of["one level"], of["two levels"]
        slow = rate == "100mbit"
        measured = [
            (
                "bytes between hosts, to the plan",
                two["wire_bytes"] / two["planned_wire_bytes"],
                1.03,
            ),
            (
                "payload of a replica, to one level's",
                two["payload"] / flat["payload"],
                1.03 / per_host,
            ),
            ("step, to one level's", two["step_ms"] / flat["step_ms"], None),
            ("step, to DDP's", two["step_ms"] / plain["step_ms"], 1 / 20 if slow else None),
            ("step, to what the plan predicts", two["step_ms"] / two["predicted_ms"], None),
        ]
        found += [
            {"rate": rate, "what": what, "measured": value, "goal": goal}
            for what, value, goal in measured
        ]
    return found


def predict(args: argparse.Namespace, reason: str) -> None:
    """What the α-β model says, where there can be no hosts."""
    from gradwire import Algorithm, AllReduce, PowerSGD, plan

    print(
        f"No hosts: {reason}. Communication time of a step by the α-β model (α = {LATENCY * 1e3:g} ms):"
    )
    shapes = gpt(layers=args.layers, vocabulary=args.vocabulary)
    algorithms: dict[str, Algorithm] = {
        "plain": AllReduce(),
        f"PowerSGD, rank {args.rank}": PowerSGD(args.rank),
        f"PowerSGD, rank {args.rank}, half-step": PowerSGD(args.rank, half_step=True),
    }
    for hosts in args.hosts:
        for rate in args.rates:
            for name, algorithm in algorithms.items():
                seconds = plan(shapes, algorithm).seconds(hosts, LATENCY, bytes_per_second(rate))
                print(f"{hosts} hosts  {rate:>9}  {name:<28}  {seconds * 1e3:9.1f} ms")


def draw(curves: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Loss against time; steps are in tables."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 3.6))
    for name, curve in curves.items():
        axis.plot(
            [c["seconds"] for c in curve],
            [c["val_loss"] for c in curve],
            "o-",
            markersize=4,
            label=name,
        )
    axis.set_title("training at 100 Mbit/s, torch, 2 hosts")
    axis.set_xlabel("seconds")
    axis.set_ylabel("validation loss")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    args = parse()
    for rate in args.rates:
        bytes_per_second(rate)
    reason = obstacle()
    if reason:
        predict(args, reason)
        return
    rows: list[dict[str, Any]] = []
    for backend in args.backends if args.per_host == 1 else ["torch"]:
        for hosts in args.hosts:
            for rate in args.rates:
                found = steps(args, backend, hosts, rate)
                show(found)
                rows += found
    promised = (
        goals(rows, args.rank) if args.per_host == 1 else goals_of_two_levels(rows, args.per_host)
    )
    for g in promised:
        goal = f"at most {g['goal']:.3f}" if g["goal"] else ""
        print(f"2 hosts  {g['rate']:>9}  {g['what']:<42}  {g['measured']:6.3f}  {goal}", flush=True)
    curves = trainings(args) if args.training_steps and args.per_host == 1 else {}
    result = {
        "command": " ".join(["python benchmarks/network", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}, jax {version('jax')}",
        "parameters": elements(gpt(args.layers, vocabulary=args.vocabulary)),
        "repeats": args.repeats,
        "ranks_per_host": args.per_host,
        "rows": rows,
        "goals": promised,
        "trainings_at_100_mbit": curves,
    }
    save(result, args.output)
    if args.picture and curves:
        draw(curves, Path(args.picture))


if __name__ == "__main__":
    main()
