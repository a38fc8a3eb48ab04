"""What cannot work says so by name, on every rank, before anything is changed."""

import copy
import functools
import operator
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, PowerSGD, WireDtype
from tests.torch.compare import said, same_bits
from tests.torch.models import Layers, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import hooked, train

pytestmark = pytest.mark.usefixtures("alone")

cases = Cases(__file__, ranks=2)

WIDTHS = (40, 36, 36, 28)
LOSS = loss_on(40)


def words(sparse):
    inner = nn.ModuleDict({"words": nn.Embedding(50, 32, sparse=sparse)})
    return Layers(lambda self, x: self.out(self.inner["words"](x)), inner=inner, out=nn.Linear(32, 32))


#: By rank: the model, the algorithm. And what the error says, of ranks that differ and of a rank that cannot take part.
DIFFERENT = {
    "ranks": (lambda r: (mlp(*WIDTHS), PowerSGD(rank=1 + r)), "algorithm"),
    "algorithms": (lambda r: (mlp(*WIDTHS), [PowerSGD(rank=2), AllReduce()][r]), "algorithm"),
    "message_bytes": (lambda r: (mlp(*WIDTHS), PowerSGD(rank=2)), "message_bytes"),
    "names": (lambda r: ([mlp(*WIDTHS), Layers(body=mlp(*WIDTHS))][r], PowerSGD(rank=2)), "parameters"),
    "frozen parameters": (
        lambda r: (mlp(*WIDTHS, frozen=[2]) if r else mlp(*WIDTHS[:2], *WIDTHS[3:]), PowerSGD(rank=2)),
        "parameters",
    ),
    "sparse gradients": (
        lambda r: (words(sparse=r == 1), PowerSGD(rank=2)),
        "parameter 'inner.words.weight' has sparse gradients; build 'inner.words' with sparse=False",
    ),
    "buckets of their own": (
        lambda r: (mlp(*WIDTHS), WireDtype(AllReduce(8), "float16") if r else AllReduce()),
        "bucket_bytes=8 of WireDtype(algorithm=AllReduce(bucket_bytes=8), dtype='float16') means nothing here, where gradients arrive in "
        "buckets already; set their size with bucket_cap_mb, of DistributedDataParallel or DataParallel",
    ),
    "hooks": (
        lambda r: (mlp(*WIDTHS), PowerSGD(rank=2)),
        "ddp has a communication hook already, and DDP takes only one; wrap the model anew to change it",
    ),
}


@cases.each({name: (name, *value) for name, value in DIFFERENT.items()})
def test_ranks_that_differ_all_learn_of_it(world, variant):
    name, make, words = variant
    model, algorithm = make(world.rank)
    ddp, _ = hooked(model, None, world.group)  # DDP compares shapes itself, with its own error on some of the ranks
    if name == "hooks" and world.rank == 1:
        ddp.register_comm_hook(world.group, default_hooks.allreduce_hook)
    hooks = len(ddp._comm_hooks)
    message_bytes = 1000 + world.rank if name == "message_bytes" else 1000
    heard = said(gw.register_comm_hook, ddp, algorithm, message_bytes=message_bytes)
    assert heard.startswith("ValueError: ")
    assert words in heard
    if heard != f"ValueError: {words}":  # a rank that is itself the cause says what it is, the others say whose
        assert re.search(r"rank 1 cannot take part|others {1: ", heard)
    assert len(ddp._comm_hooks) == hooks
    # The group is as good as before.
    total = torch.ones(1)
    dist.all_reduce(total, group=world.group)
    assert float(total) == 2


@cases.case
def test_after_a_refusal_the_same_wrapper_can_be_used(world):
    ddp, _ = hooked(mlp(*WIDTHS), None, world.group)
    assert said(gw.register_comm_hook, ddp, PowerSGD(rank=1 + world.rank))
    handle = gw.register_comm_hook(ddp, PowerSGD(rank=2))
    assert world.agree(train(ddp, LOSS, 2, local=False).weights)
    assert handle.stats().compression_ratio > 2


class WithoutRepr(AllReduce):
    __repr__ = object.__repr__


def with_phase():
    return Layers(inner=nn.Linear(40, 36), phase=nn.Parameter(torch.zeros(36, dtype=torch.complex64)))


REFUSED = {
    "sparse embedding": (lambda: words(sparse=True), PowerSGD(rank=2), "'inner.words.weight' has sparse gradients"),
    "an embedding by itself": (
        lambda: nn.Embedding(4, 3, sparse=True),
        PowerSGD(rank=2),
        "'weight' has sparse gradients; build the Embedding with sparse=False",
    ),
    "unknown pattern": (lambda: mlp(*WIDTHS), PowerSGD(rank={"conv*": 2, "*": 4}), "'conv*' matches no parameter"),
    "nothing to know an algorithm by": (lambda: mlp(*WIDTHS), WithoutRepr(), "WithoutRepr has no repr"),
    "complex parameter": (with_phase, PowerSGD(rank=2), "'phase' has dtype complex64"),
    "complex parameter, uncompressed": (with_phase, AllReduce(), "'phase' has dtype complex64"),
    "complex parameter, wire dtype": (with_phase, WireDtype(AllReduce(), "float16"), "'phase' has dtype complex64"),
}


