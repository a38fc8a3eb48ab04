"""How much ranks ask of the store that they share, where one of them dies or comes late: counted,
of as many clients as ranks."""

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gradwire.torch_backend.engine.groups import barrier, shared_keys, whereabouts
from gradwire.torch_backend.engine.groups.barrier import Meeting
from gradwire.torch_backend.engine.groups.shared_keys import found_by_one, missing, read_all
from gradwire.torch_backend.engine.groups.whereabouts import OFTEN, SELDOM, Whereabouts

MANY = 64


class Counting:
    """A store that counts what it is asked for. Without `extended`, one that cannot read many keys
    at once."""

    def __init__(self, store, *, extended=True):
        self.store, self.extended, self.requests = store, extended, Counter()

    def has_extended_api(self):
        return self.extended

    def __getattr__(self, name):
        def counted(*args):
            self.requests[name] += 1
            return getattr(self.store, name)(*args)

        return counted


@pytest.fixture
def clients():
    """A function that makes clients of one server, which count."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def made(n):
        return [
            Counting(dist.TCPStore("127.0.0.1", server.port, is_master=False)) for _ in range(n)
        ]

    return made


def at_once(functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(60) for future in [pool.submit(function) for function in functions]]


@pytest.mark.parametrize("extended", [True, False])
def test_keys_are_read_together_and_those_that_are_not_there_are_found_by_halves(extended):
    store = Counting(dist.HashStore(), extended=extended)
    keys = [f"key/{i}" for i in range(1000)]
    for i, key in enumerate(keys):
        if i not in (0, 700):
            store.store.set(key, str(i))
    assert missing(store, keys) == [0, 700]
    assert store.requests["check"] <= 40
    assert read_all(store, keys) == [
        None if i in (0, 700) else str(i).encode() for i in range(1000)
    ]
    assert store.requests["multi_get"] == extended
    assert store.requests["get"] == (0 if extended else 998)
    assert read_all(store, []) == []


def test_one_finds_out_for_all_and_the_next_does_if_it_dies(monkeypatch, clients):
    monkeypatch.setattr(shared_keys, "CLAIMED", timedelta(seconds=60))
    stores, found = clients(8), []
    finds = [lambda rank=rank: found.append(rank) or f"of {rank}" for rank in range(8)]
    said = at_once(
        [
            partial(found_by_one, store, "key", rank, finds[rank])
            for rank, store in enumerate(stores)
        ]
    )
    assert set(said) == {f"of {found[0]}"}
    assert len(found) == 1
    monkeypatch.setattr(shared_keys, "CLAIMED", timedelta(seconds=0.3))
    stores[0].store.set("other/claimed/0", "9")  # it has claimed, and is gone
    said = at_once(
        [
            partial(found_by_one, store, "other", rank, finds[rank])
            for rank, store in enumerate(stores)
        ]
    )
    assert set(said) <= {f"of {rank}" for rank in found[1:]}
    assert said


class Counts:
    """What others may hold weakly."""


def watching(store, rank, size, what="Sign()"):
    """What notes where a rank is, of so many; and what it reads that from."""
    meeting = SimpleNamespace(store=store, rank=rank, size=size, name="meeting", doing="")
    memory, collectives = Counts(), Counts()
    memory.steps, collectives.sent, collectives.asked, collectives.last = (
        4,
        SimpleNamespace(collectives=8),
        0,
        "Reduce",
    )
    one = Whereabouts(meeting, what, memory, collectives)
    one.waits = True
    return one, memory, collectives


@pytest.mark.parametrize("size", [8, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_death_costs_the_store_a_few_requests_of_each_rank(monkeypatch, clients, size):
    monkeypatch.setattr(
        whereabouts, "time", SimpleNamespace(time=whereabouts.time.time, sleep=lambda seconds: None)
    )
    monkeypatch.setattr(shared_keys, "CLAIMED", timedelta(seconds=60))
    stores = clients(size)
    held = [watching(store, rank, size) for rank, store in enumerate(stores)]
    dead, *_ = held.pop()
    dead.waits = False
    dead.note()
    for store in stores:
        store.requests.clear()
    for one, *_ in held:  # as their thread has done for seconds
        one.note()
    told = {
        str(each)
        for each in at_once([partial(one.named, RuntimeError("closed")) for one, *_ in held])
    }
    assert len(told) == 1
    assert f"rank {size - 1}: 4 steps of Sign() done, 8 messages sent. closed" in told.pop()
    asked = sorted(sum(store.requests.values()) for store in stores[:-1])
    assert max(asked) <= 8
    assert sum(store.requests["multi_get"] for store in stores) == 1
    # What was said serves ranks that fail soon after; and a second failure is one of its own.
    stores[0].requests.clear()
    held[0][1].steps = 5
    assert "rank 0: in step 6 of Sign()" in str(held[0][0].named(RuntimeError("again")))
    assert sum(stores[0].requests.values()) <= 8


def test_a_note_is_small_where_an_algorithm_names_every_rank():
    store = dist.HashStore()
    held = watching(store, 0, 2, what=str(tuple(range(4096))))
    held[0].note()
    assert len(store.get("meeting/whereabouts/0")) < 600


def test_an_old_report_serves_nobody(monkeypatch):
    store = dist.HashStore()
    (early, *_kept), (late, *_also) = (watching(store, rank, 2) for rank in range(2))
    early.note()
    assert "rank 1 (never heard of)" in early.shared_report()
    late.note()
    now = whereabouts.time.time()
    monkeypatch.setattr(
        whereabouts,
        "time",
        SimpleNamespace(time=lambda: now + 2 * whereabouts.RECENT, sleep=lambda seconds: None),
    )
    assert "never heard of" not in late.shared_report()


@pytest.mark.parametrize(("size", "times"), [(OFTEN, 2 * SELDOM), (OFTEN + 1, 2)])
def test_many_ranks_write_notes_less_often_and_not_all_at_once(size, times):
    held = [watching(dist.HashStore(), rank, size) for rank in range(2)]
    due = [[one.due(interval) for interval in range(2 * SELDOM)] for one, *_ in held]
    assert list(map(sum, due)) == [times, times]
    assert (due[0] == due[1]) == (size == OFTEN)


@pytest.fixture
def meetings(monkeypatch, clients):
    """A function that makes the meetings of so many ranks, and their stores."""

    def made(n, timeout):
        stores = clients(n)
        groups = [SimpleNamespace(store=store, rank=rank) for rank, store in enumerate(stores)]
        monkeypatch.setattr(barrier, "_store_of", lambda group: group.store)
        monkeypatch.setattr(barrier, "timeout_of", lambda group: timeout)
        monkeypatch.setattr(
            barrier,
            "dist",
            SimpleNamespace(get_rank=lambda group: group.rank, get_world_size=lambda group: n),
        )
        return [Meeting(group) for group in groups], stores

    return made


@pytest.mark.parametrize("size", [8, pytest.param(MANY, marks=pytest.mark.slow)])
def test_ranks_that_are_late_are_looked_for_by_one(monkeypatch, caplog, meetings, size):
    monkeypatch.setattr(barrier, "PATIENCE", timedelta(seconds=0.2))
    everyone, stores = meetings(size, timedelta(seconds=1))
    *present, late = everyone

    def waits(meeting):
        with pytest.raises(
            RuntimeError,
            match=rf"rank {meeting.rank} has waited in vain for ranks \[{size - 1}\]. Why",
        ):
            meeting.come("state", "Why.")

    with caplog.at_level(logging.WARNING):
        at_once([partial(waits, meeting) for meeting in present])
    assert len(caplog.records) == 1
    assert f"waits for ranks [{size - 1}]. Why." in caplog.text
    # Those that wait look less and less often: 34 times in the second, and once at its end.
    asked = sorted(sum(store.requests.values()) for store in stores[:-1])
    assert asked[-3] <= 45
    assert max(asked) <= 45 + 4 * size.bit_length()
    assert at_once([partial(meeting.come, "state", "Why.") for meeting in everyone]) == [[]] * size
    assert late.doing == ""


def test_what_ranks_bring_is_read_in_one_request_where_it_differs(meetings):
    everyone, stores = meetings(8, timedelta(seconds=60))
    brought = at_once(
        [partial(meeting.come, "state", "", str(meeting.rank)) for meeting in everyone]
    )
    assert brought == [[str(rank) for rank in range(8)]] * 8
    assert [(store.requests["multi_get"], store.requests["get"]) for store in stores] == [
        (1, 2)
    ] * 8
