"""What the core refuses: the exception, what its message names, and what is done."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import gradwire as gw
from gradwire import (
    AllReduce,
    LocalSGD,
    LocalSimulator,
    PowerSGD,
    Simulator,
    TwoLevel,
    diloco,
    plan,
    shard_by_element,
)
from gradwire.core import protocol as rq
from gradwire.core.advise.probe import Level, measure
from gradwire.core.advise.timeline import Compute
from gradwire.core.algorithm import require_algorithm
from gradwire.core.buckets.assignment import bucket_limits
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.local_sgd.schedule import Schedule
from gradwire.core.plan.dry_run import rehearsed
from gradwire.core.protocol.reductions import Reduce
from gradwire.core.simulate import lock_step
from gradwire.core.state import checkpoint
from gradwire.core.text.options import at_least
from gradwire.testing import check

OPS = NumpyOps()
NAN, INF = float("nan"), float("inf")
SHAPES = {"w": (64, 32)}
GRADIENT = {"w": np.ones(SHAPES["w"])}
LAYERS = {"layers.0": (40, 30), "layers.1": (40, 30)}
PAIRS = ((0, 1), (2, 3))


def init(algorithm, **specs):
    return algorithm.init(OPS, {name: gw.Spec(*spec) for name, spec in specs.items()})


def each(error, named, make, *values):
    return [(error, named.format(x), partial(make, x)) for x in values]


def wrong(error, make, **options):
    """Of each option values that it does not take, or that an entry of its mapping does not."""
    rows = []
    for option, values in options.items():
        for x in values:
            entry = (
                next(((f"[{k!r}]={v!r}") for k, v in x.items()), "={}")
                if isinstance(x, dict)
                else f"={x!r}"
            )
            rows.append((error, option + entry, partial(make, **{option: x})))
    return rows


@dataclass(frozen=True, kw_only=True, repr=False)
class Own(PowerSGD):
    every: Annotated[int, at_least(1)]


class Half:
    per_replica = frozenset()

    def init(self, ops, specs): ...
    def step(self, ops, gradients, state, step): ...


@dataclass(frozen=True, kw_only=True, repr=False)
class Returns(gw.Compressor):
    """Of each matrix what a function makes of the tensor, as (sent, received, memory)."""

    what: Any

    def memory(self, ops, name, spec):
        return {"m": ops.zeros((2,), spec.dtype)} if len(spec.shape) > 1 else None

    async def compress(self, ops, name, x, memory, context):
        return self.what(ops, await rq.mean(x), memory)


class KeepsError(Returns):
    def memory(self, ops, name, spec):
        return {"error": ops.zeros(spec.shape, spec.dtype)}


class Averages(AllReduce):
    """What a function makes of the averages."""

    def __init__(self, what):
        super().__init__()
        object.__setattr__(self, "what", what)

    async def step(self, ops, gradients, state, step):
        averages, state = await super().step(ops, gradients, state, step)
        return self.what(averages), state


class Careless(PowerSGD):
    def memory(self, ops, name, spec):
        return {"outer": ops.zeros(spec.shape, spec.dtype)}


FOUR, LINKED = (
    partial(PowerSGD, 4),
    {"model": SHAPES, "algorithm": AllReduce(), "step": 0.1, "replicas": 2},
)
ZERO = partial(gw.Zero, shard_by_element({}, 2))
OPTIONS = [
    *wrong(ValueError, PowerSGD, rank=[0, {"w": -1}]),
    *wrong(TypeError, PowerSGD, rank=[True, "4", None, {"w": 1.5}]),
    *wrong(
        ValueError,
        FOUR,
        start_step=[-1],
        orthogonalization_epsilon=[-1e-8, 1, NAN],
        max_norm=[0, -1.0, INF, NAN],
    ),
    *wrong(
        ValueError,
        FOUR,
        min_compression_rate=[0, -2.0, NAN, INF],
        error_feedback=[0.0, -0.5, 1.5, NAN],
    ),
    *wrong(
        ValueError,
        FOUR,
        stacked=[{"w": -1}],
        rows=[{"w": 0}],
        state_dtype=["float8", "float12", "int32"],
    ),
    *wrong(
        TypeError, FOUR, stacked=[{"w": 1.0}, "layers/*"], rows=[("w",)], transpose=["*/kernel"]
    ),
    *wrong(
        TypeError,
        FOUR,
        error_feedback=["yes", None],
        half_step=["False", 0, None, np.True_],
        start_step=[NAN, "3"],
    ),
    (ValueError, "warm_start", lambda: FOUR(half_step=True, warm_start=False)),
    *each(
        ValueError,
        "square=True",
        lambda x: FOUR(square=True, **x),
        {"rows": {"w": 1}},
        {"stacked": {"w": 1}},
    ),
    *wrong(ValueError, AllReduce, bucket_bytes=[0, -1], first_bucket_bytes=[8]),
    *wrong(ValueError, partial(AllReduce, 8), first_bucket_bytes=[0, -1]),
    (TypeError, "bucket_bytes='8'", lambda: AllReduce("8")),
    # uncompressed averages have no such option
    (TypeError, "max_norm", lambda: AllReduce(max_norm=1.0)),
    *wrong(ValueError, gw.TopK, keep=[0, 1.5, 4096]),
    *wrong(ValueError, partial(gw.TopK, 4), per=[0, (8, 8, 8), 2**25], bits=[3], mean=["sender"]),
    *wrong(TypeError, partial(gw.TopK, 4), max_norm=["x", True, 1j]),
    *wrong(ValueError, gw.Sign, per=["block"], magnitudes=[3]),
    *wrong(TypeError, gw.Sign, magnitudes=[True]),
    *wrong(TypeError, partial(gw.Quantize, "int8"), seed=[1.5, "0", None]),
    *wrong(ValueError, gw.OuterSGD, lr=[0], nesterov=[True]),
    (ValueError, "momentum=1.0", lambda: gw.OuterSGD(0.7, 1.0)),
    (TypeError, "nesterov='no'", lambda: gw.OuterSGD(0.7, 0.9, nesterov="no")),
    (TypeError, "lr=", lambda: diloco(3, outer=gw.OuterSGD(), lr=0.5)),
    (TypeError, "abstract", lambda: gw.Compressor()),
    *wrong(ValueError, partial(Own, 2), every=[0]),
    *wrong(TypeError, partial(Own, 2), every=["8"]),
    (TypeError, "shards={}", lambda: gw.Zero({})),
    *wrong(ValueError, ZERO, max_norm=[0.0, -1.0, NAN]),
    (TypeError, "skip_non_finite='no'", lambda: ZERO(skip_non_finite="no")),
    (TypeError, "algorithm=PowerSGD", lambda: ZERO(PowerSGD)),
]

CODES = {
    "dtype='int16'": {"dtype": "int16"},
    "block=64": {"dtype": "bfloat16", "block": 64},
    "block=4": {"dtype": "int8", "block": 4},
    "block=13": {"dtype": "int4", "block": 13},
    "stochastic=True": {"dtype": "e3m0", "stochastic": True},
}
NO_DTYPES = (np.int16, torch.int64, "fp16", 4, torch.nn.Linear)
WIRE = [
    *[(ValueError, named, lambda x=x: gw.Quantize(**x)) for named, x in CODES.items()],
    *[
        (ValueError, named, lambda x=x: gw.WireDtype(AllReduce(), **x))
        for named, x in CODES.items()
    ],
    *each(ValueError, "dtype=", lambda x: gw.WireDtype(AllReduce(), x), *NO_DTYPES),
    *each(ValueError, "state_dtype=", lambda x: PowerSGD(4, state_dtype=x), *NO_DTYPES),
]

DOORS = (
    lambda x: plan(SHAPES, x),
    lambda x: Simulator(x, SHAPES, 2),
    lambda x: gw.WireDtype(x, "bfloat16"),
)
NO_ALGORITHMS = [
    *(row for door in DOORS for row in each(TypeError, "={!r} is a", door, "powersgd", None)),
    *((TypeError, "=PowerSGD is a class", partial(door, PowerSGD)) for door in DOORS),
    *each(
        TypeError,
        "compressor=",
        lambda x: LocalSGD(8, compressor=x),
        PowerSGD,
        "powersgd",
        LocalSGD(2),
    ),
    (TypeError, "start_step, cycle", lambda: require_algorithm(Half())),
    (TypeError, "no algorithm", lambda: check(PowerSGD)),
    (ValueError, "the shapes {'w': (2, 2)}", lambda: check(PowerSGD(4), {"w": (2, 2)})),
    (TypeError, "two levels", lambda: TwoLevel(gw.WireDtype(TwoLevel(AllReduce(), 2), "int8"), 2)),
]

MISSED, MAPPINGS = {"layers.*": 1, "layer.*": 1}, ("rank", "stacked", "rows")
TWO_ROWS = PowerSGD(1, stacked={"w": 1}, rows={"w": 2})
BROKEN_PROMISES = [
    (ValueError, "KeepsError.memory('w') makes 'error'", lambda: plan(SHAPES, KeepsError(what=0))),
    *(
        (ValueError, f"Returns.compress('w') {said}", partial(door, Returns(what=what)))
        for door in (
            lambda x: Simulator(x, SHAPES, 2).step([GRADIENT] * 2),
            lambda x: plan(SHAPES, x),
        )
        for said, what in {
            "returns `sent` of shape (1,); the tensor has (64, 32)": lambda ops, x, memory: (
                ops.zeros((1,), ops.dtype_of(x)),
                x,
                memory,
            ),
            "returns `received` of shape (2048,)": lambda ops, x, memory: (
                x,
                x.reshape((-1,)),
                memory,
            ),
            "returns memory 'new'": lambda ops, x, memory: (x, x, memory | {"new": x}),
            "returns memory 'm' of shape (64, 32); `memory` makes (2,)": lambda ops, x, memory: (
                x,
                x,
                {"m": x},
            ),
            "must return (sent, received, memory)": lambda ops, x, memory: (x, x),
        }.items()
    ),
    *(
        (ValueError, said, lambda what=what: plan(SHAPES, Averages(what)))
        for said, what in {
            "returns [] for the gradients ['w']": lambda averages: {},
            "the average of 'w' has shape (2048,), and the gradient (64, 32)": lambda averages: {
                name: x.reshape((-1,)) for name, x in averages.items()
            },
        }.items()
    ),
]

PATTERNS = [
    *each(
        ValueError,
        "{} pattern 'layer.*'",
        lambda x: plan(LAYERS, PowerSGD(**{"rank": 2, x: MISSED})),
        *MAPPINGS,
    ),
    (
        ValueError,
        "transpose pattern 'layer.*'",
        lambda: plan(LAYERS, PowerSGD(2, transpose=("layer.*",))),
    ),
    (ValueError, "'Layers.*'", lambda: plan(LAYERS, PowerSGD({"Layers.*": 2}))),
    (
        ValueError,
        "parameter 's'",
        lambda: init(PowerSGD(1, stacked={"*": 1}), w=((3, 4, 5),), s=((),)),
    ),
    (ValueError, "parameter 'w' 2 row axes", lambda: init(TWO_ROWS, w=((3, 4, 5),))),
    (ValueError, "parameter 'ids'", lambda: init(PowerSGD(2), w=((20, 20),), ids=((20,), "int32"))),
]

TWO = {"a": gw.Spec((2,)), "b": gw.Spec(())}
SCHEDULES = [
    *wrong(ValueError, Schedule, period=[0, {2: -1, 4: 4}, {}]),
    *wrong(TypeError, Schedule, period=[True]),
    *wrong(ValueError, partial(Schedule, 4), start_step=[-1], fragments=[5], subgroup=["rack"]),
    *wrong(TypeError, partial(Schedule, 4), fragments=[2.0]),
    (ValueError, "fragments=3", lambda: Schedule({2: 2, 4: 8}, fragments=3)),
    (ValueError, "fragments=3 of 2", lambda: Schedule(4, fragments=3).parts(TWO)),
    (TypeError, "subgroup[0]=0", lambda: Schedule(4, subgroup=(0, 1))),
    (ValueError, "groups of 3, but 4 replicas", lambda: Schedule(4, subgroup=3).subgroups(4)),
    (ValueError, "replicas 0 to 3", lambda: Schedule(4, subgroup=((0, 1), (1, 2, 3))).subgroups(4)),
    (ValueError, "subgroup says 'node'", lambda: Schedule(4, subgroup="node").subgroups(4)),
    (ValueError, "groups of 2 at most", lambda: Schedule({2: 2}).levels(4)),
    (ValueError, "groups of 2", lambda: Schedule({2: 4, 4: 4}).levels(4)),
    (
        ValueError,
        "groups of 2 of 4 replicas twice",
        lambda: Schedule({2: 2, PAIRS: 3, 4: 8}).levels(4),
    ),
    (
        ValueError,
        "groups of 2, the size of a node",
        lambda: Schedule({2: 2, "node": 3, "all": 8}).on_nodes_of(2),
    ),
    # Uncompressed averages have no differences, and no outer parameters.
    *wrong(
        ValueError,
        partial(LocalSGD, 4),
        state_dtype=["float32"],
        overlap=[1],
        merge=[0.5],
        eager=[True],
        radial=[True],
    ),
    (
        ValueError,
        "state_dtype='int8'",
        lambda: LocalSGD(4, outer=gw.OuterSGD(), state_dtype="int8"),
    ),
    *wrong(ValueError, partial(diloco, 4), overlap=[4, -1], layout=["rows"]),
    *wrong(TypeError, partial(diloco, 4), overlap=[True], eager=[1]),
    *wrong(ValueError, partial(diloco, 4, overlap=1), merge=[1.5, "half"]),
    *wrong(ValueError, partial(diloco, 4, eager=True), merge=[0.5], overlap=[1]),
    (TypeError, "layout[0]=1", lambda: diloco(4, layout=[1])),
    (ValueError, "fragments=1", lambda: diloco(4, layout=("a*", "*"))),
    *each(
        ValueError,
        "'b'",
        lambda x: diloco(9, fragments=2, layout=x).parts(TWO),
        ("a", "c"),
        ("*", "b"),
    ),
    (ValueError, "radial", lambda: plan({"w": (4, 4)}, diloco(3, radial=("q*",)))),
]

X = np.zeros(2)
SMALL = AbstractArray((2,), "int8")
GROUPS = [
    (
        ValueError,
        "groups=((0, 1), (1, 2))",
        lambda: lock_step([rq.mean(X, groups=((0, 1), (1, 2))) for _ in range(3)]),
    ),
    (ValueError, "watched", lambda: Reduce((X,), (False,), True, ((0,), (1,)))),
    (ValueError, "number of replicas", lambda: rehearsed(rq.gather(SMALL))),
    (ValueError, "mean of int8", lambda: rehearsed(rq.mean(SMALL), world_size=3)),
    (
        ValueError,
        "groups=((0, 1), (2,))",
        lambda: rehearsed(rq.gather(SMALL, groups=((0, 1), (2,))), world_size=3),
    ),
    (
        ValueError,
        "groups=((0, 1), (1, 2))",
        lambda: rehearsed(rq.gather(SMALL, groups=((0, 1), (1, 2))), world_size=3),
    ),
    (ValueError, "all-to-all of [2]", lambda: rehearsed(rq.all_to_all(SMALL), world_size=3)),
    (
        ValueError,
        "sum of float8",
        lambda: rehearsed(rq.reduce_sum(AbstractArray((4,), "float8_e4m3fn")), world_size=2),
    ),
    (ValueError, "within=4", lambda: Simulator(TwoLevel(AllReduce(), 4), SHAPES, 6)),
    (
        ValueError,
        "replicas 0 to 3",
        lambda: Simulator(TwoLevel(AllReduce(), ((0, 1), (2, 4))), SHAPES, 4),
    ),
    (ValueError, "within=((0, 1), (2,))", lambda: TwoLevel(AllReduce(), ((0, 1), (2,)))),
    (ValueError, "within=0", lambda: TwoLevel(AllReduce(), 0)),
    (TypeError, "within=1.5", lambda: TwoLevel(AllReduce(), 1.5)),
    (ValueError, "within='node'", lambda: Simulator(TwoLevel(AllReduce()), SHAPES, 4)),
    (ValueError, "world_size=8", lambda: plan(SHAPES, TwoLevel(AllReduce(), 2))),
]

X3 = [1.0, 2.0, 3.0]
SPECS = {"x": gw.Spec((5,)), "y": gw.Spec((3,))}
MAKERS = (shard_by_element, gw.shard_by_parameter)
SHARDS = [
    *each(ValueError, "world_size=0", lambda make: make(SPECS, 0), *MAKERS),
    *each(
        ValueError,
        "'n' has dtype int32",
        lambda make: make({"n": gw.Spec((5,), "int32")}, 2),
        *MAKERS,
    ),
    *each(
        ValueError,
        "buckets",
        lambda x: gw.shard_by_bucket(SPECS, 2, x),
        [["x"]],
        [["x", "y"], ["x"]],
        [["x", "z"]],
    ),
    (ValueError, "'new'", lambda: plan({"new": (3,)}, gw.Zero(shard_by_element(SPECS, 2)))),
    (
        TypeError,
        "OptimizerStep",
        lambda: Simulator(gw.Zero(shard_by_element(SPECS, 1)), {"y": (3,)}, 1).step([{"y": X3}]),
    ),
    *each(TypeError, "specs={!r}", lambda x: shard_by_element(x, 2), None, ["x"], 3),
    (TypeError, "specs['x']=(5,)", lambda: shard_by_element({"x": (5,)}, 2)),
    *each(ValueError, "world_size={}", lambda x: shard_by_element(SPECS, x), -1, 2**31),
    (ValueError, "limits=[]", lambda: gw.assign_buckets([1], [])),
    (ValueError, "limits[1]=-1", lambda: gw.assign_buckets([1], [0, -1])),
    (ValueError, "sizes[1]=-2", lambda: gw.assign_buckets([1, -2], [1])),
    (ValueError, "1 keys for 2 sizes", lambda: gw.assign_buckets([1, 2], [1], ["f"])),
    *each(ValueError, "order={}", lambda x: gw.assign_buckets([1, 2], [1], None, x), [0, 0], [1]),
    (ValueError, "bucket_cap_mb=0", lambda: bucket_limits(0, 1)),
    (ValueError, "first_bucket_mb=0", lambda: bucket_limits(1, 0)),
]

PLANS = [
    (ValueError, "itemsize=3", lambda: plan(SHAPES, PowerSGD(1), itemsize=3)),
    (ValueError, "dtype='int8'", lambda: plan(SHAPES, PowerSGD(1), dtype="int8")),
    (
        ValueError,
        "itemsize=2 and dtype='bfloat16'",
        lambda: plan(SHAPES, PowerSGD(1), itemsize=2, dtype="bfloat16"),
    ),
    (ValueError, "bucket_cap_mb=1", lambda: plan(SHAPES, AllReduce(8), bucket_cap_mb=1)),
    (ValueError, "bucket_cap_mb=0", lambda: plan(SHAPES, AllReduce(), bucket_cap_mb=0)),
    (ValueError, "bucket_cap_mb=2", lambda: plan(SHAPES, LocalSGD(2), bucket_cap_mb=2)),
    *each(
        ValueError,
        "world_size={}, but the plan is made for 2 replicas",
        lambda x: plan(SHAPES, gw.TopK(0.1), world_size=2).seconds(x, 1e-5, 1e9),
        1,
        64,
    ),
    (
        ValueError,
        "'steps'",
        lambda: plan({"w": jnp.zeros(3), "steps": jnp.zeros((), jnp.int32)}, AllReduce()),
    ),
    (ValueError, "'a/b'", lambda: plan({"a": {"b": (3,)}, "a/b": (3,)}, AllReduce())),
    (
        TypeError,
        "shapes is a generator",
        lambda: plan(torch.nn.Linear(4, 4).named_parameters(), AllReduce()),
    ),
    (TypeError, "shapes is a type", lambda: plan(torch.nn.Linear, AllReduce())),
    (TypeError, "shapes['w'] is a float", lambda: plan({"w": 3.0}, AllReduce())),
    (
        TypeError,
        "shapes['layers/0'] is a list",
        lambda: plan({"layers": {"0": [(3, 4), (5,)]}}, AllReduce()),
    ),
    (
        TypeError,
        "shapes['layers'] is a tuple",
        lambda: plan({"layers": (jnp.ones(()), jnp.ones(()))}, AllReduce()),
    ),
    (
        TypeError,
        "shapes['w'] is a MaskedNode",
        lambda: plan({"w": optax.MaskedNode()}, AllReduce()),
    ),
    (ValueError, "world_size=0", lambda: plan(SHAPES, AllReduce()).seconds(0, 1e-4, 1e9)),
    (ValueError, "latency=-1.0", lambda: plan(SHAPES, AllReduce()).seconds(4, -1.0, 1e9)),
    (TypeError, "world_size='2'", lambda: plan(SHAPES, AllReduce(), world_size="2")),
    *wrong(
        ValueError,
        partial(gw.utilization, link="1Gbit", **LINKED),
        step=[0, NAN],
        latency=[-1.0],
        replicas=[0],
    ),
    *wrong(ValueError, partial(gw.utilization, **LINKED), link=["fast", -1.0]),
    *wrong(ValueError, partial(gw.link_for, **LINKED), utilization=[1.0]),
    (ValueError, "utilization=", lambda: gw.link_for(**LINKED, utilization=0.99, latency=10.0)),
    (ValueError, "bandwidth=0.0", lambda: plan(SHAPES, AllReduce()).seconds(4, 1e-4, 0.0)),
    *each(
        ValueError,
        "all_reduce",
        lambda x: Level("all", 2, x, x, 0.5),
        (),
        ((0, 1.0),),
        ((8, 0.0),),
        ((8, NAN),),
    ),
    (ValueError, "exchange", lambda: Level("all", 2, ((1, 1.0),), (), 0.5)),
    (ValueError, "seconds=0.0", lambda: Compute(0.0)),
    *wrong(ValueError, partial(gw.compare, print, []), steps=[0]),
    *wrong(TypeError, partial(gw.compare, print, []), seeds=[True], replicas=[1.5]),
    *each(ValueError, "rates", lambda x: gw.compare(print, [], rates=x), (), (1.0, INF)),
    *each(TypeError, "rates", lambda x: gw.compare(print, [], rates=x), 2.0, "12", (True,)),
    (TypeError, "make", lambda: gw.compare(None, [])),
    (TypeError, "algorithms", lambda: gw.compare(print, ["PowerSGD"])),
    (ValueError, "two replicas", lambda: measure(None, "torch", "cpu", 1, 1)),
    (ValueError, "equally many", lambda: measure(None, "torch", "cpu", 3, 2)),
]

PAIR, PAIR_SHAPE, NOT_AVERAGED = {"w": [1, 2]}, {"w": (2,)}, ("int32", "complex64", "float8_e4m3fn")
WEIGHTED = gw.Weighted(AllReduce())


def weighed(weights):
    Simulator(AllReduce(), PAIR_SHAPE, 2).step([PAIR, PAIR], weights=weights)


WEIGHTS = [
    *each(
        TypeError,
        "Weighted",
        lambda x: x(WEIGHTED),
        TwoLevel,
        lambda x: gw.WireDtype(x, "int8"),
        gw.Weighted,
    ),
    (TypeError, "compressor", lambda: diloco(3, compressor=WEIGHTED)),
    *each(ValueError, "weights[0]", weighed, [NAN, 1], [INF, 1]),
    *each(TypeError, "weights[0]", weighed, ["1", 1], [True, 1]),
    (ValueError, "weights", partial(weighed, [1])),
    (ValueError, "weights[1]", partial(weighed, [1, -1])),
    (
        ValueError,
        "weighted",
        lambda: LocalSimulator(LocalSGD(1), PAIR, 1).step([PAIR], lambda *_: PAIR, weights=[1]),
    ),
]

SIMULATORS = [
    (ValueError, "replicas=0", lambda: Simulator(AllReduce(), PAIR_SHAPE, 0)),
    (ValueError, "1 gradients for 2", lambda: Simulator(AllReduce(), PAIR_SHAPE, 2).step([PAIR])),
    (
        ValueError,
        "['v']",
        lambda: Simulator(AllReduce(), PAIR_SHAPE, 2).step([PAIR, PAIR | {"v": [0]}]),
    ),
    (
        ValueError,
        "'w' has shape (3,)",
        lambda: Simulator(AllReduce(), PAIR_SHAPE, 2).step([PAIR, {"w": [1, 2, 3]}]),
    ),
    *each(
        ValueError,
        "dtype={!r}",
        lambda x: Simulator(AllReduce(), PAIR_SHAPE, 2, dtype=x),
        *NOT_AVERAGED,
    ),
    *each(TypeError, "shapes={!r}", lambda x: Simulator(AllReduce(), x, 2), None, [("w", (2,))]),
    (TypeError, "shapes['w']=2", lambda: Simulator(AllReduce(), {"w": 2}, 2)),
    (TypeError, "parameters=None", lambda: LocalSimulator(LocalSGD(2), None, 2)),
    (TypeError, "local=AllReduce()", lambda: LocalSimulator(AllReduce(), PAIR, 2)),
    (ValueError, "replicas=0", lambda: LocalSimulator(LocalSGD(2), PAIR, 0)),
    (ValueError, "2 configurations for 3", lambda: LocalSimulator([LocalSGD(2)] * 2, PAIR, 3)),
    (
        ValueError,
        "1 gradients for 2",
        lambda: LocalSimulator(LocalSGD(2), PAIR, 2).step([PAIR], lambda *_: PAIR),
    ),
    (
        ValueError,
        "dtype='int32'",
        lambda: LocalSimulator(LocalSGD(2), {"i": [1]}, 2, dtype="int32"),
    ),
    (
        ValueError,
        "'outer'",
        lambda: LocalSimulator(LocalSGD(2, compressor=Careless(1)), {"w": np.ones((9, 9))}, 2),
    ),
]


def state(**change):
    tensors = {"w": {"q": np.zeros(2), "error": np.zeros(3)}}
    whole = checkpoint.head("compressor", "PowerSGD(rank=2)", 0) | {
        "shared": {},
        "tensors": tensors,
    }
    return {key: value for key, value in (whole | change).items() if value is not None}


def gathered(*states):
    return checkpoint.gather(OPS, states, {"error"})


def own(saved):
    return checkpoint.of_replica(OPS, saved, 0, 2)


OWN, OTHER = (state(rank=rank, replicas=2) for rank in range(2))
FOREIGN = {"tensors": "["}, {"tensors": '["v"]'}
STATES = [
    *[
        (
            ValueError,
            named,
            lambda x=change: checkpoint.fit(state(**x), "PowerSGD(rank=2)", gw.State()),
        )
        for named, change in {
            "format 3": {"format": 3},
            "ZeroOptimizer.load_state_dict": {"kind": "sharded_optimizer"},
            "step=True": {"step": True},
            "step=1180591620717411303424": {"step": 2**70},
            "kind=-1": {"kind": -1},
            "format True": {"format": True},
            "'shared' in the state is 1.5": {"shared": 1.5},
            "'tensors' in the state": {"tensors": [1, 2]},
            "'tensors' of 'w'": {"tensors": {"w": 1}},
            "'shared' in the state": {"tensors": {"w": {"error": [1.0]}}, "shared": {3: 1}},
            "lacks ['tensors']": {"tensors": None},
        }.items()
    ],
    *each(
        ValueError,
        "replicas=",
        lambda x: own(gathered(state()) | {"replicas": x}),
        -1,
        0,
        True,
        None,
        "x",
        2.0,
    ),
    *each(
        ValueError,
        "scale=",
        lambda x: checkpoint.scale_in({"scale": x}),
        0,
        -1.0,
        NAN,
        INF,
        "x",
        None,
        10**400,
    ),
    *each(
        ValueError, "gradwire", lambda x: checkpoint.unflatten({"tensors/w/q": X}, x), {}, *FOREIGN
    ),
    (ValueError, "replica 1 has step=9", lambda: gathered(state(), state(step=9))),
    (
        ValueError,
        "replica 1 has memory of other parameters",
        lambda: gathered(state(), state(tensors={})),
    ),
    (ValueError, "states=[]", lambda: gathered()),
    (ValueError, "states[0]", lambda: gathered(OTHER, OWN)),
    (ValueError, "states[0]", lambda: gathered(OWN)),
    (ValueError, "['local', 'replicas']", lambda: own(state())),
    (
        ValueError,
        "both become 'x'",
        lambda: checkpoint.renamed(state(tensors={"v": {}, "w": {}}), lambda _: "x"),
    ),
    (ValueError, "lacks parameter 'w'", lambda: checkpoint.renamed(state(), {"v": "w"})),
    (
        ValueError,
        "3 rows",
        lambda: checkpoint.spread(OPS, gathered(state(), state()) | {"replicas": 3}, 2),
    ),
]

TABLES = (
    OPTIONS,
    WIRE,
    NO_ALGORITHMS,
    BROKEN_PROMISES,
    PATTERNS,
    SCHEDULES,
    GROUPS,
    SHARDS,
    PLANS,
    WEIGHTS,
    SIMULATORS,
    STATES,
)


@pytest.mark.parametrize(
    ("error", "named", "what"), [pytest.param(*row, id=row[1]) for rows in TABLES for row in rows]
)
def test_it_is_refused_by_name(error, named, what):
    with pytest.raises(error) as raised:
        what()
    assert named in str(raised.value)


def test_numbers_of_numpy_are_pythons():
    given = PowerSGD(
        {"*": np.int32(1)},
        start_step=np.int64(3),
        max_norm=np.float32(2),
        stacked={"w": np.array(1)},
    )
    assert repr(given) == repr(PowerSGD({"*": 1}, start_step=3, max_norm=2.0, stacked={"w": 1}))
    assert repr(gw.TopK(np.float64(0.5), bits=np.int8(4))) == repr(gw.TopK(0.5, bits=4))


def test_what_belongs_together_is_not_refused():
    assert "rank" not in gathered(OWN, OTHER)
    assert (
        rehearsed(rq.gather(AbstractArray((4,), "float8_e4m3fn")), world_size=2).traffic.nbytes == 4
    )
    PowerSGD({"layers.*": 2}).init(OPS, {})  # Optax makes a state for an empty tree
