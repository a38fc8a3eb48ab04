"""Known answers on this rank's device: steps of an algorithm by the kernels that will run it,
against NumPy's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.ops import Spec
from gradwire.core.simulate.known_answers import KnownStep
from gradwire.core.simulate.lock_step import NDArray, lock_step_of
from gradwire.core.simulate.self_check import Place, self_check
from gradwire.torch_backend.engine.cuda_graphs import capturing
from gradwire.torch_backend.ops.full_precision import plain_arithmetic
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.workspace import Scratch


def wrong_here(
    algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int, device: torch.device | None
) -> str:
    """What an algorithm gets wrong on a device, in words; "" if nothing is, or it was not looked
    at: see `gradwire.core.simulate.self_check.self_check`.

    Nothing of the user's settings has a part in it, and none is changed. While a CUDA graph is
    captured nothing can be looked at.
    """
    if device is None or device.type == "meta" or capturing():
        return ""
    place = Place(_kind(device), f"torch {torch.__version__}", on_cpu=device.type == "cpu")
    return self_check(
        algorithm, specs, replicas, place, lambda what, dtype: _Steps(what, dtype, device)
    )


def _kind(device: torch.device) -> str:
    """What of a device decides how it computes."""
    if device.type != "cuda":
        return device.type
    return (
        f"cuda ({torch.cuda.get_device_name(device)}, CUDA"
        f" {torch.version.cuda or torch.version.hip})"
    )


class _Steps:
    """Each step, all replicas of it, by one `TorchOps`."""

    def __init__(self, algorithm: Algorithm, dtype: str, device: torch.device) -> None:
        self._algorithm, self._dtype, self._device = algorithm, getattr(torch, dtype), device
        self._ops = TorchOps(device)

    def first_memory(self, specs: Mapping[str, Spec]) -> State[NDArray]:
        """What `init` makes."""
        with _apart(self._device):
            made: State[Tensor] = self._algorithm.init(self._ops, specs)
            self._dtypes = made.map(lambda x: x.dtype)
            return made.map(self._to_numpy)

    def step(self, known: KnownStep) -> tuple[list[dict[str, NDArray]], list[State[NDArray]]]:
        """The averages and the memory of each replica."""
        with _apart(self._device), self._ops.scratch(Scratch()):
            programs = [
                self._algorithm.step(
                    self._ops, self._gradients(g), self._memory(state), known.number
                )
                for g, state in zip(known.gradients, known.before, strict=True)
            ]
            results = lock_step_of(programs, self._to_numpy, self._from_numpy)
            averages = [{name: self._to_numpy(x) for name, x in own.items()} for own, _ in results]
            return averages, [state.map(self._to_numpy) for _, state in results]

    def _gradients(self, g: Mapping[str, NDArray]) -> dict[str, Tensor]:
        return {name: self._tensor(x, self._dtype) for name, x in g.items()}

    def _memory(self, state: State[NDArray]) -> State[Tensor]:
        shared = {key: self._tensor(x, self._dtypes.shared[key]) for key, x in state.shared.items()}
        tensors = {
            name: {
                key: self._tensor(x, self._dtypes.tensors[name][key]) for key, x in memory.items()
            }
            for name, memory in state.tensors.items()
        }
        return State(shared, tensors)

    def _tensor(self, x: NDArray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.array(x)).to(self._device, dtype)

    def _from_numpy(self, x: NDArray, like: Any) -> Tensor:
        given = torch.from_numpy(np.array(x))
        return given.to(self._device, given.dtype if like is None else like.dtype)

    def _to_numpy(self, x: Tensor) -> NDArray:
        x = x.detach().to("cpu")
        if x.dtype in (torch.float16, torch.bfloat16) or (
            x.is_floating_point() and x.dtype.itemsize == 1
        ):
            x = x.to(torch.float32)
        found: NDArray = x.numpy().copy()
        return found


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """A context apart: without gradients, the user's autocast and precision of products, and with
    the device as the current one."""
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.no_grad(), plain_arithmetic(device), torch.device("cpu"), current:
        yield
