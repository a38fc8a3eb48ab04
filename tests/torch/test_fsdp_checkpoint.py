"""The memory of a sharded model's replicas in files: on as many replicas and shards, on others of either, and on none."""

import io
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from gradwire import PowerSGD, TopK
from gradwire.core.state.checkpoint import flatten, unflatten
from gradwire.torch_backend import compress_replicas, register_comm_hook
from gradwire.torch_backend.fsdp.layout import local_part
from tests.torch.compare import relative, said, same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sharded import mesh_of, sharded_mlp

pytestmark = pytest.mark.slow

#: Rows that two and four shards do not share equally. The last layer's blocks are too small to be compressed where there are four.
WIDTHS = (40, 37, 34, 6)
ALGORITHM = PowerSGD(rank=2, min_compression_rate=1)
LOSS = loss_on(40, batch=8, dtype=torch.float64, spread=1)
#: So many pieces of a batch, divided among all ranks: the same model, on two ranks and on four.
PARTS = 12

cases = Cases(__file__, ranks=4)


def made(mesh, algorithm=ALGORITHM):
    model = sharded_mlp(WIDTHS, mesh["shard"], torch.float64)
    return model, compress_replicas(model, algorithm, mesh["replicate"])


def train(model, rank, steps, ranks=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        share = range(rank, PARTS, ranks)
        (sum(LOSS(model, part, step) for part in share) / len(share)).backward()
        optimizer.step()
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in model.named_parameters()}


def errors(state):
    """Of whole parameters, from a portable state."""

    def place(name):
        parameter, _, block = name.partition("[")
        return parameter, int(block.partition(":")[0] or 0)

    found = {}
    for name in sorted(state["local"], key=place):
        found.setdefault(place(name)[0], []).append(state["local"][name]["error"][0])
    return {name: torch.cat(blocks) for name, blocks in found.items()}


def through_a_file(x):
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


@cache
def saved(folder, rank):
    """Of two replicas of two shards, in files: the state, and the weights of the run that goes on."""
    model, handle = made(mesh_of(2, 2))
    train(model, rank, range(3))
    dcp.save({"model": model.state_dict(), "compressor": handle}, checkpoint_id=folder / "saved")
    dcp.save({"compressor": handle.sharded_state}, checkpoint_id=folder / "in parts")
    assert (handle.gathered_state_dict(to=0) is None) == (rank > 0)
    return handle.gathered_state_dict(to=None), train(model, rank, range(3, 6))


ONTO = {"1x2": (1, 2), "1x4": (1, 4), "4x1": (4, 1)}
FORMS = {f"{form}, {mesh}": (form, mesh) for form in ("dcp", "portable") for mesh in ONTO} | {
    "in parts, 1x2": ("in parts", "1x2")
}
#: A block → the one that it was cut from, whose factor it goes on with.
SOURCES = {
    "1x4": {"0.weight[0:10]": "[0:19]", "0.weight[10:20]": "[0:19]", "0.weight[20:30]": "[19:37]"},
    "4x1": {"0.weight": "[0:19]"},
}


@cases.each(FORMS)
def test_a_run_goes_on_with_other_replicas_and_shards(world, how):
    form, shape = how
    state, goes_on = saved(world.folder, world.rank)
    ranks = torch.arange(torch.Size(ONTO[shape]).numel())
    mesh = DeviceMesh("cpu", ranks.reshape(ONTO[shape]), mesh_dim_names=("replicate", "shard"))
    group = dist.new_group(ranks.tolist())
    if world.rank >= len(ranks):
        return
    model, handle = made(mesh)
    parts = {"model": model.state_dict()} | ({"compressor": handle} if form == "dcp" else {})
    dcp.load(parts, checkpoint_id=world.folder / "saved", process_group=group)
    if form == "in parts":
        dcp.load({"compressor": handle.sharded_state}, checkpoint_id=world.folder / "in parts", process_group=group)
    if form == "portable":
        handle.load_state_dict(unflatten(*through_a_file(flatten(state))))
    loaded = handle.gathered_state_dict(to=None)
    assert loaded["step"] == 3
    whole, kept = errors(state), errors(loaded)
    # What was compressed in blocks of three rows is not in blocks of two, and has no error there.
    assert kept.keys() == whole.keys() - ({"4.weight"} if shape == "1x4" else set())
    for name, error in kept.items():
        assert error.abs().max() > 1e-4
        assert same_bits(error, whole[name])
    for block, source in SOURCES.get(shape, {}).items():
        assert same_bits(loaded["tensors"][block]["q"], state["tensors"][f"0.weight{source}"]["q"])
    weights = train(model, world.rank, range(3, 6), len(ranks))
    assert handle.stats().steps == 6
    # With as many shards it is the same run, on the same batches.
    assert relative(weights, goes_on) < (1e-9 if shape == "1x2" else 0.05)
    assert (relative(weights, goes_on) > 1e-9) == (shape != "1x2")


