"""Replicas that are divided among devices: manual over "dcn", the compiler's over "ici". Read from
compiled programs: what is equal on all devices of a slice crosses "dcn" once, and nothing that is
sharded over "ici" is gathered.
"""

import contextlib
import functools
import json
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradwire
import gradwire.jax_backend as gw
from gradwire import AllReduce, PowerSGD, Quantize, Sign, TopK, WireDtype
from gradwire.jax_backend.ops.packing import from_rows, to_rows
from tests import launch
from tests.jax import sliced
from tests.jax.hlo import collectives
from tests.jax.sliced import (
    FEW,
    IN_PIECES,
    LONGEST,
    MATRIX,
    SHAPES,
    SPECS,
    first,
    mapped,
    mesh_of,
    planned,
    power,
    summary,
)
from tests.launch import LIMIT

pytestmark = pytest.mark.slow


@functools.cache
def of_slices_of_four():
    """In a process with eight devices."""
    env = launch.environment("sliced") | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
    }
    run = subprocess.run(
        [launch.interpreter(), sliced.__file__],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert not run.returncode, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        *((kind, 2) for kind in ("power_sgd", "mean", "diloco", *IN_PIECES)),
        *(
            pytest.param(kind, 4, marks=pytest.mark.slow)
            for kind in ("power_sgd", "mean", "diloco", *IN_PIECES)
        ),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("power_sgd", "int8")),
        pytest.param("two axes", 4, marks=pytest.mark.slow),
    ],
)
def test_a_slice_sends_one_copy_and_gathers_nothing(kind, devices):
    plan = planned({"two axes": "power_sgd"}.get(kind, kind))
    found = (
        of_slices_of_four()[kind] if devices == 4 else summary(sliced.sent(kind, mesh_of(devices)))
    )
    # Vectors that have no pieces, or whose blocks are longer than those, have messages of their
    # own; signs are filled up to rows of 128 bytes.
    apart, filled = kind in ("sign", "tiles"), 128 * devices * len(SHAPES) * (kind == "sign")
    assert plan.collectives <= found["count"] <= plan.collectives * (1 + apart)
    assert plan.nbytes * (kind != "two axes") <= found["bytes"] <= 1.05 * plan.nbytes + filled
    # Factors are gathered, and vectors that lie whole on all devices; of gradients, and of inner
    # and outer parameters that are sharded nothing.
    most = {"power_sgd": plan.nbytes, "two axes": plan.nbytes} | dict.fromkeys(IN_PIECES, 4 * 512)
    assert found["moved"] <= most.get(kind, 0) < MATRIX


@pytest.mark.parametrize("kind", ["half-step", pytest.param("dense start", marks=pytest.mark.slow)])
def test_branches(kind):
    """Each phase of a half-step, and the steps before the start and after it."""
    found = sliced.sent(kind, mesh_of(2), shapes=FEW)
    by_branch = {}
    for c in found:
        by_branch.setdefault(c.computation, []).append(c)
    totals = sorted(
        (s["bytes"], s["count"]) for s in map(summary, by_branch.values()) if s["count"]
    )
    plans = [planned("power_sgd", FEW), planned("mean", FEW)]
    if kind == "half-step":
        plans = sorted(
            gradwire.plan(FEW, sliced.ALGORITHMS[kind]).steps, key=lambda traffic: traffic.nbytes
        )
    assert len(totals) == len(plans)
    for (nbytes, count), plan in zip(totals, plans, strict=True):
        assert nbytes <= 1.05 * plan.nbytes
        assert count == plan.collectives
    assert summary(found)["moved"] <= planned("power_sgd", FEW).nbytes < MATRIX


def twos(shapes):
    """Gradients that are 2 everywhere, of these shapes and where they belong."""
    given = {n: np.full(x.shape, 2.0, x.dtype) for n, x in shapes.items()}
    return jax.device_put(given, {n: x.sharding for n, x in shapes.items()})


