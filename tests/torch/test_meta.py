"""What runs on a device without the host: on tensors that have no numbers, so that nothing can be read from them.

A mode looks for the other kind of wait: numbers of the host among tensors of the device, which have to be copied there first.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradwire
from benchmarks.dry import PretendedGroup
from gradwire import AllReduce, LocalSGD, PowerSGD, WireDtype
from gradwire.core.algorithm import State
from gradwire.core.ops import Spec
from gradwire.core.protocol import run
from gradwire.core.protocol.collective_requests import AllGather, Reduce, ReduceScatter, SumScalar
from gradwire.core.protocol.control_requests import Branch, OptimizerStep, StepIsFinite
from gradwire.core.protocol.local_requests import Orthonormalize, ReplicaIndex
from gradwire.core.zero.sharded_step import Zero
from gradwire.core.zero.sharding import shard_by_bucket, shard_by_element, shard_by_parameter
from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.engine.groups import process_groups
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.torch.models import Half

META = torch.device("meta")
SPECS = {
    "w": Spec((40, 30), "float32"),
    "again": Spec((40, 30), "float32"),
    "b": Spec((40,), "float32"),
    "half": Spec((24, 18), "bfloat16"),
    "scalar": Spec((), "float32"),
}
#: Kernels to which a tensor of the CPU without dimensions is an argument by value.
BY_VALUE = {"mul", "mul_", "add", "add_", "sub", "sub_", "div", "div_", "_foreach_mul_", "_foreach_mul"}


class Strict(TorchDispatchMode):
    """Raises where tensors of the host and of the device meet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if len({x.device for x in tensors}) > 1:
            name = func._schema.name.split("::")[1]
            scalars = all(x.ndim == 0 for x in tensors if x.device != META)
            assert scalars, f"{name} is given tensors of the host"
            assert name in BY_VALUE, f"{name} would copy a number to the device, and the host would wait"
        return func(*args, **kwargs)


class PretendedExchange:
    """Of eight ranks, of which only this one exists: what is exchanged is what was there."""

    size, rank, native, direct = 8, 0, False, False

    def __init__(self, group: Any, device: torch.device) -> None:
        pass

    def gather(self, *_: Any) -> list[Any]:
        return []

    swap = sum_for_owners = gather


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setattr(process_groups, "Exchange", PretendedExchange)
    # Autocast does not know the device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    library = torch.library.Library("aten", "IMPL")
    # Whether two tensors share memory: torch does not say it of these.
    library.impl("is_set_to", lambda x, y: x is y, "Meta")
    with Strict():
        yield
    library._destroy()


ALGORITHMS = (
    AllReduce(),
    PowerSGD(1),
    PowerSGD(4),
    PowerSGD(2, warm_start=False),
    PowerSGD(2, error_feedback=False),
    PowerSGD(2, square=True),
    PowerSGD(2, start_step=1),
    PowerSGD({"w": 3, "*": 1}),
    PowerSGD(2, transpose=("*",)),
    PowerSGD(2, orthogonalization_epsilon=1e-6),
    PowerSGD(2, state_dtype="float64"),
    WireDtype(PowerSGD(2), "bfloat16"),
    WireDtype(AllReduce(), "float16"),
    Half(),
)


def tensors():
    return {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=META) for name, spec in SPECS.items()
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_a_step_of_the_driver_reads_nothing(algorithm):
    driver = Driver(algorithm, SPECS, META, PretendedGroup(), message_bytes=0)
    gradients = tensors()
    names = list(gradients)
    for _ in range(2):
        for i, name in enumerate(names):
            driver.add({name: gradients[name]}, first=i == 0, last=i == len(names) - 1)
    assert driver.memory.steps == 2


def gathered(request):
    return tuple(
        torch.empty(sum(counts), dtype=x.dtype, device=META) if out is None else out
        for x, counts, out in zip(request.arrays, request.counts, request.out, strict=True)
    )


ANSWERS = {
    Orthonormalize: lambda r: r.answer(),
    Branch: lambda r: (run((r.then if r.predicate else r.otherwise)(*r.operands), answer),),
    StepIsFinite: lambda r: (torch.ones((), dtype=torch.bool, device=META),),
    Reduce: lambda r: tuple(x.clone() for x in r.arrays),
    ReplicaIndex: lambda r: (1,),
    ReduceScatter: lambda r: tuple(torch.split(x, list(n))[1] for x, n in zip(r.arrays, r.counts, strict=True)),
    AllGather: gathered,
    SumScalar: lambda r: (r.array,),
    OptimizerStep: lambda r: (dict(r.pieces),),
}


def answer(request):
    """As one of several ranks would be answered, with tensors that have no numbers."""
    assert not isinstance(request, Branch) or isinstance(request.predicate, bool)
    return ANSWERS[type(request)](request)


BUCKETS = [["scalar", "b", "w"], ["half"], ["again"]]
SHARDS = {
    "element": shard_by_element(SPECS, 3),
    "parameter": shard_by_parameter(SPECS, 3),
    "bucket": shard_by_bucket(SPECS, 3, BUCKETS, spread=False),
}
OPTIONS = {
    "plain": {},
    "averaged already": {"algorithm": None},
    "clipping": {"max_norm": 1.0},
    "scaled": {"skip_non_finite": True, "unscale": lambda: torch.ones((), device=META)},
    "scaled and clipping": {"skip_non_finite": True, "max_norm": 1.0, "unscale": lambda: torch.ones((), device=META)},
}


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_sharded_step_reads_nothing(shard, options):
    zero = Zero(SHARDS[shard], **OPTIONS[options])
    results, _ = run(zero.step(TorchOps(META), tensors(), State(), 0, tensors()), answer)
    assert {name: tuple(x.shape) for name, x in results.items()} == {name: spec.shape for name, spec in SPECS.items()}


@pytest.mark.parametrize(
    "schedule",
    [
        LocalSGD(period=1),
        gradwire.diloco(1),
        gradwire.diloco(2, fragments=2),
        LocalSGD(period=1, compressor=PowerSGD(2)),
    ],
    ids=repr,
)
def test_an_average_of_parameters_reads_nothing(schedule):
    ops, parameters = TorchOps(META), tensors()
    state = schedule.init(ops, parameters, 3)
    for step in range(2):
        results, state, _ = run(schedule.average(ops, parameters, state, step, 3, {}), answer)
        assert results.keys() == SPECS.keys()
