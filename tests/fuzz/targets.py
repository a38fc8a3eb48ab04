"""Constructors and functions that take options, by table, and what is done with what they make:
some steps, a plan, a trace."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as g
import gradwire.jax_backend as gj
import gradwire.torch_backend as gt
from gradwire.core.advise.cost import Cost
from gradwire.core.advise.probe import Level
from gradwire.core.advise.timeline import Compute, Group
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.local_sgd.schedule import Schedule
from gradwire.testing import check
from gradwire.torch_backend.integrations.compression import Compression
from tests.fuzz.engine import Target
from tests.torch.models import mlp

# --- the core -----------------------------------------------------------------------------------

SHAPES = {"layers.0.w": (16, 12), "layers.1.w": (16, 12), "b": (16,), "s": (), "z": (0, 4)}
SPECS = {name: g.Spec(shape) for name, shape in SHAPES.items()}
SAMPLES = ((256, 1e-4), (1 << 20, 1e-2))
LEVEL = {"name": "all", "replicas": 2, "all_reduce": SAMPLES, "exchange": SAMPLES, "overlap": 0.5}
PROBE = {
    "framework": "torch",
    "device": "cpu",
    "replicas": 2,
    "nodes": 1,
    "levels": (Level(**LEVEL),),
}


def steps(made: Any, replicas: int = 4) -> None:
    """Some steps and a plan of an algorithm; hashes and writes it."""
    rng = np.random.default_rng(0)
    simulator = g.Simulator(made, SHAPES, replicas, dtype="float32")
    for _ in range(2):
        drawn = [
            {n: rng.standard_normal(s).astype("float32") for n, s in SHAPES.items()}
            for _ in range(replicas)
        ]
        assert all(np.isfinite(x).all() for x in simulator.step(drawn).values())
    assert hash(made) == hash(made)
    assert type(made).__name__ in repr(made)
    str(g.plan(SHAPES, made, world_size=replicas))


def local_steps(made: Any) -> None:
    made = made.without_factory()  # any callable may make an outer optimizer, in a backend
    simulator = g.LocalSimulator(made, {n: np.ones(s) for n, s in SHAPES.items()}, 4)
    for _ in range(3):
        gradients = [{n: np.ones(s) for n, s in SHAPES.items()}] * 4
        simulator.step(gradients, lambda _, p, d: {n: p[n] - 0.1 * d[n] for n in p})
    str(g.plan(SHAPES, made, world_size=4))


def of_spec(made: Any) -> None:
    g.AllReduce().init(NumpyOps(), {"w": made})
    assert made.nbytes >= made.size >= 0


def shards_used(made: Any) -> None:
    made.counts(list(made.specs))


def costs() -> dict[str, Any]:
    """Of methods, which an advice takes from another function."""
    return {"model": SHAPES, "probe": g.Probe(**PROBE), "step": 0.1} | {
        "costs": [(g.AllReduce(), Cost(((Group(4096, 0.0),),)))]
    }


SHARED = {"specs": SPECS, "world_size": 2}
STEP = {"model": SHAPES, "algorithm": g.PowerSGD(1), "step": 0.1, "replicas": 4}
CORE = {
    "AllReduce": Target(g.AllReduce, {"bucket_bytes": 512}, steps),
    "PowerSGD": Target(g.PowerSGD, {"rank": 2}, steps),
    "Quantize": Target(g.Quantize, {"dtype": "int8"}, steps),
    "Sign": Target(g.Sign, {}, steps),
    "TopK": Target(g.TopK, {"keep": 4, "per": 16}, steps),
    "TwoLevel": Target(g.TwoLevel, {"algorithm": g.PowerSGD(1), "within": 2}, steps),
    "WireDtype": Target(g.WireDtype, {"algorithm": g.AllReduce(), "dtype": "int8"}, steps),
    "Schedule": Target(Schedule, {"period": 4}, lambda made: made.levels(4)),
    "LocalSGD": Target(g.LocalSGD, {"period": 4, "outer": g.OuterSGD()}, local_steps),
    "OuterSGD": Target(
        g.OuterSGD, {"momentum": 0.5}, lambda made: local_steps(g.LocalSGD(2, outer=made))
    ),
    "diloco": Target(g.diloco, {"period": 4}, local_steps),
    "Spec": Target(g.Spec, {"shape": (2, 3)}, of_spec),
    "Zero": Target(
        g.Zero, {"shards": g.shard_by_element(SPECS, 2)}, lambda made: g.plan(SHAPES, made)
    ),
    "Simulator": Target(g.Simulator, {"algorithm": g.PowerSGD(1), "shapes": SHAPES, "replicas": 2}),
    "LocalSimulator": Target(
        g.LocalSimulator,
        {"local": g.LocalSGD(2), "parameters": {"w": np.zeros((8, 8))}, "replicas": 2},
    ),
    "plan": Target(g.plan, {"shapes": SHAPES, "algorithm": g.PowerSGD(1)}, str),
    "plan.seconds": Target(
        g.plan(SHAPES, g.PowerSGD(1)).seconds, {"world_size": 4, "latency": 1e-5, "bandwidth": 1e9}
    ),
    "utilization": Target(g.utilization, {**STEP, "link": "1Gbit"}),
    "link_for": Target(g.link_for, STEP),
    "advise": Target(g.advise, costs, str, left_out=("algorithms", "costs"), raises=(OSError,)),
    "Level": Target(Level, LEVEL),
    "Probe": Target(g.Probe, PROBE, str),
    "Compute": Target(Compute, {"seconds": 0.1}, lambda made: made.ready(1, 2)),
    "assign_buckets": Target(g.assign_buckets, {"sizes": [1, 2, 3], "limits": [2]}),
    "shard_by_element": Target(g.shard_by_element, SHARED, shards_used),
    "shard_by_parameter": Target(g.shard_by_parameter, SHARED, shards_used),
    "shard_by_bucket": Target(
        g.shard_by_bucket, {**SHARED, "buckets": [[n] for n in SPECS]}, shards_used
    ),
    "check": Target(
        check, {"algorithm": g.Sign(), "shapes": {"w": (12, 12)}, "world_sizes": (1, 2)}
    ),
}

# --- torch, on one rank: each time with a model of its own --------------------------------------

ALGORITHM = {"algorithm": g.PowerSGD(1)}


def model() -> nn.Module:
    return mlp(16, 16, 8)


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(16, 16), "b": torch.zeros(16)}


@functools.cache
def mesh() -> Any:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))


def backward(module: Any) -> None:
    module(torch.ones(4, 16)).sum().backward()


def hooked(**options: Any) -> Any:
    ddp = DistributedDataParallel(model())
    return ddp, gt.register_comm_hook(ddp, **options)


def used(made: Any) -> None:
    ddp, handle = made
    backward(ddp)
    handle.state_dict()


def averaged(made: Any) -> None:
    made({name: torch.ones_like(x) for name, x in tensors().items()})


def locally(**options: Any) -> Any:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    gt.local_sgd(module, optimizer, **options)
    return module, optimizer


def stepped(made: Any) -> None:
    module, optimizer = made
    for _ in range(2):
        backward(module)
        optimizer.step()


def zero(**options: Any) -> Any:
    module = model()
    return module, gt.ZeroOptimizer(module.named_parameters(), lr=0.1, **options)


def replicas() -> dict[str, Any]:
    sharded = fully_shard(model(), mesh=mesh()["shard"])
    return {"model": sharded, "mesh": mesh()["replicate"], **ALGORITHM}


def without(function: Any, *left_out: str) -> Sequence[str]:
    """The other arguments of a door that is called inside another function."""
    return Target(function, left_out=left_out).options


_local = {"local": g.LocalSGD(2)}
_adamw = {"optimizer_class": torch.optim.AdamW}
TORCH = {
    "register_comm_hook": Target(
        hooked, ALGORITHM, used, tries=without(gt.register_comm_hook, "ddp")
    ),
    "register_comm_hook of": Target(gt.register_comm_hook, ALGORITHM, tries=["ddp"]),
    "DataParallel": Target(gt.DataParallel, lambda: {"module": model(), **ALGORITHM}, backward),
    "Averager": Target(gt.Averager, lambda: {"tensors": tensors(), **ALGORITHM}, averaged),
    "local_sgd": Target(
        locally, _local, stepped, tries=without(gt.local_sgd, "module", "optimizer")
    ),
    "local_sgd of": Target(
        gt.local_sgd,
        lambda: {"module": model(), "optimizer": None, **_local},
        tries=["module", "optimizer"],
    ),
    "ZeroOptimizer": Target(zero, _adamw, stepped, tries=without(gt.ZeroOptimizer, "params")),
    "ZeroOptimizer of": Target(gt.ZeroOptimizer, _adamw, tries=["params"]),
    "compress_replicas": Target(gt.compress_replicas, replicas),
    "Compression": Target(Compression, ALGORITHM),
}

# --- JAX, traced once for two replicas ----------------------------------------------------------

AXIS = "data"
NAMED = {"axis_name": AXIS}
PARAMS = {"w": jnp.ones((16, 12)), "b": jnp.ones(16)}
STATE = {"state": gj.power_sgd(1, axis_name=AXIS).init(PARAMS)}
#: An axis that no map binds is found where the transformation is used.
UNBOUND = (NameError,)


def traced(made: Any) -> None:
    """A step, without running it."""

    def step(gradients: Any) -> Any:
        return made.update(gradients, made.init(PARAMS), PARAMS)[0]

    jax.make_jaxpr(step, axis_env=[(AXIS, 2)])(PARAMS)


def clipped(made: Any) -> None:
    traced(gj.zero1(optax.chain(made, optax.sgd(0.1)), axis_name=AXIS, replicas=2))


def used_in(make: Any, **options: Any) -> Target:
    return Target(make, {**options, **NAMED}, traced, raises=UNBOUND)


_inner = optax.sgd(0.1)
_portable = gj.to_portable(STATE["state"], g.PowerSGD(1))
JAX = {
    "power_sgd": used_in(gj.power_sgd, rank=1),
    "all_reduce_mean": used_in(gj.all_reduce_mean),
    "average_gradients": used_in(gj.average_gradients, **ALGORITHM),
    "zero1": used_in(gj.zero1, inner=_inner, replicas=2),
    "clip_by_global_norm": Target(
        gj.clip_by_global_norm,
        {"max_norm": 1.0, **NAMED},
        clipped,
        raises=UNBOUND,
        left_out=["axis_name"],
    ),
    "local_sgd": used_in(gj.local_sgd, inner=_inner, **_local),
    "diloco": used_in(gj.diloco, inner=_inner, period=2),
    "set_replicas": Target(gj.set_replicas, {**STATE, "replicas": 2}, left_out=["state"]),
    "abstract_state": Target(
        gj.abstract_state, {**STATE, "replicas": 2}, left_out=["state", "params"]
    ),
    "replicate": Target(gj.replicate, STATE, left_out=["state"]),
    "distribute": Target(
        gj.distribute, {**STATE, "mesh": jax.make_mesh((1,), (AXIS,)), **NAMED}, left_out=["state"]
    ),
    "partition_specs": Target(gj.partition_specs, {**STATE, **NAMED}, left_out=["state"]),
    "mark_varying": Target(
        gj.mark_varying, {"params": PARAMS, **NAMED}, left_out=["params"], raises=UNBOUND
    ),
    "to_portable": Target(gj.to_portable, {**STATE, **ALGORITHM}),
    "from_portable": Target(
        gj.from_portable, {"state": _portable, "like": STATE["state"], "replicas": 2, **ALGORITHM}
    ),
}

TABLES = {"core": CORE, "torch": TORCH, "jax": JAX}