#: Each kind of mesh in one place, each place of one kind: compiling is what takes the time.
WAYS = [
    (AxisType.Explicit, "context"),
    *(
        pytest.param(*way, marks=pytest.mark.slow)
        for way in ((AxisType.Auto, "context"), (AxisType.Explicit, "passed"))
    ),
]


@pytest.mark.parametrize(("kind", "place"), WAYS)
def test_every_way_to_map(kind, place):
    mesh, explicit = mesh_of(2, kind), kind == AxisType.Explicit
    step, state = sliced.step_and_state("power_sgd", mesh, shapes=FEW)
    # The same mesh with "ici" left to the compiler.
    passed = (
        {"mesh": mesh.update(axis_types=(AxisType.Explicit, AxisType.Auto))}
        if place == "passed"
        else {}
    )
    run = mapped(step, state, **passed)
    if explicit and not passed:
        specs = {n: SPECS.get(n, P()) for n in FEW}, jax.tree.map(lambda x: x.sharding.spec, state)
        run = jax.sharding.auto_axes(run, axes=("ici",), out_sharding=specs)
    run = jax.jit(run) if explicit else run
    given = twos(sliced.shapes_of_gradients(mesh, shapes=FEW))
    with contextlib.nullcontext() if passed else jax.set_mesh(mesh):
        if explicit:
            found = summary(collectives(run.lower(given, state).compile().as_text(), mesh))
            assert (found["count"], found["bytes"]) <= (2, 1.05 * planned("power_sgd", FEW).nbytes)
            assert found["moved"] <= planned("power_sgd", FEW).nbytes
        updates, after = run(given, state)
    # Of rank 1 as all of them are, nothing is lost; and updates and errors lie as parameters do.
    assert all(np.allclose(x, 2.0, atol=1e-5) for x in updates.values())
    for name, error in after.local.per_replica["error"].items():
        if name in SPECS and hasattr(error, "sharding"):
            cut = NamedSharding(mesh, P("dcn", *SPECS[name]))
            assert error.sharding.shard_shape(error.shape) == cut.shard_shape(error.shape)
            own = updates[name].sharding.shard_shape(SHAPES[name])
            assert own == NamedSharding(mesh, SPECS[name]).shard_shape(SHAPES[name])


def loss(params, x):
    return jnp.square(jnp.tanh(x @ params["up"]) @ params["down"] - x).mean()


def gathered_in_training(average):
    """Of a whole step with FSDP: shapes of what is gathered, but factors. (What it computes is in
    tests/jax/test_composition.py.)"""
    mesh, tx = mesh_of(2), optax.chain(average, optax.sgd(0.5))
    params = sliced.arrays(
        mesh, {"up": P("ici"), "down": P("ici")}, {"up": (64, 256), "down": (256, 64)}
    )
    state = gw.distribute((params, tx.init(params)), mesh, "dcn")

    def step(x, state):
        params, opt_state = state
        updates, opt_state = tx.update(jax.grad(loss)(params, x), opt_state, params)
        return (), (optax.apply_updates(params, updates), opt_state)

    x = jax.ShapeDtypeStruct((16, 64), np.float32, sharding=NamedSharding(mesh, P(("dcn", "ici"))))
    program = jax.jit(mapped(step, state, mesh=mesh, check_vma=False)).lower(x, state).compile()
    gathers = [
        c
        for c in collectives(program.as_text(), mesh)
        if c.kind not in ("all-reduce", "reduce-scatter")
    ]
    return sorted(shape for c in gathers for shape in c.shapes if np.prod(shape) >= 64 * 256)


@pytest.mark.slow
def test_fsdp_gathers_what_it_gathers_without():
    """Parameters for the forward pass."""
    pmean = optax.stateless(lambda g, _: jax.tree.map(lambda x: lax.pmean(x, "dcn"), g))
    expected = gathered_in_training(pmean)
    assert expected
    assert gathered_in_training(gw.power_sgd(4, axis_name="dcn")) == expected


