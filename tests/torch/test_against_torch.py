"""Against torch's own `powerSGD_hook` where that works: one bucket, no biases, the same initial Q. The updates are the same.

torch keeps as error what the *averaged* factors leave out, gradwire what this rank's own factors leave out. Their means over ranks are equal,
and only the means reach the updates. Compared are the averaged gradients of every step: P and Q alone may differ in signs and basis.
"""

from unittest import mock

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

from gradwire import PowerSGD, plan
from gradwire.torch_backend import PowerSGDState, powerSGD_hook, register_comm_hook
from tests.torch.ranks import Cases
from tests.torch.training import collective_payloads, loss_on, mlp, relative, train

cases = Cases(__file__, ranks=2)
results = cases.fixture()

#: Every matrix has its own number of columns, by which its Q is known.
WIDTHS = (64, 48, 56, 40)
SHAPES = {name: tuple(p.shape) for name, p in mlp(*WIDTHS, bias=False).named_parameters()}
LOSS = loss_on(64, batch=48)
#: torch cannot compress before the third step.
START, STEPS = 2, 12
#: gradwire's options, and torch's where they are called otherwise
OPTIONS = {
    "rank 1": ({"rank": 1}, {}),
    "rank 2": ({"rank": 2}, {}),
    "rank 4": ({"rank": 4}, {}),
    "rank 4, no error feedback": ({"rank": 4, "error_feedback": False}, {"use_error_feedback": False}),
    "rank 2, no compression of what shrinks less than thirteenfold": (
        {"rank": 2, "min_compression_rate": 13.0},
        {"min_compression_rate": 13.0},
    ),
}


def steps_of(world, register):
    ddp = DistributedDataParallel(mlp(*WIDTHS, bias=False), process_group=world.group)
    handle = register(ddp)
    with collective_payloads() as sent:
        trace = train(ddp, LOSS, STEPS, local=False)
    return {"given": trace.given, "weights": trace.weights, "bytes": sum(p.nbytes for p in sent)}, handle


@cases.each(OPTIONS)
def both(world, variant):
    options, torchs_options = variant
    algorithm = PowerSGD(start_step=START, **options)
    first = register_comm_hook(DistributedDataParallel(mlp(*WIDTHS, bias=False), process_group=world.group), algorithm)
    initial = {memory["q"].shape[1]: memory["q"] for memory in first.state_dict()["tensors"].values()}

    # torch draws each Q (1, m, r) by torch.randn when it first compresses, then orthogonalizes it, as gradwire does with its own. What is
    # drawn is replaced by gradwire's initial Q of that matrix.
    real = torch.randn

    def randn(*shape, **others):
        if len(shape) != 3:
            return real(*shape, **others)
        _, m, r = shape
        q = initial[m]
        assert q.shape == (r, m)
        return q.mT.unsqueeze(0)

    def register_torchs(ddp):
        state = theirs.PowerSGDState(world.group, options["rank"], START, **torchs_options)
        ddp.register_comm_hook(state, theirs.powerSGD_hook)

    def register_same_names(ddp):
        names = {"named_parameters": ddp.module.named_parameters()}
        state = PowerSGDState(world.group, options["rank"], START, **torchs_options, **names)
        ddp.register_comm_hook(state, powerSGD_hook)

    ours, _ = steps_of(world, lambda ddp: register_comm_hook(ddp, algorithm))
    same_names, _ = steps_of(world, register_same_names)
    with mock.patch.object(theirs.torch, "randn", randn):
        torchs, _ = steps_of(world, register_torchs)
    return {"ours": ours, "same names": same_names, "torch": torchs, "compressed": len(initial)}


@pytest.mark.parametrize("whose", ["ours", "same names"])
@pytest.mark.parametrize("variant", OPTIONS)
def test_updates_are_those_of_torch(results, variant, whose):
    options, _ = OPTIONS[variant]
    planned = plan(SHAPES, PowerSGD(start_step=START, **options))
    for rank in results(f"both[{variant}]"):
        for mine, right in zip(rank[whose]["given"], rank["torch"]["given"], strict=True):
            assert relative(mine, right) < 1e-5
        assert relative(rank[whose]["weights"], rank["torch"]["weights"]) < 1e-5
        # Both compressed, and as much.
        expected = START * planned.dense_bytes + (STEPS - START) * planned.wire_bytes
        assert rank[whose]["bytes"] == rank["torch"]["bytes"] == expected
        assert expected < STEPS * planned.dense_bytes


def test_every_matrix_is_compressed_except_where_the_rate_forbids_it(results):
    compressed = {variant: results(f"both[{variant}]")[0]["compressed"] for variant in OPTIONS}
    forbidding = "rank 2, no compression of what shrinks less than thirteenfold"
    assert 0 < compressed.pop(forbidding) < 3
    assert set(compressed.values()) == {3}


if __name__ == "__main__":
    cases.main()
