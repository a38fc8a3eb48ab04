"""Models as Flax's users write them: which of their parameters are stacks, and what they are
called."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from gradwire import CompressionWarning, PowerSGD, plan
from gradwire.jax_backend import parameter_shapes, power_sgd
from gradwire.jax_backend.state.names import flatten, stacks_of


class Layer(nn.Module):
    """For `nn.scan`. With `named`, its kernels have names of axes."""

    width: int
    named: bool

    @nn.compact
    def __call__(self, x, _=None):
        init = nn.initializers.lecun_normal()
        if self.named:
            init = nn.with_partitioning(init, ("embed", "mlp"))
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(x)
        return nn.Dense(self.width, kernel_init=init, name="down")(
            nn.Dense(4 * self.width, kernel_init=init, name="up")(x)
        ), None


def scanned(layers, width=512, named=False):
    """Shapes of parameters; nothing is computed."""
    axes = {
        "variable_axes": {"params": 0},
        "split_rngs": {"params": True},
        "metadata_params": {nn.PARTITION_NAME: "layers"},
    }

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(Layer, length=layers, **axes)(width, named, name="layers")(x, None)[0]

    x = jax.ShapeDtypeStruct((1, 16, width), jnp.float32)
    return jax.eval_shape(Stack().init, jax.random.key(0), x)["params"]


def test_init_warns_of_layers_that_nobody_calls_a_stack():
    """By the option; or, where the axes have names, by themselves."""
    tx, said = (
        power_sgd(4, axis_name="data"),
        power_sgd(4, axis_name="data", stacked={"layers/*": 1}),
    )
    with pytest.warns(CompressionWarning, match=r"Say stacked={'layers/\*': 1}") as caught:
        jax.eval_shape(tx.init, scanned(8))
    assert len(caught) == 1
    jax.eval_shape(said.init, scanned(8))
    jax.eval_shape(tx.init, scanned(8, named=True))
    assert "8 × (512 | 2048)" in str(plan(parameter_shapes(scanned(8, named=True)), PowerSGD(4)))


@pytest.mark.parametrize("pattern", ["*/kernel", "layers/up/kernel"])
def test_boxed_parameters_are_called_as_their_user_calls_them(pattern):
    params = scanned(3, 16, named=True)
    assert isinstance(params["layers"]["up"]["kernel"], nn.Partitioned)
    assert "layers/up/kernel" in parameter_shapes(params)
    tx = power_sgd(1, axis_name="data", transpose=(pattern,), min_compression_rate=1.0)
    memory = jax.eval_shape(tx.init, params).memory["q"]["layers"]["up"]["kernel"]
    # of (16, 64): the side of the rows; in no box, whose names are of other axes
    assert memory.shape == (3, 1, 16)


def test_a_box_that_holds_nothing_is_a_hole():
    boxed = {
        "a": nn.Partitioned(jnp.zeros(3), ("x",)),
        "b": nn.Partitioned(optax.MaskedNode(), ("x",)),
    }
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
        "plain": {
            "kernel": box((3, 5), "embed", "mlp"),
            "bias": jax.ShapeDtypeStruct((3,), jnp.float32),
        },
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
