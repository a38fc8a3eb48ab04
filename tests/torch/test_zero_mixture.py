"""Muon for hidden matrices and AdamW for the rest in one sharded optimizer: the plain pair, on any
number of ranks. What is refused alone: test_refusals.py.

The oracle is torch's own pair on the average of all ranks' gradients, in float64. Torch's Muon
casts to bfloat16, in which a last bit of a gradient is soon a hundredth of a weight; so the casts
are left out on both sides, but where both are given the same gradients.
"""

from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import cache
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradwire
import gradwire.torch_backend as gw
from gradwire.torch_backend import torch_internals
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.ranks import Cases
from tests.torch.sharded import mesh_of, shard

cases = Cases(__file__, ranks=4)

MUON, VECTORS, HEADS = (
    {"lr": 0.02, "weight_decay": 0.1},
    {"lr": 0.01, "weight_decay": 0.0},
    {"lr": 0.005},
)
MIXTURE = {
    "embedding.*": (torch.optim.AdamW, HEADS, "element"),
    "head.*": (torch.optim.AdamW, HEADS, "parameter"),
    "*.weight": ("Muon", MUON, "parameter"),
    "*": (torch.optim.AdamW, VECTORS, "element"),
}
ON_SHARDS = MIXTURE | {"head.*": (torch.optim.AdamW, HEADS, "element")}


class Model(nn.Module):
    """Three matrices of one shape, others, one of a single row, vectors, and a frozen one."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(
            nn.Linear(n, m) for n, m in ((6, 9), (9, 9), (9, 9), (9, 9), (9, 1), (1, 5))
        )
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
    """Torch's optimizers, one for each pattern, by the order of patterns. Where torch has no Muon,
    its lack is said as `ZeroOptimizer` says it."""
    torch_internals.MUON.require()
    hidden = [
        (n, p)
        for n, p in model.named_parameters()
        if n.startswith("layers") and n.endswith("weight")
    ]
    vectors = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.ndim == 1]
    return [
        torch.optim.AdamW(model.embedding.named_parameters(prefix="embedding"), **HEADS),
        torch.optim.AdamW(model.head.named_parameters(prefix="head"), **HEADS),
        torch.optim.Muon(hidden, **MUON),
        torch.optim.AdamW(vectors, **VECTORS),
    ]


def clip_to(limit, model, norm_of):
    """Not `clip_grad_norm_`, whose norm is 1e-6 more."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    factor = float((limit / norm_of(gradients)).clamp(max=1))
    torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], factor)


def plainly(model, size, steps, clip=None, parts=1, pair=None):
    """The pair on what all ranks have, and the pair. Nothing is sent."""
    pair = pair or plain_pair(model)
    for step in steps:
        model.zero_grad()
        for part in range(parts):
            for rank in range(size):
                (loss(model, rank, step * parts + part) / parts / size).backward()
        if clip:
            clip_to(
                clip, model, lambda gradients: torch.cat([g.flatten() for g in gradients]).norm()
            )
        for optimizer in pair:
            optimizer.step()
    return weights(model), pair


def sharded(model, group, form, **options):
    options = {"process_group": group, "bucket_cap_mb": 0.001} | options
    if form == "averaging":
        return model, gw.ZeroOptimizer(
            model.named_parameters(), MIXTURE, average_gradients=True, **options
        )
    wrapper = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001)
    zero = gw.ZeroOptimizer(model.named_parameters(), MIXTURE, **options)
    if form != "plain":
        hook = (
            gw.hook_with_zero_step if form == "overlapped" else gw.hook_with_zero_step_interleaved
        )
        wrapper.register_comm_hook(group, hook(gw.allreduce_hook, wrapper, zero))
    return wrapper, zero


def train(wrapper, zero, rank, steps, parts=1, clip=None):
    """The weights after training, whole. `clip`: by hand, of shards."""
    for step in steps:
        zero.zero_grad()
        for part in range(parts):
            last = part == parts - 1
            with nullcontext() if last or not hasattr(wrapper, "no_sync") else wrapper.no_sync():
                (loss(wrapper, rank, step * parts + part) / parts).backward()
        if clip:
            clip_to(
                clip, wrapper, lambda gradients: nn.utils.get_total_norm(gradients).full_tensor()
            )
        zero.step()
    found = {n.removeprefix("module."): p.detach().clone() for n, p in wrapper.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in found.items()}


def smaller(world, size):
    """A group of the first ranks, or None on the others. On all ranks."""
    group = dist.new_group(list(range(size)), use_local_synchronization=False)
    return group if world.rank < size else None


