"""Models as Flax's users write them, and the shapes that the same models have in torch."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

Shapes = dict[str, tuple[int, ...]]


class Layer(nn.Module):
    """A pre-norm Transformer layer, for a loop and for `nn.scan`. With `named`, its kernels have names of axes."""

    width: int
    heads: int
    named: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        init = nn.initializers.lecun_normal()
        if self.named:
            init = nn.with_partitioning(init, ("embed", "mlp"))
        x = x + nn.MultiHeadDotProductAttention(self.heads, name="attention")(nn.LayerNorm()(x))
        up = nn.Dense(4 * self.width, kernel_init=init, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(self.width, kernel_init=init, name="down")(nn.gelu(up)), None


class Transformer(nn.Module):
    """(N, context, width) → the same, by layers in a loop or, `scanned`, in one stack."""

    width: int
    heads: int
    layers: int
    scanned: bool
    named: bool = False

    @nn.compact
    def __call__(self, x):
        if not self.scanned:
            for i in range(self.layers):
                x, _ = Layer(self.width, self.heads, name=f"layer_{i}")(x)
            return x
        metadata = {nn.PARTITION_NAME: "layers"}
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": self.layers}
        stack = nn.scan(Layer, **options, metadata_params=metadata)
        return stack(self.width, self.heads, self.named, name="layers")(x, None)[0]


class Experts(nn.Module):
    """A layer of experts, two matrices each, in one array; every token through all of them."""

    experts: int
    width: int

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, self.width, 4 * self.width))
        down = self.param("down", init, (self.experts, 4 * self.width, self.width))
        weights = nn.softmax(nn.Dense(self.experts, name="router")(x))
        each = jnp.einsum("nef,efd->ned", nn.relu(jnp.einsum("nd,edf->nef", x, up)), down)
        return jnp.einsum("ned,ne->nd", each, weights)


def params_of(model, *shape):
    """The parameters' shapes, from an input of this shape; nothing is computed."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), x)["params"]


def in_torch(shapes, stacks=()):
    """The same model's parameters as torch has them: one weight (out, in, …) for each linear map, one vector for each bias.

    Args:
        shapes: in Flax.
        stacks: beginnings of the names of parameters that are stacks, which torch keeps apart.
    """
    found = {}
    for name, shape in shapes.items():
        if name.startswith(tuple(stacks)):
            apart = in_torch({f"{name}.{i}": shape[1:] for i in range(shape[0])})
            found |= apart
        else:
            found[name] = _in_torch(name.rpartition(".")[0] or name, shape)
    return found


def _in_torch(name, shape):
    if name.endswith("bias"):
        return (math.prod(shape),)
    if len(shape) == 3 and "out" in name:  # (heads, dimensions, out)
        return shape[2], shape[0] * shape[1]
    if len(shape) == 3:  # (in, heads, dimensions)
        return shape[1] * shape[2], shape[0]
    return shape[::-1]
