"""How much of gradwire a reader of one step has to read: what a training does without enters no
file."""

import sys
import threading
from types import FrameType

import pytest
import torch
from torch import nn

from gradwire import PowerSGD
from tests.torch.training import hooked

pytestmark = pytest.mark.usefixtures("alone")


def entered_in_a_step() -> list[str]:
    """The modules of gradwire whose functions run in the fourth step of PowerSGD under DDP, in
    order."""
    seen: dict[str, None] = {}
    counts = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        if counts and event == "call" and frame.f_code.co_filename.endswith(".py"):
            name = frame.f_globals.get("__name__", "")
            if name.startswith("gradwire."):
                seen.setdefault(name.removeprefix("gradwire."))

    ddp, _ = hooked(nn.Linear(64, 48), PowerSGD(rank=2))
    before = sys.getprofile(), threading.getprofile()
    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        for step in range(4):
            counts = step == 3
            ddp(torch.ones(2, 64)).sum().backward()
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    return list(seen)


def test_a_step_enters_few_files():
    """The story of the step is one of them, and whatever is noted in it is noted in another one."""
    entered = entered_in_a_step()
    assert 10 <= len(entered) <= 20, entered
    assert "torch_backend.engine.step" in entered
    assert [name for name in entered if ".monitor." in name] == ["torch_backend.monitor.watcher"]