#: Form → on how many ranks, and the norm to which it clips, where it knows one.
FORMS = {"plain": (4, 0.3), "averaging": (2, 0.3), "overlapped": (3, 0.3), "interleaved": (4, None)}


@cases.each({form: (form, *how) for form, how in FORMS.items()}, slow=FORMS)
def test_fifty_steps_are_the_plain_pairs(world, variant):
    """With accumulation. Not one parameter drifts, and the state, whole, is the pair's."""
    form, size, clip = variant
    if (group := smaller(world, size)) is None:
        return
    with without_casts():
        wrapper, zero = sharded(Model(), group, form, max_grad_norm=clip)
        found, everyones = train(wrapper, zero, world.rank, range(50), 2), [{}] * size
        dist.all_gather_object(everyones, found, group=group)
        whole = zero.consolidated_state_dict(to=None)
        if world.rank == 0:
            expected, pair = plainly(Model(), size, range(50), clip, 2)
            assert relative(expected, weights(Model())) > 0.3
            assert all(same_bits(each, found) for each in everyones)
            require_the_pairs(found, expected, pair, whole)


def require_the_pairs(found, expected, pair, whole):
    """Weights, and one state that is the pair's, group by group."""
    assert {n: far for n in found if (far := relative(found[n], expected[n])) > 1e-9} == {}
    for optimizer, group in zip(pair, whole["param_groups"], strict=True):
        plain = optimizer.state_dict()
        (of_the_pair,) = plain["param_groups"]
        any_order = {"params": None, "param_names": None}
        assert group | any_order == of_the_pair | any_order
        numbers = dict(zip(group["param_names"], group["params"], strict=True))
        assert numbers.keys() == set(of_the_pair["param_names"])
        for number, own in plain["state"].items():
            theirs = whole["state"][numbers[of_the_pair["param_names"][number]]]
            assert theirs.keys() == own.keys()
            assert all(
                torch.allclose(theirs[k].double(), x.double(), rtol=1e-7, atol=1e-12)
                for k, x in own.items()
            )


@cache
def four_shards():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))


def on_shards(mesh, model=None, order=list):
    """Each layer a unit of its own, of which some matrices have fewer rows than there are
    shards."""
    model = shard(model or Model(), mesh)
    return model, gw.ZeroOptimizer(order(list(model.named_parameters())), ON_SHARDS)


@cases.case(slow=True)
def test_on_shards_it_is_the_plain_pair(world):
    """With accumulation and clipping; the state, whole, is the pair's, and goes on where matrices
    have other owners, and parameters come in another order."""
    with without_casts():
        expected, pair = plainly(Model(), 4, range(8), 0.3, 2)
        model, zero = on_shards(mesh_of(2, 2))
        half = train(model, zero, world.rank, range(4), 2, 0.3)
        saved, fresh = zero.consolidated_state_dict(to=None), Model()
        fresh.load_state_dict(half)
        model, zero = on_shards(four_shards(), fresh, reversed)
        zero.load_state_dict(saved)
        found = train(model, zero, world.rank, range(4, 8), 2, 0.3)
        whole = zero.consolidated_state_dict(to=None)
        natively = get_optimizer_state_dict(
            model, zero, options=StateDictOptions(full_state_dict=True)
        )
    require_the_pairs(found, expected, pair, whole)
    if world.rank == 0:
        for group in whole["param_groups"]:
            for number, name in zip(group["params"], group["param_names"], strict=True):
                assert same_bits(natively["state"][name], whole["state"][number])


@cases.case(slow=True)
def test_on_shards_one_message_each_way_and_the_tools_of_torch(world):
    """One all-reduce's bytes of the matrices; a scheduler and a state of
    torch.distributed.checkpoint, saved on four shards for two."""
    model, zero = on_shards(four_shards(), Model(torch.float32))
    train(model, zero, world.rank, range(2))
    matrices = [
        p for n, p in model.named_parameters() if n.startswith("layers") and n.endswith("weight")
    ]
    nbytes = sum(p.numel() * 4 for p in matrices)
    assert zero.stats().bytes_sent == 2 * nbytes
    # three ranks own a square matrix each, the fourth three small ones
    assert zero.stats().collectives == 2 * 2 * 3
    assert isinstance(next(iter(zero.state.values()))["exp_avg"], DTensor)
    where = {"checkpoint_id": world.folder / "of_four", "process_group": world.group}
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, zero)}, **where
    )
    other, again = on_shards(mesh_of(2, 2), Model(torch.float32))
    loaded = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, again)}
    dcp.load(loaded, **where)
    other.load_state_dict(loaded["model"])
    set_optimizer_state_dict(other, again, loaded["optimizer"])
    assert same_bits(
        again.consolidated_state_dict(to=None)["state"],
        zero.consolidated_state_dict(to=None)["state"],
    )
    before = train(other, again, world.rank, ())
    for group in again.param_groups:
        group["lr"] = 0.0
    assert same_bits(train(other, again, world.rank, range(2, 3)), before)
    # Between the two shards of its owner there and back, and each half on to the other replica.
    assert sum(world.everyones(again.stats().bytes_sent)) == again.stats().steps * 4 * nbytes


