"""Models that are not alone, not in one precision, or not trained by one optimizer, under DDP and in `DataParallel`. Under FSDP: test_fsdp_cases.py."""

import pytest
import torch
from torch import nn

from gradwire import CompressionWarning, PowerSGD
from tests.torch.compare import gradients, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import distance, fit_with_two_rates, hooked, paralleled, train

ALGORITHM = PowerSGD(rank=2)
WIDTHS = (40, 36, 32, 20)
LOSS = loss_on(40, spread=1)
DOORS = {"hook": hooked, "DataParallel": paralleled}

cases = Cases(__file__, ranks=2)


@cases.case
def test_bfloat16_parameters_have_a_memory_of_float32(world):
    precise = PowerSGD(rank=2, state_dtype="float32")
    ddp, handle = hooked(mlp(*WIDTHS).bfloat16(), precise, world.group)
    trace = train(ddp, loss_on(40, dtype=torch.bfloat16, spread=1), 3)
    kept = {x.dtype for memory in handle.rank_state_dict()["tensors"].values() for x in memory.values()}
    assert kept == {torch.float32}
    assert {g.dtype for g in trace.given[0].values()} == {torch.bfloat16}
    # Four roundings of half an epsilon each, as in test_ddp_features.py.
    assert distance(ALGORITHM, world.everyones(trace), 1) < 2 * torch.finfo(torch.bfloat16).eps
    assert world.agree(trace.weights)


@cases.each(DOORS)
def test_several_optimizers_step_what_one_would(world, door):
    found = []
    for apart in (False, True):
        model, _ = door(mlp(*WIDTHS), ALGORITHM, world.group)
        inner = model.module
        fit_with_two_rates(model, inner, world.rank, LOSS, apart=apart)
        found.append(weights(inner))
    assert same_bits(*found)
    assert world.agree(found[0])


@cases.each(DOORS)
def test_of_two_models_in_one_backward_pass_one_may_be_discarded(world, door):
    """A generator's step goes through the discriminator, whose gradients are dropped."""
    (g, ours), (d, theirs) = (door(mlp(*widths), ALGORITHM, world.group) for widths in ((8, 32, 40), (40, 32, 1)))
    noise = torch.randn(6, 8, generator=torch.Generator().manual_seed(world.rank))

    d(g(noise).detach()).mean().backward()
    before = theirs.rank_state_dict()
    d.zero_grad()
    with theirs.discarded():
        (-d(g(noise)).mean()).backward()
    assert same_bits(theirs.rank_state_dict(), before)
    assert (ours.stats().steps, theirs.stats().steps) == (1, 1)
    assert world.agree(gradients(g.module))
    d.zero_grad()
    (-d(g(noise)).mean()).backward()  # without a word, it takes them up
    assert not same_bits(theirs.rank_state_dict(), before)
    assert theirs.stats().steps == 2


class Adapted(nn.Module):
    """A frozen layer with a low-rank update beside it."""

    def __init__(self, n: int, m: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(n, m).requires_grad_(False)
        self.down, self.up = nn.Linear(n, rank, bias=False), nn.Linear(rank, m, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@cases.case
def test_adapters_are_compressed_where_their_rank_is_large_enough(world):
    algorithm = PowerSGD(rank=2, min_compression_rate=1)
    for rank, compressed in ((2, 0), (12, 4)):
        torch.manual_seed(0)
        model = nn.Sequential(Adapted(40, 32, rank), nn.Tanh(), Adapted(32, 20, rank))
        if compressed:
            ddp, handle = hooked(model, algorithm, world.group)
        else:
            with pytest.warns(CompressionWarning, match="compresses nothing"):
                ddp, handle = hooked(model, algorithm, world.group)
        trace = train(ddp, LOSS, 3)
        assert len(handle.rank_state_dict()["tensors"]) == compressed
        assert not any("base" in name for name in trace.given[0])
        assert distance(algorithm, world.everyones(trace)) < 1e-4
