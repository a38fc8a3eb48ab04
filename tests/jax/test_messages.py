"""What a step sends: the count and the bytes are those of `gradwire.plan`, in the jaxpr and in the compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire
import gradwire.jax_backend as gw
from gradwire import AllReduce, PowerSGD, Traffic, WireDtype
from tests.jax.replicas import AXIS, mesh_of, power

SHAPES = {"a": (64, 32), "b": (64,), "c": (16, 8, 4), "d": (64, 32), "none": (0, 7), "s": ()}


def zeros(dtype=jnp.float32):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in SHAPES.items()}


def sent(algorithm, params, dtype=jnp.float32):
    tx = gw.average_gradients(algorithm, axis_name=AXIS)
    return gw.collective_traffic(tx.update, params, jax.eval_shape(tx.init, params), axis_env=[(AXIS, 4)])


@pytest.mark.parametrize(
    "algorithm",
    [
        power(),
        power(error_feedback=False, rank={"c": 0, "*": 3}),
        power(square=True),
        AllReduce(),
        WireDtype(power(warm_start=False), "bfloat16"),
        WireDtype(AllReduce(), "float16"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_sends_what_the_plan_says(algorithm, dtype):
    plan = gradwire.plan(SHAPES, algorithm, dtype=dtype)
    assert gw.total_traffic(sent(algorithm, zeros(dtype))) == plan.steps[0]


def test_a_half_step_sends_what_the_plan_says_in_each_phase():
    algorithm = power(half_step=True)
    collectives = sent(algorithm, zeros())
    # A false predicate takes branch 0: the phase is not 0.
    assert [gw.total_traffic(collectives, {0: 1}), gw.total_traffic(collectives, {0: 0})] == list(
        gradwire.plan(SHAPES, algorithm).steps
    )
    assert {c.branches for c in collectives} == {((0, 0),), ((0, 1),)}


def test_before_the_start_step_gradients_travel_as_they_are():
    algorithm = power(start_step=3)
    collectives = sent(algorithm, zeros())
    assert gw.total_traffic(collectives, {0: 0}) == gradwire.plan(SHAPES, AllReduce()).steps[0]
    assert gw.total_traffic(collectives, {0: 1}) == gradwire.plan(SHAPES, power()).steps[0]


def test_dtypes_travel_apart_and_nothing_travels_for_nothing():
    params = zeros() | {"half": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)}
    collectives = sent(PowerSGD(2), params)
    # At rank 2 two matrices of 64 x 32 and one of 16 x 32, with a vector and a scalar; and one matrix in bfloat16.
    assert sum(c.nbytes for c in collectives if c.dtype == "float32") == 4 * (
        2 * 2 * (64 + 32) + 2 * (16 + 32) + 64 + 1
    )
    assert sum(c.nbytes for c in collectives if c.dtype == "bfloat16") == 2 * 2 * (64 + 32)
    assert len(collectives) == 4
    assert sent(AllReduce(), {"none": zeros()["none"]}) == ()


def test_the_plan_of_the_parameters_own_names():
    params = {"layer": [{"kernel": jnp.zeros((64, 32))}]}
    shapes = gw.parameter_shapes(params)
    assert shapes == {"layer/0/kernel": (64, 32)}
    assert gw.total_traffic(sent(PowerSGD(2), params)) == gradwire.plan(shapes, PowerSGD(2)).steps[0]


@pytest.mark.parametrize("mode", ["pmap", "shard_map"])
def test_the_compiled_program_holds_two_all_reduces(mode):
    tx = gw.average_gradients(PowerSGD(2), axis_name=AXIS)
    params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
    state = tx.init(params)
    if mode == "pmap":
        step = jax.pmap(tx.update, AXIS)
        arguments = gw.replicate((params, state))
    else:
        specs = jax.P(), gw.partition_specs(state, AXIS)
        mapped = jax.shard_map(tx.update, mesh=mesh_of(4), in_specs=specs, out_specs=specs, check_vma=False)
        step, arguments = jax.jit(mapped), (params, gw.distribute(state, mesh_of(4), AXIS))
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
    shapes = {f"{i}/{kind}": shape for i in range(20) for kind, shape in (("w", (64, 64)), ("b", (64,)))}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    assert gw.total_traffic(sent(PowerSGD(2), params)) == gradwire.plan(shapes, PowerSGD(2)).steps[0]
    assert gw.total_traffic(sent(PowerSGD(2), params)).collectives == 2