@cases.case(slow=True)
def test_on_shards_a_state_that_does_not_fit_is_refused_and_changes_nothing(world):
    model, zero = on_shards(four_shards(), Model(torch.float32))
    train(model, zero, world.rank, range(2))
    whole = zero.consolidated_state_dict(to=None)

    class Renamed(Model):
        def __init__(self):
            super().__init__(torch.float32)
            self.gain = self.scale
            del self.scale

    other = shard(Renamed(), four_shards())
    renamed = gw.ZeroOptimizer(list(other.named_parameters()), ON_SHARDS)
    of_adam = torch.optim.AdamW(
        [{"params": [p for _, p in group]} for group in named_groups(model)], lr=0.1
    )
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    of_adam.step()
    stray = {**whole, "state": whole["state"] | {99: {}}}
    for words, optimizer, state in (
        ("only in the state: 'scale', only here: 'gain'", renamed, whole),
        (
            "Muon cannot step with the state of parameter 'layers.0.weight'",
            zero,
            of_adam.state_dict(),
        ),
        ("the state holds that of parameter 99, of no group", zero, stray),
    ):
        before = optimizer.consolidated_state_dict(to=None)
        assert words in (heard := said(optimizer.load_state_dict, state)), heard
        assert same_bits(optimizer.consolidated_state_dict(to=None), before)


