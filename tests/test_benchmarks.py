"""The benchmarks run, on a tiny model, and say what they promise. What they measure is not judged here: the machine is shared."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.forked import run_ranks
from tests.launch import ROOT, end_all, environment

pytestmark = pytest.mark.slow

SEVERAL_AND_ONE = ("a group for each bucket", "groups of 1 MiB (the default)")
TINY = ["--layers", "1", "--vocabulary", "200", "--repeats", "1"]


def run(script: str, output: Path, *options: str, plain: bool = False) -> dict[str, Any]:
    launch(script, output, *options, plain=plain)
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def launch(script: str, output: Path, *options: str, plain: bool = False) -> str:
    """Run a benchmark to its end. Returns what it prints."""
    mark = f"benchmark-{os.getpid()}-{script}"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / script),
        *([] if plain else TINY),
        *options,
        "--output",
        str(output),
    ]
    try:
        done = subprocess.run(command, env=environment(mark), capture_output=True, text=True, timeout=280, check=False)
    finally:
        end_all(mark)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def test_compress(tmp_path: Path) -> None:
    (row,) = run("compress.py", tmp_path / "compress.json", "--models", "gpt", "--ranks", "2")["rows"]
    assert row["rank"] == 2
    assert row["gradwire"]["collectives"] == 2
    assert row["torch"]["collectives"] == 3
    assert row["gradwire"]["compress_ms"] > 0 < row["time_ratio"]


def test_half_step(tmp_path: Path) -> None:
    options = ["--rates", "0.1", "--seeds", "1", "--epochs", "1"]
    found = run("half_step.py", tmp_path / "half-step.json", *options, plain=True)["accuracy_percent"]
    assert len(found) == 12
    assert all(0 <= accuracy <= 100 for by_rate in found.values() for accuracy in by_rate["0.1"])


def test_error_feedback(tmp_path: Path) -> None:
    """No times: what comes back is judged. A remedy lets no more through than plain DDP and one step."""
    found = run("error_feedback.py", tmp_path / "error-feedback.json", "--steps", "24", plain=True)
    for disturbed in (found["disturbed_clipped"], found["disturbed_skipped"]):
        assert disturbed["DDP"] == 1
        assert min(disturbed[name] for name in ("rank 1", "rank 4", "rank 4, half-step")) > 2
        assert max(count for name, count in disturbed.items() if "max_norm" in name) <= 2
    assert max(found["disturbed_skipped_forgetting"].values()) == 1
    zero_loss = found["norm_of_a_zero_loss"]
    assert zero_loss.pop("rank 1, nothing") > 10
    assert set(zero_loss.values()) == {0.0}
    drift = found["gan_drift"]
    for rank in (1, 2, 4):
        assert drift[f"rank {rank}, as usual"] > 1.2 * drift[f"rank {rank}, discarded"]
        assert drift[f"rank {rank}, discarded"] == drift[f"rank {rank}, no_sync"] == drift[f"rank {rank}, module"]
    longer = found["gan_drift_of_a_longer_run"]
    assert longer["rank 1, as usual"] > 1.5 * drift["rank 1, as usual"]
    assert longer["rank 1, as usual"] > 4 * longer["rank 1, discarded"]


def test_stacks(tmp_path: Path) -> None:
    options = ["--stacks", "3", "--width", "16", "--rank", "1", "--repeats", "1"]
    one, stacked = run("stacks.py", tmp_path / "stacks.json", *options, plain=True)["rows"]
    assert (one["subject"], stacked["subject"]) == ("one layer", "3 stacked")
    assert one["to_one_layer"] == 1
    assert stacked["cpu_s"] > 0 < stacked["to_one_layer"]


def test_watching(tmp_path: Path) -> None:
    (row, *_) = run("watching.py", tmp_path / "watching.json", "--repeats", "3", plain=True)["rows"]
    assert row["device"] == "cpu"
    assert row["notes_us"] > 0
    assert set(row["step_us"]) == {"watched", "not watched"}


def test_buckets(tmp_path: Path) -> None:
    picture = tmp_path / "buckets.png"
    options = ["--layers=0", "--sizes", "0.25", "4", "--picture", str(picture)]
    result = run("buckets.py", tmp_path / "buckets.json", *options)
    rows = result["rows"]
    subjects = {(r["backend"], r["subject"]) for r in rows}
    assert subjects == {
        ("torch", "DistributedDataParallel"),
        ("torch", "DataParallel"),
        ("jax", "pmean"),
        ("jax", "all_reduce_mean"),
    }
    for subject in subjects - {("jax", "pmean")}:
        messages = [r["messages"] for r in rows if (r["backend"], r["subject"]) == subject]  # small, large, no buckets
        assert messages == sorted(messages, reverse=True)
        assert messages[0] > messages[-1]
    assert all(r["step_ms"] > 0 and r["memory_mib"] > 0 for r in rows)
    assert result["data_parallel_to_ddp"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_frontier(tmp_path: Path) -> None:
    """Both backends do the same: their losses are a hundred times closer than those of two methods. A second call has nothing to do."""
    for page in ("README.md", "docs/choosing.md", "docs/frontier.md", "docs/methods.md"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    small = "--steps 30 --evaluate-every 30 --width 32 --layers 1 --context 16 --batch 2 --windows 8 --timed-steps 30"
    options = [
        *("--subjects", "dense", "PowerSGD 4", "local SGD", "--seeds", "1", "--rates", "2e-3", *small.split()),
        *("--pages", str(tmp_path), "--work", str(tmp_path / "work")),
    ]
    found = run("frontier", tmp_path / "frontier.json", *options, plain=True)
    dense, low_rank, local = found["methods"]
    ends = {method["name"]: method["lengths"]["30"] for method in found["methods"]}
    for method in (dense, low_rank, local):
        (torch,), (jax,) = ends[method["name"]]["losses"]["torch"], ends[method["name"]]["losses"]["jax"]
        assert abs(torch - jax) < abs(ends["PowerSGD 4"]["loss"] - ends["dense"]["loss"]) / 100
        assert all(seconds > 0 for seconds in method["step_seconds"].values())
        (trained,) = [r for r in found["runs"] if r["subject"] == method["name"] and r["backend"] == "torch"]
        assert trained["bytes_sent"] == pytest.approx(30 * method["bytes_per_step"])
    assert local["bytes_per_step"] * 30 == pytest.approx(dense["bytes_per_step"])
    for name in ("frontier-bytes.png", "frontier-time.png"):
        assert (tmp_path / "docs" / name).read_bytes().startswith(b"\x89PNG")
    assert f"| local SGD | {ends['local SGD']['loss']:.4f} |" in (tmp_path / "docs" / "frontier.md").read_text()
    said = launch("frontier", tmp_path / "frontier.json", *options, plain=True)
    assert "training, 30 steps: 0 of 6 runs are to be done" in said
    assert "learning rates" not in said
    assert "times," not in said
    assert json.loads((tmp_path / "frontier.json").read_text()) == found


def test_zero(tmp_path: Path) -> None:
    rows = run("zero.py", tmp_path / "zero.json", "--subjects", "hook_with_zero_step")["rows"]
    assert len(rows) == 2
    assert rows[0]["subject"] == "DDP + AdamW"
    assert rows[0]["ratio_to_ddp"] == 1.0
    assert all(r["step_ms"] > 0 and r["peak_mib"] > 0 for r in rows)


def test_gpu(tmp_path: Path) -> None:
    """On the CPU, whether there is a GPU or not. A second call goes on where the first ended."""
    output = tmp_path / "gpu.json"
    first = run("gpu", output, "--tiny", "--only", "products", "hook", plain=True)
    assert set(first["parts"]) == {"products", "hook"}
    row = first["parts"]["hook"]["rows"][0]
    assert row["gradwire"]["compress_ms"] > 0 < row["ratio"]
    assert row["gradwire"]["kernels"] is None
    assert row["torch, same shapes batched"]["hook_calls"] == 1
    assert [goal["goal"] for goal in first["goals"]] == ["tiny, rank 1: time of torch's hook, at most 0.4"]
    second = run("gpu", output, "--tiny", "--only", "hook", "steps", "graph", "gloo", plain=True)
    assert list(second["parts"]) == ["products", "hook", "steps", "graph", "gloo"]
    assert second["parts"]["hook"] == first["parts"]["hook"]
    subjects = second["parts"]["steps"]["rows"][0]["subjects"]
    assert list(subjects) == ["DDP", "bf16_compress_hook", "gradwire, rank 1", "torch, rank 1"]
    (graph,) = second["parts"]["graph"]["rows"]
    assert graph["graph"]["difference"] == 0
    (gloo,) = second["parts"]["gloo"]["rows"]
    assert [r["subject"] for r in gloo["gloo"]] == ["DDP", "torch's powerSGD_hook, rank 4", "PowerSGD, rank 4"]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Modules of `benchmarks/gpu`, as its command imports them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: importlib.import_module(f"gpu.{name}")


@dataclass
class Event:
    """Of a profile."""

    name: str
    device: str = "CUDA"
    us: float = 2.0
    is_user_annotation: bool = False

    @property
    def device_type(self) -> Any:
        return SimpleNamespace(name=self.device)

    @property
    def time_range(self) -> Any:
        return SimpleNamespace(elapsed_us=lambda: self.us)


def test_what_is_a_kernel_in_a_profile(on_gpu: Callable[[str], Any]) -> None:
    events = [
        Event("gemm"),
        Event("gemm", us=3),
        Event("ncclDevKernel"),
        Event("nccl:all_reduce", is_user_annotation=True),
        Event("Memcpy DtoD (Device -> Device)"),
        Event("cudaStreamSynchronize", device="CPU"),
    ]
    calls, kernels = on_gpu("launches").sorted_out(events)
    assert kernels == {"gemm": (2, 5.0), "ncclDevKernel": (1, 2.0)}
    assert calls == {"cudaStreamSynchronize": 1}


@pytest.mark.parametrize(("figures", "reached"), [((0.39, 0.61, 0), True), ((0.41, 0.59, 1), False)])
def test_goals(on_gpu: Callable[[str], Any], figures: tuple[float, float, int], reached: bool) -> None:
    ratio, share, waits = figures
    ours = {"of_bandwidth": share, "host_waits": 0, "host_waits_warned": waits}
    row = {"size": "1.3B", "rank": 4, "dtype": "float32", "buckets": "25 MiB", "ratio": ratio, "gradwire": ours}
    found = on_gpu("report").goals({"hook": {"rows": [row, {"row": "another", "error": "out of memory"}]}})
    assert [goal["reached"] for goal in found] == [reached] * 3


def test_a_part_that_takes_too_long_is_ended_with_all_it_started(on_gpu: Callable[[str], Any], tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    child = f"import os, time; os.fork(); os.write(os.open({str(held)!r}, os.O_WRONLY), b'x'); time.sleep(600)"
    with pytest.raises(TimeoutError, match="not done after 3 s"):
        on_gpu("children").run(["-c", child], 3.0, {})
    os.set_blocking(reader, True)
    assert len(os.read(reader, 16)) <= 2
    assert os.read(reader, 16) == b""  # nobody holds it any more; else this would wait for as long as they sleep
    os.close(reader)


def test_jax_step(tmp_path: Path) -> None:
    options = ["--layers=0", "--width=64", "--context=64", "--ranks=2", "--devices=2", "--compile-matrices=2"]
    result = run("jax_step.py", tmp_path / "jax.json", *options)
    rows = {r["subject"]: r for r in result["rows"]}
    names = ["pmean", "all_reduce_mean", "all_reduce_mean, 4 MiB", "PowerSGD, rank 2", "half-step, rank 2"]
    assert list(rows) == names
    assert len(result["compile"]) == len(names)
    assert all(r["devices"] == 2 and r["cpu_s"] > 0 for r in [*result["rows"], *result["compile"]])
    assert all(r["step_ms"] > 0 and r["step_to_pmean"] > 0 and r["cpu_to_pmean"] > 0 for r in rows.values())
    assert [rows[n]["all_reduces"] for n in ("pmean", "all_reduce_mean", "PowerSGD, rank 2")] == [1, 1, 2]


def test_overlap(tmp_path: Path) -> None:
    """One process alone."""
    options = ["--alone", "--layers=3", "--width=64", "--batch=8", "--repeats=1", "--trace="]
    rows = {r["subject"]: r for r in run("overlap.py", tmp_path / "overlap.json", *options, plain=True)["rows"]}
    several, one = (rows[f"DDP, PowerSGD rank 4, {groups}"] for groups in SEVERAL_AND_ONE)
    assert (several["collectives"], one["collectives"]) == (2 * 3, 2)
    assert several["launched_under_backward"] > 0 == one["launched_under_backward"]
    assert 0 < several["hidden"] < 1


def hosts() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_network(tmp_path: Path) -> None:
    before = hosts() if shutil.which("ip") else ""
    output, picture = tmp_path / "network.json", tmp_path / "network.png"
    options = ["--backends=torch", "--hosts=2", "--rates=1gbit", "--training-steps=0", f"--picture={picture}"]
    printed = launch("network", output, *options)
    if not output.exists():  # no root, or no tools: it says so, and predicts
        assert "No hosts: " in printed
        assert "PowerSGD, rank 4" in printed
        return
    rows = {r["subject"]: r for r in json.loads(output.read_text())["rows"]}
    assert len(rows) == 12
    assert rows["int8"]["wire_bytes"] < 0.5 * rows["bf16_compress_hook"]["wire_bytes"] * 1.1
    # Headers and acknowledgements weigh much beside messages as small as these.
    assert 1.0 <= rows["DDP"]["wire_bytes"] / rows["DDP"]["planned_wire_bytes"] < 1.1
    assert rows["PowerSGD, rank 4"]["wire_bytes"] < 0.5 * rows["DDP"]["wire_bytes"]
    assert rows["DDP"]["step_ms"] > rows["DDP"]["wire_ms"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert hosts() == before


@pytest.mark.slow
def test_network_of_two_levels(tmp_path: Path) -> None:
    output = tmp_path / "network.json"
    printed = launch("network", output, "--hosts=2", "--per-host=2", "--rates=1gbit")
    if not output.exists():  # no root, or no tools
        assert "No hosts: " in printed
        return
    rows = {r["subject"]: r for r in json.loads(output.read_text())["rows"]}
    # What the ranks of a host send each other stays on it, and each byte of an average leaves it once.
    assert rows["two levels, dense"]["wire_bytes"] < 1.1 * rows["two levels, dense"]["planned_wire_bytes"]
    assert rows["two levels"]["payload"] == pytest.approx(rows["one level"]["payload"] / 2, rel=1e-3)
    assert rows["two levels"]["wire_bytes"] < rows["DDP"]["wire_bytes"] / 2


def test_kernels(tmp_path: Path) -> None:
    result = run("kernels.py", tmp_path / "kernels.json", "--width=64", "--ranks", "4", "--caps", "0.1", "100000")
    rows = {(r["subject"], r["cap_mib"]): r for r in result["rows"]}
    several, one = rows["gradwire", 0.1], rows["gradwire", 100_000]
    assert several["buckets"] > 1 == one["buckets"]
    assert one["all_reduces"] == 2
    assert rows["torch", 0.1]["all_reduces"] == 3 * several["buckets"]
    assert rows["torch", 0.1]["host_waits"] == several["buckets"]
    assert one["host_waits"] == 0 < one["host_ms"]
    assert all(r["kernels"] == sum(r["by_name"].values()) for r in rows.values())


def test_advice_has_a_cell(tmp_path: Path) -> None:
    """One link, where hosts can be made, else it says why not; and the table of what is in the committed figures."""
    sys.path[:0] = paths = [str(ROOT / "benchmarks" / folder) for folder in ("", "network")]
    try:
        advice = importlib.import_module("advice.__main__")
    finally:
        for path in paths:
            sys.path.remove(path)
    rows = [
        {
            "hosts": 2,
            "link": "1gbit",
            "model": "a",
            "recommended": "plain",
            "fastest": "PowerSGD(rank=4)",
            "to_fastest": 1.5,
        }
        | {"methods": [_method("plain", 100, 150), _method("PowerSGD(rank=4)", 110, 100)]},
        {
            "hosts": 2,
            "link": "1ms@1000mbit",
            "model": "a",
            "recommended": "plain",
            "fastest": "plain",
            "to_fastest": 1.0,
        }
        | {"methods": [_method("plain", 100, 100)]},
    ]
    result = {"rows": rows, "found": advice.counted(rows)}
    assert result["found"] == {"cells": 2, "recommended_is_fast": 1, "predictions": 3, "predictions_close": 2}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{advice.BEGIN}\nold\n{advice.END}\nafter\n")
    advice.write_page(result, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "**missed: 1.50×**" in text
    assert text.count("| 100 / 150 ms |") == 1  # predicted wrong
    assert advice.cells(SimpleNamespace(hosts=[4], rates=["100mbit", "1gbit"], delays=[])) == [
        (4, "1gbit"),
        (4, "100mbit"),
    ]


#: A host of a cell: short messages, few steps, and a model that is small.
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
    printed = run_ranks(tmp_path / "host.py", 2, "--models", "small", "--calibrations", str(tmp_path))
    ((row,),) = [json.loads(line) for line in printed.splitlines() if line.startswith("[{")]
    names = [method["algorithm"] for method in row["methods"]]
    assert {"plain", "PowerSGD(rank=4)", row["recommended"], row["fastest"]} <= set(names)
    assert all(method["predicted_ms"] > 0 < method["measured_ms"] for method in row["methods"])


def _method(name: str, predicted: float, measured: float) -> dict[str, Any]:
    return {"algorithm": name, "predicted_ms": predicted, "measured_ms": measured, "ratio": predicted / measured}
