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
from torch.nn.parallel import DistributedDataParallel

from gradwire import PowerSGD, diloco
from gradwire.torch_backend import DataParallel, ZeroOptimizer, local_sgd, meeting, register_comm_hook, state
from gradwire.torch_backend.meeting import Meeting
from tests.torch.ranks import Cases
from tests.torch.training import loss_on, mlp, same_bits

RANKS = 3
WIDTHS = (24, 40, 32, 24)
loss = loss_on(WIDTHS[0])

cases = Cases(__file__, ranks=RANKS)
results = cases.fixture()


class Hooked:
    """DDP with a hook."""

    def __init__(self, world, algorithm, seed=0):
        self.rank = world.rank
        self.model = mlp(*WIDTHS, seed=seed)
        self.wrap(world.group, algorithm)

    def wrap(self, group, algorithm):
        self.wrapped = DistributedDataParallel(self.model, process_group=group, bucket_cap_mb=0.01)
        self.handle = register_comm_hook(self.wrapped, algorithm)
        self.driver, self.load = self.handle._driver, self.handle.load_state_dict
        self.state, self.rank_state = self.handle.state_dict, self.handle.rank_state_dict

    def steps(self, numbers):
        for step in numbers:
            self.model.zero_grad()
            loss(self.wrapped, self.rank, step).backward()
            with torch.no_grad():
                for p in self.model.parameters():
                    p -= 0.1 * p.grad

    def outcome(self, numbers):
        """What was raised."""
        try:
            self.steps(numbers)
        except RuntimeError as error:
            return str(error)
        return ""


class Wrapped(Hooked):
    """`DataParallel`."""

    def wrap(self, group, algorithm):
        self.wrapped = DataParallel(self.model, algorithm, process_group=group, bucket_cap_mb=0.01)
        self.driver, self.load = self.wrapped._reducer.driver, self.wrapped.load_compressor_state_dict
        self.state, self.rank_state = self.wrapped.compressor_state_dict, self.wrapped.rank_compressor_state_dict


WRAPPERS = {"register_comm_hook": Hooked, "DataParallel": Wrapped}


@contextmanager
def longest(seconds):
    """Ranks that do not come are given up soon."""
    with mock.patch.object(state, "LONGEST", timedelta(seconds=seconds)):
        yield


# ---- Called on some ranks only


@cases.case
def some_ranks_only(world):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger(meeting.__name__).addHandler(handler)
    run, said = Hooked(world, PowerSGD(2)), ""
    optimizer = ZeroOptimizer(run.model.named_parameters(), torch.optim.AdamW, process_group=world.group)
    run.steps(range(2))
    optimizer.step()
    if world.rank == 1:
        with longest(0.5), mock.patch.object(meeting, "PATIENCE", timedelta(0)):
            said = []
            for call in (run.state, run.handle.gathered_state_dict, optimizer.consolidate_state_dict):
                with pytest.raises(RuntimeError) as raised:
                    call()
                said.append(str(raised.value))
    dist.barrier(world.group)
    return {"said": said, "logged": records, "then": run.state(), "and": run.state()}


def test_a_state_that_some_ranks_ask_for_is_an_error_that_names_the_others(results):
    ranks = results("some_ranks_only")
    names = "state_dict()", "gathered_state_dict()", "consolidate_state_dict()"
    for said, name in zip(ranks[1]["said"], names, strict=True):
        assert said.startswith(f"{name}: rank 1 has waited in vain for ranks [0, 2]. ")
        assert "so every rank calls it, before anything that only one of them does" in said
        assert "rank_state_dict() communicates nothing" in said
    assert len(ranks[1]["logged"]) == 3
    assert ranks[1]["logged"][0].startswith("state_dict(): rank 1 waits for ranks [0, 2]. ")


def test_they_meet_when_all_have_come(results):
    first, *others = results("some_ranks_only")
    assert same_bits(first["then"], first["and"])
    assert all(same_bits(other["then"], first["then"]) for other in others)


@cases.case
def meetings(world):
    """Several at once, which leave nothing behind."""
    one, other = Meeting(world.group), Meeting(world.group)
    store = one._store
    found = [one.come("a", "", "x"), other.come("a", "", str(world.rank)), one.come("b", "")]
    keys = []
    for _ in range(3):
        one.come("a", "", "x")
        dist.barrier(world.group)
        keys.append(store.num_keys())
        dist.barrier(world.group)
    one.come("a", "", str(world.rank % 2))
    return {"found": found, "keys": keys, "and": one.come("a", "", "x")}


@cases.case
def impatient(world):
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
    return {"found": found, "given up": given_up}


def test_ranks_that_give_up_and_come_again_meet_in_the_end(results):
    ranks = results("impatient")
    assert all(rank["found"] == [[]] * 40 for rank in ranks)
    assert sum(rank["given up"] for rank in ranks) > 0


def test_what_ranks_bring_to_a_meeting_is_compared(results):
    for rank in results("meetings"):
        assert rank["found"] == [[], ["0", "1", "2"], []]
        assert rank["keys"][0] == rank["keys"][2]
        assert rank["and"] == []


