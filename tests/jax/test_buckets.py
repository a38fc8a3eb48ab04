"""`all_reduce_mean` in buckets: the all-reduces of the program, and of what XLA made of it, are those of the plan."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gradwire.jax_backend as gw
from gradwire.core.buckets.assignment import assign_buckets
from tests.jax.replicas import AXIS, one_step

#: XLA's names of dtypes → ours.
HLO = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16"}
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
APART = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}

TREES = {
    "plain": {"a": ((100,), "float32"), "b": ((20, 10), "float32"), "c": ((100,), "float32"), "d": ((50,), "float32")},
    "mixed": {
        "a": ((50,), "float32"),
        "b": ((25,), "bfloat16"),
        "c": ((50,), "float32"),
        "d": ((25,), "float16"),
        "e": ((5, 10), "float32"),
        "f": ((25,), "bfloat16"),
    },
    "scalars": {"a": ((), "float32"), "b": ((), "float32"), "c": ((), "bfloat16"), "d": ((3,), "float32")},
    "with an empty one": {"a": ((7,), "float32"), "b": ((0, 3), "float32"), "c": ((7,), "float32")},
}
SIZES = [(1, None), (240, None), (300, 60), (10**6, 200), (10**6, None)]


def plan_of(tree, limit, first):
    """(dtype, bytes) of each bucket, straight from the assignment, in the order of launching. Empty ones are not sent."""
    specs = list(tree.values())[::-1]
    sizes = [int(np.prod(shape)) * ITEMSIZE[dtype] for shape, dtype in specs]
    buckets = assign_buckets(sizes, [first or limit, limit], [dtype for _, dtype in specs])
    sent = [(specs[b[0]][1], sum(sizes[i] for i in b)) for b in buckets]
    return [(dtype, nbytes) for dtype, nbytes in sent if nbytes]


def given(tree, replicas):
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=(replicas, *shape)).astype(jnp.dtype(dtype)) for n, (shape, dtype) in tree.items()}


def update_of(tree, **options):
    tx = gw.all_reduce_mean(axis_name=AXIS, **options)
    state = tx.init({n: jax.ShapeDtypeStruct(shape, dtype) for n, (shape, dtype) in tree.items()})
    return lambda gradients: tx.update(gradients, state)[0]


def all_reduces(hlo):
    """(dtype, bytes) of every all-reduce of a compiled module; a merged one counts once, with all that it carries."""
    found = []
    for results in re.findall(r"= (.*?) all-reduce(?:-start)?\(", hlo):
        parts = re.findall(r"(\w+)\[([\d,]*)\]", results)
        sizes = [int(np.prod([int(n) for n in dims.split(",") if n])) for _, dims in parts]
        found.append((HLO[parts[0][0]], sum(size * ITEMSIZE[HLO[parts[0][0]]] for size in sizes)))
    return found


def compiled(tree, limit, first, flags):
    tx = gw.all_reduce_mean(axis_name=AXIS, bucket_bytes=limit, first_bucket_bytes=first)
    step, arguments = one_step(tx, {n: x[0] for n, x in given(tree, 1).items()}, "shard_map", 2)
    return all_reduces(step.lower(*arguments).compile(compiler_options=flags).as_text())


@pytest.mark.parametrize(("limit", "first"), SIZES)
@pytest.mark.parametrize("name", TREES)
def test_the_program_sends_the_plan(name, limit, first):
    tree = TREES[name]
    update = update_of(tree, bucket_bytes=limit, first_bucket_bytes=first)
    sent = gw.collective_traffic(update, jax.tree.map(lambda x: x[0], given(tree, 1)), axis_env=[(AXIS, 4)])
    assert [(c.kind, c.dtype, c.nbytes) for c in sent] == [("all_reduce", *p) for p in plan_of(tree, limit, first)]


@pytest.mark.parametrize(("name", "limit", "first"), [("plain", 300, 60), ("scalars", 8, None), ("mixed", 300, 60)])
def test_the_compiled_module_sends_the_bytes_of_the_plan(request, name, limit, first):
    """Kept apart, XLA sends each gradient by itself: which of them it joins is its own affair."""
    if name == "mixed":
        request.getfixturevalue("float16_in_jax")
    tree = TREES[name]
    each = [(dtype, int(np.prod(shape)) * ITEMSIZE[dtype]) for shape, dtype in tree.values()]
    assert sorted(compiled(tree, limit, first, APART)) == sorted(_widened(each))
    assert sum(n for _, n in plan_of(tree, limit, first)) == sum(n for _, n in each)


def test_left_to_itself_xla_merges_what_is_independent():
    """Why the docstring speaks of an option. The day this fails, the option is needed no more."""
    (merged,) = compiled(TREES["plain"], 1, None, {})
    assert merged == ("float32", 4 * (100 + 200 + 100 + 50))


def _widened(sent):
    """XLA on CPU adds bfloat16 up, and sends it, in float32."""
    return [("float32", 2 * nbytes) if dtype == "bfloat16" else (dtype, nbytes) for dtype, nbytes in sent]


@pytest.mark.parametrize(("limit", "first"), SIZES[1:3])
@pytest.mark.parametrize("name", TREES)
def test_equals_pmean(request, name, limit, first):
    if name == "mixed":
        request.getfixturevalue("float16_in_jax")
    tree = TREES[name]
    gradients = given(tree, 4)
    update = update_of(tree, bucket_bytes=limit, first_bucket_bytes=first)
    both = jax.vmap(lambda g: (update(g), lax.pmean(g, AXIS)), axis_name=AXIS, out_axes=None)
    mine, theirs = jax.jit(both)(gradients)
    for n, (shape, dtype) in tree.items():
        assert mine[n].shape == shape
        assert mine[n].dtype == dtype
        # pmean divides the sum, as we do but for float16.
        tolerance = 1e-2 if dtype == "float16" else 0
        np.testing.assert_allclose(*(np.asarray(x[n], np.float32) for x in (mine, theirs)), atol=tolerance, rtol=0)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 100}], ids=str)
def test_an_empty_tree(options):
    update = update_of({}, **options)
    assert jax.vmap(update, axis_name=AXIS, axis_size=2)({}) == {}
    assert gw.collective_traffic(update, {}, axis_env=[(AXIS, 2)]) == ()
