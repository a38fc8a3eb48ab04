"""The memory of a sharded model's replicas in files: on as many replicas and shards, on others of
either, and on none; local SGD between them; and blocks."""

import io
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from gradwire import LocalSGD, PowerSGD, TopK, TwoLevel, diloco
from gradwire.core.algorithm import State
from gradwire.core.state.checkpoint import flatten, unflatten
from gradwire.torch_backend import compress_replicas, local_sgd, register_comm_hook
from gradwire.torch_backend.fsdp.layout import local_part
from gradwire.torch_backend.state.blocks import Piece, parameter_of, recut
from tests.torch.compare import relative, said, same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sharded import local_parts, mesh_of, shard, sharded_mlp
from tests.torch.training import fit, sgd

#: Rows that two and four shards do not share equally. The last layer's blocks are too small to be
#: compressed where there are four.
WIDTHS = (40, 37, 34, 6)
ALGORITHM = PowerSGD(rank=2, min_compression_rate=1)
LOSS = loss_on(40, batch=8, dtype=torch.float64, spread=1)
FEWER, SINGLE = (40, 37, 20), loss_on(40, spread=1)
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
    return whole(model)


def whole(model):
    found = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    return {
        n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in found.items()
    }


def gradients_of(model):
    return [p.grad.full_tensor() for p in model.parameters()]


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
    """Of two replicas of two shards, in files: the state, and the weights of the run that goes
    on."""
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


@cases.each(FORMS, slow=FORMS)
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
        dcp.load(
            {"compressor": handle.sharded_state},
            checkpoint_id=world.folder / "in parts",
            process_group=group,
        )
    if form == "portable":
        handle.load_state_dict(unflatten(*through_a_file(flatten(state))))
    loaded = handle.gathered_state_dict(to=None)
    assert loaded["step"] == 3
    before, kept = errors(state), errors(loaded)
    # What was compressed in blocks of three rows is not in blocks of two, and has no error there.
    assert kept.keys() == before.keys() - ({"4.weight"} if shape == "1x4" else set())
    for name, error in kept.items():
        assert error.abs().max() > 1e-4
        assert same_bits(error, before[name])
    for block, source in SOURCES.get(shape, {}).items():
        assert same_bits(loaded["tensors"][block]["q"], state["tensors"][f"0.weight{source}"]["q"])
    weights = train(model, world.rank, range(3, 6), len(ranks))
    assert handle.stats().steps == 6
    # With as many shards it is the same run, on the same batches.
    assert relative(weights, goes_on) < (1e-9 if shape == "1x2" else 0.05)
    assert (relative(weights, goes_on) > 1e-9) == (shape != "1x2")


#: The second's next step is no function of the mean error alone.
RESUMED = {
    "half step": PowerSGD(rank=2, half_step=True, min_compression_rate=1),
    "largest elements": TopK(8, per=64),
}


@cases.each(RESUMED, slow=RESUMED)
def test_a_run_goes_on_bit_for_bit_on_as_many_ranks(world, algorithm):
    """From each rank's own, from that of all, and from what `torch.distributed.checkpoint` has of
    each."""
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
    assert (
        f"the state is that of rank={replica}, replicas=2, shard={1 - shard}, shards=2, with"
        in words
    )
    words = said(handle.load_state_dict, {**own, "rank": 1 - replica})
    assert (
        f"the state is that of rank={1 - replica}, replicas=2, shard={shard}, shards=2, with"
        in words
    )


#: (replicas, shards, axis) of the run that saves, and of the one that loads.
AGAIN = {
    "shards in which it is large": ((1, 4, 0), (2, 2, 0)),
    "one shard": ((1, 4, 0), (4, 1, 0)),
    "columns in place of rows": ((2, 2, 0), (2, 2, 1)),
    "rows in place of columns": ((2, 2, 1), (2, 2, 0)),
}


