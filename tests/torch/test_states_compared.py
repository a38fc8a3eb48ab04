"""Ranks that are not in the same state, or do not all come: an error that names them, and neither silence nor half an hour of waiting."""

import copy
import logging
import random
import time
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire import PowerSGD, diloco
from gradwire.torch_backend import ZeroOptimizer, local_sgd
from gradwire.torch_backend.engine.groups import barrier
from gradwire.torch_backend.engine.groups.barrier import Meeting
from gradwire.torch_backend.state import loss_scale
from tests.torch.compare import said, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import fit, hooked, paralleled, sgd

pytestmark = pytest.mark.slow

RANKS = 3
WIDTHS = (24, 40, 32, 24)
loss = loss_on(WIDTHS[0])

cases = Cases(__file__, ranks=RANKS)


class Run:
    """A model behind one of the doors, and its handle."""

    def __init__(self, world, algorithm, door=hooked, seed=0):
        self.rank = world.rank
        self.model = mlp(*WIDTHS, seed=seed)
        self.wrapped, self.handle = door(self.model, algorithm, world.group, cap=0.01)
        self.driver, self.load = self.handle._driver, self.handle.load_state_dict
        self.state, self.rank_state = self.handle.state_dict, self.handle.rank_state_dict

    def steps(self, numbers):
        fit(self.wrapped, sgd(self.model), self.rank, numbers, loss)


@contextmanager
def longest(seconds):
    """Ranks that do not come are given up soon."""
    with mock.patch.object(loss_scale, "LONGEST", timedelta(seconds=seconds)):
        yield


def broadcast(world, mine):
    """Rank 0's."""
    return world.everyones(mine)[0]


# ---- Called on some ranks only


@cases.case
def test_a_state_that_some_ranks_ask_for_is_an_error_that_names_the_others(world):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger(barrier.__name__).addHandler(handler)
    run = Run(world, PowerSGD(2))
    optimizer = ZeroOptimizer(run.model.named_parameters(), torch.optim.AdamW, process_group=world.group)
    run.steps(range(2))
    optimizer.step()
    if world.rank == 1:
        calls = {
            "state_dict()": run.state,
            "gathered_state_dict()": run.handle.gathered_state_dict,
            "consolidate_state_dict()": optimizer.consolidate_state_dict,
        }
        with longest(0.5), mock.patch.object(barrier, "PATIENCE", timedelta(0)):
            for name, call in calls.items():
                words = said(call)
                assert words.startswith(f"RuntimeError: {name}: rank 1 has waited in vain for ranks [0, 2]. ")
                assert "so every rank calls it, before anything that only one of them does" in words
                assert "rank_state_dict() communicates nothing" in words
        assert len(records) == 3
        assert records[0].startswith("state_dict(): rank 1 waits for ranks [0, 2]. ")
    dist.barrier(world.group)
    assert same_bits(run.state(), run.state())  # they meet when all have come
    assert world.agree(run.state())


@cases.case
def test_what_ranks_bring_to_a_meeting_is_compared(world):
    """Several at once, which leave nothing behind."""
    one, other = Meeting(world.group), Meeting(world.group)
    found = [one.come("a", "", "x"), other.come("a", "", str(world.rank)), one.come("b", "")]
    assert found == [[], ["0", "1", "2"], []]
    keys = []
    for _ in range(3):
        one.come("a", "", "x")
        dist.barrier(world.group)
        keys.append(one.store.num_keys())
        dist.barrier(world.group)
    assert keys[0] == keys[2]
    one.come("a", "", str(world.rank % 2))
    assert one.come("a", "", "x") == []


@cases.case
def test_ranks_that_give_up_and_come_again_meet_in_the_end(world):
    """Ranks come at random, and give up so soon that some come while others leave: they meet in the end, as often one as the other."""
    generator, table = random.Random(world.rank), Meeting(world.group)
    found, given_up = [], 0
    for turn in range(40):
        for attempt in count(1):
            time.sleep(generator.uniform(0, 0.004))
            try:
                found.append(table.come("turn", "", str(turn), timedelta(seconds=0.001 * attempt)))
                break
            except RuntimeError:
                given_up += 1
    assert found == [[]] * 40
    assert sum(world.everyones(given_up)) > 0


# ---- Loaded on some ranks only, or not the same


LOADED = {
    "hook, half step": (hooked, PowerSGD(2, half_step=True)),
    "hook, dense start": (hooked, PowerSGD(2, start_step=4)),
    "DataParallel": (paralleled, PowerSGD(2)),
}


@cases.each(LOADED)
def test_ranks_in_different_states_all_raise_before_anything_is_sent(world, variant):
    door, algorithm = variant
    before, other = Run(world, algorithm, door), Run(world, algorithm, door, seed=1)
    before.steps(range(5))
    other.steps(range(5))
    saved, own, of_another = before.state(), before.rank_state(), other.state()

    def attempt(given):
        """What is said, and whether the ranks are as they were, or have gone on together."""
        run = Run(world, algorithm, door)
        run.model.load_state_dict(before.model.state_dict())
        if given is not None:
            run.load(given)
        words = said(run.steps, range(5, 7))
        assert same_bits(run.model.state_dict(), before.model.state_dict()) is bool(words)
        assert world.agree(run.model.state_dict())
        return words

    for fine in (None, saved, own):
        assert not attempt(fine)
    words = attempt(saved if world.rank == 0 else None)
    assert "ranks differ in step (rank 0: 5, rank 1: 0, rank 2: 0)" in words
    assert "Load the same state on every rank" in words
    words = attempt(saved if world.rank != 1 else of_another)
    assert "(ranks [1] have loaded another one than rank 0, or none)" in words


