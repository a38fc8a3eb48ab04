"""Replicas that come and go, as threads of one process, each with a torchft manager, under a real
lighthouse. tests/chaos has them as processes that are killed."""

import http.client
import json
import logging
import re
import sys
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from gradwire import (
    AllReduce,
    Auto,
    LocalSGD,
    LocalSimulator,
    OuterSGD,
    PowerSGD,
    TopK,
    TwoLevel,
    Weighted,
    diloco,
)
from gradwire.torch_backend import elastic
from gradwire.torch_backend.engine.groups.point_to_point import Exchange
from tests.torch.asked import Scaling
from tests.torch.compare import same_bits
from tests.torch.defaults import other_defaults
from tests.torch.optimizers import ScheduleFree

pytest.importorskip("torchft")
from torchft.coordination import LighthouseServer
from torchft.manager import Manager, WorldSizeMode
from torchft.process_group import ProcessGroupGloo, reconfigure_with_store

FAILURE = json.loads(
    (Path(__file__).parents[1] / "core" / "authors" / "torchft_failure.json").read_text()
)
LIMIT = 200.0

pytestmark = [
    # Of torch, in torchft's transport.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:"),
]


class Site:
    """A lighthouse, and replicas that are threads."""

    def __init__(self, least, native=False):
        self.native, self.joined = native, 0
        self.lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=least, join_timeout_ms=20_000, heartbeat_timeout_ms=5_000
        )
        self.stores, self.managers, self.threads, self.errors = [], [], [], []
        self.shared = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def group(self):
        """Of torchft; or torch's own as `init_process_group("gloo", enable_reconfigure=True)` makes
        it, of which a process has one."""
        timeout = timedelta(seconds=60)
        if not self.native:
            return ProcessGroupGloo(timeout=timeout)
        store = dist.TCPStore(
            "localhost", self.shared.port, is_master=False, wait_for_workers=False
        )
        number, self.joined = self.joined, self.joined + 1
        group = dist.ProcessGroup(store, number, number + 1)
        gloo = dist.ProcessGroupGloo(
            store, number, number + 1, timeout=timeout, enable_reconfigure=True
        )
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return group

    def manager(self, name, **options):
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.stores.append(store)
        options = {"min_replica_size": 1, "use_async_quorum": False, "world_size": 1} | options
        made = Manager(
            pg=self.group(),
            load_state_dict=None,
            state_dict=None,
            timeout=timedelta(seconds=60),
            quorum_timeout=timedelta(seconds=LIMIT),
            rank=0,
            store_addr="localhost",
            store_port=store.port,
            replica_id=name,
            lighthouse_addr=self.lighthouse.address(),
            **options,
        )
        self.managers.append(made)
        return made

    def somebody_asks(self):
        """A replica has asked for a quorum that is not complete. Only the lighthouse's own page
        says so."""
        connection = http.client.HTTPConnection(
            self.lighthouse.address().removeprefix("http://"), timeout=LIMIT
        )
        connection.request("GET", "/status")
        page = connection.getresponse().read().decode()
        connection.close()
        return int(re.search(r"\[(\d+)/\d+ participants healthy\]", page)[1]) > 0

    def start(self, train, *args):
        """Run a replica in a thread. What it raises is noted."""

        def run():
            try:
                train(*args)
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def join(self):
        for thread in self.threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        if self.errors:
            raise self.errors[0]


@contextmanager
def site(least, native=False):
    made = Site(least, native)
    logging.disable(logging.INFO)
    try:
        yield made
    finally:
        logging.disable(logging.NOTSET)
        for manager in made.managers:
            with suppress(Exception):
                manager.shutdown(wait=False)
            manager._checkpoint_transport._server.socket.close()
        made.lighthouse.shutdown()


def both(train, native=False, besides=None):
    """Run `train(site, number)` as two replicas, to their ends, and another function beside
    them."""
    with site(2, native) as here:
        for number, run in enumerate((train, train, *([besides] if besides else []))):
            here.start(run, here, number)
        here.join()