# ---- Loaded on some ranks only, or not the same


LOADED = {
    "half step": PowerSGD(2, half_step=True),
    "dense start": PowerSGD(2, start_step=4),
    "full step": PowerSGD(2),
}


@cases.each({f"{wrapper}, {name}": (wrapper, name) for wrapper in WRAPPERS for name in LOADED})
def loaded(world, names):
    make, algorithm = WRAPPERS[names[0]], LOADED[names[1]]
    before, other = make(world, algorithm), make(world, algorithm, seed=1)
    before.steps(range(5))
    other.steps(range(5))
    saved, own, of_another = before.state(), before.rank_state(), other.state()
    found = {}

    def attempt(name, given):
        run = make(world, algorithm)
        run.model.load_state_dict(before.model.state_dict())
        if given is not None:
            run.load(given)
        found[name] = {"said": run.outcome(range(5, 7)), "weights": copy.deepcopy(run.model.state_dict())}

    attempt("nothing", None)
    attempt("the same", saved)
    attempt("its own", own)
    attempt("some nothing", saved if world.rank == 0 else None)
    attempt("some another", saved if world.rank != 1 else of_another)
    return found


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ranks_in_different_states_all_raise_before_anything_is_sent(results, wrapper, name):
    ranks = results(f"loaded[{wrapper}, {name}]")
    for rank in ranks:
        assert "ranks differ in step (rank 0: 5, rank 1: 0, rank 2: 0)" in rank["some nothing"]["said"]
        assert "Load the same state on every rank" in rank["some nothing"]["said"]
        assert "(ranks [1] have loaded another one than rank 0, or none)" in rank["some another"]["said"]
        assert same_bits(rank["some nothing"]["weights"], rank["some another"]["weights"])  # nothing was changed
        for fine in ("nothing", "the same", "its own"):
            assert rank[fine]["said"] == ""
            assert same_bits(rank[fine]["weights"], ranks[0][fine]["weights"])


@cases.each({"DataParallel": Wrapped})
def in_the_middle(world, make):
    """One rank goes back to a checkpoint, and the others go on: they have no reason to compare anything."""
    run = make(world, PowerSGD(2, half_step=True))
    run.steps(range(3))
    saved, said, comes = run.state(), "", []
    model = copy.deepcopy(run.model.state_dict())
    come = run.driver._meeting.come
    run.driver._meeting.come = lambda *args: comes.append(1) or come(*args)
    run.steps(range(3, 5))
    later = len(comes)
    if world.rank == 0:
        run.load(saved)
        kept, run.driver._meeting._timeout = run.driver._meeting._timeout, timedelta(seconds=0.5)
        said = run.outcome([3])
        run.driver._meeting._timeout = kept
    dist.barrier(world.group)
    if world.rank != 0:  # what it asks for
        run.load(saved)
    run.model.load_state_dict(model)
    run.steps(range(3, 5))
    return {"said": said, "later": later, "compared": len(comes), "weights": copy.deepcopy(run.model.state_dict())}


def test_a_rank_that_loads_in_the_middle_is_not_left_to_average_with_the_others(results):
    first, *others = results("in_the_middle[DataParallel]")
    assert "rank 0 has waited in vain for ranks [1, 2]" in first["said"]
    assert "have loaded no state in the middle of training where others have" in first["said"]
    assert all(same_bits(other["weights"], first["weights"]) for other in others)


def test_later_steps_compare_nothing(results):
    first, *others = results("in_the_middle[DataParallel]")
    assert first["later"] == 0
    assert [rank["later"] for rank in others] == [0, 0]
    assert [rank["compared"] for rank in others] == [1, 1]


# ---- Of another rank


@cases.case
def of_another_rank(world):
    def attempt(run, given, **options):
        before = run.rank_state()
        try:
            run.load(given, **options)
        except ValueError as error:
            assert same_bits(run.rank_state(), before)
            return str(error)
        return ""

    found = {}
    for name, make in WRAPPERS.items():
        run = make(world, PowerSGD(2))
        run.steps(range(3))
        own = run.rank_state()
        box = [own]
        dist.broadcast_object_list(box, dist.get_global_rank(world.group, 0), group=world.group)
        of_first = box[0]
        older = {key: value for key, value in own.items() if key not in ("rank", "replicas")}
        run.steps(range(3, 4))
        found[name] = {
            "rank 0's": attempt(run, of_first),
            "rank 0's, strictly or not": attempt(run, of_first, strict=False),
            "of two": attempt(run, {**own, "replicas": 2}),
            "older": attempt(run, older),
            "own": attempt(run, own),
            "back": same_bits(run.rank_state(), own),
        }
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_another_ranks_state_is_refused(results, wrapper):
    for number, rank in enumerate(results("of_another_rank")):
        said = rank[wrapper]
        if number:
            assert f"that of rank 0 of 3, with the error of that rank; this is rank {number} of 3" in said["rank 0's"]
            assert "Load what state_dict() gives" in said["rank 0's"]
            assert said["rank 0's, strictly or not"] == said["rank 0's"]
        else:
            assert said["rank 0's"] == ""
        assert f"that of rank {number} of 2" in said["of two"]
        assert said["older"] == said["own"] == ""
        assert said["back"]


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), "large", None])
def test_a_scale_that_is_none_changes_nothing(alone, scale):
    ddp = DistributedDataParallel(mlp(8, 8), process_group=alone)
    handle = register_comm_hook(ddp, PowerSGD(1))
    before, given = handle.rank_state_dict(), {**handle.state_dict(), "step": 7, "scale": scale}
    with pytest.raises(ValueError, match=r"scale=.* in the state must be a positive number"):
        handle.load_state_dict(given)
    assert same_bits(handle.rank_state_dict(), before)


