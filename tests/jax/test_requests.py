"""Every kind of request on every kind of map, against the simulator in NumPy; and what it sends."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (bfloat16 and float8 in NumPy)
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradwire
import gradwire.core.protocol as rq
from gradwire import Compressor
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.plan.dry_run import rehearsed
from gradwire.core.protocol import together
from gradwire.core.simulate.lock_step import lock_step
from gradwire.jax_backend import JaxOps, average_gradients, collective_traffic, stats, total_traffic
from gradwire.jax_backend.axes.mapped_axis import varying_axes
from gradwire.jax_backend.engine.driver import drive
from tests.jax.replicas import AXIS, MODES, Replicas, mesh_of

TWO_AXES = ("node", "chip")
Case = Callable[[Any, Any], Any]

#: Of each number of replicas, groups of one size; the second in an order of its own.
GROUPS = {
    2: [((0,), (1,)), ((1, 0),)],
    3: [((0,), (1,), (2,)), ((2, 0, 1),)],
    4: [((0, 1), (2, 3)), ((2, 0), (1, 3))],
}
#: For sums they may be of several.
UNEQUAL = {3: ((0, 2), (1,)), 4: ((0, 2, 3), (1,))}


def given(replicas):
    """Of each replica its own: small integers, which every dtype holds."""
    rng = np.random.default_rng(replicas)
    shapes = {"m": (3, 2), "v": (12,), "s": (), "none": (0, 3)}
    return {
        name: rng.integers(-8, 9, (replicas, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


async def everything(ops, x, groups, sums_in):
    """The answers to each kind of request, in several dtypes and groups: of all replicas ("all:
    …"), and of some."""
    m, v, s, none = x["m"], x["v"], x["s"], x["none"]
    size = await rq.world_size()
    assert type(size) is int
    int8 = ops.cast(v * 10.0, "int8")
    answers = {
        "all: mean": await rq.mean(m),
        "all: mean, beyond float16": await rq.mean(ops.cast(ops.where(v > -99, ops.abs(v) * 0.0 + 60000.0, v), "float16")),
        "all: mean, bfloat16": await rq.mean(ops.cast(v, "bfloat16")),
        "all: sum": await rq.reduce_sum(m),
        "all: sum, int8, which wraps round": await rq.reduce_sum(int8),
        "all: sum, int32": await rq.reduce_sum(ops.cast(v * 1e6, "int32")),
        "all: max": await rq.reduce_max(v),
        "all: max, uint8": await rq.reduce_max(ops.cast(v, "uint8")),
        "all: max, of inf": await rq.reduce_max(ops.asarray([math.inf, -math.inf], "float32"), watched=False),
        "all: sum_scalar": await rq.sum_scalar(s),
        "all: mean of nothing": await rq.mean(none),
        "all: gathered": await rq.gather(m, v, s, none),
        "all: gathered integers": await rq.gather(int8, ops.cast(m, "int32"), ops.cast(s, "int8"), ops.pack_bits(v > 0)),
        "all: gathered float8": await rq.gather(ops.cast(v, "float8_e4m3fn"), ops.cast(m, "float8_e5m2"), ops.cast(v, "float8_e5m2")),
        "all: joined": await rq.all_gather([v, ops.cast(v[:5], "float16"), v[:0]], [(12,) * size, (5,) * size, (0,) * size]),
        "exchanged": await rq.all_to_all(*rows(ops, v, size)),
        "exchanged parts": await rq.all_to_all_parts([ops.stack([v] * size).reshape((-1,)), v[:0]], [(12,) * size, (0,) * size]),
        "part": await rq.reduce_scatter([ops.stack([v] * size).reshape((-1,)), v[:0]], [(12,) * size, (0,) * size]),
        "index": await rq.replica_index() + 0,
        "all: finite": await rq.step_is_finite(),
    }  # fmt: skip
    assert await rq.world_size(tuple((i,) for i in range(size))) == 1
    for each in groups:
        count = await rq.world_size(each)
        assert count == len(each[0])
        answers |= {
            f"{each}: index": await rq.replica_index(each) + 0,
            f"{each}: max": await rq.reduce_max(v, groups=each),
            f"{each}: gathered": await rq.gather(m, int8, s, none, groups=each),
            f"{each}: exchanged": await rq.all_to_all(*rows(ops, v, count), groups=each),
            f"{each}: joined": await rq.all_gather([v, v[:2]], [(12,) * count, (2,) * count], groups=each),
            f"{each}: part": await rq.reduce_scatter([ops.stack([v] * count).reshape((-1,))], [(12,) * count], groups=each),
        }  # fmt: skip
    for each in sums_in:
        answers |= {
            f"{each}: mean": await rq.mean(v, groups=each),
            f"{each}: sum": await rq.reduce_sum(int8, groups=each),
        }
    return answers


def rows(ops, v, count):
    """Arrays of `count` rows, of two dtypes and several shapes."""
    square = ops.stack([v * float(i + 1) for i in range(count)])
    return [square, ops.stack([v[:3] * float(i) for i in range(count)]), square.reshape((count, 2, 6)), ops.cast(square, "uint8"), square[:, :0] if isinstance(square, np.ndarray) else ops.stack([v[:0]] * count)]  # fmt: skip


def in_numpy(case, x, replicas):
    """What each replica's program returns: a leading axis for them."""
    copies = [{name: np.array(a[r]) for name, a in x.items()} for r in range(replicas)]
    results = lock_step([case(NumpyOps(), own) for own in copies])
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *results)


