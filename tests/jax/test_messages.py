"""What a step sends: the count and the bytes are those of `gradwire.plan`, in the jaxpr and in the
compiled program, in buckets and in pieces."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import gradwire
import gradwire.jax_backend as gw
from gradwire import AllReduce, PowerSGD, TopK, Traffic, WireDtype
from gradwire.core.buckets.assignment import assign_buckets
from gradwire.jax_backend.axes import cpu_hosts
from gradwire.jax_backend.axes.replica_groups import one_message
from gradwire.jax_backend.engine import driver
from tests.jax.replicas import AXIS, Replicas, gradients, mesh_of, one_step, power
from tests.methods import METHODS, VARIANTS
from tests.parity import cases

SHAPES = {"a": (64, 32), "b": (64,), "c": (16, 8, 4), "d": (64, 32), "none": (0, 7), "s": ()}


def zeros():
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


def sent(algorithm, params):
    tx = gw.average_gradients(algorithm, axis_name=AXIS)
    return gw.collective_traffic(
        tx.update, params, jax.eval_shape(tx.init, params), axis_env=[(AXIS, 4)]
    )


ALGORITHMS = {name: method.algorithm for name, method in METHODS.items()} | {
    "some at other ranks": PowerSGD({"conv": 0, "*": 3}, error_feedback=False),
    "later, in half": PowerSGD(2, half_step=True, start_step=3),
    "bfloat16": WireDtype(PowerSGD(2, warm_start=False), "bfloat16"),
    "float16": WireDtype(AllReduce(), "float16"),
}


#: In bfloat16 one of every kind of message.
ROWS = [
    *((name, "float32") for name in ALGORITHMS if name not in VARIANTS),
    *((name, "bfloat16") for name in ("int8", "top_k", "sign", "later, in half", "float16")),
]


@pytest.mark.parametrize(("name", "dtype"), ROWS)
def test_a_step_sends_what_the_plan_says(name, dtype):
    """In each phase, and before the start: whichever branches are taken, what is sent is what is
    planned for a step."""
    algorithm = ALGORITHMS[name]
    params = {n: jax.ShapeDtypeStruct(shape, dtype) for n, shape in cases.SHAPES.items()}
    # in the order of a tree
    collectives, shapes = sent(algorithm, params), gw.parameter_shapes(params)
    conds = {cond for c in collectives for cond, _ in c.branches}
    assert len(conds) == (algorithm.start_step > 0) + (algorithm.cycle > 1)
    ways = (
        dict(zip(sorted(conds), taken, strict=True))
        for taken in itertools.product((0, 1), repeat=len(conds))
    )
    planned = {*gradwire.plan(shapes, algorithm, dtype=dtype, world_size=4).steps}
    if algorithm.start_step:
        planned |= {*gradwire.plan(shapes, AllReduce(), dtype=dtype).steps}
    assert {gw.total_traffic(collectives, way) for way in ways} == planned


def test_the_phase_and_the_start_say_which():
    """A false predicate takes branch 0."""
    steps = [
        gw.total_traffic(sent(power(half_step=True), zeros()), {0: int(phase == 0)})
        for phase in (0, 1)
    ]
    assert steps == list(gradwire.plan(SHAPES, power(half_step=True)).steps)
    steps = [
        gw.total_traffic(sent(power(start_step=3), zeros()), {0: started}) for started in (0, 1)
    ]
    assert steps == [gradwire.plan(SHAPES, a).steps[0] for a in (AllReduce(), power())]


def test_the_compiled_program_holds_two_all_reduces():
    params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
    step, arguments = one_step(gw.average_gradients(PowerSGD(2), axis_name=AXIS), params, "pmap", 4)
    text = step.lower(*arguments).compile().as_text()
    payloads = [
        next(
            int(np.prod([int(n) for n in dims.split(",") if n]))
            for dims in re.findall(r"f32\[([\d,]*)\]", line)
        )
        for line in text.splitlines()
        if re.search(r"= .* all-reduce(-start)?\(", line)
    ]
    assert len(payloads) == 2, "one message for each of P and Q"
    assert Traffic(len(payloads), 4 * sum(payloads)) == gradwire.plan(SHAPES, PowerSGD(2)).steps[0]
    assert (
        gw.total_traffic(gw.collective_traffic(step, *arguments))
        == gradwire.plan(SHAPES, PowerSGD(2)).steps[0]
    )


def test_large_tensors_that_stay_uncompressed_lie_in_the_same_message():
    shapes = {"large": (1024, 512), "a": (64, 64), "b": (64,)}
    algorithm = power(rank={"large": 0, "*": 2})
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    assert gw.total_traffic(sent(algorithm, params)) == gradwire.plan(shapes, algorithm).steps[0]
    # As it is, not packed: nothing in the program is longer than it.
    tx = gw.average_gradients(algorithm, axis_name=AXIS)
    text = str(
        jax.make_jaxpr(tx.update, axis_env=[(AXIS, 4)])(params, jax.eval_shape(tx.init, params))
    )
    assert max(int(n) for n in re.findall(r"f32\[(\d+)\]", text)) < 1024 * 512


# Buckets of `all_reduce_mean`.

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
TREES = {
    "mixed": {
        "a": ((50,), "float32"),
        "b": ((25,), "bfloat16"),
        "c": ((50,), "float32"),
        "d": ((25,), "float16"),
        "e": ((5, 10), "float32"),
        "f": ((25,), "bfloat16"),
    },
    "small": {
        "a": ((), "float32"),
        "b": ((0, 3), "float32"),
        "c": ((), "bfloat16"),
        "d": ((3,), "float32"),
    },
}
SIZES = [(1, None), (240, None), (300, 60), (10**6, 200), (10**6, None)]


def plan_of(tree, limit, first):
    """(dtype, bytes) of each bucket, straight from the assignment, in the order of launching. Empty
    ones are not sent."""
    specs = list(tree.values())[::-1]
    sizes = [int(np.prod(shape)) * ITEMSIZE[dtype] for shape, dtype in specs]
    buckets = assign_buckets(sizes, [first or limit, limit], [dtype for _, dtype in specs])
    sent = [(specs[b[0]][1], sum(sizes[i] for i in b)) for b in buckets]
    return [(dtype, nbytes) for dtype, nbytes in sent if nbytes]


@pytest.mark.parametrize(("limit", "first"), SIZES)
@pytest.mark.parametrize("name", TREES)
def test_buckets_are_those_of_c10d(name, limit, first):
    params = {n: jax.ShapeDtypeStruct(shape, dtype) for n, (shape, dtype) in TREES[name].items()}
    collectives = sent(AllReduce(limit, first), params)
    assert [(c.kind, c.dtype, c.nbytes) for c in collectives] == [
        ("all_reduce", *planned) for planned in plan_of(TREES[name], limit, first)
    ]


@pytest.mark.usefixtures("float16_in_jax")
def test_numbers_in_buckets_of_several_dtypes_are_those_of_pmean():
    shapes = {f"{tree}.{n}": each for tree, leaves in TREES.items() for n, each in leaves.items()}
    tx = gw.all_reduce_mean(axis_name=AXIS, bucket_bytes=300, first_bucket_bytes=60)
    rng = np.random.default_rng(0)
    g = {
        n: rng.normal(size=(4, *shape)).astype(jnp.dtype(dtype))
        for n, (shape, dtype) in shapes.items()
    }
    state = tx.init({n: jax.ShapeDtypeStruct(shape, dtype) for n, (shape, dtype) in shapes.items()})
    both = jax.vmap(
        lambda g: (tx.update(g, state)[0], lax.pmean(g, AXIS)), axis_name=AXIS, out_axes=None
    )
    mine, theirs = jax.jit(both)(g)
    for n, (shape, dtype) in shapes.items():
        assert (mine[n].shape, mine[n].dtype) == (shape, dtype)
        # pmean divides the sum, as we do but for float16.
        tolerance = 1e-2 if dtype == "float16" else 0
        np.testing.assert_allclose(
            *(np.asarray(x[n], np.float32) for x in (mine, theirs)), atol=tolerance, rtol=0
        )


# Messages in short pieces, as between CPU hosts: the same bits, in as many collectives.

SENDS = {
    "zero1": lambda: gw.zero1(optax.sgd(0.1), axis_name=AXIS, replicas=3),
    "gather": lambda: gw.average_gradients(TopK(keep=0.2), axis_name=AXIS),
    "reduce": lambda: gw.average_gradients(PowerSGD(2), axis_name=AXIS),
}


@pytest.mark.parametrize("mode", ["vmap", "shard_map_vma"])
@pytest.mark.parametrize("what", SENDS)
@pytest.mark.slow
def test_pieces_make_the_bits_of_the_whole(what, mode, monkeypatch):
    shapes = {"w": (9, 14), "b": (7,)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def two_steps():
        replicas = Replicas(SENDS[what](), params, 3, mode)
        return [replicas.update(gradients(shapes, step, 3)) for step in range(2)]

    def pieces():
        tx = SENDS[what]()
        return gw.collective_traffic(
            tx.update, params, jax.eval_shape(tx.init, params), axis_env=[(AXIS, 3)]
        )

    whole, messages = two_steps(), pieces()
    for module in (cpu_hosts, driver):
        monkeypatch.setattr(module, "between_cpu_hosts", lambda: True)
    monkeypatch.setattr(cpu_hosts, "SHORT", 40)
    jax.tree.map(np.testing.assert_array_equal, two_steps(), whole)
    cut = pieces()
    assert any(message.repeats > 1 for message in cut) is (what != "reduce")
    assert len(cut) == len(messages)


# The counter of collectives, on functions whose traffic is known.

X = jnp.zeros((8, 3), jnp.float32)
SUM, HALF = "all_reduce", jnp.float16
count = partial(gw.collective_traffic, axis_env=[(AXIS, 4)])


@jax.custom_jvp
def custom(x):
    return lax.psum(x, AXIS)


custom.defjvp(lambda x, t: (custom(*x), t[0]))


def sums(xs):
    return [lax.psum(x, AXIS) for x in xs]


def halves(x):
    return lax.all_gather(lax.psum_scatter(x, AXIS, tiled=True), AXIS, tiled=True)


def several(x):
    return one_message(sums, [x, x[:2], x.astype(jnp.float16)]) + one_message(sums, [x])


@pytest.mark.parametrize(
    ("collectives", "sent", "total"),
    [
        # One entry for each array, and none for what is empty; what is sent together is one message
        # for each kind and dtype.
        (
            lambda x: lax.psum((x, x[:0], x.astype(HALF)), AXIS),
            [(SUM, "float32", 96), (SUM, "float16", 48)],
            (2, 144),
        ),
        (
            several,
            [(SUM, "float32", 96 + 24), (SUM, "float16", 48), (SUM, "float32", 96)],
            (3, 264),
        ),
        (lambda x: lax.pmean(x.astype(jnp.bfloat16), AXIS), [(SUM, "bfloat16", 48)], (1, 48)),
        (lambda x: lax.pmax(x, AXIS), [(SUM, "float32", 96)], (1, 96)),
        (lambda x: lax.ppermute(x, AXIS, [(0, 1)]), [("permute", "float32", 96)], (1, 96)),
        # Halves of an all-reduce count half.
        (halves, [("reduce_scatter", "float32", 96), ("all_gather", "float32", 96)], (2, 96)),
        (
            lambda x: lax.all_gather(x[0, 0].astype(HALF), AXIS),
            [("all_gather", "float16", 8)],
            (1, 4),
        ),
        (
            lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
            [("all_to_all", "float32", 96)],
            (1, 48),
        ),
        (jax.jit(lambda x: jax.checkpoint(custom)(x)), [(SUM, "float32", 96)], (1, 96)),
    ],
)
def test_what_is_counted(collectives, sent, total):
    found = count(collectives, X)
    assert [(c.kind, c.dtype, c.nbytes) for c in found] == sent
    assert {(c.axes, c.branches, c.repeats) for c in found} == {((AXIS,), (), 1)}
    assert gw.total_traffic(found) == Traffic(*total)


def test_loops():
    """A scan repeats, and a while has no total."""

    def body(c, _):
        return lax.psum(c, AXIS), None

    found = count(
        lambda x: lax.scan(lambda c, _: (lax.scan(body, c, length=3)[0], None), x, length=2)[0], X
    )
    assert [c.repeats for c in found] == [6]
    assert gw.total_traffic(found) == Traffic(6, 6 * 96)
    found = count(
        lambda x: lax.while_loop(lambda c: c.sum() < 1, lambda c: lax.psum(c, AXIS), x), X
    )
    assert [c.repeats for c in found] == [None]


def test_branches_are_told_apart():
    def nested(x):
        # no collective inside: not numbered
        quiet = lax.cond(x[0, 0] > 2, lambda: x, lambda: x + 1)
        return lax.switch(
            x[0, 0].astype(int),
            [
                lambda: quiet,
                lambda: lax.psum(x, AXIS),
                lambda: lax.cond(
                    x[0, 0] > 1, lambda: lax.psum(x, AXIS) + lax.pmax(x, AXIS), lambda: x
                ),
            ],
        )

    sent = count(nested, X)
    assert [c.branches for c in sent] == [((0, 1),), ((0, 2), (1, 1)), ((0, 2), (1, 1))]
    assert gw.total_traffic(sent, {0: 0, 1: 0}) == Traffic(0, 0)
    assert gw.total_traffic(sent, {0: 1, 1: 0}) == Traffic(1, 96)
    assert gw.total_traffic(sent, {0: 2, 1: 1}) == Traffic(2, 192)


@pytest.mark.parametrize("check_vma", [False, True])
def test_mapped_functions_need_no_axis_env(check_vma):
    def body(x):
        return lax.psum(x, AXIS)

    mapped = jax.shard_map(
        body, mesh=mesh_of(4), in_specs=jax.P(AXIS), out_specs=jax.P(), check_vma=check_vma
    )
    assert gw.total_traffic(gw.collective_traffic(jax.jit(mapped), X)) == Traffic(1, 24)
    assert gw.total_traffic(
        gw.collective_traffic(jax.pmap(body, AXIS), jnp.zeros((4, 3)))
    ) == Traffic(1, 12)


def test_a_sum_over_no_mapped_axis_sends_nothing():
    assert gw.collective_traffic(jax.vmap(lambda x: lax.psum(x, AXIS), axis_name=AXIS), X) == ()
