"""`gradwire probe` and `gradwire advise`, on real processes and on devices of one."""

import json
from pathlib import Path

import jax
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import gradwire
from gradwire.core.advise.advice import name_of
from gradwire.core.advise.probe import ALL, BETWEEN, WITHIN
from tests.cli import commands, jax_commands
from tests.cli.called import run
from tests.launch import jax_processes, run_ranks

pytestmark = pytest.mark.slow
JAX_METHODS = [
    gradwire.PowerSGD(2, half_step=True, start_step=3),
    gradwire.diloco(4, compressor=gradwire.PowerSGD(2)),
]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """The file that four ranks on two nodes have written, and what they have printed."""
    output = tmp_path_factory.mktemp("probe") / "probe.json"
    options = ["--nodes", "2", "--backend", "gloo", "--output", str(output)]
    return output, run_ranks(Path(commands.__file__), 4, "probe", *options)


def test_processes_are_probed(probed):
    file, printed = probed
    probe = gradwire.Probe.load(file)
    assert (probe.framework, probe.replicas, probe.nodes) == ("torch", 4, 2)
    assert [(level.name, level.replicas) for level in probe.levels] == [
        (ALL, 4),
        (WITHIN, 2),
        (BETWEEN, 2),
    ]
    for level in probe.levels:
        assert len(level.all_reduce) == len(level.exchange) == 3
        assert level.latency >= 0
        assert level.bandwidth > 0
    assert printed.startswith(str(probe))
    assert printed.count("written to") == 1  # by the first rank alone


def test_an_advice_from_a_probe(probed, tmp_path, capsys, monkeypatch):
    """Of a file of shapes or weights, of methods of one's own, of a step that is measured, and by a
    function."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some_training.py").write_text(TRAINING)
    (tmp_path / "shapes.json").write_text(json.dumps({"mlp.weight": [512, 256], "mlp.bias": [512]}))
    save_file(torch.nn.Linear(64, 64).state_dict(), tmp_path / "model.safetensors")
    options = ["--probe", str(probed[0]), "-a", "PowerSGD(rank=4)", "--step-ms", "6000000"]
    printed = run(capsys, "advise", "shapes.json", *options)
    assert printed.startswith("526.3 kB of gradients, 4 replicas on 2 nodes (torch, cpu")
    # on the busiest machine there is nothing to gain on 0.5 MB in a hundred minutes
    assert "Leave it: " in printed
    data = json.loads(run(capsys, "advise", "shapes.json", *options, "--json"))
    assert [m["algorithm"] for m in data["methods"]] == ["plain", "PowerSGD(rank=4)"]
    assert data["recommended"] == "plain"
    for method in data["methods"]:
        assert method["step"] == pytest.approx(
            method["compute"] + method["compression"] + method["exposed"]
        )
        assert method["compression"] > 0
    assert data["methods"][1]["wire_bytes"] == (512 + 256) * 4 * 4 + 2048
    assert data["methods"][0]["compute"] == pytest.approx(6000)
    data = json.loads(
        run(capsys, "advise", "model.safetensors", *options[:2], "--step-ms", "180", "--json")
    )
    assert {"plain", "Sign()"} <= {method["algorithm"] for method in data["methods"]}
    assert [choice["loss"] for choice in data["choices"]] == [0.005, 0.02, 0.05]
    measured = ["--measure", "some_training:train_step", "-a", "Sign()"]
    assert "Sign()" in run(capsys, "advise", "some_training:build", *options[:2], *measured)
    given = {"probe": probed[0], "step": 600.0, "algorithms": [gradwire.PowerSGD(2)]}
    assert gradwire.advise(torch.nn.Linear(64, 64), **given, loss=0).recommended == "plain"
    with pytest.raises(ValueError, match="loss='best'"):
        gradwire.advise(torch.nn.Linear(64, 64), **given, loss="best")


TRAINING = """
import torch
model = torch.nn.Linear(64, 64)
def train_step():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
def build():
    return torch.nn.Linear(64, 64)
"""


def test_no_group_and_one_rank_are_no_link():
    import gradwire.torch_backend

    with pytest.raises(ValueError, match="group=None"):
        gradwire.torch_backend.probe()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="two replicas"):
            gradwire.torch_backend.probe()
    finally:
        dist.destroy_process_group()


def test_devices_of_jax_are_probed(monkeypatch):
    import gradwire.jax_backend

    monkeypatch.setattr("gradwire.core.advise.probe.SIZES", (256, 4096))
    monkeypatch.setattr("gradwire.core.advise.probe.REPEATED", 0.002)
    mesh = jax.make_mesh((4,), ("data",))
    probe = gradwire.jax_backend.probe(mesh, "data", nodes=2)
    assert [(level.name, level.replicas) for level in probe.levels] == [
        (ALL, 4),
        (WITHIN, 2),
        (BETWEEN, 2),
    ]
    assert (probe.framework, probe.replicas, probe.nodes) == ("jax", 4, 2)
    tree = {"w": jax.numpy.zeros((64, 64))}
    advice = gradwire.advise(
        [tree], probe, step=lambda: jax.numpy.ones(8).sum(), algorithms=JAX_METHODS
    )
    assert [method.algorithm for method in advice.methods] == ["plain", *map(name_of, JAX_METHODS)]
    assert all(method.compression > 0 for method in advice.methods)
    assert advice.model_bytes == 64 * 64 * 4
    with pytest.raises(ValueError, match="axis_name='model'"):
        gradwire.jax_backend.probe(mesh, "model")


def test_two_processes_of_jax_are_probed(tmp_path):
    output = tmp_path / "probe.json"
    jax_processes(Path(jax_commands.__file__), 2, str(output))
    assert (gradwire.Probe.load(output).framework, gradwire.Probe.load(output).nodes) == ("jax", 2)
