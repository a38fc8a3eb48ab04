"""Fragments of pages that begin in the middle of a user's program run in one: in order, with what a reader of the page has by then."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch_backend as gw
from tests.pages import public_names, run_blocks
from tests.torch.models import mlp
from tests.torch.training import sgd

#: page → its blocks of Python, by number, that begin so. The first of them runs first.
FRAGMENTS = {
    "buckets": [0],
    "coming-from-torch": [0],
    "local-sgd": [0, 1],
    "state": [0, 1],
    "two-levels": [1],
    "zero": [0],
}


@pytest.mark.parametrize("page", FRAGMENTS)
# What torch will call it from now on, older versions do not know.
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@pytest.mark.usefixtures("alone")
def test_fragments_run(page, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    model = mlp(300, 40, 28)
    ddp = DistributedDataParallel(model) if page not in ("buckets", "local-sgd", "zero") else None
    given = {
        **public_names(gradwire, gw),
        "gradwire": gradwire,
        "torch": torch,
        "DistributedDataParallel": DistributedDataParallel,
        "model": model,
        "ddp": ddp,
        "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()},
        "rank": dist.get_rank(),
        "file": tmp_path / "checkpoint.pt",
    }
    if page == "state":
        given["handle"], given["optimizer"] = gw.register_comm_hook(ddp, gradwire.PowerSGD(4)), sgd(model)
    run_blocks(page, FRAGMENTS[page], given)
    assert (page == "buckets") == bool(capsys.readouterr().out)
