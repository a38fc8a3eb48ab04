"""Memory that moves: to another number of ranks, through files, into another model, and to another loss scale."""

import copy
import logging

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, LocalSGD, PowerSGD
from gradwire.core import checkpoint
from gradwire.torch_backend import DataParallel, local_sgd, register_comm_hook
from gradwire.torch_backend.kernels import TorchOps
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, loss_on, mlp, relative, same_bits, train

cases = Cases(__file__, ranks=4)
results = cases.fixture()

WIDTHS = (24, 40, 32, 24)
#: 12 examples make a step: 4, 2 and 3 ranks share them equally.
EXAMPLES = 12
PHASES = [(4, range(5)), (2, range(5, 9)), (3, range(9, 14))]
ALGORITHMS = {
    "full": PowerSGD(2),
    "half step": PowerSGD(2, half_step=True),  # an odd number of steps before the first change
    "dense start": PowerSGD(2, start_step=7),
    "uncompressed": AllReduce(),
}


def steps(ddp, optimizer, rank, ranks, numbers):
    """Steps on the same examples, however many ranks there are."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(EXAMPLES, WIDTHS[0], generator=generator, dtype=torch.float64)
        mine = x.chunk(ranks)[rank]
        optimizer.zero_grad()
        (ddp(mine) - mine.sin().cumsum(1)).square().mean().backward()
        optimizer.step()


def wrapped(group, algorithm, **options):
    torch.manual_seed(5)
    ddp = DistributedDataParallel(mlp(*WIDTHS).double(), process_group=group, bucket_cap_mb=0.01)
    return ddp, register_comm_hook(ddp, algorithm, **options), torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)


#: What the checkpoints hold of the errors: their mean, or all of them.
RESIZED = {f"{name}, mean": (ALGORITHMS[name], "mean") for name in ALGORITHMS}
RESIZED["half step, all"] = (ALGORITHMS["half step"], "all")


@cases.each(RESIZED)
def resized(world, variant):
    algorithm, errors = variant
    ddp, handle, optimizer = wrapped(world.group, algorithm)
    steps(ddp, optimizer, world.rank, 4, range(14))
    whole = copy.deepcopy(ddp.module.state_dict())

    file = world.folder / f"{algorithm} {errors}.pt"
    before = None
    for size, numbers in PHASES:
        group = dist.new_group(list(range(size)))
        if world.rank < size:
            ddp, handle, optimizer = wrapped(group, algorithm)
            if numbers.start:
                saved = torch.load(file, weights_only=True)
                ddp.module.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                assert not handle.load_state_dict(saved["compressor"])
                before = saved["compressor"]
            steps(ddp, optimizer, world.rank, size, numbers)
            compressor = handle.gathered_state_dict(errors)
            assert (compressor is None) == (world.rank > 0)
            if world.rank == 0:
                state = {
                    "model": ddp.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "compressor": compressor,
                }
                torch.save(state, file)
        dist.barrier(world.group)
    return {"whole": whole, "resized": ddp.module.state_dict(), "state": before}


@pytest.mark.parametrize("variant", RESIZED)
def test_four_ranks_then_two_then_three_follow_the_run_of_four(results, variant):
    first, *others = results(f"resized[{variant}]")
    assert relative(first["resized"], first["whole"]) < 1e-9
    assert all(same_bits(other["resized"], first["resized"]) for other in others[:2])
    assert first["state"]["replicas"] == 2
    rows = {len(x) for memory in first["state"]["local"].values() for x in memory.values()}
    assert rows == {"uncompressed, mean": set(), "half step, all": {2}}.get(variant, {1})


@cases.each({"one group": 1 << 20, "a group for each bucket": 0})
def exact(world, message_bytes):
    """A run that is stopped after one step, before buckets are rebuilt, or after three; in float32, where sums depend on their order."""

    def fresh():
        torch.manual_seed(5)
        ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=0.005)
        handle = register_comm_hook(ddp, PowerSGD(2), message_bytes=message_bytes)
        return ddp, handle

    found = {}
    for n in (1, 3):
        ddp, handle = fresh()
        train(ddp, loss_on(WIDTHS[0]), n, local=False)
        model, state = copy.deepcopy(ddp.module.state_dict()), handle.gathered_state_dict("all", to=None)
        own = handle.rank_state_dict()
        whole = train(ddp, loss_on(WIDTHS[0]), range(n, 6), local=False).weights
        ddp, handle = fresh()
        ddp.module.load_state_dict(model)
        handle.load_state_dict(state)
        loaded = handle.rank_state_dict()
        resumed = train(ddp, loss_on(WIDTHS[0]), range(n, 6), local=False).weights
        found[n] = {"same memory": same_bits(own, loaded), "same weights": same_bits(whole, resumed)}
        found[n] |= {"near": relative(resumed, whole), "buckets": buckets_of(ddp), "state": state, "own": own}
    return found


def test_more_than_two_ranks_go_on_bit_for_bit_when_the_model_is_one_group(results):
    for rank in results("exact[one group]"):
        for n in (1, 3):
            assert rank[n]["buckets"] > 1
            assert rank[n]["same memory"]
            assert rank[n]["same weights"]


def test_with_several_groups_the_order_of_sums_is_that_of_the_buckets(results):
    for rank in results("exact[a group for each bucket]"):
        for n in (1, 3):
            assert rank[n]["same memory"]
            assert rank[n]["near"] < 1e-5


def test_what_is_gathered_on_the_way_is_what_core_gathers_from_files(results):
    ranks = results("exact[one group]")
    states = [rank[3]["own"] for rank in ranks]
    expected = checkpoint.gather(TorchOps(torch.device("cpu")), states, {"error"})
    assert all(same_bits(rank[3]["state"], expected) for rank in ranks)
    errors = expected["local"]["2.weight"]["error"]
    assert errors.shape == (4, 32, 40)
    assert not same_bits(errors[0], errors[1])


@cases.case
def mean_of_all(world):
    """In every dtype that memory may have, at every destination."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
        handle = register_comm_hook(ddp, PowerSGD(2, state_dtype=dtype))
        train(ddp, loss_on(WIDTHS[0]), 2, local=False)
        found[dtype] = handle.rank_state_dict(), *(handle.gathered_state_dict(to=to) for to in (2, None))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mean_is_formed_in_a_wide_dtype(results, dtype):
    ranks = results("mean_of_all")
    errors = [rank[dtype][0]["tensors"]["0.weight"]["error"] for rank in ranks]
    expected = (sum(x.double() for x in errors) / 4).to(errors[0].dtype)
    for number, rank in enumerate(ranks):
        _, to_two, to_all = rank[dtype]
        assert (to_two is None) == (number != 2)
        for state in filter(None, (to_two, to_all)):
            assert same_bits(state["local"]["0.weight"]["error"], expected[None])


