"""What users build round torch's names: hooks of their own, tools that ask for torch's classes, one state for several models."""

import copy
import os
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.torch_backend import (
    PostLocalSGDState,
    PowerSGDState,
    fp16_compress_wrapper,
    post_localSGD_hook,
    powerSGD_hook,
    register_comm_hook,
)
from tests.torch.ranks import Cases, World
from tests.torch.training import collective_payloads, loss_on, mlp, same_bits, train

cases = Cases(__file__, ranks=2)
results = cases.fixture()

WIDTHS = (48, 40, 32, 24)
LOSS = loss_on(48)
CAP = 0.006  # several buckets


def wrapped(world: World) -> DistributedDataParallel:
    return DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=CAP)


def logged(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return powerSGD_hook(state, bucket)


@cases.case
def own_hook_in_a_wrapper(world: World) -> Any:
    ddp = wrapped(world)
    ddp.register_comm_hook(PowerSGDState(world.group, 2, start_powerSGD_iter=2), fp16_compress_wrapper(logged))
    with collective_payloads() as sent:
        trace = train(ddp, LOSS, 4, local=False)
    return {"weights": trace.weights, "payloads": [(str(each.dtype), each.numel) for each in sent]}


def test_a_wrapper_round_a_users_hook_runs_low_rank_in_half_precision(results):
    ranks = results("own_hook_in_a_wrapper")
    for rank in ranks:
        assert {dtype for dtype, _ in rank["payloads"]} == {"torch.float16"}
        assert min(n for _, n in rank["payloads"]) < 2 * sum(WIDTHS) + sum(WIDTHS[1:])  # factors
        assert same_bits(rank["weights"], ranks[0]["weights"])


@cases.case
def waits(world: World) -> Any:
    def timed(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = powerSGD_hook(state, bucket)
        future.wait()
        return future

    ddp = wrapped(world)
    ddp.register_comm_hook(PowerSGDState(world.group, 2, start_powerSGD_iter=0), timed)
    with pytest.raises(RuntimeError) as raised:
        train(ddp, LOSS, 3, local=False)
    one_bucket = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
    one_bucket.register_comm_hook(PowerSGDState(world.group, 2, start_powerSGD_iter=0), timed)
    train(one_bucket, LOSS, 2, local=False)
    return str(raised.value)


def test_a_hook_that_waits_for_a_later_bucket_is_told_so(results):
    for said in results("waits"):
        assert "completed in the call for the last bucket" in said


@cases.case
def two_models(world: World) -> Any:
    state = PowerSGDState(world.group, 1, start_powerSGD_iter=0)
    first, second = wrapped(world), wrapped(world)
    first.register_comm_hook(state, powerSGD_hook)
    second.register_comm_hook(state, powerSGD_hook)
    train(first, LOSS, 1, local=False)
    with pytest.raises(ValueError) as raised:
        train(second, LOSS, 1, local=False)
    return str(raised.value)


def test_a_state_serves_one_model(results):
    for said in results("two_models"):
        assert "a state of its own" in said
        assert len(said) < 500


@cases.case
def attributes(world: World) -> Any:
    state = PowerSGDState(world.group, 1, start_powerSGD_iter=1)
    before = state.error_dict, state.q_memory_dict, state.total_numel_before_compression
    ddp = wrapped(world)
    ddp.register_comm_hook(state, powerSGD_hook)
    train(ddp, LOSS, 3, local=False)
    stats = state.compression_stats()
    return before, {
        "numbers": (state.total_numel_before_compression, state.total_numel_after_compression) == stats[1:],
        "errors": {name: tuple(x.shape) for name, x in state.error_dict.items()},
        "factors": {name: tuple(x.shape) for name, x in state.q_memory_dict.items()},
    }


def test_what_torchs_state_shows_is_there(results):
    before, after = results("attributes")[0]
    assert before == ({}, {}, 0)
    assert after["numbers"]
    matrices = [tuple(p.shape) for p in mlp(*WIDTHS).parameters() if p.ndim > 1]
    assert list(after["errors"].values()) == matrices
    assert list(after["factors"].values()) == [(1, m) for _, m in matrices]


CHANGES = {
    "rank": (2, lambda state: setattr(state, "matrix_approximation_rank", 2)),
    "start": (1000, lambda state: setattr(state, "start_powerSGD_iter", 3)),
    "iter": (1000, lambda state: setattr(state, "iter", 1000)),
    "feedback": (2, lambda state: setattr(state, "use_error_feedback", False)),
}


@cases.each(CHANGES)
def assigned(world: World, change: Any) -> Any:
    start, assign = change
    state = PowerSGDState(world.group, 1, start_powerSGD_iter=start)
    ddp = wrapped(world)
    ddp.register_comm_hook(state, powerSGD_hook)
    train(ddp, LOSS, 3, local=False)
    before = state.compression_stats()[2]
    with pytest.raises(ValueError, match="rank=0"):
        state.matrix_approximation_rank = 0
    assert state.matrix_approximation_rank == 1
    assign(state)
    trace = train(ddp, LOSS, 2, local=False)
    return state.compression_stats()[2] - before, trace.weights, sorted(state.error_dict), state.iter


def test_options_that_are_assigned_in_the_middle_are_heeded(results):
    matrices = [tuple(p.shape) for p in mlp(*WIDTHS).parameters() if p.ndim > 1]
    vectors = sum(p.numel() for p in mlp(*WIDTHS).parameters() if p.ndim == 1)
    factors = sum(n + m for n, m in matrices)
    for change in CHANGES:
        for sent, weights, errors, steps in results(f"assigned[{change}]"):
            rank = 2 if change == "rank" else 1
            assert sent == 2 * (rank * factors + vectors)
            assert same_bits(weights, results(f"assigned[{change}]")[0][1])
            assert len(errors) == (0 if change == "feedback" else len(matrices))
            assert steps == (1002 if change == "iter" else 5)


@cases.case
def pickled(world: World) -> Any:
    """DDP itself is pickled with the default process group only."""
    ddp = DistributedDataParallel(mlp(*WIDTHS))
    handle = register_comm_hook(ddp, gradwire.PowerSGD(rank=2))
    train(ddp, LOSS, 1, local=False)
    twins = copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))
    found = []
    for twin in twins:
        handle_there = register_comm_hook(twin, gradwire.PowerSGD(rank=1))
        train(twin, LOSS, 2, local=False)
        found.append((handle_there.stats().steps, handle_there.stats().compression_ratio > 2))
    train(ddp, LOSS, 1, local=False)
    return found, handle.stats().steps


def test_a_ddp_that_is_pickled_or_copied_leaves_its_hook_behind(results):
    assert results("pickled") == [([(2, True), (2, True)], 2)] * 2


def test_lightning_sees_torchs_state():
    assert isinstance(PostLocalSGDState(None, None, 3), theirs.PostLocalSGDState)


@cases.case
def no_node(world: World) -> Any:
    local = os.environ.pop("LOCAL_WORLD_SIZE")
    try:
        ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=world.group)
        state = PostLocalSGDState(world.group, None, start_localSGD_iter=2)
        ddp.register_comm_hook(state, post_localSGD_hook)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                ddp(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ValueError) as raised:
            ddp(torch.ones(2, 4)).sum().backward()
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = local
    return [str(w.message) for w in caught], str(raised.value)


def test_a_subgroup_that_cannot_be_found_is_missed_when_it_is_needed(results):
    for warned, raised in results("no_node"):
        (said,) = warned
        assert "from step 2 on" in said
        assert "give subgroup" in said
        assert raised == said


if __name__ == "__main__":
    cases.main()
