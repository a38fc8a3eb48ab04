"""`all_reduce_mean` in buckets: the all-reduces of the program are those of the plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gradwire.jax_backend as gw
from gradwire.core.buckets.assignment import assign_buckets
from tests.jax.replicas import AXIS

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

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


@pytest.mark.parametrize(("limit", "first"), SIZES)
@pytest.mark.parametrize("name", TREES)
def test_the_program_sends_the_plan(name, limit, first):
    tree = TREES[name]
    update = update_of(tree, bucket_bytes=limit, first_bucket_bytes=first)
    sent = gw.collective_traffic(update, jax.tree.map(lambda x: x[0], given(tree, 1)), axis_env=[(AXIS, 4)])
    assert [(c.kind, c.dtype, c.nbytes) for c in sent] == [("all_reduce", *p) for p in plan_of(tree, limit, first)]


@pytest.mark.usefixtures("float16_in_jax")
def test_equals_pmean():
    """All trees in one program."""
    updates = {name: update_of(tree, bucket_bytes=300, first_bucket_bytes=60) for name, tree in TREES.items()}

    def both(gradients):
        return {n: updates[n](g) for n, g in gradients.items()}, lax.pmean(gradients, AXIS)

    gradients = {name: given(tree, 4) for name, tree in TREES.items()}
    mine, theirs = jax.jit(jax.vmap(both, axis_name=AXIS, out_axes=None))(gradients)
    for name, tree in TREES.items():
        for n, (shape, dtype) in tree.items():
            found, right = mine[name][n], theirs[name][n]
            assert (found.shape, found.dtype) == (shape, dtype)
            # pmean divides the sum, as we do but for float16.
            tolerance = 1e-2 if dtype == "float16" else 0
            np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, right)), atol=tolerance, rtol=0)
