"""What the doctor is made of, without a framework: its report, its processes, its command."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import gradwire
from gradwire import Sign, TopK, TwoLevel, diloco, doctoring
from gradwire.cli.app import main
from gradwire.cli.doctor import _conclude
from gradwire.core.simulate.doctor import kernels, messages
from gradwire.core.simulate.doctor.methods import QUICK, WHOLE, chosen
from gradwire.core.simulate.doctor.processes import Job, received, run_job, sent
from gradwire.core.simulate.doctor.report import (
    FAULT,
    NOTE,
    OK,
    SKIPPED,
    Fault,
    Report,
    Row,
    Section,
)

#: A process of the doctor, which does what its arguments say.
SPEAKER = """
import json, os, sys, time
from gradwire.core.simulate.doctor.processes import say_machine, say_row
from gradwire.core.simulate.doctor.report import Row
given = json.loads(sys.argv[1])
print("a warning")
say_machine({"selfcheck": os.environ["GRADWIRE_SELFCHECK"], "said": os.environ.get("SAID", "")})
for name, verdict in given["rows"]:
    if given.get("noise"):
        os.write(1, b"half a line")
    say_row(Row("part", name, verdict, str(os.getpid()) if name == "pid" else "why"))
if given.get("hangs"):
    time.sleep(600)
if given.get("fails"):
    sys.exit("it broke")
"""


@pytest.fixture
def speaker(tmp_path, monkeypatch):
    """The name of a module that says rows."""
    (tmp_path / "doctor_speaker.py").write_text(SPEAKER)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    return "doctor_speaker"


def ran(module, *arguments, seconds=200.0, environment=({}, {})):
    report = Report(show=lambda row: None)
    run_job(
        Job("part", module, arguments, environment[: len(arguments)], seconds),
        report.add,
        report.add_machine,
    )
    return report


def test_rows_of_the_first_process_and_faults_of_others(speaker):
    first, second = [("a", OK), ("b", NOTE)], [("a", OK), ("b", FAULT)]
    report = ran(speaker, {"rows": first}, {"rows": second}, environment=({"SAID": "one"}, {}))
    assert sorted((row.check, row.verdict) for row in report.rows) == [
        ("a", OK),
        ("b", NOTE),
        ("b, process 1", FAULT),
    ]
    assert [row.check for row in report.faults] == ["b, process 1"]
    assert sorted(
        (each["process"], each["selfcheck"], each["said"]) for each in report.machine
    ) == [
        (0, "0", "one"),
        (1, "0", ""),
    ]


def test_a_process_that_fails_is_a_fault(speaker):
    (fault,) = ran(
        speaker, {"rows": [("a", OK)], "fails": True}, {"rows": [], "hangs": True}
    ).faults
    assert fault.check == "process 0"
    assert fault.detail == "it ended with status 1 after a; it said: a warning | it broke"


@pytest.mark.slow
def test_a_process_that_hangs_is_ended(speaker, monkeypatch):
    monkeypatch.setattr("gradwire.core.simulate.doctor.processes.PATIENCE", 3.0)
    began = time.monotonic()
    (fault,) = ran(speaker, {"rows": [("a", OK)], "hangs": True}, seconds=20.0).faults
    assert fault.detail == "process 0 did not end: the last check that ended was a"
    assert time.monotonic() - began < 200


def test_the_report_is_written_after_each_row(tmp_path):
    path, shown = tmp_path / "doctor.json", []
    report = Report(path=path, show=shown.append)
    for n in range(3):
        report.add(Row("part", f"check {n}", OK))
        assert [row["check"] for row in json.loads(path.read_text())["rows"]] == [
            f"check {i}" for i in range(n + 1)
        ]
    assert [row.check for row in shown] == ["check 0", "check 1", "check 2"]


def test_a_section_ends_with_its_time_and_with_an_exception():
    rows = []
    section = Section("part", rows.append, time.monotonic() + 100)

    def wrong():
        raise Fault("it is wrong")

    section.check("right", lambda: "said")
    section.check("wrong", wrong)
    section.check("breaks", lambda: 1 / 0)  # type: ignore[return-value, arg-type]
    section.check("after", lambda: "")
    Section("part", rows.append, time.monotonic() - 1).check("late", lambda: "")
    assert [(row.check, row.verdict) for row in rows] == [
        ("right", OK),
        ("wrong", FAULT),
        ("breaks", FAULT),
        ("after", SKIPPED),
        ("late", SKIPPED),
    ]
    assert [row.detail for row in rows[:2]] == ["said", "it is wrong"]
    assert rows[2].detail.startswith("ZeroDivisionError: division by zero")


def test_algorithms_by_name_and_in_lists():
    assert chosen(None, quick=True) == QUICK
    assert chosen(None, quick=False) == WHOLE
    assert chosen([TopK(4)], quick=True) == (TopK(4),)
    # as processes are told
    assert received(sent(WHOLE)) == WHOLE
    assert chosen([TwoLevel(TopK(4), within="node")], quick=True) == (TopK(4),)
    with pytest.raises(TypeError, match="algorithms=LocalSGD"):
        gradwire.doctor([diloco(30)])


def test_an_own_class_is_sent_unless_only_this_process_has_it(tmp_path, monkeypatch):
    (tmp_path / "own_method_of_doctor.py").write_text(
        "from gradwire import Sign\nclass Mine(Sign):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from own_method_of_doctor import Mine  # type: ignore[import-not-found]

    assert received(sent([Mine()])) == (Mine(),)

    class Local(Sign):
        pass

    with pytest.raises(TypeError, match=r"algorithms: .*cannot be sent to them"):
        gradwire.doctor([Local()], show=lambda row: None)
    monkeypatch.setattr(Mine, "__module__", "__main__")
    with pytest.raises(TypeError, match=r"cannot import Mine .*put the class in a module"):
        gradwire.doctor([Mine()], show=lambda row: None)


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    """/dev/null, say."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    Report(path=pipe).save()
    reader.join(20)
    assert json.loads(read[0]) == {"machine": [], "rows": []}
    assert pipe.is_fifo()


