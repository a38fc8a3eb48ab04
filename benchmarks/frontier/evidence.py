"""What `gradwire advise` knows of losses: core/advise/evidence.py, from the greatest length at
which methods were trained by AdamW."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier.reading import Row, excesses, longest, uncompressed, upper_bound
from frontier.subjects import MUON

FILE = Path("core/advise/evidence.py")


def differences(methods: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Algorithm → how much higher its loss was, in parts of that of uncompressed averages, and the
    bound of that; of methods with two seeds or more."""
    steps, trained = longest(methods)
    found = {}
    for method in trained:
        parts = excesses(method, methods, steps)
        if method is uncompressed(methods) or method["name"].endswith(MUON) or len(parts) < 2:
            continue
        found[method["algorithm"]] = round(statistics.mean(parts), 4), round(upper_bound(parts), 4)
    return found


def source(results: Mapping[str, Any]) -> str:
    """What was trained, in words."""
    steps, _ = longest(results["methods"])
    return f"a byte-level transformer of {results['settings']['parameters']:,} parameters, {steps:,} steps of AdamW"


def text(results: Mapping[str, Any]) -> str:
    """The file, before it is formatted."""
    rows = "".join(
        f"    {name!r}: {found},\n"
        for name, found in sorted(differences(results["methods"]).items())
    )
    return (
        '"""What methods did to the loss of one small model (docs/frontier.md). `python benchmarks/frontier`\n'
        'writes this file."""\n\n'
        f"SOURCE = {source(results)!r}\n\n"
        "#: An algorithm as it is written: how much higher its loss was, in parts of that of uncompressed\n"
        "#: averages, and the bound below which that is with 90 % confidence.\n"
        f"MEASURED: dict[str, tuple[float, float]] = {{\n{rows}}}\n"
    )


def write(results: Mapping[str, Any], root: Path) -> None:
    """Write the file below a root that has its folder."""
    if (root / FILE.parent).is_dir():
        (root / FILE).write_text(text(results))
        subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(root / FILE)], check=True)
