"""Nothing in a compiled program rests on what StableHLO leaves to a device: each conversion and
each shift is proved to be in range."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

from gradwire import PowerSGD, Quantize, Sign, TopK, WireDtype
from gradwire.jax_backend import average_gradients
from gradwire.jax_backend.advise import compare
from gradwire.jax_backend.ops.short_floats import converted, rounded
from tests.jax.ranges import PLATFORMS, faults
from tests.parity import local_sgd_cases, test_local_sgd_jax, test_zero_jax, zero_cases
from tests.parity.cases import SHAPES
from tests.parity.test_jax import FEW, METHODS, WHOLE, step_of

#: Methods of every kind of code and of message.
KINDS = (
    "rank_2",
    "int8",
    "quantize",
    "by_chance",
    "two_bits",
    "wire_e3m0",
    "wire_float8",
    "wire_factors",
    "top_k_bits",
    "sign",
)
#: Blocks of a shape in which compilers fuse otherwise than in a small one.
LARGE = {"w": (256, 512), "v": (300,)}


SHORT = [
    PowerSGD(2),
    Quantize("int8"),
    Quantize("float8_e4m3fn"),
    Sign(),
    TopK(8, per=64, bits=2),
    WireDtype(PowerSGD(2), "int8"),
]


def found_in(step, *arguments):
    step = step if hasattr(step, "trace") else jax.jit(step)
    return faults(
        step.trace(*arguments).lower(lowering_platforms=PLATFORMS).compiler_ir("stablehlo")
    )


def of_one_step(tx, shapes, replicas, dtype="float32", **weight):
    """What is found in a step of a transformation, and where it begins."""

    def step(params):
        updates, state = tx.update(params, tx.init(params), params, **weight)
        params = optax.apply_updates(params, updates)
        both = (
            tx.average_params(params, state, **weight)
            if hasattr(tx, "average_params")
            else (params, state)
        )
        return jax.tree.map(lambda x: jnp.asarray(x)[None], both)

    mesh, rows = Mesh(np.array(jax.devices()[:replicas]), ("data",)), jax.P("data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=jax.P(), out_specs=rows, check_vma=False)
    return found_in(mapped, {name: jnp.ones(shape, dtype) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    "case",
    [case if case in KINDS else pytest.param(case, marks=pytest.mark.slow) for case in METHODS],
)
def test_methods(case):
    names = tuple(SHAPES) if case in WHOLE else FEW
    step, params, state, placed = step_of(case, "shard_map", jax.devices()[:2], names)
    given = {name: np.zeros((2, *SHAPES[name]), np.float32) for name in names}
    assert found_in(step, params, given, placed(state)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", SHORT, ids=repr)
def test_methods_of_short_floats(algorithm, dtype):
    tx = average_gradients(algorithm, axis_name="data")
    assert of_one_step(tx, LARGE, 2, dtype=dtype) == []


@pytest.mark.parametrize("case", zero_cases.ZERO_CASES)
def test_zero(case):
    assert of_one_step(test_zero_jax.transformation(case, 2), zero_cases.SHAPES, 2) == []


#: Programs that differ in what they compute, not in what they average when.
COMPUTED = ("everything", "weighted_eager")


@pytest.mark.parametrize(
    "case",
    [
        c if c in COMPUTED else pytest.param(c, marks=pytest.mark.slow)
        for c in local_sgd_cases.CASES
    ],
)
def test_local_sgd(case):
    local = local_sgd_cases.CASES[case]
    weight = {"weight": jnp.float32(2)} if local.weighted else {}
    tx = test_local_sgd_jax.local_sgd(optax.sgd(0.1), local, axis_name="data")
    assert of_one_step(tx, local_sgd_cases.SHAPES, local_sgd_cases.REPLICAS, **weight) == []


def test_compare(monkeypatch):
    """Replicas on one device."""
    found = []

    def mapped(step, replicas):
        def run(state, batch):
            found.append(found_in(jax.vmap(step, axis_name=compare.AXIS), state, batch))
            return state, np.zeros(replicas)

        return run

    def make(wrap):
        params = {name: jnp.ones(shape) for name, shape in LARGE.items()}
        tx = wrap(optax.adam(1e-3))

        def step(state, batch):
            loss, gradients = jax.value_and_grad(
                lambda p: sum((x * batch).sum() for x in p.values())
            )(state[0])
            updates, opt_state = tx.update(gradients, state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt_state), loss

        return compare.Training(
            (params, tx.init(params)),
            step,
            lambda rank, replicas: [np.float32(rank + n) for n in range(3)],
        )

    monkeypatch.setattr(compare, "_mapped", mapped)
    compare.run(make, Quantize("int4"), 2, 1, 0, (), lambda: None)
    assert found == [[]]


BITS = 0x4B400000


@pytest.mark.parametrize(
    ("step", "argument", "fault"),
    [
        (
            lambda x: lax.bitcast_convert_type(x + 1.5 * 2**23, jnp.int32).astype(jnp.uint8),
            "float32",
            "convert",
        ),
        (
            lambda x: (lax.bitcast_convert_type(x, jnp.int32) - BITS).astype(jnp.int8),
            "float32",
            "convert",
        ),
        (
            lambda x: jnp.where(x < 127, x, 0).astype(jnp.int8),
            "int32",
            "convert of -2.14748e+09 … 126",
        ),
        (lambda x: (x & 511).astype(jnp.uint8), "int32", "convert of 0 … 511 to ui8"),
        (lambda x: x.astype(jnp.int32), "float32", "convert of -inf … inf or NaN"),
        (
            lambda x: jnp.clip(x, -100, 100).astype(jnp.int8),
            "float32",
            "convert of -100 … 100 or NaN",
        ),
        (
            lambda x: jnp.where(x >= 128, 0, jnp.where(x <= -129, 0, x)).astype(jnp.int8),
            "float32",
            "or NaN",
        ),
        (lambda x: x.astype(jnp.float8_e4m3fn), "float32", "no inf"),
        (
            lambda x: lax.shift_left(jnp.int32(1), x),
            "int32",
            "shift_left by -2.14748e+09 … 2.14748e+09 of 32 bits",
        ),
        (
            lambda x: lax.shift_right_logical(x, jnp.int32(32)),
            "int32",
            "shift_right_logical by 32 … 32",
        ),
        (
            lambda x: lax.fori_loop(0, 2, lambda i, y: y + x.astype(jnp.uint8), jnp.uint8(0)),
            "int32",
            "convert",
        ),
        (
            lambda x: lax.cond(x > 0, lambda: x.astype(jnp.int8), lambda: jnp.int8(0)),
            "int32",
            "convert",
        ),
        (
            lambda x: x - x.astype(jnp.bfloat16).astype(jnp.float32),
            "float32",
            "of bf16 to f32, which may be left out",
        ),
        (
            lambda x: jax.jit(lambda y: y.reshape(1))(x.astype(jnp.float16)).astype(jnp.float32),
            "float32",
            "f16",
        ),
    ],
)
def test_what_is_left_to_a_device_is_found(step, argument, fault):
    (found,) = found_in(step, jax.ShapeDtypeStruct((), argument))
    assert fault in found


@pytest.mark.parametrize(
    ("step", "argument"),
    [
        (lambda x: jnp.clip(x, -128, 127).astype(jnp.int8), "int32"),
        (lambda x: jnp.minimum(jnp.maximum(x, 0), 255).astype(jnp.uint8), "int32"),
        (lambda x: (x & 255).astype(jnp.uint8), "int32"),
        (lambda x: lax.shift_right_logical(x, jnp.int32(24)).astype(jnp.uint8), "int32"),
        (lambda x: (x >> 25).astype(jnp.int8), "int32"),
        (lambda x: jnp.where((x < 128.0) & (x > -129.0), x, 0.0).astype(jnp.int8), "float32"),
        (lambda x: jnp.where(jnp.abs(x) > 464, jnp.nan, x).astype(jnp.float8_e4m3fn), "float32"),
        (lambda x: ((x & 15) * 16 + (x & 15)).astype(jnp.uint8), "int32"),
        (lambda x: x * 0x7FEB352D, "int32"),
        (
            lambda x: x - lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16).astype(jnp.float32),
            "float32",
        ),
        (lambda x: x.astype(jnp.float32) * 2.0, "bfloat16"),
    ],
)
def test_what_is_in_range_is_not(step, argument):
    assert found_in(step, jax.ShapeDtypeStruct((), argument)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_floats_are_rounded_before_they_are_shorter(request, dtype):
    """So that nothing changes where a compiler leaves out the conversion and the one back: any bits
    but of the smallest numbers, which a device may flush."""
    bits = (
        np.random.default_rng(0)
        .integers(0, 2**32, 1 << 20, dtype=np.uint64)
        .astype(np.uint32)
        .view(np.float32)
    )
    near = np.float32(
        np.random.default_rng(1).standard_normal(1 << 18) * np.exp2(np.arange(1 << 18) % 64 - 40)
    )
    edges = np.float32(
        [
            464,
            464.01,
            65519.99,
            65520,
            57344,
            61440,
            2.0**-14,
            2.0**-6,
            2.0**-10,
            math.inf,
            math.nan,
            -0.0,
        ]
    )
    x = np.concatenate([bits, near, edges])
    x = x[~((np.abs(x) < np.finfo(np.float32).tiny) & (x != 0))]
    with np.errstate(all="ignore"):
        right = x.astype(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: rounded(x, dtype))(x), right)
    if dtype != "bfloat16":  # by way of which 8 bits are made
        request.getfixturevalue("float16_in_jax")
    np.testing.assert_array_equal(
        jax.jit(lambda x: converted(x, dtype))(x).astype(np.float32), right
    )
