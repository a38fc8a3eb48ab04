"""`gradwire plan`: models in all forms, tables and JSON."""

import json
import subprocess
import sys
import textwrap

import jax  # noqa: F401  (a command's process has loaded neither, and finds both; one of tests may have loaded torch alone)
import pytest

import gradwire
from gradwire import cli
from gradwire.cli import models
from tests.cli.called import refused, run

SHAPES = {"mlp.weight": [512, 256], "mlp.bias": [512]}
TUPLES = {name: tuple(shape) for name, shape in SHAPES.items()}
MODELS = """
def linear():
    import torch
    return torch.nn.Linear(1 << 20, 1 << 20)  # 4 TiB
def trained():
    import torch
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    model.bias.requires_grad_(False)
    return model
def dense():
    import flax.linen as nn, jax.numpy as jnp
    return nn.Dense(1 << 20), jnp.zeros((1, 1 << 20))
def linear_nnx():
    from flax import nnx
    return nnx.Linear(1 << 20, 1 << 20, rngs=nnx.Rngs(0))
def mlp():
    import equinox, jax
    return equinox.nn.MLP(1 << 20, 4, 1 << 20, 1, key=jax.random.key(0))
def tree():
    import jax.numpy as jnp
    return {"a": {"kernel": jnp.zeros((1 << 20, 1 << 20), jnp.bfloat16)}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "some_models.py").write_text(textwrap.dedent(MODELS))
    (tmp_path / "shapes.json").write_text(json.dumps(SHAPES))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("some_models", None)


def test_neither_framework_is_needed_for_a_file_of_shapes(folder):
    program = """
import sys
from gradwire.cli.app import main
try:
    main(["plan", "shapes.json", "-a", "PowerSGD(rank=4)", "-a", "AllReduce()"])
finally:
    assert not {"torch", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, timeout=240, stdout=subprocess.DEVNULL)


def planned(capsys, *options):
    (given,) = json.loads(run(capsys, "plan", "shapes.json", *options, "--json"))["plans"]
    return given


def test_two_levels_tell_what_leaves_a_node_and_its_own_ratio(folder, capsys):
    """Each column is of one level, and the ratio that of the bytes beside it. The replicas of a node share its link."""
    options = ("-a", "TwoLevel(PowerSGD(rank=4), within=2)", "--replicas", "8", "--nodes", "4")
    given = planned(capsys, *options)
    one_level = gradwire.plan(TUPLES, gradwire.PowerSGD(rank=4)).wire_bytes  # which replicas of a node send together
    assert given["between_nodes_bytes"] == one_level
    assert given["within_node_bytes"] + one_level / 2 == given["wire_bytes"]
    printed = run(capsys, "plan", "shapes.json", *options, "--summary")
    assert "mlp.weight" not in printed  # totals alone
    (row,) = (line for line in printed.splitlines() if line.startswith("TwoLevel"))
    for cell in (f"{one_level / 1e3:.1f} kB", f"{given['dense_bytes'] / one_level:.1f}×"):
        assert cell in row
    assert f"{given['within_node_bytes'] / 1e3:.1f} kB" in row
    # Two nodes hand each other each byte once, in two hops; and what stays on a node is not on the link.
    given = planned(capsys, "-a", "TwoLevel(AllReduce())", "--replicas", "8", "--nodes", "2")
    assert given["seconds"] == pytest.approx(2 * 50e-6 + 4 * (512 * 256 + 512) / 1.25e9)
    given = planned(capsys, "-a", "LocalSGD({'node': 1, 'all': 4})", "--replicas", "8", "--nodes", "2")
    assert given["seconds"] == pytest.approx(gradwire.plan(TUPLES, gradwire.LocalSGD(4)).seconds(8, 50e-6, 1.25e9))


def test_json_is_the_plan(folder, capsys):
    given, plan = (
        planned(capsys, "-a", "TopK(64)", "--replicas", "8"),
        gradwire.plan(TUPLES, gradwire.TopK(64), world_size=8),
    )
    assert (given["wire_bytes"], given["messages"]) == (plan.wire_bytes, plan.collectives)
    assert given["seconds"] == pytest.approx(plan.seconds(8, 50e-6, 1.25e9))
    assert given["outgrown_at"] == plan.outgrown_at
    assert [t["wire_bytes"] for t in given["tensors"]] == [t.wire_bytes for t in plan.tensors]
    (folder / "stack.json").write_text('{"experts.w": [64, 256, 256]}')
    assert "Say stacked={'experts.*': 1}" in run(capsys, "plan", "stack.json")  # below the table


def test_the_share_of_the_time_that_computes(folder, capsys):
    options = ("-a", "PowerSGD(rank=4)", "--replicas", "8", "--link", "1Gbit", "--latency", "0us")
    asked = (*options, "--step-ms", "2", "--utilization")
    given, method = planned(capsys, *asked), gradwire.PowerSGD(rank=4)
    assert given["utilization"] == gradwire.utilization(TUPLES, method, step=2e-3, link="1Gbit", replicas=8)
    assert given["link_for_90"] == gradwire.link_for(TUPLES, method, step=2e-3, replicas=8)
    assert planned(capsys, *asked, "--latency", "1s")["link_for_90"] is None
    assert "utilization" not in planned(capsys, *options)
    for wrong in ((*options, "--utilization"), (*asked, "--step-ms", "-1")):
        assert "--step-ms" in refused(capsys, "plan", "shapes.json", *wrong)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", {"weight": (1 << 20, 1 << 20), "bias": (1 << 20,)}),
        ("trained", {"weight": (64, 64)}),
        ("dense", {"bias": (1 << 20,), "kernel": (1 << 20, 1 << 20)}),
        ("linear_nnx", {"bias": (1 << 20,), "kernel": (1 << 20, 1 << 20)}),
        ("mlp", {"layers/0/weight": (1 << 20, 1 << 20), "layers/1/bias": (4,)}),
        ("tree", {"a/kernel": (1 << 20, 1 << 20)}),
    ],
)
def test_models_are_built_without_memory(folder, name, expected):
    found = models.load_model(f"some_models:{name}")
    assert expected.items() <= {name: spec.shape for name, spec in found.specs.items()}.items()
    assert found.framework == ("torch" if name in ("linear", "trained") else "jax")
    if name in ("trained", "tree"):
        assert {spec.dtype for spec in found.specs.values()} == {"bfloat16"}


def test_files_of_weights(folder, capsys):
    import safetensors.torch
    import torch

    weights = {"w": torch.zeros(64, 32, dtype=torch.bfloat16), "count": torch.zeros(3, dtype=torch.int64)}
    safetensors.torch.save_file(weights, "w.safetensors")
    index = {"weight_map": {"w": "w.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in ("w.safetensors", "model.safetensors.index.json"):
        assert models.load_model(file).specs == {"w": gradwire.Spec((64, 32), "bfloat16")}


def test_the_version_is_told(capsys):
    assert run(capsys, "--version") == f"gradwire {gradwire.__version__}\n"


@pytest.mark.parametrize("package", ["rich", "typer"])
def test_the_bare_library_says_what_its_command_needs(package, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name.startswith("gradwire.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"{package}.*gradwire\[cli\]"):
        cli.main()