@cases.each(AGAIN, slow=["shards in which it is large", "columns in place of rows"])
def test_a_run_goes_on_where_a_block_was_not_compressed_and_along_another_axis(world, how):
    """From the mean, also where each of as many ranks has saved its own."""

    def placed(replicas, shards, axis):
        mesh = mesh_of(replicas, shards)
        where = lambda p: Shard(axis if p.ndim > 1 else 0)  # noqa: E731
        model = sharded_mlp((16, 32, 10, 6), mesh["shard"], shard_placement_fn=where)
        return model, compress_replicas(model, ALGORITHM, mesh["replicate"])

    def mean_errors(handle):
        state, held = handle.state_dict(), handle._driver.layout.held
        return {n: kept["error"].full_tensor() for n, kept in state["sharded"].items() if n in held}

    loss, folder = loss_on(16, batch=8), world.folder / f"again {how}"
    model, handle = placed(*how[0])
    for step in range(2):
        loss(model, world.rank, step).backward()
    before = mean_errors(handle)
    assert all(error.any() for name, error in before.items() if name != "4.weight")
    parts = {"whole": handle, "parts": handle.sharded_state}
    dcp.save(parts, checkpoint_id=folder)
    for part in parts:
        other, its = placed(*how[1])
        dcp.load({part: its if part == "whole" else its.sharded_state}, checkpoint_id=folder)
        assert its.stats().steps == 2
        assert same_bits(mean_errors(its), before)
        loss(other, world.rank, 2).backward()
        assert world.agree(gradients_of(other))


@cases.case(slow=True)
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


@cases.case(slow=True)
def test_errors_are_laid_out_as_their_parameters(world):
    model, handle = made(mesh_of(2, 2))
    train(model, world.rank, range(2))
    state, portable = handle.state_dict(), handle.gathered_state_dict(to=None)
    sharded = state["sharded"]
    laid_out = {
        name: (memory["error"].placements, tuple(memory["error"].shape))
        for name, memory in sharded.items()
    }
    assert laid_out == {
        f"{i}.weight": ((Shard(0),), (n, m)) for i, n, m in ((0, 37, 40), (2, 34, 37), (4, 6, 34))
    }
    for name, memory in sharded.items():
        piece = handle._driver.layout.held[name].piece.name(name)
        assert same_bits(local_part(memory["error"]), portable["local"][piece]["error"][0])
    with pytest.raises(ValueError, match=r"another model.*'nobody\.weight'"):
        handle.load_state_dict(
            {**state, "sharded": sharded | {"nobody.weight": sharded["0.weight"]}}
        )
    with pytest.raises(ValueError, match=r"PowerSGD\(rank=3"):
        made(mesh_of(2, 2), PowerSGD(rank=3))[1].load_state_dict(handle.state_dict())
    for wrong in (
        {"a": 1},
        {"tensors": {}},
        {key: x for key, x in portable.items() if key != "local"},
    ):
        with pytest.raises(ValueError, match="not a gradwire state"):
            handle.load_state_dict(wrong)


# --- local SGD and DiLoCo: each rank averages its own blocks, and the whole is what whole models do
# ---

#: What is done, with which options, and which optimizer.
SCHEDULES = {
    "averages": (LocalSGD(2), {}, torch.optim.SGD),
    "diloco": (diloco(2), {}, torch.optim.SGD),
    "in fragments": (diloco(4, fragments=2), {}, torch.optim.SGD),
    "gradients first": (diloco(2, start_step=2), {}, torch.optim.SGD),
    "moments averaged": (LocalSGD(2), {"moments": "average"}, torch.optim.AdamW),
    "moments dropped": (LocalSGD(2), {"moments": "reset"}, torch.optim.AdamW),
    # By the norm of the whole difference. Nothing is compressed.
    "clipped": (
        diloco(2, compressor=PowerSGD(rank=2, max_norm=0.01, min_compression_rate=1000)),
        {},
        torch.optim.SGD,
    ),
}


@cases.each(SCHEDULES, slow=SCHEDULES)
def test_shards_together_do_what_the_whole_does(world, how):
    local, options, optimizer = how
    mesh = mesh_of(2, 2)
    group, replica = mesh.get_group("replicate"), mesh.get_local_rank("replicate")
    model, twin = sharded_mlp(FEWER, mesh["shard"]), mlp(*FEWER)
    if local.start_step:
        twin = DistributedDataParallel(twin, process_group=group, broadcast_buffers=False)
    found = []
    for each in (model, twin):
        lr = 1e-2 if optimizer is torch.optim.AdamW else 0.1
        stepping = optimizer(each.parameters(), lr=lr)
        handle = local_sgd(each, stepping, local, process_group=group, **options)
        before = whole(each)
        for step in range(5):
            stepping.zero_grad()
            # The batch of a replica is that of its shards.
            batches = [world.rank] if each is model else [2 * replica, 2 * replica + 1]
            (sum(SINGLE(each, batch, step) for batch in batches) / len(batches)).backward()
            stepping.step()
        found.append(whole(each))
        assert relative(whole(each), before) > 1e-3
        assert handle.stats().steps == 5
    assert relative(*found) < 1e-5
    handle.synchronize()


