"""Public names of the last version still work, and say the new ones."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import AllReduce, LocalSGD, PowerSGD
from gradwire.core.deprecated import old_arguments
from gradwire.core.kernels.random import key, uniform
from gradwire.core.requests import mean, orthonormalize
from gradwire.jax_backend import ZeroState
from gradwire.torch_backend import DataParallel, PostLocalSGDState, PowerSGDState, Stats, local_sgd, register_comm_hook

#: The old path → the new one.
NAMES = {
    "gradwire.Moment": "gradwire.StepContext",
    "gradwire.by_bucket": "gradwire.shard_by_bucket",
    "gradwire.by_element": "gradwire.shard_by_element",
    "gradwire.by_parameter": "gradwire.shard_by_parameter",
    "gradwire.core.checkpoint.Difference": "gradwire.core.checkpoint.StateMismatch",
    "gradwire.core.collectives.all_finite": "gradwire.core.requests.step_is_finite",
    "gradwire.core.collectives.all_gather": "gradwire.core.requests.all_gather",
    "gradwire.core.collectives.branch": "gradwire.core.requests.branch",
    "gradwire.core.collectives.branch_on_phase": "gradwire.core.requests.branch_on_phase",
    "gradwire.core.collectives.mean": "gradwire.core.requests.mean",
    "gradwire.core.collectives.means": "gradwire.core.requests.mean_each",
    "gradwire.core.collectives.orthonormalize": "gradwire.core.requests.orthonormalize",
    "gradwire.core.collectives.reduce_scatter": "gradwire.core.requests.reduce_scatter",
    "gradwire.core.collectives.replica": "gradwire.core.requests.replica_index",
    "gradwire.core.collectives.together": "gradwire.core.programs.together",
    "gradwire.core.collectives.total": "gradwire.core.requests.sum_scalar",
    "gradwire.core.random.key": "gradwire.core.kernels.random.key",
    "gradwire.core.random.uniform": "gradwire.core.kernels.random.uniform",
    "gradwire.jax_backend.data_parallel": "gradwire.jax_backend.average_gradients",
    "gradwire.jax_backend.from_neutral": "gradwire.jax_backend.from_portable",
    "gradwire.jax_backend.local": "gradwire.jax_backend.mark_varying",
    "gradwire.jax_backend.own": "gradwire.jax_backend.this_replica",
    "gradwire.jax_backend.per_replica": "gradwire.jax_backend.stack_replicas",
    "gradwire.jax_backend.resize": "gradwire.jax_backend.set_replicas",
    "gradwire.jax_backend.to_neutral": "gradwire.jax_backend.to_portable",
    "gradwire.jax_backend.total": "gradwire.jax_backend.total_traffic",
    "gradwire.jax_backend.zero": "gradwire.jax_backend.zero1",
    "gradwire.jax_backend.trees.STACK_AXES": "gradwire.jax_backend.parameter_names.STACK_AXES",
}


def at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("old", "new"), NAMES.items())
def test_an_old_name_is_the_new_one(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^{old} is now {new};") as caught:
        found = at(old)
    assert found is at(new)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("module", sorted({path.rpartition(".")[0] for path in NAMES}))
def test_what_never_was_is_still_an_error(module: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'never'"):
        at(f"{module}.never")


def test_an_old_attribute_is_the_new_one() -> None:
    plan = gradwire.plan({"w": (64, 64)}, PowerSGD(2))
    stats = Stats(steps=1, skipped_steps=0, collectives=1, bytes_sent=10, dense_bytes=40)
    for each in (plan, stats):
        with pytest.warns(DeprecationWarning, match=r"ratio is now compression_ratio;"):
            assert each.ratio == each.compression_ratio > 1


def test_the_value_of_an_old_argument_arrives() -> None:
    @old_arguments(before="now")
    def function(*, now: int) -> int:
        return now

    given: dict[str, int] = {"before": 3}
    with pytest.warns(DeprecationWarning, match="before= is now now=;") as caught:
        assert function(**given) == 3
    assert caught[0].filename == __file__


@pytest.mark.parametrize("given", ["residual", "function"])
def test_a_method_of_the_last_version_still_overlaps_its_message(given: str) -> None:
    done = []

    class Old(gradwire.RandomProjection):
        async def compress(self, ops: Any, name: str, x: Any, memory: Any, at: Any) -> Any:
            q = await orthonormalize(ops, ops.cast(uniform(ops, key(0, name), (2, 16), at.step), ops.dtype_of(x)))
            sent = gradwire.LowRank(ops.matmul(q, x.mT), q)
            work = at.remainder(sent) if given == "residual" else lambda: done.append(name)
            p = await mean(sent.p, meanwhile=work)
            return sent, gradwire.LowRank(p, q), memory

    rng = np.random.default_rng(0)
    gradients = [{"w": rng.normal(size=(8, 16))} for _ in range(2)]
    old, new = (gradwire.Simulator(method(2), {"w": (8, 16)}, 2) for method in (Old, gradwire.RandomProjection))
    with pytest.warns(
        DeprecationWarning, match=r"^meanwhile= is now overlap=;|^StepContext.remainder is now residual;"
    ) as caught:
        averages = old.step(gradients)
    assert len(caught) == (4 if given == "residual" else 2)
    assert {warning.filename for warning in caught} == {__file__}
    np.testing.assert_array_equal(averages["w"], new.step(gradients)["w"])
    np.testing.assert_array_equal(old.states[0].tensors["w"]["error"], new.states[0].tensors["w"]["error"])
    assert done == (["w"] * 2 if given == "function" else [])


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _local(ddp: DistributedDataParallel, **options: Any) -> None:
    local_sgd(ddp, torch.optim.SGD(ddp.parameters(), 0.1), LocalSGD(2), **options)


FRONT_DOORS: dict[str, Callable[..., Any]] = {
    "register_comm_hook": lambda ddp, **options: register_comm_hook(ddp, AllReduce(), **options),
    "local_sgd": _local,
    "DataParallel": lambda ddp, **options: DataParallel(ddp.module, AllReduce(), **options),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("door", FRONT_DOORS)
def test_an_old_argument_is_the_new_one(door: str) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="group_bytes= is the old name of message_bytes="):
        FRONT_DOORS[door](ddp, group_bytes=1, message_bytes=1)
    with pytest.warns(DeprecationWarning, match="group_bytes= is now message_bytes=;"):
        FRONT_DOORS[door](ddp, group_bytes=1)


@pytest.mark.parametrize(
    ("state", "old"),
    [
        (PowerSGDState(None), "gradwire.torch_backend.compat"),
        (PostLocalSGDState(None, None, 5), "gradwire.torch_backend.compat_local_sgd"),
        (ZeroState(*[None] * len(ZeroState._fields)), "gradwire.jax_backend.reshard"),
    ],
    ids=["PowerSGDState", "PostLocalSGDState", "ZeroState"],
)
def test_a_state_that_was_pickled_before_its_module_moved_is_read(state: Any, old: str) -> None:
    now = f"{type(state).__module__}\n".encode()
    written = pickle.dumps(state, protocol=0)
    assert written.count(now)
    with pytest.warns(DeprecationWarning, match=f"{old}.{type(state).__name__} is now"):
        again = pickle.loads(written.replace(now, f"{old}\n".encode()))
    assert type(again) is type(state)
