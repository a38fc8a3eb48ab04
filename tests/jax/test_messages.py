"""What a step sends: the count and the bytes are those of `gradwire.plan`, in the jaxpr and in the compiled program."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire
import gradwire.jax_backend as gw
from gradwire import AllReduce, PowerSGD, Traffic, WireDtype
from tests.jax.replicas import AXIS, one_step, power
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


def test_dtypes_travel_apart_and_nothing_travels_for_nothing():
    params = zeros() | {"half": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)}
    collectives = sent(PowerSGD(2), params)
    # At rank 2 two matrices of 64 x 32 and one of 16 x 32, with a vector and a scalar; and one matrix in bfloat16.
    expected = 4 * (2 * 2 * (64 + 32) + 2 * (16 + 32) + 64 + 1)
    assert sum(c.nbytes for c in collectives if c.dtype == "float32") == expected
    assert sum(c.nbytes for c in collectives if c.dtype == "bfloat16") == 2 * 2 * (64 + 32)
    assert len(collectives) == 4
    assert sent(AllReduce(), {"none": zeros()["none"]}) == ()


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


def test_many_parameters_still_share_two_messages():
    """By their own names: paths in a tree."""
    params = {"layer": [{"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}] * 20}
    assert gw.parameter_shapes(params)["layer/19/w"] == (64, 64)
    total = gw.total_traffic(sent(PowerSGD(2), params))
    assert total == gradwire.plan(gw.parameter_shapes(params), PowerSGD(2)).steps[0]
    assert total.collectives == 2
