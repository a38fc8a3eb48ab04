"""What a command line says of wrong arguments: each is named."""

import json
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
FILES = {
    "shapes.json": '{"mlp.weight": [512, 256], "mlp.bias": [512]}',
    "broken.json": "{",
    "list.json": "[3]",
    "empty.json": "{}",
    "negative.json": '{"w": [-1]}',
    "dtype.json": '{"w": {"shape": [3], "dtype": "int8"}}',
    "short.safetensors": "\x05\0\0\0\0\0\0\0{}",
    "some_wrong_models.py": textwrap.dedent(MODULE),
}
PLAN, ADVISE = ["plan", "shapes.json"], ["advise", "shapes.json"]
ADVISE_3 = [*ADVISE, "--step-ms", "3"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
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
        ([*PLAN, "--link", "10"], "--link '10'"),
        ([*PLAN, "--latency", "5"], "--latency '5'"),
        ([*PLAN, "--replicas", "4", "--nodes", "3"], "--nodes 3"),
        ([*PLAN, "--replicas", "0"], "'--replicas'"),
        ([*PLAN, "--links", "3"], "--links"),
        ([*ADVISE_3, "--probe", "absent.json"], "--probe absent.json: "),
        ([*ADVISE_3, "--probe", "shapes.json"], "--probe shapes.json"),
        ([*ADVISE_3, "--probe", "list.json"], "--probe list.json"),
        ([*ADVISE, "--step-ms", "0"], "--step-ms 0"),
        (ADVISE, "--step-ms"),
        ([*ADVISE_3, "--measure", "some_wrong_models:linear"], "--measure"),
        ([*ADVISE_3, "--quality", "best"], "--quality 'best'"),
        ([*ADVISE_3, "-a", "PowerSGD"], "--algorithm 'PowerSGD'"),
        ([*ADVISE_3, "-a", "PowerSGD(rank={'absent': 4})"], "--algorithm: "),
        ([*ADVISE, "--measure", "absent:step"], "--measure 'absent:step'"),
        ([*ADVISE, "--measure", "some_wrong_models:linear"], "--measure 'some_wrong_models:linear'"),
        (["probe"], "torchrun --nproc-per-node=8 --no-python gradwire probe"),
        (["probe", "--framework", "torch"], "gradwire probe --framework jax --coordinator"),
        (["probe", "--coordinator", "localhost:1"], "--coordinator localhost:1"),
        (["probe", "--processes", "2", "--process", "0"], "--processes 2"),
        (["probe", "--framework", "torch", "--processes", "2"], "--processes 2"),
        (["probe", "--framework", "tensorflow"], "--framework tensorflow"),
        (["probe", "--coordinator", "localhost:1", "--processes", "2", "--process", "2"], "--process 2"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("folder")
def test_a_wrong_argument_is_named(capsys, command, said):
    assert said in refused(capsys, *command)


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
