"""The GPT of `shapes.gpt` in JAX, for benchmarks that want the gradients of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

HEAD = 64


def initial(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Parameters of these shapes: ones for the scales of norms, zeros for biases, small random
    numbers for the rest."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        n: 0.02 * jax.random.normal(k, s)
        if len(s) > 1
        else jnp.full(s, float("norm" in n and n.endswith("_w")))
        for (n, s), k in zip(shapes.items(), keys, strict=True)
    }


def loss(params: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Cross-entropy of the next token, for tokens (batch, time + 1)."""
    seen, wanted = tokens[:, :-1], tokens[:, 1:]
    x = params["tokens"][seen] + params["positions"][: seen.shape[1]]
    for i in range(sum(name.endswith("_qkv_w") for name in params)):
        p = {
            name.removeprefix(f"{i}_"): value
            for name, value in params.items()
            if name.startswith(f"{i}_")
        }
        x = x + _attention(_norm(x, p, "norm1"), p)
        x = x + _linear(jax.nn.gelu(_linear(_norm(x, p, "norm2"), p, "up")), p, "down")
    logits = jax.nn.log_softmax(x @ params["tokens"].T)
    return -jnp.take_along_axis(logits, wanted[..., None], axis=-1).mean()


def _attention(x: jax.Array, p: Mapping[str, jax.Array]) -> jax.Array:
    batch, time, width = x.shape
    head = min(HEAD, width)
    q, k, v = (
        _linear(x, p, "qkv").reshape(batch, time, 3, width // head, head).transpose(2, 0, 1, 3, 4)
    )
    return _linear(
        jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, time, width), p, "out"
    )


def _linear(x: jax.Array, p: Mapping[str, Any], name: str) -> jax.Array:
    y: jax.Array = x @ p[f"{name}_w"].T + p[f"{name}_b"]
    return y


def _norm(x: jax.Array, p: Mapping[str, Any], name: str) -> jax.Array:
    y: jax.Array = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    scaled: jax.Array = y * p[f"{name}_w"] + p[f"{name}_b"]
    return scaled
