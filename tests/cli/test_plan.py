"""`gradwire plan`: models in all forms, tables and JSON; and where a command prints: streams that
are full, closed, narrow or left by their reader, and Ctrl-C."""

import errno
import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

# (a command's process has loaded neither, and finds both; one of tests may have loaded one alone)
import jax  # noqa: F401
import pytest
import torch

import gradwire
from gradwire import cli
from gradwire.cli import app, models
from gradwire.core.plan import expressions
from gradwire.core.simulate.doctor.report import Report
from gradwire.core.state.files import whole_file
from tests.cli.called import refused, run
from tests.launch import LIMIT

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
METHOD = """
from dataclasses import dataclass
from gradwire import AllReduce
@dataclass(frozen=True)
class Halves(AllReduce):
    every: int = 1
    def __repr__(self):
        return f"Halves(every={self.every})"
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
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        check=True,
        timeout=LIMIT,
        stdout=subprocess.DEVNULL,
    )


def planned(capsys, *options):
    (given,) = json.loads(run(capsys, "plan", "shapes.json", *options, "--json"))["plans"]
    return given


@pytest.mark.slow
def test_a_model_of_transformers_is_known_by_its_configuration(folder, capsys):
    """By a file of its own, which nothing but it is read of, and by its class, with what that has
    by default."""
    import transformers

    tiny = {
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 32,
        "n_positions": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    given = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **tiny}
    (folder / "config.json").write_text(json.dumps(given))
    with torch.device("meta"):
        built = [
            transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
            for options in (tiny, {})
        ]
    for name, model in zip(("config.json", "transformers:GPT2LMHeadModel"), built, strict=True):
        found = models.load_model(name)
        assert found.framework == "torch"
        shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
        assert {key: spec.shape for key, spec in found.specs.items()} == shapes
    (folder / "config.json").write_text(json.dumps(given | {"architectures": ["NobodysModel"]}))
    assert "wte.weight" in models.load_model("config.json").specs  # the model without a head
    (folder / "config.json").write_text(json.dumps({"model_type": "nobodys"}))
    assert "does not read it" in refused(capsys, "plan", "config.json")


def test_two_levels_tell_what_leaves_a_node_and_its_own_ratio(folder, capsys):
    """Each column is of one level, and the ratio that of the bytes beside it. The replicas of a
    node share its link."""
    options = ("-a", "TwoLevel(PowerSGD(rank=4), within=2)", "--replicas", "8", "--nodes", "4")
    given = planned(capsys, *options)
    # which replicas of a node send together
    one_level = gradwire.plan(TUPLES, gradwire.PowerSGD(rank=4)).wire_bytes
    assert given["between_nodes_bytes"] == one_level
    assert given["within_node_bytes"] + one_level / 2 == given["wire_bytes"]
    printed = run(capsys, "plan", "shapes.json", *options, "--summary")
    assert "mlp.weight" not in printed  # totals alone
    (row,) = (line for line in printed.splitlines() if line.startswith("TwoLevel"))
    # Four nodes in a ring pass on 2 · 3/4 of the node's bytes, and eight replicas 2 · 7/8 of their
    # gradients.
    assert given["link_bytes"] == pytest.approx(1.5 * one_level)
    for cell in (f"{given['wire_bytes'] / 1e3:.1f} kB", f"{given['link_bytes'] / 1e3:.1f} kB"):
        assert cell in row
    assert f"{1.75 * given['dense_bytes'] / given['link_bytes']:.1f}×" in row
    assert "computed, not measured" in printed
    assert "Gloo was counted" in run(
        capsys, "plan", "shapes.json", *options, "--summary", "--library", "gloo"
    )
    assert "--library" in refused(capsys, "plan", "shapes.json", "--library", "mpi")
    # Two nodes hand each other each byte once, in two hops; and what stays on a node is not on the
    # link.
    given = planned(capsys, "-a", "TwoLevel(AllReduce())", "--replicas", "8", "--nodes", "2")
    assert given["seconds"] == pytest.approx(2 * 50e-6 + 4 * (512 * 256 + 512) / 1.25e9)
    given = planned(
        capsys, "-a", "LocalSGD({'node': 1, 'all': 4})", "--replicas", "8", "--nodes", "2"
    )
    local = gradwire.plan(TUPLES, gradwire.LocalSGD(4))
    assert given["seconds"] == pytest.approx(local.seconds(8, 50e-6, 1.25e9, nodes=2))
    # Between 512 nodes short messages go up and down a tree nine deep, codes to each replica that
    # is elsewhere; what is charged is printed.
    big = ("--replicas", "4096", "--nodes", "512")
    given = planned(capsys, "-a", "PowerSGD(rank=4)", *big)
    assert given["hops"] == {"tree": 2 * 2 * 9}
    assert given["seconds"] < 2e-3
    printed = run(capsys, "plan", "shapes.json", "-a", "WireDtype(AllReduce(), 'int8')", *big)
    assert (
        "AllReduce() 18 in a tree, WireDtype(AllReduce(), 'int8') 4088 sent directly and 512 round a ring."
        in printed
    )


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
    assert given["utilization"] == gradwire.utilization(
        TUPLES, method, step=2e-3, link="1Gbit", replicas=8
    )
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

    weights = {
        "w": torch.zeros(64, 32, dtype=torch.bfloat16),
        "count": torch.zeros(3, dtype=torch.int64),
    }
    safetensors.torch.save_file(weights, "w.safetensors")
    index = {"weight_map": {"w": "w.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in ("w.safetensors", "model.safetensors.index.json"):
        assert models.load_model(file).specs == {"w": gradwire.Spec((64, 32), "bfloat16")}
    short = {f"layers.{i}": torch.zeros(8, 8, dtype=torch.float8_e4m3fn) for i in range(4)}
    safetensors.torch.save_file(weights | short, "w.safetensors")
    with pytest.warns(
        gradwire.CompressionWarning, match=r"4 tensors of floats of 8 bits.*'layers.0'.*and 1 more"
    ):
        assert models.load_model("w.safetensors").specs.keys() == {"w"}


def test_help_is_not_cut_and_names_what_can_be_given(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = run(capsys, "--help")
    assert max(map(len, said.splitlines())) <= 80
    assert "..." not in said.replace("[ARGS]...", "")
    for name in expressions.NAMES:
        assert name in said


def test_a_codec_alone_and_a_method_of_ones_own(folder, capsys):
    (folder / "some_methods.py").write_text(textwrap.dedent(METHOD))
    methods = (
        "int8",
        "some_methods:Halves(every=2)",
        "WireDtype(some_methods:Halves(every=2), 'int8')",
    )
    said = run(
        capsys,
        "plan",
        "shapes.json",
        *(word for each in methods for word in ("-a", each)),
        "--json",
    )
    names = [each["algorithm"] for each in json.loads(said)["plans"]]
    coded = [
        f"WireDtype(algorithm={each}, dtype='int8')" for each in ("AllReduce()", "Halves(every=2)")
    ]
    assert names == [coded[0], "Halves(every=2)", coded[1]]
    sys.modules.pop("some_methods")


def test_a_script_that_reads_its_arguments_is_not_given_those_of_the_command(
    folder, capsys, monkeypatch
):
    """Nor is a function of it, which finds the modules beside it too."""
    reads = """
        import argparse
        def parsed():
            parser = argparse.ArgumentParser()
            parser.add_argument("--steps")
            return parser.parse_args()
        parsed()
        """
    built = """
        def built():
            parsed()
            import beside_them
            return beside_them.models.trained()
        """
    (folder / "some_models.py").write_text("".join(map(textwrap.dedent, (reads, MODELS, built))))
    (folder / "beside_them.py").write_text("import some_models as models")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    for name in ("trained", "built"):
        said = run(capsys, "plan", f"some_models:{name}", "-a", "AllReduce()", "--json")
        assert json.loads(said)["plans"][0]["dense_bytes"] == 2 * 64 * 64
    assert "" not in sys.path
    del sys.modules["beside_them"]


def test_the_version_is_told(capsys):
    assert run(capsys, "--version") == f"gradwire {gradwire.__version__}\n"


@pytest.mark.parametrize("package", ["rich", "typer"])
def test_the_bare_library_says_what_its_command_needs(package, monkeypatch):
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] == package or name.startswith("gradwire.cli.")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"{package}.*gradwire\[cli\]"):
        cli.main()


COMMAND = [sys.executable, "-c", "from gradwire.cli import main; main()", "plan", "shapes.json"]
INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests are run in the background
import gradwire.cli.app as app
def slow(*args, **kwargs):
    signal.raise_signal(signal.SIGINT)  # in this thread: another would return first
app.load_model = slow
from gradwire.cli import main
main()
"""


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """With more shapes than a pipe holds characters of their table."""
    streams = tmp_path_factory.mktemp("streams")
    shapes = {
        f"layers.{i}.self_attention.output_projection.weight": [512, 256] for i in range(1000)
    }
    (streams / "shapes.json").write_text(json.dumps(shapes))
    (streams / "small.json").write_text('{"weight": [512, 256]}')
    return streams