#: Of the process group: torch's own can be given other members since 2.15.
NATIVE = [
    pytest.param(False, id="torchft"),
    pytest.param(
        True,
        id="native",
        marks=pytest.mark.skipif(
            not hasattr(dist.ProcessGroup, "reconfigure"), reason="needs torch 2.15"
        ),
    ),
]


@pytest.mark.parametrize("native", NATIVE)
def test_torchft_comes_to_the_same_numbers_where_a_replica_fails(native):
    """Its seventh fixture. There a replica that begins anew trains three steps before it asks for
    the others, which is nothing here: it asks at once."""
    begun = threading.Barrier(2, timeout=LIMIT)
    found = [{}, {}]

    def train(which, here, number, until):
        layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        for layer in layers:
            torch.nn.init.ones_(layer.weight)
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        local = LocalSGD(6, fragments=2, outer=OuterSGD(lr=2.0))
        handle = elastic(model, optimizer, local, here.manager(f"replica{number}"))
        history = found[which] = {"parameters": {}, "outer": {}}
        for step in range(handle.steps, until + 1):
            history["parameters"][str(step)] = [p.item() for p in model.parameters()]
            history["outer"][str(step)] = [p.item() for p in handle.outer_parameters().values()]
            for p in model.parameters():
                p.grad = torch.full_like(p, 2.0)
            if step < until:
                optimizer.step()
        return handle

    def fails(here):
        manager = train(1, here, 1, 6).quorum.manager
        # as a process that is killed: no heartbeat any more, and no messages
        manager.shutdown(wait=False)
        manager._pg.abort()
        begun.wait()
        train(1, here, 2, 21)

    with site(2, native) as here:
        here.start(train, 0, here, 0, 21)
        here.start(fails, here)
        begun.wait()
        here.join()
    theirs, healed = FAILURE
    for kind in ("parameters", "outer"):
        assert found[0][kind].keys() >= theirs[kind].keys()
        for step, expected in theirs[kind].items():
            assert found[0][kind][step] == pytest.approx(expected, abs=1e-6)
        for step, expected in healed[kind].items():
            # From the round on in which it has come, which is the first replica's third: six steps
            # more.
            if int(step) >= 3:
                assert found[1][kind][str(int(step) + 6)] == pytest.approx(expected, abs=1e-6)
    assert min(map(int, found[1]["parameters"])) == 9


SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "b.weight": (4, 6), "b.bias": (4,)}
COMPRESSED = diloco(3, compressor=PowerSGD(1, min_compression_rate=1))
SCHEDULES = [
    LocalSGD(3),
    COMPRESSED,
    diloco(4, fragments=2, overlap=1, compressor=TopK(0.1)),
    pytest.param(diloco(3, eager=True, lr=0.3), marks=pytest.mark.slow),
]
WITH_MEMORY = [
    COMPRESSED,
    diloco(4, overlap=2, compressor=TopK(0.1)),
    PowerSGD(1, min_compression_rate=1),
]


def drawn(number, step):
    generator, plain = (
        torch.Generator().manual_seed(1000 * number + step),
        {"dtype": torch.float32, "device": "cpu"},
    )
    return {
        name: torch.randn(shape, generator=generator, **plain) for name, shape in SHAPES.items()
    }


def small():
    plain = {"dtype": torch.float32, "device": "cpu"}
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(5, 6, **plain), "b": torch.nn.Linear(6, 4, **plain)}
    )
    model.load_state_dict(drawn(9, 9))  # by no generator that threads share
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Replica:
    """A replica of a site, and what it trains: on gradients drawn by its number and the step. All
    but the first keep outer parameters on the host: their bits are the same."""

    def __init__(self, here, number, what, weights=None, manager_state=None):
        self.number, (self.model, self.optimizer) = number, small()
        self.model.load_state_dict(weights or drawn(9, 9))
        self.manager = here.manager(f"replica{number}")
        if manager_state:
            self.manager.load_state_dict(manager_state)
        options = {"outer_device": "cpu"} if number and getattr(what, "has_outer", False) else {}
        self.handle = elastic(self.model, self.optimizer, what, self.manager, **options)

    def step(self):
        """Whether it has ended a round."""
        rounds, gradients = self.handle.rounds, drawn(self.number, self.handle.steps)
        for name, p in self.model.named_parameters():
            p.grad = gradients[name].clone()
        self.optimizer.step()
        return self.handle.rounds > rounds

    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def numbers(state):
    """Of a handle's state, or of parameters: all tensors, in one."""
    if "shared" in state:
        state = {key: state[key] for key in ("shared", "tensors")}
    tensors = [
        x.detach().double().reshape(-1) for x in tree_leaves(state) if isinstance(x, torch.Tensor)
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *tensors])