@cases.case(slow=True)
def test_another_schedule_and_none_any_more(world):
    """In the midst of a period. Replicas then average gradients as they are, and may be
    compressed."""
    mesh = mesh_of(2, 2)
    group, model = mesh.get_group("replicate"), sharded_mlp(FEWER, mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = local_sgd(model, optimizer, diloco(3, start_step=1), process_group=group)

    def step(number):
        fit(model, optimizer, world.rank, [number], SINGLE)
        everyone = world.everyones([local_parts(model), local_parts(model, gradients=True)])
        # the other replica's block
        return same_bits(everyone[world.rank], everyone[(world.rank + 2) % 4])

    assert [step(number) for number in (0, 1)] == [True, False]
    handle.reconfigure(diloco(2, start_step=4))
    assert [step(number) for number in (2, 3, 4)] == [True, True, False]
    handle.unregister()
    assert all(step(number) for number in (5, 6))
    compressed = compress_replicas(model, PowerSGD(2), mesh["replicate"])
    assert all(step(number) for number in (7, 8))
    assert compressed.local_error_norm() > 0


@cases.case(slow=True)
def test_what_was_thawed_under_local_sgd_is_no_longer_the_same_on_all_replicas(world):
    mesh = mesh_of(2, 2)
    model = shard(mlp(*FEWER, frozen=[0]), mesh["shard"])
    optimizer = sgd(model)
    handle = local_sgd(model, optimizer, diloco(2), process_group=mesh.get_group("replicate"))
    model[0].requires_grad_(requires_grad=True)
    handle.unregister()
    with pytest.raises(RuntimeError, match=r"'0.weight', '0.bias'.*nobody averages"):
        SINGLE(model, world.rank, 0).backward()


@cases.case(slow=True)
def test_buffers_are_averaged_and_a_broken_shard_takes_its_replica_back_to_the_outer_parameters(
    world,
):
    torch.manual_seed(0)
    mesh, norm = mesh_of(2, 2), nn.BatchNorm1d(32)
    model = nn.Sequential(nn.Linear(40, 32), norm, nn.Linear(32, 20))
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = sgd(model)
    local_sgd(model, optimizer, diloco(1), process_group=mesh.get_group("replicate"))
    SINGLE(model, world.rank, 0).backward()
    own = world.everyones(norm.running_mean.clone())
    optimizer.step()
    expected = (own[world.rank % 2] + own[2 + world.rank % 2]) / 2
    assert relative(norm.running_mean, expected) < 1e-6
    assert relative(own[world.rank], expected) > 1e-3
    outer = local_parts(model)
    optimizer.zero_grad()
    SINGLE(model, world.rank, 1).backward()
    if world.rank == 1:
        local_part(model[2].weight.grad)[0, 0] = torch.inf
    optimizer.step()
    assert same_bits(local_parts(model), outer)


MESHES = {"2x2": (2, 2), "4x1": (4, 1), "1x4": (1, 4)}


@cases.each(MESHES, slow=MESHES)
def test_outer_parameters_are_saved_and_cut_anew(world, shape):
    schedule = diloco(2, compressor=TwoLevel(PowerSGD(rank=2, min_compression_rate=1), within=1))

    def made(mesh):
        model = sharded_mlp(FEWER, mesh["shard"])
        optimizer = sgd(model)
        return (
            model,
            optimizer,
            local_sgd(model, optimizer, schedule, process_group=mesh.get_group("replicate")),
        )

    def remembered(handle, key):
        held, kept = handle._target.layout.held, handle._memory.state.tensors
        return {
            name: held[name].distributed(memory[key]).full_tensor() for name, memory in kept.items()
        }

    model, optimizer, handle = made(mesh_of(2, 2))
    fit(model, optimizer, world.rank, range(4), SINGLE)
    folder = world.folder / f"outer {shape}"
    dcp.save({"model": model.state_dict(), "local": handle}, checkpoint_id=folder)
    again, stepping, other = made(mesh_of(*shape))
    dcp.load({"model": again.state_dict(), "local": other}, checkpoint_id=folder)
    assert other.steps == 4
    for key in ("outer", "velocity"):
        assert same_bits(remembered(other, key), remembered(handle, key))
        assert all(x.abs().max() > 0 for x in remembered(other, key).values())
    fit(again, stepping, world.rank, range(4, 6), SINGLE)
    assert world.agree(whole(again))
    if shape == (2, 2):
        fit(model, optimizer, world.rank, range(4, 6), SINGLE)
        assert relative(whole(again), whole(model)) < 1e-5
        own = handle.rank_state_dict()
        handle.load_state_dict(own)
        words = said(handle.load_state_dict, {**own, "shard": 1 - own["shard"]})
        assert f"shard={1 - world.rank % 2}" in words
        assert f"shard={world.rank % 2}, shards=2" in words


@cases.case
def test_a_block_that_is_empty_or_small_here_takes_no_error(world):
    """Of six rows the last of four shards has none. The memory goes back to where there are two."""
    schedule = diloco(2, compressor=PowerSGD(rank=2, min_compression_rate=1))
    handles = {}
    for before, (replicas, shards) in ((None, (2, 2)), ((2, 2), (1, 4)), ((1, 4), (2, 2))):
        mesh = mesh_of(replicas, shards)
        model = sharded_mlp(WIDTHS, mesh["shard"])
        optimizer = sgd(model)
        handle = local_sgd(model, optimizer, schedule, process_group=mesh.get_group("replicate"))
        parts = {"model": model.state_dict(), "local": handle}
        if before is not None:
            dcp.load(parts, checkpoint_id=world.folder / f"empty {before}")
            kept = handle._memory.state.tensors["4.weight"]
            assert ("error" in kept) == (shards == 2)
            assert handle.steps == handles[before].steps
        fit(model, optimizer, world.rank, range(handle.steps, handle.steps + 2), SINGLE)
        dcp.save(
            parts | {"model": model.state_dict()},
            checkpoint_id=world.folder / f"empty {replicas, shards}",
        )
        handles[replicas, shards] = handle
    assert handle.steps == 6
    assert world.agree(whole(model))


SMALL = {
    "TopK": TopK(keep=8, per=64),
    "PowerSGD": PowerSGD(12, min_compression_rate=1.5),
}


@cases.each(SMALL)
def test_blocks_that_are_small_were_not_compressed_and_the_whole_goes_on(world, algorithm):
    """Gathered of two replicas of two shards, for four of whole parameters, for one of four, and
    for DDP; also where a run has an error of its own already."""

    def placed(mesh):
        model = sharded_mlp((32, 64, 32), mesh["shard"])
        return model, compress_replicas(model, algorithm, mesh["replicate"])

    def under_ddp():
        ddp = DistributedDataParallel(mlp(32, 64, 32), process_group=world.group)
        return ddp, register_comm_hook(ddp, algorithm)

    loss = loss_on(32, batch=4)
    model, handle = placed(mesh_of(2, 2))
    loss(model, world.rank, 0).backward()
    state = handle.gathered_state_dict("mean", None)
    assert {} in [state["tensors"][name] for name in state["tensors"] if name not in state["local"]]
    for made_anew in (lambda: placed(mesh_of(4, 1)), lambda: placed(mesh_of(1, 4)), under_ddp):
        other, its = made_anew()
        its.load_state_dict(state)
        loss(other, world.rank, 1).backward()
        its.load_state_dict(state)
        found = its.gathered_state_dict("mean", None)
        for name, rows in found["local"].items():
            saved = errors(state).get(name)
            if "[" not in name:
                wanted = torch.zeros_like(rows["error"][0]) if saved is None else saved
                assert rows["error"][0].equal(wanted), name
    handle.load_state_dict(state)


# --- blocks of parameters in a saved state: named, put together, and cut anew ---

HEAD = {
    "format": 1,
    "kind": "compressor",
    "algorithm": "A()",
    "step": 3,
    "replicas": 2,
    "shared": {},
}
N, M, R = 12, 5, 2
LOCAL = {"error"}


def cut(shards, length=N, axis=0):
    each = -(-length // shards)
    starts = [min(s * each, length) for s in range(shards)]
    return [Piece(axis, start, min(start + each, length), length) for start in starts]


def numbers(*shape, start=0):
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).reshape(
        shape
    )


ERROR = numbers(2, N, M)  # of two replicas


def state_of(pieces, name="w"):
    """A state of a parameter (N, M) in these blocks; those without a row are not compressed."""
    state = {**HEAD, "tensors": {}, "local": {}}
    for i, piece in enumerate(pieces):
        if piece.size:
            block = piece.name(name)
            state["tensors"][block] = {
                "q": torch.full((R, M), float(i)),
                "p": torch.full((R, piece.size), float(i)),
            }
            state["local"][block] = {"error": ERROR.narrow(piece.axis + 1, piece.start, piece.size)}
    return state


def memory(piece):
    shape = [N, M]
    shape[piece.axis] = piece.size
    here = {
        "q": torch.full((R, M), -1.0),
        "p": torch.full((R, piece.size), -1.0),
        "error": torch.zeros(shape),
    }
    return State({}, {"w": {key: x.double() for key, x in here.items()}})


def test_a_block_is_called_by_its_indices():
    for piece, name in ((Piece(0, 3, 6, 12), "a.w[3:6]"), (Piece(1, 0, 5, 12), "a.w[:, 0:5]")):
        assert piece.name("a.w") == name
        parameter, found = parameter_of(name)
        assert (parameter, found.axis, found.start, found.stop) == (
            "a.w",
            piece.axis,
            piece.start,
            piece.stop,
        )
    assert Piece(0, 0, 12, 12).name("a.w") == "a.w"
    assert parameter_of("a.w") == ("a.w", None)


@given(st.integers(1, 13), st.integers(1, 13), st.sampled_from([0, 1]))
def test_errors_are_put_together_and_cut_again(before, after, axis):
    state = state_of(cut(before))
    for piece in cut(after, (N, M)[axis], axis):
        found = recut(state, {"w": piece}, memory(piece), LOCAL)
        assert found["local"]["w"]["error"].equal(ERROR.narrow(axis + 1, piece.start, piece.size))
        assert list(found["tensors"]) == ["w"]


def test_another_block_begins_with_the_factor_of_the_one_it_shares_most_with():
    # Of blocks of 4 rows, those of 3 rows share most with 0, 0 or 1, 1, 2; factors of rows begin
    # anew.
    for piece, ones in zip(cut(4), ({0.0}, {0.0, 1.0}, {1.0, 2.0}, {2.0}), strict=True):
        found = recut(state_of(cut(3)), {"w": piece}, memory(piece), LOCAL)["tensors"]["w"]
        assert set(found["q"].flatten().tolist()) <= ones
        assert set(found["p"].flatten().tolist()) == {-1.0}


def test_a_whole_parameter_is_cut_like_its_blocks():
    state = state_of([Piece(0, 0, N, N)])
    state["tensors"]["w"]["outer"] = numbers(N, M)
    for piece in cut(3):
        here = memory(piece)
        here.tensors["w"]["outer"] = torch.zeros(piece.size, M)
        found = recut(state, {"w": piece}, here, LOCAL)["tensors"]["w"]
        assert found["outer"].equal(numbers(N, M)[piece.start : piece.stop])
        assert found["q"].equal(state["tensors"]["w"]["q"])


def test_blocks_that_are_not_compressed_have_no_error_and_take_none():
    state = state_of(cut(3))
    del state["tensors"]["w[4:8]"], state["local"]["w[4:8]"]
    found = recut(state, {"w": Piece(0, 2, 10, N)}, memory(Piece(0, 2, 10, N)), LOCAL)["local"][
        "w"
    ]["error"]
    assert found[:, 2:6].eq(0).all()
    assert found[:, :2].equal(ERROR[:, 2:4])
    found = recut(state_of(cut(3)), {"w": Piece(0, 0, 1, N)}, State({}, {}), LOCAL)
    assert found["tensors"] == found["local"] == {}


def test_what_is_of_another_model_stays_to_be_seen():
    piece = cut(3)[0]
    state = state_of(cut(3))
    other = state_of(cut(3), "v")
    state["tensors"] |= other["tensors"]
    state["local"] |= other["local"]
    assert set(recut(state, {"w": piece}, memory(piece), LOCAL)["tensors"]) == {
        "w",
        "v[0:4]",
        "v[4:8]",
        "v[8:12]",
    }
    narrower = memory(piece)
    narrower.tensors["w"]["error"] = narrower.tensors["w"]["error"][:, :3]
    assert "w" not in recut(state, {"w": Piece(0, 0, 5, N)}, narrower, LOCAL)["local"]


def test_a_parameter_that_is_called_like_a_block_is_whole():
    state = {
        **HEAD,
        "tensors": {"w[0:2]": {"q": numbers(R, M)}},
        "local": {"w[0:2]": {"error": ERROR}},
    }
    current = State({}, {"w[0:2]": {"q": numbers(R, M), "error": ERROR[0]}})
    assert recut(state, {}, current, LOCAL) == state
