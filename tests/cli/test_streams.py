"""Where a command prints: streams that are full, closed, narrow or left by their reader, and Ctrl-C."""

import errno
import io
import json
import os
import subprocess
import sys

import pytest

from gradwire.cli import app
from gradwire.core.state.files import whole_file

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
def folder(tmp_path_factory):
    """With more shapes than a pipe holds characters of their table."""
    folder = tmp_path_factory.mktemp("streams")
    shapes = {f"layers.{i}.self_attention.output_projection.weight": [512, 256] for i in range(1000)}
    (folder / "shapes.json").write_text(json.dumps(shapes))
    (folder / "small.json").write_text('{"weight": [512, 256]}')
    return folder


#: So little that it is written when the command ends.
SMALL = [*COMMAND[:-1], "small.json", "--json"]


def called(folder, *args, **options):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        args, cwd=folder, env=env, stderr=subprocess.PIPE, text=True, timeout=120, check=False, **options
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done


def test_a_full_disk_is_said_in_one_line_and_a_closed_output_is_none(folder):
    with open("/dev/full", "w") as full:
        done = called(folder, *SMALL, stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert called(folder, "bash", "-c", '"$@" >&-', "bash", *SMALL[:-1]).returncode == 0


def test_a_reader_that_leaves_hears_no_complaint(folder):
    with subprocess.Popen(COMMAND, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
    end, output = os.pipe()
    os.close(end)
    with os.fdopen(output, "wb") as left:  # before anything was written
        done = called(folder, *SMALL, stdout=left)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_interrupted_command_says_so_in_one_line(folder):
    done = called(folder, sys.executable, "-c", INTERRUPTED, *COMMAND[3:], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gradwire: interrupted\n")


ALGORITHMS = ["-a", "PowerSGD(rank=4)", "-a", "WireDtype(AllReduce(), 'int8')", "-a", "TopK(64)"]


class Screen(io.TextIOWrapper):
    def isatty(self):
        return True


def printed(monkeypatch, folder, columns, encoding="utf-8", **env):
    """What a screen of so many columns is sent, of a plan with long names."""
    names = {
        "transformer.h.0.attention.query_key_value.weight": [2304, 768],
        "blocks[0].bias": [2304],
        "wte": [50257, 768],
    }
    (folder / "long.json").write_text(json.dumps(names))
    screen = Screen(io.BytesIO(), encoding=encoding, newline="")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in [("COLUMNS", str(columns)), ("TERM", "xterm-256color"), *env.items()]:
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        app.main(["plan", "long.json", *ALGORITHMS, "--replicas", "8"])
    assert not ended.value.code
    return screen.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("columns", [1, 20, 40, 80])
def test_no_figure_is_lost_on_a_narrow_screen(folder, monkeypatch, columns):
    text = printed(monkeypatch, folder, columns, NO_COLOR="1")
    for figure in ("50257×768", "154.4 MB", "816.4 kB", "messages", "link time", "PowerSGD", "(rank=4)", "'int8')"):
        assert figure in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert columns < 80 or ("blocks[0].bias" in text and "WireDtype(AllReduce()," in text)


def test_codes_of_a_screen_only_where_they_are_wanted_and_an_encoding_without_a_times_sign(folder, monkeypatch):
    assert "\x1b" in printed(monkeypatch, folder, 80)
    assert "\x1b" not in printed(monkeypatch, folder, 80, NO_COLOR="1")
    assert "50257?768" in printed(monkeypatch, folder, 80, encoding="ascii")


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
