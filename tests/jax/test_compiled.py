"""What a step sends, in the jaxpr and in the compiled program."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import gradwire
from gradwire.jax_backend import collective_traffic, data_parallel, total
from tests.jax.replicas import AXIS, Replicas, gradients

SHAPES = {"a": (48, 32), "b": (48, 32), "c": (24, 40), "bias": (48,), "scale": (), "empty": (0, 3)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def sent(algorithm: object, params: object = PARAMS) -> tuple:
    tx = data_parallel(algorithm, axis_name=AXIS)
    return collective_traffic(tx.update, params, tx.init(params), axis_env=[(AXIS, 4)])


@pytest.mark.parametrize(
    "algorithm",
    [
        gradwire.AllReduce(),
        gradwire.PowerSGD(1),
        gradwire.PowerSGD(4),
        gradwire.PowerSGD(2, warm_start=False),
        gradwire.PowerSGD(2, square=True),
        gradwire.PowerSGD({"a": 2, "c": 1}),
        gradwire.WireDtype(gradwire.PowerSGD(2), "bfloat16"),
        gradwire.WireDtype(gradwire.AllReduce(), "float16"),
    ],
    ids=repr,
)
def test_the_jaxpr_sends_the_plan(algorithm: object) -> None:
    expected = gradwire.plan(SHAPES, algorithm)
    assert total(sent(algorithm)) == expected.steps[0]


def test_half_steps_send_their_plan_in_turn() -> None:
    algorithm = gradwire.PowerSGD(2, half_step=True)
    collectives = sent(algorithm)
    first, second = gradwire.plan(SHAPES, algorithm).steps
    assert total(collectives, taken={0: 1}) == first  # the predicate is "phase 0"
    assert total(collectives, taken={0: 0}) == second


def test_the_dense_start_sends_the_gradients() -> None:
    collectives = sent(gradwire.PowerSGD(2, start_step=5))
    assert total(collectives, taken={0: 0}) == gradwire.plan(SHAPES, gradwire.AllReduce()).steps[0]
    assert total(collectives, taken={0: 1}) == gradwire.plan(SHAPES, gradwire.PowerSGD(2)).steps[0]


def test_a_message_per_dtype() -> None:
    params = {"a": jnp.zeros((48, 32)), "h": jnp.zeros((48, 32), jnp.bfloat16)}
    collectives = sent(gradwire.PowerSGD(2), params)
    assert sorted(c.dtype for c in collectives) == ["bfloat16", "bfloat16", "float32", "float32"]


@pytest.mark.parametrize("mode", ["pmap", "shard_map"])
def test_the_compiled_program_has_two_all_reduces(mode: str) -> None:
    tx = optax.chain(data_parallel(gradwire.PowerSGD(2), axis_name=AXIS), optax.sgd(0.1))
    replicas = Replicas(tx, PARAMS, mode=mode)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *gradients(SHAPES, 0))
    text = replicas._step.lower(stacked, replicas.state).compile().as_text()
    elements = [
        sum(int(n) for n in re.findall(r"f32\[(\d+)\]", line.split(" all-reduce(")[0]))
        for line in text.splitlines()
        if " all-reduce(" in line
    ]
    compressed = [t for t in gradwire.plan(SHAPES, gradwire.PowerSGD(2)).tensors if t.compressed]
    rows = sum(t.rank * t.shape[0] for t in compressed)
    columns = sum(t.rank * t.shape[1] for t in compressed)
    assert sorted(elements) == sorted([rows + 48 + 1, columns])
