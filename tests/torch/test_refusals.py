"""What cannot work is refused by name before anything is changed: here what one rank is enough for.
The tables are by the exception's type."""

import copy
import functools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import gradwire.torch_backend as gw
from gradwire import (
    AllReduce,
    LocalSGD,
    PowerSGD,
    TwoLevel,
    WireDtype,
    Zero,
    diloco,
    shard_by_parameter,
)
from gradwire.core.protocol import mean, optimizer_step, together
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.fsdp.replicas import refuse_levels
from gradwire.torch_backend.integrations.compression import Compression
from tests.torch.compare import said
from tests.torch.models import Branches, mlp
from tests.torch.refused import (
    ALGORITHM,
    LOSS,
    Here,
    asking,
    embedding,
    lazy,
    on_meta,
    refuse,
    rows,
    small,
    stepping,
    with_phase,
    words,
)
from tests.torch.training import fit, hooked, sgd, train


class WithoutRepr(AllReduce):
    __repr__ = object.__repr__


ZERO = Zero(shard_by_parameter(specs_of(dict(small().named_parameters())), 1))


class Unheard:
    def __await__(self):
        yield "something"


ADAM = (torch.optim.AdamW, {}, "element")
MIXTURE = {"0.*": ADAM, "*.weight": ("Muon", {}, "parameter"), "*": ADAM}


def mixed(changed, **options):
    return lambda h: h.zero(optimizer=changed, **options)


def of_params(params):
    return lambda h: partial(gw.ZeroOptimizer, params, torch.optim.AdamW)


class Wrapper(torch.optim.Optimizer):
    """A tool's optimizer that has hooks no more than accelerate's."""

    def __init__(self, optimizer):
        self.inner = optimizer

    @property
    def param_groups(self):
        return self.inner.param_groups


#: Cannot be tried without data, for what it does with the tensors.
UNTRIED = asking(lambda _, gradients: together([mean(gradients["w"].sign()), optimizer_step({})]))
type(UNTRIED).portable = False
DOORS = {
    "hook": Here.hook,
    "DataParallel": Here.parallel,
    "Averager": lambda h, model, a: h.averager(
        {n: p for n, p in model.named_parameters() if p.requires_grad}, a
    ),
    "local_sgd": lambda h, model, a: h.local(diloco(4, compressor=a), model),
    "ZeroOptimizer": lambda h, model, _: h.zero(model),
    "ZeroRedundancyOptimizer": lambda h, model, _: partial(
        gw.ZeroRedundancyOptimizer, model.named_parameters(), torch.optim.AdamW
    ),
}


def at(doors, make, algorithm, *names):
    """A row for each of these doors."""
    return [
        (lambda h, door=door: DOORS[door](h, make(), algorithm), *names) for door in doors.split()
    ]


def wrong(doors, option, *values):
    """Rows for an option of these doors."""
    each = {"hook": Here.hook, "DataParallel": Here.parallel}
    return [
        (
            lambda h, door=door, x=x: each[door](h, small(), ALGORITHM, **{option: x}),
            f"{option}={x!r}",
        )
        for door in doors.split()
        for x in values
    ]


DENSE, AVERAGING, ALL = (
    "hook DataParallel",
    "hook DataParallel Averager",
    "hook DataParallel Averager local_sgd",
)
LAZY = "DataParallel Averager local_sgd ZeroOptimizer ZeroRedundancyOptimizer"


def hooked_already(algorithm):
    """A DDP that has our hook, or torch's."""

    def prepared(h):
        ddp = h.ddp()
        if algorithm is None:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        else:
            gw.register_comm_hook(ddp, algorithm)
        return partial(gw.register_comm_hook, ddp, AllReduce())

    return prepared


def in_the_reducer(h):
    ddp = h.ddp(find_unused_parameters=True)
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return partial(gw.register_comm_hook, ddp, ALGORITHM)


def without_buckets(h):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return h.hook(small(), ALGORITHM)


