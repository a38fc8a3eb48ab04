"""Tables of what was found, and the goals."""

from __future__ import annotations

from typing import Any

from gpu.screen import table

#: Time of the hook beside torch's, at every rank.
RATIO = 0.4
#: Of the bandwidth of a copy, at rank 4 on the large model.
OF_BANDWIDTH = 0.6
Row = dict[str, Any]


def show(part: str, found: Row) -> None:
    """One part as a table."""
    for row in found["rows"]:
        if "error" in row:
            print(f"{part}, {row['row']}: {row['error']}")
    if found["left_out"]:
        print(f"{part}: no time was left for {len(found['left_out'])} rows: {'; '.join(found['left_out'])}")
    rows = [row for row in found["rows"] if "error" not in row]
    if rows:
        heads, lines = _TABLES[part](rows)
        table(f"{part} ({found['seconds']} s)", heads, lines)


def _ms(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}"


def _share(x: float | None) -> str:
    return "" if x is None else f"{x:.0%}"


def _products(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    names = [key for key, value in rows[0].items() if isinstance(value, dict)]
    heads = ["ms, and part of the bandwidth of a copy", *names]
    return heads, [[r["row"], *(f"{r[n]['ms']:.3f} ({r[n]['of_bandwidth']:.0%})" for n in names)] for r in rows]


def _hook(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    heads = [
        "",
        "hook",
        "ms",
        "of copy, 8 passes",
        "those made",
        "host ms",
        "kernels",
        "busy ms",
        "waits",
        "warned",
        "kept GiB",
        "peak GiB",
    ]
    lines = []
    for row in rows:
        for name in [key for key, value in row.items() if isinstance(value, dict)]:
            r = row[name]
            first = row["row"] if name == "gradwire" else ""
            counts = [str(r[key]) for key in ("host_waits", "host_waits_warned")]
            made = f"{_share(r['of_bandwidth_with_passes'])} ({r['passes']})"
            times = [_ms(r["compress_ms"]), _share(r["of_bandwidth"]), made, _ms(r["host_ms"])]
            memory = [_ms(r["kept_gib"]), _ms(r["peak_gib"])]
            lines.append([first, name, *times, str(r["kernels"]), _ms(r["busy_ms"]), *counts, *memory])
    return heads, lines


def _methods(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    heads = [
        "one process, so nothing is sent",
        "ms",
        "copies of the gradients",
        "host ms",
        "kernels",
        "busy ms",
        "waits",
    ]
    lines = []
    for row in rows:
        r = row["gradwire"]
        counts = [str(r["kernels"]), _ms(r["busy_ms"]), str(r["host_waits"])]
        lines.append([row["row"], _ms(r["compress_ms"]), _ms(row["copies"]), _ms(r["host_ms"]), *counts])
    return heads, lines


def _numbers(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    return ["", "found", "at most"], [[r["row"], f"{r['found']:.1e}", f"{r['at_most']:.1e}"] for r in rows]


def _steps(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    heads = ["one process, so nothing is sent", "hook", "step ms", "over DDP ms", "peak GiB"]
    lines = [
        [row["row"] if name == "DDP" else "", name, _ms(r["step_ms"]), _ms(r["over_ddp_ms"]), _ms(r["peak_gib"])]
        for row in rows
        for name, r in row["subjects"].items()
    ]
    return heads, lines


def _graph(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    r = rows[0]["graph"]
    heads = ["eager ms", "replay ms", "difference of the weights", "loss", "of a replay", "warm_start=False"]
    values = [
        _ms(r["eager_ms"]),
        _ms(r["replay_ms"]),
        f"{r['difference']:.1e}",
        f"{r['eager_loss']:.5f}",
        f"{r['replay_loss']:.5f}",
    ]
    return heads, [[*values, r["refused"]]]


def _compiled(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    r = rows[0]["compiled"]
    heads = ["eager ms", "compiled ms", "loss", "compiled"]
    return heads, [[_ms(r["eager_ms"]), _ms(r["compiled_ms"]), f"{r['eager_loss']:.5f}", f"{r['compiled_loss']:.5f}"]]


def _gloo(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    return ["", "processes", "step ms"], [
        [r["subject"], str(r["processes"]), _ms(r["step_ms"])] for r in rows[0]["gloo"]
    ]


def _jax(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    heads = ["", "", "step ms", "over pmean ms", "four products ms", "trace s", "compile s"]
    lines = []
    for row in rows:
        for r in row["rows"]:
            times = [_ms(r["step_ms"]), _ms(r.get("over_pmean_ms")), _ms(r.get("floor_products_ms"))]
            lines.append([row["size"], r["subject"], *times, _ms(r["trace_s"]), _ms(r["compile_s"])])
    return heads, lines


_TABLES = {
    "numbers": _numbers,
    "methods": _methods,
    "products": _products,
    "hook": _hook,
    "steps": _steps,
    "graph": _graph,
    "gloo": _gloo,
    "jax": _jax,
    "compiled": _compiled,
}


def goals(parts: dict[str, Row]) -> list[dict[str, Any]]:
    """Each goal that the rows speak of: what, the figure, whether it is reached. All rows of fp32 in DDP's default buckets."""
    rows = [r for r in parts.get("hook", {"rows": []})["rows"] if "error" not in r]
    found: list[dict[str, Any]] = []
    for r in parts.get("numbers", {"rows": []})["rows"]:
        right = "error" not in r and r["found"] <= r["at_most"]
        found.append({"goal": f"right: {r['row']}", "figure": r.get("found", float("nan")), "reached": right})
    for r in rows:
        if (r["dtype"], r["buckets"]) == ("float32", "25 MiB"):
            what = f"{r['size']}, rank {r['rank']}: time of torch's hook, at most {RATIO}"
            found.append({"goal": what, "figure": r["ratio"], "reached": r["ratio"] <= RATIO})
            if (r["size"], r["rank"]) == ("1.3B", 4):
                share = r["gradwire"]["of_bandwidth"]
                what = f"1.3B, rank 4: of the bandwidth of a copy, at least {OF_BANDWIDTH}"
                found.append({"goal": what, "figure": share, "reached": share >= OF_BANDWIDTH})
    waits = [r["gradwire"]["host_waits"] for r in rows]
    warned = [r["gradwire"]["host_waits_warned"] for r in rows]
    if rows and None not in (*waits, *warned):
        most = max(*waits, *warned)
        found.append({"goal": "host waits in a step, any row: 0", "figure": most, "reached": most == 0})
    return found
