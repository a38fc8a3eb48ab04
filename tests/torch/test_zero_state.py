"""The state of a sharded optimizer: gathered it is the plain optimizer's; it goes on at another
world size; what does not fit is refused."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.models import loss_on
from tests.torch.ranks import Cases
from tests.torch.training import fit, hooked

cases = Cases(__file__, ranks=3)

LOSS = loss_on(6)
SHARDS = ("element", "parameter", "bucket")
ADAMW = torch.optim.AdamW


def model(dtype=torch.float32):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 3))
    net.scale = nn.Parameter(torch.tensor(1.0))
    net.register_forward_hook(lambda module, _, y: y * module.scale)
    return net.to(dtype)


def groups(net):
    named = list(net.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim <= 1], "lr": 0.02},
    ]


def plain(net):
    return ADAMW([{**g, "params": [p for _, p in g["params"]]} for g in groups(net)], lr=0.01)


def train(net, optimizer, rank, steps):
    fit(net, optimizer, rank, steps, LOSS)


def zero_of(world, net, **options):
    return gw.ZeroOptimizer(
        groups(net), ADAMW, **{"process_group": world.group, "lr": 0.01} | options
    )


#: By whom which state is owned, and what steps: the optimizer, which averages, or DDP's hook.
FORMS = {
    "element": None,
    "parameter": gw.hook_with_zero_step,
    "bucket": gw.hook_with_zero_step_interleaved,
}


@cases.each(FORMS.keys())
def test_gathered_it_is_the_plain_state_and_resumed_it_goes_on_to_the_bit(world, shard):
    def start():
        net, hook = model(), FORMS[shard]
        zero = zero_of(world, net, shard=shard, average_gradients=hook is None)
        if hook is None:
            return net, net, zero
        ddp = DistributedDataParallel(net, process_group=world.group)
        ddp.register_comm_hook(world.group, hook(gw.allreduce_hook, ddp, zero, shard == "bucket"))
        return net, ddp, zero

    (twin, _), (net, ddp, zero) = hooked(model(), None, world.group), start()
    reference = plain(twin.module)
    train(twin, reference, world.rank, range(10))
    train(ddp, zero, world.rank, range(6))
    torch.save(
        (net.state_dict(), zero.rank_state_dict()), path := world.folder / f"{shard}.{world.rank}"
    )
    train(ddp, zero, world.rank, range(6, 10))
    again, ddp, resumed = start()
    kept, state = torch.load(path, weights_only=True)
    again.load_state_dict(kept)
    resumed.load_state_dict(state)
    train(ddp, resumed, world.rank, range(6, 10))
    assert same_bits(weights(net), weights(again))
    assert same_bits(resumed.rank_state_dict(), zero.rank_state_dict())

    expected = copy.deepcopy(reference.state_dict())
    whole, only = zero.consolidated_state_dict(to=None), zero.consolidated_state_dict(to=1)
    assert same_bits(whole, gw.consolidate(world.everyones(zero.rank_state_dict())[::-1]))
    assert world.agree(whole)
    held = sum(
        x.numel() for memory in zero.optimizer.state.values() for x in memory.values() if x.ndim
    )
    # each number once
    assert sum(world.everyones(held)) <= 2 * sum(p.numel() for p in net.parameters())
    assert same_bits(only, whole) if world.rank == 1 else only is None
    names = [group["param_names"] for group in whole["param_groups"]]
    assert names == [["0.weight", "2.weight"], ["scale", "0.bias", "2.bias"]]
    options = [
        {k: v for k, v in group.items() if k != "param_names"} for group in whole["param_groups"]
    ]
    assert options == expected["param_groups"]
    assert whole["state"].keys() == expected["state"].keys()
    for number, memory in expected["state"].items():
        mine = whole["state"][number]
        assert mine.keys() == memory.keys()
        assert mine["step"] == memory["step"] == 10
        assert all(relative(mine[key], memory[key]) < 1e-4 for key in ("exp_avg", "exp_avg_sq"))
    # The plain optimizer goes on from it.
    (ddp, _), loaded = hooked(net, None, world.group), plain(net)
    loaded.load_state_dict(copy.deepcopy(whole))
    for each, optimizer in ((twin, reference), (ddp, loaded)):
        train(each, optimizer, world.rank, range(10, 15))
    assert relative(weights(net), weights(twin.module)) < 1e-5


@cases.each({"step": None, "hook": gw.hook_with_zero_step})
def test_a_tool_is_given_the_whole_state_or_an_error(world, hook):
    """What `state_dict` gives to those who know plain optimizers only."""
    net = model()
    ddp, _ = hooked(net, None, world.group)
    zero = zero_of(world, net, shard="parameter")
    if hook:
        ddp.register_comm_hook(world.group, hook(gw.allreduce_hook, ddp, zero))

    def require_refusal(zero):
        words = said(zero.state_dict)
        assert words.startswith(
            "RuntimeError: the state of this optimizer is divided among 3 ranks"
        )
        assert f"consolidated on rank {world.rank} since" in words

    fresh = zero.state_dict()
    zero.load_state_dict(fresh)  # as accelerate does
    for state in (fresh, zero.state_dict()):
        assert state["state"] == {}
        expected = plain(net).state_dict()["param_groups"]
        assert [g["params"] for g in state["param_groups"]] == [g["params"] for g in expected]
    train(ddp, zero, world.rank, range(3))
    require_refusal(zero)
    zero.consolidate_state_dict(to=1)
    zero.param_groups[0]["lr"] = 0.5  # a scheduler, between the step and the checkpoint
    whole = zero.consolidated_state_dict(to=None)
    assert whole["param_groups"][0]["lr"] == 0.5
    assert sum(x["exp_avg"].numel() for x in whole["state"].values()) == sum(
        p.numel() for p in net.parameters()
    )
    if world.rank == 1:
        assert same_bits(zero.state_dict(), whole)
    else:
        require_refusal(zero)
    zero.consolidate_state_dict(to=None)
    taken = zero.state_dict()
    assert same_bits(taken, whole)
    taken["state"][0].clear()  # it is the caller's
    taken["param_groups"].clear()
    assert same_bits(zero.state_dict(), whole)
    for change in (
        lambda: train(ddp, zero, world.rank, range(3, 4)),
        lambda: zero.load_state_dict(whole),
    ):
        change()
        require_refusal(zero)
        zero.consolidate_state_dict()
    assert said(zero.consolidate_state_dict, to=3).startswith(
        "ValueError: to=3 is no rank of the 3"
    )
    assert said(zero.consolidated_state_dict, to=-1).startswith("ValueError: to=-1 is no rank")
    by_itself = zero_of(world, model(), consolidate=True)
    by_itself.load_state_dict(whole)
    assert same_bits(by_itself.state_dict(), whole)
    # Has a state from the beginning.
    require_refusal(
        gw.ZeroOptimizer(model().parameters(), torch.optim.Adagrad, process_group=world.group)
    )


#: Master dtype, and how many ranks take the turns. Only of one and two equal gradients is the mean
#: exact in bfloat16: rounded, it would be another one for every number of ranks.
WORLD_SIZES = {"weights": (None, (3, 2, 3)), "bfloat16": (torch.float32, (2, 1, 2))}


@cases.each(WORLD_SIZES)
def test_another_world_size(world, variant):
    """So many ranks, then others, on the same batches; against the first all the time."""
    master, sizes = variant
    dtype = torch.bfloat16 if master else torch.float32
    groups_of = {1: dist.new_group([0]), 2: dist.new_group([0, 1]), 3: world.group}
    loss = loss_on(6, dtype=dtype)

    def turn(size, numbers, saved=None):
        """State after some steps, on all ranks, whether they took part or not."""
        state = None
        if world.rank < size:
            net = model(dtype)
            zero = zero_of(
                world,
                net,
                process_group=groups_of[size],
                master_dtype=master,
                average_gradients=True,
            )
            if saved:
                net.load_state_dict(saved[0])
                zero.load_state_dict(saved[1])
            for step in numbers:
                zero.zero_grad()
                # all of the batch: the average does not depend on how many ranks there are
                for rank in range(3):
                    (loss(net, rank, step) / 3).backward()
                zero.step()
            state = net.state_dict(), zero.consolidated_state_dict(to=None)
        return world.everyones(state)[0]

    reference, _ = turn(sizes[0], range(15))
    saved = None
    for i, size in enumerate(sizes):
        saved = turn(size, range(5 * i, 5 * i + 5), saved)
    assert ("master" in saved[1]["state"][0]) == bool(master)
    # bfloat16 has 8 bits: a weight may fall on the other side of a rounding boundary
    assert relative(saved[0], reference) < (1e-3 if master else 5e-6)


class CountsSteps(torch.optim.Optimizer):
    """Remembers one number for all parameters, as schedule-free methods do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= group["lr"] / group["k"] * p.grad


