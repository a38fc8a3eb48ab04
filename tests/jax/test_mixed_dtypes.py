"""Parameters of one dtype, by which memory is typed, and gradients of another: nothing changes its
type from step to step, and what is lost is known."""

import dataclasses
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradwire import CompressionWarning, Compressor, PowerSGD, Quantize, Sign, TopK, TwoLevel
from gradwire.jax_backend import (
    abstract_state,
    average_gradients,
    distribute,
    partition_specs,
    relative_error,
    set_replicas,
)
from tests.jax.replicas import AXIS, mesh_of
from tests.methods import METHODS

SHAPES = {"w": (64, 32), "b": (32,)}
MIXED = [
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float16"),
]
#: Besides what differs from another in its rank alone, and what says something of parameters by
#: name.
NAMES = [
    name
    for name in METHODS
    if not name.startswith(("rank_1", "rank_4", "rank_deficient", "rank_by", "views"))
]


def of(dtype):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in SHAPES.items()}


def as_one_of_four(function, *args):
    """What one of four replicas gets, as shapes and dtypes. To map it, too, would take twice the
    time."""
    return jax.make_jaxpr(function, axis_env=[(AXIS, 4)], return_shape=True)(*args)[1]


def types(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@pytest.mark.filterwarnings("ignore::gradwire.CompressionWarning")
@pytest.mark.parametrize("memory", [None, pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_the_types_of_a_state_stay(name, memory):
    algorithm, cases = METHODS[name].algorithm, MIXED
    if memory is not None:  # which is what memory of such parameters is anyway
        cases = [(params, given) for params, given in MIXED if params != memory]
    if memory is not None and isinstance(algorithm, Compressor):
        algorithm = dataclasses.replace(algorithm, state_dtype=memory)
    for params, given in cases:
        tx = average_gradients(algorithm, axis_name=AXIS)
        states = as_one_of_four(tx.init, of(params))
        averages, after = as_one_of_four(tx.update, of(given), states)
        assert types(after) == types(states)
        # Of compressed tensors the wider of both, without which float32 memory could not keep what
        # is lost.
        assert {x.dtype for x in jax.tree.leaves(averages)} <= {
            jnp.dtype(given),
            jnp.promote_types(params, given),
        }


WIDE = {
    "PowerSGD": PowerSGD(2),
    "half steps": PowerSGD(2, half_step=True),
    "4 bits": Quantize("int4"),
    "largest": TopK(4, per=64),
    "signs": Sign(),
}


def lost(algorithm, params, given, steps=200):
    """Of the sum of all mean gradients, the part that is in neither the averages nor the mean
    error."""
    # Under vmap levels are axes.
    sizes = {"node": 2, AXIS: 2} if isinstance(algorithm, TwoLevel) else {AXIS: 4}
    tx, rng = average_gradients(algorithm, axis_name=tuple(sizes)), np.random.default_rng(0)
    init, update = tx.init, tx.update
    for name, size in reversed(sizes.items()):
        init, update = (
            jax.vmap(init, None, axis_name=name, axis_size=size),
            jax.vmap(update, axis_name=name),
        )
    states, step = init({"w": jnp.zeros((64, 32), params)}), jax.jit(update)
    total, summed, base = 0.0, 0.0, rng.standard_normal((64, 32)) * 1e-2
    for _ in range(steps):
        gradients = jnp.asarray(base + 1e-2 * rng.standard_normal((4, 64, 32)), given)
        averages, states = step({"w": gradients.reshape(*sizes.values(), 64, 32)}, states)
        total += np.asarray(averages["w"], np.float64).reshape(4, 64, 32)[0]
        summed += np.asarray(gradients, np.float64).mean(0)
    error = (
        np.asarray(states.local.per_replica["error"]["w"], np.float64).reshape(4, 64, 32).mean(0)
    )
    return np.linalg.norm(total + error - summed) / np.linalg.norm(summed)


PAGE = (Path(__file__).parents[2] / "docs/error-feedback.md").read_text()


def of_page(row, name):
    """What the table says of a method, in percent."""
    cells = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", PAGE, re.MULTILINE)[1].split("|")
    return float(cells[list(WIDE).index(name)].strip(" %"))


@pytest.mark.parametrize(
    ("params", "given"),
    [
        ("bfloat16", "bfloat16"),
        pytest.param("float32", "bfloat16", marks=pytest.mark.slow),
        pytest.param("bfloat16", "float16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", WIDE)
def test_float32_memory_loses_nothing(request, name, params, given):
    if "float16" in (params, given):
        request.getfixturevalue("float16_in_jax")
    algorithm = dataclasses.replace(WIDE[name], state_dtype="float32")
    assert lost(algorithm, params, given) < 1e-5
    if params == "float32":  # which is what memory is then of
        assert lost(WIDE[name], params, given) < 1e-5
    assert of_page("float32, any", name) == of_page('any, `state_dtype="float32"`', name) == 0


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.slow
def test_memory_of_16_bits_loses_what_the_page_says(name):
    """Within a factor of three: of many roundings, each of which may fall on either side."""
    with pytest.warns(
        CompressionWarning, match="'w' is of float32.*kept in bfloat16.*state_dtype=.float32"
    ) as said:
        found = 100 * lost(WIDE[name], "bfloat16", "float32")
    assert len(said) == 1
    same = 100 * lost(WIDE[name], "bfloat16", "bfloat16")
    for row, x in zip(("bfloat16, float32", "bfloat16, bfloat16"), (found, same), strict=True):
        assert 1 / 3 < x / of_page(row, name) < 3, row


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.slow
def test_two_levels_lose_what_a_plain_average_within_a_node_rounds_off(name):
    algorithm = TwoLevel(dataclasses.replace(WIDE[name], state_dtype="float32"), 2)
    found = 100 * lost(algorithm, "bfloat16", "bfloat16")
    assert (
        1 / 3 < found / of_page('bfloat16, bfloat16, `state_dtype="float32"`, `TwoLevel`', name) < 3
    )


def test_memory_as_wide_as_its_gradient_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lost(PowerSGD(2), "bfloat16", "bfloat16", steps=1)


LAYER = [(512, 2048), (2048, 512), (512, 512), (1024, 512), (512, 1536), (4096, 512)]


def temporary(algorithm):
    """Bytes that a step takes besides state, gradients and averages, for each element."""
    tx, mesh = average_gradients(algorithm, axis_name=AXIS), mesh_of(2)
    params = {str(i): jax.ShapeDtypeStruct(shape, jnp.bfloat16) for i, shape in enumerate(LAYER)}
    state, rows = (
        abstract_state(jax.eval_shape(tx.init, params), 2, mesh, AXIS),
        jax.NamedSharding(mesh, jax.P(AXIS)),
    )
    given = {
        name: jax.ShapeDtypeStruct((2, *x.shape), x.dtype, sharding=rows)
        for name, x in params.items()
    }
    specs = partition_specs(state, AXIS)

    def step(state, gradients):
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state)

    shards = {"in_specs": (specs, jax.P(AXIS)), "out_specs": (jax.P(), specs), "check_vma": False}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, **shards), donate_argnums=(0, 1))
    nbytes = mapped.lower(state, given).compile().memory_analysis().temp_size_in_bytes
    return nbytes / sum(n * m for n, m in LAYER)


@pytest.mark.filterwarnings("ignore::gradwire.CompressionWarning")
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.slow
def test_temporary_memory_is_what_the_page_says(name):
    """How far XLA fuses may differ where it divides loops otherwise."""
    wide = dataclasses.replace(WIDE[name], state_dtype="float32")
    for row, algorithm in {"memory in bfloat16": WIDE[name], "memory in float32": wide}.items():
        assert temporary(algorithm) == pytest.approx(of_page(row, name), abs=1.0)


@pytest.mark.filterwarnings("ignore::gradwire.CompressionWarning")
@pytest.mark.parametrize("algorithm", [PowerSGD(2), TopK(2, per=16), Sign(), Quantize("int4")])
def test_where_dtypes_are_promoted_only_if_somebody_says_so(algorithm):
    tx = average_gradients(algorithm, axis_name=AXIS)
    for params, given in MIXED:
        found = []
        for mode in ("standard", "strict"):
            with jax.numpy_dtype_promotion(mode):
                found.append(as_one_of_four(tx.update, of(given), tx.init(of(params))))
        assert types(found[0]) == types(found[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_done_beside_the_step_promotes_nothing_either(dtype):
    """A mean of errors for other replicas, and the error of an average."""
    params = {"w": jnp.ones((64, 32), dtype)}
    tx = average_gradients(PowerSGD(2), axis_name=AXIS)
    with jax.numpy_dtype_promotion("strict"):
        mesh = jax.make_mesh((2,), (AXIS,))
        state = distribute(tx.init(params), mesh, AXIS)
        assert set_replicas(state, 4).local.per_replica["error"]["w"].dtype == dtype
        found = jax.vmap(
            lambda g, s: relative_error(g, g, s, axis_name=AXIS),
            (None, None),
            axis_name=AXIS,
            axis_size=2,
        )(params, tx.init(params))
        assert found.whole.tolist() == [0, 0]