@pytest.mark.parametrize("local", SCHEDULES, ids=repr)
def test_replicas_that_stay_come_to_what_the_simulator_says(local):
    """Whatever is set for tensors of which nobody says where and what they are: in a thread for
    itself, and in all."""
    steps, after = 14, {}

    def train(here, number):
        torch.set_default_device("meta")
        replica = Replica(here, number, local)
        for _ in range(steps):
            replica.step()
        after[number] = replica.weights()

    with other_defaults("meta"):
        both(train)
    start = {name: p.detach().double().numpy() for name, p in small()[0].named_parameters()}
    sim = LocalSimulator(local, start, 2)
    for step in range(steps):
        gradients = [
            {n: g.double().numpy() for n, g in drawn(number, step).items()} for number in range(2)
        ]
        sim.step(gradients, lambda _, p, g: {n: p[n] - 0.1 * g[n] for n in p})
    for number in range(2):
        for name, p in after[number].items():
            np.testing.assert_allclose(p.numpy(), sim.parameters[number][name], atol=1e-4)
    assert max(float(np.abs(sim.parameters[0][n] - start[n]).max()) for n in start) > 0.1


@pytest.mark.parametrize("what", [AllReduce(), LocalSGD(3)], ids=repr)
def test_layers_that_are_thawed_are_refused(what):
    model, optimizer = small()
    model["a"].requires_grad_(False)
    with site(1) as here:
        elastic(model, optimizer, what, here.manager("replica"))
        optimizer.step()
        model["a"].weight.grad = torch.ones(6, 5)
        with pytest.raises(RuntimeError, match=r"'a.weight' have gradients.*elastic was called"):
            optimizer.step()


@pytest.mark.parametrize("what", [AllReduce(), PowerSGD(1, min_compression_rate=1)], ids=repr)
def test_layers_that_are_frozen_later_stay_as_they_are(what):
    """The optimizer would decay them, and moments would move them. A newcomer freezes them too."""
    model, _ = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)

    def step():
        for name, p in model.named_parameters():
            p.grad = drawn(0, 0)[name] if p.requires_grad else None
        optimizer.step()

    def seen():
        memory = handle.state_dict()["tensors"].get("a.weight", {})
        return model["a"].weight.detach().clone(), dict(memory)

    with site(1) as here:
        handle = elastic(model, optimizer, what, here.manager("replica"))
        step()
        model["a"].requires_grad_(False)
        before, other = seen(), numbers(model["b"].state_dict())
        step()
        assert same_bits(seen(), before)
        assert model["a"].weight.grad is None
        assert not numbers(model["b"].state_dict()).equal(other)
        given = handle._give()
        model["a"].requires_grad_(True)
        handle._receive(given)
        assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
        model["a"].requires_grad_(True)
        step()
        assert not seen()[0].equal(before[0])


def vote_against(manager, now):
    """Whenever a replica is asked for its vote, and it is `now`."""
    vote = manager.should_commit

    def voted(*args, **options):
        if now():
            manager.report_error(RuntimeError("against it"))
        return vote(*args, **options)

    manager.should_commit = voted


