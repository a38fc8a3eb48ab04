"""Every request on real ranks, against what the core says that it means: answers, bytes and messages, in groups and in all dtypes."""

import torch

import gradwire
from gradwire import LocalSGD, TopK
from gradwire.torch_backend import Averager, local_sgd
from tests.torch.asked import ASKED, EVEN, RANKS, Answered, answered, require_right
from tests.torch.compare import relative, same_bits, weights
from tests.torch.everything import Everything
from tests.torch.models import TAKEN, Branches, branching_loss, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, distance, fit, hooked, paralleled, sgd, train

cases = Cases(__file__, ranks=RANKS)

WIDTHS = (40, 36, 32, 28)


@cases.each(ASKED.keys())
def test_a_request_is_answered_as_the_core_says(world, name):
    own = vars(answered(name, world.group, torch.device("cpu")))
    require_right(name, [Answered(**each) for each in world.everyones(own)])


# --- an algorithm that asks for everything, through every door --------------------------------------------------------------------


@cases.each(
    {"one group of buckets": (hooked, 1 << 30), "a group per bucket": (hooked, 0), "DataParallel": (paralleled, 0)}
)
def test_an_algorithm_may_ask_for_everything(world, variant):
    door, message_bytes = variant
    algorithm = Everything(EVEN)
    wrapped, handle = door(mlp(*WIDTHS), algorithm, world.group, message_bytes=message_bytes)
    trace = train(wrapped, loss_on(40), 4)
    assert world.agree(trace.given)
    assert distance(algorithm, world.everyones(trace)) < 1e-5
    assert len(wrapped.buckets()) > 1 if door is paralleled else buckets_of(wrapped) > 1
    if message_bytes:
        (planned,) = plan_of(wrapped.module).steps
        assert (handle.stats().collectives, handle.stats().bytes_sent) == (4 * planned.collectives, 4 * planned.nbytes)


def plan_of(model):
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return gradwire.plan(shapes, Everything(EVEN), world_size=RANKS)


@cases.case
def test_an_averager_answers_everything(world):
    algorithm, shapes = Everything(EVEN), {"w": (8, 6), "b": (7,)}
    averager = Averager(algorithm, {name: torch.zeros(shape) for name, shape in shapes.items()}, world.group)
    draw = torch.Generator().manual_seed(world.rank)
    own = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    everyones = world.everyones({name: g.double().numpy() for name, g in own.items()})
    right = gradwire.Simulator(algorithm, shapes, world.size).step(everyones)
    assert relative(averager(own), right) < 1e-5


@cases.case
def test_local_sgd_answers_everything(world):
    local = LocalSGD(period=2, compressor=Everything(EVEN))
    ddp, _ = hooked(mlp(*WIDTHS), None, world.group)
    optimizer = sgd(ddp)
    handle = local_sgd(ddp, optimizer, local)
    fit(ddp, optimizer, world.rank, range(4), loss_on(40))
    assert world.agree(weights(ddp))
    (planned,) = plan_of(ddp.module).steps
    assert (handle.stats().collectives, handle.stats().bytes_sent) == (2 * planned.collectives, 2 * planned.nbytes)


# --- what is unused is told ---------------------------------------------------------------------------------------------------------


@cases.case
def test_what_no_rank_used_keeps_its_memory_whatever_is_sent_first(world):
    """Here something is gathered."""
    ddp, handle = hooked(Branches(), TopK(8, per=64), world.group, cap=25, find_unused_parameters=True)
    memories = []
    for step in range(len(TAKEN)):
        train(ddp, lambda model, rank, step: branching_loss(model, min(rank, 1), step), [step], local=False)
        memories.append(handle.rank_state_dict()["tensors"])
    for step in range(1, len(TAKEN)):
        for branch in ("left", "right"):
            kept = same_bits(memories[step][f"{branch}.weight"], memories[step - 1][f"{branch}.weight"])
            assert kept == all(branch not in taken for taken in TAKEN[step])