def mapped(body, mode, replicas):
    """A function of one replica's arrays on all replicas, which are a leading axis of what it is
    given and returns."""
    if mode == "vmap":
        return jax.jit(jax.vmap(body, axis_name=AXIS))
    if mode == "pmap":
        return jax.pmap(body, AXIS, devices=jax.devices()[:replicas])
    mesh = mesh_of(replicas)
    if mode == "two axes":
        mesh = jax.make_mesh((2, 2), TWO_AXES, axis_types=(AxisType.Auto,) * 2)
    spec = P(mesh.axis_names)

    def one(x):
        return jax.tree.map(lambda y: y[None], body(jax.tree.map(lambda y: y[0], x)))

    return jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=mode != "shard_map")
    )


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.usefixtures("float16_in_jax")
@pytest.mark.parametrize(
    ("mode", "replicas"),
    [
        *((mode, 4) for mode in MODES if mode != "pmap"),
        ("two axes", 4),
        ("pmap", 3),
        ("shard_map_vma", 3),
    ],
)
def test_every_kind_of_request_is_answered_as_by_the_simulator(mode, replicas):
    groups, sums = GROUPS[replicas], [*GROUPS[replicas], *filter(None, [UNEQUAL.get(replicas)])]
    if mode == "vmap":
        groups = sums = []
    elif mode == "two axes":  # along one of them, and along both
        sums = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((3, 1, 0, 2),), ((0,), (1,), (2,), (3,))]
    elif mode == "shard_map_vma":
        sums = [((0, 1, 2, 3)[:replicas],), tuple((i,) for i in range(replicas))]
    case = partial(everything, groups=groups, sums_in=sums)
    axis_name = TWO_AXES if mode == "two axes" else AXIS
    equal = {}

    def body(x):
        answers = drive(case(JaxOps(), x), axis_name)
        for name, answer in answers.items():
            equal[name] = not any(varying_axes(leaf) & set(axis_name if mode == "two axes" else [AXIS]) for leaf in jax.tree.leaves(answer))  # fmt: skip
        return answers

    x = given(replicas)
    received, expected = mapped(body, mode, replicas)(x), in_numpy(case, x, replicas)
    assert received.keys() == expected.keys()
    for name, leaves in expected.items():
        for i, (wanted, leaf) in enumerate(
            zip(jax.tree.leaves(leaves), jax.tree.leaves(received[name]), strict=True)
        ):
            if "index" not in name:  # an int in NumPy
                assert leaf.dtype == wanted.dtype, name
            exact = "mean" not in name and "part" not in name
            tolerance = 0 if exact else 2e-2 if "bfloat16" in name else 1e-5
            message = f"{name}, {i}"
            np.testing.assert_allclose(np.asarray(leaf).astype(float), np.asarray(wanted).astype(float), rtol=tolerance, atol=tolerance, err_msg=message)  # fmt: skip
    if mode in ("shard_map_vma", "two axes"):
        # whose answers differ between them
        several = [each for each in [*groups, *sums] if 1 < len(each) < replicas]
        differ = {
            f"{each}: {of}"
            for each in several
            for of in ("mean", "sum", "max", "gathered", "joined", "part")
        }
        assert not any(same for name, same in equal.items() if name in differ)
        assert all(same for name, same in equal.items() if name.startswith("all: "))


@pytest.mark.parametrize("replicas", [2, 3])
def test_what_is_sent_is_what_the_requests_say(replicas):
    """In the unit of an all-reduce; counted from the jaxpr, on an axis without devices."""
    groups = GROUPS[replicas]
    case = partial(
        everything, groups=groups, sums_in=UNEQUAL.get(replicas, ()) and [UNEQUAL[replicas]]
    )
    x = {name: a[0] for name, a in given(replicas).items()}
    sent = collective_traffic(
        lambda x: drive(case(JaxOps(), x), AXIS), x, axis_env=[(AXIS, replicas)]
    )
    abstract = {name: AbstractArray(a.shape, "float32") for name, a in x.items()}
    said = rehearsed(case(AbstractOps(), abstract), world_size=replicas).traffic
    # who exchanges with nobody sends nothing
    alone = [each for each in groups if len(each[0]) == 1]
    for each in alone:
        for of_group in (
            rq.reduce_max(abstract["v"], groups=each),
            rq.gather(abstract["m"], AbstractArray((12,), "int8"), abstract["s"], groups=each),
            rq.all_to_all(*rows(AbstractOps(), abstract["v"], 1), groups=each),
            rq.all_gather([abstract["v"], abstract["v"][:2]], [(12,), (2,)], groups=each),
            rq.reduce_scatter([abstract["v"]], [(12,)], groups=each),
        ):
            nothing = rehearsed(of_group, world_size=replicas).traffic
            said = gradwire.Traffic(
                said.collectives - nothing.collectives, said.nbytes - nothing.nbytes
            )
    assert total_traffic(sent) == gradwire.Traffic(said.collectives, said.nbytes)