@pytest.mark.parametrize("what", WITH_MEMORY, ids=repr)
def test_a_vote_against_a_step_leaves_every_memory_as_it_was_and_nothing_is_lost(what):
    """Both vote no once, after all messages have come. A schedule trains on; what averages
    gradients takes no step."""
    same, kept = [], []

    def train(here, number):
        replica = Replica(here, number, what)
        handle = replica.handle
        vote_against(replica.manager, lambda: step >= 7)
        for step in range(10):
            before, weights = numbers(handle.state_dict()), numbers(replica.weights())
            ended = replica.step()
            if step >= 7 and replica.manager.errored() is not None:
                same.append(numbers(handle.state_dict()).equal(before) and not ended)
                moved = not weights.equal(numbers(replica.weights()))
                kept.append(moved == isinstance(what, LocalSGD))
            elif ended:
                same.append(not numbers(handle.state_dict()).equal(before))

    both(train)
    assert all(same)
    assert len(same) >= 4
    assert all(kept)
    assert len(kept) >= 2


def test_who_has_missed_a_round_takes_over_the_state_of_the_others():
    """The message has come for both, and one of them votes no."""
    rows, kept = {}, []

    def train(here, number):
        replica = Replica(here, number, COMPRESSED)
        handle = replica.handle

        def seen():
            kept.append(numbers(handle.state_dict()))
            return True

        vote_against(replica.manager, lambda: number == 1 and handle.steps == 8 and seen())
        while handle.steps < 18:
            if replica.step():
                rows.setdefault(handle.rounds, []).append(
                    numbers(handle.outer_parameters()).clone()
                )

    both(train)
    assert len(kept) == 1
    assert sorted(map(len, rows.values())) == [1, 2, 2, 2, 2, 2]
    assert all(each.equal(many[0]) for many in rows.values() for each in many)


def rounds_of(what, until, newcomer=None, native=False):
    """What two replicas have in common after each round, and after which round a newcomer had it
    too. It comes when the others have had so many."""
    rows, joined, comes = {}, [], threading.Event()

    def train(here, number):
        nothing = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
        replica = Replica(here, number, what, weights=nothing if number == 2 else None)
        handle, local = replica.handle, isinstance(what, LocalSGD)
        if number == 2:
            errors = [
                x
                for m in handle._memory.state.tensors.values()
                for k, x in m.items()
                if k in what.per_replica
            ]
            joined.extend([handle.rounds + (handle._left is not None if local else 0)])
            joined.append(errors != [] and not any(x.any() for x in errors))
        while handle.rounds < until:
            if number == 0 and handle.rounds == newcomer and not comes.is_set():
                here.start(train, here, 2)
                # else the others end without it, however long its start takes
                wait_until(here.somebody_asks)
                comes.set()
            if number == 1 and handle.rounds == newcomer:
                assert comes.wait(LIMIT)
            if replica.step():
                common = handle.outer_parameters() if local else replica.weights()
                rows.setdefault(handle.rounds, []).append(numbers(common).clone())

    both(train, native)
    return rows, joined


def wait_until(true):
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    "native", [pytest.param(False, marks=pytest.mark.slow, id="torchft"), NATIVE[1]]
)
@pytest.mark.parametrize("what", WITH_MEMORY, ids=repr)
def test_a_newcomer_weighs_nothing_at_first_and_then_as_all_do(what, native):
    """It comes with numbers of its own, which nobody may hear of. Up to the round in which it comes
    the others have what they have without it."""
    alone, _ = rounds_of(what, 9, native=native)
    rows, (joined, without_errors) = rounds_of(what, 9, newcomer=3, native=native)
    assert without_errors
    assert 3 < joined < 8
    assert all(each.equal(many[0]) for many in rows.values() for each in many)
    for number in range(2, 9):
        same = torch.allclose(rows[number][0], alone[number][0], atol=1e-6)
        assert same == (number <= joined), number
    assert len(rows[joined + 1]) == 3


@pytest.mark.parametrize("what", [diloco(2), AllReduce()], ids=repr)
def test_who_comes_receives_all_that_a_model_is(what):
    """Layers that are frozen, statistics, tables of integers: replicas that begin with other
    numbers, or come with some, are of one model from then on."""
    found = {}

    def train(here, number):
        plain = {"dtype": torch.float32, "device": "cpu"}
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4, **plain),
            torch.nn.Linear(4, 4, **plain),
            torch.nn.BatchNorm1d(4, **plain),
        )
        model[1].requires_grad_(False)
        model.register_buffer("table", torch.full((5,), number, dtype=torch.int64, device="cpu"))
        with torch.no_grad():
            for x in (*model.parameters(), *model.buffers()):
                x.fill_(number)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = elastic(model, optimizer, what, here.manager(f"replica{number}"), buffers="keep")
        found[number] = {n: x.detach().clone() for n, x in model.state_dict().items()}
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.ones_like(p) if p.requires_grad else None
            optimizer.step()
        assert handle.steps >= 3

    both(train)
    mine, theirs = found.values()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.slow
