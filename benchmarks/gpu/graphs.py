"""A whole step of DDP in a CUDA graph, PowerSGD included: whether replays train as eager steps do,
and how long they take. And a model compiled with CUDA graphs of its own, round which the hook runs
as ever.

In processes of their own: a capture that fails leaves the context unusable.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gpu.model import GPT
from gpu.target import Target, error_of
from gradwire import PowerSGD
from gradwire.torch_backend import register_comm_hook

#: Sequences and tokens of each: little work beside the gradients.
BATCH, LENGTH = 2, 512
#: Steps before a capture, which torch asks for with DDP.
BEFORE_CAPTURE = 11
REPLAYS = 10
RANK = 4
Row = dict[str, Any]


class _Training:
    """A GPT, the same each time, under DDP with PowerSGD, and its step on the same tokens."""

    def __init__(
        self, target: Target, size: tuple[int, ...], algorithm: PowerSGD, *, compile_mode: str = ""
    ) -> None:
        torch.manual_seed(0)
        with target.device:
            model = GPT(*size)
            self.tokens = torch.randint(size[2], (BATCH, min(LENGTH, size[3])))
        self.model = model
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        register_comm_hook(ddp, algorithm)
        self.forward: Any = torch.compile(ddp, mode=compile_mode) if compile_mode else ddp
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        self.loss = torch.zeros((), device=target.device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.forward(self.tokens)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def captured(target: Target) -> Row:
    """Eager steps beside replays, from the same weights. On the CPU nothing is captured, and both
    are eager."""
    size = next(iter(target.sizes.values()))
    eager = _Training(target, size, PowerSGD(RANK))
    for _ in range(BEFORE_CAPTURE):
        eager.step()
    start = copy.deepcopy(eager.weights())
    eager_seconds = [target.seconds(eager.step, most=1, warm_up=0)[0] for _ in range(REPLAYS)]
    row: Row = {"eager_ms": statistics.median(eager_seconds) * 1e3, "eager_loss": float(eager.loss)}
    moved = torch.linalg.vector_norm(eager.weights() - start)
    replay, again = _replaying(target, size)
    seconds = [target.seconds(replay, most=1, warm_up=0)[0] for _ in range(REPLAYS)]
    row |= {"replay_ms": statistics.median(seconds) * 1e3, "replay_loss": float(again.loss)}
    # A capture launches nothing, so both have made as many steps.
    row["difference"] = float(torch.linalg.vector_norm(eager.weights() - again.weights()) / moved)
    row["refused"] = _refused(target, size)
    return row


def _replaying(target: Target, size: tuple[int, ...]) -> tuple[Any, _Training]:
    if target.tiny:
        training = _Training(target, size, PowerSGD(RANK))
        for _ in range(BEFORE_CAPTURE):
            training.step()
        return training.step, training
    # As torch's notes on CUDA graphs have it: everything from the construction of DDP on, on a
    # stream that is not the default one.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        training = _Training(target, size, PowerSGD(RANK))
        for _ in range(BEFORE_CAPTURE):
            training.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        training.step()
    return graph.replay, training


def _refused(target: Target, size: tuple[int, ...]) -> str:
    """What is said of a step that a graph cannot repeat; last, since what follows a failed capture
    is undefined."""
    if target.tiny:
        return ""
    stream = torch.cuda.Stream()
    # as in `_replaying`: else the capture fails before gradwire can say anything
    with torch.cuda.stream(stream):
        training = _Training(target, size, PowerSGD(RANK, warm_start=False))
        for _ in range(BEFORE_CAPTURE):
            training.step()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            training.step()
    except RuntimeError as error:
        said: BaseException | None = error
        # leaving a capture that failed raises once more
        while said is not None and "warm_start" not in str(said):
            said = said.__context__
        return error_of(said or error)
    return "nothing was raised"


def compiled(target: Target) -> Row:
    """The same model eager and compiled with CUDA graphs, a small one: compiling is not what is
    measured."""
    size = next(iter(target.sizes.values())) if target.tiny else (2, 512, 8192, 512)
    eager = _Training(target, size, PowerSGD(RANK))
    other = _Training(
        target, size, PowerSGD(RANK), compile_mode="" if target.tiny else "reduce-overhead"
    )
    row: Row = {}
    for name, training in (("eager", eager), ("compiled", other)):
        seconds = target.seconds(training.step, most=10)
        row |= {
            f"{name}_ms": statistics.median(seconds) * 1e3,
            f"{name}_loss": float(training.loss),
        }
    return row