def named_groups(model):
    """The parameters of each pattern, as they are ordered."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = {pattern: [] for pattern in ON_SHARDS}
    for n, p in named:
        groups[next(pattern for pattern in ON_SHARDS if fnmatchcase(n, pattern))].append((n, p))
    return list(groups.values())


@cases.case(slow=True)
def test_full_precision_of_an_earlier_run_is_no_weight_of_this_one(world):
    """Neither where one without it, on shards, has taken its state over, nor where that one's is
    loaded without it."""
    full = {"master_dtype": torch.float32, "process_group": world.group}
    first = Model(torch.bfloat16)
    zero = gw.ZeroOptimizer(first.named_parameters(), MIXTURE, average_gradients=True, **full)
    train(first, zero, world.rank, range(2))
    saved = zero.consolidated_state_dict(to=None)
    model, on = on_shards(four_shards(), first)
    on.load_state_dict(saved)
    assert all("master" not in own for own in on.consolidated_state_dict(to=None)["state"].values())
    now = train(model, on, world.rank, range(2, 4))
    last = Model(torch.bfloat16)
    last.load_state_dict(now)
    plain = gw.ZeroOptimizer(last.named_parameters(), MIXTURE, process_group=world.group)
    plain.load_state_dict(saved)
    assert same_bits(weights(last), now)


@cases.case(slow=True)
def test_on_shards_work_is_divided_over_all_patterns_and_rates_may_end_below_zero(world):
    """And who counts steps of optimizers sees those of its parts."""
    torch.manual_seed(0)
    model = shard(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))), four_shards())
    each = {f"{i}.*": ("Muon", {"lr": 0.1 * (i + 1)}, "parameter") for i in range(4)}
    zero = gw.ZeroOptimizer(list(model.named_parameters()), each)
    steps = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(optimizer))
    for sign in (1, -1):
        for group in zero.param_groups:
            group["lr"] = sign * abs(group["lr"])
        model(torch.ones(2, 8)).square().sum().backward()
        zero.step()
    hook.remove()
    # a message there and one back for each pattern; the matrix of each is another rank's
    owners = {r for part in zero._sharded.parts for r, own in enumerate(part._owned) if own}
    assert owners == {0, 1, 2, 3}
    assert not any(type(each) is torch.optim.Muon for each in steps)
    assert all(p.full_tensor().isfinite().all() for p in model.parameters())


@cases.case(slow=True)
def test_on_shards_compressed_between_replicas(world):
    """Gradients are averaged between replicas by us, and each replica has owners of its own: dense,
    it is what FSDP does by itself."""
    mesh = mesh_of(2, 2)
    with without_casts():
        expected = train(*on_shards(mesh), world.rank, range(3))
        model, zero = on_shards(mesh["shard"])
        gw.compress_replicas(model, gradwire.AllReduce(), mesh["replicate"])
        assert relative(train(model, zero, world.rank, range(3)), expected) < 1e-9


@cases.case(slow=True)
def test_on_shards_what_cannot_be_done_is_refused_by_name(world):
    mesh = mesh_of(2, 2)
    model = shard(Model(), mesh)
    named = list(model.named_parameters())
    columns = shard(nn.Linear(8, 8), mesh["shard"], shard_placement_fn=lambda p: Shard(p.ndim - 1))
    whole = ("bias", nn.Linear(8, 8).bias)
    muon = {"*.weight": MIXTURE["*.weight"], "*": MIXTURE["*"]}
    two_modes = type(
        "ScheduleFree", (torch.optim.SGD,), {"train": lambda self: None, "eval": lambda self: None}
    )
    for words, params, rules, options in (
        ("'scale' is a DTensor", named, {"*": MIXTURE["*"]}, {}),
        ("optimizer_class['head.*']=AdamW", named, MIXTURE, {}),
        (
            "'*']=ScheduleFree: ScheduleFree has train() and eval()",
            named,
            {**muon, "*": (two_modes, {}, "element")},
            {},
        ),
        ("average_gradients=True", named, ON_SHARDS, {"average_gradients": True}),
        ("master_dtype=", named, ON_SHARDS, {"master_dtype": torch.float32}),
        ("max_grad_norm=1.0", named, ON_SHARDS, {"max_grad_norm": 1.0}),
        ("process_group=", named, ON_SHARDS, {"process_group": world.group}),
        (
            "'bias' is no DTensor",
            [("a.weight", shard(nn.Linear(8, 8), mesh["shard"]).weight), whole],
            muon,
            {},
        ),
        (
            "'a.weight' is (Shard(dim=1),)",
            [("a.weight", columns.weight), ("bias", columns.bias)],
            muon,
            {},
        ),
    ):
        assert words in (heard := said(gw.ZeroOptimizer, params, rules, **options)), heard
    zero = gw.ZeroOptimizer(named, ON_SHARDS)
    for call in (
        zero.rank_state_dict,
        lambda: zero.sharded_state,
        lambda: zero.consolidate_state_dict(0),
    ):
        assert "is of DTensors" in said(call)
    assert "no further parameter groups" in said(zero.add_param_group, {"params": []})
    train(model, zero, world.rank, range(1))
    saved = zero.consolidated_state_dict(to=None)
    number = next(n for n, own in saved["state"].items() if "momentum_buffer" in own)
    first = saved["state"][number]["momentum_buffer"]
    for spoiled, words in (
        (first[1:], "'momentum_buffer' of parameter 'layers"),
        (first / 0, "holds NaN or inf"),
    ):
        saved["state"][number]["momentum_buffer"] = spoiled
        assert words in said(zero.load_state_dict, saved)
    assert "parameter groups" in said(
        zero.load_state_dict, {**saved, "param_groups": saved["param_groups"][1:]}
    )


@cases.case(slow=True)
def test_master_weights_and_who_owns_which_matrix(world):
    """bfloat16 weights with float32 copies of what a rank owns; equal matrices are dealt out
    evenly."""
    wrapper, zero = sharded(
        Model(torch.bfloat16), world.group, "averaging", master_dtype=torch.float32
    )
    train(wrapper, zero, world.rank, range(2))
    assert {x.dtype for own in zero.optimizer.state.values() for x in own.values() if x.ndim} == {
        torch.float32
    }
    assert world.agree(weights(wrapper))
    # By elements the long one would be the first to be dealt out, and the square one would share no
    # rank.
    shapes = ((32, 32), (2, 700), (16, 32), (16, 32), (16, 32))
    owned = {"0.weight": 0, "1.weight": 1, "2.weight": 1, "3.weight": 2, "4.weight": 3}
    for matrices, owners in ([(16, 8)] * 8, None), (shapes, owned):
        named = [
            (f"{i}.weight", nn.Parameter(torch.ones(shape))) for i, shape in enumerate(matrices)
        ]
        muon = gw.ZeroOptimizer(
            named, torch.optim.Muon, shard="parameter", process_group=world.group
        )
        for _, p in named:
            p.grad = torch.zeros_like(p)
        muon.step()
        assert all(p.isfinite().all() for _, p in named)
        held = sum(own["momentum_buffer"].numel() for own in muon.optimizer.state.values())
        assert muon.shards.owners == owners if owners else held == 8 * 16 * 8 / 4


@cases.case(slow=True)
def test_behind_compressed_gradients_it_is_torchs_pair_to_the_last_bit(world):
    """With torch's casts: all ranks are given the same average."""
    found = []
    for make in (
        plain_pair,
        lambda m: [gw.ZeroOptimizer(m.named_parameters(), MIXTURE, process_group=world.group)],
    ):
        model = Model(torch.float32)
        ddp = DistributedDataParallel(model, process_group=world.group)
        handle = gw.register_comm_hook(ddp, gradwire.PowerSGD(1, min_compression_rate=0.5))
        optimizers = make(model)
        for step in range(8):
            ddp.zero_grad()
            loss(ddp, world.rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert handle.stats().compression_ratio > 1.2
        found.append(weights(model))
    assert same_bits(*found)


def test_hostile_states_and_a_torch_without_muon(alone, monkeypatch):
    """A spoiled state, or that of another mixture, changes nothing; patterns for what is frozen
    make no group."""

    def of(model, rules=MIXTURE):
        return gw.ZeroOptimizer(model.named_parameters(), rules)

    frozen = Model()
    frozen.head.requires_grad_(False)
    assert len(of(frozen).param_groups) == 3
    zero = of(Model())
    for p, name in zero.names.items():
        p.grad = torch.zeros_like(p) if name.endswith("weight") else torch.ones_like(p)
    zero.step()
    assert all(p.isfinite().all() for p in zero.names)
    before, killed = zero.rank_state_dict(), zero.state_dict()
    killed["state"][killed["param_groups"][2]["params"][0]]["momentum_buffer"][0] = float("nan")
    assert "'momentum_buffer' of parameter 'layers.0.weight' holds NaN" in said(
        zero.load_state_dict, killed
    )
    assert "parameter groups" in said(
        zero.load_state_dict, of(Model(), {"*": MIXTURE["*"]}).state_dict()
    )
    same = {pattern: (*entry[:2], "parameter") for pattern, entry in MIXTURE.items()}
    assert "Load gradwire.torch_backend.consolidate" in said(
        of(Model(), same).load_state_dict, before
    )
    assert same_bits(zero.rank_state_dict()["tensors"], before["tensors"])
    # After loading a schedule still reaches all parts.
    zero.load_state_dict(zero.state_dict())
    start = [p.detach().clone() for p in zero.names]
    for group in zero.param_groups:
        group["lr"] = 0.0
    zero.step()
    assert same_bits([p.detach() for p in zero.names], start)
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert "needs torch.optim.Muon, which torch has since 2.9; this is torch 2.8.0" in said(
        of, Model()
    )


@cases.case
def test_it_goes_on_on_another_number_of_ranks(world):
    """Four ranks, then two, then the plain pair; the state of no step is altered."""
    with without_casts():
        expected, _ = plainly(Model(), 2, range(9))
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
        assert relative(plainly(model, 2, range(6, 9), pair=pair)[0], expected) < 1e-9


@cases.case
def test_one_step_sends_one_all_reduce(world):
    """Owners have matrices of several sizes, and some have none."""
    shapes = {
        "embedding": (64, 30),
        "0.weight": (32, 30),
        "1.weight": (30, 30),
        "2.weight": (8, 50),
        "bias": (40,),
    }
    model = nn.ParameterDict(
        {name.replace(".", "/"): nn.Parameter(torch.ones(s)) for name, s in shapes.items()}
    )
    rules = {"*/weight": ("Muon", MUON, "parameter"), "*": (torch.optim.AdamW, VECTORS, "element")}
    options = {"process_group": world.group, "average_gradients": True}
    zero = gw.ZeroOptimizer(model.named_parameters(), rules, **options)
    zero.step()
    dense = sum(p.nbytes for p in model.values())
    assert dense <= zero.stats().bytes_sent <= 1.02 * dense
    assert zero.stats().dense_bytes == dense
    planned = gradwire.plan(
        {n: tuple(p.shape) for n, p in model.items()}, gradwire.Zero(zero.shards)
    )
    assert planned.wire_bytes == zero.stats().bytes_sent
