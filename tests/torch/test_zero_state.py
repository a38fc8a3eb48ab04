"""The state of a sharded optimizer: gathered it is the plain optimizer's; it goes on at another world size; what does not fit is refused."""

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


def model():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 3))
    net.scale = nn.Parameter(torch.tensor(1.0))
    net.register_forward_hook(lambda module, _, y: y * module.scale)
    return net


def groups(net):
    named = list(net.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim <= 1], "lr": 0.02},
    ]


def plain(net):
    return torch.optim.AdamW([{**g, "params": [p for _, p in g["params"]]} for g in groups(net)], lr=0.01)


def train(net, optimizer, rank, steps):
    fit(net, optimizer, rank, steps, LOSS)


def zero_of(world, net, **options):
    return gw.ZeroOptimizer(groups(net), torch.optim.AdamW, process_group=world.group, lr=0.01, **options)


@cases.each(SHARDS)
def test_gathered_it_is_the_plain_state(world, shard):
    (twin, _), net = hooked(model(), None, world.group), model()
    reference = plain(twin.module)
    train(twin, reference, world.rank, range(10))
    expected = copy.deepcopy(reference.state_dict())
    ddp, _ = hooked(net, None, world.group)
    zero = zero_of(world, net, shard=shard)
    train(ddp, zero, world.rank, range(10))
    whole, only = zero.consolidated_state_dict(to=None), zero.consolidated_state_dict(to=1)
    assert same_bits(whole, gw.consolidate(world.everyones(zero.rank_state_dict())[::-1]))
    assert world.agree(whole)
    assert same_bits(only, whole) if world.rank == 1 else only is None
    names = [group["param_names"] for group in whole["param_groups"]]
    assert names == [["0.weight", "2.weight"], ["scale", "0.bias", "2.bias"]]
    options = [{k: v for k, v in group.items() if k != "param_names"} for group in whole["param_groups"]]
    assert options == expected["param_groups"]
    assert whole["state"].keys() == expected["state"].keys()
    for number, memory in expected["state"].items():
        mine = whole["state"][number]
        assert mine.keys() == memory.keys()
        assert mine["step"] == memory["step"] == 10
        for key in ("exp_avg", "exp_avg_sq"):
            assert relative(mine[key], memory[key]) < 1e-5
    # The plain optimizer goes on from it.
    loaded = plain(net)
    loaded.load_state_dict(copy.deepcopy(whole))
    train(ddp, loaded, world.rank, range(10, 15))
    train(twin, reference, world.rank, range(10, 15))
    assert relative(weights(net), weights(twin.module)) < 1e-6


@cases.each({"step": None, "hook": gw.hook_with_zero_step})
def test_a_tool_is_given_the_whole_state_or_an_error(world, hook):
    """What `state_dict` gives to those who know plain optimizers only."""

    def require_whole(state):
        assert same_bits(state, whole)

    def require_refusal(zero):
        words = said(zero.state_dict)
        assert words.startswith("RuntimeError: the state of this optimizer is divided among 3 ranks")
        assert f"not been consolidated on rank {world.rank} since the last step" in words

    net = model()
    ddp, _ = hooked(net, None, world.group)
    zero = zero_of(world, net, shard="parameter")
    if hook:
        ddp.register_comm_hook(world.group, hook(gw.allreduce_hook, ddp, zero))
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
    assert sum(x["exp_avg"].numel() for x in whole["state"].values()) == sum(p.numel() for p in net.parameters())
    require_whole(zero.state_dict()) if world.rank == 1 else require_refusal(zero)
    zero.consolidate_state_dict(to=None)
    require_whole(zero.state_dict())
    train(ddp, zero, world.rank, range(3, 4))
    require_refusal(zero)
    zero.consolidate_state_dict()
    zero.load_state_dict(whole)
    require_refusal(zero)
    words = "ValueError: to=3 is no rank of the 3 in the process group; None sends to all"
    assert said(zero.consolidate_state_dict, to=3) == words
    assert said(zero.consolidated_state_dict, to=-1).startswith("ValueError: to=-1 is no rank")
    by_itself = zero_of(world, model(), consolidate=True)
    by_itself.load_state_dict(whole)
    require_whole(by_itself.state_dict())
    # Has a state from the beginning.
    require_refusal(gw.ZeroOptimizer(model().parameters(), torch.optim.Adagrad, process_group=world.group))


#: Where DDP itself averages, the bits of its sums depend on its buckets, which a new process begins with anew.
FORMS = {"averaging": None, "overlapped": gw.hook_with_zero_step, "interleaved": gw.hook_with_zero_step_interleaved}