@cases.case
def test_what_is_done_with_one_is_refused_by_name_and_changes_nothing(world):
    """What is refused at construction on one rank: test_refusals.py."""
    net = model()
    ddp, _ = hooked(net, None, world.group)
    finder, _ = hooked(model(), None, world.group, find_unused_parameters=True)
    named = list(net.named_parameters())

    def zero(cls=ADAMW, params=named, **options):
        return gw.ZeroOptimizer(params, cls, process_group=world.group, lr=0.01, **options)

    def refused(words, function, *args, **kwargs):
        heard = said(function, *args, **kwargs)
        assert all(word in heard for word in words), heard

    refused(["Adafactor", "pieces", "shard='parameter'"], zero, torch.optim.Adafactor)
    refused(["'scale'", "twice"], zero, params=[*named, named[0]])
    refused(["TypeError: params[1] is a Parameter"], zero, params=[{"params": named}, named[0][1]])
    good, scaled, overlapped, coded = (
        zero(),
        zero(average_gradients=True),
        zero(),
        zero(wire_dtype="int8"),
    )
    refused(["at construction"], good.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]})

    at_the_end, interleaved = gw.hook_with_zero_step, gw.hook_with_zero_step_interleaved
    at_the_end(gw.allreduce_hook, ddp, overlapped)
    at_the_end(gw.allreduce_hook, ddp, zero(CountsSteps))
    for words, step, hook, *of in (
        (
            ["max_grad_norm=1.0", "hook_with_zero_step"],
            interleaved,
            gw.allreduce_hook,
            ddp,
            zero(max_grad_norm=1.0),
        ),
        (
            ["CountsSteps", "hook_with_zero_step"],
            interleaved,
            gw.allreduce_hook,
            ddp,
            zero(CountsSteps),
        ),
        (["average_gradients=True"], at_the_end, gw.allreduce_hook, ddp, scaled),
        (["belongs to a hook"], at_the_end, gw.allreduce_hook, ddp, overlapped),
        (["'scale'", "not in zero"], at_the_end, gw.allreduce_hook, ddp, zero(params=named[1:])),
        (
            ["find_unused_parameters=True", "zero.step()"],
            at_the_end,
            gw.allreduce_hook,
            finder,
            zero(),
        ),
        (
            ["TypeError", "DistributedDataParallel(model)"],
            at_the_end,
            gw.allreduce_hook,
            net,
            zero(),
        ),
        (["wire_dtype='int8'", "allreduce_hook"], at_the_end, gw.bf16_compress_hook, ddp, coded),
    ):
        refused(words, step, hook, *of)
    refused(["wire_dtype='int8'", "average_gradients=True"], coded.step)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(LOSS(net, world.rank, 0)).backward()
    for each in (scaled, overlapped):
        refused(["RuntimeError", "grad_scaler=scaler"], scaler.step, each)
    embedding = nn.Embedding(5, 3, sparse=True)
    sparse = zero(params=list(embedding.named_parameters()))
    embedding(torch.tensor([1])).sum().backward()
    refused(["'weight'", "sparse=False"], sparse.step)

    before, whole = copy.deepcopy(good.rank_state_dict()), good.consolidated_state_dict(to=None)
    lacking = {
        **whole,
        "param_groups": [{**whole["param_groups"][0], "param_names": ["x"] * len(named)}],
    }
    for word, load, state in (
        ("param_groups", good.load_state_dict, {"state": {}}),
        ("'x'", good.load_state_dict, lacking),
        ("consolidate", good.load_state_dict, {**before, "rank": (world.rank + 1) % world.size}),
        ("format 9", good.load_state_dict, {**before, "format": 9}),
        ("all of 3 ranks", gw.consolidate, [before]),
        ("replicas", gw.consolidate, [{**before, "replicas": "3"}]),
        *[
            (
                where,
                gw.consolidate,
                [{**before, "shared": {k: x for k, x in before["shared"].items() if k != where}}],
            )
            for where in ("shapes", "param_groups")
        ],
    ):
        refused([word], load, state)
    good.load_state_dict(before)
    assert same_bits(before, good.rank_state_dict())


