"""Advice tried against the truth: for each link, number of hosts and model, what is recommended,
and what is really fastest.

    python benchmarks/advice                  # all cells, about 20 minutes; goes on where it was interrupted
    python benchmarks/advice --fresh          # from the beginning
    python benchmarks/advice --again          # each cell once more, beside its first run
    python benchmarks/advice --hosts 2 --rates 1gbit --models "MLP, long steps" --output /tmp/a.json --page ""

Linux, as root: hosts are network namespaces of this machine. Links with a latency need a C compiler
and /dev/net/tun too; without them those cells are left out, and named. Writes
benchmarks/results/advice.json after each launch, and the tables of docs/evidence.md at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "network")]
from lab import PORT, Lab, obstacle  # noqa: E402
from measuring import save, write_part  # noqa: E402

from advice.delayed import DelayedLab, delay_obstacle  # noqa: E402
from advice.models import COMPUTING, MODELS  # noqa: E402
from advice.regret import regrets  # noqa: E402

RATES = ["100mbit", "1gbit", "10gbit", "unlimited"]
#: Of two hosts: milliseconds to the other, and the rate in Mbit/s.
DELAYS = ["1ms@1000mbit", "10ms@1000mbit"]
#: Hosts of several ranks, which share a link, and the links of those cells: on faster ones ranks
#: that share a core wait for each other, and for no message.
NODES, LINKS_OF_NODES = ["2x2", "2x4"], ["100mbit", "1gbit"]
#: Their models, which hardly compute.
MODELS_OF_NODES = ["GPT, 25 million", "MLP, long steps"]
#: The cells, which were fixed before any was measured: of models that hardly compute all links; of
#: those that compute, these.
LINKS_THAT_COMPUTE = ["100mbit", "1gbit", "10gbit", "10ms@1000mbit"]
CELLS: dict[str, list[str]] = {
    model: LINKS_THAT_COMPUTE if model in COMPUTING else [*RATES, *DELAYS] for model in MODELS
}
#: A step that was predicted so well counts as predicted; a method within so much of the fastest as
#: the fastest.
CLOSE, FAST = 0.25, 1.10


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python benchmarks/advice",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument(
        "--rates", nargs="*", default=RATES, help="of the links, as tc has it; or 'unlimited'"
    )
    p.add_argument(
        "--delays", nargs="*", default=DELAYS, help="of links between two hosts: 1ms@1000mbit"
    )
    p.add_argument("--hosts", type=int, nargs="*", default=[2, 4], help="of one rank each")
    p.add_argument("--nodes", nargs="*", default=NODES, help="hosts of several ranks: 2x4")
    p.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    p.add_argument("--fresh", action="store_true", help="measure again what the output has already")
    p.add_argument(
        "--again",
        action="store_true",
        help="measure what the output has a second time; cells whose two runs differ by a tenth do not count",
    )
    p.add_argument("--output", type=Path, default=HERE.parent / "results" / "advice.json")
    p.add_argument(
        "--page",
        default=str(ROOT / "docs" / "evidence.md"),
        help="whose tables are written; '' for none",
    )
    return p.parse_args()


def launch(
    hosts: int, ranks: int, link: str, models: list[str], calibrations: Path
) -> list[dict[str, Any]]:
    """The rows of these models on one link."""
    if "@" in link:
        delay, rate = link.split("@")
        lab: Any = DelayedLab(
            float(delay.removesuffix("ms")) * 1e3, float(rate.removesuffix("mbit"))
        )
    else:
        lab = Lab(hosts, None if link == "unlimited" else link)
    with lab:

        def command(host: int) -> list[str]:
            return [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    f"--nnodes={hosts}",
                    f"--node-rank={host}",
                ),
                *(
                    f"--nproc-per-node={ranks}",
                    f"--master-addr={lab.address(0)}",
                    f"--master-port={PORT}",
                ),
                *(f"--local-addr={lab.address(host)}", str(HERE / "worker.py")),
                *("--calibrations", str(calibrations), "--models", *models),
            ]

        rows: list[dict[str, Any]] = json.loads(
            lab.run(command, timeout=1800)[0].strip().splitlines()[-1]
        )
    return [{"hosts": hosts, "ranks": ranks, "link": link, **row} for row in rows]


def cells(args: argparse.Namespace) -> list[tuple[int, int, str]]:
    """Numbers of hosts, of ranks on each, and links, those first that take least time: they also
    find out what methods cost."""
    found = [(hosts, 1, rate) for hosts in args.hosts for rate in reversed(args.rates)]
    for each in args.nodes:
        hosts, ranks = map(int, each.split("x"))
        found += [(hosts, ranks, rate) for rate in reversed(args.rates) if rate in LINKS_OF_NODES]
    why_not = delay_obstacle()
    if args.delays and 2 in args.hosts and why_not:
        print(f"left out: {', '.join(args.delays)}: {why_not}", flush=True)
    elif 2 in args.hosts:
        found += [(2, 1, delay) for delay in args.delays]
    return sorted(found, key=lambda cell: (cell[1], cell[0], cell[2] == "100mbit"))


def models_of(ranks: int, link: str, args: argparse.Namespace) -> list[str]:
    """Those of a cell; links that were asked for by name, beyond all tables, are anybody's."""
    asked = {*args.rates, *args.delays} - {*RATES, *DELAYS}
    if ranks > 1:
        return [model for model in args.models if model in MODELS_OF_NODES]
    return [model for model in args.models if link in CELLS[model] or link in asked]