def test_a_framework_that_is_not_whole_is_named(monkeypatch):
    """Without what gradwire needs beside it; or one that cannot be loaded."""

    def broken(*_):
        raise ImportError("libcublas.so.12: cannot open shared object file")

    monkeypatch.setattr(doctoring, "FRAMEWORKS", {"torch": (), "json": ("no_such_package",)})
    monkeypatch.setitem(doctoring._JOBS, "torch", broken)
    report = gradwire.doctor(quick=True, show=lambda row: None)
    torch, other = report.rows
    assert (torch.part, torch.verdict, other.part, other.verdict) == ("torch", FAULT, "json", NOTE)
    assert "libcublas.so.12" in torch.detail
    assert "here without no_such_package" in other.detail
    monkeypatch.setattr(doctoring, "FRAMEWORKS", {"json": ("no_such_package",)})
    assert gradwire.doctor(quick=True, show=lambda row: None).faults


def doctor_of(speaker, monkeypatch, *jobs):
    """Two frameworks, each with processes that say what they are told."""
    monkeypatch.setattr(doctoring, "FRAMEWORKS", {"json": (), "csv": ()})
    job = [
        lambda seconds, given=given: Job("part", speaker, [given], [{}], seconds) for given in jobs
    ]
    monkeypatch.setattr(doctoring, "_JOBS", dict.fromkeys(("json", "csv"), lambda *_: job))


def test_what_show_raises_ends_all_of_it(speaker, monkeypatch):
    hangs = {"rows": [("a", OK)], "hangs": True}
    doctor_of(speaker, monkeypatch, hangs, hangs)
    began = time.monotonic()
    with pytest.raises(BrokenPipeError):
        gradwire.doctor(quick=True, show=fail_with(BrokenPipeError()))
    assert time.monotonic() - began < 200


def fail_with(error):
    def show(row):
        raise error

    return show


def test_a_row_is_read_whatever_is_written_around_it(speaker):
    """By a library in C++, say, that ends no line."""
    (row, other) = ran(speaker, {"rows": [("a", OK), ("b", FAULT)], "noise": True}).rows
    assert (row.check, other.check, other.verdict) == ("a", "b", FAULT)