@pytest.mark.usefixtures("alone")
def test_shards_that_do_not_fit_together_are_refused():
    weight = nn.Parameter(torch.ones(4, 3))
    zero = gw.ZeroOptimizer([("w", weight)], ADAMW, average_gradients=True)
    weight.grad = torch.randn(4, 3)
    zero.step()
    whole = zero.rank_state_dict()
    own = whole["tensors"]["w"]
    halves = [
        {k: x.reshape(-1)[place] if x.ndim else x for k, x in own.items()}
        for place in (slice(6), slice(6, 12))
    ]
    shards = [
        {**whole, "rank": rank, "replicas": 2, "tensors": {"w": half}}
        for rank, half in enumerate(halves)
    ]
    assert same_bits(gw.consolidate(shards[::-1])["state"], gw.consolidate([whole])["state"])
    moment = halves[1]["exp_avg"]
    for change in ({"exp_avg": moment[1:]}, {"exp_avg": moment.tolist()}, {"other": moment}):
        with pytest.raises(ValueError, match="parameter 'w'"):
            gw.consolidate([shards[0], {**shards[1], "tensors": {"w": halves[1] | change}}])


def damages(name, own, group):
    """Of a parameter's memory and a group's options: what is put into either, and words that the
    refusal has."""
    moment, held = own["exp_avg"], f"of parameter '{name}' holds"
    for key, x, words in (
        ("step", None, "cannot step"),
        ("exp_avg", None, "cannot step"),
        ("exp_avg", moment.tolist(), "cannot step"),
        ("exp_avg", moment[..., :-1], "cannot step"),
        ("exp_avg", moment * math.nan, f"'exp_avg' {held}"),
        ("exp_avg", moment + math.inf, f"'exp_avg' {held}"),
        ("step", torch.tensor(math.inf), f"'step' {held}"),
        ("step", math.nan, f"'step' {held}"),
        ("exp_avg", moment.to("meta"), f"'exp_avg' of parameter '{name}' is a meta"),
    ):
        yield {k: v for k, v in (own | {key: x}).items() if v is not None}, group, words
    for key, x in (("betas", None), ("amsgrad", True), ("lr", "x")):
        yield own, group | {key: x}, "parameter"
    yield own, group | {"lr": math.inf}, "lr=inf"
    yield own, group | {"eps": math.nan}, "eps=nan"
    yield own, {k: x for k, x in group.items() if k != "params"}, "'params'"


