"""What cannot work is refused by name on every rank, and the group is as good as before: what one
of four ranks asks for, and what all do."""

from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD, TwoLevel, WireDtype, diloco
from gradwire.core.protocol import mean_each, sum_scalar
from gradwire.torch_backend.fsdp.layout import Layout
from gradwire.torch_backend.fsdp.replicas import _without_library
from tests.torch.advised import ON_RANKS
from tests.torch.compare import said
from tests.torch.models import Layers, mlp
from tests.torch.ranks import Cases
from tests.torch.refused import (
    ALGORITHM,
    LOSS,
    Here,
    asking,
    embedding,
    mesh,
    named,
    normed,
    on_meta,
    refuse,
    rows,
    small,
    stepping,
    words,
)
from tests.torch.sharded import mesh_of, shard
from tests.torch.training import fit, hooked, sgd, train

cases = Cases(__file__, ranks=4)


def hooked_on_one(h):
    ddp = DistributedDataParallel(small(), process_group=h.group)
    if h.odd:
        ddp.register_comm_hook(h.group, default_hooks.allreduce_hook)
    return partial(gw.register_comm_hook, h.watch(ddp), ALGORITHM)


def local(**odd):
    return lambda h: h.local_ddp(**{"local": LocalSGD(4, start_step=2)} | (odd if h.odd else {}))


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def another(change, *, local=False):
    """For a hook that is at work, or for local SGD."""

    def prepared(h):
        attempt = h.local_ddp(diloco(3), optimizer=adam) if local else h.hook(small(), ALGORITHM)
        ddp, handle = attempt.args[0], attempt()
        fit(ddp, attempt.args[1] if local else sgd(ddp), h.rank, range(4), LOSS)
        h.watch(handle.rank_state_dict)
        h.watch(
            lambda: [repr(handle.local if local else handle.algorithm), handle.stats().bytes_sent]
        )
        return partial(handle.reconfigure, change(h.odd))

    return prepared


DIFFERENT = [
    (lambda h: h.hook(small(), PowerSGD(rank=1 + h.odd)), "algorithm"),
    (lambda h: h.hook(small(), ALGORITHM, message_bytes=1000 + h.odd), "message_bytes"),
    (lambda h: h.hook(Layers(body=small()) if h.odd else small(), ALGORITHM), "parameters"),
    (
        lambda h: h.hook(
            small(frozen=[2]) if h.odd else mlp(40, 36, 28), ALGORITHM, init_sync=False
        ),
        "parameters",
    ),
    (lambda h: h.hook(words(sparse=h.odd), ALGORITHM), "'inner.words.weight'", "sparse=False"),
    (
        lambda h: h.hook(small(), WireDtype(AllReduce(8 if h.odd else None), "float16")),
        "bucket_bytes=8",
        "bucket_cap_mb",
    ),
    (hooked_on_one, "ddp has a communication hook"),
    (lambda h: h.parallel(mlp(8, 8, 8 + h.odd)), "'2.weight' as (9, 8)", "'2.bias'"),
    (lambda h: h.parallel(mlp(8, 8).double() if h.odd else mlp(8, 8)), "'0.weight'", "float64"),
    (
        lambda h: h.parallel(named("b" if h.odd else "a")),
        "lacks parameter 'a.weight'",
        "besides parameter 'b.weight'",
    ),
    (lambda h: h.parallel(named("ba" if h.odd else "ab")), "order"),
    (lambda h: h.parallel(mlp(8, 8, 8, frozen=[2] if h.odd else [])), "'2.weight'", "frozen"),
    (lambda h: h.parallel(normed(5 + h.odd)), "buffer '1.running_mean' as (6,)"),
    (lambda h: h.parallel(small(), PowerSGD(rank=1 + h.odd)), "algorithm"),
    (lambda h: h.parallel(embedding(sparse=h.odd)), "'weight'", "sparse=False"),
    (lambda h: h.averager({"w": torch.zeros(8 + h.odd, 8)}), "parameters"),
    (
        lambda h: h.averager(
            {"w": torch.zeros(8, 8)}, PowerSGD(1 + h.odd, min_compression_rate=0.1)
        ),
        "algorithm",
    ),
    (lambda h: h.zero(max_grad_norm=1.0 + h.odd), "max_grad_norm", "2.0"),
    (lambda h: h.zero(lr=-1.0 if h.odd else 1.0), "Invalid learning rate: -1.0"),
    (
        lambda h: h.zero(optimizer=torch.optim.SGD if h.odd else torch.optim.Adam),
        "optimizer_class",
        "SGD",
    ),
    (local(local=LocalSGD(5, start_step=2)), "local", "period=5"),
    (local(buffers="keep"), "buffers", "keep"),
    (local(moments="reset"), "moments", "reset"),
    (local(optimizer=adam), "optimizer", "AdamW"),
    (local(local=LocalSGD(4, start_step=2, subgroup=3)), "subgroup", "groups of 3"),
    (another(lambda odd: LocalSGD(1 + odd), local=True), "local"),
    (another(lambda odd: PowerSGD(1 + odd)), "algorithm"),
    (another(lambda odd: PowerSGD({"conv*": 2}) if odd else PowerSGD(4)), "'conv*'"),
    (another(lambda odd: LocalSGD(2, subgroup=3 if odd else None), local=True), "subgroup"),
]


