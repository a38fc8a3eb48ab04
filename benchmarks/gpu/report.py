"""Tables of what was found, and the goals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu.hooks import LARGE
from gpu.screen import table
from gpu.steps import CODED, FEW, REPLAYED

#: Time of the hook beside torch's, at every rank.
RATIO = 0.4
#: Of the bandwidth of a copy, at rank 4 on the large model.
OF_BANDWIDTH = 0.6
#: Of replayed steps: the hook alone, above what its kernels take, in ms, and more for each message;
#: a whole step, above one that sends the same and computes nothing; the hook beside torch's, on the
#: large model at rank 32.
ABOVE_BUSY, A_MESSAGE, ABOVE_MESSAGES, RATIO_REPLAYED = 0.5, 0.05, 3.0, 0.35
Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]


def show(part: str, found: Row) -> None:
    """One part as a table."""
    if "error" in found:
        print(f"{part}: {found['error']}")
    if found["left_out"]:
        print(
            f"{part}: no time was left for {len(found['left_out'])} rows: {'; '.join(found['left_out'])}"
        )
    for row in found["rows"]:
        if "error" in row:
            print(f"{part}, {row['row']}: {row['error']}")
    rows = [row for row in found["rows"] if "error" not in row]
    if rows:
        heads, lines = _TABLES[part](rows)
        table(f"{part} ({found['seconds']} s)", heads, lines)


def _ms(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}"


def _share(x: float | None) -> str:
    return "" if x is None else f"{x:.0%}"


def _steps(rows: list[Row]) -> Table:
    heads = [
        "two ranks on one device, by sockets",
        "step ms",
        "a quarter below",
        "above",
        "to DDP",
        "rounds",
    ]
    return heads, [
        [
            r["row"],
            *map(_ms, (r["step_ms"], r["quarter_ms"], r["three_quarters_ms"], r["to_ddp"])),
            str(r["rounds"]),
        ]
        for r in rows
    ]


def _hook(rows: list[Row]) -> Table:
    heads = [
        "one process, so nothing is sent",
        "hook",
        "ms",
        "host ms",
        "kernels",
        "busy ms",
        "graph ms",
    ]
    heads += ["of copy, 8 passes", "waits", "warned", "kept GiB", "peak GiB"]
    lines = []
    for row in rows:
        for name in ("gradwire", "torch"):
            if name not in row:
                continue
            r = row[name]
            times = [_ms(r["ms"]), _ms(r["host_ms"]), str(r["kernels"]), _ms(r["busy_ms"])]
            counts = [str(r[key]) for key in ("host_waits", "host_waits_warned")]
            graph = r.get("graph_error", _ms(r.get("graph_ms")))
            first = row["row"] if name == "gradwire" else ""
            memory = [_ms(r["kept_gib"]), _ms(r["peak_gib"])]
            lines.append(
                [first, name, *times, graph, _share(r.get("of_bandwidth")), *counts, *memory]
            )
        if "replayed" in row:
            r = row["replayed"]
            said = r["obstacle"] or f"{r['replayed_steps']} steps, {r['messages']} messages in each"
            times = [_ms(r["ms"]), _ms(r["host_ms"]), "", "", said]
            lines.append(["", "replayed", *times, "", "", "", _ms(r["graph_gib"]), ""])
    return heads, lines


def _products(rows: list[Row]) -> Table:
    names = [key for key, value in rows[0].items() if isinstance(value, dict)]
    heads = ["ms, and part of the bandwidth of a copy", *names]
    return heads, [
        [r["row"], *(f"{r[n]['ms']:.3f} ({r[n]['of_bandwidth']:.0%})" for n in names)] for r in rows
    ]


def _graph(rows: list[Row]) -> Table:
    (r,) = rows
    heads = [
        "eager ms",
        "replay ms",
        "difference of the weights",
        "loss",
        "of a replay",
        "warm_start=False",
    ]
    values = [_ms(r["eager_ms"]), _ms(r["replay_ms"]), f"{r['difference']:.1e}"]
    return heads, [[*values, f"{r['eager_loss']:.5f}", f"{r['replay_loss']:.5f}", r["refused"]]]


def _compiled(rows: list[Row]) -> Table:
    (r,) = rows
    heads = ["eager ms", "compiled ms", "loss", "compiled"]
    return heads, [
        [
            _ms(r["eager_ms"]),
            _ms(r["compiled_ms"]),
            f"{r['eager_loss']:.5f}",
            f"{r['compiled_loss']:.5f}",
        ]
    ]


def _jax(rows: list[Row]) -> Table:
    keys = ["step_ms", "step_to_pmean", "trace_s", "compile_s", "cpu_s", "temporary_gradients"]
    heads = ["", *(key.replace("_", " ") for key in keys), "rounds"]
    return heads, [[r["row"], *(_ms(r[key]) for key in keys), str(r["rounds"])] for r in rows]


def _doctor(rows: list[Row]) -> Table:
    heads = ["known answers", "right", "wrong", "left out", "s", "what is wrong"]
    return heads, [
        [
            r["row"],
            *(str(r["counts"].get(v, 0)) for v in ("ok", "fault", "skipped")),
            f"{r['seconds']:.0f}",
            "; ".join(r["faults"]),
        ]
        for r in rows
    ]


_TABLES: dict[str, Callable[[list[Row]], Table]] = {
    "steps": _steps,
    "hook": _hook,
    "jax": _jax,
    "jax-steps": _jax,
    "doctor": _doctor,
    "graph": _graph,
    "products": _products,
    "compiled": _compiled,
}


def goals(parts: dict[str, Row]) -> list[dict[str, Any]]:
    """Each goal that the rows of the hook and of whole steps speak of: what, the figure, whether it
    is reached."""
    rows = [r for r in parts.get("hook", {"rows": []})["rows"] if "error" not in r]
    found: list[dict[str, Any]] = []
    for r in rows:
        if "ratio" in r and r["dtype"] == "float32":
            what = f"{r['size']}, {r['algorithm']}: time of torch's hook, at most {RATIO}"
            found.append({"goal": what, "figure": r["ratio"], "reached": r["ratio"] <= RATIO})
            if r["size"] == LARGE and "rank=4" in r["algorithm"]:
                share = r["gradwire"]["of_bandwidth"]
                what = f"{r['size']}, rank 4: of the bandwidth of a copy, at least {OF_BANDWIDTH}"
                found.append({"goal": what, "figure": share, "reached": share >= OF_BANDWIDTH})
    found += _goals_of_replays(rows, parts.get("steps", {"rows": []})["rows"])
    waits = [r["gradwire"][key] for r in rows for key in ("host_waits", "host_waits_warned")]
    if waits and None not in waits:
        found.append(
            {
                "goal": "host waits in a step, any row: 0",
                "figure": max(waits),
                "reached": max(waits) == 0,
            }
        )
    return found


def _goals_of_replays(rows: list[Row], steps: list[Row]) -> list[dict[str, Any]]:
    """Where steps were replayed."""
    found = []
    for r in rows:
        replayed, busy = r.get("replayed", {}), r["gradwire"]["busy_ms"]
        if not replayed.get("replayed_steps") or busy is None:
            continue
        name, most = f"{r['row']}, replayed", ABOVE_BUSY + A_MESSAGE * replayed["messages"]
        what, above = f"{name}: ms above its kernels, at most {most:.2f}", replayed["ms"] - busy
        found.append({"goal": what, "figure": above, "reached": above <= most})
        if r["size"] == LARGE and "rank=32" in r["algorithm"]:
            what, ratio = (
                f"{name}: time of torch's hook, at most {RATIO_REPLAYED}",
                replayed["ms"] / r["torch"]["ms"],
            )
            found.append({"goal": what, "figure": ratio, "reached": ratio <= RATIO_REPLAYED})
    for r in steps:
        if r["row"] in [f"{each!r}{REPLAYED}" for each in (FEW, CODED)] and r.get("replayed_steps"):
            what = f"{r['row']}: ms of a step above one of its messages alone, at most {ABOVE_MESSAGES}"
            above = r["above_messages_ms"]
            found.append({"goal": what, "figure": above, "reached": above <= ABOVE_MESSAGES})
    return found
