"""Parameter shapes of the models that the benchmarks use."""

from __future__ import annotations

import math
from collections.abc import Mapping


def elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of all tensors together."""
    return sum(math.prod(shape) for shape in shapes.values())


def gpt(
    layers: int = 6, width: int = 512, vocabulary: int = 12_000, context: int = 512
) -> dict[str, tuple[int, ...]]:
    """A GPT with tied embeddings: 25 million parameters by default."""
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (vocabulary, width),
        "positions": (context, width),
    }
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


def resnet18() -> dict[str, tuple[int, ...]]:
    """ResNet-18 for ImageNet (He et al. 2016, Table 1): 11.7 million parameters."""
    shapes: dict[str, tuple[int, ...]] = {"conv": (64, 3, 7, 7), "norm_w": (64,), "norm_b": (64,)}
    before = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"{stage}_{block}"
            for i, channels in enumerate((before, width)):
                shapes |= {
                    f"{name}_conv{i}": (width, channels, 3, 3),
                    f"{name}_norm{i}_w": (width,),
                    f"{name}_norm{i}_b": (width,),
                }
            if before != width:
                shapes |= {
                    f"{name}_down": (width, before, 1, 1),
                    f"{name}_down_norm_w": (width,),
                    f"{name}_down_norm_b": (width,),
                }
            before = width
    return shapes | {"head_w": (1000, 512), "head_b": (1000,)}
