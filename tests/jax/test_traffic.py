"""The counter of collectives, on functions whose traffic is known."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gradwire import Traffic
from gradwire.jax_backend import collective_traffic, total_traffic
from gradwire.jax_backend.axes.replica_groups import one_message
from tests.jax.replicas import AXIS, mesh_of

X = jnp.zeros((8, 3), jnp.float32)
SUM, HALF = "all_reduce", jnp.float16
count = partial(collective_traffic, axis_env=[(AXIS, 4)])


@jax.custom_jvp
def custom(x):
    return lax.psum(x, AXIS)


custom.defjvp(lambda x, t: (custom(*x), t[0]))


def sums(xs):
    return [lax.psum(x, AXIS) for x in xs]


def halves(x):
    return lax.all_gather(lax.psum_scatter(x, AXIS, tiled=True), AXIS, tiled=True)


def several(x):
    return one_message(sums, [x, x[:2], x.astype(jnp.float16)]) + one_message(sums, [x])


@pytest.mark.parametrize(
    ("collectives", "sent", "total"),
    [
        # One entry for each array, and none for what is empty; what is sent together is one message for each kind and dtype.
        (lambda x: lax.psum((x, x[:0], x.astype(HALF)), AXIS), [(SUM, "float32", 96), (SUM, "float16", 48)], (2, 144)),
        (several, [(SUM, "float32", 96 + 24), (SUM, "float16", 48), (SUM, "float32", 96)], (3, 264)),
        (lambda x: lax.pmean(x.astype(jnp.bfloat16), AXIS), [(SUM, "bfloat16", 48)], (1, 48)),
        (lambda x: lax.pmax(x, AXIS), [(SUM, "float32", 96)], (1, 96)),
        (lambda x: lax.ppermute(x, AXIS, [(0, 1)]), [("permute", "float32", 96)], (1, 96)),
        # Halves of an all-reduce count half.
        (halves, [("reduce_scatter", "float32", 96), ("all_gather", "float32", 96)], (2, 96)),
        (lambda x: lax.all_gather(x[0, 0].astype(HALF), AXIS), [("all_gather", "float16", 8)], (1, 4)),
        (lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True), [("all_to_all", "float32", 96)], (1, 48)),
        (jax.jit(lambda x: jax.checkpoint(custom)(x)), [(SUM, "float32", 96)], (1, 96)),
    ],
)
def test_what_is_counted(collectives, sent, total):
    found = count(collectives, X)
    assert [(c.kind, c.dtype, c.nbytes) for c in found] == sent
    assert {(c.axes, c.branches, c.repeats) for c in found} == {((AXIS,), (), 1)}
    assert total_traffic(found) == Traffic(*total)


def test_a_scan_repeats():
    def body(c, _):
        return lax.psum(c, AXIS), None

    twice = lambda x: lax.scan(lambda c, _: (lax.scan(body, c, length=3)[0], None), x, length=2)[0]  # noqa: E731
    sent = count(twice, X)
    assert [c.repeats for c in sent] == [6]
    assert total_traffic(sent) == Traffic(6, 6 * 96)


def test_a_while_has_no_total():
    sent = count(lambda x: lax.while_loop(lambda c: c.sum() < 1, lambda c: lax.psum(c, AXIS), x), X)
    assert [c.repeats for c in sent] == [None]


def test_branches_are_told_apart():
    def nested(x):
        quiet = lax.cond(x[0, 0] > 2, lambda: x, lambda: x + 1)  # no collective inside: not numbered
        return lax.switch(
            x[0, 0].astype(int),
            [
                lambda: quiet,
                lambda: lax.psum(x, AXIS),
                lambda: lax.cond(x[0, 0] > 1, lambda: lax.psum(x, AXIS) + lax.pmax(x, AXIS), lambda: x),
            ],
        )

    sent = count(nested, X)
    assert [c.branches for c in sent] == [((0, 1),), ((0, 2), (1, 1)), ((0, 2), (1, 1))]
    assert total_traffic(sent, {0: 0, 1: 0}) == Traffic(0, 0)
    assert total_traffic(sent, {0: 1, 1: 0}) == Traffic(1, 96)
    assert total_traffic(sent, {0: 2, 1: 1}) == Traffic(2, 192)


@pytest.mark.parametrize("check_vma", [False, True])
def test_mapped_functions_need_no_axis_env(check_vma):
    def body(x):
        return lax.psum(x, AXIS)

    mapped = jax.shard_map(body, mesh=mesh_of(4), in_specs=jax.P(AXIS), out_specs=jax.P(), check_vma=check_vma)
    assert total_traffic(collective_traffic(jax.jit(mapped), X)) == Traffic(1, 24)
    assert total_traffic(collective_traffic(jax.pmap(body, AXIS), jnp.zeros((4, 3)))) == Traffic(1, 12)


def test_a_sum_over_no_mapped_axis_sends_nothing():
    assert collective_traffic(jax.vmap(lambda x: lax.psum(x, AXIS), axis_name=AXIS), X) == ()