#: So little that it is written when the command ends.
SMALL = [*COMMAND[:-1], "small.json", "--json"]


def called(streams, *args, **options):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        args,
        cwd=streams,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT,
        check=False,
        **options,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done


def test_a_full_disk_is_said_in_one_line_and_a_closed_output_is_none(streams):
    with open("/dev/full", "w") as full:
        done = called(streams, *SMALL, stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert called(streams, "bash", "-c", '"$@" >&-', "bash", *SMALL[:-1]).returncode == 0


def test_a_reader_that_leaves_hears_no_complaint(streams):
    with subprocess.Popen(
        COMMAND, cwd=streams, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
    end, output = os.pipe()
    os.close(end)
    with os.fdopen(output, "wb") as left:  # before anything was written
        done = called(streams, *SMALL, stdout=left)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_interrupted_command_says_so_in_one_line(streams):
    done = called(streams, sys.executable, "-c", INTERRUPTED, *COMMAND[3:], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gradwire: interrupted\n")


ALGORITHMS = ["-a", "PowerSGD(rank=4)", "-a", "WireDtype(AllReduce(), 'int8')", "-a", "TopK(64)"]


class Screen(io.TextIOWrapper):
    def isatty(self):
        return True


def shown(monkeypatch, streams, columns, encoding="utf-8", **env):
    """What a screen of so many columns is sent, of a plan with long names."""
    names = {
        "transformer.h.0.attention.query_key_value.weight": [2304, 768],
        "blocks[0].bias": [2304],
        "wte": [50257, 768],
    }
    (streams / "long.json").write_text(json.dumps(names))
    screen = Screen(io.BytesIO(), encoding=encoding, newline="")
    monkeypatch.chdir(streams)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in [("COLUMNS", str(columns)), ("TERM", "xterm-256color"), *env.items()]:
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        app.main(["plan", "long.json", *ALGORITHMS, "--replicas", "8"])
    assert not ended.value.code
    return screen.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("columns", [1, 20, 40, 80])
def test_no_figure_is_lost_on_a_narrow_screen(streams, monkeypatch, columns):
    text = shown(monkeypatch, streams, columns, NO_COLOR="1")
    for figure in (
        "50257×768",
        "154.4 MB",
        "816.4 kB",
        "messages",
        "link time",
        "PowerSGD",
        "(rank=4)",
        "'int8')",
    ):
        assert figure in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert columns < 80 or ("blocks[0].bias" in text and "WireDtype(AllReduce()," in text)


def test_codes_of_a_screen_only_where_they_are_wanted_and_an_encoding_without_a_times_sign(
    streams, monkeypatch
):
    assert "\x1b" in shown(monkeypatch, streams, 80)
    assert "\x1b" not in shown(monkeypatch, streams, 80, NO_COLOR="1")
    assert "50257?768" in shown(monkeypatch, streams, 80, encoding="ascii")


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    reader = tmp_path / "pipe"
    os.mkfifo(reader)
    end = os.open(reader, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with whole_file(reader) as file:
            file.write(b"whole")
        assert os.read(end, 100) == b"whole"
    finally:
        os.close(end)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert reader.is_fifo()


def test_an_output_that_has_been_led_to_a_file_is_written_to_and_not_replaced(tmp_path):
    """As /dev/stdout is by a shell."""
    target = tmp_path / "written"
    with target.open("w+b") as led:
        path = Path(f"/dev/fd/{led.fileno()}")
        assert path.is_file()
        models.require_folder("--output", path)
        with whole_file(path) as file:
            file.write(b"whole")
        report = Report(path=path, show=lambda row: None)
        report.save()
        assert path.is_symlink()
    assert json.loads(target.read_text())["rows"] == []
    assert [each.name for each in tmp_path.iterdir()] == ["written"]


def test_a_file_of_weights_is_not_read_as_text(folder, monkeypatch):
    import safetensors.torch

    weights = folder / "large.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(4, 4)}, weights)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("it is read"))
    assert models.load_model(str(weights)).specs["w"].shape == (4, 4)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("train.py:build", "train:build"),
        ("./my/train.py:build", "my.train:build"),
        ("my/train:build", "my.train:build"),
    ],
)
def test_a_path_in_place_of_a_module_is_not_imported(folder, capsys, given, meant):
    (folder / "train.py").write_text("raise SystemExit('it was run')")
    said = refused(capsys, "plan", given, "-a", "Sign()")
    assert "is a file" in said
    assert meant in said
