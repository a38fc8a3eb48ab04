"""Parameter shapes of the models that the benchmarks use."""

from __future__ import annotations

__all__ = ["gpt"]


def gpt(layers: int = 6, width: int = 512, vocabulary: int = 12_000, context: int = 512) -> dict[str, tuple[int, ...]]:
    """A GPT with tied embeddings: 25 million parameters by default."""
    shapes: dict[str, tuple[int, ...]] = {"tokens": (vocabulary, width), "positions": (context, width)}
    for i in range(layers):
        shapes |= {
            f"{i}_norm1_w": (width,),
            f"{i}_norm1_b": (width,),
            f"{i}_qkv_w": (3 * width, width),
            f"{i}_qkv_b": (3 * width,),
            f"{i}_out_w": (width, width),
            f"{i}_out_b": (width,),
            f"{i}_norm2_w": (width,),
            f"{i}_norm2_b": (width,),
            f"{i}_up_w": (4 * width, width),
            f"{i}_up_b": (4 * width,),
            f"{i}_down_w": (width, 4 * width),
            f"{i}_down_b": (width,),
        }
    return shapes