def test_side_by_side_they_share_one_message_of_each_kind_and_dtype():
    async def one(ops, x, i):
        x = x * float(i + 1)
        for _ in range(await rq.world_size() - 3):
            x = await rq.mean(x)
        largest = await rq.reduce_max(x.reshape((-1,))[: i + 1])
        values, places = await rq.gather(x, ops.top_k(x, 1))
        (half,) = await rq.gather(ops.cast(x, "float8_e5m2"))
        (row,) = await rq.all_to_all(ops.stack([x.reshape((-1,))[:i]] * 4))
        return largest, values, places, half, row

    async def all_of_them(ops, x):
        return await together([one(ops, x["m"], i) for i in range(5)])

    x = given(4)
    first = {n: a[0] for n, a in x.items()}
    sent = collective_traffic(
        lambda x: drive(all_of_them(JaxOps(), x), AXIS), first, axis_env=[(AXIS, 4)]
    )
    assert [(c.kind, c.dtype) for c in sent] == [
        ("all_reduce", "float32"),
        ("all_reduce", "float32"),
        ("all_gather", "float32"),
        ("all_gather", "int32"),
        ("all_gather", "float8_e5m2"),
        ("all_to_all", "float32"),
    ]
    received = mapped(lambda x: drive(all_of_them(JaxOps(), x), AXIS), "pmap", 4)(x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, float), np.asarray(b, float), rtol=1e-5
        ),
        received,
        in_numpy(all_of_them, x, 4),
    )


def test_what_is_gathered_counts_when_a_step_is_judged():
    async def judged(ops, x, **options):
        bad = ops.where(x["s"] > 0, x["v"], math.inf)
        await rq.gather(ops.cast(x["v"], "int8"), bad if options else x["v"], **options)
        return await rq.step_is_finite()

    x = given(2) | {"s": np.array([1, -1], np.float32)}
    for options, finite in (({}, True), ({"watched": True}, False), ({"watched": False}, True)):
        case = partial(judged, **options)
        assert (
            mapped(lambda x, case=case: drive(case(JaxOps(), x), AXIS), "pmap", 2)(x).tolist()
            == [finite] * 2
        )
        assert in_numpy(case, x, 2).tolist() == [finite] * 2


TOP_K = gradwire.TopK(1 / 4)


def test_bytes_that_depend_on_the_number_of_replicas_are_known_in_the_first_step():
    shapes = {"a": (24,), "b": (16,), "s": ()}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    tx = average_gradients(TOP_K, axis_name=AXIS)
    assert math.isnan(stats(tx.init(params)).wire_bytes)
    assert stats(tx.init(params)).compression_ratio == 1
    run = Replicas(tx, params)
    run.update([params] * 4)
    bytes_sent = gradwire.plan(shapes, TOP_K, world_size=4).wire_bytes
    assert stats(run.global_state()).wire_bytes == bytes_sent == 4 * (6 * 4 + 4 + 4 * 4 + 2) / 2 + 4


class InPairs(Compressor):
    """Knows of how many replicas it is, and asks all the same."""

    async def compress(self, ops, name, x, memory, context):
        await rq.world_size()
        return x, await rq.mean(x, groups=((0, 1), (2, 3))), memory

    def memory(self, ops, name, spec):
        return {}


def test_init_takes_the_number_of_replicas_from_groups_or_from_the_map():
    tx, params = (
        average_gradients(InPairs(error_feedback=False), axis_name=AXIS),
        {"a": jnp.ones(24)},
    )
    tx.init(params)
    inside = jax.vmap(
        lambda _: stats(average_gradients(TOP_K, axis_name=AXIS).init(params)).wire_bytes,
        axis_name=AXIS,
    )
    assert jax.jit(inside)(jnp.zeros(3)).tolist() == [3 * (6 * 4 + 4) / 2] * 3


TRACED = Counter[str]()


class Nested(Compressor):
    """Has a branch in a branch, and notes when each side is traced."""

    async def compress(self, ops, name, x, memory, context):
        async def averaged(x):
            TRACED["inner"] += 1
            return (await rq.mean(x),)

        async def deeper(x):
            TRACED["outer"] += 1
            return await rq.branch(context.step > 2, averaged, plain, x)

        async def plain(x):
            return (x + 0.0,)

        (mean,) = await rq.branch(context.step > 1, deeper, plain, x)
        return x, mean, memory

    def memory(self, ops, name, spec):
        return {}


def test_a_branch_in_a_branch_is_traced_once():
    tx = average_gradients(Nested(error_feedback=False), axis_name=AXIS)
    state = tx.init({"a": jnp.ones(24)})
    TRACED.clear()
    jax.make_jaxpr(tx.update, axis_env=[(AXIS, 4)])({"a": jnp.ones(24)}, state)
    # and once more to count the bytes of a step
    assert TRACED == {"outer": 2, "inner": 2}
