"""Stacked experts in torch: who is warned, and a state of another view."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import CompressionWarning, PowerSGD, diloco
from gradwire.torch_backend import CommHook, DataParallel, PowerSGDState, local_sgd, powerSGD_hook, register_comm_hook
from tests.torch.training import hooked

pytestmark = pytest.mark.usefixtures("alone")


class Experts(nn.Module):
    """As transformers has them: every expert of a layer in one parameter, (experts, out, in)."""

    def __init__(self, experts: int = 8, width: int = 128) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 4 * width, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("nd,ehd->neh", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("neh,edh->nd", gate.relu() * up, self.down_proj)


def new_model() -> nn.Module:
    return nn.Sequential(OrderedDict(norm=nn.LayerNorm(128), experts=Experts()))


def compat(ddp: DistributedDataParallel) -> None:
    """torch's hook is told of its parameters in the first step."""
    ddp.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=0), powerSGD_hook)
    ddp(torch.randn(4, 128)).square().sum().backward()


@pytest.mark.parametrize(
    "register",
    [
        lambda: register_comm_hook(DistributedDataParallel(new_model()), PowerSGD(4)),
        lambda: DataParallel(new_model(), PowerSGD(4)),
        lambda: local_sgd(new_model(), None, diloco(10, compressor=PowerSGD(4))),
    ],
    ids=["register_comm_hook", "DataParallel", "local_sgd"],
)
def test_experts_are_noticed_once_with_the_fix(register) -> None:
    with pytest.warns(CompressionWarning, match=r"Say stacked={'experts\.\*': 1}") as caught:
        register()
    (warning,) = caught
    assert warning.filename == __file__


def test_torchs_own_names_see_what_torch_sees() -> None:
    """(shape[0], rest): 8 rows, too few for rank 4 to shrink them. There is another function for who wants more."""
    with pytest.warns(CompressionWarning, match=r"register_comm_hook\(ddp, PowerSGD\(rank, stacked=") as caught:
        compat(DistributedDataParallel(new_model()))
    assert len(caught) == 1


def seen_as(**view: dict[str, int]) -> CommHook:
    return hooked(new_model(), PowerSGD(2, **view, min_compression_rate=0.5))[1]


def test_a_state_of_another_view_is_refused_with_what_to_do() -> None:
    saved = seen_as(rows={"experts.*": 1}).state_dict()
    here = seen_as(stacked={"experts.*": 1})
    words = r"seen as other matrices; give PowerSGD rows={'experts\.down_proj': 1} to go on"
    with pytest.raises(ValueError, match=words):
        here.load_state_dict(saved)
    assert here.load_state_dict(saved, strict=False).reshaped  # the errors are kept
    # What counts is the shape: a state that knows nothing of the option fits.
    assert not seen_as(rows={"*": 1}).load_state_dict(saved)
