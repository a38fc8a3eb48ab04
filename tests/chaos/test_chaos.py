"""Replicas that are killed, frozen and slow, over a real lighthouse: the short form of `make
chaos`."""

import subprocess
import sys
import uuid

import pytest
import torch.distributed as dist

from tests.chaos import choosing, verdict
from tests.launch import ROOT, end_all, environment

pytest.importorskip("torchft")


NATIVE = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"), reason="needs torch 2.15"
)


@pytest.mark.parametrize(
    "native", [pytest.param([], marks=pytest.mark.slow), pytest.param(["--native"], marks=NATIVE)]
)
def test_survivors_go_on_and_newcomers_heal(tmp_path, native):
    mark, log = uuid.uuid4().hex, tmp_path / "log"
    command = [sys.executable, "-m", "tests.chaos", "--short", str(tmp_path / "arena"), *native]
    try:
        with log.open("w") as out:
            code = subprocess.run(
                command, cwd=ROOT, env=environment(mark), stdout=out, stderr=out, timeout=240
            ).returncode
    finally:
        end_all(mark)
    said = log.read_text()
    assert (code, said.count("healed after")) == (0, 2), said[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("backend", choosing.SCRIPTS)
def test_ranks_that_choose_go_on_alike_whoever_is_lost(tmp_path, backend):
    found = choosing.disturbed(backend, tmp_path, ("kill in a trial", "freeze"), 1.0, 0.01)
    assert not choosing.wrong(found), found


def line(name, time, **what):
    return {"name": name, "time": time, "event": "vote", "taken": True, "outer": "a"} | what


def test_a_verdict_sees_what_must_not_be():
    lines = [
        line("r0", 1, round=1),
        line("r1", 1, round=1),
        line("r0", 2, round=2),
        line("r1", 2, round=2, outer="b"),
        line("r0", 3, round=2, taken=False),
        line("r0", 4, round=2, taken=False),
        line("r2", 4, event="asks"),
        *(line("r0", 4 + n, round=2 + n) for n in (1, 2, 3)),
        line("r2", 7, round=5),
        line("r0", 8, event="ends", loss=0.5),
    ]
    kill, add = (2.5, 2.5, "kill", ["r1"]), (4.0, 4.0, "add", ["r2"])
    assert verdict.unequal_rounds(lines) == [2]
    assert verdict.lost(lines, [kill, add]) == {0: 1, 1: 1}
    assert verdict.lost(lines, [kill]) == {0: 2}
    # a newcomer is felt when it joins, in the second of two rounds that fail
    events = [(2.2, 2.2, "kill", ["r1"]), (2.5, 2.5, "add", ["r2"])]
    assert verdict.lost(lines, events) == {0: 1, 1: 1}
    # others have felt an end before it is heard of
    events = [(0.5, 0.6, "add", ["r1"]), (2.5, 3.5, "kill", ["r3"])]
    assert verdict.lost(lines, events) == {0: 0, 1: 2}
    assert verdict.lost(lines, [(2.5, 2.5, "freeze", ["r0"])]) == {0: 0}
    assert verdict.healing(lines) == {"r2": 3}
    assert verdict.longest_pause(lines) == 3
    assert verdict.losses(lines) == {0.5}
    assert verdict.deviation(2.0, [0.0, 1.0, 2.0]) == pytest.approx(1 / (4 / 3) ** 0.5)
    assert verdict.by_kind(lines, [kill, add])["add"]["rounds to heal, at most"] == 3
