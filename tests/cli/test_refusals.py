"""What a command line says of wrong arguments: each is named."""

import json
import math
import textwrap

import jax  # noqa: F401  (as in `test_plan`)
import pytest

from gradwire.core.advise.probe import ALL, Level, Probe
from tests.cli.called import refused

MODULE = """
import torch
def linear():
    return torch.nn.Linear(4, 4)
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
}
PLAN, ADVISE = ["plan", "shapes.json"], ["advise", "shapes.json"]
ADVISE_3 = [*ADVISE, "--step-ms", "3"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text.encode("latin1"))
    samples = ((256, 1e-4), (1 << 20, 1e-2))
    Probe("torch", "cpu", 2, 1, (Level(ALL, 2, samples, samples, 1.0),)).save(tmp_path / "probe.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["plan", "absent.json"], "MODEL absent.json: "),
        (["plan", "broken.json"], "MODEL broken.json"),
        (["plan", "list.json"], "MODEL list.json"),
        (["plan", "empty.json"], "MODEL empty.json"),
        (["plan", "negative.json"], "'w' is [-1]"),
        (["plan", "dtype.json"], "dtype 'int8'"),
        (["plan", "short.safetensors"], "MODEL short.safetensors"),
        (["plan", "shapes"], "MODEL 'shapes'"),
        (["plan", "absent:build"], "MODEL 'absent:build'"),
        (["plan", "some_wrong_models:absent"], "'absent'"),
        (["plan", "some_wrong_models:number"], "type int"),
        (["plan", "some_wrong_models:nothing"], "MODEL 'some_wrong_models:nothing'"),
        (["plan", "some_wrong_models:without_inputs"], "Dense"),
        ([*PLAN, "-a", "PowerSGD(rnk=4)"], "--algorithm 'PowerSGD(rnk=4)'"),
        ([*PLAN, "-a", "PowerSGD(rank={'absent': 4})"], "--algorithm PowerSGD(rank={'absent': 4}): "),
        (["plan", "deep.json"], "MODEL deep.json"),
        (["plan", "deep.safetensors"], "MODEL deep.safetensors"),
        (["plan", "no_map.json"], "weight_map"),
        (["plan", "map.json"], "lost.safetensors"),
        (["plan", "integers.safetensors"], "MODEL integers.safetensors"),
        (["plan", "negative.safetensors"], "'w' is [-3]"),
        (["plan", "text.safetensors"], "'w' is 'abc'"),
        (["plan", ".:build"], "MODEL '.:build'"),
        ([*PLAN, "-a", "PowerSGD(rank=4, rank=5)"], "option rank twice"),
        ([*PLAN, "-a", "PowerSGD(rank={'*': 4, '*': 5})"], "key '*' twice"),
        ([*PLAN, "-a", "WireDtype(PowerSGD(4, start_step=1, start_step=2), 'int8')"], "option start_step twice"),
        ([*PLAN, "--replicas", str(1 << 31), "-a", "TwoLevel(AllReduce())"], "'--replicas'"),
        ([*PLAN, "--link", "10"], "--link '10'"),
        ([*PLAN, "--latency", "5"], "--latency '5'"),
        ([*PLAN, "--replicas", "4", "--nodes", "3"], "--nodes 3"),
        ([*PLAN, "--replicas", "0"], "'--replicas'"),
        ([*PLAN, "--links", "3"], "--links"),
        ([*ADVISE_3, "--probe", "absent.json"], "--probe absent.json: "),
        ([*ADVISE_3, "--probe", "shapes.json"], "--probe shapes.json"),
        ([*ADVISE_3, "--probe", "list.json"], "--probe list.json"),
        ([*ADVISE_3, "--probe", "deep.json"], "--probe deep.json"),
        ([*ADVISE, "--step-ms", "nan"], "--step-ms nan"),
        ([*ADVISE, "--step-ms", "inf"], "--step-ms inf"),
        ([*ADVISE, "--step-ms", "0"], "--step-ms 0"),
        (ADVISE, "--step-ms"),
        ([*ADVISE_3, "--measure", "some_wrong_models:linear"], "--measure"),
        ([*ADVISE_3, "--quality", "best"], "--quality 'best'"),
        ([*ADVISE_3, "--compare", "absent.json"], "--compare absent.json"),
        ([*ADVISE_3, "--compare", "probe.json"], "--compare: probe.json"),
        ([*ADVISE_3, "--compare", "probe.json", "--worse", "nan"], "--worse nan"),
        ([*ADVISE_3, "-a", "PowerSGD"], "--algorithm 'PowerSGD'"),
        ([*ADVISE_3, "-a", "PowerSGD(rank={'absent': 4})"], "--algorithm: "),
        ([*ADVISE, "--measure", "absent:step"], "--measure 'absent:step'"),
        ([*ADVISE, "--measure", "some_wrong_models:linear"], "--measure 'some_wrong_models:linear'"),
        (["probe"], "torchrun --nproc-per-node=8 --no-python gradwire probe"),
        (["probe", "--framework", "torch"], "gradwire probe --framework jax --coordinator"),
        (["probe", "--coordinator", "localhost:1"], "--coordinator localhost:1"),
        (["probe", "--processes", "2", "--process", "0"], "--processes 2"),
        (["probe", "--framework", "jax", "--output", "absent/probe.json"], "--output absent/probe.json"),
        (["probe", "--framework", "torch", "--processes", "2"], "--processes 2"),
        (["probe", "--framework", "tensorflow"], "--framework tensorflow"),
        (["probe", "--coordinator", "localhost:1", "--processes", "2", "--process", "2"], "--process 2"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("folder")
def test_a_wrong_argument_is_named(capsys, command, said):
    assert said in refused(capsys, *command)


OF_A_PROBE = [("replicas", value) for value in (0, -2, 1, "2", 2.5, True, None)]
OF_A_PROBE += [("nodes", 0), ("nodes", 3), ("framework", "tensorflow"), ("levels", []), ("device", 3)]
OF_A_LEVEL = [("replicas", 0), ("replicas", 3), ("name", 3)]
OF_A_LEVEL += [("overlap", value) for value in (math.nan, 7, "1", True)]
OF_A_LEVEL += [
    ("all_reduce", value) for value in ([], [[256, math.inf]], [[256, "1"]], [[1 << 20, 1], [256, 1]], [[0, 1]])
]
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


def test_a_model_of_another_framework_is_said(folder, tmp_path, capsys):
    """It is no error: shapes are shapes."""
    from gradwire.cli import app

    data = json.loads((tmp_path / "probe.json").read_text())
    (tmp_path / "of_jax.json").write_text(json.dumps({**data, "framework": "jax"}))
    command = ["advise", "some_wrong_models:linear", "--probe", "of_jax.json", "--step-ms", "3", "-a", "AllReduce()"]
    with pytest.raises(SystemExit) as ended:
        app.main(command)
    assert not ended.value.code
    assert "MODEL is of torch and --probe of jax" in capsys.readouterr().err