def steady(row: dict[str, Any]) -> bool:
    """Whether a second run of a cell, if there was one, took the time of the first, with the method
    that was recommended and with the fastest."""
    first = {m["algorithm"]: m["measured_ms"] for m in row["methods"]}
    pairs = [
        (first[name], row["again_ms"][name])
        for name in (row["recommended"], row["fastest"])
        if "again_ms" in row
    ]
    return all(max(pair) <= FAST * min(pair) for pair in pairs)


def counted(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """How often the advice was right, in cells that are steady."""
    rows = [row for row in measured if steady(row)]
    predictions = [method["ratio"] for row in rows for method in row["methods"]]
    return {
        "cells": len(rows),
        "unsteady": len(measured) - len(rows),
        "recommended_is_fast": sum(row["to_fastest"] <= FAST for row in rows),
        "predictions": len(predictions),
        "predictions_close": sum(1 - CLOSE <= ratio <= 1 + CLOSE for ratio in predictions),
        "regret": {
            which: regrets(of)
            for which, of in (
                ("all models", [row for row in rows if row["ranks"] == 1]),
                (
                    "models that compute",
                    [row for row in rows if row["ranks"] == 1 and row["model"] in COMPUTING],
                ),
                ("hosts of several ranks", [row for row in rows if row["ranks"] > 1]),
            )
            if of
        },
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['hosts']} × {row['ranks']}  {row['link']:>14}  {row['model']:<16}  alone {row['compute_ms']:7.0f} ms  take {row['recommended']}"
        f"  fastest {row['fastest']}  {row['to_fastest']:.2f} of it",
        flush=True,
    )
    for m in row["methods"]:
        print(
            f"    {m['algorithm']:<52}  predicted {m['predicted_ms']:8.0f}  measured {m['measured_ms']:8.0f} ms  {m['ratio']:5.2f}"
            f"  (compress {m['compression_ms']:.0f}, wait {m['exposed_ms']:.0f}, hidden {m['hidden_ms']:.0f})",
            flush=True,
        )


def short(algorithm: str) -> str:
    """For a narrow table."""
    code = re.fullmatch(r"WireDtype\(AllReduce\(\), '(\w+)'\)", algorithm)
    return algorithm if algorithm == "plain" else f"`{code[1]}`" if code else f"`{algorithm}`"


def place(row: dict[str, Any]) -> str:
    """A cell without its model."""
    ranks = f" × {row['ranks']}" if row["ranks"] > 1 else ""
    return f"{row['hosts']}{ranks}, {row['link'].replace('@', ', ')}"


def percent(regret: dict[str, float]) -> str:
    return f"{regret['mean']:.0%}, {regret['worst']:.0%}"