def test_a_newcomer_with_other_options_is_refused_and_the_others_go_on():
    mine, other = diloco(2), diloco(2, lr=0.5)
    raised, rounds = [], {}

    def train(here, number):
        replica, deadline = Replica(here, number, mine), time.monotonic() + LIMIT
        while (not raised or rounds[number] < rounds["then"] + 4) and time.monotonic() < deadline:
            replica.step()
            rounds[number] = replica.handle.rounds
            time.sleep(0.01)

    def refused(here, _):
        wait_until(lambda: len(rounds) == 2)
        with pytest.raises(ValueError) as error:
            Replica(here, 2, other)
        rounds["then"] = max(rounds.values())
        raised.append(str(error.value))

    both(train, besides=refused)
    assert repr(mine) in raised[0]
    assert repr(other) in raised[0]
    assert rounds[0] >= rounds["then"] + 4 <= rounds[1]


def test_replicas_weigh_what_they_say():
    tokens, after = [3.0, 1.0], {}

    def train(here, number):
        replica = Replica(here, number, Weighted(AllReduce()))
        replica.handle.weight = tokens[number]
        replica.step()
        after[number] = replica.weights()

    both(train)
    for name, start in small()[0].named_parameters():
        mean = 0.75 * drawn(0, 0)[name] + 0.25 * drawn(1, 0)[name]
        assert torch.allclose(after[0][name], start - 0.1 * mean, atol=1e-6)
        assert after[0][name].equal(after[1][name])


def test_a_run_goes_on_from_the_state_of_a_replica():
    """And what all count alike takes no weight."""
    with site(1) as here:
        first = Replica(here, 0, COMPRESSED)
        with pytest.raises(ValueError, match="weight"):
            first.handle.weight = 2.0
        with pytest.raises(ValueError, match="manager"):
            elastic(first.model, first.optimizer, COMPRESSED, first.manager)
        for _ in range(4):
            first.step()
        handle, weights, manager = (
            first.handle.state_dict(),
            first.weights(),
            first.manager.state_dict(),
        )
        for _ in range(4, 9):
            first.step()
    with site(1) as here:
        again = Replica(here, 0, COMPRESSED, manager_state=manager, weights=weights)
        again.handle.load_state_dict(handle)
        assert again.handle.steps == 4
        assert again.handle.sent.nbytes == handle["sent"]["nbytes"] > 0
        for _ in range(4, 9):
            again.step()
    assert numbers(first.handle.state_dict()).equal(numbers(again.handle.state_dict()))


@pytest.mark.parametrize("what", [diloco(4, overlap=2), diloco(2, eager=True)], ids=repr)
def test_a_state_is_loaded_while_a_message_is_on_its_way_as_before_the_first(what):
    """The message of the memory before is dropped; where the state is refused, it stays."""
    with site(1) as here:
        saved = Replica(here, 0, what)
        for _ in range(10):
            saved.step()
        state, weights = saved.handle.state_dict(), saved.weights()
    after = []
    for steps in (0, 5):
        with site(1) as here:
            replica = Replica(here, 0, what)
            handle = replica.handle
            for _ in range(steps):
                replica.step()
            on_its_way = handle._left
            assert (on_its_way is not None) == (steps > 0)
            with pytest.raises(ValueError, match=r"parameters 'a\.bias'.*only here"):
                handle.load_state_dict({**state, "tensors": {}})
            assert handle._left is on_its_way
            replica.model.load_state_dict(weights)
            handle.load_state_dict(state)
            for _ in range(7):
                replica.step()
            after.append([replica.weights(), handle.state_dict()["tensors"]])
    assert same_bits(*after)


