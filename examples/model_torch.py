"""A byte-level Transformer language model in torch. `model_flax.py` is the same model, layer by
layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention of several heads. (batch, context, width) → the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out(attended.transpose(1, 2).flatten(2))
        return x


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection. (batch, context, width) → the
    same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        x = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x


class Transformer(nn.Module):
    """Bytes (batch, context) → logits (batch, context, vocabulary)."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        nn.init.normal_(self.embed.weight, std=1.0)
        nn.init.normal_(self.position, std=0.1)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
                nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        x = self.head(self.norm(x))
        return x