@cases.each({f"{shard} {form}": (shard, form) for shard, form in zip(SHARDS, FORMS, strict=True)})
def test_resumes_to_the_bit(world, variant):
    """Stopped after 6 steps and resumed, from this rank's shard, against the run that went on."""
    shard, form = variant

    def start():
        net = model()
        averaging = form == "averaging"
        ddp = net if averaging else DistributedDataParallel(net, process_group=world.group)
        zero = zero_of(world, net, shard=shard, average_gradients=averaging)
        if FORMS[form]:
            ddp.register_comm_hook(world.group, FORMS[form](gw.allreduce_hook, ddp, zero, shard == "bucket"))
        return net, ddp, zero

    net, ddp, zero = start()
    train(ddp, zero, world.rank, range(6))
    saved = copy.deepcopy((net.state_dict(), zero.rank_state_dict()))
    path = world.folder / f"{shard}.{form}.{world.rank}"
    torch.save(saved, path)
    train(ddp, zero, world.rank, range(6, 12))
    net2, ddp2, zero2 = start()
    kept, state = torch.load(path, weights_only=True)
    net2.load_state_dict(kept)
    zero2.load_state_dict(state)
    train(ddp2, zero2, world.rank, range(6, 12))
    assert same_bits(weights(net), weights(net2))


#: Master dtype, and how many ranks take the turns. Only of one and two equal gradients is the mean exact in bfloat16: rounded, it would be
#: another one for every number of ranks.
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
        box = [None]
        if world.rank < size:
            net = model().to(dtype)
            options = {"process_group": groups_of[size], "master_dtype": master, "average_gradients": True, "lr": 0.01}
            zero = gw.ZeroOptimizer(groups(net), torch.optim.AdamW, **options)
            if saved:
                net.load_state_dict(saved[0])
                zero.load_state_dict(saved[1])
            for step in numbers:
                zero.zero_grad()
                for rank in range(3):  # all of the batch: the average does not depend on how many ranks there are
                    (loss(net, rank, step) / 3).backward()
                zero.step()
            box = [(copy.deepcopy(net.state_dict()), zero.consolidated_state_dict(to=None))]
        dist.broadcast_object_list(box, src=0, group=world.group)
        return box[0]

    reference, _ = turn(sizes[0], range(15))
    saved = None
    for size, numbers in zip(sizes, (range(5), range(5, 10), range(10, 15)), strict=True):
        saved = turn(size, numbers, saved)
    assert ("master" in saved[1]["state"][0]) == bool(master)
    # bfloat16 has 8 bits: a weight may fall on the other side of a rounding boundary
    assert relative(saved[0], reference) < (1e-3 if master else 1e-6)