@cases.each(SHARDS)
def test_a_damaged_state_is_refused_and_changes_nothing(world, shard):
    net = model()
    ddp, _ = hooked(net, None, world.group)
    zero = gw.ZeroOptimizer(
        net.named_parameters(), ADAMW, process_group=world.group, lr=0.01, shard=shard
    )
    train(ddp, zero, world.rank, range(3))
    good = copy.deepcopy(zero.rank_state_dict())
    train(ddp, zero, world.rank, range(3, 4))
    before, tensors = zero.rank_state_dict(), good["tensors"]
    if tensors:
        name = max(tensors, key=lambda n: tensors[n]["exp_avg"].numel())
        lost = {n: own for n, own in tensors.items() if n != name}
        states = [(lost, {}, repr(name)), ({**lost, "x": tensors[name]}, {}, repr(name))]
        for own, group, words in damages(name, tensors[name], good["shared"]["param_groups"][0]):
            states.append(({**tensors, name: own}, {"param_groups": [group]}, words))
        for changed, shared, words in states:
            heard = said(
                zero.load_state_dict,
                {**good, "tensors": changed, "shared": good["shared"] | shared},
            )
            assert heard.startswith("ValueError"), heard
            assert words in heard
            assert same_bits(zero.rank_state_dict(), before)
    zero.load_state_dict(good)
    assert same_bits(zero.rank_state_dict(), good)


@cases.each(SHARDS)
def test_more_ranks_than_parameters(world, shard):
    """One scalar and three ranks: two of them own nothing."""
    p = nn.Parameter(torch.tensor(2.0))
    options = {
        "process_group": world.group,
        "average_gradients": True,
        "max_grad_norm": 1.0,
        "lr": 0.5,
    }
    zero = gw.ZeroOptimizer([p], torch.optim.SGD, shard=shard, **options)
    (p * (world.rank + 1)).backward()
    zero.step()
    assert float(p) == 1.5  # the average gradient 2, clipped to 1
    assert sorted(world.everyones(len(zero.rank_state_dict()["tensors"]))) == [0, 0, 1]


