"""The first table of docs/works-together.md: which cells there are, what comes of each, and the
page's text of it.

python -m tests.composition.table      # writes it into the page
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.composition.scenario import FEATURES, begins_dense
from tests.methods import EVERY, Int8

PAGE = Path(__file__).parents[2] / "docs" / "works-together.md"
BEGIN, END = "<!-- made by tests/composition/table.py: begin -->", "<!-- end -->"

#: Where a method is given → how the table calls it.
DOORS = {
    "ddp": "a hook of DDP",
    "data_parallel": "`DataParallel`",
    "zero": "`ZeroOptimizer`",
    "local_sgd": "`local_sgd`",
    "jax": "JAX",
    "jax_local_sgd": "JAX `local_sgd`",
}
#: Of every kind of message and of memory one; of JAX, which compiles a program for each, fewer. The
#: others are variants, and slow.
KINDS = ("all_reduce", "rank_2", "half_step", "quantize", "wire_factors_int8", "top_k", "sign")
QUICK = dict.fromkeys(DOORS, KINDS) | {
    "jax": ("rank_2", "quantize", "sign"),
    "jax_local_sgd": ("rank_2", "quantize"),
}

#: The notes below the table.
NOTES = {
    "dense already": "They are dense in every step, so there is no warm-up to check.",
    "no start": "They have no `start_step`: `Quantize(dtype, error_feedback=False, start_step=n)` is the same with one.",
    "buckets": "`ValueError`: there gradients arrive in buckets already, whose size is `bucket_cap_mb`.",
}
MARKS = dict(zip(NOTES, "¹²³", strict=True))


def cells(
    rows: Iterable[tuple[str, str]], quick: Callable[[str, str, str], bool]
) -> list[ParameterSet]:
    """The cells of these rows, (door, method), that work: (door, method, feature). Those that are
    not `quick` are slow."""
    return [
        pytest.param(
            door, case, feature, marks=() if quick(case, door, feature) else pytest.mark.slow
        )
        for door, case in rows
        for feature in FEATURES
        if outcome(case, door, feature) == "works"
    ]


def quick(case: str, door: str, feature: str) -> bool:
    """Whether a cell is one of `make test`."""
    compiled_again = (door, feature) == ("jax_local_sgd", "other world size")
    return case in QUICK[door] and not (compiled_again and case != "quantize")


def outcome(case: str, door: str, feature: str) -> str:
    """ "works", "refused", or "none": there is no such thing."""
    if case == "all_reduce_buckets" and door in ("ddp", "data_parallel", "zero"):
        return "refused"
    if feature == "dense start" and not begins_dense(case):
        return "none"
    return "works"


def cell(case: str, door: str) -> str:
    """What the table says."""
    outcomes = {outcome(case, door, feature) for feature in FEATURES}
    if outcomes == {"refused"}:
        return f"refused {MARKS['buckets']}"
    dense = case.startswith("all_reduce") or case == "two_levels_dense"
    return (
        f"works {MARKS['dense already' if dense else 'no start']}"
        if "none" in outcomes
        else "works"
    )


def label(case: str) -> str:
    algorithm = EVERY[case].algorithm
    return (
        "a `Compressor` of your own"
        if isinstance(algorithm, Int8)
        else f"`{algorithm!r}`".replace("|", "\\|")
    )


def rendered() -> str:
    """The table and its notes, as Markdown: methods of the same outcome share a row."""
    rows: dict[str, list[str]] = {}
    for case in EVERY:
        doors: dict[str, list[str]] = {}
        for door, name in DOORS.items():
            doors.setdefault(cell(case, door), []).append(name)
        where = "; ".join(f"{what} by {', '.join(names)}" for what, names in doors.items())
        rows.setdefault(next(iter(doors)) if len(doors) == 1 else where, []).append(label(case))
    lines = ["| methods | at every entry point |", "|---|---|"]
    lines += [f"| {', '.join(dict.fromkeys(methods))} | {what} |" for what, methods in rows.items()]
    return "\n".join([*lines, "", *(f"{MARKS[note]} {text}" for note, text in NOTES.items())])


def page_with(table: str) -> str:
    """The page, with this in the place of its table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(rendered()))