#: Powers of two, which a GradScaler's float32 divides by exactly.
SCALE, GROWTH = 1024.0, 8.0


@cases.each({"DDP": True, "DataParallel": False})
def scaled(world, ddp):
    """The same steps without a scaler, with one that the memory follows, and with one that it does not know of. In step 3 the scale has
    grown, step 4 overflows."""

    def run(scaler, known, numbers=range(8), load=None):
        torch.manual_seed(5)
        model, options = mlp(*WIDTHS).double(), {"grad_scaler": scaler if known else None}
        if ddp:
            wrapper = DistributedDataParallel(model, process_group=world.group)
            handle = register_comm_hook(wrapper, PowerSGD(2), **options)
            states, load_state = handle.rank_state_dict, handle.load_state_dict
        else:
            wrapper = DataParallel(model, PowerSGD(2), process_group=world.group, **options)
            states, load_state = wrapper.rank_compressor_state_dict, wrapper.load_compressor_state_dict
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if load is not None:
            model.load_state_dict(load[0])
            load_state(load[1])
        for number in numbers:
            optimizer.zero_grad()
            y = loss_on(WIDTHS[0])(lambda x: wrapper(x.double()), world.rank, number)
            if number == 4:
                y = y * float("inf")
            scaler.scale(y).backward()
            scaler.step(optimizer)
            scaler.update()
        return copy.deepcopy(model.state_dict()), states()

    def scaler(**options):
        return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3, growth_factor=GROWTH, **options)

    constant = run(torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100, backoff_factor=0.999999999), False)
    followed, unknown = run(scaler(), True), run(scaler(), False)
    # Stopped when the scale has just grown, and continued with a scaler that begins anew, or unscaled.
    half = run(scaler(), True, range(3))
    again = run(scaler(), True, range(3, 8), half)
    unscaled = run(torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100), False, range(3, 4), half)
    until_four = run(torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100), False, range(4))
    return {
        "constant": constant,
        "followed": followed,
        "unknown": unknown,
        "half": half[1],
        "again": again,
        "unscaled": unscaled,
        "until four": until_four,
    }


@pytest.mark.parametrize("wrapper", ["DDP", "DataParallel"])
def test_memory_follows_the_loss_scale(results, wrapper):
    for rank in results(f"scaled[{wrapper}]"):
        weights, state = rank["constant"]
        assert relative(rank["followed"][0], weights) < 1e-10
        assert relative(rank["again"][0], weights) < 1e-10
        assert relative(rank["unknown"][0], weights) > 1e-4  # what happens otherwise
        # The scale of the last step, by which its errors are too large.
        assert rank["half"]["scale"] == SCALE
        errors = {n: m["error"] / rank["followed"][1]["scale"] for n, m in rank["followed"][1]["tensors"].items()}
        assert relative(errors, {n: m["error"] for n, m in state["tensors"].items()}) < 1e-10
        assert "scale" not in state


