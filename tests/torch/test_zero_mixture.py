"""Muon for hidden matrices and AdamW for the rest in one sharded optimizer: the plain pair, on any number of ranks.

The oracle is torch's own pair on the average of all ranks' gradients, in float64. Torch's Muon casts to bfloat16, in which a last bit of a gradient is
soon a hundredth of a weight; so the casts are left out on both sides, but where both are given the same gradients.
"""

from contextlib import contextmanager, nullcontext
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch_backend as gw
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.ranks import Cases
from tests.torch.sharded import mesh_of, shard

cases = Cases(__file__, ranks=4)
pytestmark = pytest.mark.slow

FORMS = ("plain", "averaging", "overlapped", "interleaved")
STEPS = 8
MUON, VECTORS, HEADS = {"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.01, "weight_decay": 0.0}, {"lr": 0.005}
MIXTURE = {
    "embedding.*": (torch.optim.AdamW, HEADS, "element"),
    "head.*": (torch.optim.AdamW, HEADS, "parameter"),
    "*.weight": ("Muon", MUON, "parameter"),
    "*": (torch.optim.AdamW, VECTORS, "element"),
}


class Model(nn.Module):
    """Three matrices of one shape, others, one of a single row, vectors, and a frozen one."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in ((6, 9), (9, 9), (9, 9), (9, 9), (9, 1), (1, 5)))
        self.scale = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.head = nn.Linear(5, 3, bias=False)
        self.to(dtype)

    def forward(self, x):
        x = self.embedding(x).mean(dim=1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x * self.scale + self.frozen)


def loss(model, rank, step):
    data = torch.Generator().manual_seed(1000 * rank + step)
    y = model(torch.randint(11, (12, 4), generator=data))
    return (y - torch.randn(12, 3, generator=data).to(y.dtype)).square().mean()


@contextmanager
def without_casts():
    """Torch's Muon in the dtype of its parameters."""
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        yield


def plain_pair(model):
    """Torch's optimizers, one for each pattern, by the order of patterns."""
    hidden = [(n, p) for n, p in model.named_parameters() if n.startswith("layers") and n.endswith("weight")]
    vectors = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.ndim == 1]
    return [
        torch.optim.AdamW(model.embedding.named_parameters(prefix="embedding"), **HEADS),
        torch.optim.AdamW(model.head.named_parameters(prefix="head"), **HEADS),
        torch.optim.Muon(hidden, **MUON),
        torch.optim.AdamW(vectors, **VECTORS),
    ]


def plainly(model, optimizers, size, steps, micro_batches=1, clip=None):
    """The pair on what all ranks have. Nothing is sent."""
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(micro_batches):
            for rank in range(size):
                (loss(model, rank, step * micro_batches + part) / micro_batches / size).backward()
        if clip:
            # Not `clip_grad_norm_`, whose norm is 1e-6 more.
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            torch._foreach_mul_(gradients, float((clip / norm).clamp(max=1)))
        for optimizer in optimizers:
            optimizer.step()
    return weights(model)


def sharded(model, group, form, **options):
    options = {"process_group": group, "bucket_cap_mb": 0.001} | options
    if form == "averaging":
        return model, gw.ZeroOptimizer(model.named_parameters(), MIXTURE, average_gradients=True, **options)
    wrapper = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001)
    zero = gw.ZeroOptimizer(model.named_parameters(), MIXTURE, **options)
    if form in ("overlapped", "interleaved"):
        hook = gw.hook_with_zero_step if form == "overlapped" else gw.hook_with_zero_step_interleaved
        wrapper.register_comm_hook(group, hook(gw.allreduce_hook, wrapper, zero))
    return wrapper, zero


