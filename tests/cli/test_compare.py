"""`gradwire compare`: a table, a file to go on from, a picture; stopped, gone on with, refused."""

import json
import sys
import textwrap

import pytest

from gradwire import CompressionWarning, Probe
from gradwire.cli import app
from gradwire.core.advise.probe import ALL, Level
from tests.cli.called import refused, run

pytestmark = pytest.mark.slow
TRAINING = """
import dataclasses
import torch
from torch import nn
from gradwire.torch_backend import Training

def make(draw=torch.initial_seed):
    model, seed = nn.Linear(4, 4), draw()
    def batches(replica, replicas):
        generator = torch.Generator().manual_seed(seed + replica)
        return (torch.randn(4, 4, generator=generator) for _ in range(1000))
    held_out = torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(1))
    return Training(
        model, lambda p: torch.optim.SGD(p, 0.1), batches, lambda model, x: (model(x) - x).square().mean(),
        evaluate=lambda model: [(model(x) - x).square().mean() for x in held_out],
    )

def three_windows():
    training = make()
    return dataclasses.replace(training, evaluate=lambda model: training.evaluate(model)[:3])

def unseeded():
    torch.manual_seed(0)
    return make()

def by_argument(seed):
    torch.manual_seed(seed)
    return make()

def nothing():
    return None

def fails():
    return dict(None)

def reads():
    return open("data.bin").read()

def fails_later():
    def loss(model, x):
        raise ValueError("no loss")
    return dataclasses.replace(make(), loss=loss)

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "some_training.py").write_text(textwrap.dedent(TRAINING))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("some_training", None)


@pytest.fixture
def taken(monkeypatch):
    """What was trained: algorithm, seed, factor."""
    from gradwire.torch_backend.advise.compare import run as engine

    class Noted(list):
        stop = 0

    noted, trained = Noted(), engine.run

    def run_and_note(make, algorithm, replicas, steps, seed, looks, on_step, factor):
        if steps == STEPS:  # and not the few by which a training is known
            noted.append((repr(algorithm), seed, factor))
            if len(noted) == noted.stop:
                raise KeyboardInterrupt
        return trained(make, algorithm, replicas, steps, seed, looks, on_step, factor)

    monkeypatch.setattr(engine, "run", run_and_note)
    return noted


#: Of each run.
STEPS = 12


def command(*options, training="make"):
    return (
        "compare",
        f"some_training:{training}",
        "--replicas",
        "2",
        "--steps",
        str(STEPS),
        *options,
    )


def test_a_comparison_is_printed_kept_and_drawn(folder, capsys):
    options = ("-a", "LocalSGD(4)", "-a", "PowerSGD(rank=1)", "--seeds", "2")
    printed = run(capsys, *command(*options, "--csv", "losses.csv"))
    header, *rows = (
        line.split(",")
        for line in (folder / "losses.csv").read_text().replace("\r", "").splitlines()
    )
    assert header == ["method", "rate", "seed", "step", "loss"]
    assert {(row[0], row[2]) for row in rows} == {
        (name, seed)
        for seed in "01"
        for name in ("plain", "LocalSGD(period=4)", "PowerSGD(rank=1)")
    }
    assert {row[3] for row in rows if row[0] == "LocalSGD(period=4)"} == {"4", "8", "12"}
    assert "at step 12" in printed
    assert max(map(len, printed.splitlines())) <= 80
    picture = (folder / "comparison.svg").read_text()
    assert "LocalSGD" in picture
    assert "seconds" not in picture
    kept = json.loads((folder / "comparison.json").read_text())
    assert [(r["method"], r["seed"]) for r in kept["runs"]] == [
        (name, seed)
        for seed in range(2)
        for name in ("plain", "LocalSGD(period=4)", "PowerSGD(rank=1)")
    ]
    found = json.loads(run(capsys, *command(*options, "--json", "--picture", "losses.png")))
    assert (folder / "losses.png").read_bytes()[:4] == b"\x89PNG"
    assert "--picture losses.bmp: give a name that ends with .svg, .png, .pdf" in refused(
        capsys, *command(*options, "--picture", "losses.bmp")
    )
    assert found["LocalSGD(period=4)"]["seeds"] == 2
    long = [each | {"sent": 490.0} for each in kept["runs"]]
    (folder / "comparison.json").write_text(json.dumps(kept | {"runs": long}))
    rows = run(capsys, *command(*options)).splitlines()
    assert rows[rows.index("LocalSGD(period=4)") + 1].split()[:2] == ["490", "bytes"]
    (folder / "comparison.json").write_text(json.dumps(kept))
    run(capsys, *command(*options, "--link", "1Gbit", "--latency", "1ms", "--step-ms", "10"))
    picture = (folder / "comparison.svg").read_text()
    assert "estimated seconds" in picture
    assert "1 Gbit/s, a step alone takes 10 ms" in picture


def test_a_comparison_that_was_stopped_goes_on(folder, capsys, taken):
    options = command("-a", "Sign()", "--seeds", "2", training="by_argument")
    taken.stop = 3
    with pytest.raises(SystemExit) as ended:
        app.main(list(options))
    assert ended.value.code == 130
    said = capsys.readouterr()
    assert "goes on from comparison.json" in said.err
    assert "no interval" in said.out  # of one seed
    assert "no interval" not in run(capsys, *options)
    assert [name for name, *_ in taken] == [
        "AllReduce()",
        "Sign()",
        "AllReduce()",
        "AllReduce()",
        "Sign()",
    ]
    run(capsys, *options)
    assert len(taken) == 5
    # Uncompressed averages are run again where a method is looked at after other steps.
    run(capsys, *command("-a", "LocalSGD(7)", "--seeds", "1", training="by_argument"))
    assert [name for name, *_ in taken[5:]] == ["AllReduce()", "LocalSGD(period=7)"]


def test_what_was_stopped_is_not_shown_as_what_a_file_has_of_another(folder, capsys, taken):
    options = command("-a", "Sign()", "--seeds", "1")
    run(capsys, *options)
    before = (folder / "comparison.json").read_text()
    training = folder / "some_training.py"
    training.write_text(training.read_text().replace("SGD(p, 0.1)", "SGD(p, 0.2)"))
    sys.modules.pop("some_training", None)
    taken.stop = len(taken) + 1
    with pytest.raises(SystemExit) as ended:
        app.main(list(options))
    assert ended.value.code == 130
    said = capsys.readouterr()
    assert "stopped before a run had ended" in said.err
    assert not said.out
    assert (folder / "comparison.json").read_text() == before


def test_rates_are_searched_with_the_first_seed_and_gone_on_with(folder, capsys, taken):
    options = ("-a", "Sign()", "--seeds", "2", "--rates", "1", "0.01", "2", "--json")
    found = json.loads(run(capsys, *command(*options)))
    search = [
        (name, 0, factor) for name in ("AllReduce()", "Sign()") for factor in (0.01, 1.0, 2.0)
    ]
    best = {
        name: found[shown]["rate"]
        for name, shown in (("AllReduce()", "plain"), ("Sign()", "Sign()"))
    }
    assert taken == [*search, *((name, 1, factor) for name, factor in best.items())]
    assert best["AllReduce()"] > 0.01  # with which hardly anything is learned in 12 steps
    assert found["Sign()"]["tried"].keys() == {"0.01", "1", "2"}
    run(capsys, *command("-a", "Sign()", "--seeds", "1", "--rates=0.01", "--rates", "1", "2", "4"))
    assert taken[len(search) + 2 :] == [("AllReduce()", 0, 4.0), ("Sign()", 0, 4.0)]
    assert "×0.01" in run(capsys, *command("-a", "Sign()", "--seeds", "1", "--rates", "0.01"))
    assert json.loads((folder / "comparison.json").read_text())["factors"] == [0.01]
    assert len(taken) == len(search) + 4


def test_an_advice_of_a_method_of_ones_own(folder, capsys):
    """A file has its name alone."""
    (folder / "some_methods.py").write_text(
        "from gradwire import Sign\nclass Own(Sign):\n    pass\n"
    )
    run(capsys, *command("-a", "Sign()", "-a", "some_methods:Own()", "--seeds", "2"))
    samples = ((256, 1.0), (1 << 20, 1.0))
    Probe("torch", "cpu", 2, 1, (Level(ALL, 2, samples, samples, 0.0),)).save(folder / "probe.json")
    (folder / "shapes.json").write_text('{"weight": [4, 4], "bias": [4]}')
    words = ("advise", "shapes.json", "--step-ms", "1", "--compare", "comparison.json", "--json")
    with pytest.warns(CompressionWarning, match=r"Own\(\) is left out"):
        found = json.loads(run(capsys, *words))
    assert [each["algorithm"] for each in found["methods"]] == ["plain", "Sign()"]
    found = json.loads(run(capsys, *words, "-a", "some_methods:Own()"))
    assert [each["algorithm"] for each in found["methods"]] == ["plain", "Own()"]
    assert "some_training:make" in found["losses"]
    sys.modules.pop("some_methods")


def test_an_advice_weighs_what_was_compared(folder, capsys):
    told = json.loads(
        run(capsys, *command("-a", "Sign()", "-a", "LocalSGD(4)", "--seeds", "2", "--json"))
    )
    samples = ((256, 1.0), (1 << 20, 1.0))
    for replicas in (2, 3):
        level = Level(ALL, replicas, samples, samples, 0.0)
        Probe("torch", "cpu", replicas, 1, (level,)).save(folder / f"{replicas}.json")
    (folder / "shapes.json").write_text('{"weight": [4, 4], "bias": [4]}')
    (folder / "other.json").write_text('{"weight": [4, 5], "bias": [4]}')
    options = ("--step-ms", "1", "--compare", "comparison.json", "--loss", "1e9%")
    found = json.loads(
        run(capsys, "advise", "shapes.json", "--probe", "2.json", *options, "--json")
    )
    assert [method["algorithm"] for method in found["methods"]] == [
        "plain",
        "Sign()",
        "LocalSGD(period=4)",
    ]
    # A message of a second in four steps.
    assert found["recommended"] == "LocalSGD(period=4)"
    assert found["methods"][2]["loss"]["difference"] == told["LocalSGD(period=4)"]["difference"]
    assert "some_training:make, 12 steps, 2 seeds" in found["losses"]
    timed = command("-a", "Sign()", "--seeds", "2", "--step-ms", "1", "--probe")
    run(capsys, *timed, "2.json")
    assert "2 replicas on 1 node (torch, cpu)" in (folder / "comparison.svg").read_text()
    for said, words in (
        ("--replicas 3", ("advise", "shapes.json", "--probe", "3.json", *options)),
        ("--replicas 3", (*timed, "3.json")),
        ("--link with --probe", (*timed, "2.json", "--link", "1Gbit")),
        ("comparison.json", ("advise", "other.json", "--probe", "2.json", *options)),
    ):
        assert said in refused(capsys, *words)


@pytest.mark.parametrize(
    ("options", "training", "named"),
    [
        (("-a", "Sign("), "make", "--algorithm"),
        (("-a", "TwoLevel(PowerSGD(4))"), "make", "node"),
        (("-a", "LocalSGD({3: 4})"), "make", "period"),
        *((("-a", "Sign()"), training, "TRAINING") for training in ("number", "missing")),
        (("-a", "Sign()"), "nothing", "Training"),
        (
            ("-a", "Sign()"),
            "fails",
            ":fails raised TypeError: 'NoneType' object is not iterable (at ",
        ),
        (("-a", "Sign()"), "reads", ":reads raised FileNotFoundError: "),
        (("-a", "Sign()"), "fails_later", ":fails_later raised ValueError: no loss (at "),
        (("-a", "Sign()", "--seeds", "2"), "unseeded", "seeds"),
        (("-a", "Sign()", "--rates", "1", "2"), "three_windows", "rates"),
        *((("-a", "Sign()", "--rates", rate), "make", "rates") for rate in ("0", "much")),
        (("-a", "Sign()", "--link", "1Gbit"), "make", "--step-ms"),
        (("-a", "Sign()", "--link", "1Gbit", "--step-ms", "nan"), "make", "--step-ms nan"),
        (("-a", "Sign()", "--link", "fast", "--step-ms", "1"), "make", "--link 'fast'"),
        (
            ("-a", "Sign()", "--probe", "missing.json", "--step-ms", "1"),
            "make",
            "--probe missing.json",
        ),
        (("-a", "Sign()", "--step-ms", "1"), "make", "--link or --probe"),
        *(
            (("-a", "Sign()", option, "absent/x.svg"), "make", f"{option} absent/x.svg: there is")
            for option in ("--output", "--csv", "--picture")
        ),
        (("-a", "Sign()", "--output", "."), "make", "--output .: . is a folder"),
        (("-a", "Sign()", "-o", "x.json", "--csv", "x.json"), "make", "--csv x.json is the file"),
        (("-a", "Sign()", "-o", "x.svg"), "make", "--output x.svg is where the picture goes"),
    ],
)
def test_what_cannot_be_compared_is_refused(folder, capsys, options, training, named):
    said = refused(capsys, *command(*options, training=training))
    assert named in said
    if "raised" in named:
        assert "some_training.py:" in said