@pytest.mark.parametrize(("make", "algorithm", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_served_is_refused_by_name(make, algorithm, message):
    ddp = DistributedDataParallel(make())
    with pytest.raises(ValueError, match=re.escape(message)):
        gw.register_comm_hook(ddp, algorithm)
    assert not ddp._comm_hooks


def test_only_a_wrapped_model_can_be_hooked():
    with pytest.raises(TypeError, match=r"ddp is a Sequential; wrap the model first: DistributedDataParallel\(model\)"):
        gw.register_comm_hook(mlp(*WIDTHS), PowerSGD(rank=2))


@pytest.mark.parametrize("whose", ["gradwire's", "torch's"])
def test_a_second_hook_is_refused_and_the_first_goes_on(whose):
    ddp, twin = (hooked(mlp(*WIDTHS), PowerSGD(rank=2) if whose == "gradwire's" else None)[0] for _ in range(2))
    if whose == "torch's":
        for each in (ddp, twin):
            each.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match="ddp has a communication hook already"):
        gw.register_comm_hook(ddp, AllReduce())
    assert same_bits(train(ddp, LOSS, 3).given, train(twin, LOSS, 3).given)


def test_ddps_own_mixed_precision_is_named():
    from torch.nn.parallel.distributed import _MixedPrecision

    ddp = DistributedDataParallel(mlp(*WIDTHS), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"mixed_precision=.*autocast"):
        gw.register_comm_hook(ddp, AllReduce())


@pytest.mark.parametrize("hook", [gw.powerSGD_hook, gw.batched_powerSGD_hook, gw.allreduce_hook])
def test_sparse_gradients_are_refused_by_torchs_names_in_the_first_step(hook):
    ddp = DistributedDataParallel(words(sparse=True))
    ddp.register_comm_hook(None if hook is gw.allreduce_hook else gw.PowerSGDState(None, 2, 0), hook)
    with pytest.raises(ValueError, match="the gradient is sparse; make it dense"):
        ddp(torch.arange(4)).sum().backward()


def test_a_state_serves_one_hook_only():
    state = gw.PowerSGDState(None, 2, 0)
    (ddp, _), (other, _) = hooked(mlp(*WIDTHS)), hooked(mlp(*WIDTHS))
    ddp.register_comm_hook(state, gw.powerSGD_hook)
    other.register_comm_hook(state, gw.batched_powerSGD_hook)
    train(ddp, LOSS, 1)
    with pytest.raises(ValueError, match="one state per hook"):
        train(other, LOSS, 1)


def test_float64_is_served():
    _, handle = hooked(mlp(*WIDTHS).double(), PowerSGD(rank=2))
    assert {x.dtype for m in handle.rank_state_dict()["tensors"].values() for x in m.values()} == {torch.float64}


def change(path, value):
    def changed(state):
        state = copy.deepcopy(state)
        *parents, last = path
        place = functools.reduce(operator.getitem, parents, state)
        place.pop(last) if value is None else place.update({last: value})
        return state

    return changed


WRONG_STATES = {
    "another algorithm": (change(["algorithm"], "PowerSGD(rank=4)"), r"the state is of PowerSGD\(rank=4\), not of"),
    "another format": (change(["format"], 3), "format 3; this version reads format 1"),
    "another kind": (
        change(["kind"], "local_sgd"),
        "the state is local SGD's, for its handle; here an algorithm's memory is wanted",
    ),
    "no format": (change(["format"], None), "it lacks .*format"),
    "no memory": (change(["tensors"], None), "it lacks .*tensors"),
    "one parameter more": (change(["tensors", "6.weight"], {}), "parameters '6.weight' only there"),
    "one parameter less": (change(["tensors", "0.weight"], None), "parameters '0.weight' only here"),
    "another shape": (
        change(["tensors", "2.weight", "error"], torch.zeros(36, 35)),
        r"memory of parameter '2.weight' is .*\(36, 35\).* in the state, .*\(36, 36\)",
    ),
    "another rank": (change(["tensors", "4.weight", "q"], torch.zeros(3, 36)), "memory of parameter '4.weight'"),
    "a memory less": (change(["tensors", "4.weight", "q"], None), "memory of parameter '4.weight'"),
    "a memory that is no tensor": (change(["tensors", "4.weight", "q"], [[0.0] * 36] * 2), "parameter '4.weight'"),
    "another dtype": (
        change(["tensors", "4.weight", "q"], torch.zeros(2, 36, dtype=torch.int64)),
        "memory of parameter '4.weight'",
    ),
    "other shared state": (change(["shared", "clock"], torch.tensor(1)), "shared state .*clock"),
    "shared state of another shape": (change(["shared", "phase"], torch.zeros(2)), "shared state .*phase"),
    "a step that is no number": (change(["step"], "many"), "step='many'"),
    "a negative step": (change(["step"], -1), "step=-1"),
}


@pytest.mark.parametrize(("changed", "message"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(changed, message):
    (ddp, handle), (twin, _), (other, source) = (
        hooked(mlp(*WIDTHS), PowerSGD(rank=2, half_step=True)) for _ in range(3)
    )
    for each, steps in ((ddp, 3), (twin, 3), (other, 6)):
        train(each, LOSS, steps, local=False)
    before = handle.rank_state_dict()
    with pytest.raises(ValueError, match=message):
        handle.load_state_dict(changed(source.rank_state_dict()))
    assert same_bits(handle.rank_state_dict(), before)
    assert same_bits(*(train(each, LOSS, range(3, 6), local=False).weights for each in (ddp, twin)))
