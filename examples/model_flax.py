"""A byte-level Transformer language model in Flax linen. `model_torch.py` is the same model, layer
by layer."""

from __future__ import annotations

import functools

import jax
from flax import linen as nn
from jax.nn.initializers import normal, variance_scaling

INIT = variance_scaling(1.0, "fan_in", "normal")
Dense = functools.partial(nn.Dense, kernel_init=INIT)
Attention = functools.partial(nn.MultiHeadDotProductAttention, kernel_init=INIT)
LayerNorm = functools.partial(nn.LayerNorm, epsilon=1e-5)


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection. (batch, context, width) → the
    same, as `nn.scan` wants it."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        x = x + Attention(self.heads, name="attention")(LayerNorm(name="norm_1")(x), mask=mask)
        up = Dense(4 * x.shape[-1], name="up")(LayerNorm(name="norm_2")(x))
        return x + Dense(x.shape[-1], name="down")(nn.gelu(up, approximate=True)), None


class Transformer(nn.Module):
    """Bytes (batch, context) → logits (batch, context, vocabulary). The parameters of all blocks
    are stacked: (layers, …)."""

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        position = self.param("position", normal(0.1), (self.context, self.width))
        x = (
            nn.Embed(self.vocabulary, self.width, embedding_init=normal(1.0), name="embed")(tokens)
            + position
        )
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )
        x, _ = blocks(self.heads, name="blocks")(x, nn.make_causal_mask(tokens))
        return Dense(self.vocabulary, name="head")(LayerNorm(name="norm")(x))
