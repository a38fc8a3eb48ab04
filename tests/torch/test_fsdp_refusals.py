"""What `compress_replicas` does not take is refused by name, on all ranks, with the lines that set it up right."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, LocalSGD, PowerSGD
from gradwire.core.protocol import sum_scalar
from gradwire.torch_backend import Averager, compress_replicas
from gradwire.torch_backend.fsdp.layout import Layout
from gradwire.torch_backend.fsdp.replicas import _without_library
from tests.torch.compare import relative
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sharded import mesh_of, shard, sharded_mlp, train_sharded

ALGORITHM = PowerSGD(rank=2)
WIDTHS = (40, 36, 32)
LINES = (
    r'fully_shard\(layer, mesh=mesh\["shard"\]\).*handle = compress_replicas\(model, algorithm, mesh\["replicate"\]\)'
)

cases = Cases(__file__, ranks=4)


@dataclass(frozen=True)
class Summed(AllReduce):
    async def step(self, ops, gradients, state, step):
        await sum_scalar(ops.zeros((), "float32"))
        return await super().step(ops, gradients, state, step)


def unsharded_head(mesh):
    model = mlp(*WIDTHS)
    fully_shard(model[0], mesh=mesh["shard"])
    return model


def two_meshes(mesh):
    model = mlp(*WIDTHS)
    fully_shard(model[0], mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh_of(1, 4)["shard"])


def in_columns_as_well(mesh):
    model = parallelize_module(mlp(*WIDTHS), mesh["shard"], {"0": ColwiseParallel(), "2": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["replicate"])


def registered(mesh):
    model = sharded_mlp(WIDTHS, mesh["shard"])
    compress_replicas(model, AllReduce(), mesh["replicate"])
    return model


def stepping(mesh):
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = sharded_mlp(WIDTHS, mesh["shard"])
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model


def frozen(mesh):
    model = sharded_mlp(WIDTHS, mesh["shard"])
    model[0].requires_grad_(requires_grad=False)
    return model


#: What is made of a 2×2 mesh, the algorithm, the axis, and what is said.
WRONG = {
    "a mesh of both": (
        lambda mesh: sharded_mlp(WIDTHS, mesh),
        ALGORITHM,
        "replicate",
        r"ValueError: parameter '0.weight' is replicated over a mesh of replicate 2 × shard 2, where ranks \d are replicas of this one, and torch averages "
        r"its gradient over them in full before any hook is called. Shard over the inner axis.*" + LINES,
    ),
    "replicate": (
        lambda mesh: replicate(mlp(*WIDTHS), mesh=mesh["replicate"]),
        ALGORITHM,
        "replicate",
        r"ValueError: parameter '0.weight' is replicated over a mesh of replicate 2, .*" + LINES,
    ),
    "the other axis": (
        lambda mesh: sharded_mlp(WIDTHS, mesh["shard"]),
        ALGORITHM,
        "shard",
        r"ValueError: parameter '0.weight' is sharded over a mesh of shard 2, and ranks \d of that are in mesh, as replicas of this one.*"
        + LINES,
    ),
    "no axis": (
        lambda mesh: sharded_mlp(WIDTHS, mesh["shard"]),
        ALGORITHM,
        None,
        r"ValueError: mesh is a mesh of replicate 2 × shard 2; give its axis of the replicas alone.*" + LINES,
    ),
    "not sharded": (
        lambda _: mlp(*WIDTHS),
        ALGORITHM,
        "replicate",
        "TypeError: model is a Sequential that fully_shard has not sharded. .*" + LINES,
    ),
    "DDP": (
        lambda _: DistributedDataParallel(mlp(*WIDTHS)),
        ALGORITHM,
        "replicate",
        r"TypeError: model is a DistributedDataParallel, which register_comm_hook\(ddp, algorithm\) compresses",
    ),
    "no module": (
        lambda _: "model",
        ALGORITHM,
        "replicate",
        "TypeError: model is a str; give a module that fully_shard has sharded",
    ),
    "half sharded": (
        unsharded_head,
        ALGORITHM,
        "replicate",
        "ValueError: parameter '2.weight' is not sharded, so FSDP averages nothing of it. Call fully_shard on the model itself last",
    ),
    "two meshes": (
        two_meshes,
        ALGORITHM,
        "replicate",
        "ValueError: parameter '2.weight' is sharded over a mesh of shard 4, and ranks",
    ),
    "tensor parallelism": (
        in_columns_as_well,
        ALGORITHM,
        "elsewhere",
        r"ValueError: parameter '0.weight' is \(.*\) on a mesh of replicate 2 × shard 2; .*With tensor parallelism give gradwire.torch_backend.Averager",
    ),
    "twice": (
        registered,
        ALGORITHM,
        "replicate",
        r"ValueError: model has replicas whose gradients are averaged already. unregister\(\)",
    ),
    "an optimizer in backward": (
        stepping,
        ALGORITHM,
        "replicate",
        "ValueError: parameter '0.weight' is stepped by an optimizer in the backward",
    ),
    "a class": (
        lambda mesh: sharded_mlp(WIDTHS, mesh["shard"]),
        PowerSGD,
        "replicate",
        "TypeError: algorithm=PowerSGD is a class",
    ),
    "a schedule": (
        lambda mesh: sharded_mlp(WIDTHS, mesh["shard"]),
        LocalSGD(4),
        "replicate",
        "ValueError: .*gradwire.torch_backend.local_sgd",
    ),
    "a sum over the model": (
        lambda mesh: sharded_mlp(WIDTHS, mesh["shard"]),
        Summed(),
        "replicate",
        r"ValueError: Summed\(.*\) asks for sum_scalar, a sum over the whole model, of which each rank holds a part",
    ),
    "a pattern that fits nothing": (
        lambda mesh: sharded_mlp(WIDTHS, mesh["shard"]),
        PowerSGD(rank={"nothing": 2}),
        "replicate",
        "ValueError: .*'nothing'",
    ),
    "a pattern that fits what is frozen": (
        frozen,
        PowerSGD(rank={"0.*": 2}),
        "replicate",
        "ValueError: .*fits frozen parameters only, '0.weight'",
    ),
    "nothing to train": (
        lambda mesh: sharded_mlp(WIDTHS, mesh["shard"]).requires_grad_(requires_grad=False),
        ALGORITHM,
        "replicate",
        "ValueError: model has no parameter with requires_grad=True",
    ),
    "rows for nobody": (
        lambda mesh: shard(nn.Sequential(nn.Linear(5, 1)), mesh["shard"]),
        ALGORITHM,
        "replicate",
        "ValueError: (shard 1 cannot take part: )?this rank holds no part of any parameter; shard the model over fewer ranks",
    ),
}


@cases.each(WRONG)
def refused(world, wrong):
    make, algorithm, axis, _ = wrong
    mesh = mesh_of(2, 2)
    model = make(mesh)
    given = {None: mesh, "elsewhere": mesh_of(4, 1)["shard"]}.get(axis) or mesh[axis]
    with pytest.raises((TypeError, ValueError)) as error:
        compress_replicas(model, algorithm, given)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_served_is_refused_by_name(results, name):
    for said in results(f"refused[{name}]"):
        assert re.match(WRONG[name][3], said, re.DOTALL), said


@cases.each({"a replica": lambda rank: rank >= 2, "a shard": lambda rank: rank % 2, "a rank": lambda rank: rank == 3})
def ranks_that_differ(world, other):
    mesh = mesh_of(2, 2)
    model = sharded_mlp(WIDTHS, mesh["shard"])
    with pytest.raises(ValueError, match=r"differ in algorithm|cannot take part") as error:
        compress_replicas(model, PowerSGD(rank=1 + bool(other(world.rank))), mesh["replicate"])
    handle = compress_replicas(model, ALGORITHM, mesh["replicate"])  # nothing has been hooked
    with pytest.raises(ValueError, match=r"differ in algorithm|cannot take part"):
        handle.reconfigure(PowerSGD(rank=3 + bool(other(world.rank))))
    train_sharded(model, loss_on(40), range(1))
    return str(error.value), repr(handle.algorithm)


@pytest.mark.parametrize("who", ["a replica", "a shard", "a rank"])
def test_ranks_that_ask_for_different_things_all_learn_of_it(results, who):
    for said, kept in results(f"ranks_that_differ[{who}]"):
        assert "PowerSGD(rank=1)" in said
        assert kept == repr(ALGORITHM)


@cases.case
def handles(world):
    """What one handle says after another has taken its place."""
    mesh = mesh_of(2, 2)
    model = sharded_mlp(WIDTHS, mesh["shard"])
    first = compress_replicas(model, ALGORITHM, mesh["replicate"])
    train_sharded(model, loss_on(40), range(2))
    first.unregister()
    plain = train_sharded(model, loss_on(40), range(2, 3))
    said = []
    for attempt in (first.unregister, lambda: first.reconfigure(PowerSGD(rank=1))):
        with pytest.raises(ValueError, match="this handle is unregistered") as error:
            attempt()
        said.append(str(error.value))
    second = compress_replicas(model, AllReduce(), mesh["replicate"])
    train_sharded(model, loss_on(40), range(3, 5))
    second.reconfigure(ALGORITHM)
    trace = train_sharded(model, loss_on(40), range(5, 6))
    return repr(first), repr(second), second.stats().steps, plain.given[0], trace.weights


def test_a_handle_gives_its_place_to_another(results):
    found = results("handles")
    for first, second, steps, _, weights in found:
        assert first.startswith("ReplicaHandle(unregistered; PowerSGD(rank=2): 2 of 4 tensors, ")
        assert "; 2 steps, " in first
        assert second.startswith("ReplicaHandle(PowerSGD(rank=2): 2 of 4 tensors, ")
        assert steps == 3
        assert all(torch.equal(weights[n], found[0][4][n]) for n in weights)
    assert all(torch.equal(found[0][3][n], found[2][3][n]) for n in found[0][3])


@cases.case
def offloaded_without_gloo(world):
    mesh = mesh_of(2, 2)
    layout = Layout.of(sharded_mlp(WIDTHS, mesh["shard"]), mesh.get_group("replicate"))
    with pytest.MonkeyPatch.context() as patch:
        said = []
        for config in ("cuda:nccl", "cpu:gloo,cuda:nccl"):
            patch.setattr("torch.distributed.get_backend_config", lambda _group, config=config: config)
            said.append(_without_library(layout, torch.device("cpu")))
    return said


def test_offloaded_gradients_need_a_library_for_the_cpu(results):
    for alone, both in results("offloaded_without_gloo"):
        assert re.match(
            r"parameters are on the CPU, where CPUOffloadPolicy keeps them.*for \['cuda'\] alone.*cpu:gloo,cuda:nccl",
            alone,
        )
        assert both == ""


@cases.case
def averager_beside_tensor_parallelism(world):
    """What the refusal names: the local parts, between backward and step."""
    mesh = mesh_of(2, 2)
    model = parallelize_module(
        mlp(*WIDTHS, bias=False), mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    averager = Averager(
        AllReduce(), {n: p.to_local() for n, p in model.named_parameters()}, mesh.get_group("replicate")
    )
    loss_on(40)(model, world.rank // 2, 0).backward()
    gradients = {n: p.grad.to_local() for n, p in model.named_parameters()}
    own = {n: g.clone() for n, g in gradients.items()}
    return own, averager(gradients)


def test_tensor_parallel_replicas_are_averaged_by_their_local_parts(results):
    found = results("averager_beside_tensor_parallelism")
    for part in (0, 1):
        (first, given), (second, also) = found[part], found[2 + part]
        assert relative(given, {n: (first[n] + second[n]) / 2 for n in first}) < 1e-6
        assert relative(also, given) == 0
        assert relative(first, second) > 1e-2
