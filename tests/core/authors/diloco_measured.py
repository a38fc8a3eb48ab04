"""Makes diloco_measured.json: the utilization of DiLoCo over shaped links, as somebody has measured
it. `test_utilization` compares it with gradwire's.

    git clone https://github.com/Adnan082/diloco-measured && git -C diloco-measured checkout 07b7885
    cd tests/core/authors
    python diloco_measured.py ../../../diloco-measured > diloco_measured.json

Of results/raw there (Apache License 2.0): four L40S, NCCL over TCP, `tc`, a GPT of 30,846,720
float32 parameters; medians of three runs. None of its code is here.
"""

import json
import statistics
import sys
from pathlib import Path

if __name__ == "__main__":
    runs = {}
    for file in sorted((Path(sys.argv[1]) / "results" / "raw").glob("*.json")):
        run = json.loads(file.read_text())
        spec = run.get("spec", {})
        if "cu" not in run or "unshaped" in file.name or spec["algorithm"] != "diloco":
            continue
        steps = spec["budget_value"] - spec["warmup_steps"]
        seen = (
            run["cu"]["compute_s"] / steps,
            run["cu"]["compute_s"] / run["cu"]["total_s"],
            run["shaping"]["measured_bps"],
        )
        runs.setdefault((spec["H"], spec["bandwidth_requested_bps"] // 10**6), []).append(seen)
    rows = []
    for (period, megabits), seen in sorted(runs.items()):
        step, share, bits = (
            round(statistics.median(column), 6) for column in zip(*seen, strict=True)
        )
        rows.append(
            {
                "period": period,
                "megabits": megabits,
                "step": step,
                "utilization": share,
                "link": bits,
            }
        )
    print("[" + ",\n ".join(map(json.dumps, rows)) + "]")