def averaging(algorithm, specs, make, shapes=FEW, kind=AxisType.Auto):
    """A step: the mesh, what it was given, the function, its state."""
    mesh = mesh_of(2, kind)
    given = {
        n: jax.device_put(
            make(n, (2, *s)).astype(np.float32), NamedSharding(mesh, P("dcn", *specs.get(n, P())))
        )
        for n, s in shapes.items()
    }
    tx = gw.average_gradients(algorithm, axis_name="dcn")
    state = gw.distribute(tx.init(sliced.arrays(mesh, specs, shapes)), mesh, "dcn")
    return mesh, given, mapped(lambda g, s: tx.update(first(g), s), state, mesh=mesh), state


def assert_follows(simulator, step, given, state, tolerance):
    """For three steps, in averages and in errors. Returns the last averages and state."""
    for _ in range(3):
        averages, state = step(given, state)
        expected = simulator.step(
            [{n: np.asarray(x)[r] for n, x in given.items()} for r in range(2)]
        )
        for name, x in expected.items():
            assert np.allclose(averages[name], x, rtol=tolerance, atol=tolerance), name
    for name, error in state.local.per_replica["error"].items():
        rows = [own.tensors.get(name, {}).get("error") for own in simulator.states]
        assert rows[0] is None or np.allclose(
            error, np.stack(rows), rtol=tolerance, atol=tolerance
        ), name
    return averages, state


def integers(name, shape):
    return np.random.default_rng(len(name)).integers(-8, 8, shape)


def normal(name, shape):
    return np.random.default_rng(len(name)).normal(size=shape)


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        (PowerSGD(2, square=True), AxisType.Auto),
        (power(half_step=True, start_step=1), AxisType.Explicit),
    ],
    ids=str,
)
def test_numbers_are_those_of_whole_replicas(algorithm, kind):
    _, given, run, state = averaging(algorithm, SPECS, normal, kind=kind)
    simulator, run = gradwire.Simulator(algorithm, FEW, 2, dtype="float32"), jax.jit(run)
    explicit = kind == AxisType.Explicit
    warned = pytest.warns(
        UserWarning, match=r"'ici' is of AxisType.Explicit.*gathers every array.*mesh.update\("
    )

    def step(given, state):
        with warned if explicit and not simulator.steps else contextlib.nullcontext():
            return run(given, state)

    averages, _ = assert_follows(simulator, step, given, state, 1e-3)
    if explicit:
        assert averages["a/up"].sharding.spec == P("ici", None)


#: The blocks of a vector of 512 are not those of its halves.
TILES = TopK(0.05, per=(32, 32))


# Of integers no sum lies so near to zero that its sign could be another one.
@pytest.mark.parametrize(
    ("algorithm", "make"), [(Sign(), integers), (TILES, normal)], ids=["signs", "tiles"]
)
def test_signs_and_largest_elements_of_pieces(algorithm, make):
    """Each device of a slice sends those of its piece, and what is in no piece is sent beside
    them."""
    mesh, given, run, state = averaging(algorithm, LONGEST, make)
    run = jax.jit(run)
    found = summary(collectives(run.lower(given, state).compile().as_text(), mesh))
    simulator, plan = (
        gradwire.Simulator(algorithm, FEW, 2, dtype="float32"),
        gradwire.plan(FEW, algorithm, world_size=2),
    )
    assert plan.wire_bytes <= found["bytes"] <= 1.05 * plan.wire_bytes
    assert plan.compression_ratio > 5
    assert found["moved"] <= 4 * 512  # the vector
    _, state = assert_follows(simulator, run, given, state, 1e-5)
    for name, error in state.local.per_replica["error"].items():
        if name in LONGEST and simulator.states[0].tensors.get(name, {}).get("error") is not None:
            assert error.sharding.shard_shape(error.shape) == given[name].sharding.shard_shape(
                given[name].shape
            )