def train(wrapper, zero, rank, steps, micro_batches=1):
    for step in steps:
        zero.zero_grad()
        for part in range(micro_batches):
            last = part == micro_batches - 1
            with nullcontext() if last or not hasattr(wrapper, "no_sync") else wrapper.no_sync():
                (loss(wrapper, rank, step * micro_batches + part) / micro_batches).backward()
        zero.step()
    return {n.removeprefix("module."): x for n, x in weights(wrapper).items()}


def smaller(world, size):
    """A group of the first ranks, or None on the others. On all ranks."""
    group = dist.new_group(list(range(size)), use_local_synchronization=False)
    return group if world.rank < size else None


@cache
def reference(clip):
    """Of four ranks with accumulation: the weights after training, and the pair."""
    model = Model()
    pair = plain_pair(model)
    with without_casts():
        return plainly(model, pair, 4, range(STEPS), 2, clip), pair


@cases.each(FORMS)
def test_equals_the_plain_pair(world, form):
    """With accumulation and, where a form knows the norm, clipping."""
    clip = None if form == "interleaved" else 0.3
    expected, pair = reference(clip)
    with without_casts():
        wrapper, zero = sharded(Model(), world.group, form, max_grad_norm=clip)
        found = train(wrapper, zero, world.rank, range(STEPS), 2)
        whole = zero.consolidated_state_dict(to=None)
    assert relative(expected, weights(Model())) > 0.05
    assert apart(found, expected) == {}
    require_state_of(pair, whole)


FIFTY = {"averaging, 2": ("averaging", 2), "overlapped, 3": ("overlapped", 3), "plain, 4": ("plain", 4)}


@cases.each(FIFTY)
def test_fifty_steps_are_the_plain_pairs(world, variant):
    """Not one of them drifts, on any number of ranks."""
    form, size = variant
    if (group := smaller(world, size)) is None:
        return
    twin = Model()
    with without_casts():
        expected = plainly(twin, plain_pair(twin), size, range(50), 2, 0.3)
        wrapper, zero = sharded(Model(), group, form, max_grad_norm=0.3)
        found = train(wrapper, zero, world.rank, range(50), 2)
    assert relative(expected, weights(Model())) > 0.3
    assert apart(found, expected) == {}


def apart(found, expected):
    """What is not as expected, and how far."""
    return {n: far for n in found if (far := relative(found[n], expected[n])) > 1e-9}


def require_state_of(pair, whole):
    """One state that is the pair's, group by group."""
    for optimizer, group in zip(pair, whole["param_groups"], strict=True):
        plain = optimizer.state_dict()
        assert group | {"params": None} == plain["param_groups"][0] | {"params": None}
        for number, own in plain["state"].items():
            theirs = whole["state"][group["params"][number]]
            assert theirs.keys() == own.keys()
            assert all(torch.allclose(theirs[k].double(), x.double(), rtol=1e-7, atol=1e-12) for k, x in own.items())


def train_with(ddp, optimizers, rank, steps):
    for step in range(steps):
        ddp.zero_grad()
        loss(ddp, rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()


@cases.case
def test_it_goes_on_on_another_number_of_ranks(world):
    """Four ranks, then two, then the plain pair; the state of no step is altered."""
    with without_casts():
        twin = Model()
        expected = plainly(twin, plain_pair(twin), 2, range(9))
        four, two = smaller(world, 4), smaller(world, 2)
        wrapper, zero = sharded(Model(), four, "averaging")
        # The same gradients on four ranks: each pair of ranks has those of one of two.
        train(wrapper, zero, world.rank % 2, range(3))
        saved, start = zero.consolidated_state_dict(to=None), weights(wrapper)
        if two is None:
            return
        model = Model()
        model.load_state_dict(start)
        wrapper, zero = sharded(model, two, "overlapped")
        zero.load_state_dict(saved)
        train(wrapper, zero, world.rank, range(3, 6))
        saved = zero.consolidated_state_dict(to=None)
        pair = plain_pair(model)
        for optimizer, group in zip(pair, saved["param_groups"], strict=True):
            own = {number: saved["state"][number] for number in group["params"]}
            optimizer.load_state_dict({"state": own, "param_groups": [group]})
        assert relative(plainly(model, pair, 2, range(6, 9)), expected) < 1e-9


ON_SHARDS = MIXTURE | {"head.*": (torch.optim.AdamW, HEADS, "element")}


def four_shards():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))


