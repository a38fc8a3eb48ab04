"""Local SGD whose averages travel while training goes on, in three processes on Gloo."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import AllReduce, PowerSGD, WireDtype, diloco
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.torch_backend import local_sgd
from tests.core import golden
from tests.torch.compare import same_bits, weights
from tests.torch.ranks import PATIENCE, Cases, World
from tests.torch.training import LocalRun

cases = Cases(__file__, ranks=3)

ADAMW = partial(torch.optim.AdamW, lr=0.05)
LATE = {
    "one": diloco(6, overlap=3),
    "fragments": diloco(6, overlap=2, fragments=3, layout="size", compressor=PowerSGD(2, min_compression_rate=1)),
    "progress": diloco(6, overlap=5, merge="progress", outer=ADAMW, compressor=WireDtype(AllReduce(), "int8")),
    "eager": diloco(4, eager=True, outer=ADAMW, compressor=PowerSGD(2, min_compression_rate=1)),
}


@cases.each(LATE, slow=("one", "progress"))
def test_a_run_that_ends_while_messages_travel_goes_on_with_the_same_bits(world: World, local: LocalSGD) -> None:
    """After each step of a period, wherever its messages are, from files of each rank."""
    through, undisturbed, saved, seen = LocalRun(world, local), LocalRun(world, local), {}, {}
    for step in range(20):
        torch.save((weights(through.model), through.handle.rank_state_dict()), file := io.BytesIO())
        saved[step] = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        through.steps(step, step + 1)
        seen[step + 1] = through.seen()
    undisturbed.steps(0, 20)
    assert same_bits(undisturbed.seen(), seen[20])
    for step in range(9, 16):
        again = LocalRun(world, local)
        again.model.load_state_dict(saved[step][0])
        again.handle.load_state_dict(saved[step][1])
        again.steps(step, step + 5)
        assert same_bits(again.seen(), seen[step + 5])


@cases.each(LATE | {"waiting": diloco(3, fragments=2), "later": diloco(3, start_step=5, overlap=1)})
def test_outer_parameters_on_the_host_change_no_bit(world: World, local: LocalSGD) -> None:
    """Nor does a run that goes on from the other's state."""
    here, there = LocalRun(world, local), LocalRun(world, local, outer_device="cpu")
    for run in (here, there):
        run.steps(0, 9)
    assert same_bits(there.seen(), here.seen())
    assert same_bits(there.handle.outer_parameters(), here.handle.outer_parameters())
    states = [run.handle.rank_state_dict() for run in (here, there)]
    for run, state in zip((there, here), states, strict=True):
        run.handle.load_state_dict(state)
        run.steps(9, 16)
        run.handle.synchronize()
    assert same_bits(there.seen(), here.seen())
    assert same_bits(there.handle.state_dict(), here.handle.state_dict())
    for run in (here, there):
        run.handle.reconfigure(diloco(5, lr=0.1))
        run.steps(16, 22)
    assert same_bits(there.seen(), here.seen())


@cases.case
def test_what_is_on_its_way_may_be_left_there(world: World) -> None:
    """Between leaving and arriving: another schedule, none any more, an object that is dropped."""
    local = LATE["fragments"]
    for then in ("reconfigure", "unregister", "drop"):
        run = LocalRun(world, local)
        run.steps(0, 3)
        assert run.handle._in_flight is not None
        assert run.handle._in_flight._on_their_way
        if then == "reconfigure":
            run.handle.reconfigure(diloco(6))
            run.steps(3, 13)
            assert world.agree(weights(run.model)) == run.handle.synchronized
        elif then == "unregister":
            run.handle.unregister()
            assert world.agree(weights(run.model))
        del run
    dist.barrier(group=world.group)


@cases.case
def test_other_messages_do_not_wait_behind_it(world: World) -> None:
    """It has a process group of its own."""
    run = LocalRun(world, LATE["one"])
    assert run.handle._in_flight is not None
    assert run.handle._in_flight._groups.whole is not run.handle._groups.whole
    run.steps(0, 6)
    assert run.handle.stats().collectives == 1
    run.handle.synchronize()
    assert world.agree(weights(run.model))


@cases.case
def test_steps_go_on_while_another_rank_has_not_sent_yet(world: World) -> None:
    """Rank 2 does not come to its step 3, after which a difference leaves, before the others have done two more."""
    run = LocalRun(world, diloco(4, overlap=3))
    run.steps(0, 3)
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 2:
        store.wait(["ahead/0", "ahead/1"], PATIENCE)
    run.steps(3, 6)
    store.set(f"ahead/{world.rank}", "")
    run.steps(6, 7)
    assert world.agree(dict(run.handle.outer_parameters()))


class Golden(nn.Module):
    """With the parameters of the golden schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Module() for i in (10, 2, 1, 0)})
        for layer in self.layers.values():
            layer.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.embed = nn.Parameter(torch.tensor([1.0, 2.0]))


@cases.each(list(golden.SCHEDULES))
def test_the_golden_schedule(world: World, schedule: str) -> None:
    model = Golden()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = local_sgd(model, optimizer, golden.SCHEDULES[schedule], process_group=world.group)

    def memory_after(step: int) -> Any:
        for p in model.parameters() if step >= 0 else ():
            p.grad = torch.full_like(p, golden.gradient(world.rank, step))
        if step >= 0:
            optimizer.step()
        return handle.rank_state_dict()["tensors"]

    golden.assert_golden(schedule, memory_after)


@cases.case
def test_outer_parameters_are_the_same_on_all_ranks(world: World) -> None:
    run = LocalRun(world, LATE["one"])
    run.steps(0, 11)
    outer = run.handle.outer_parameters()
    assert outer.keys() == dict(run.model.named_parameters()).keys()
    assert world.agree(dict(outer))
    assert not world.agree(weights(run.model))
    out = torch.func.functional_call(run.model, outer, torch.ones(2, 8))
    assert out.shape == (2, 5)
    with pytest.raises(ValueError, match="no outer parameters"):
        LocalRun(world, LocalSGD(3)).handle.outer_parameters()
