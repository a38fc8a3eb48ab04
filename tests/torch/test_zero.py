"""A sharded optimizer does what the optimizer does: the same parameters, in as many bytes as one all-reduce, with 1/W of the memory."""

from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from tests.torch.compare import relative
from tests.torch.models import loss_on
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of
from tests.torch.zero_training import FORMS, OPTIMIZERS, Model, plain_groups, run, sharded, wrapped

cases = Cases(__file__, ranks=2)


#: Whose state is not divided as AdamW's, which tests/parity holds against float64 in every form and on more ranks.
RUNS = [(optimizer, form) for optimizer in ("sgd", "adagrad", "rmsprop") for form in ("plain", "interleaved")]


@cases.each({f"{optimizer}, {form}": (optimizer, form) for optimizer, form in RUNS})
def test_equals_ddp_with_the_plain_optimizer(world, variant):
    optimizer, form = variant
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    ddp = wrapped(world, Model())
    reference = run(world, ddp, optimizer_class(plain_groups(ddp.module), **defaults), steps=20)
    reference = {n.removeprefix("module."): w for n, w in reference.items()}
    assert buckets_of(ddp) > 3
    assert relative(reference, dict(Model().named_parameters())) > 0.05
    weights = run(world, *sharded(world, form, optimizer_class, defaults), steps=20)
    assert relative({n.removeprefix("module."): w for n, w in weights.items()}, reference) < 1e-6
    assert world.agree(weights)


@cases.each(FORMS)
def sent(world, form):
    """What a rank puts on the wire in a step, beside DDP's all-reduce where there is one; and what the optimizer remembers."""
    model = nn.Sequential(nn.Linear(40, 120), nn.Tanh(), nn.Linear(120, 3))
    optimizer_class, defaults = OPTIMIZERS["adamw"]
    model, zero = sharded(world, form, optimizer_class, defaults, model=model)
    real = dist.isend
    real, to_others = dist.isend, [0]

    def counting(x, *args, **options):
        to_others[0] += x.nbytes
        return real(x, *args, **options)

    with mock.patch.object(dist, "isend", counting):
        run(world, model, zero, steps=3, loss=loss_on(40))
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    state = sum(x.numel() * x.element_size() for m in zero.optimizer.state.values() for x in m.values() if x.ndim)
    return to_others[0] / 3, zero.stats(), nbytes, state


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_on_the_wire_and_in_memory(results_of, world_size, form):
    ranks = results_of(world_size)(f"sent[{form}]")
    for on_the_wire, stats, nbytes, state in ranks:
        all_reduce = 2 * (world_size - 1) / world_size * nbytes
        parts = 0.5 if form == "plain" else 1.0
        assert 0.98 * parts * all_reduce < on_the_wire <= 1.02 * parts * all_reduce
        assert on_the_wire == pytest.approx(
            stats.bytes_sent / stats.steps * 2 * (world_size - 1) / world_size, rel=1e-3
        )
        assert state == pytest.approx(2 * nbytes / world_size, rel=0.05)
    assert sum(state for *_, state in ranks) == 2 * ranks[0][2]
