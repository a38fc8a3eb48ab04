"""A sharded optimizer does what the optimizer does: same parameters after 50 steps as DDP with the plain one, on 2, 3 and 4 ranks; in as
many bytes as one all-reduce, with 1/W of the memory.
"""

import pytest
import torch.distributed as dist
from torch import nn

from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, loss_on, relative, same_bits
from tests.torch.zero_training import FORMS, OPTIMIZERS, Model, plain_groups, run, sharded, wrapped

cases = Cases(__file__, ranks=2)
results_of = cases.fixture_by_ranks()


def optimizers(ranks):
    """All of them on 2 ranks; on more the two that differ most."""
    return list(OPTIMIZERS) if ranks == 2 else ["sgd", "adamw"]


def forms(ranks):
    """What torch has forms of on any number of ranks; the one without DDP on 2."""
    return FORMS if ranks == 2 else [form for form in FORMS if form != "averaging"]


RUNS = [(ranks, optimizer, form) for ranks in (2, 3, 4) for optimizer in optimizers(ranks) for form in forms(ranks)]


@cases.each({name: name for name in OPTIMIZERS})
def same_as_plain(world, name):
    if name not in optimizers(world.size):
        return None
    optimizer_class, defaults = OPTIMIZERS[name]
    ddp = wrapped(world, Model())
    reference = run(world, ddp, optimizer_class(plain_groups(ddp.module), **defaults))
    found = {"reference": reference, "buckets": buckets_of(ddp)}
    for form in forms(world.size):
        model, zero = sharded(world, form, optimizer_class, defaults)
        weights = run(world, model, zero)
        found[form] = {n.removeprefix("module."): w for n, w in weights.items()}
    found["reference"] = {n.removeprefix("module."): w for n, w in reference.items()}
    return found


@pytest.mark.parametrize(("world_size", "optimizer", "form"), RUNS)
def test_equals_ddp_with_the_plain_optimizer(results_of, world_size, optimizer, form):
    ranks = results_of(world_size)(f"same_as_plain[{optimizer}]")
    assert ranks[0]["buckets"] > 3
    moved = relative(ranks[0]["reference"], dict(Model().named_parameters()))
    assert moved > 0.05
    for each in ranks:
        assert relative(each[form], each["reference"]) < 1e-6
        assert same_bits(each[form], ranks[0][form])


@cases.each({form: form for form in FORMS})
def sent(world, form):
    """What a rank puts on the wire in a step, beside DDP's all-reduce where there is one; and what the optimizer remembers."""
    model = nn.Sequential(nn.Linear(40, 120), nn.Tanh(), nn.Linear(120, 3))
    optimizer_class, defaults = OPTIMIZERS["adamw"]
    model, zero = sharded(world, form, optimizer_class, defaults, model=model)
    real = dist.isend
    to_others = [0]

    def counting(x, *args, **options):
        to_others[0] += x.nbytes
        return real(x, *args, **options)

    dist.isend = counting
    try:
        run(world, model, zero, steps=3, loss=loss_on(40))
    finally:
        dist.isend = real
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    state = sum(x.numel() * x.element_size() for m in zero.optimizer.state.values() for x in m.values() if x.ndim)
    return to_others[0] / 3, zero.stats(), nbytes, state


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
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


if __name__ == "__main__":
    cases.main()