#: The second's next step is no function of the mean error alone.
RESUMED = {"half step": PowerSGD(rank=2, half_step=True, min_compression_rate=1), "largest elements": TopK(8, per=64)}


@cases.each(RESUMED)
def test_a_run_goes_on_bit_for_bit_on_as_many_ranks(world, algorithm):
    """From each rank's own, from that of all, and from what `torch.distributed.checkpoint` has of each."""
    mesh, folder = mesh_of(2, 2), f"{world.folder / 'resumed'} {algorithm}"
    model, handle = made(mesh, algorithm)
    train(model, world.rank, range(3))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    own, everything = handle.rank_state_dict(), handle.gathered_state_dict("all", to=None)
    dcp.save({"compressor": handle.sharded_state}, checkpoint_id=folder)
    expected = train(model, world.rank, range(3, 6))
    for state in (own, everything, None):
        again, other = made(mesh, algorithm)
        with torch.no_grad():
            for name, p in again.named_parameters():
                p.copy_(weights[name])
        if state is None:
            dcp.load({"compressor": other.sharded_state}, checkpoint_id=folder)
        else:
            other.load_state_dict(through_a_file(state))
        assert same_bits(other.rank_state_dict(), own)
        assert same_bits(train(again, world.rank, range(3, 6)), expected)
    replica, shard = divmod(world.rank, 2)
    _, elsewhere = made(mesh_of(1, 4), handle.algorithm)
    words = said(elsewhere.load_state_dict, own)
    assert f"this is rank=0, replicas=1, shard={world.rank}, shards=4" in words
    words = said(handle.load_state_dict, {**own, "shard": 1 - shard})
    assert f"the state is that of rank={replica}, replicas=2, shard={1 - shard}, shards=2, with" in words
    words = said(handle.load_state_dict, {**own, "rank": 1 - replica})
    assert f"the state is that of rank={1 - replica}, replicas=2, shard={shard}, shards=2, with" in words


@cases.case
def test_a_state_moves_to_ddp_and_back(world):
    model, handle = made(mesh_of(2, 2))
    train(model, world.rank, range(3))
    state = handle.gathered_state_dict(to=None)
    ddp = DistributedDataParallel(mlp(*WIDTHS).double(), process_group=world.group)
    hook = register_comm_hook(ddp, ALGORITHM)
    hook.load_state_dict(state)
    moved = hook.state_dict()
    assert same_bits(errors(moved), errors(state))
    train(ddp, world.rank, range(3, 4))
    back = hook.state_dict()
    assert not same_bits(errors(back), errors(moved))
    handle.load_state_dict(back)
    assert same_bits(errors(handle.gathered_state_dict(to=None)), errors(back))
    train(model, world.rank, range(4, 5))
    assert (hook.stats().steps, handle.stats().steps) == (4, 5)


@cases.case
def test_errors_are_laid_out_as_their_parameters(world):
    model, handle = made(mesh_of(2, 2))
    train(model, world.rank, range(2))
    state, whole = handle.state_dict(), handle.gathered_state_dict(to=None)
    sharded = state["sharded"]
    laid_out = {name: (memory["error"].placements, tuple(memory["error"].shape)) for name, memory in sharded.items()}
    assert laid_out == {f"{i}.weight": ((Shard(0),), (n, m)) for i, n, m in ((0, 37, 40), (2, 34, 37), (4, 6, 34))}
    for name, memory in sharded.items():
        piece = handle._driver.layout.held[name].piece.name(name)
        assert same_bits(local_part(memory["error"]), whole["local"][piece]["error"][0])
    with pytest.raises(ValueError, match=r"another model.*'nobody\.weight'"):
        handle.load_state_dict({**state, "sharded": sharded | {"nobody.weight": sharded["0.weight"]}})
    with pytest.raises(ValueError, match=r"PowerSGD\(rank=3"):
        made(mesh_of(2, 2), PowerSGD(rank=3))[1].load_state_dict(handle.state_dict())
    for wrong in ({"a": 1}, {"tensors": {}}, {key: x for key, x in whole.items() if key != "local"}):
        with pytest.raises(ValueError, match="not a gradwire state"):
            handle.load_state_dict(wrong)
