"""Models whose steps differ in what they compute and in what they send: three that are small enough
in batch for a core of a laptop, and three that compute for 0.3 to 1 s on it, with few parameters
for that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from model_torch import Transformer


class Block(nn.Module):
    """A basic block of ResNet (He et al. 2016, Figure 5)."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.conv_1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(width)
        self.conv_2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        self.down = (
            nn.Identity()
            if before == width
            else nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.down(x))


def resnet18() -> nn.Module:
    """ResNet-18 for 1000 classes: 11.7 million parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = 64
    for width in (64, 128, 256, 512):
        layers += [Block(before, width), Block(width, width)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def gpt() -> nn.Module:
    """25 million parameters, embedding and head a quarter of them."""
    return Transformer(vocabulary=6000, context=64, width=512, layers=6, heads=8)


def mlp() -> nn.Module:
    """2.1 million parameters that meet many rows: it computes long and sends little."""
    return nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512)
    )


def small_gpt() -> nn.Module:
    """2.5 million parameters that meet 1,536 bytes of text."""
    return Transformer(vocabulary=256, context=128, width=192, layers=5, heads=6)


class ViT(nn.Module):
    """ViT-Tiny for 1000 classes (Touvron et al. 2021, Table 1): 5.7 million parameters, patches of
    16 × 16."""

    def __init__(
        self, pixels: int = 160, width: int = 192, layers: int = 12, heads: int = 3
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.position = nn.Parameter(0.02 * torch.randn((pixels // 16) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT + self.position
        y: Tensor = self.head(self.layers(tokens).mean(1))
        return y


def vit() -> nn.Module:
    return ViT()


def tokens() -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 6000, (1, 64))
    return x, x


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 96, 96), torch.randint(0, 1000, (2,))


def texts() -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 256, (12, 128))
    return x, x


def larger_images() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 160, 160), torch.randint(0, 1000, (8,))


def many_images() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 128, 128), torch.randint(0, 1000, (8,))


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(512, 512)
    return x, x


def next_token(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


#: Name → what builds it, a batch, and the loss.
MODELS: dict[
    str,
    tuple[
        Callable[[], nn.Module],
        Callable[[], tuple[Tensor, Tensor]],
        Callable[[Tensor, Tensor], Tensor],
    ],
] = {
    "GPT, 25 million": (gpt, tokens, next_token),
    "ResNet-18": (resnet18, images, F.cross_entropy),
    "MLP, long steps": (mlp, rows, F.mse_loss),
    "GPT that computes": (small_gpt, texts, next_token),
    "ViT-Tiny, 8 images": (vit, larger_images, F.cross_entropy),
    "ResNet-18, 8 images": (resnet18, many_images, F.cross_entropy),
}
#: Those whose steps take 0.3 to 1 s of a core; the others hardly compute.
COMPUTING = ("GPT that computes", "ViT-Tiny, 8 images", "ResNet-18, 8 images")


def train_step(name: str, model: nn.Module) -> Callable[[], None]:
    """A step of AdamW on one batch."""
    _, batch, loss = MODELS[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = batch()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step
