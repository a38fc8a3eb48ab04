"""What needs no tool of the integrations: they are imported when asked for, and memory waits for its DDP. With tools: test_tools_checkpoints.py."""

import logging

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import PowerSGD
from gradwire.torch_backend import integrations
from gradwire.torch_backend.integrations.compression import Compression
from tests.forked import run_ranks
from tests.torch.compare import said, same_bits
from tests.torch.models import mlp


def test_tools_are_imported_when_they_are_asked_for(tmp_path):
    """Of which one stands in that takes no time to load."""
    (tmp_path / "transformers.py").write_text("class TrainerCallback: pass")
    (script := tmp_path / "asks.py").write_text(
        "import sys, gradwire.torch_backend.integrations as i\n"
        "tools = {'transformers', 'accelerate', 'pytorch_lightning', 'lightning'}\n"
        "assert not tools & set(sys.modules)\n"
        "i.AcceleratorCompression\n"
        "assert not tools & set(sys.modules)\n"
        "i.TrainerCompression\n"
        "assert tools & set(sys.modules) == {'transformers'}\n"
    )
    run_ranks(script, 1)
    assert said(getattr, integrations, "Compress").endswith(
        "has no attribute 'Compress'; it has AcceleratorCompression, LightningCompression, TrainerCompression, "
        "training_of_lightning, training_of_trainer"
    )


def test_one_process_hands_the_memory_on(caplog):
    state, compression = {"step": 3}, Compression(PowerSGD(2))
    assert compression.state_dict() == compression.figures() == {}
    compression.load_state_dict(state)
    with caplog.at_level(logging.INFO, "gradwire"):
        compression.attach(nn.Linear(2, 2), None)
    assert [record.getMessage() for record in caplog.records] == [
        "PowerSGD(rank=2): one process trains, and averages nothing"
    ]
    assert compression.handle is None
    assert compression.state_dict() == state


def test_memory_waits_for_the_hook_and_another_ddp_gets_another_hook(alone):
    ddp = DistributedDataParallel(mlp(40, 36))
    first = Compression(PowerSGD(2))
    first.attach(ddp, None)
    handle = first.handle
    first.attach(ddp, None)
    assert first.handle is handle
    mlp_again = DistributedDataParallel(mlp(40, 36))
    state = first.state_dict() | {"step": 7}
    first.load_state_dict(state)
    assert handle.stats().steps == 0
    first.attach(mlp_again, None)
    assert first.handle is not handle
    assert first.handle.stats().steps == 7
    assert same_bits(first.state_dict()["tensors"], state["tensors"])
    assert first.figures()["gradwire/steps"] == 7


@pytest.mark.usefixtures("alone")
def test_several_processes_need_a_ddp(monkeypatch):
    monkeypatch.setattr("gradwire.torch_backend.integrations.compression._several", lambda: True)
    compression = Compression(PowerSGD(2))
    assert said(compression.attach, nn.Linear(2, 2), None).startswith(
        "TypeError: ddp is a Linear; wrap the model first"
    )
    assert compression.handle is None