@pytest.mark.parametrize("broken", ["a/up", "a/bias"])
def test_a_nan_in_a_piece_or_beside_them_is_in_all_that_is_compressed(broken):
    _, given, run, before = averaging(TILES, LONGEST, normal)
    run = jax.jit(run)
    _, state = run(given, before)
    averages, after = run(given | {broken: given[broken].at[(1, 3)].set(np.nan)}, state)
    assert all(np.isnan(x).all() for name, x in averages.items() if name != "scalar")
    assert np.isfinite(averages["scalar"])
    for old, new in zip(jax.tree.leaves(state.local), jax.tree.leaves(after.local), strict=True):
        assert np.any(old) or old.size == 1
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    "algorithm", [WireDtype(AllReduce(), "bfloat16"), Quantize("int8")], ids=repr
)
def test_averages_in_codes(algorithm):
    """Each device of a slice codes its piece. Of integers bfloat16 knows all; what is left of
    others is no more than 8 bits leave."""
    cast = algorithm == WireDtype(AllReduce(), "bfloat16")
    mesh, given, run, state = averaging(algorithm, LONGEST, integers if cast else normal)
    program = jax.jit(run).lower(given, state).compile()
    found = summary(collectives(program.as_text(), mesh))
    plan = gradwire.plan(FEW, algorithm, world_size=2).steps[0]
    # XLA on CPU widens bfloat16.
    assert found["bytes"] <= 1.05 * plan.nbytes * (2 if cast else 1)
    # Two replicas send each other all codes; and a scalar, which a block would not shorten.
    assert found["count"] == plan.collectives == (1 if cast else 2)
    # Vectors that lie whole on all devices are put together again.
    assert found["moved"] <= 4 * 512
    averages, after = program(given, state)
    for name, x in given.items():
        mean = np.asarray(x).mean(0)
        assert np.abs(averages[name] - mean).max() <= (0 if cast else 2 * np.abs(x).max() / 127)
    if isinstance(algorithm, Quantize):
        for name, error in after.local.per_replica["error"].items():
            sent = np.asarray(given[name]) - np.asarray(error)
            # What lies between two codes XLA may compute twice, once for each of them.
            assert (
                np.abs(sent.mean(0) - averages[name]).mean() < 1e-4 < np.abs(error).mean()
                or name == "scalar"
            )
            if name in LONGEST:
                assert error.sharding.shard_shape(error.shape) == given[name].sharding.shard_shape(
                    given[name].shape
                )


def test_a_nan_in_one_piece_is_everywhere():
    _, given, run, state = averaging(Quantize("int8", max_norm=3.0), LONGEST, normal)
    run = jax.jit(run)
    broken = given | {"a/up": given["a/up"].at[1, 3, 500].set(np.nan)}
    averages, after = run(broken, state)
    assert all(np.isnan(x).all() for x in averages.values())
    assert not any(np.any(x) for x in jax.tree.leaves(after.local.per_replica))
    # Clipped to a norm that is that of all pieces.
    averages, _ = run(given, state)
    norms = [
        np.sqrt(sum(float((np.asarray(x)[r] ** 2).sum()) for x in given.values())) for r in range(2)
    ]
    for name, x in given.items():
        clipped = sum(np.asarray(x)[r] * 3.0 / norms[r] for r in range(2)) / 2
        assert np.allclose(averages[name], clipped, atol=2 * np.abs(clipped).max() / 127 + 1e-3)


