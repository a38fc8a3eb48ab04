"""What a command line says of wrong arguments: each is named."""

import json
import math
import textwrap

import jax  # noqa: F401  (as in `test_plan`)
import pytest

from gradwire.cli import app
from gradwire.core.advise.probe import ALL, Level, Probe
from tests.cli.called import refused

MODULE = """
import dataclasses
import torch
import gradwire
from gradwire.core.protocol import mean
class _Own(gradwire.Compressor):
    def memory(self, ops, name, spec):
        return {}
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Summed(_Own):
    async def compress(self, ops, name, x, memory, context):
        return x, await mean(x - x.sum()), memory
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Negative(_Own):
    async def compress(self, ops, name, x, memory, context):
        sent = ops.take(x.reshape((-1,)), ops.top_k(x.reshape((-1,)), -1))
        return x, await mean(sent), memory
def linear():
    return torch.nn.Linear(4, 4)
class Method:
    def __init__(self, k):
        pass
def without_inputs():
    import flax.linen as nn
    return nn.Dense(4)
def nothing():
    return None
number = 3
"""


def safetensors(header: str) -> str:
    return len(header).to_bytes(8, "little").decode("latin1") + header


FILES = {
    "shapes.json": '{"mlp.weight": [512, 256], "mlp.bias": [512]}',
    "broken.json": "{",
    "list.json": "[3]",
    "empty.json": "{}",
    "negative.json": '{"w": [-1]}',
    "dtype.json": '{"w": {"shape": [3], "dtype": "int8"}}',
    "short.safetensors": "\x05\0\0\0\0\0\0\0{}",
    "deep.json": '{"w":' * 100_000,
    "no_map.json": '{"weight_map": {}}',
    "map.json": '{"weight_map": {"w": "lost.safetensors"}}',
    "deep.safetensors": safetensors("[" * 100_000),
    "integers.safetensors": safetensors('{"w": {"dtype": "I64", "shape": [3]}}'),
    "negative.safetensors": safetensors('{"w": {"dtype": "F32", "shape": [-3]}}'),
    "text.safetensors": safetensors('{"w": {"dtype": "F32", "shape": "abc"}}'),
    "some_wrong_models.py": textwrap.dedent(MODULE),
    "some_script.py": "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--steps')\n"
    "parser.add_argument('data')\nparser.parse_args()\n",
    "some_broken_script.py": "import some_script_that_needs_this\n",
    "some_failing_script.py": "\n1 / 0\n",
}
PLAN, ADVISE, WRONG = ["plan", "shapes.json"], ["advise", "shapes.json"], "some_wrong_models"
ADVISE_3 = [*ADVISE, "--step-ms", "3"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text.encode("latin1"))
    samples = ((256, 1e-4), (1 << 20, 1e-2))
    Probe("torch", "cpu", 2, 1, (Level(ALL, 2, samples, samples, 1.0),)).save(
        tmp_path / "probe.json"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


FILES_THAT_ARE_NONE = (
    "absent.json",
    "broken.json",
    "list.json",
    "empty.json",
    "deep.json",
    "short.safetensors",
)
FILES_THAT_ARE_NONE += ("deep.safetensors", "integers.safetensors")
JAX_OF_TWO = ["probe", "--coordinator", "localhost:1", "--processes", "2"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        *((["plan", file], f"MODEL {file}") for file in FILES_THAT_ARE_NONE),
        *(
            (["plan", model], f"MODEL '{model}'")
            for model in ("shapes", "absent:build", ".:build", f"{WRONG}:nothing")
        ),
        (["plan", "negative.json"], "'w' is [-1]"),
        (["plan", "negative.safetensors"], "'w' is [-3]"),
        (["plan", "text.safetensors"], "'w' is 'abc'"),
        (["plan", "dtype.json"], "dtype 'int8'"),
        (["plan", "no_map.json"], "weight_map"),
        (["plan", "map.json"], "lost.safetensors"),
        (["plan", f"{WRONG}:absent"], f"{WRONG} has no absent"),
        (["plan", f"{WRONG}:liner"], "did you mean linear?"),
        (["plan", "some_script:model"], "some_script.py:5); what trains"),
        (["plan", "some_script:model"], "under `if __name__ == '__main__':`"),
        (
            ["plan", "some_broken_script:model"],
            "ModuleNotFoundError: No module named 'some_script_that_needs_this'",
        ),
        (
            ["plan", "some_broken_script:model"],
            "some_broken_script.py:1); install some_script_that_needs_this",
        ),
        (["plan", "some_failing_script:model"], "some_failing_script.py:2)"),
        ([*PLAN, "-a", "int9"], "did you mean int8?"),
        ([*PLAN, "-a", "bf16"], "did you mean bfloat16?"),
        ([*PLAN, "-a", "int8()"], "write WireDtype(AllReduce(), 'int8'), or int8 alone"),
        ([*PLAN, "-a", "PowerSGD(start_iter=3)"], "did you mean start_step?"),
        (
            [*PLAN, "-a", "absent:Method(3)"],
            "--algorithm 'absent:Method': No module named 'absent'",
        ),
        ([*PLAN, "-a", f"{WRONG}:Method(j=3)"], "Method has no option j"),
        ([*PLAN, "-a", f"{WRONG}:Method(3)"], f"--algorithm '{WRONG}:Method(3)': "),
        (["plan", f"{WRONG}:number"], "type int"),
        (["plan", f"{WRONG}:without_inputs"], "Dense"),
        ([*PLAN, "-a", "PowerSGD(rnk=4)"], "--algorithm 'PowerSGD(rnk=4)'"),
        (
            [*PLAN, "-a", "PowerSGD(rank={'absent': 4})"],
            "--algorithm PowerSGD(rank={'absent': 4}): ",
        ),
        ([*PLAN, "-a", "PowerSGD(rank=4, rank=5)"], "option rank twice"),
        ([*PLAN, "-a", "PowerSGD(rank={'*': 4, '*': 5})"], "key '*' twice"),
        (
            [*PLAN, "-a", "WireDtype(PowerSGD(4, start_step=1, start_step=2), 'int8')"],
            "option start_step twice",
        ),
        ([*PLAN, "--replicas", str(1 << 31), "-a", "TwoLevel(AllReduce())"], "'--replicas'"),
        *(
            ([*PLAN, option, value], f"{option} '{value}'")
            for option, value in (("--link", "10"), ("--latency", "5"))
        ),
        *(
            ([*PLAN, option, "9" * 400 + unit], f"{option} '999")
            for option, unit in (("--link", "Gbit"), ("--latency", "s"))
        ),
        *(
            ([*PLAN, "--utilization", "--step-ms", value], f"--step-ms {value}")
            for value in ("nan", "inf", "0", "1e+308")
        ),
        ([*PLAN, "-a", f"{WRONG}:Summed()"], "--algorithm Summed(): Summed() is not portable"),
        ([*PLAN, "-a", f"{WRONG}:Negative()"], "there are no -1 largest of 131072 elements"),
        ([*PLAN, "--replicas", "4", "--nodes", "3"], "--nodes 3"),
        ([*PLAN, "--replicas", "0"], "'--replicas'"),
        ([*PLAN, "--links", "3"], "--links"),
        *(
            ([*ADVISE_3, "--probe", file], f"--probe {file}")
            for file in ("absent.json", "list.json", "deep.json")
        ),
        *(([*ADVISE, "--step-ms", value], f"--step-ms {value}") for value in ("nan", "inf", "0")),
        (ADVISE, "--step-ms"),
        ([*ADVISE_3, "--measure", f"{WRONG}:linear"], "--measure"),
        *(
            ([*ADVISE, "--measure", x], f"--measure '{x}'")
            for x in ("absent:step", f"{WRONG}:linear")
        ),
        *(
            ([*ADVISE_3, "--loss", x], f"--loss '{x}' must be a share")
            for x in ("best", "2", "-1%", "nan%")
        ),
        ([*ADVISE_3, "--compare", "absent.json"], "--compare absent.json"),
        ([*ADVISE_3, "--compare", "probe.json"], "--compare: probe.json"),
        ([*ADVISE_3, "-a", "PowerSGD"], "--algorithm 'PowerSGD'"),
        ([*ADVISE_3, "-a", "PowerSGD(rank={'absent': 4})"], "--algorithm: "),
        ([*ADVISE_3, "-a", f"{WRONG}:Summed()"], "--algorithm: Summed() is not portable"),
        (["probe"], "torchrun --nproc-per-node=8 --no-python gradwire probe"),
        (["probe", "--framework", "torch"], "gradwire probe --framework jax --coordinator"),
        (["probe", "--framework", "torch", "--processes", "2"], "--processes 2"),
        (["probe", "--framework", "tensorflow"], "--framework tensorflow"),
        (["probe", "--framework", "torch", "--backend", "mpi"], "--backend mpi"),
        (["probe", "--framework", "jax", "--backend", "gloo"], "--backend gloo"),
        (
            ["probe", "--framework", "jax", "--output", "absent/probe.json"],
            "--output absent/probe.json",
        ),
        (JAX_OF_TWO[:3], "--coordinator localhost:1"),
        (["probe", "--processes", "2", "--process", "0"], "--processes 2"),
        ([*JAX_OF_TWO, "--process", "2"], "--process 2"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("folder")
def test_a_wrong_argument_is_named(capsys, command, said):
    assert said in refused(capsys, *command)


OF_A_PROBE = [("replicas", value) for value in (0, -2, 1, "2", 2.5, True, None)]
OF_A_PROBE += [
    ("nodes", 0),
    ("nodes", 3),
    ("framework", "tensorflow"),
    ("levels", []),
    ("device", 3),
]
SAMPLES = ([], [[256, math.inf]], [[256, "1"]], [[1 << 20, 1], [256, 1]], [[0, 1]])
OF_A_LEVEL = [
    ("replicas", 0),
    ("replicas", 3),
    ("name", 3),
    *(("all_reduce", value) for value in SAMPLES),
]


OF_A_LEVEL += [("overlap", value) for value in (math.nan, 7, "1", True)]
WRONG_PROBES = [*((False, *row) for row in OF_A_PROBE), *((True, *row) for row in OF_A_LEVEL)]


@pytest.mark.parametrize(("of_level", "key", "value"), WRONG_PROBES, ids=str)
@pytest.mark.usefixtures("folder")
def test_a_probe_that_cannot_be_is_refused_by_name(tmp_path, capsys, of_level, key, value):
    data = json.loads((tmp_path / "probe.json").read_text())
    (data["levels"][0] if of_level else data)[key] = value
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    said = refused(capsys, *ADVISE_3, "-a", "AllReduce()", "--probe", "wrong.json")
    assert said.startswith("gradwire: --probe wrong.json")
    assert ("levels" if of_level and value == 3 and key == "replicas" else key) in said


@pytest.mark.usefixtures("folder")
def test_what_torchrun_never_says_is_named(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "WORLD_SIZE='two'" in refused(capsys, "probe")


@pytest.mark.parametrize(
    ("gpus", "options", "said"),
    [
        (0, ["--backend", "nccl"], "no GPU here"),
        (1, [], "LOCAL_WORLD_SIZE=2 processes on a machine with 1 GPU,"),
        (1, ["--backend", "nccl"], "--backend gloo"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_more_processes_than_gpus_are_refused(capsys, monkeypatch, gpus, options, said):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert said in refused(capsys, "probe", *options)


def test_a_model_of_another_framework_is_said(folder, tmp_path, capsys):
    """It is no error: shapes are shapes."""
    data = json.loads((tmp_path / "probe.json").read_text())
    (tmp_path / "of_jax.json").write_text(json.dumps({**data, "framework": "jax"}))
    with pytest.raises(SystemExit) as ended:
        app.main(
            [
                "advise",
                f"{WRONG}:linear",
                "--probe",
                "of_jax.json",
                "--step-ms",
                "3",
                "-a",
                "AllReduce()",
            ]
        )
    assert not ended.value.code
    assert "MODEL is of torch and --probe of jax" in capsys.readouterr().err
