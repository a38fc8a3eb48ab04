"""Advice tried against the truth: for each link, number of hosts and model, what is recommended,
and what is really fastest.

    python benchmarks/advice                  # all cells, more than an hour; goes on where it was interrupted
    python benchmarks/advice --fresh          # from the beginning
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "network")]
from lab import PORT, Lab, obstacle  # noqa: E402
from measuring import save, write_part  # noqa: E402

from advice.delayed import DelayedLab, delay_obstacle  # noqa: E402
from advice.models import COMPUTING, MODELS  # noqa: E402
from advice.regret import (  # noqa: E402
    FAST,
    answer_at,
    answers,
    fastest_at,
    limits_of,
    regrets,
    same_in_both,
    steady,
    to_fastest,
)

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
#: A step that was predicted so well counts as predicted.
CLOSE = 0.25


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


def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often the advice was right, where both rounds took the same time."""
    given = list(answers(rows))
    certain = [to_fastest(row, loss) for row, loss in given if steady(row, loss)]
    predictions = [method["predicted_ms"] / method["measured_ms"] for method in measured(rows)]
    subsets = {
        "all models": [row for row in rows if row["ranks"] == 1],
        "models that compute": [
            row for row in rows if row["ranks"] == 1 and row["model"] in COMPUTING
        ],
        "hosts of several ranks": [row for row in rows if row["ranks"] > 1],
    }
    return {
        "cells": len(rows),
        "answers": len(certain),
        "unsteady": len(given) - len(certain),
        "recommended_is_fast": sum(ratio <= FAST for ratio in certain),
        "predictions": len(predictions),
        "predictions_close": sum(1 - CLOSE <= ratio <= 1 + CLOSE for ratio in predictions),
        "regret": {
            which: [
                regrets(of, loss)
                for loss in limits_of(rows)
                if (of := [row for row in each if steady(row, loss)])
            ]
            for which, each in subsets.items()
        },
    }


def measured(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The methods of all cells whose two rounds took the same time."""
    for row in rows:
        same = same_in_both(row)
        yield from (method for method in row["methods"] if method["algorithm"] in same)


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['hosts']} × {row['ranks']}  {row['link']:>14}  {row['model']:<16}  alone {row['compute_ms']:7.0f} ms",
        flush=True,
    )
    for loss in limits_of([row]):
        print(
            f"  {within(loss)}: take {answer_at(row, loss)['recommended']}, fastest {fastest_at(row, loss)},"
            f" {to_fastest(row, loss):.2f} of it{'' if steady(row, loss) else ', not steady'}",
            flush=True,
        )
    for m in row["methods"]:
        rounds = " and ".join(f"{ms:.0f}" for ms in m["rounds_ms"])
        print(
            f"    {m['algorithm']:<76}  predicted {m['predicted_ms']:8.0f}  measured {m['measured_ms']:8.0f} ms ({rounds})"
            f"  (compress {m['compression_ms']:.0f}, wait {m['exposed_ms']:.0f}, hidden {m['hidden_ms']:.0f})",
            flush=True,
        )


def short(algorithm: str) -> str:
    """For a narrow table."""
    code = re.fullmatch(r"WireDtype\(AllReduce\(\), '(\w+)'\)", algorithm)
    return algorithm if algorithm == "plain" else f"`{code[1]}`" if code else f"`{algorithm}`"


def within(loss: float | None) -> str:
    return "any loss" if loss is None else f"within {100 * loss:g} %"


def place(row: dict[str, Any]) -> str:
    """A cell without its model."""
    ranks = f" × {row['ranks']}" if row["ranks"] > 1 else ""
    return f"{row['hosts']}{ranks}, {row['link'].replace('@', ', ')}"


def percent(regret: dict[str, float]) -> str:
    return f"{regret['mean']:.1%}, {regret['worst']:.0%}"


def verdict(row: dict[str, Any], loss: float | None) -> str:
    """What was recommended in a cell, its step, and what was faster."""
    by_name = {m["algorithm"]: m for m in row["methods"]}
    chosen, fastest = answer_at(row, loss)["recommended"], fastest_at(row, loss)
    times = f"{by_name[chosen]['predicted_ms']:,.0f} / {by_name[chosen]['measured_ms']:,.0f} ms"
    said = f"{short(chosen)}: {times}"
    if chosen != fastest:
        said += f"; {short(fastest)} {by_name[fastest]['measured_ms']:,.0f} ms"
    if not steady(row, loss):
        return f"{said}; not steady"
    ratio = to_fastest(row, loss)
    return said if ratio <= FAST else f"{said}: **missed, {ratio:.2f}×**"


def page(result: dict[str, Any]) -> str:
    """The tables."""
    found, rows = result["found"], result["rows"]
    limits = limits_of(rows)
    lines = [
        f"Of {found['cells']} cells with {len(limits)} limits of the loss each, {found['answers']} answers count: in the other {found['unsteady']} the second round took "
        "another time, by more than a tenth, with the recommended or with the fastest method, and not with all. "
        f"The recommended method was the fastest that is allowed, or within 10 % of it, in **{found['recommended_is_fast']} of {found['answers']}**; of "
        f"{found['predictions']} steps that took the same time in both rounds **{found['predictions_close']}** were predicted within 25 %.",
        "",
        "How much longer a step takes than with the fastest method that is allowed, on average and in the worst cell:",
        "",
        "| cells | loss | advice | best constant answer, known afterwards | uncompressed averages |",
        "|---|---|---|---|---|",
        *(
            f"| {each['cells']}: {which} | {within(each['loss'])} | {percent(each['advice'])} "
            f"| {short(each['constant']['answer'])}: {percent(each['constant'])} | {percent(each['plain'])} |"
            for which, several in found["regret"].items()
            for each in several
        ),
        "",
        "What is recommended, its step predicted / measured, and what was faster:",
        "",
        f"| hosts × ranks, link | model | plain | {' | '.join(map(within, limits))} |",
        f"|---|---|---|{'---|' * len(limits)}",
    ]
    for row in rows:
        plain = next(m["measured_ms"] for m in row["methods"] if m["algorithm"] == "plain")
        said = [verdict(row, loss) for loss in limits]
        shown = ["the same" if i and said[i] == said[i - 1] else said[i] for i in range(len(said))]
        lines.append(f"| {place(row)} | {row['model']} | {plain:,.0f} ms | {' | '.join(shown)} |")
    wrong = [
        f"| {place(row)} | {row['model']} | {short(m['algorithm'])} | {m['predicted_ms']:,.0f} / {m['measured_ms']:,.0f} ms |"
        for row in rows
        for m in measured([row])
        if not 1 - CLOSE <= m["predicted_ms"] / m["measured_ms"] <= 1 + CLOSE
    ]
    if wrong:
        lines += [
            "",
            "Predicted wrong by more than 25 %:",
            "",
            "| hosts × ranks, link | model | method | predicted / measured |",
            "|---|---|---|---|",
            *wrong,
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
            have = {
                row["model"] for row in known if (row["hosts"], row["ranks"], row["link"]) == cell
            }
            models = [name for name in models_of(ranks, link, args) if name not in have]
            print(
                f"[{number + 1}/{len(todo)}, {time.perf_counter() - began:.0f} s] {hosts} hosts × {ranks}, {link}: {', '.join(models) or 'known'}",
                flush=True,
            )
            if not models:
                continue
            rows = launch(*cell, models, Path(calibrations))
            for row in rows:
                show(row)
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
