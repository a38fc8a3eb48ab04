"""A byte-level Transformer language model in Flax linen. `model_torch.py` is the same model, layer by layer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import normal, variance_scaling

Dense = functools.partial(nn.Dense, kernel_init=variance_scaling(1.0, "fan_in", "normal"))
LayerNorm = functools.partial(nn.LayerNorm, epsilon=1e-5)


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection. (batch, context, width) → the same."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, context, width = x.shape
        qkv = Dense(3 * width, name="qkv")(LayerNorm(name="norm_1")(x))
        q, k, v = (t.reshape(batch, context, self.heads, -1) for t in jnp.split(qkv, 3, axis=-1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + Dense(width, name="out")(attended.reshape(x.shape))
        up = Dense(4 * width, name="up")(LayerNorm(name="norm_2")(x))
        return x + Dense(width, name="down")(nn.gelu(up, approximate=True))


class Transformer(nn.Module):
    """Bytes (batch, context) → logits (batch, context, vocabulary)."""

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        position = self.param("position", normal(0.1), (self.context, self.width))
        x = nn.Embed(self.vocabulary, self.width, embedding_init=normal(1.0), name="embed")(tokens) + position
        for i in range(self.layers):
            x = Block(self.heads, name=f"blocks_{i}")(x)
        return Dense(self.vocabulary, name="head")(LayerNorm(name="norm")(x))
