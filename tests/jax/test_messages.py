"""What a step sends: the count and the bytes are those of `gradwire.plan`, in the jaxpr and in the compiled program, in buckets and in pieces."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradwire
import gradwire.jax_backend as gw
from gradwire import AllReduce, PowerSGD, TopK, Traffic, WireDtype
from gradwire.core.buckets.assignment import assign_buckets
from gradwire.jax_backend.axes import cpu_hosts
from gradwire.jax_backend.engine import driver
from tests.jax.replicas import AXIS, Replicas, gradients, one_step, power
from tests.methods import METHODS, VARIANTS
from tests.parity import cases

SHAPES = {"a": (64, 32), "b": (64,), "c": (16, 8, 4), "d": (64, 32), "none": (0, 7), "s": ()}


def zeros():
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


def sent(algorithm, params):
    tx = gw.average_gradients(algorithm, axis_name=AXIS)
    return gw.collective_traffic(tx.update, params, jax.eval_shape(tx.init, params), axis_env=[(AXIS, 4)])


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
    """In each phase, and before the start: whichever branches are taken, what is sent is what is planned for a step."""
    algorithm = ALGORITHMS[name]
    params = {n: jax.ShapeDtypeStruct(shape, dtype) for n, shape in cases.SHAPES.items()}
    collectives, shapes = sent(algorithm, params), gw.parameter_shapes(params)  # in the order of a tree
    conds = {cond for c in collectives for cond, _ in c.branches}
    assert len(conds) == (algorithm.start_step > 0) + (algorithm.cycle > 1)
    ways = (dict(zip(sorted(conds), taken, strict=True)) for taken in itertools.product((0, 1), repeat=len(conds)))
    planned = {*gradwire.plan(shapes, algorithm, dtype=dtype, world_size=4).steps}
    if algorithm.start_step:
        planned |= {*gradwire.plan(shapes, AllReduce(), dtype=dtype).steps}
    assert {gw.total_traffic(collectives, way) for way in ways} == planned


def test_the_phase_and_the_start_say_which():
    """A false predicate takes branch 0."""
    steps = [gw.total_traffic(sent(power(half_step=True), zeros()), {0: int(phase == 0)}) for phase in (0, 1)]
    assert steps == list(gradwire.plan(SHAPES, power(half_step=True)).steps)
    steps = [gw.total_traffic(sent(power(start_step=3), zeros()), {0: started}) for started in (0, 1)]
    assert steps == [gradwire.plan(SHAPES, a).steps[0] for a in (AllReduce(), power())]


def test_the_compiled_program_holds_two_all_reduces():
    params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
    step, arguments = one_step(gw.average_gradients(PowerSGD(2), axis_name=AXIS), params, "pmap", 4)
    text = step.lower(*arguments).compile().as_text()
    payloads = [
        next(int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"f32\[([\d,]*)\]", line))
        for line in text.splitlines()
        if re.search(r"= .* all-reduce(-start)?\(", line)
    ]
    assert len(payloads) == 2, "one message for each of P and Q"
    assert Traffic(len(payloads), 4 * sum(payloads)) == gradwire.plan(SHAPES, PowerSGD(2)).steps[0]
    assert gw.total_traffic(gw.collective_traffic(step, *arguments)) == gradwire.plan(SHAPES, PowerSGD(2)).steps[0]


def test_large_tensors_that_stay_uncompressed_lie_in_the_same_message():
    shapes = {"large": (1024, 512), "a": (64, 64), "b": (64,)}
    algorithm = power(rank={"large": 0, "*": 2})
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    assert gw.total_traffic(sent(algorithm, params)) == gradwire.plan(shapes, algorithm).steps[0]
    # As it is, not packed: nothing in the program is longer than it.
    tx = gw.average_gradients(algorithm, axis_name=AXIS)
    text = str(jax.make_jaxpr(tx.update, axis_env=[(AXIS, 4)])(params, jax.eval_shape(tx.init, params)))
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
    "small": {"a": ((), "float32"), "b": ((0, 3), "float32"), "c": ((), "bfloat16"), "d": ((3,), "float32")},
}
SIZES = [(1, None), (240, None), (300, 60), (10**6, 200), (10**6, None)]


def plan_of(tree, limit, first):
    """(dtype, bytes) of each bucket, straight from the assignment, in the order of launching. Empty ones are not sent."""
    specs = list(tree.values())[::-1]
    sizes = [int(np.prod(shape)) * ITEMSIZE[dtype] for shape, dtype in specs]
    buckets = assign_buckets(sizes, [first or limit, limit], [dtype for _, dtype in specs])
    sent = [(specs[b[0]][1], sum(sizes[i] for i in b)) for b in buckets]
    return [(dtype, nbytes) for dtype, nbytes in sent if nbytes]


@pytest.mark.parametrize(("limit", "first"), SIZES)
@pytest.mark.parametrize("name", TREES)
def test_buckets_are_those_of_c10d(name, limit, first):
    """Their numbers are in the parity table."""
    params = {n: jax.ShapeDtypeStruct(shape, dtype) for n, (shape, dtype) in TREES[name].items()}
    collectives = sent(AllReduce(limit, first), params)
    assert [(c.kind, c.dtype, c.nbytes) for c in collectives] == [
        ("all_reduce", *planned) for planned in plan_of(TREES[name], limit, first)
    ]


# Messages in short pieces, as between CPU hosts: the same bits, in as many collectives.

SENDS = {
    "zero1": lambda: gw.zero1(optax.sgd(0.1), axis_name=AXIS, replicas=3),
    "gather": lambda: gw.average_gradients(TopK(keep=0.2), axis_name=AXIS),
    "reduce": lambda: gw.average_gradients(PowerSGD(2), axis_name=AXIS),
}


@pytest.mark.parametrize("mode", ["vmap", "shard_map_vma"])
@pytest.mark.parametrize("what", SENDS)
def test_pieces_make_the_bits_of_the_whole(what, mode, monkeypatch):
    shapes = {"w": (9, 14), "b": (7,)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def two_steps():
        replicas = Replicas(SENDS[what](), params, 3, mode)
        return [replicas.update(gradients(shapes, step, 3)) for step in range(2)]

    def pieces():
        tx = SENDS[what]()
        return gw.collective_traffic(tx.update, params, jax.eval_shape(tx.init, params), axis_env=[(AXIS, 3)])

    whole, messages = two_steps(), pieces()
    for module in (cpu_hosts, driver):
        monkeypatch.setattr(module, "between_cpu_hosts", lambda: True)
    monkeypatch.setattr(cpu_hosts, "SHORT", 40)
    jax.tree.map(np.testing.assert_array_equal, two_steps(), whole)
    cut = pieces()
    assert any(message.repeats > 1 for message in cut) is (what != "reduce")
    assert len(cut) == len(messages)
