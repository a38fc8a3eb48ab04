"""Fragments of pages that begin in the middle of a user's program run in one, on two ranks: in order, with what a reader of the page has by then."""

import contextlib
import datetime
import io
import logging
import os
from itertools import pairwise
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch_backend as gw
from gradwire.core.advise import probe
from tests.pages import block, public_names, run_blocks
from tests.torch.compare import relative, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import sgd

cases = Cases(__file__, ranks=2)
WIDTH = 300


def run_page(page, numbers, instead=None, **given):
    """Run these blocks; returns the names that are bound then."""
    names = public_names(gradwire, gw) | {"gradwire": gradwire, "torch": torch, "dist": dist}
    names |= {"DistributedDataParallel": DistributedDataParallel, "rank": dist.get_rank()} | given
    run_blocks(page, numbers, names, instead)
    return names


def printed_by(page, numbers, **given):
    """What they print, and the names."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        names = run_page(page, numbers, **given)
    return out.getvalue(), names


def model_of():
    return mlp(WIDTH, 40, 28)


def wrapped(algorithm=None):
    """A model, its DDP, and the handle of an algorithm."""
    model = model_of()
    ddp = DistributedDataParallel(model)
    return model, ddp, algorithm and gw.register_comm_hook(ddp, algorithm)


def loss_of(model, step=0):
    return loss_on(WIDTH)(model, dist.get_rank(), step)


def steps(model, optimizer, count=1):
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@cases.case
def test_buckets_are_told_before_and_after_there_is_a_model(world):
    model = model_of()
    printed, found = printed_by(
        "buckets", [0], model=model, shapes={name: tuple(p.shape) for name, p in model.named_parameters()}
    )
    names = [name for bucket in found["model"].buckets() for name in bucket]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert printed.startswith("PowerSGD(rank=4)")


@cases.case
def test_a_program_probes_its_link(world):
    with (
        contextlib.chdir(world.folder),
        mock.patch.object(probe, "SIZES", probe.SIZES[:3]),
        mock.patch.object(probe, "REPEATED", 0.002),
    ):
        run_page("choosing", [0], {block("choosing", 0).splitlines()[1]: ""})
        dist.barrier(world.group)
        assert gradwire.Probe.load("probe.json").framework == "torch"


@cases.case
def test_torchs_sharded_optimizer_by_its_name(world):
    model, ddp, _ = wrapped()
    steps(ddp, run_page("coming-from-torch", [0], ddp=ddp)["optimizer"])
    assert world.agree(weights(model))


@cases.case
def test_dcp_saves_and_loads_a_handle_and_a_sharded_optimizer(world):
    model, ddp, handle = wrapped(gradwire.PowerSGD(4))
    optimizer = gw.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)

    def now():
        memory = {name: memory["error"] for name, memory in handle.state_dict()["local"].items()}
        return memory, weights(model), optimizer.consolidated_state_dict(to=None)["state"]

    steps(ddp, optimizer, 2)
    saved, state = now(), {}

    def meanwhile():
        steps(ddp, optimizer, 2)
        assert not same_bits(now(), saved)
        state.update(model.state_dict())

    given = {"dcp": dcp, "model": model, "handle": handle, "optimizer": optimizer, "folder": world.folder / "dcp"}
    run_page("composition", [0], {"\n...\n": "\nmeanwhile()\n"}, meanwhile=meanwhile, state=state, **given)
    model.load_state_dict(state)
    error, *others = now()
    assert relative(error, saved[0]) < 1e-6  # the mean of two equal numbers, summed
    assert same_bits(others, [*saved[1:]])


@cases.case
def test_three_ways_not_to_remember_a_loss_give_the_same_bits(world):
    discriminator = wrapped()[1]
    handle = gw.register_comm_hook(discriminator, gradwire.PowerSGD(4))
    steps(discriminator, sgd(discriminator), 2)
    before = handle.rank_state_dict()
    generator = torch.nn.Linear(8, WIDTH)
    found = run_page(
        "error-feedback",
        [0],
        discriminator=discriminator,
        generator=generator,
        z=torch.randn(4, 8),
        loss=lambda y: y.square().mean(),
        handle=handle,
    )
    assert found["generator_loss"] > 0
    assert generator.weight.grad.abs().max() > 0
    assert same_bits(handle.rank_state_dict(), before)


@cases.case
def test_a_step_that_is_skipped_by_hand_is_forgotten(world):
    model, ddp, handle = wrapped(gradwire.PowerSGD(4))
    usual, outlier = (WIDTH**-0.5 * scale * torch.randn(8, WIDTH) for scale in (1.0, 1e4))
    seen = []

    def loss(y, target):
        seen.append((handle.error_norm(), weights(model)))
        return (y - target).square().mean()

    batches = [(x, torch.ones(8, 28)) for x in (usual, outlier, usual, usual)]
    names = {"model": model, "ddp": ddp, "handle": handle, "optimizer": sgd(model), "batches": batches, "loss": loss}
    run_page("error-feedback", [2], **names)
    errors = [error for error, _ in seen]
    assert errors[2] == errors[0] == 0 < errors[1]  # forgotten with the outlier
    assert errors[3] > 0
    moved = [relative(after, before) > 0 for (_, before), (_, after) in pairwise(seen)]
    assert moved == [True, False, True]


@cases.case
def test_what_a_handle_tells_and_does(world):
    model, ddp, _ = wrapped()
    records, logger = [], logging.getLogger("gradwire")
    listening = logging.Handler()
    listening.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(listening)
    assert not logger.isEnabledFor(logging.INFO)
    run_page("handles", [0])
    handle = gw.register_comm_hook(ddp, gradwire.PowerSGD(4))
    logging.getLogger().setLevel(logging.WARNING)
    assert len(records) == (world.rank == 0)
    drawn = {}
    writer = mock.Mock(add_scalar=lambda name, value, step: drawn.update({name: (value, step)}))
    optimizer = sgd(model)
    steps(ddp, optimizer, 2)
    run_page("handles", [1], handle=handle, writer=writer, step=2)
    assert drawn["gradwire/steps"] == (2, 2)
    printed, found = printed_by("handles", [2], handle=handle, loss=loss_of(ddp))
    assert str(found["found"].relative_error) in printed
    assert found["found"].by_parameter.keys() == dict(model.named_parameters()).keys()
    run_page("handles", [4], handle=handle)
    assert handle.algorithm == gradwire.PowerSGD(rank=8)
    run_page("handles", [5], handle=handle)
    gw.register_comm_hook(ddp, gradwire.AllReduce())


@cases.case
def test_local_sgd_trains(world):
    model = model_of()
    loop = "...                                             # the loop as it was"
    names = run_page(
        "local-sgd",
        [0, 1],
        {loop: "steps(ddp, optimizer, 3)  #", "start_step=1000": "start_step=1"},
        model=model,
        steps=steps,
    )
    assert names["handle"].synchronized
    assert world.agree(weights(model))
    steps(names["ddp"], names["optimizer"], 1)
    compressed = run_page("handles", [6], handle=names["handle"], ddp=names["ddp"])["handle"]
    steps(names["ddp"], names["optimizer"], 2)
    assert compressed.algorithm == gradwire.PowerSGD(rank=4)
    assert world.agree(weights(model))


@cases.case
def test_a_handle_is_saved_and_loaded(world):
    model, ddp, handle = wrapped(gradwire.PowerSGD(4))
    optimizer = sgd(model)
    steps(ddp, optimizer, 2)
    file = world.folder / "checkpoint.pt"
    names = {"handle": handle, "model": model, "optimizer": optimizer, "file": file}

    def meanwhile():
        steps(ddp, optimizer)
        dist.barrier(world.group)

    found = run_page("state", [0], {"\n...\n": "\nmeanwhile()\n"}, meanwhile=meanwhile, **names)
    assert handle.rank_state_dict()["step"] == 2
    run_page("state", [1], handle=handle, state=found["state"])
    assert handle.rank_state_dict()["step"] == 2


@cases.case
def test_two_levels_train(world):
    model, ddp, _ = wrapped()
    handle = run_page("two-levels", [1], ddp=ddp)["handle"]
    steps(ddp, sgd(model))
    assert world.agree(weights(model))
    assert handle.stats().steps == 1


@cases.case
def test_local_sgd_trains_on_two_levels(world):
    model, ddp, _ = wrapped()
    optimizer = sgd(model)
    run_page("two-levels", [5], {"diloco(100,": "diloco(2,"}, ddp=ddp, optimizer=optimizer)
    steps(ddp, optimizer, 2)
    assert world.agree(weights(model))


@cases.case
def test_a_sharded_optimizer_steps(world):
    model = model_of()
    names = run_page("zero", [0], model=model)
    steps(names["ddp"], names["optimizer"])
    assert world.agree(weights(model))


@cases.case
def test_the_lines_for_gpus(world):
    """On this processor. Where the calls go on a GPU is torch's."""
    chosen = []
    model = model_of()
    names = {"os": os, "datetime": datetime, "model": model}
    with (
        mock.patch.object(torch.cuda, "set_device", chosen.append),
        mock.patch.object(dist, "init_process_group") as begun,
    ):
        run_page("how-to/several-nodes", [1], {'"cuda"': '"cpu"'}, **names)
    assert chosen == [world.rank]
    begun.assert_called_once_with("nccl", timeout=datetime.timedelta(minutes=2))