def test_parts_are_exchanged_on_a_device_too():
    """Where ranks do not send to each other by themselves, by those collectives that torchft's
    groups have."""
    found = {}

    def exchange(here, number):
        group, store = here.group(), f"localhost:{here.shared.port}/exchange"
        reconfigure_with_store(group, store, number, 2, timedelta(seconds=LIMIT))
        # of the kind for CUDA, on tensors of the CPU
        exchange = Exchange(group, torch.device("cuda"), number)
        for counts in ((2, 2), (3, 1)):
            whole = torch.zeros(4)
            torch.split(whole, counts)[number].fill_(number + 1)
            for work in exchange.gather(whole, counts):
                work.wait()
            found[number, counts] = whole.tolist()

    both(exchange)
    assert found == {
        (n, c): [1.0] * c[0] + [2.0] * c[1] for n in range(2) for c in ((2, 2), (3, 1))
    }


REFUSED = [
    (LocalSGD(3, start_step=5), "start_step"),
    (LocalSGD(4, subgroup=2), "subgroup"),
    (LocalSGD({2: 2, "all": 4}), "period"),
    (diloco(4, fragments=2, overlap=2), "overlap"),
    (diloco(4, fragments=2, eager=True), "fragments"),
    (diloco(4, eager=True, weighted=True), "weighted"),
    (diloco(12, fragments=9), "fragments"),
    (diloco(4, compressor=TwoLevel(PowerSGD(1))), "compressor"),
    (TwoLevel(PowerSGD(1)), "what"),
]


def test_what_cannot_be_served_is_refused_by_name(monkeypatch):
    model, optimizer = small()
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    fixed = WorldSizeMode.FIXED_WITH_SPARES
    managers = {"use_async_quorum": True, "world_size_mode": fixed, "world_size": 2}
    with site(1) as here:
        manager = here.manager("replica0")
        refused = [
            *((ValueError, (model, optimizer, what, manager), named) for what, named in REFUSED),
            (ValueError, (model, small()[1], diloco(3), manager), "optimizer"),
            (TypeError, (model, optimizer, diloco(3), "manager"), "manager"),
            (TypeError, (model, optimizer, "diloco", manager), "algorithm"),
            (TypeError, (model, optimizer, Auto(), manager), "Auto.* here one method"),
            (TypeError, (model, None, diloco(3), manager), "optimizer"),
            (TypeError, ("model", optimizer, diloco(3), manager), "module"),
            (TypeError, (ddp, optimizer, diloco(3), manager), "module"),
        ]
        for option, value in managers.items():
            other = here.manager("replica1", **{option: value})
            refused.append((ValueError, (model, optimizer, diloco(3), other), option))
        for error, arguments, named in refused:
            with pytest.raises(error, match=named):
                elastic(*arguments)
        for what in (LocalSGD(3), AllReduce()):
            with pytest.raises(ValueError, match="outer_device"):
                elastic(model, optimizer, what, manager, outer_device="cpu")
        monkeypatch.setitem(sys.modules, "torchft.manager", None)
        with pytest.raises(ImportError, match=r"gradwire\[elastic\]"):
            elastic(model, optimizer, diloco(3), manager)
        assert not manager._user_state_dicts


def grown(model, optimizer):
    model["new"] = torch.nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model["new"].parameters())})


def halved(model, optimizer):
    model.half()


@pytest.mark.parametrize("what", [AllReduce(), LocalSGD(3)], ids=repr)
@pytest.mark.parametrize("change", [grown, halved])
def test_parameters_that_are_others_are_refused(what, change):
    model, optimizer = small()
    with site(1) as here:
        elastic(model, optimizer, what, here.manager("replica"))
        optimizer.step()
        change(model, optimizer)
        with pytest.raises(RuntimeError, match="elastic was called"):
            optimizer.step()


