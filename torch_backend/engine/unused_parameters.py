"""Parameters that no rank used: their memory stays as it was, since their average would never reach
an optimizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from gradwire.core.algorithm import State
from gradwire.core.protocol import mean, reduce_sum
from gradwire.core.protocol.programs import Fusable, Program, Request, ask, relay
from gradwire.torch_backend.ops.kernels import TorchOps

T = TypeVar("T")


class Usage:
    """What this rank did not use of some gradients, told to the others with the first message that
    can take it along.

    `state` is their memory, of which the program gets copies where it may have to be undone.
    `remembered` are those of which some rank has memory. `weighted`: gradients are summed by
    weight, so this is too, and shares their message.
    """

    def __init__(
        self,
        ops: TorchOps,
        unused: Collection[str],
        state: State[Tensor],
        remembered: Sequence[str],
        *,
        weighted: bool = False,
    ) -> None:
        self._ops = ops
        self._names = {
            name: i for i, name in enumerate(remembered) if name in unused and name in state.tensors
        }
        # Per tensor with memory, 1.0 if this rank used the parameter. The mean is 0 for those that
        # no rank used.
        self._used = ops.from_host(
            [float(name not in unused) for name in remembered], torch.float32
        )
        self._request: Fusable[Tensor] | None = cast(
            "Fusable[Tensor]",
            (reduce_sum if weighted else mean)(self._used, watched=False).send(cast(Any, None)),
        )
        for name in self._names:
            state.tensors[name] = {key: x.clone() for key, x in state.tensors[name].items()}

    async def sent_with(self, program: Program[T]) -> T:
        """The program, which sends this as well: in its first message if that is an average of all
        replicas, else before it."""
        return await relay(program, self._answer)

    async def _answer(self, request: Request) -> tuple[Any, ...]:
        mine = self._request
        if mine is None:
            return await ask(request)
        if not isinstance(request, Fusable) or request.local:
            return await ask(request.wrapped(self.sent_with))
        self._request = None
        if request.key() == mine.key():
            *own, self._used = await ask(type(request).fuse([request, mine]))
            return tuple(own)
        (self._used,) = await ask(mine)
        return await ask(request)

    def keep_unused(self, new: State[Tensor], old: State[Tensor]) -> None:
        """Put the old memory into the new state, of what nobody used."""
        for name, i in self._names.items():
            used = self._used[i] > 0
            for key, x in old.tensors[name].items():
                new.tensors[name][key] = self._ops.where(used, new.tensors[name][key], x, out=x)