class Lars(torch.optim.Optimizer):
    """Scales each update by the norm of its tensor."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= group["lr"] * p.data.norm() / p.grad.norm() * p.grad


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


#: What a `ZeroOptimizer` is given, on a rank, and words of the error. More is in test_refusals.py.
REFUSED = {
    "lars": ({"optimizer_class": Lars}, ["Lars", "pieces", "shard='parameter'"]),
    "adafactor": ({"optimizer_class": torch.optim.Adafactor}, ["Adafactor", "shard='parameter'"]),
    "ranks": (lambda rank: {"max_grad_norm": 1.0 + rank}, ["ranks differ in max_grad_norm", "2.0"]),
    "lr": ({"lr": -1.0}, ["ValueError: Invalid learning rate: -1.0"]),
    "lr whole": ({"lr": -1.0, "shard": "parameter"}, ["ValueError: Invalid learning rate: -1.0"]),
    "lr on one rank": (lambda rank: {"lr": -1.0 if rank else 1.0}, ["Invalid learning rate: -1.0"]),
    "betas": ({"betas": (2.0, 2.0)}, ["ValueError: Invalid beta parameter at index 0: 2.0"]),
    "learning rate": ({"learning_rate": 1.0}, ["TypeError", "unexpected keyword argument 'learning_rate'"]),
    "no parameters": ({"params": []}, ["ValueError: params is empty"]),
    "number": ({"params": 1.2}, ["TypeError: params is a float"]),
    "tensor": ({"params": nn.Parameter(torch.zeros(2))}, ["TypeError: params is a Parameter"]),
    "no params": ({"params": [{"lr": 1.0}]}, ["ValueError: params[0]", "['lr']", "without 'params'"]),
    "frozen": ({"params": [("p", nn.Parameter(torch.zeros(2), requires_grad=False))]}, ["requires_grad=True"]),
}


@cases.each(REFUSED)
def test_refused_by_name(world, variant):
    options, words = variant
    usual = {"params": list(model().named_parameters()), "optimizer_class": torch.optim.AdamW, "lr": 0.01}
    given = usual | (options(world.rank) if callable(options) else options)
    heard = said(gw.ZeroOptimizer, process_group=world.group, **given)
    assert all(word in heard for word in words)


@cases.case
def test_what_is_done_with_one_is_refused_by_name_and_changes_nothing(world):
    net = model()
    ddp, _ = hooked(net, None, world.group)
    finder, _ = hooked(model(), None, world.group, find_unused_parameters=True)
    named = list(net.named_parameters())

    def zero(cls=torch.optim.AdamW, params=named, **options):
        return gw.ZeroOptimizer(params, cls, process_group=world.group, lr=0.01, **options)

    def refused(words, function, *args, **kwargs):
        heard = said(function, *args, **kwargs)
        assert all(word in heard for word in words)

    zero(Lars, shard="parameter")
    refused(["'scale'", "twice"], zero, params=[*named, named[0]])
    refused(
        ["TypeError: params[1] is a Parameter among parameter groups"], zero, params=[{"params": named}, named[0][1]]
    )
    cls = torch.optim.SGD if world.rank else torch.optim.Adam
    refused(["ranks differ in optimizer_class", "SGD"], zero, cls)
    good, scaled, overlapped = zero(), zero(average_gradients=True), zero()
    refused(["at construction"], good.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]})

    at_the_end, interleaved = gw.hook_with_zero_step, gw.hook_with_zero_step_interleaved
    at_the_end(gw.allreduce_hook, ddp, overlapped)
    at_the_end(gw.allreduce_hook, ddp, zero(CountsSteps))
    words = ["max_grad_norm=1.0", "hook_with_zero_step"]
    refused(words, interleaved, gw.allreduce_hook, ddp, zero(max_grad_norm=1.0))
    refused(["CountsSteps", "hook_with_zero_step"], interleaved, gw.allreduce_hook, ddp, zero(CountsSteps))
    refused(["average_gradients=True"], at_the_end, gw.allreduce_hook, ddp, scaled)
    refused(["belongs to a hook"], at_the_end, gw.allreduce_hook, ddp, overlapped)
    refused(["'scale'", "not in zero"], at_the_end, gw.allreduce_hook, ddp, zero(params=named[1:]))
    refused(["find_unused_parameters=True", "zero.step()"], at_the_end, gw.allreduce_hook, finder, zero())
    refused(["TypeError", "DistributedDataParallel(model)"], at_the_end, gw.allreduce_hook, net, zero())
    coded = zero(wire_dtype="int8")
    refused(["wire_dtype='int8'", "average_gradients=True"], coded.step)
    refused(["wire_dtype='int8'", "allreduce_hook"], at_the_end, gw.bf16_compress_hook, ddp, coded)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(LOSS(net, world.rank, 0)).backward()
    for each in (scaled, overlapped):
        refused(["RuntimeError", "grad_scaler=scaler"], scaler.step, each)
    embedding = nn.Embedding(5, 3, sparse=True)
    sparse = zero(params=list(embedding.named_parameters()))
    embedding(torch.tensor([1])).sum().backward()
    refused(["'weight'", "sparse=False"], sparse.step)

    before = copy.deepcopy(good.rank_state_dict())
    whole = good.consolidated_state_dict(to=None)
    lacking = {**whole, "param_groups": [{**whole["param_groups"][0], "param_names": ["x"] * len(named)}]}
    refused(["param_groups"], good.load_state_dict, {"state": {}})
    refused(["'x'"], good.load_state_dict, lacking)
    refused(["consolidate"], good.load_state_dict, {**before, "rank": (world.rank + 1) % world.size})
    refused(["format 9"], good.load_state_dict, {**before, "format": 9})
    refused(["all of 3 ranks"], gw.consolidate, [before])
    for where in ("shapes", "param_groups"):
        bad = {**before, "shared": {k: v for k, v in before["shared"].items() if k != where}}
        refused([where], gw.consolidate, [bad])
    refused(["replicas"], gw.consolidate, [{**before, "replicas": "3"}])
    good.load_state_dict(before)
    assert same_bits(before, good.rank_state_dict())


@pytest.mark.usefixtures("alone")
def test_shards_that_do_not_fit_together_are_refused():
    weight = nn.Parameter(torch.ones(4, 3))
    zero = gw.ZeroOptimizer([("w", weight)], torch.optim.AdamW, average_gradients=True)
    weight.grad = torch.randn(4, 3)
    zero.step()
    whole = zero.rank_state_dict()
    own = whole["tensors"]["w"]
    halves = [{k: x.reshape(-1)[place] if x.ndim else x for k, x in own.items()} for place in (slice(6), slice(6, 12))]
    shards = [{**whole, "rank": rank, "replicas": 2, "tensors": {"w": half}} for rank, half in enumerate(halves)]
    assert same_bits(gw.consolidate(shards[::-1])["state"], gw.consolidate([whole])["state"])
    moment = halves[1]["exp_avg"]
    for change in ({"exp_avg": moment[1:]}, {"exp_avg": moment.tolist()}, {"other": moment}):
        with pytest.raises(ValueError, match="parameter 'w'"):
            gw.consolidate([shards[0], {**shards[1], "tensors": {"w": halves[1] | change}}])


def damages(tensors, group):
    """Of a rank's memory of its pieces, and of a group's options: words that the refusal has → what is put in."""
    name = max(tensors, key=lambda n: tensors[n]["exp_avg"].numel())
    own = tensors[name]
    moment = own["exp_avg"]

    def memory(**change):
        return {**tensors, name: {k: v for k, v in {**own, **change}.items() if v is not None}}, group

    said_of = lambda key: rf"'{key}' of parameter '{name}'"  # noqa: E731
    return name, {
        "cannot step": [memory(step=None), memory(exp_avg=None), memory(exp_avg=moment.tolist()), memory(exp_avg=moment[..., :-1])],
        f"{said_of('exp_avg')} holds": [memory(exp_avg=moment * math.nan), memory(exp_avg=moment + math.inf)],
        f"{said_of('step')} holds": [memory(step=torch.tensor(math.inf)), memory(step=math.nan)],
        f"{said_of('exp_avg')} is a meta": [memory(exp_avg=moment.to("meta"))],
        "parameter": [(tensors, {**group, "betas": None}), (tensors, {**group, "amsgrad": True}), (tensors, {**group, "lr": "x"})],
        "lr=inf": [(tensors, {**group, "lr": math.inf})],
        "eps=nan": [(tensors, {**group, "eps": math.nan})],
        "'params'": [(tensors, {k: v for k, v in group.items() if k != "params"})],
    }  # fmt: skip


@cases.each(SHARDS)
def test_a_damaged_state_is_refused_and_changes_nothing(world, shard):
    net = model()
    ddp, _ = hooked(net, None, world.group)
    zero = gw.ZeroOptimizer(net.named_parameters(), torch.optim.AdamW, process_group=world.group, lr=0.01, shard=shard)
    train(ddp, zero, world.rank, range(3))
    good = copy.deepcopy(zero.rank_state_dict())
    train(ddp, zero, world.rank, range(3, 4))
    before = zero.rank_state_dict()
    if good["tensors"]:
        name, refused = damages(good["tensors"], good["shared"]["param_groups"][0])
        for words, each in refused.items():
            for tensors, group in each:
                state = {**good, "tensors": tensors, "shared": {**good["shared"], "param_groups": [group]}}
                heard = said(zero.load_state_dict, state)
                assert heard.startswith("ValueError"), heard
                assert words in heard
                assert same_bits(zero.rank_state_dict(), before)
        lost = {n: own for n, own in good["tensors"].items() if n != name}
        assert repr(name) in said(zero.load_state_dict, {**good, "tensors": lost})
        assert repr(name) in said(zero.load_state_dict, {**good, "tensors": {**lost, "x": good["tensors"][name]}})
    zero.load_state_dict(good)
    assert same_bits(zero.rank_state_dict(), good)


@cases.each(SHARDS)
def test_more_ranks_than_parameters(world, shard):
    """One scalar and three ranks: two of them own nothing."""
    p = nn.Parameter(torch.tensor(2.0))
    options = {"process_group": world.group, "average_gradients": True, "max_grad_norm": 1.0, "lr": 0.5}
    zero = gw.ZeroOptimizer([p], torch.optim.SGD, shard=shard, **options)
    (p * (world.rank + 1)).backward()
    zero.step()
    assert float(p) == 1.5  # the average gradient 2, clipped to 1
    assert sorted(world.everyones(len(zero.rank_state_dict()["tensors"]))) == [0, 0, 1]


@cases.case
def test_loaded_weights_count(world):
    """Weights that are loaded after construction, master copies or not."""
    net = model().to(torch.bfloat16)
    zero = gw.ZeroOptimizer(
        net.named_parameters(), torch.optim.SGD, process_group=world.group, master_dtype=torch.float32,
        average_gradients=True, lr=0.0,
    )  # fmt: skip
    other = {n: torch.full_like(x, 0.5) for n, x in net.state_dict().items()}
    net.load_state_dict(other)
    loss_on(6, dtype=torch.bfloat16)(net, world.rank, 0).backward()
    zero.step()
    assert same_bits(net.state_dict(), other)