@pytest.mark.parametrize("wrapper", ["DDP", "DataParallel"])
def test_a_run_without_a_scaler_continues_one_with_it(results, wrapper):
    for rank in results(f"scaled[{wrapper}]"):
        (weights, state), (expected, errors) = rank["unscaled"], rank["until four"]
        assert relative(weights, expected) < 1e-10
        assert "scale" not in state
        found, wanted = ({n: m["error"] for n, m in s["tensors"].items()} for s in (state, errors))
        assert relative(found, wanted) < 1e-10


def of_four(to):
    """A handle alone, with a model in which some parameters differ, and what a run of four has left."""
    ddp = DistributedDataParallel(to)
    return ddp, register_comm_hook(ddp, PowerSGD(2, half_step=True))


class Changed(nn.Module):
    """Of `mlp(*WIDTHS)` the first weight is as it was, the second is narrower, the third has gone, and there is a new one."""

    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(24, 40))
        self.add_module("2", nn.Linear(30, 32))
        self.add_module("new", nn.Linear(32, 24))


def test_a_changed_model_is_refused_or_keeps_what_fits(alone, caplog):
    old, source = of_four(mlp(*WIDTHS))
    train(old, loss_on(WIDTHS[0]), 3, local=False)
    state = source.gathered_state_dict()
    _, handle = of_four(Changed())
    before = handle.rank_state_dict()
    with pytest.raises(ValueError, match=r"'4.weight' only there, 'new.weight' only here.*'2.weight'.*strict=False"):
        handle.load_state_dict(state)
    assert same_bits(handle.rank_state_dict(), before)

    with caplog.at_level(logging.WARNING):
        difference = handle.load_state_dict(state, strict=False)
    assert (difference.removed, difference.added) == (("4.weight",), ("new.weight",))
    assert "4.weight" in caplog.text
    assert "new.weight" in caplog.text
    after, expected = handle.rank_state_dict(), source.rank_state_dict()
    assert after["step"] == 3
    assert same_bits(after["shared"], expected["shared"])
    assert same_bits(after["tensors"]["0.weight"], expected["tensors"]["0.weight"])
    assert same_bits(after["tensors"]["new.weight"], before["tensors"]["new.weight"])
    kept = after["tensors"]["2.weight"]
    assert same_bits(kept["p"], expected["tensors"]["2.weight"]["p"])  # the other side of a matrix has kept its length
    assert same_bits(
        {k: kept[k] for k in ("q", "error")}, {k: before["tensors"]["2.weight"][k] for k in ("q", "error")}
    )


def test_states_live_in_files_without_pickle(alone, tmp_path):
    ddp, handle = of_four(mlp(*WIDTHS))
    train(ddp, loss_on(WIDTHS[0]), 3, local=False)
    optimizer = torch.optim.SGD((model := mlp(*WIDTHS)).parameters(), lr=0.1)
    local = local_sgd(model, optimizer, LocalSGD(2, compressor=PowerSGD(2)))
    for name, state in {
        "one rank's": handle.rank_state_dict(),
        "all ranks'": handle.gathered_state_dict(),
        "local SGD": local.rank_state_dict(),
    }.items():
        torch.save(state, tmp_path / "state.pt")
        assert same_bits(torch.load(tmp_path / "state.pt", weights_only=True), state)
        arrays, metadata = checkpoint.flatten(state)
        safetensors.torch.save_file(arrays, tmp_path / name, metadata)
        with safetensors.safe_open(tmp_path / name, "pt") as file:
            found = checkpoint.unflatten({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118
        assert same_bits(found, state)


def test_arrays_of_other_libraries_are_taken(alone):
    ddp, source = of_four(mlp(*WIDTHS).bfloat16())
    train(ddp, lambda *a: loss_on(WIDTHS[0])(lambda x: ddp(x.bfloat16()).float(), *a[1:]), 2, local=False)
    state = source.gathered_state_dict()

    def to_numpy(x):
        if isinstance(x, dict):
            return {k: to_numpy(v) for k, v in x.items()}
        if not isinstance(x, torch.Tensor):
            return x
        return x.view(torch.int16).numpy().view(np.dtype("bfloat16")) if x.dtype == torch.bfloat16 else x.numpy()

    pytest.importorskip("ml_dtypes")
    _, handle = of_four(mlp(*WIDTHS).bfloat16())
    handle.load_state_dict(to_numpy(state))
    assert same_bits(handle.rank_state_dict(), source.rank_state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"), [(("some",), "errors='some'"), (("all", 1), "to=1 is no rank of the 1")]
)
def test_arguments_that_mean_nothing(alone, arguments, message):
    _, handle = of_four(mlp(*WIDTHS))
    with pytest.raises(ValueError, match=message):
        handle.gathered_state_dict(*arguments)


if __name__ == "__main__":
    cases.main()
