"""The benchmarks run, at their smallest, and write the fields that they promise. What they measure
is not judged here: the machine is shared."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.launch import MARK, ROOT, end_all, run_ranks, start

pytestmark = pytest.mark.slow

TINY = ["--layers=1", "--vocabulary=200", "--repeats=1"]
TRAINED = "--only train --subjects uncompressed --seeds=1 --rates=2e-3 --width=32 --layers=1 --context=16 --batch=2 --windows=8 --timed-steps=2"
#: What is run → its options, where its rows are, how many there are, and the fields of each.
BENCHMARKS: dict[str, tuple[list[str], str, int, str]] = {
    "auto.py": (
        ["--steps=20", "--seeds=1"],
        "rows",
        157,
        "methods model trace steps to_best to_plain holds",
    ),
    "buckets.py": (
        [*TINY, "--layers=0", "--sizes", "0.25", "--picture="],
        "rows",
        5,
        "backend subject messages step_ms memory_mib",
    ),
    "compress.py": (
        [*TINY, "--models=gpt", "--ranks=2"],
        "rows",
        1,
        "rank gradwire torch time_ratio",
    ),
    "loops.py": (
        [*TINY, "--methods", "PowerSGD(4)", "int4", "--threads=1"],
        "rows",
        2,
        "method threads wall processor copy_ms",
    ),
    "error_feedback.py": (["--steps=2"], "norm_of_a_zero_loss", 4, ""),
    "frontier": (
        [
            *TRAINED.split(),
            "--steps=30",
            "--evaluate-every=30",
            "--pages={folder}",
            "--work={folder}/work",
        ],
        *("runs", 2, "subject backend rate seed curve"),
    ),
    "gpu": (["--tiny"], "parts", 8, "rows left_out seconds"),
    "half_step.py": (["--rates", "0.1", "--seeds=1", "--epochs=1"], "accuracy_percent", 12, "0.1"),
    "jax_step.py": (
        [
            *[
                *TINY,
                "--layers=0",
                "--width=64",
                "--context=64",
                "--ranks=2",
                "--devices",
                "1",
                "--compile-matrices=2",
            ],
            "--compile-leaves=2",
        ],
        *("rows", 5, "subject devices step_ms cpu_s step_to_pmean cpu_to_pmean all_reduces"),
    ),
    "kernels.py": (
        [*TINY, "--width=64", "--ranks=4", "--caps", "0.1"],
        *(
            "rows",
            3,
            "subject cap_mib buckets kernels passes by_name all_reduces host_waits host_ms",
        ),
    ),
    "muon.py": ([*TINY, "--width=32"], "rows", 2, "backend plain_ms divided_ms message_ms share"),
    "network": (
        [
            *TINY,
            "--backends=torch",
            "--hosts=2",
            "--rates=1gbit",
            "--training-steps=0",
            "--picture=",
        ],
        *("rows", 13, "subject step_ms wire_ms wire_bytes planned_wire_bytes"),
    ),
    "overlap.py": (
        ["--alone", "--layers=3", "--width=64", "--batch=8", "--repeats=1", "--trace="],
        *("rows", 5, "subject collectives launched_under_backward hidden"),
    ),
    "scale": (
        [
            "--only",
            "counted",
            "ranks",
            "plans",
            "--imagined",
            "4",
            "8",
            "--ranks",
            "2",
            "4",
            "--of=4",
            "--planned",
            "10",
            "20",
        ],
        *("rows", 60, "subject what values exponent peer holds"),
    ),
    "stacks.py": (
        ["--stacks", "3", "--width=16", "--rank=1", "--repeats=1"],
        "rows",
        2,
        "subject cpu_s to_one_layer",
    ),
    "watching.py": (["--repeats=3"], "rows", 1, "device notes_us step_us"),
    "zero.py": (
        [*TINY, "--subjects=hook_with_zero_step"],
        "rows",
        2,
        "subject ratio_to_ddp step_ms peak_mib",
    ),
}


@pytest.mark.parametrize("script", BENCHMARKS)
def test_it_runs_and_writes_what_it_promises(script: str, tmp_path: Path) -> None:
    options, where, count, fields = BENCHMARKS[script]
    words = [option.format(folder=tmp_path) for option in options]
    (log := tmp_path / "log").touch()
    command, mark = (
        [ROOT / "benchmarks" / script, *words, "--output", tmp_path / "found.json"],
        uuid.uuid4().hex,
    )
    process = start(*command, log=str(log), env={MARK: mark})
    try:
        code = process.wait(560)
    finally:
        process.kill()
        end_all(mark)
    assert code == 0, log.read_text()[-6000:]
    # no root, or no tools: it says so, and predicts
    if script == "network" and not (tmp_path / "found.json").exists():
        assert "No hosts: " in log.read_text()
        return
    found: Any = json.loads((tmp_path / "found.json").read_text())[where]
    rows = list(found.values()) if isinstance(found, dict) else found
    assert len(rows) >= count
    assert all(not fields or set(fields.split()) <= row.keys() for row in rows)
    if script == "gpu":  # all parts of the table, whole
        assert all(part["rows"] and not part["left_out"] for part in rows)
        assert not [each for part in rows for each in (part, *part["rows"]) if "error" in each]


#: A host of a cell of the advice: short messages, few steps, and a model that is small.
HOST = f"""
import sys
sys.path[:0] = [{str(ROOT / "benchmarks")!r}]
import torch
from torch import nn
from advice import models, worker
from gradwire.core.advise import probe
probe.SIZES, probe.REPEATED = probe.SIZES[:3], 0.002
worker.LONG = 0.0
models.MODELS["small"] = (lambda: nn.Linear(64, 64), lambda: (torch.ones(2, 64),) * 2, nn.functional.mse_loss)
worker.main()
"""


def test_hosts_of_the_advice_predict_and_measure(tmp_path: Path) -> None:
    """Both on this machine, without a link between them."""
    (tmp_path / "host.py").write_text(HOST)
    printed = run_ranks(
        tmp_path / "host.py", 2, "--models", "small", "--calibrations", str(tmp_path)
    )
    ((row,),) = [json.loads(line) for line in printed.splitlines() if line.startswith("[{")]
    names = {method["algorithm"] for method in row["methods"]}
    assert [each["loss"] for each in row["answers"]] == [0.005, 0.02, None]
    for answer in row["answers"]:
        assert {"plain", answer["recommended"]} <= set(answer["allowed"]) <= names
    limited, *_, any_loss = (set(answer["allowed"]) for answer in row["answers"])
    assert limited < any_loss
    assert "Sign()" in any_loss - limited
    assert all(method["predicted_ms"] > 0 < method["measured_ms"] for method in row["methods"])
    assert all(1 <= len(method["rounds_ms"]) <= 2 for method in row["methods"])
