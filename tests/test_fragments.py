"""Fragments of pages that show both frameworks run in a program that has both: one rank of torch, and JAX's four devices."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.jax_backend
import gradwire.torch_backend
from gradwire.core.advise import probe
from tests.jax.replicas import mesh_of, mesh_of_two
from tests.pages import block, public_names, run_blocks
from tests.torch.models import mlp

#: What is compressed, and does not fit into 16 bits.
PARAMS = {"w": np.full((64, 32), 1.001, np.float32)}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a program has: gradwire, both frameworks, a model under DDP and its optimizer."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = mlp(300, 40, 28)
    ddp = DistributedDataParallel(model)
    names = public_names(gradwire) | {"gradwire": gradwire, "torch": torch, "jax": jax, "optax": optax, "rank": 0}
    yield names | {"model": model, "ddp": ddp, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    dist.destroy_process_group()


@pytest.fixture
def small_messages() -> Iterator[None]:
    """For probes."""
    with mock.patch.object(probe, "SIZES", probe.SIZES[:3]), mock.patch.object(probe, "REPEATED", 0.002):
        yield


@pytest.mark.usefixtures("small_messages")
def test_a_program_probes_its_link_and_asks_for_advice(
    names: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.chdir(tmp_path):
        of_torch = block("choosing", 0).splitlines()[0]
        run_blocks("choosing", [0], names | {"mesh": mesh_of(2)}, {of_torch: ""})
        probed = gradwire.Probe.load("probe.json")
        assert (probed.framework, probed.replicas) == ("jax", 2)
        found = names | {"model": {"w": jax.numpy.zeros((64, 64))}}
        run_blocks("choosing", [1], found)
    assert capsys.readouterr().out == f"{found['advice']}\n"
    assert found["advice"].method("plain").compute == 0.18


def test_methods_are_given_where_a_method_goes(names: dict[str, Any]) -> None:
    run_blocks("methods", [0], names)
    names["ddp"](torch.ones(8, 300)).sum().backward()


def test_a_limit_is_given_to_both(names: dict[str, Any]) -> None:
    run_blocks("error-feedback", [1], names | public_names(gradwire.jax_backend))


def test_two_levels_are_given_to_both(names: dict[str, Any]) -> None:
    bound = names | public_names(gradwire.jax_backend, gradwire.torch_backend)
    run_blocks("two-levels", [0], bound)
    bound["ddp"](torch.ones(8, 300)).sum().backward()
    with jax.set_mesh(mesh_of_two()):
        bound["tx"].init(PARAMS)
