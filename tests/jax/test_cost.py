"""What the compiled program is made of: an average costs what `pmean` does, and PowerSGD stores
nothing as large as a gradient.

By XLA's own analysis and by the text of the program, on two devices and with a parameter update. No
times.
"""

import functools
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gradwire.jax_backend as gw
from gradwire import AllReduce, Spec, TwoLevel
from gradwire.jax_backend.advise.method_cost import method_cost
from tests.jax.replicas import AXIS, mesh_of, one_step

pytestmark = pytest.mark.slow

Shapes = Mapping[str, tuple[int, ...]]
LARGE = {"a": (256, 512), "b": (512, 256), "c": (256, 512), "d": (512,)}
MANY = {
    f"{i}/{kind}": shape for i in range(24) for kind, shape in (("a", (64, 64)), ("b", (64, 128)))
}
GRADIENT = 4 * sum(int(np.prod(s)) for s in LARGE.values())


def pmean():
    return optax.stateless(lambda g, _: jax.tree.map(lambda x: lax.pmean(x, AXIS), g))


TRANSFORMATIONS = {
    "pmean": pmean,
    "mean": functools.partial(gw.all_reduce_mean, axis_name=AXIS),
    "buckets": functools.partial(gw.all_reduce_mean, axis_name=AXIS, bucket_bytes=1 << 19),
    "power_sgd": functools.partial(gw.power_sgd, 4, axis_name=AXIS),
    "half-step": functools.partial(gw.power_sgd, 4, axis_name=AXIS, half_step=True),
    "half-step, dense start": functools.partial(
        gw.power_sgd, 4, axis_name=AXIS, half_step=True, start_step=5
    ),
}


@functools.cache
def compiled(name, many=False):
    """A step of plain gradient descent with given gradients, all donated."""
    shapes = MANY if many else LARGE
    tx = optax.chain(TRANSFORMATIONS[name](), optax.sgd(0.1))
    params = {n: jnp.zeros(s) for n, s in shapes.items()}
    state = params, tx.init(params)
    specs = gw.partition_specs(state, AXIS)

    def step(state, gradients):
        updates, new = tx.update(jax.tree.map(lambda x: x[0], gradients), state[1], state[0])
        return optax.apply_updates(state[0], updates), new

    mesh = mesh_of(2)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=specs, check_vma=False
    )
    gradients = {n: jax.ShapeDtypeStruct((2, *s), jnp.float32) for n, s in shapes.items()}
    return (
        jax.jit(mapped, donate_argnums=(0, 1))
        .lower(gw.distribute(state, mesh, AXIS), gradients)
        .compile()
    )


def temporary(name):
    """Bytes of temporary memory, in gradients."""
    size = compiled(name).memory_analysis().temp_size_in_bytes
    return size / GRADIENT


@pytest.mark.parametrize("name", ["mean", "buckets"])
def test_an_average_takes_the_memory_of_pmean_and_copies_nothing(name):
    assert temporary(name) <= 1.05 * temporary("pmean")
    assert " concatenate(" not in compiled(name).as_text()


@pytest.mark.parametrize("name", ["power_sgd", "half-step"])
def test_powersgd_stores_nothing_as_large_as_a_gradient(name):
    assert temporary(name) < 0.5
    largest = 4 * 256 * 512
    copies = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", compiled(name).as_text())
    assert all(4 * np.prod([int(n) for n in dims.split(",")]) < largest for dims in copies)


def test_a_dense_start_stores_the_averages_and_no_errors():
    """As a branch decides between the two kinds of step, what it returns has memory of its own."""
    assert temporary("half-step, dense start") < 1.5


@pytest.mark.parametrize(("name", "most"), [("mean", 1.1), ("power_sgd", 10), ("half-step", 12)])
def test_many_matrices_make_a_program_of_bounded_size(name, most):
    """In instructions beside `pmean`'s: what XLA's own passes take time for."""
    assert instructions(name) <= most * instructions("pmean")


@pytest.mark.parametrize(
    ("name", "most"), [("mean", 1.01), ("power_sgd", 0.65), ("half-step", 0.85)]
)
def test_many_small_matrices_take_less_than_a_gradient(name, most):
    gradient = 4 * sum(int(np.prod(s)) for s in MANY.values())
    assert compiled(name, many=True).memory_analysis().temp_size_in_bytes < most * gradient


@pytest.mark.parametrize(
    ("mode", "half_step"),
    [("pmap", False), ("shard_map", True)],
    ids=["pmap", "shard_map, half-step"],
)
def test_a_step_takes_one_more_gradient_and_reuses_what_is_donated(mode, half_step):
    gradients = {
        name: jnp.ones(shape)
        for name, shape in {"a": (256, 256), "b": (512, 128), "c": (256,)}.items()
    }
    size, tx = (
        sum(x.nbytes for x in gradients.values()),
        gw.power_sgd(2, axis_name=AXIS, half_step=half_step),
    )
    step, arguments = one_step(tx, gradients, mode, 2, donate_argnums=(0, 1))
    memory = step.lower(*arguments).compile().memory_analysis()
    # All of it, with the mark of the place, but for the bytes of a step, which are a constant.
    state = tx.init(gradients)
    reused = sum(x.nbytes for x in jax.tree.leaves(state)) - state.account.sent.nbytes
    assert memory.alias_size_in_bytes == size + reused
    assert memory.temp_size_in_bytes < 1.1 * size


def instructions(name):
    return len(
        re.findall(
            r"^\s+(?:ROOT )?%?[\w.\-]+ = ", compiled(name, many=True).as_text(), re.MULTILINE
        )
    )


def test_what_a_method_with_two_levels_computes_is_measured_on_one_replica():
    cost = method_cost(TwoLevel(AllReduce(), 2), {"w": Spec((32, 32), "float32")}, 4)
    assert cost.compute > 0
    assert len(cost.messages) > 1
