"""Letters and digits in sixteen typefaces, turned, moved and noisy, and a convolutional network that
tells them apart: a training that is no language model, as `gradwire compare` is given it.

Typefaces are those that Matplotlib carries, so nothing is fetched. A batch is a function of (seed,
step, replica), and no image is seen twice.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import string
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "examples")]
import flags  # noqa: E402
import matplotlib as mpl  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from frontier.runs import BETAS, MAX_NORM, WEIGHT_DECAY  # noqa: E402
from PIL import Image, ImageDraw, ImageFont  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from gradwire.torch_backend import Training  # noqa: E402

STEPS, RATE = 300, 0.004
SIZE, BATCH = 32, 16
CHARACTERS = string.ascii_letters + string.digits
TYPEFACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)
#: Of images on which methods are judged, each of so many.
WINDOWS, IN_A_WINDOW = 64, 32

Batch = tuple[Tensor, Tensor]


@functools.cache
def upright() -> Tensor:
    """Each character in each typeface, upright: (typefaces, characters, SIZE, SIZE), from 0 to
    1."""
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    images = np.zeros((len(TYPEFACES), len(CHARACTERS), SIZE, SIZE), np.float32)
    for row, name in zip(images, TYPEFACES, strict=True):
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), SIZE * 2 // 3)
        for image, character in zip(row, CHARACTERS, strict=True):
            page = Image.new("L", (SIZE, SIZE))
            middle = (SIZE // 2, SIZE // 2)
            ImageDraw.Draw(page).text(middle, character, 255, font, anchor="mm")
            image[:] = np.asarray(page) / 255
    return torch.from_numpy(images)


def draw(generator: np.random.Generator, n: int) -> Batch:
    """So many images (n, 1, SIZE, SIZE), and which of the characters each shows, (n,)."""
    which = torch.from_numpy(generator.integers(0, len(CHARACTERS), n))
    drawn = upright()[torch.from_numpy(generator.integers(0, len(TYPEFACES), n)), which]
    angle, slant = generator.uniform(-0.2, 0.2, (2, n))
    wide, high = generator.uniform(0.8, 1.2, (2, n))
    across, down = generator.uniform(-0.15, 0.15, (2, n))
    cos, sin = np.cos(angle), np.sin(angle)
    turned = np.array([[wide * cos, slant - high * sin, across], [wide * sin, high * cos, down]])
    grid = F.affine_grid(
        torch.from_numpy(turned.transpose(2, 0, 1)).float(), [n, 1, SIZE, SIZE], align_corners=False
    )
    images = F.grid_sample(drawn[:, None], grid, align_corners=False)
    contrast = generator.uniform(0.5, 1, (n, 1, 1, 1))
    noise = 0.1 * generator.standard_normal((n, 1, SIZE, SIZE))
    return images * torch.from_numpy(contrast).float() + torch.from_numpy(noise).float(), which


def convolution(channels: int, to: int, stride: int) -> nn.Sequential:
    layer = nn.Conv2d(channels, to, 3, stride, padding=1, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(8, to), nn.ReLU())


def network() -> nn.Sequential:
    """Four convolutions and a layer of 62: 367,646 parameters. Without batch norm, whose statistics
    would be those of each replica."""
    return nn.Sequential(
        convolution(1, 32, 2),
        convolution(32, 64, 1),
        convolution(64, 128, 2),
        convolution(128, 128, 1),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128 * 16, len(CHARACTERS)),
    )


def make(seed: int) -> Training:
    """What is trained; `gradwire compare glyphs:make` calls it."""
    torch.manual_seed(seed)
    model = network()
    schedule = argparse.Namespace(lr=RATE, steps=STEPS)
    images, which = draw(np.random.default_rng(2**31), WINDOWS * IN_A_WINDOW)

    def optimizer(parameters: list[nn.Parameter]) -> object:
        made = torch.optim.AdamW(parameters, lr=1.0, betas=BETAS, weight_decay=WEIGHT_DECAY)
        return made, torch.optim.lr_scheduler.LambdaLR(
            made, lambda step: flags.learning_rate(step, schedule)
        )

    def batches(replica: int, replicas: int) -> Iterator[Batch]:
        for step in itertools.count():
            yield draw(np.random.default_rng([seed, step, replica]), BATCH)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> Tensor:
        each = F.cross_entropy(model(images), which, reduction="none")
        return each.view(WINDOWS, IN_A_WINDOW).mean(1)

    def clip() -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    return Training(model, optimizer, batches, loss, after_backward=clip, evaluate=evaluate)
