"""A GPT to train, with the parameters of `shapes.gpt`."""

from __future__ import annotations

import torch
from shapes import gpt
from torch import Tensor, nn
from torch.nn import functional as F

HEAD = 64


class GPT(nn.Module):
    """Tied embeddings, pre-norm; the loss of a batch of tokens (batch, length).

    Args:
        layers, width, vocabulary, context: as in `shapes.gpt`; the width is a multiple of 64.
    """

    def __init__(self, layers: int, width: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.layers = layers
        # In the order of the model, which a ParameterDict would not keep.
        for name, shape in gpt(layers, width, vocabulary, context).items():
            start = (
                torch.randn(shape) * 0.02
                if len(shape) > 1
                else torch.full(shape, float("norm" in name and name.endswith("w")))
            )
            self.register_parameter(f"p{name}", nn.Parameter(start))

    def forward(self, tokens: Tensor) -> Tensor:
        p = dict(self.named_parameters())
        width = p["ptokens"].shape[1]
        x = F.embedding(tokens, p["ptokens"]) + p["ppositions"][: tokens.shape[1]]
        for i in range(self.layers):

            def of(kind: str, i: int = i) -> tuple[Tensor, Tensor]:
                return p[f"p{i}_{kind}_w"], p[f"p{i}_{kind}_b"]

            qkv = F.linear(F.layer_norm(x, (width,), *of("norm1")), *of("qkv"))
            q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(attended.transpose(1, 2).flatten(2), *of("out"))
            x = x + F.linear(
                F.gelu(F.linear(F.layer_norm(x, (width,), *of("norm2")), *of("up"))), *of("down")
            )
        logits = F.linear(x, p["ptokens"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