def mixed_precision(h):
    ddp = h.ddp(mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    return partial(gw.register_comm_hook, ddp, AllReduce())


def sparse_by_torchs_name(hook):
    def prepared(h):
        ddp = DistributedDataParallel(words())
        ddp.register_comm_hook(
            None if hook is gw.allreduce_hook else gw.PowerSGDState(None, 2, 0), hook
        )
        return lambda: ddp(torch.arange(4)).sum().backward()

    return prepared


def one_state_for_two(h):
    state, (ddp, other) = gw.PowerSGDState(None, 2, 0), (hooked(small())[0] for _ in range(2))
    ddp.register_comm_hook(state, gw.powerSGD_hook)
    other.register_comm_hook(state, gw.batched_powerSGD_hook)
    train(ddp, LOSS, 1)
    return partial(train, other, LOSS, 1)


def unannounced(h):
    ddp, _ = hooked(Branches(), ALGORITHM, cap=25)
    backward = lambda: LOSS(lambda x: ddp(x, ("left",)), 0, 0).backward()  # noqa: E731
    backward()
    return backward


def accelerated(h):
    from accelerate.optimizer import AcceleratedOptimizer

    like = type(AcceleratedOptimizer.__name__, (Wrapper,), {})  # without accelerate's global state
    return partial(gw.PostLocalSGDOptimizer, like(sgd(small())), gw.PeriodicModelAverager(2))


def set_algorithm(h):
    handle = hooked(small(), AllReduce())[1]
    h.watch(lambda: repr(handle))
    return partial(setattr, handle, "algorithm", PowerSGD(1))


# What is done with a handle, an averager or an optimizer that is at work.

TENSORS = {"w": torch.zeros(24, 20), "b": torch.zeros(24)}
GOOD = {"w": torch.ones(24, 20), "b": torch.ones(24)}


def averaging(**wrong):
    """Gradients of which some are wrong, or not there."""

    def prepared(h):
        averager = gw.Averager(ALGORITHM, TENSORS)
        averager({n: g.clone() for n, g in GOOD.items()})
        h.watch(partial(averager.gathered_state_dict, "all"))
        return partial(averager, {n: g for n, g in (GOOD | wrong).items() if g is not Ellipsis})

    return prepared


def thawed(h):
    model = h.watch(small(frozen=[0]))
    optimizer = gw.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    fit(model, optimizer, 0, [0], LOSS)
    model[0].requires_grad_(True)
    return partial(fit, model, optimizer, 0, [1], LOSS)


def working(h):
    """A handle of memory that has changed since the state that is given with it."""
    ddp, handle = hooked(small(), PowerSGD(rank=2, half_step=True))
    train(ddp, LOSS, 2, local=False)
    state = copy.deepcopy(handle.rank_state_dict())
    train(ddp, LOSS, [2], local=False)
    h.watch(handle.rank_state_dict)
    return handle, state


def forgetting(h):
    return partial(working(h)[0].forget, ["nothing*", "2.weight"])


def state(*path, to=None):
    """Loading a state in which one value is another, or is not there."""

    def prepared(h):
        handle, state = working(h)
        *parents, last = path
        place = functools.reduce(dict.__getitem__, parents, state)
        place.pop(last) if to is None else place.update({last: to})
        return partial(handle.load_state_dict, state)

    return prepared


SHARDS = ("element", "parameter", "bucket")
FACTOR = ("tensors", "4.weight", "q")
ALONE = rows(
    {
        ValueError: [
            *at(ALL, small, ZERO, "OptimizerStep", "ZeroOptimizer"),
            *at(ALL, small, WireDtype(ZERO, "bfloat16"), "OptimizerStep", "ZeroOptimizer"),
            *at(LAZY, lazy, AllReduce(), "parameter '0.weight' of a lazy module"),
            *at(
                LAZY, on_meta, AllReduce(), "parameter '0.weight' is on the meta device", "to_empty"
            ),
            *at(
                "DataParallel local_sgd",
                partial(small, frozen=[0, 2, 4]),
                ALGORITHM,
                "nothing to average",
            ),
            *at(
                DENSE,
                partial(small, frozen=[0]),
                PowerSGD({"0.*": 1, "*": 2}),
                "'0.*'",
                "'0.weight' and 1 more",
            ),
            *at(
                DENSE,
                partial(small, frozen=[0]),
                PowerSGD({"conv*": 1, "*": 2}),
                "'conv*'",
                "'2.weight', ",
            ),
            *at(DENSE, stepping, ALGORITHM, "parameter '2.weight' is stepped"),
            *at(DENSE, with_phase, ALGORITHM, "'phase'", "complex64"),
            *at("hook", with_phase, AllReduce(), "'phase'", "complex64"),
            *at("hook", with_phase, WireDtype(AllReduce(), "float16"), "'phase'", "complex64"),
            *at("hook", words, ALGORITHM, "'inner.words.weight'", "'inner.words'"),
            *at("hook", embedding, ALGORITHM, "'weight'", "the Embedding"),
            *at("hook", small, WithoutRepr(), "WithoutRepr"),
            *at("hook", small, asking(lambda ops, gradients: Unheard()), "'something'"),
            *at("hook", small, LocalSGD(2), "LocalSGD(period=2)", "local_sgd"),
            (hooked_already(ALGORITHM), "ddp", "unregister()"),
            (hooked_already(None), "ddp"),
            (mixed_precision, "mixed_precision=", "autocast"),
            (without_buckets, "optimize_ddp"),
            (one_state_for_two, "PowerSGDState"),
            *[
                (sparse_by_torchs_name(x), "sparse")
                for x in (gw.powerSGD_hook, gw.batched_powerSGD_hook, gw.allreduce_hook)
            ],
            (lambda h: h.parallel(mlp(2, 2), bucket_cap_mb=-1), "bucket_cap_mb=-1"),
            (lambda h: h.parallel(mlp(2, 2), first_bucket_mb=math.nan), "first_bucket_mb=nan"),
            (lambda h: h.hook(small(), ALGORITHM, message_bytes=-1), "message_bytes=-1"),
            (lambda h: h.zero(shard="rows"), "shard='rows'"),
            (lambda h: h.zero(wire_dtype="int7"), "wire_dtype='int7'"),
            (lambda h: h.zero(max_grad_norm=0.0), "max_grad_norm=0.0"),
            (lambda h: h.zero(master_dtype=torch.int32), "master_dtype=torch.int32"),
            *[
                (lambda h, x=x: h.zero(lr=-1.0, shard=x), "Invalid learning rate: -1.0")
                for x in SHARDS
            ],
            (lambda h: h.zero(betas=(2.0, 2.0)), "Invalid beta parameter at index 0: 2.0"),
            (of_params([]), "params is empty"),
            (of_params([{"lr": 1.0}]), "params[0]", "['lr']", "'params'"),
            (mixed({"0.*": ADAM, "2.*": ADAM}), "no pattern for", "4.bias"),
            (mixed({"conv*": ADAM} | MIXTURE), "'conv*' matches no parameter"),
            (mixed({"*": ADAM, "0.*": ADAM}), "'0.*' gets no parameter"),
            (mixed({}), "optimizer_class={}"),
            (
                mixed({"*": (torch.optim.AdamW, {}, "bucket")}),
                "['*']='bucket'",
                "'element', 'parameter'",
            ),
            (
                mixed(MIXTURE | {"*.weight": (torch.optim.Muon, {}, "element")}),
                "Muon",
                "shard='parameter'",
            ),
            (
                mixed({"*": (torch.optim.Muon, {}, "parameter")}),
                "optimizer_class['*']: Muon refuses '0.bias'",
            ),
            (
                mixed(MIXTURE | {"*.weight": ("Muon", {"lr": "fast"}, "parameter")}),
                "['*.weight']",
                "Muon",
            ),
            (
                mixed(MIXTURE | {"*": (torch.optim.AdamW, {"beta": 1}, "element")}),
                "optimizer_class['*']",
                "beta",
            ),
            (lambda h: partial(gw.probe, nodes=0), "nodes=0"),
            (lambda h: h.averager({}), "nothing to average"),
            (
                lambda h: h.averager({"w": torch.zeros(3, dtype=torch.int32)}, AllReduce()),
                "'w'",
                "int32",
            ),
            (lambda h: h.averager(TENSORS, LocalSGD(4)), "gradwire.torch_backend.local_sgd"),
            (lambda h: h.local_ddp(LocalSGD(4), outer_device="cpu"), "outer_device='cpu'"),
            (lambda h: h.local_ddp(diloco(6, overlap=3), moments="reset"), "moments='reset'"),
            (averaging(b=...), "'b' missing"),
            (averaging(c=GOOD["b"]), "'c' unknown"),
            (averaging(b=None), "gradients['b'] is None", "unused=True"),
            (averaging(b=torch.ones(23)), "gradients['b']", "(23,)", "(24,)"),
            (averaging(b=torch.ones(24).half()), "gradients['b']", "float16"),
            (averaging(w=GOOD["w"].to_sparse()), "gradients['w'] is sparse"),
            (thawed, "'0.weight'", "ZeroOptimizer"),
            *[(partial(Here.zero, optimizer=torch.optim.LBFGS, shard=x), "LBFGS") for x in SHARDS],
            *[
                (
                    partial(Here.zero, optimizer=torch.optim.SparseAdam, shard=x),
                    "SparseAdam",
                    "sparse=",
                )
                for x in SHARDS
            ],
            (lambda h: partial(refuse_levels, TwoLevel(ALGORITHM, 2)), "PowerSGD"),
            (forgetting, "names pattern 'nothing*'"),
            (lambda h: partial(working(h)[0].gathered_state_dict, "some"), "errors='some'"),
            (
                lambda h: partial(working(h)[0].gathered_state_dict, "all", 1),
                "to=1 is no rank of the 1",
            ),
            (state("algorithm", to="PowerSGD(rank=4)"), "PowerSGD(rank=4)"),
            (state("format", to=3), "format 3"),
            (state("kind", to="local_sgd"), "local SGD's"),
            (state("format"), "lacks", "format"),
            (state("tensors"), "lacks", "tensors"),
            (state("tensors", "6.weight", to={}), "'6.weight' only there"),
            (state("tensors", "0.weight"), "'0.weight' only here"),
            (
                state("tensors", "2.weight", "error", to=torch.zeros(36, 35)),
                "'2.weight'",
                "(36, 35)",
                "(36, 36)",
            ),
            (state(*FACTOR, to=torch.zeros(3, 36)), "'4.weight'"),
            (state(*FACTOR), "'4.weight'"),
            (state(*FACTOR, to=[[0.0] * 36] * 2), "'4.weight'"),
            (state(*FACTOR, to=torch.zeros(2, 36, dtype=torch.int64)), "'4.weight'"),
            *[
                (state(*FACTOR, to=torch.full((2, 36), x)), "'q' of parameter '4.weight'")
                for x in (math.nan, math.inf)
            ],
            (state(*FACTOR, to=torch.zeros(2, 36, device="meta")), "'q' of parameter '4.weight'"),
            (state("shared", "clock", to=torch.tensor(1)), "shared state", "clock"),
            (state("shared", "phase", to=torch.zeros(2)), "shared state", "phase"),
            (state("step", to="many"), "step='many'"),
            (state("step", to=-1), "step=-1"),
        ],
        TypeError: [
            *at(AVERAGING, small, PowerSGD, "algorithm=PowerSGD"),
            *at(AVERAGING, small, "powersgd", "algorithm='powersgd'"),
            *at(AVERAGING, small, None, "algorithm=None"),
            (lambda h: partial(Compression, PowerSGD), "algorithm=PowerSGD"),
            (
                lambda h: partial(gw.register_comm_hook, small(), ALGORITHM),
                "ddp is a Sequential",
                "DistributedDataParallel(",
            ),
            *wrong(DENSE, "message_bytes", "x", math.nan, 1.5, True),
            *wrong(DENSE, "grad_scaler", "x", True),
            *wrong("DataParallel", "find_unused_parameters", "no", 1),
            *[
                (lambda h, x=x: partial(gw.Averager, ALGORITHM, TENSORS, x), f"group={x!r}")
                for x in (0, [], "world")
            ],
            *[(lambda h, x=x: partial(gw.probe, x), f"group={x!r}") for x in (0, [], "world")],
            (lambda h: partial(gw.Averager, ALGORITHM, TENSORS, unused="no"), "unused='no'"),
            (lambda h: partial(gw.Averager, ALGORITHM, None), "tensors=None"),
            (lambda h: h.zero(optimizer=nn.Linear), "optimizer_class=", "torch.optim.AdamW"),
            (lambda h: h.zero(master_dtype="float32"), "master_dtype='float32'"),
            (lambda h: h.zero(process_group=3), "process_group=3"),
            (lambda h: h.zero(learning_rate=1.0), "'learning_rate'"),
            (
                of_params([("p", nn.Parameter(torch.zeros(2), requires_grad=False))]),
                "requires_grad=True",
            ),
            (of_params(1.2), "params is a float"),
            (of_params(nn.Parameter(torch.zeros(2))), "params is a Parameter"),
            (mixed({3: ADAM}), "a key of optimizer_class=3"),
            (mixed({"*": ADAM[:2]}), "optimizer_class['*']", "(class, options, shard)"),
            (
                mixed({"*": (torch.optim.AdamW, 3e-4, "element")}),
                "optimizer_class['*']",
                "options=0.0003",
            ),
            (
                mixed({"*": (nn.Linear, {}, "element")}),
                "optimizer_class['*']",
                "no class of optimizers",
            ),
            (mixed(MIXTURE, lr=0.1), "lr=", "(class, options, shard)"),
            (mixed(MIXTURE, shard="parameter"), "shard=", "(class, options, shard)"),
            (
                lambda h: partial(
                    gw.ZeroOptimizer,
                    [{"params": list(small().named_parameters()), "lr": 1.0}],
                    MIXTURE,
                ),
                "named_parameters()",
            ),
            (lambda h: h.zero(average_gradients="no"), "average_gradients='no'"),
            (lambda h: partial(Compression, ALGORITHM, message_bytes="x"), "message_bytes='x'"),
            (
                lambda h: h.parallel(DistributedDataParallel(mlp(2, 2))),
                "module is a DistributedDataParallel",
            ),
            (lambda h: partial(gw.DataParallel, len), "module is a builtin"),
            (lambda h: h.parallel(mlp(2, 2), static_graph=True), "'static_graph'"),
            (lambda h: h.averager({"w": (24, 20)}), "tensors['w']=(24, 20)"),
            (lambda h: partial(gw.Averager(UNTRIED, TENSORS), GOOD), "OptimizerStep"),
            (
                lambda h: h.local_ddp(LocalSGD(4), optimizer=lambda ddp: Wrapper(sgd(ddp))),
                "optimizer is a Wrapper",
            ),
            (
                lambda h: h.local_ddp(LocalSGD(4), optimizer=nn.Module.parameters),
                "optimizer is a generator",
            ),
            (accelerated, "optim is a AcceleratedOptimizer", "accelerator.prepare"),
        ],
        RuntimeError: [(in_the_reducer, "once"), (unannounced, "find_unused_parameters=True")],
        AttributeError: [(set_algorithm, "algorithm")],
    }
)


@pytest.mark.parametrize("row", ALONE.values(), ids=ALONE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("alone")
def test_refused(row):
    refuse(Here(), *row)


@pytest.mark.usefixtures("alone")
def test_a_long_list_of_parameters_is_cut():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(90)])
    words = said(gw.DataParallel, model, PowerSGD({"*conv*": 1, "*": 2}))
    assert "and 175 more" in words
    assert len(words) < 220


def test_without_a_process_group_the_error_says_what_to_call():
    refuse(Here(), ValueError, lambda h: h.parallel(mlp(2, 2)), "init_process_group")