@cases.case
def test_loaded_weights_count(world):
    """Weights that are loaded after construction, master copies or not."""
    net = model(torch.bfloat16)
    options = {
        "process_group": world.group,
        "master_dtype": torch.float32,
        "average_gradients": True,
        "lr": 0.0,
    }
    zero = gw.ZeroOptimizer(net.named_parameters(), torch.optim.SGD, **options)
    other = {n: torch.full_like(x, 0.5) for n, x in net.state_dict().items()}
    net.load_state_dict(other)
    loss_on(6, dtype=torch.bfloat16)(net, world.rank, 0).backward()
    zero.step()
    assert same_bits(net.state_dict(), other)


def images():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2))
    return net.to(memory_format=torch.channels_last)


@cases.each(SHARDS)
def test_state_lies_as_its_parameter_does(world, shard):
    """A fused optimizer goes through both in the order of memory, whatever their strides say. What
    one optimizer remembers, another goes on from."""
    fused = {"lr": 0.1, "momentum": 0.9, "fused": True}
    options = fused | {"process_group": world.group, "average_gradients": True}

    def loss(net, rank, step):
        x = torch.randn(4, 2, 4, 5, generator=torch.Generator().manual_seed(step))
        return (net(x) - x[..., 1:3, 1:4]).square().mean()

    def plain(net):
        return torch.optim.SGD(net.named_parameters(), **fused)

    def sharded(shard):
        return lambda net: gw.ZeroOptimizer(
            net.named_parameters(), torch.optim.SGD, shard=shard, **options
        )

    alone = images()
    fit(alone, plain(alone), 0, range(6), loss)
    before = images()
    zero = sharded(shard)(before)
    fit(before, zero, 0, range(3), loss)
    whole = zero.consolidated_state_dict(to=None)
    for p, kept in zip(before.parameters(), whole["state"].values(), strict=True):
        assert kept["momentum_buffer"].stride() == p.stride()
    for made in (plain, *map(sharded, SHARDS)):
        net = copy.deepcopy(before)
        optimizer = made(net)
        optimizer.load_state_dict(copy.deepcopy(whole))
        fit(net, optimizer, 0, range(3, 6), loss)
        assert relative(weights(net), weights(alone)) < 1e-4


@cases.each(SHARDS)
def test_what_is_hooked_around_a_state_sees_it(world, shard):
    """As around a plain optimizer's."""
    seen = []
    for make in (lambda net: zero_of(world, net, shard=shard, consolidate=True), plain):
        net, heard = model(), []
        optimizer = make(net)
        train(net, optimizer, world.rank, range(2))

        def saved(_, state, heard=heard):
            heard.append(("saved", set(state) >= {"state", "param_groups"}))
            return {**state, "mine": 1}

        def loaded(_, state, heard=heard):
            heard.append(("loaded", state["mine"]))
            return {k: x for k, x in state.items() if k != "mine"}

        optimizer.register_state_dict_pre_hook(lambda _, heard=heard: heard.append("saves"))
        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_pre_hook(loaded)
        optimizer.register_load_state_dict_post_hook(lambda _, heard=heard: heard.append("went on"))
        optimizer.load_state_dict(optimizer.state_dict())
        seen.append(heard)
    assert seen[0] == seen[1] == ["saves", ("saved", True), ("loaded", 1), "went on"]


@cases.case
def test_names_are_the_users(world):
    """Parameters that were given without names are taken in order, and nobody is told of others."""

    def parameters(net, *, named):
        return net.named_parameters() if named else net.parameters()

    def zero(net, *, named):
        given = parameters(net, named=named)
        options = {"process_group": world.group, "average_gradients": True, "lr": 0.01}
        return gw.ZeroOptimizer(given, ADAMW, **options)

    def plain(net, *, named):
        return ADAMW(parameters(net, named=named), lr=0.01)

    for named in (True, False):
        net = model()
        optimizer = zero(net, named=named)
        train(net, optimizer, world.rank, range(2))
        whole = optimizer.consolidated_state_dict(to=None)
        assert ("param_names" in whole["param_groups"][0]) is named
        alone = plain(net, named=named)
        alone.load_state_dict(whole)
        further = nn.Parameter(torch.zeros(2))
        alone.add_param_group({"params": [("further", further) if named else further]})
        for state in (whole, plain_state(whole, plain(net, named=named))):
            for there in (True, False):
                other = zero(copy.deepcopy(net), named=there)
                other.load_state_dict(copy.deepcopy(state))
                again = other.consolidated_state_dict(to=None)
                assert same_bits(again["state"], whole["state"])


def plain_state(whole, optimizer):
    """What a plain optimizer that went on from it saves."""
    optimizer.load_state_dict(whole)
    return optimizer.state_dict()
