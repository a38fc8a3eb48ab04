"""What users build round torch's names: hooks of their own, tools that ask for torch's classes, one state for several models."""

import copy
import os
import pickle
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch_backend as gw
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases, World
from tests.torch.training import collective_payloads, hooked, train

cases = Cases(__file__, ranks=2)

WIDTHS = (48, 40, 32, 24)
LOSS = loss_on(48)
MATRICES = [tuple(p.shape) for p in mlp(*WIDTHS).parameters() if p.ndim > 1]


def wrapped(world: World, state: gw.PowerSGDState, hook: Any = gw.powerSGD_hook, **options: Any) -> Any:
    ddp, _ = hooked(mlp(*WIDTHS), None, world.group, **options)
    ddp.register_comm_hook(state, hook)
    return ddp


def state_of(world: World, rank: int, start: int = 0) -> gw.PowerSGDState:
    return gw.PowerSGDState(world.group, rank, start_powerSGD_iter=start)


def logged(state: gw.PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return gw.powerSGD_hook(state, bucket)


@cases.case
def test_a_wrapper_round_a_users_hook_runs_low_rank_in_half_precision(world: World) -> None:
    ddp = wrapped(world, state_of(world, 2, 2), gw.fp16_compress_wrapper(logged))
    with collective_payloads() as sent:
        trace = train(ddp, LOSS, 4, local=False)
    assert {each.dtype for each in sent} == {torch.float16}
    assert min(each.numel for each in sent) < 2 * sum(WIDTHS) + sum(WIDTHS[1:])  # factors
    assert world.agree(trace.weights)


@cases.case
def test_a_hook_that_waits_for_a_later_bucket_is_told_so(world: World) -> None:
    def timed(state: gw.PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = gw.powerSGD_hook(state, bucket)
        future.wait()
        return future

    with pytest.raises(RuntimeError, match="completed in the call for the last bucket"):
        train(wrapped(world, state_of(world, 2), timed), LOSS, 3, local=False)
    train(wrapped(world, state_of(world, 2), timed, cap=25), LOSS, 2, local=False)


@cases.case
def test_a_state_serves_one_model(world: World) -> None:
    state = state_of(world, 1)
    first, second = wrapped(world, state), wrapped(world, state)
    train(first, LOSS, 1, local=False)
    with pytest.raises(ValueError, match="a state of its own") as raised:
        train(second, LOSS, 1, local=False)
    assert len(str(raised.value)) < 500


@cases.case
def test_what_torchs_state_shows_is_there(world: World) -> None:
    state = state_of(world, 1, 1)
    assert (state.error_dict, state.q_memory_dict, state.total_numel_before_compression) == ({}, {}, 0)
    train(wrapped(world, state), LOSS, 3, local=False)
    shown = state.total_numel_before_compression, state.total_numel_after_compression
    assert shown == state.compression_stats()[1:]
    assert [tuple(x.shape) for x in state.error_dict.values()] == MATRICES
    assert [tuple(x.shape) for x in state.q_memory_dict.values()] == [(1, m) for _, m in MATRICES]


#: The step in which compression starts, what is assigned after three, and what is expected: the rank, tensors with an error, steps.
CHANGES = {
    "rank": (2, "matrix_approximation_rank", 2, (2, 3, 5)),
    "start": (1000, "start_powerSGD_iter", 3, (1, 3, 5)),
    "iter": (1000, "iter", 1000, (1, 3, 1002)),
    "feedback": (2, "use_error_feedback", False, (1, 0, 5)),
}


@cases.each(CHANGES)
def test_options_that_are_assigned_in_the_middle_are_heeded(world: World, change: Any) -> None:
    start, option, value, (rank, remembered, steps) = change
    state = state_of(world, 1, start)
    ddp = wrapped(world, state)
    train(ddp, LOSS, 3, local=False)
    before = state.compression_stats()[2]
    with pytest.raises(ValueError, match="rank=0"):
        state.matrix_approximation_rank = 0
    assert state.matrix_approximation_rank == 1
    setattr(state, option, value)
    assert world.agree(train(ddp, LOSS, 2, local=False).weights)
    vectors, factors = sum(WIDTHS[1:]), sum(n + m for n, m in MATRICES)
    assert state.compression_stats()[2] - before == 2 * (rank * factors + vectors)
    assert (len(state.error_dict), state.iter) == (remembered, steps)


@cases.case
def test_a_ddp_that_is_pickled_or_copied_leaves_its_hook_behind(world: World) -> None:
    """DDP itself is pickled with the default process group only."""
    ddp = DistributedDataParallel(mlp(*WIDTHS))
    handle = gw.register_comm_hook(ddp, gradwire.PowerSGD(rank=2))
    train(ddp, LOSS, 1, local=False)
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        handle_there = gw.register_comm_hook(twin, gradwire.PowerSGD(rank=1))
        train(twin, LOSS, 2, local=False)
        assert handle_there.stats().steps == 2
        assert handle_there.stats().compression_ratio > 2
    train(ddp, LOSS, 1, local=False)
    assert handle.stats().steps == 2


def test_lightning_sees_torchs_state():
    assert isinstance(gw.PostLocalSGDState(None, None, 3), theirs.PostLocalSGDState)


@cases.case
def test_a_subgroup_that_cannot_be_found_is_missed_when_it_is_needed(world: World) -> None:
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]
        ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=world.group)
        ddp.register_comm_hook(gw.PostLocalSGDState(world.group, None, start_localSGD_iter=2), gw.post_localSGD_hook)

        def passes(times: int) -> None:
            for _ in range(times):
                ddp(torch.ones(2, 4)).sum().backward()

        with pytest.warns(UserWarning, match="from step 2 on.*give subgroup") as caught:
            passes(2)
        (warned,) = caught
        with pytest.raises(ValueError, match=re.escape(str(warned.message))):
            passes(1)