def on_shards(mesh, model=None):
    """Each layer a unit of its own, of which some matrices have fewer rows than there are shards."""
    model = shard(model or Model(), mesh)
    return model, gw.ZeroOptimizer(model.named_parameters(), ON_SHARDS)


def train_on_shards(model, zero, rank, steps, micro_batches=1, clip=None):
    for step in steps:
        zero.zero_grad()
        for part in range(micro_batches):
            (loss(model, rank, step * micro_batches + part) / micro_batches).backward()
        if clip:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).full_tensor()
            torch._foreach_mul_([g.to_local() for g in gradients], float((clip / norm).clamp(max=1)))
        zero.step()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@cases.case
def test_on_shards_it_is_the_plain_pair(world):
    """With accumulation and clipping; the state, whole, is the pair's, and goes on where matrices have other owners."""
    expected, pair = reference(0.3)
    half = STEPS // 2
    with without_casts():
        model, zero = on_shards(mesh_of(2, 2))
        train_on_shards(model, zero, world.rank, range(half), 2, 0.3)
        saved = zero.consolidated_state_dict(to=None)
        fresh = Model()
        fresh.load_state_dict({name: p.full_tensor() for name, p in model.named_parameters()})
        model, zero = on_shards(four_shards(), fresh)
        zero.load_state_dict(saved)
        found = train_on_shards(model, zero, world.rank, range(half, STEPS), 2, 0.3)
        whole = zero.consolidated_state_dict(to=None)
        natively = get_optimizer_state_dict(model, zero, options=StateDictOptions(full_state_dict=True))
    assert apart(found, expected) == {}
    require_state_of(pair, whole)
    if world.rank == 0:
        for group in whole["param_groups"]:
            for number, name in zip(group["params"], group["param_names"], strict=True):
                assert same_bits(natively["state"][name], whole["state"][number])


@cases.case
def test_on_shards_one_message_each_way_and_the_tools_of_torch(world):
    """One all-reduce's bytes of the matrices; a scheduler and a state of torch.distributed.checkpoint, saved on four shards for two."""
    model, zero = on_shards(four_shards(), Model(torch.float32))
    train_on_shards(model, zero, world.rank, range(2))
    matrices = [p for n, p in model.named_parameters() if n.startswith("layers") and n.endswith("weight")]
    assert zero.stats().bytes_sent == 2 * sum(p.numel() * 4 for p in matrices)
    assert zero.stats().collectives == 2 * 2 * 3  # three ranks own a square matrix each, the fourth three small ones
    assert isinstance(next(iter(zero.state.values()))["exp_avg"], DTensor)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, zero)}
    dcp.save(saved, checkpoint_id=world.folder / "of_four", process_group=world.group)
    other, again = on_shards(mesh_of(2, 2), Model(torch.float32))
    template = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, again)}
    dcp.load(template, checkpoint_id=world.folder / "of_four", process_group=world.group)
    other.load_state_dict(template["model"])
    set_optimizer_state_dict(other, again, template["optimizer"])
    assert same_bits(again.consolidated_state_dict(to=None)["state"], zero.consolidated_state_dict(to=None)["state"])
    before = {name: p.full_tensor() for name, p in other.named_parameters()}
    for group in again.param_groups:
        group["lr"] = 0.0
    assert same_bits(train_on_shards(other, again, world.rank, range(2, 3)), before)
    # Between the two shards of its owner there and back, and each half on to the other replica.
    every = sum(world.everyones(again.stats().bytes_sent))
    assert every == again.stats().steps * 4 * sum(p.numel() * 4 for p in matrices)


