"""Small tensors of one shape, computed with as stacks: each comes out as it does in the simulator,
which knows of no stacks, and takes few operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradwire
from gradwire import AllReduce, PowerSGD, Quantize, Sign, TopK, WireDtype
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.jax_backend import abstract_state, average_gradients, partition_specs
from gradwire.jax_backend.ops import packing
from gradwire.jax_backend.ops.batched_small import PART, STACK_BYTES, bundles_of
from tests.bounds import relative
from tests.jax.replicas import AXIS, Replicas, gradients, mesh_of

#: Nine of one shape, so many that they are unstacked in the way of many; tensors that are stacks
#: themselves, and of several axes.
SHAPES = {
    **{f"m{i}": (16, 12) for i in range(9)},
    **{f"s{i}": (2, 16, 12) for i in range(2)},
    **{f"t{i}": (8, 2, 6) for i in range(2)},
    "alone": (12, 16),
    "bias": (16,),
}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def power(**options):
    return PowerSGD(
        **{"rank": 2, "min_compression_rate": 1.0, "stacked": {"s*": 1}, "transpose": ("t*",)}
        | options
    )


#: An error that decays is added to gradients at once, to small ones that would be a stack and to
#: large ones, which are else multiplied without it.
DECAYS = power(error_feedback=0.5)
LARGE = {"large": (256, 256), "s_large": (2, 128, 256), "t_large": (256, 2, 128)}


def joined(algorithm):
    """The stacks of a step."""
    found = []

    def update(g, state):
        tensors = {
            n: {k: jnp.asarray(x, jnp.float32) for k, x in own.items()}
            for n, own in state.tensors.items()
        }
        alike = {
            n: algorithm.alike(n, SHAPES[n], {k: x for k, x in own.items() if k != "error"})
            for n, own in tensors.items()
        }
        found.append(bundles_of(g, tensors, alike.get, multiplied=True))
        return g

    specs = {name: gradwire.Spec(shape) for name, shape in SHAPES.items()}
    state = algorithm.init(NumpyOps(), specs)
    jax.eval_shape(lambda g: update(g, state), PARAMS)
    return set() if found[0] is None else set(found[0].names.values())


def test_what_is_joined():
    assert joined(power()) == {tuple(f"m{i}" for i in range(9)), ("s0", "s1"), ("t0", "t1")}
    # Of another rank, or of another view, they are not alike; with random factors each is drawn by
    # its own name.
    assert tuple(f"m{i}" for i in range(1, 9)) in joined(power(rank={"m0": 1, "*": 2}))
    assert joined(power(rank={"*0": 2, "*": 0})) == set()
    assert joined(power(warm_start=False)) == set()


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        (power(), "pmap"),
        pytest.param(power(rank=5, half_step=True), "shard_map_vma", marks=pytest.mark.slow),
        pytest.param(DECAYS, "pmap", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_they_follow_the_simulator(algorithm, mode):
    rank = algorithm.rank
    assert isinstance(rank, int)
    shapes = SHAPES | (LARGE if algorithm in (DECAYS, power()) else {})
    oracle = gradwire.Simulator(algorithm, shapes, 2)
    run = Replicas(
        average_gradients(algorithm, axis_name=AXIS),
        {n: jnp.zeros(s) for n, s in shapes.items()},
        2,
        mode,
    )
    for step in range(6):
        given = gradients(shapes, step, 2, rank)
        if step == 0:  # their factors are lost, and drawn anew by the name of each
            given = [
                own | {name: np.zeros((16, 12), np.float32) for name in ("m3", "m5")}
                for own in given
            ]
        if step == 3:
            given[1]["m4"] = given[1]["m4"] * np.nan
        before = run.global_state().local.per_replica["error"]
        expected, got = oracle.step(given), run.update(given)
        error = run.global_state().local.per_replica["error"]
        for name in oracle.states[0].tensors:
            if step == 3:
                assert not np.isfinite(got[name]).any()
                assert np.array_equal(error[name], before[name])
                continue
            assert relative(got[name], expected[name]) <= 1e-4
            for replica, state in enumerate(oracle.states):
                kept = state.tensors[name]["error"]
                assert relative(error[name][replica], kept) <= 3e-4


def test_stacks_are_of_bounded_size_and_of_equal_length():
    """Those of one length share what is compiled."""
    names = [f"{i}" for i in range(24)]
    arrays = {n: jax.ShapeDtypeStruct((256, 255), jnp.float32) for n in names}
    found = []

    def traced(g):
        found.append(
            bundles_of(g, {n: {"error": x} for n, x in g.items()}, lambda name: "", multiplied=True)
        )
        return g

    jax.eval_shape(traced, arrays)
    lengths = [len(members) for members in found[0].names.values()]
    assert sum(lengths) == 24
    assert len(set(lengths)) == 1
    assert max(lengths) * 256 * 255 * 4 <= max(STACK_BYTES, 24 * 256 * 255 * 4 // PART)


#: Of one shape, of another by itself, and vectors.
CODED = {
    **{f"m{i}": (16, 16) for i in range(9)},
    **{f"v{i}": (128,) for i in range(3)},
    "alone": (8, 32),
    "odd": (5,),
}


@pytest.mark.parametrize(
    ("algorithm", "replicas", "mode"),
    [
        (Quantize("int8"), 3, "shard_map_vma"),
        pytest.param(Quantize("int8"), 2, "pmap", marks=pytest.mark.slow),
        pytest.param(
            Quantize("int4", error_feedback=0.5, start_step=1), 3, "vmap", marks=pytest.mark.slow
        ),
        (Sign(start_step=1), 2, "shard_map_vma"),
        pytest.param(Sign(per="row", magnitudes=2), 3, "pmap", marks=pytest.mark.slow),
        (TopK(4, per=64), 3, "shard_map_vma"),
        pytest.param(
            TopK(4, per=(8, 8), mean="senders", error_feedback=False),
            2,
            "pmap",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            TopK(4, per=64, start_step=1, max_norm=1.0), 2, "vmap", marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_what_is_coded_follows_the_simulator(algorithm, replicas, mode):
    oracle = gradwire.Simulator(algorithm, CODED, replicas, dtype="float32")
    params = {name: jnp.zeros(shape) for name, shape in CODED.items()}
    run = Replicas(average_gradients(algorithm, axis_name=AXIS), params, replicas, mode)
    rng = np.random.default_rng(0)
    for step in range(4):
        given = [
            {n: rng.standard_normal(s).astype(np.float32) for n, s in CODED.items()}
            for _ in range(replicas)
        ]
        if step == 2:
            given[1]["m4"][3, 3] = np.nan
        expected, got = oracle.step(given), run.update(given)
        for name in oracle.states[0].tensors:
            if step == 2:
                assert not np.isfinite(got[name]).any()
            else:
                assert relative(got[name], expected[name]) <= 1e-4, (step, name)
    for replica, state in enumerate(oracle.states):
        for name, memory in state.tensors.items():
            for key, kept in memory.items():
                assert (
                    relative(run.global_state().local.per_replica[key][name][replica], kept) <= 3e-4
                ), name


def equations(jaxpr):
    """All of a program, those inside of others counted where they stand."""
    inner = [
        x for e in jaxpr.eqns for x in jax.tree.leaves(list(e.params.values()), is_leaf=_is_program)
    ]
    return len(jaxpr.eqns) + sum(equations(getattr(x, "jaxpr", x)) for x in inner if _is_program(x))


def _is_program(x):
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def traced(algorithm, shapes, leaves):
    """Equations of an update of so many leaves, of so many shapes in turn."""
    kinds = [(16, 16), (16, 32), (32, 16), (16, 48), (48, 16)][:shapes]
    gradients = {
        f"{i:03}": jax.ShapeDtypeStruct(kinds[i % shapes], jnp.float32) for i in range(leaves)
    }
    mesh, tx = mesh_of(2), average_gradients(algorithm, axis_name=AXIS)
    state = abstract_state(jax.eval_shape(tx.init, gradients), 2, mesh, AXIS)
    specs = P(), partition_specs(state, AXIS)
    update = jax.shard_map(tx.update, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return equations(jax.make_jaxpr(update)(gradients, state).jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "a_leaf", "a_shape"),
    [
        (WireDtype(AllReduce(), "int8"), 8, 90),
        (Quantize("int8"), 8, 90),
        (Quantize("int4"), 8, 90),
        (Sign(), 8, 90),
        (TopK(4, per=64), 8, 90),
        (TopK(4, per=(8, 8)), 8, 120),
        (PowerSGD(2, min_compression_rate=1.5), 8, 90),
        (PowerSGD(2, min_compression_rate=1.5, half_step=True), 8, 100),
    ],
    ids=str,
)
def test_a_leaf_more_takes_few_operations(algorithm, a_leaf, a_shape):
    one, more, of_five = (
        traced(algorithm, 1, 40),
        traced(algorithm, 1, 80),
        traced(algorithm, 5, 80),
    )
    assert (more - one) / 40 <= a_leaf
    assert (of_five - more) / 4 <= a_shape


def test_a_few_pieces_of_one_array_have_starts_that_xla_does_not_know():
    """Six matrices of each shape are usual. XLA would compile a kernel for each start."""
    found: list = []
    jax.make_jaxpr(lambda x: found.extend(packing._starts([0, 1, 2, 3, 4, 5], x)))(jnp.ones(8))
    assert all(isinstance(start, jax.core.Tracer) for start in found)
