"""Small models and losses: what the tests of the torch backend train."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire import Compressor
from gradwire.core.protocol import mean

Loss = Callable[[nn.Module, int, int], Tensor]
#: By step, the branches of `Branches` that each rank takes.
Taken = Sequence[tuple[Sequence[str], ...]]


@dataclass(frozen=True, kw_only=True, repr=False)
class Half(Compressor):
    """A compressor of a user's own, whose average is an array."""

    def memory(self, ops: Any, name: str, spec: Any) -> dict[str, Any] | None:
        return {} if len(spec.shape) > 1 else None

    async def compress(
        self, ops: Any, name: str, x: Any, memory: Any, context: Any
    ) -> tuple[Any, Any, Any]:
        sent = x * 0.5
        return sent, await mean(sent), memory


def mlp(
    *widths: int, bias: bool = True, seed: int = 0, frozen: Sequence[int] = ()
) -> nn.Sequential:
    """Linear layers with tanh between them: the same weights on every rank. The linear ones are 0,
    2, 4, ...; some may be `frozen`."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(widths):
        layers += [nn.Linear(n, m, bias=bias), nn.Tanh()]
    for i in frozen:
        layers[i].requires_grad_(False)
    return nn.Sequential(*layers[:-1])


def batches_on(
    width: int, batch: int = 24, dtype: torch.dtype = torch.float32, *, spread: float = 0.05
) -> Callable[[int, int], Tensor]:
    """Inputs of the rank and the step.

    They lie near a plane, so gradients have little beyond rank 2: where directions of nearly equal
    weight compete, rounding decides which is sent next. With `spread=1` they lie in all directions
    alike: for half precision, in which the small ones would be rounding alone, and for few steps.
    """
    plane = torch.randn(2, width, generator=torch.Generator().manual_seed(width)) * torch.tensor(
        [[1.0], [0.5]]
    )

    def inputs(rank: int, step: int) -> Tensor:
        data = torch.Generator().manual_seed(1000 * rank + step)
        near, off = (
            torch.randn(batch, 2, generator=data) @ plane,
            torch.randn(batch, width, generator=data),
        )
        return ((1 - spread) * near + spread * off).to(dtype)

    return inputs


def off_the_sine(y: Tensor, x: Tensor, rank: int) -> Tensor:
    """The loss of outputs of these inputs."""
    # a double rounded to a float is no smooth function of it
    wide = torch.promote_types(y.dtype, torch.float32)
    target: Tensor = torch.sin(3 * x[:, : y.shape[1]].to(wide) + rank)
    return (y.to(wide) - target).square().mean()


def loss_on(
    width: int, batch: int = 24, dtype: torch.dtype = torch.float32, *, spread: float = 0.05
) -> Loss:
    """Regression on data of the rank and the step, see `batches_on`: `loss(model, rank, step)`."""
    inputs = batches_on(width, batch, dtype, spread=spread)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x = inputs(rank, step)
        return off_the_sine(model(x), x, rank)

    return loss


class Layers(nn.Module):
    """Layers and parameters by name, and a forward pass: a function of the module and its
    arguments."""

    def __init__(
        self, forward: Callable[..., Any] | None = None, **parts: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *args: Any) -> Any:
        assert self._forward
        return self._forward(self, *args)


class Branches(nn.Module):
    """A trunk and two branches, of which each forward pass may take any or none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = mlp(40, 32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, taken: Sequence[str] = ("left", "right")) -> Tensor:
        x = self.trunk(x)
        for name in taken:
            x = x + torch.tanh(getattr(self, name)(x))
        return x


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward; or not, if `reentrant` is None. With
    `shared`, the first is also the last."""

    def __init__(self, *, reentrant: bool | None, shared: bool = False, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        if shared:
            self.layers[3] = self.layers[0]
        self.head = nn.Linear(width, 24)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = (
                layer(x)
                if self.reentrant is None
                else checkpoint(layer, x, use_reentrant=self.reentrant)
            ).tanh()
        y: Tensor = self.head(x)
        return y


TAKEN: Taken = [
    (("left", "right"), ("left", "right")),
    (("left",), ("right",)),
    ((), ("left",)),
    ((), ()),
    (("right",), ()),
    (("left",), ("left",)),
    (("left", "right"), ("left", "right")),
]


def branching_loss(model: nn.Module, rank: int, step: int, taken: Taken = TAKEN) -> Tensor:
    return loss_on(40)(lambda x: model(x, taken[step][rank]), rank, step)