#: A doctor whose processes hang, until it is interrupted.
INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores
from gradwire import doctoring
from gradwire.core.simulate.doctor import processes
from gradwire.core.simulate.doctor.processes import Job
processes.LOOKED = 2.0  # they are not ended at once
doctoring.FRAMEWORKS = {"json": (), "csv": ()}
job = lambda seconds: Job("part", "doctor_speaker", [{"rows": [("pid", "ok")], "hangs": True}], [{}], seconds)
doctoring._JOBS = dict.fromkeys(("json", "csv"), lambda *_: [job, job])
doctoring.doctor(quick=True, show=lambda row: print(row.check, row.detail, flush=True))
"""


@pytest.mark.usefixtures("speaker")
def test_ctrl_c_ends_all_processes():
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(200) != 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_known_answers_are_numpys_own():
    """Each check is one that its own answer passes, and another answer does not."""
    for name, check in kernels.checks(quick=True).items():
        check.require([x.copy() for x in check.right])
        wrong = [x.copy() for x in check.right]
        flat = wrong[0].reshape(-1)
        flat[: flat.size // 2 + 1] = 1 - flat[: flat.size // 2 + 1].astype(float)
        with pytest.raises(Fault):
            check.require(wrong)
        assert name


def test_messages_tell_who_has_sent_them():
    first, second = messages.answers(2)
    assert messages.require_right(first, 0, 2) == "10 kinds"
    with pytest.raises(Fault, match="all-to-all on replica 0 of 2"):
        messages.require_right(first | {"all-to-all": second["all-to-all"]}, 0, 2)


@pytest.fixture
def without_frameworks(monkeypatch):
    monkeypatch.setattr("gradwire.doctoring.FRAMEWORKS", {"no_such_framework": ()})


@pytest.mark.usefixtures("without_frameworks")
def test_without_a_framework_it_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--output", str(tmp_path / "doctor.json")])
    assert ended.value.code == 2
    assert "needs torch or jax: pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--output", "no/such/folder/doctor.json"],
            "--output no/such/folder/doctor.json: there is no folder no/such/folder",
        ),
        (["-a", "diloco(30)"], "algorithms=LocalSGD"),
        (["-a", "NoSuch()"], "--algorithm 'NoSuch()'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_finds_a_fault(tmp_path, capsys, monkeypatch):
    """One that is planted in all of torch's processes. Without one README.md runs it, in torch and
    in JAX."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.setattr("gradwire.doctoring.FRAMEWORKS", {"torch": ()})
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    monkeypatch.setattr("gradwire.doctoring.SECONDS", {True: 200.0, False: 200.0})
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--quick", "-a", "Sign()"])
    said, report = capsys.readouterr().out, json.loads((tmp_path / "doctor.json").read_text())
    assert ended.value.code == 1, said
    assert {row["part"] for row in report["rows"]} >= {
        "torch, 2 ranks, gloo, cpu",
        "torch, kernels, cpu",
    }
    wrong = {row["check"] for row in report["rows"] if row["verdict"] == FAULT}
    planted = {"bits there and back [256, 512]", "signs of several tensors there and back"}
    assert wrong == planted | {"Sign()", "Sign(), process 1"}
    assert "WRONG HERE: " in said


#: Bits of a matrix come back in another order, by itself and with others.
PLANTED = """
import sys
if "gradwire.torch_backend.doctor" in sys.orig_argv:
    from gradwire.torch_backend.ops.kernels import TorchOps
    right = TorchOps.unpack_bits
    TorchOps.unpack_bits = lambda ops, x, shape: right(ops, x, shape).flip(0) if shape == (256, 512) else right(ops, x, shape)
    added = TorchOps.sum_of_signs
    TorchOps.sum_of_signs = lambda *args: [x.flip(0) for x in added(*args)]
"""


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [(OK, ""), (SKIPPED, "needs two GPUs")],
            "Nothing is wrong here. here.json has all of it.",
        ),
        (
            [(OK, ""), (SKIPPED, "no time was left"), (SKIPPED, "no time was left")],
            "no time was left for 2 checks, see here.json.",
        ),
        ([(SKIPPED, "no time was left")], "Nothing was looked at. here.json says why."),
        ([(NOTE, "lacks optax")], "Nothing was looked at. here.json says why."),
    ],
)
def test_what_was_not_looked_at_is_not_said_to_be_right(capsys, rows, said):
    report = Report(show=lambda row: None)
    for i, (verdict, detail) in enumerate(rows):
        report.add(Row("part", f"check {i}", verdict, detail))
    _conclude(report, Path("here.json"))
    assert " ".join(capsys.readouterr().out.split()).endswith(said)