@cases.each(rows({ValueError: DIFFERENT}))
def test_what_one_rank_asks_for_is_refused_on_all(world, row):
    message = refuse(Here(world.rank, world.group), *row)
    assert world.rank == 1 or "rank 1 cannot take part" in message or "{1: " in message, message
    require_a_good_group(world)


def require_a_good_group(world):
    total = torch.ones(1)
    dist.all_reduce(total, group=world.group)
    assert float(total) == world.size


@cases.case
def test_after_a_refusal_the_same_wrapper_can_be_used(world):
    ddp, _ = hooked(small(), None, world.group)
    assert said(gw.register_comm_hook, ddp, PowerSGD(rank=1 + world.rank))
    handle = gw.register_comm_hook(ddp, ALGORITHM)
    assert world.agree(train(ddp, LOSS, 2, local=False).weights)
    assert handle.stats().compression_ratio > 2


# On four ranks, all of which ask for the same.


def sharded(axis="shard", **options):
    return shard(mlp(40, 36, 32, **options), mesh()[axis] if axis else mesh())


def head_alone(whole=None):
    """Of which only the first layer is sharded as it should be."""
    model = mlp(40, 36, 32)
    fully_shard(model[0], mesh=mesh()["shard"])
    return model if whole is None else fully_shard(model, mesh=mesh_of(*whole)["shard"])


def in_columns_as_well():
    plan = {"0": ColwiseParallel(), "2": ColwiseParallel()}
    return fully_shard(
        parallelize_module(mlp(40, 36, 32), mesh()["shard"], plan), mesh=mesh()["replicate"]
    )


def of_dtensors():
    model = nn.Linear(4, 4, bias=False)
    local = DTensor.from_local(torch.zeros(2, 4), mesh()["shard"], [Shard(0)], run_check=False)
    model.weight = nn.Parameter(local)
    return model


def compressed(algorithm=ALGORITHM):
    """A model whose replicas are compressed, and the handle."""
    model = sharded()
    return model, gw.compress_replicas(model, algorithm, mesh()["replicate"])


def local_of_shards(h, model):
    return partial(
        gw.local_sgd, model, None, LocalSGD(2), process_group=mesh().get_group("replicate")
    )


def averaging_dtensors(h):
    model = sharded()
    averager = gw.Averager(
        ALGORITHM,
        {n: p.to_local() for n, p in model.named_parameters()},
        mesh().get_group("replicate"),
    )
    LOSS(model, h.rank, 0).backward()
    return partial(averager, {n: p.grad for n, p in model.named_parameters()})


def uneven(h):
    attempt = h.local_ddp(LocalSGD(2))
    ddp, optimizer, _ = attempt.args
    attempt()
    h.watched.clear()  # the step is refused in its middle

    def joined():
        with ddp.join():
            fit(ddp, optimizer, h.rank, [0], LOSS)

    return joined


def unregistered(of):
    """A call of a handle that has left its place."""

    def prepared(h):
        _, handle = compressed()
        handle.unregister()
        return of(handle)

    return prepared


def by_environment(**env):
    """What torchrun would have said, or not."""

    def prepared(h):
        attempt = h.local_ddp(LocalSGD(2, subgroup="node"))
        return mock.patch.dict("os.environ", env)(attempt)

    return prepared