@pytest.mark.parametrize(
    "compressor",
    [WireDtype(AllReduce(), "int8"), TILES, pytest.param(power(), marks=pytest.mark.slow)],
    ids=repr,
)
def test_differences_of_diloco_compressed(compressor):
    mesh = mesh_of(2)
    params = sliced.arrays(mesh, LONGEST, FEW)
    tx = gw.diloco(
        optax.sgd(1.0),
        1,
        axis_name="dcn",
        compressor=compressor,
        lr=1.0,
        momentum=0.0,
        nesterov=False,
    )

    def step(g, state):
        return (), gw.stack_replicas(tx.step(first(g), gw.this_replica(state)))

    state = gw.distribute(gw.stack_replicas((params, tx.init(params))), mesh, "dcn")
    given = twos(sliced.shapes_of_gradients(mesh, LONGEST, FEW))
    program = jax.jit(mapped(step, state, mesh=mesh)).lower(given, state).compile()
    found = summary(collectives(program.as_text(), mesh))
    plan = gradwire.plan(FEW, compressor, world_size=2).steps[0]
    assert found["bytes"] <= 1.05 * plan.nbytes
    # Of a vector that is in no piece there are messages besides.
    assert plan.collectives <= found["count"] <= plan.collectives * (1 + (compressor == TILES))
    assert found["moved"] <= planned("power_sgd", FEW).nbytes < MATRIX
    (after, _) = program(given, state)[1].per_replica
    # Of each block of ones as many elements have come down to -1 as are sent.
    left = [1.0, -1.0] if compressor == TILES else [-1.0]
    for name, x in after.items():
        assert np.abs(np.asarray(x)[..., None] - left).min(-1).max() <= 0.05, name
        assert len(left) == 1 or name == "scalar" or 0.04 < (np.asarray(x) == -1).mean() < 0.06, (
            name
        )


def test_factors_in_codes():
    """Every device codes all of them, and sends a part."""
    algorithm = WireDtype(power(), "int8")
    mesh, given, run, state = averaging(
        algorithm, SPECS, lambda name, shape: np.full(shape, 2.0), SHAPES
    )
    program = jax.jit(run).lower(given, state).compile()
    found = summary(collectives(program.as_text(), mesh))
    assert found["bytes"] <= 1.05 * gradwire.plan(SHAPES, algorithm, world_size=2).steps[0].nbytes
    assert found["moved"] <= 2 * planned("power_sgd").nbytes < MATRIX
    averages, _ = program(given, state)
    assert all(np.allclose(x, 2.0, atol=0.05) for x in averages.values())
    assert {c.dtype for c in gw.collective_traffic(run, given, state)} == {"uint8"}


def test_rows_and_back():
    shapes = [(3, 8), (2, 3, 4), (5,), (), (6, 2), (4,)]
    given = [
        np.arange(np.prod(s), dtype=np.float32).reshape(s) + 100 * i for i, s in enumerate(shapes)
    ]
    rows = jax.jit(lambda xs: to_rows(xs, 4))(given)
    assert rows.shape == (4, (24 + 24 + 4) // 4 + -(-(5 + 1 + 12) // 4))
    # Each row has its piece of the last axis, if it is divided.
    assert np.array_equal(rows[1, :6], given[0][:, 2:4].reshape(-1))
    for x, back in zip(given, jax.jit(lambda x: from_rows(x, shapes))(rows), strict=True):
        assert np.array_equal(x, back)
    assert jax.jit(lambda x: from_rows(to_rows([x], 3), [()])[0])(np.float32(7)) == 7


def test_vectors_travel_as_they_lie_only_if_they_are_few():
    """Of a mean, without factors beside them: on each device of a slice all of them, unless that is
    more than a hundredth."""
    shapes = {"w": (32, 64), "bias": (64,)}
    mesh, given, run, state = averaging(AllReduce(), {"w": P("ici")}, normal, shapes)
    found = collectives(jax.jit(run).lower(given, state).compile().as_text(), mesh)
    assert summary(found) == {"count": 1, "bytes": 4 * (32 * 64 + 64), "moved": 4 * 64}


def test_axes_that_jax_gathers_over():
    mesh = mesh_of(2, AxisType.Explicit)
    step, state = sliced.step_and_state("diloco", mesh, shapes=FEW)
    with pytest.warns(
        UserWarning, match=r"'ici' is of AxisType.Explicit.*gathers every array.*mesh.update\("
    ):
        jax.eval_shape(
            mapped(step, state, mesh=mesh), sliced.shapes_of_gradients(mesh, shapes=FEW), state
        )