@cases.case
def test_a_rank_that_loads_in_the_middle_is_not_left_to_average_with_the_others(world):
    """One rank goes back to a checkpoint, and the others go on: they have no reason to compare anything."""
    run = Run(world, PowerSGD(2, half_step=True), paralleled)
    run.steps(range(3))
    saved, comes = run.state(), []
    model = copy.deepcopy(run.model.state_dict())
    come = run.driver._meeting.come
    run.driver._meeting.come = lambda *args: comes.append(1) or come(*args)
    run.steps(range(3, 5))
    assert not comes  # later steps compare nothing
    if world.rank == 0:
        run.load(saved)
        with mock.patch.object(run.driver._meeting, "_timeout", timedelta(seconds=0.5)):
            words = said(run.steps, [3])
        assert "rank 0 has waited in vain for ranks [1, 2]" in words
        assert "have loaded no state in the middle of training where others have" in words
    dist.barrier(world.group)
    if world.rank != 0:  # what it asks for
        run.load(saved)
    run.model.load_state_dict(model)
    run.steps(range(3, 5))
    assert world.rank == 0 or comes == [1]
    assert world.agree(weights(run.model))


# ---- Of another rank


@cases.case
def test_another_ranks_state_is_refused(world):
    run = Run(world, PowerSGD(2))
    run.steps(range(3))
    own, older = run.rank_state(), run.rank_state()
    of_first = broadcast(world, own)
    del older["rank"], older["replicas"]
    run.steps(range(3, 4))
    before = run.rank_state()
    for options in ({}, {"strict": False}) if world.rank else ():
        words = said(run.load, of_first, **options)
        assert (
            f"that of rank=0, replicas=3, with the error of that rank; this is rank={world.rank}, replicas=3" in words
        )
    assert f"that of rank={world.rank}, replicas=2" in said(run.load, {**own, "replicas": 2})
    assert same_bits(run.rank_state(), before)
    run.load(older)
    run.load(own)
    assert same_bits(run.rank_state(), own)


@cases.case
def test_to_gather_a_state_does_not_change_it(world):
    """Memory is summed up in float64; what is of that dtype already must not be summed where it is."""
    ddp, handle = hooked(mlp(*WIDTHS).double(), PowerSGD(2), world.group)
    x = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)
    ddp(x).square().mean().backward()
    before = handle.rank_state_dict()
    mean = handle.state_dict()["local"]["0.weight"]["error"][0]
    handle.gathered_state_dict("mean"), handle.gathered_state_dict("all")
    assert same_bits(handle.rank_state_dict(), before)
    rows = world.everyones(before["tensors"]["0.weight"]["error"])
    torch.testing.assert_close(mean, sum(rows) / RANKS)
    assert not same_bits(rows[0], rows[1])


# ---- Local SGD


@cases.case
def test_local_sgd_takes_a_state_that_is_everybodys_or_its_own(world):
    def run():
        model = mlp(*WIDTHS)
        ddp, _ = hooked(model, None, world.group)
        optimizer = sgd(model)
        return ddp, optimizer, local_sgd(ddp, optimizer, diloco(4, compressor=PowerSGD(2)))

    def errors(state, part):
        return {n: m["error"] for n, m in state[part].items() if "error" in m}

    def require_refused_between_averages():
        words = said(handle.state_dict)
        assert words.startswith("RuntimeError: after 6 steps of ")
        assert "Call synchronize() on every rank before you save" in words

    ddp, optimizer, handle = run()
    handle.state_dict()
    fit(ddp, optimizer, world.rank, range(6), loss)
    require_refused_between_averages()
    before = handle.rank_state_dict()
    words = said(handle.load_state_dict, broadcast(world, before))
    whose = "the state is that of rank=0" if world.rank else "rank 1 cannot take part: the state is that of rank=0"
    assert whose in words
    assert same_bits(handle.rank_state_dict(), before)
    handle.load_state_dict(before)
    require_refused_between_averages()
    fit(ddp, optimizer, world.rank, range(6, 8), loss)
    assert handle.synchronized
    portable = handle.state_dict()
    own = world.everyones(errors(handle.rank_state_dict(), "tensors"))
    for name, mean in errors(portable, "local").items():
        torch.testing.assert_close(mean[0], sum(each[name] for each in own) / RANKS)
    other = {**portable, "tensors": {n: {k: x + 1 for k, x in m.items()} for n, m in portable["tensors"].items()}}
    assert "ranks differ in state" in said(handle.load_state_dict, other if world.rank == 1 else portable)
    if world.rank == 2:
        with mock.patch("gradwire.torch_backend.local_sgd.handle.LONGEST", timedelta(seconds=0.5)):
            words = said(handle.load_state_dict, portable)
        assert "load_state_dict(): rank 2 has waited in vain for ranks [0, 1]" in words
    dist.barrier(world.group)
    ddp, optimizer, handle = run()
    handle.load_state_dict(portable)
    assert handle.synchronized
    handle.state_dict()