#: A replica, a shard, a rank.
ODD = (lambda rank: rank >= 2, lambda rank: rank % 2, lambda rank: rank == 3)
EVERYWHERE = {
    ValueError: [
        # compress_replicas
        (
            lambda h: h.replicas(sharded(None)),
            "'0.weight'",
            "replicate 2 × shard 2",
            "compress_replicas(model",
        ),
        (
            lambda h: h.replicas(replicate(mlp(40, 36), mesh=mesh()["replicate"])),
            "'0.weight'",
            "replicate 2",
        ),
        (
            lambda h: h.replicas(sharded(), axis=mesh()["shard"]),
            "'0.weight'",
            "mesh",
            "compress_replicas(model",
        ),
        (lambda h: h.replicas(sharded(), axis=mesh()), "mesh is", "compress_replicas(model"),
        (lambda h: h.replicas(head_alone()), "'2.weight'", "fully_shard"),
        (
            lambda h: h.replicas(shard(on_meta(), mesh()["shard"])),
            "'0.weight' is on the meta device",
            "to_empty",
        ),
        (lambda h: h.replicas(head_alone((1, 4))), "'2.weight'", "shard 4"),
        (
            lambda h: h.replicas(in_columns_as_well(), axis=mesh_of(4, 1)["shard"]),
            "'0.weight'",
            "Averager",
        ),
        (lambda h: h.replicas(compressed()[0]), "model has replicas", "unregister()"),
        (lambda h: h.replicas(stepping(sharded(), 0)), "'0.weight' is stepped"),
        (lambda h: h.replicas(sharded(), LocalSGD(4)), "gradwire.torch_backend.local_sgd"),
        (
            lambda h: h.replicas(
                sharded(), asking(lambda ops, _: sum_scalar(ops.zeros((), "float32")))
            ),
            "sum_scalar",
        ),
        (lambda h: h.replicas(sharded(), PowerSGD(rank={"nothing": 2})), "'nothing'"),
        (
            lambda h: h.replicas(sharded(frozen=[0]), PowerSGD(rank={"0.*": 2})),
            "'0.weight'",
            "frozen",
        ),
        (lambda h: h.replicas(sharded(frozen=[0, 2])), "model", "requires_grad=True"),
        (
            lambda h: h.replicas(shard(nn.Sequential(nn.Linear(5, 1)), mesh()["shard"])),
            "no part of any parameter",
        ),
        *[
            (
                lambda h, odd=odd: h.replicas(sharded(), PowerSGD(rank=1 + odd(h.rank))),
                "PowerSGD(rank=1)",
                "algorithm",
            )
            for odd in ODD
        ],
        *[
            (
                lambda h, odd=odd: partial(
                    compressed()[1].reconfigure, PowerSGD(rank=3 + odd(h.rank))
                ),
                "PowerSGD(rank=3",
            )
            for odd in ODD
        ],
        (unregistered(lambda handle: handle.unregister), "unregistered"),
        (unregistered(lambda handle: partial(handle.reconfigure, ALGORITHM)), "unregistered"),
        # others, of sharded models
        (lambda h: h.parallel(of_dtensors()), "'weight' is a DTensor", "Averager(algorithm"),
        (lambda h: h.zero(sharded(), torch.optim.SGD, lr=0.1), "'0.weight' is a DTensor"),
        (
            lambda h: h.averager(dict(sharded().named_parameters())),
            "tensors['0.weight'] is a DTensor",
            "to_local()",
        ),
        (lambda h: h.local(LocalSGD(2), sharded()), "'0.weight' is sharded", "mesh"),
        (
            lambda h: partial(gw.local_sgd, sharded(), None, LocalSGD(2)),
            "process_group=mesh.get_group('replicate')",
        ),
        (lambda h: local_of_shards(h, head_alone()), "'2.weight' is not sharded"),
        (lambda h: local_of_shards(h, compressed()[0]), "has replicas"),
        # local_sgd
        (
            lambda h: partial(gw.local_sgd, h.ddp(normed()), None, LocalSGD(2)),
            "broadcast_buffers=False",
        ),
        (
            lambda h: partial(
                gw.local_sgd, h.watch(hooked(small(), ALGORITHM, h.group)[0]), None, LocalSGD(2)
            ),
            "hook",
        ),
        (lambda h: h.local(LocalSGD(2, start_step=3)), "DistributedDataParallel"),
        (
            lambda h: partial(h.local(LocalSGD(2))().reconfigure, LocalSGD(2, start_step=1)),
            "a plain module",
        ),
        (lambda h: h.local_ddp(LocalSGD(2), optimizer=lambda _: sgd(small())), "not in module"),
        (lambda h: h.local_ddp(LocalSGD(2), buffers="drop"), "buffers='drop'"),
        (
            lambda h: h.local_ddp(LocalSGD(2), optimizer=None, moments="average"),
            "moments='average'",
            "optimizer",
        ),
        (
            lambda h: h.local_ddp(
                LocalSGD(2),
                optimizer=lambda m: torch.optim.Adagrad(m.parameters()),
                moments="reset",
            ),
            "moments='reset'",
            "Adagrad",
        ),
        (lambda h: h.local_ddp(LocalSGD(9, fragments=7)), "fragments=7"),
        (lambda h: h.local_ddp(LocalSGD({2: 2})), "groups of 2", "4 replicas"),
        (another(lambda _: diloco(2, compressor=PowerSGD({"conv*": 2})), local=True), "'conv*'"),
        (by_environment(LOCAL_WORLD_SIZE="3"), "LOCAL_WORLD_SIZE=3"),
        # hooks
        (another(lambda _: PowerSGD({"conv*": 2})), "'conv*'"),
        (another(lambda _: LocalSGD(4)), "LocalSGD(period=4)", "local_sgd"),
        (another(lambda _: AllReduce(8)), "bucket_bytes=8"),
        (
            lambda h: h.hook(
                small(), asking(lambda _, g: mean_each(g, groups=((0, 1), (2, 3), (4, 5))))
            ),
            "groups=((0, 1), (2, 3), (4, 5))",
        ),
        (lambda h: h.hook(small(), TwoLevel(ALGORITHM, 5)), "within=5"),
        (lambda h: h.hook(small(), TwoLevel(ALGORITHM, "ici")), "mesh axis"),
    ],
    TypeError: [
        (lambda h: h.replicas(mlp(2, 2)), "model is a Sequential", "compress_replicas(model"),
        (lambda h: h.replicas(h.ddp()), "model is a DistributedDataParallel", "register_comm_hook"),
        (
            lambda h: partial(gw.compress_replicas, "model", ALGORITHM, mesh()["replicate"]),
            "model is a str",
        ),
        (lambda h: h.replicas(sharded(), PowerSGD), "algorithm=PowerSGD"),
        (
            lambda h: partial(gw.register_comm_hook, sharded(), ALGORITHM),
            "ddp is a FSDPSequential",
            "Averager(algorithm",
        ),
        (lambda h: h.parallel(sharded()), "module is a FSDPSequential", "Averager(algorithm"),
        (averaging_dtensors, "is a DTensor", "p.grad.to_local()"),
        (lambda h: partial(gw.local_sgd, sgd(small()), None, LocalSGD(2)), "module is a SGD"),
        (
            lambda h: partial(gw.local_sgd, h.parallel(small())(), None, LocalSGD(2)),
            "module is a DataParallel",
        ),
        (lambda h: h.local_ddp(ALGORITHM), "local=PowerSGD"),
        (another(lambda _: ALGORITHM, local=True), "local is a PowerSGD"),
        (another(lambda _: PowerSGD), "algorithm=PowerSGD"),
    ],
    RuntimeError: [(uneven, "the same number of steps")],
}


@cases.each(rows(EVERYWHERE))
def test_refused_on_all_ranks(world, row):
    refuse(Here(world.rank, world.group), *row)
    require_a_good_group(world)


@cases.case
def test_offloaded_gradients_need_a_library_for_the_cpu(world):
    layout, cpu = Layout.of(sharded(), mesh().get_group("replicate")), torch.device("cpu")
    with mock.patch("torch.distributed.get_backend_config", return_value="cuda:nccl"):
        assert "CPUOffloadPolicy" in _without_library(layout, cpu)
    with mock.patch("torch.distributed.get_backend_config", return_value="cpu:gloo,cuda:nccl"):
        assert _without_library(layout, cpu) == ""


@cases.each({work.__name__: work for work in ON_RANKS.values()})
def test_advice_works(world, work):
    work(world)