def page(result: dict[str, Any]) -> str:
    """The tables."""
    found = result["found"]
    lines = [
        f"The recommended method was the fastest, or within 10 % of it, in **{found['recommended_is_fast']} of {found['cells']}** cells; of "
        f"{found['predictions']} predicted steps **{found['predictions_close']}** were within 25 % of the measured ones. Not counted: "
        f"{found['unsteady']} cells whose second run took another time, by more than a tenth, with the recommended or with the fastest method.",
        "",
        "How much longer a step takes than with the fastest method, on average and in the worst cell:",
        "",
        "| cells | advice | best constant answer, known afterwards | uncompressed averages |",
        "|---|---|---|---|",
        *(
            f"| {each['cells']}: {which} | {percent(each['advice'])} | {short(each['constant']['answer'])}: {percent(each['constant'])} "
            f"| {percent(each['plain'])} |"
            for which, each in found["regret"].items()
        ),
        "",
        "| hosts × ranks, link | model | plain | recommended: predicted / measured | fastest | |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        by_name = {m["algorithm"]: m for m in row["methods"]}
        chosen, fastest = by_name[row["recommended"]], by_name[row["fastest"]]
        verdict = "" if row["to_fastest"] <= FAST else f"**missed: {row['to_fastest']:.2f}×**"
        if not steady(row):
            again = (f"{row['again_ms'][row[which]]:,.0f}" for which in ("recommended", "fastest"))
            verdict = f"not steady: {' and '.join(again)} ms in a second run"
        lines.append(
            f"| {place(row)} | {row['model']} | {by_name['plain']['measured_ms']:,.0f} ms "
            f"| {short(row['recommended'])}: {chosen['predicted_ms']:,.0f} / {chosen['measured_ms']:,.0f} ms "
            f"| {short(row['fastest'])}, {fastest['measured_ms']:,.0f} ms | {verdict} |"
        )
    wrong = [
        (row, m)
        for row in result["rows"]
        if steady(row)
        for m in row["methods"]
        if not 1 - CLOSE <= m["ratio"] <= 1 + CLOSE
    ]
    if wrong:
        lines += [
            "",
            "Predicted wrong by more than 25 %:",
            "",
            "| hosts × ranks, link | model | method | predicted / measured |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {place(row)} | {row['model']} | {short(m['algorithm'])} "
            f"| {m['predicted_ms']:,.0f} / {m['measured_ms']:,.0f} ms |"
            for row, m in wrong
        ]
    return "\n".join(lines)


def main() -> None:
    args = parse()
    if why_not := obstacle():
        raise SystemExit(f"no hosts: {why_not}")
    known = (
        json.loads(args.output.read_text())["rows"]
        if args.output.exists() and not args.fresh
        else []
    )
    todo = cells(args)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as calibrations:
        for number, (hosts, ranks, link) in enumerate(todo):
            cell = hosts, ranks, link
            first = {
                row["model"]: row
                for row in known
                if (row["hosts"], row["ranks"], row["link"]) == cell
            }
            models = [
                name
                for name in models_of(ranks, link, args)
                if (name in first) == args.again and "again_ms" not in first.get(name, {})
            ]
            print(
                f"[{number + 1}/{len(todo)}, {time.perf_counter() - began:.0f} s] {hosts} hosts × {ranks}, {link}: {', '.join(models) or 'known'}",
                flush=True,
            )
            if not models:
                continue
            rows = launch(*cell, models, Path(calibrations))
            for row in rows:
                show(row)
                if args.again:
                    times = {m["algorithm"]: m["measured_ms"] for m in row["methods"]}
                    first[row["model"]]["again_ms"] = times
                else:
                    known.append(row)
            save(result_of(known), args.output)
    result = result_of(known)
    save(result, args.output)
    print(json.dumps(result["found"]))
    if args.page:
        write_part(Path(args.page), "advice", page(result))


def result_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    ordered = sorted(
        rows,
        key=lambda row: (
            row["ranks"],
            row["hosts"],
            "@" in row["link"],
            RATES.index(row["link"]) if row["link"] in RATES else 9,
            row["model"],
        ),
    )
    return {
        "command": "python benchmarks/advice",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "found": counted(ordered),
        "rows": ordered,
    }


if __name__ == "__main__":
    main()
