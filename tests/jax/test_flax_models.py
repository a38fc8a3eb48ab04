"""Models as Flax's users write them are compressed as they are in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from benchmarks.shapes import resnet18
from gradwire import CompressionWarning, PowerSGD, plan
from gradwire.jax_backend import parameter_shapes, power_sgd
from gradwire.jax_backend.state.names import flatten, stacks_of
from tests.jax.flax_models import Experts, Transformer, in_torch, params_of

WIDE = {"width": 512, "heads": 8}


def scanned(layers, named=False):
    return params_of(Transformer(**WIDE, layers=layers, scanned=True, named=named), 1, 16, 512)


@pytest.mark.parametrize(
    ("params", "stacked", "apart"),
    [
        (lambda: params_of(Transformer(**WIDE, layers=12, scanned=False), 1, 16, 512), {}, []),
        # By the option; or, where the axes have names, by themselves.
        (lambda: scanned(12), {"layers/*": 1}, ["layers"]),
        (lambda: scanned(8, named=True), {}, ["layers"]),
        (lambda: params_of(Experts(64, 512), 1, 512), {"up": 1, "down": 1}, ["up", "down"]),
    ],
)
def test_a_model_is_compressed_as_in_torch(params, stacked, apart):
    """At the same rank with at most 1.05 times as many bytes."""
    shapes = parameter_shapes(params())
    here, there = plan(shapes, PowerSGD(4, stacked=stacked)), plan(in_torch(shapes, apart), PowerSGD(4))
    assert here.dense_bytes == there.dense_bytes
    assert here.wire_bytes <= 1.05 * there.wire_bytes
    if "layers" in apart:
        assert f"{shapes['layers/up/kernel'][0]} × (512 | 2048)" in str(here)


def test_a_resnet_is_compressed_as_in_torch():
    assert params_of(nn.Conv(16, (3, 5)), 1, 8, 8, 4)["kernel"].shape == (3, 5, 4, 16)
    lies = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
    shapes = {name: tuple(shape[axis] for axis in lies[len(shape)]) for name, shape in resnet18().items()}
    here, there = plan(shapes, PowerSGD(4)), plan(resnet18(), PowerSGD(4))
    assert here.dense_bytes == there.dense_bytes
    assert here.wire_bytes <= 1.05 * there.wire_bytes
    assert there.compression_ratio > 60


def test_init_warns_of_layers_that_nobody_calls_a_stack():
    tx = power_sgd(4, axis_name="data")
    with pytest.warns(CompressionWarning, match=r"Say stacked={'layers/\*': 1}") as caught:
        jax.eval_shape(tx.init, scanned(8))
    assert len(caught) == 1
    jax.eval_shape(power_sgd(4, axis_name="data", stacked={"layers/*": 1}).init, scanned(8))
    jax.eval_shape(tx.init, scanned(8, named=True))


@pytest.mark.parametrize("pattern", ["*/kernel", "layers/up/kernel"])
def test_boxed_parameters_are_called_as_their_user_calls_them(pattern):
    params = params_of(Transformer(16, 2, 3, scanned=True, named=True), 1, 4, 16)
    assert isinstance(params["layers"]["up"]["kernel"], nn.Partitioned)
    assert "layers/up/kernel" in parameter_shapes(params)
    tx = power_sgd(1, axis_name="data", transpose=(pattern,), min_compression_rate=1.0)
    memory = jax.eval_shape(tx.init, params).memory["q"]["layers"]["up"]["kernel"]
    assert memory.value.shape == (3, 1, 16)  # of (16, 64): the side of the rows


def test_a_box_that_holds_nothing_is_a_hole():
    boxed = {"a": nn.Partitioned(jnp.zeros(3), ("x",)), "b": nn.Partitioned(optax.MaskedNode(), ("x",))}
    named = flatten(boxed)
    assert set(named.leaves) == {"a"}
    assert named.holes == {"b"}
    again = named.rebuild({"a": jnp.ones(3)})
    assert jax.tree.structure(again) == jax.tree.structure(boxed)


def test_which_names_of_axes_are_those_of_stacks():
    def box(shape, *names):
        return nn.Partitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)

    tree = {
        "scanned": {
            "kernel": box((3, 4, 5), "layers", "embed", "mlp"),
            "bias": jax.ShapeDtypeStruct((3, 5), jnp.float32),
        },
        "both": box((2, 3, 4, 5), "stage", "experts", None, None),
        "plain": {"kernel": box((3, 5), "embed", "mlp"), "bias": jax.ShapeDtypeStruct((3,), jnp.float32)},
        "inner": box((4, 3, 5), "embed", "layers", "mlp"),  # only leading axes can be a stack
    }
    assert stacks_of(tree) == {"scanned/kernel": 1, "scanned/bias": 1, "both": 2}
    assert stacks_of({"kernel": jnp.zeros((3, 4, 5))}) == {}


def test_nnx_names_its_stacks_too():
    class Block(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mlp"))
            self.linear = nnx.Linear(8, 16, rngs=rngs, kernel_init=init)

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stack(rngs):
        return Block(rngs)

    with nnx.use_eager_sharding(False):
        params = nnx.state(stack(nnx.Rngs(0)), nnx.Param)
        assert stacks_of(params) == {"linear/kernel": 1, "linear/bias": 1}
        tx = power_sgd(1, axis_name="data", min_compression_rate=1.0)
        state = tx.init(params)
    assert jax.tree.leaves(state.memory["q"])[0].shape == (3, 1, 16)
    # An update is shown bare arrays.
    gradients = jax.tree.map(lambda x: np.ones((2, *x.shape), np.float32), nnx.to_pure_dict(params))
    updates = jax.jit(jax.vmap(lambda g: tx.update(g, state)[0], axis_name="data"))(gradients)
    np.testing.assert_allclose(updates["linear"]["kernel"], 1, atol=1e-5)
