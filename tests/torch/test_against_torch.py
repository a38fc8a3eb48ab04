"""Against torch's own `powerSGD_hook` where that works: one bucket, no biases, the same initial Q. The updates are the same.

torch keeps as error what the *averaged* factors leave out, gradwire what this rank's own factors leave out. Their means over ranks are equal,
and only the means reach the updates. Compared are the averaged gradients of every step: P and Q alone may differ in signs and basis.
"""

from unittest import mock

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

from gradwire import PowerSGD, plan
from gradwire.torch_backend import PowerSGDState, powerSGD_hook, register_comm_hook
from tests.torch.compare import relative
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import collective_payloads, hooked, train

cases = Cases(__file__, ranks=2)

#: Every matrix has its own number of columns, by which its Q is known.
WIDTHS = (64, 48, 56, 40)
SHAPES = {name: tuple(p.shape) for name, p in mlp(*WIDTHS, bias=False).named_parameters()}
LOSS = loss_on(64, batch=48)
#: torch cannot compress before the third step.
START, STEPS = 2, 12
#: gradwire's options, and torch's where they are called otherwise
#: And how many of the three matrices are compressed.
OPTIONS = {
    "rank 1": ({"rank": 1}, {}, 3),
    "rank 2": ({"rank": 2}, {}, 3),
    "rank 4": ({"rank": 4}, {}, 3),
    "rank 4, no error feedback": ({"rank": 4, "error_feedback": False}, {"use_error_feedback": False}, 3),
    "rank 2, no compression of what shrinks less than thirteenfold": (
        {"rank": 2, "min_compression_rate": 13.0},
        {"min_compression_rate": 13.0},
        1,
    ),
}


def steps_of(world, register):
    ddp, _ = hooked(mlp(*WIDTHS, bias=False), None, world.group, cap=25)
    register(ddp)
    with collective_payloads() as sent:
        trace = train(ddp, LOSS, STEPS, local=False)
    return trace, sum(p.nbytes for p in sent)


@cases.each(OPTIONS)
def test_updates_are_those_of_torch(world, variant):
    options, torchs_options, compressed = variant
    algorithm = PowerSGD(start_step=START, **options)
    _, first = hooked(mlp(*WIDTHS, bias=False), algorithm, world.group)
    initial = {memory["q"].shape[1]: memory["q"] for memory in first.state_dict()["tensors"].values()}
    assert len(initial) == compressed

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

    with mock.patch.object(theirs.torch, "randn", randn):
        right, torchs_bytes = steps_of(world, register_torchs)
    planned = plan(SHAPES, algorithm)
    expected = START * planned.dense_bytes + (STEPS - START) * planned.wire_bytes
    for register in (lambda ddp: register_comm_hook(ddp, algorithm), register_same_names):
        mine, nbytes = steps_of(world, register)
        for given, theirs_given in zip(mine.given, right.given, strict=True):
            assert relative(given, theirs_given) < 1e-5
        assert relative(mine.weights, right.weights) < 1e-5
        # Both compressed, and as much.
        assert nbytes == torchs_bytes == expected < STEPS * planned.dense_bytes