def test_weights_that_are_loaded_without_their_state_are_refused():
    model, optimizer = small()
    with site(1) as here:
        handle = elastic(model, optimizer, diloco(3), here.manager("replica"))
        optimizer.step()
        kept = handle.state_dict()
        model.load_state_dict(model.state_dict())
        optimizer.step()  # with the same
        model.load_state_dict(drawn(9, 8))
        with pytest.raises(RuntimeError, match="load the state that was saved with them"):
            optimizer.step()
        handle.load_state_dict(kept)
        optimizer.step()
        assert handle.steps == kept["step"] + 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(14):  # with averages, which are no writing of others
                optimizer.step()
        with torch.no_grad():
            next(model.parameters()).zero_()
        with pytest.warns(UserWarning, match="were written to between two steps"):
            optimizer.step()


@pytest.mark.parametrize(
    "what", [Scaling(), diloco(1, lr=1.0, momentum=0, compressor=Scaling())], ids=repr
)
def test_a_setting_is_heard(what):
    model, optimizer = small()
    with site(1) as here:
        handle = elastic(model, optimizer, what, here.manager("replica"))
        with pytest.raises(ValueError, match="does not ask for rate; it asks for scale"):
            handle.set(rate=1.0)
        handle.set(scale=0.5)
        before, gradients = numbers(model.state_dict()), drawn(0, 0)
        for name, p in model.named_parameters():
            p.grad = gradients[name].clone()
        optimizer.step()
        torch.testing.assert_close(
            before - numbers(model.state_dict()), 0.05 * numbers(gradients), rtol=0, atol=1e-5
        )


def test_a_closure_is_refused_where_gradients_are_averaged_before_the_step():
    model, optimizer = small()
    with site(1) as here:
        handle = elastic(model, optimizer, AllReduce(), here.manager("replica"))
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(lambda: None)
        for name, p in model.named_parameters():
            p.grad = drawn(0, 0)[name]
        optimizer.step()
        assert handle.steps == 1


class WithMasters(torch.optim.SGD):
    """Which makes the parameters of masters in its state, whatever is in them."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                master = self.state[p].setdefault("master", p.double().clone())
                p.copy_(master.sub_(p.grad.double(), alpha=self.param_groups[0]["lr"]))


def test_masters_in_an_optimizers_state_go_with_their_parameters():
    model, _ = small()
    optimizer = WithMasters(model.parameters(), lr=0.1)
    with site(1) as here:
        handle = elastic(model, optimizer, diloco(2, lr=0.5, momentum=0), here.manager("replica"))
        for step in range(4):
            for name, p in model.named_parameters():
                p.grad = drawn(0, step)[name]
            optimizer.step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(optimizer.state[p]["master"].float(), p.detach())
            torch.testing.assert_close(p.detach(), handle.outer_parameters()[name])


@pytest.mark.parametrize("local", [LocalSGD(3), diloco(3)], ids=repr)
def test_weights_of_schedule_free_optimizers_go_with_their_parameters(local):
    """Averaged with them, so that what is evaluated is one model; or moved as far, so that how far
    they are from the parameters is each replica's own. A vote against it, in the second round,
    moves none."""
    steps, lags, evaluated = 9, [{}, {}], {}

    def train(here, number):
        model, _ = small()
        optimizer = ScheduleFree(model.parameters(), lr=0.1)
        handle = elastic(model, optimizer, local, here.manager(f"replica{number}"))
        vote_against(handle.quorum.manager, lambda: handle.steps == 5)
        for step in range(steps):
            for name, p in model.named_parameters():
                p.grad = drawn(number, step)[name]
            optimizer.step()
            lags[number][step] = numbers(
                {n: optimizer.state[p]["z"] - p for n, p in model.named_parameters()}
            )
        optimizer.eval()
        evaluated[number] = numbers(dict(model.named_parameters()))

    both(train)
    expected = [torch.zeros_like(lags[0][0])] * 2
    for step in range(steps):
        kept = 1 - 1 / (step + 1)
        expected = [
            kept * (lag - 0.09 * numbers(drawn(number, step)))
            for number, lag in enumerate(expected)
        ]
        if not local.has_outer and step in (2, 8):
            expected = [sum(expected) / 2] * 2
        for number in range(2):
            torch.testing.assert_close(lags[number][step], expected[number], rtol=0, atol=1e-4)
    assert local.has_outer or evaluated[0].equal(evaluated[1])