@cases.case
def test_on_shards_compressed_between_replicas(world):
    """Gradients are averaged between replicas by us, and each replica has owners of its own: dense, it is what FSDP does by itself."""
    mesh = mesh_of(2, 2)
    with without_casts():
        expected = train_on_shards(*on_shards(mesh), world.rank, range(3))
        model, zero = on_shards(mesh["shard"])
        gw.compress_replicas(model, gradwire.AllReduce(), mesh["replicate"])
        assert relative(train_on_shards(model, zero, world.rank, range(3)), expected) < 1e-9


@cases.case
def test_on_shards_what_cannot_be_done_is_refused_by_name(world):
    mesh = mesh_of(2, 2)
    model = shard(Model(), mesh)
    named = list(model.named_parameters())
    columns = shard(nn.Linear(8, 8), mesh["shard"], shard_placement_fn=lambda p: Shard(p.ndim - 1))
    half = nn.Sequential(shard(nn.Linear(8, 8), mesh["shard"]), nn.Linear(8, 8))
    muon = {"*.weight": MIXTURE["*.weight"], "*": MIXTURE["*"]}
    each = {
        "'scale' is a DTensor": (named, {"*": MIXTURE["*"]}, {}),
        "optimizer_class['head.*']=AdamW": (named, MIXTURE, {}),
        "average_gradients=True": (named, ON_SHARDS, {"average_gradients": True}),
        "master_dtype=": (named, ON_SHARDS, {"master_dtype": torch.float32}),
        "max_grad_norm=1.0": (named, ON_SHARDS, {"max_grad_norm": 1.0}),
        "process_group=": (named, ON_SHARDS, {"process_group": world.group}),
        "'bias' is no DTensor": (
            [("a.weight", half[0].weight), ("bias", half[1].bias)],
            muon,
            {},
        ),
        "'a.weight' is (Shard(dim=1),)": ([("a.weight", columns.weight), ("bias", columns.bias)], muon, {}),
    }
    for words, (params, rules, options) in each.items():
        heard = said(gw.ZeroOptimizer, params, rules, **options)
        assert words in heard, heard
    zero = gw.ZeroOptimizer(named, ON_SHARDS)
    for call in (zero.rank_state_dict, lambda: zero.sharded_state, lambda: zero.consolidate_state_dict(0)):
        assert "is of DTensors" in said(call)
    assert "no further parameter groups" in said(zero.add_param_group, {"params": []})
    train_on_shards(model, zero, world.rank, range(1))
    saved = zero.consolidated_state_dict(to=None)
    number = next(n for n, own in saved["state"].items() if "momentum_buffer" in own)
    first = saved["state"][number]["momentum_buffer"]
    for spoiled, words in ((first[1:], "'momentum_buffer' of parameter 'layers"), (first / 0, "holds NaN or inf")):
        saved["state"][number]["momentum_buffer"] = spoiled
        assert words in said(zero.load_state_dict, saved)
    assert "parameter groups" in said(zero.load_state_dict, {**saved, "param_groups": saved["param_groups"][1:]})


@cases.case
def test_master_weights_work_and_memory(world):
    """bfloat16 weights with float32 copies of what a rank owns; equal matrices are dealt out evenly."""
    wrapper, zero = sharded(Model(torch.bfloat16), world.group, "averaging", master_dtype=torch.float32)
    train(wrapper, zero, world.rank, range(2))
    tensors = [x for own in zero.optimizer.state.values() for x in own.values() if x.ndim]
    assert {x.dtype for x in tensors} == {torch.float32}
    assert world.agree(weights(wrapper))
    named = [(f"{i}.weight", nn.Parameter(torch.ones(16, 8))) for i in range(8)]
    muon = gw.ZeroOptimizer(named, {"*": (torch.optim.Muon, {}, "parameter")}, process_group=world.group)
    for _, p in named:
        p.grad = torch.zeros_like(p)
    muon.step()
    held = sum(own["momentum_buffer"].numel() for own in muon.optimizer.state.values())
    assert held == 8 * 16 * 8 / 4
    assert all(p.isfinite().all() for _, p in named)
    wide, long = ("0.weight", nn.Parameter(torch.ones(32, 32))), ("1.weight", nn.Parameter(torch.ones(2, 700)))
    others = [(f"{i}.weight", nn.Parameter(torch.ones(16, 32))) for i in range(2, 5)]
    # By elements the long one would be the first to be dealt out, and the square one would share no rank.
    both = gw.ZeroOptimizer([wide, long, *others], torch.optim.Muon, shard="parameter", process_group=world.group)
    assert both.shards.owners == {"0.weight": 0, "2.weight": 1, "3.weight": 2, "4.weight": 3, "1.weight": 1}


