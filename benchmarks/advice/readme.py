"""The example of docs/advise.md: a GPT of 25 million parameters, two hosts, 1 Gbit/s. Writes its
figures to benchmarks/results/advice-readme.json, and the page.

    python benchmarks/advice/readme.py        # Linux, as root; in a minute or two

A probe between two hosts, then an advice as one would ask for it on one of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "network")]
from lab import PORT, Lab, obstacle  # noqa: E402
from measuring import save  # noqa: E402

from gradwire import Advice  # noqa: E402
from gradwire.core.advise.advice import MethodAdvice, choose  # noqa: E402
from gradwire.core.advise.losses import known_losses  # noqa: E402
from gradwire.core.plan.expressions import parse_algorithm  # noqa: E402

RESULT = HERE.parent / "results" / "advice-readme.json"
MODEL = """
import sys
sys.path[:0] = [{benchmarks!r}]
from shapes import gpt
import torch
def build():
    return torch.nn.ParameterDict({{name: torch.nn.Parameter(torch.empty(shape)) for name, shape in gpt().items()}})
"""
#: The output on the page.
BLOCK = re.compile(r"(?ms)^(```text[^\n]*\n)[\d.]+ MB of gradients.*?(?=\n```$)")


def read(data: dict[str, Any]) -> Advice:
    """The advice that `gradwire advise --json` has printed: the steps that it predicted, and what
    is known today of the methods' losses."""
    methods = [MethodAdvice(**method | {"loss": None}) for method in data["methods"]]
    names = [method.algorithm for method in methods if method.algorithm != "plain"]
    losses = known_losses({name: parse_algorithm(name) for name in names})
    limits = [choice["loss"] for choice in data["choices"]]
    return choose(methods, data["model_bytes"], data["network"], limits, losses)


def main() -> None:
    if why_not := obstacle():
        raise SystemExit(f"no hosts: {why_not}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "my_model.py").write_text(MODEL.format(benchmarks=str(HERE.parent)))
        probe = Path(folder) / "probe.json"
        with Lab(2, "1gbit") as lab:
            lab.run(
                lambda host: [
                    *(
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        "--nnodes=2",
                        f"--node-rank={host}",
                    ),
                    *(
                        "--nproc-per-node=1",
                        f"--master-addr={lab.address(0)}",
                        f"--master-port={PORT}",
                    ),
                    *(
                        f"--local-addr={lab.address(host)}",
                        "-m",
                        "gradwire",
                        "probe",
                        "--output",
                        str(probe),
                    ),
                ]
            )
        asked = ["advise", "my_model:build", "--probe", str(probe), "--step-ms", "180", "--json"]
        printed = subprocess.run(
            [sys.executable, "-m", "gradwire", *asked],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        result = {
            "command": "python benchmarks/advice/readme.py",
            "probe": json.loads(probe.read_text()),
            "advice": json.loads(printed),
        }
    save(result, RESULT)
    shown = str(read(result["advice"]))
    page = ROOT / "docs" / "advise.md"
    page.write_text(BLOCK.sub(lambda found: found[1] + shown, page.read_text()))
    print(shown)


if __name__ == "__main__":
    main()
