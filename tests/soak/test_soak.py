"""The soaks for as long as a test may take; and that they find what they are there to find."""

import random
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from gradwire import AllReduce, Compressor, PowerSGD, Simulator
from gradwire.core.algorithms import compressor
from gradwire.core.buckets.reducer import Reducer
from tests.launch import run_ranks
from tests.soak import arrival, draw, long_run, torch_soak
from tests.soak.simulation import KINDS, Failure, simulate

HISTORIES = 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_hold(kind):
    assert sum(simulate(kind, seed) for seed in range(HISTORIES)) >= 10 * HISTORIES


#: `make soak` on five seeds, in two processes; and once more where one of them fails. In a process
#: of its own, without the threads of this one.
COMMAND = """
from tests.soak import simulation
simulation.main()
simulation.KINDS["local"] = lambda seed: 1 // (seed - 9)
simulation.main()
"""


@pytest.mark.slow
def test_the_command_counts_steps_repeats_seeds_and_ends_with_the_one_that_failed():
    options = ["--only", "local", "--histories", "5", "--seed", "7", "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *options], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.count("seeds 7 to 11: all held") == 1, done.stderr
    assert re.search(
        rf"local +{sum(KINDS['local'](seed) for seed in range(7, 12))} steps", done.stdout
    )
    assert done.returncode == 1
    assert "local, seed 9: ZeroDivisionError" in done.stderr
    assert "--only local --seed 9 --histories 1" in done.stderr


def forgetful(right, self, *args):
    averages, after = right(self, *args), args[-1]
    for memory in after.values():
        if "error" in memory:
            memory["error"] = np.asarray(memory["error"] * 0.999)
    return averages


async def careless(right, self, ops, name, x, memory, at):
    sent, received, new = await right(self, ops, name, x, memory, at)
    for key, value in new.items():  # before it is known whether the step counts
        memory[key][...] = value
    return sent, received, new


async def selfish(right, self, *args):
    """A replica that looks at its own gradients."""
    sent, _, new = await right(self, *args)
    return sent, sent, new


async def always(right):
    return np.asarray(True)


def as_they_come(right, self):
    """What goes wrong on a real network when every rank sends a bucket as soon as it is full."""
    early = self._early if self._next else []
    full = [k for k, missing in enumerate(self._missing) if not missing and k not in early]
    self._early = early + full
    self._next = len(self._early)
    return full


FAULTS = [
    (Compressor, "_settled", forgetful, "compression", "has lost or gained"),
    (Compressor, "_settled", forgetful, "local", "averaging has moved"),
    (PowerSGD, "compress", careless, "compression", "has changed a memory"),
    (PowerSGD, "compress", selfish, "compression", "ReplicaMismatch"),
    (compressor, "step_is_finite", always, "averages", "is not finite"),
    (Reducer, "_launchable", as_they_come, "arrival", "too early"),
    (Reducer, "_launchable", as_they_come, "arrival", "for some and not for others"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "wrong", "kind", "says"), FAULTS)
def test_what_is_wrong_is_found(monkeypatch, owner, name, wrong, kind, says):
    """Within the seeds of the suite, so that the suite would have found it."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: wrong(right, *args))
    if "others" in says:
        monkeypatch.setattr(arrival.Replica, "_require_launched", lambda *_: None)
    with pytest.raises(Failure, match=says) as caught:
        sum(simulate(kind, seed) for seed in range(HISTORIES))
    assert re.search(rf"{kind}, seed (\d+): [^§]*--only {kind} --seed \1 ", str(caught.value))


@pytest.mark.slow
def test_a_replica_that_does_not_send_is_a_deadlock():
    class Silent(arrival.Replica):
        def _launch(self, network, buckets, gradients, step):
            super()._launch(network, buckets if self.number else buckets[:-1], gradients, step)

        def _require_launched(self, settled):
            pass

    def run(seed):
        simulator = Simulator(AllReduce(), {"a": (3,), "b": (2,)}, 2)
        replicas = [Silent(r, simulator.algorithm, simulator, [[0], [1]]) for r in range(2)]
        gradients = draw.Gradients({"a": (3,), "b": (2,)}, seed).of(2, ["a", "b"])
        arrival.one_step(random.Random(seed), simulator, replicas, gradients, [[], []])

    with pytest.raises(Failure, match="deadlock"):
        simulate("arrival", 3, run)


@pytest.mark.slow
def test_three_ranks_stay_equal_through_random_faults():
    """Four steps of each algorithm under each wrapper: the one that begins late compresses in the
    last of its eight."""
    steps = 4 * 2 * len(torch_soak.ALGORITHMS)
    arguments = "--work", f"--steps={steps}", "--seed=5", "--stretch=4"
    said = run_ranks(Path(torch_soak.__file__), torch_soak.RANKS, *arguments, timeout=200)
    for algorithm in torch_soak.ALGORITHMS:
        assert said.count(f"  {algorithm}\n") == 2  # under both wrappers
    summary = re.search(r"all ranks equal: (.*)", said)
    assert summary, said
    counts = {what: int(n) for what, n in re.findall(r"([a-z-]+(?: [a-z]+)*) (\d+)", summary[1])}
    assert counts["steps"] == steps
    assert all(counts.values()), counts  # each kind of fault has come up


@pytest.mark.slow
def test_nothing_grows_in_many_steps_and_groups():
    arguments = "--work", "--steps=150", "--groups=20"
    said = run_ranks(Path(long_run.__file__), long_run.RANKS, *arguments, timeout=200)
    assert said.count("nothing grows") == long_run.RANKS
    seen = re.findall(
        r"descriptors (\d+) → (\d+), threads (\d+) → (\d+), system threads (\d+) → (\d+) ", said
    )
    assert len(seen) == 2 * long_run.RANKS
    for counts in seen:  # one may be gone that was about to go
        assert all(int(b) >= int(a) for b, a in zip(counts[::2], counts[1::2], strict=True)), counts


def test_what_grows_is_seen(tmp_path):
    files = []
    # What earlier tests have left is no garbage of this one, and takes seconds to look through.
    with mock.patch("torch.distributed.get_rank", return_value=0), mock.patch("gc.collect"):
        assert long_run.watched(
            "steps", 20, lambda n: files.append((tmp_path / str(n)).open("w"))
        ) == ["descriptors"]
    for file in files:
        file.close()