@cases.case
def test_one_step_sends_one_all_reduce(world):
    """Owners have matrices of several sizes, and some have none."""
    shapes = {"embedding": (64, 30), "0.weight": (32, 30), "1.weight": (30, 30), "2.weight": (8, 50), "bias": (40,)}
    model = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(torch.ones(s)) for name, s in shapes.items()})
    rules = {"*/weight": ("Muon", MUON, "parameter"), "*": (torch.optim.AdamW, VECTORS, "element")}
    options = {"process_group": world.group, "average_gradients": True}
    zero = gw.ZeroOptimizer(model.named_parameters(), rules, **options)
    zero.step()
    dense = sum(p.nbytes for p in model.values())
    assert dense <= zero.stats().bytes_sent <= 1.02 * dense
    assert zero.stats().dense_bytes == dense
    planned = gradwire.plan({n: tuple(p.shape) for n, p in model.items()}, gradwire.Zero(zero.shards))
    assert planned.wire_bytes == zero.stats().bytes_sent


FRONT = {
    "PowerSGD": lambda: gradwire.PowerSGD(1, min_compression_rate=0.5),
    "int8": lambda: gradwire.WireDtype(gradwire.AllReduce(), "int8"),
}


@cases.each(FRONT)
def test_behind_compressed_gradients_it_is_torchs_pair_to_the_last_bit(world, algorithm):
    """With torch's casts: all ranks are given the same average."""
    found = []
    for make in (plain_pair, lambda m: [gw.ZeroOptimizer(m.named_parameters(), MIXTURE, process_group=world.group)]):
        model = Model(torch.float32)
        ddp = DistributedDataParallel(model, process_group=world.group)
        handle = gw.register_comm_hook(ddp, algorithm())
        optimizers = make(model)
        train_with(ddp, optimizers, world.rank, 8)
        assert handle.stats().compression_ratio > 1.2
        found.append(weights(model))
    assert same_bits(*found)


def one(**changed):
    """The mixture with other entries."""
    return MIXTURE | changed


