"""Some hundreds of random histories; and that the simulations find what they are there to find."""

import random
import re
import subprocess
import sys

import pytest

from gradwire import AllReduce, Compressor, PowerSGD, Simulator
from gradwire.core.buckets.reducer import Reducer
from tests.soak import arrival, draw
from tests.soak.simulation import KINDS, Failure, simulate

pytestmark = pytest.mark.slow

HISTORIES = dict.fromkeys(KINDS, 60)


@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_hold(kind):
    assert sum(simulate(kind, seed) for seed in range(HISTORIES[kind])) >= 12 * HISTORIES[kind]


#: `make soak` on five seeds, in two processes; and once more where one of them fails. In a process of its own, without the threads of this one.
COMMAND = """
from tests.soak import simulation
simulation.main()
simulation.KINDS["sharded"] = lambda seed: 1 // (seed - 9)
simulation.main()
"""


def test_the_command_counts_steps_repeats_seeds_and_ends_with_the_one_that_failed():
    options = ["--only", "sharded", "--histories", "5", "--seed", "7", "--jobs", "2"]
    done = subprocess.run([sys.executable, "-c", COMMAND, *options], capture_output=True, text=True, timeout=240)
    assert done.stdout.count("seeds 7 to 11: all held") == 1, done.stderr
    steps = sum(KINDS["sharded"](seed) for seed in range(7, 12))
    assert re.search(rf"sharded +{steps} steps", done.stdout)
    assert done.returncode == 1
    assert "sharded, seed 9: ZeroDivisionError" in done.stderr
    assert "--only sharded --seed 9 --histories 1" in done.stderr


def some_seed_fails(kind, match):
    """Within the seeds of the suite, so that the suite would have found it."""

    def suite():
        for seed in range(HISTORIES[kind]):
            simulate(kind, seed)

    with pytest.raises(Failure, match=match) as caught:
        suite()
    (seed,) = set(re.findall(r"seed (\d+)", str(caught.value)))
    assert f"--only {kind} --seed {seed}" in str(caught.value)


def test_an_error_that_is_forgotten_is_found(monkeypatch):
    right = Compressor._memory_after

    def forgetful(self, *args):
        return {
            name: memory | ({"error": memory["error"] * 0.999} if "error" in memory else {})
            for name, memory in right(self, *args).items()
        }

    monkeypatch.setattr(Compressor, "_memory_after", forgetful)
    some_seed_fails("compression", "has lost or gained")
    some_seed_fails("local", "averaging has moved")


def test_a_memory_that_a_bad_step_changes_is_found(monkeypatch):
    right = PowerSGD.compress

    async def careless(self, ops, name, x, memory, at):
        sent, received, new = await right(self, ops, name, x, memory, at)
        for key, value in new.items():  # before it is known whether the step counts
            memory[key][...] = value
        return sent, received, new

    monkeypatch.setattr(PowerSGD, "compress", careless)
    some_seed_fails("compression", "has changed a memory")


def test_replicas_that_look_at_their_own_gradients_are_found(monkeypatch):
    right = PowerSGD.compress

    async def selfish(self, ops, name, x, memory, at):
        sent, _, new = await right(self, ops, name, x, memory, at)
        return sent, sent, new

    monkeypatch.setattr(PowerSGD, "compress", selfish)
    some_seed_fails("compression", "ReplicaMismatch")


def test_launching_in_the_order_of_arrival_is_found(monkeypatch):
    """What goes wrong on a real network when every rank sends a bucket as soon as it is full."""

    def as_they_come(self):
        full = [k for k, missing in enumerate(self._missing) if not missing and k not in self._early]
        self._early += full
        self._next = len(self._early)
        return full

    right = Reducer.begin

    def begin(self, unused=(), *, accumulating=False):
        self._early = []
        return right(self, unused, accumulating=accumulating)

    monkeypatch.setattr(Reducer, "_launchable", as_they_come)
    monkeypatch.setattr(Reducer, "begin", begin)
    some_seed_fails("arrival", "too early")
    monkeypatch.setattr(arrival.Replica, "_require_launched", lambda *_: None)
    some_seed_fails("arrival", "for some and not for others")


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
        return 1

    with pytest.raises(Failure, match="deadlock"):
        simulate("arrival", 3, run)
