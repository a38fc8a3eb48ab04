"""Whether what is measured is right: `gradwire doctor --quick`, as a part of the benchmark."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import gradwire
from gpu.children import tell

ROW = "doctor --quick"


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--worker")
    p.add_argument("--tiny", action="store_true", help="one algorithm")
    tiny = p.parse_args().tiny
    tell([ROW])
    began = time.monotonic()
    report = gradwire.doctor([gradwire.Sign()] if tiny else None, quick=True, show=lambda row: None)
    counts = Counter(row.verdict for row in report.rows)
    faults = [f"{row.part}, {row.check}: {row.detail}" for row in report.faults]
    tell(
        {
            "row": ROW,
            "seconds": round(time.monotonic() - began, 1),
            "counts": dict(counts),
            "faults": faults,
        }
    )
    tell(None)


if __name__ == "__main__":
    main()