NAMED = list(Model().named_parameters())
#: optimizer_class, other options → words of the error.
REFUSED = {
    "unmatched": ({k: v for k, v in MIXTURE.items() if k != "*"}, {}, ["no pattern for", "layers.0.bias", "scale"]),
    "no parameter": ({"conv*": MIXTURE["*"], **MIXTURE}, {}, ["'conv*' matches no parameter"]),
    "all taken before": ({"*": MIXTURE["*"], "head.*": MIXTURE["head.*"]}, {}, ["'head.*' gets no parameter"]),
    "empty": ({}, {}, ["optimizer_class={}"]),
    "a pattern": ({3: MIXTURE["*"]}, {}, ["TypeError", "a key of optimizer_class=3"]),
    "two of three": (
        {"*": (torch.optim.AdamW, {})},
        {},
        ["TypeError", "optimizer_class['*']", "(class, options, shard)"],
    ),
    "options": (
        {"*": (torch.optim.AdamW, 3e-4, "element")},
        {},
        ["TypeError", "optimizer_class['*']", "options=0.0003"],
    ),
    "shard": (
        {"*": (torch.optim.AdamW, {}, "bucket")},
        {},
        ["optimizer_class['*']='bucket'", "'element', 'parameter'"],
    ),
    "class": ({"*": (nn.Linear, {}, "element")}, {}, ["TypeError", "optimizer_class['*']", "no class of optimizers"]),
    "muon in pieces": (one(**{"*.weight": (torch.optim.Muon, {}, "element")}), {}, ["Muon", "shard='parameter'"]),
    "muon of a vector": (
        {"*": (torch.optim.Muon, {}, "parameter")},
        {},
        ["optimizer_class['*']: Muon refuses 'scale'"],
    ),
    "lr": (one(**{"*.weight": ("Muon", {"lr": "fast"}, "parameter")}), {}, ["optimizer_class['*.weight']", "Muon"]),
    "an option of none": (
        one(**{"*": (torch.optim.AdamW, {"beta": 1}, "element")}),
        {},
        ["optimizer_class['*']", "beta"],
    ),
    "options beside": (MIXTURE, {"lr": 0.1}, ["TypeError", "lr=", "(class, options, shard)"]),
    "shard beside": (MIXTURE, {"shard": "parameter"}, ["TypeError", "shard=", "(class, options, shard)"]),
    "groups": (MIXTURE, {"params": [{"params": NAMED, "lr": 1.0}]}, ["TypeError", "named_parameters()"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(alone, name):
    optimizer_class, options, words = REFUSED[name]
    given = {"params": NAMED, "optimizer_class": optimizer_class} | options
    heard = said(gw.ZeroOptimizer, **given)
    assert heard.startswith(("TypeError", "ValueError", "UnmatchedPattern"))
    assert all(word in heard for word in words), heard


def test_a_torch_without_muon(alone, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    heard = said(gw.ZeroOptimizer, NAMED, MIXTURE)
    assert "no torch.optim.Muon" in heard
    assert torch.__version__ in heard


def test_hostile_states(alone):
    """A spoiled state, or that of another mixture, changes nothing; patterns for what is frozen make no group."""
    frozen = [(n, p.requires_grad_(not n.startswith("head"))) for n, p in Model().named_parameters()]
    zero = gw.ZeroOptimizer(frozen, MIXTURE)
    assert len(zero.param_groups) == 3
    zero = gw.ZeroOptimizer(Model().named_parameters(), MIXTURE)
    for name, p in zip(zero.names.values(), zero.names, strict=True):
        p.grad = torch.zeros_like(p) if name.endswith("weight") else torch.ones_like(p)
    zero.step()
    assert all(p.isfinite().all() for p in zero.names)
    before = zero.rank_state_dict()
    killed = zero.state_dict()
    muon = killed["param_groups"][2]["params"][0]
    killed["state"][muon]["momentum_buffer"][0] = float("nan")
    heard = said(zero.load_state_dict, killed)
    assert "'momentum_buffer' of parameter 'layers.0.weight' holds NaN" in heard
    other = gw.ZeroOptimizer(Model().named_parameters(), {"*": MIXTURE["*"]})
    assert "parameter groups" in said(zero.load_state_dict, other.state_dict())
    same = {pattern: (*entry[:2], "parameter") for pattern, entry in MIXTURE.items()}
    elsewhere = gw.ZeroOptimizer(Model().named_parameters(), same)
    assert "Load gradwire.torch_backend.consolidate" in said(elsewhere.load_state_dict, before)
    assert same_bits(zero.rank_state_dict()["tensors"], before["tensors"])
    # After loading a schedule still reaches all parts.
    zero.load_state_dict(zero.state_dict())
    start = [p.detach().clone() for p in zero.names]
    for group in zero.param_groups:
        group["lr"] = 0.0
    zero.step()
    assert all(torch.equal(p, x) for p, x in zip(zero.names, start, strict=True))