@cases.case
def wide_memory(world):
    """Memory is summed up in float64; what is of that dtype already must not be summed where it is."""
    model = mlp(*WIDTHS).double()
    ddp = DistributedDataParallel(model, process_group=world.group)
    handle = register_comm_hook(ddp, PowerSGD(2))
    x = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)
    ddp(x).square().mean().backward()
    before = handle.rank_state_dict()
    gathered = [handle.state_dict(), handle.gathered_state_dict("mean"), handle.gathered_state_dict("all")]
    return {"same": same_bits(handle.rank_state_dict(), before), "gathered": gathered, "own": before}


def test_to_gather_a_state_does_not_change_it(results):
    ranks = results("wide_memory")
    assert all(rank["same"] for rank in ranks)
    rows = [rank["own"]["tensors"]["0.weight"]["error"] for rank in ranks]
    mean = ranks[0]["gathered"][0]["local"]["0.weight"]["error"][0]
    torch.testing.assert_close(mean, sum(rows) / RANKS)
    assert not same_bits(rows[0], rows[1])


# ---- Local SGD


@cases.case
def local(world):
    def run():
        model = mlp(*WIDTHS)
        ddp = DistributedDataParallel(model, process_group=world.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ddp, optimizer, local_sgd(ddp, optimizer, diloco(4, compressor=PowerSGD(2)))

    def steps(numbers):
        for step in numbers:
            optimizer.zero_grad()
            loss(ddp, world.rank, step).backward()
            optimizer.step()

    def attempt(call):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    ddp, optimizer, handle = run()
    found = {"fresh": attempt(handle.state_dict)}
    steps(range(6))
    found["in between"] = attempt(handle.state_dict)
    box = [handle.rank_state_dict()]
    dist.broadcast_object_list(box, dist.get_global_rank(world.group, 0), group=world.group)
    before = handle.rank_state_dict()
    found["rank 0's"] = attempt(lambda: handle.load_state_dict(box[0]))
    found["unchanged"] = same_bits(handle.rank_state_dict(), before)
    found["own"] = attempt(lambda: handle.load_state_dict(before))
    found["still in between"] = attempt(handle.state_dict)
    steps(range(6, 8))
    assert handle.synchronized
    portable = handle.state_dict()
    found["error"] = {n: m["error"] for n, m in portable["local"].items()}
    found["own error"] = {n: m["error"] for n, m in handle.rank_state_dict()["tensors"].items() if "error" in m}
    other = {**portable, "tensors": {n: {k: x + 1 for k, x in m.items()} for n, m in portable["tensors"].items()}}
    found["not the same"] = attempt(lambda: handle.load_state_dict(other if world.rank == 1 else portable))
    found["some only"] = ""
    if world.rank == 2:
        with mock.patch("gradwire.torch_backend.local_sgd.handle.LONGEST", timedelta(seconds=0.5)):
            found["some only"] = attempt(lambda: handle.load_state_dict(portable))
    dist.barrier(world.group)
    ddp, optimizer, handle = run()
    found["all"] = attempt(lambda: handle.load_state_dict(portable))
    return found | {"synchronized": handle.synchronized, "again": attempt(handle.state_dict)}


def test_local_sgd_takes_a_state_that_is_everybodys_or_its_own(results):
    ranks = results("local")
    for number, rank in enumerate(ranks):
        for fine in ("fresh", "own", "all", "again"):
            assert rank[fine] == ""
        for refused in ("in between", "still in between"):
            assert rank[refused].startswith("RuntimeError: after 6 steps of ")
            assert "Call synchronize() on every rank before you save" in rank[refused]
        whose = "the state is that of rank 0 of 3" if number else "rank 1 cannot take part: the state is that of rank 0"
        assert whose in rank["rank 0's"]
        assert rank["unchanged"]
        assert rank["synchronized"]
        assert "ranks differ in state" in rank["not the same"]
        for name, mean in rank["error"].items():
            torch.testing.assert_close(mean[0], sum(other["own error"][name] for other in ranks) / RANKS)
    assert "load_state_dict(): rank 2 has waited in vain for ranks [0, 1]" in ranks[2]["some only"]


if __name__ == "__main__":
    cases.main()
