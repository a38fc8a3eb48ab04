"""Payloads in another dtype, of any algorithm: `WireDtype(PowerSGD(rank=4), "bfloat16")`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gradwire.core.algorithm import Algorithm, State, require_algorithm
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec, name_of_dtype
from gradwire.core.programs import Fusable, Program, Request, ask, relayed

__all__ = ["WireDtype"]

T = TypeVar("T")


@dataclass(frozen=True)
class WireDtype:
    """Another algorithm, with its payloads cast for the wire: `WireDtype(PowerSGD(rank=4), "bfloat16")`.

    Local arithmetic and memory keep their dtype. Sums are formed in the wire dtype by the collective library. Averages, reduce-scatters,
    gathers are cast; the sum of a scalar (`sum_scalar`) is not.

    Of a sharded optimizer, `WireDtype(Zero(shards), "bfloat16")`, gradients are cast. What is gathered after the update travels as it is: those
    are the new parameters, and rounded to 8 bits they would lose every update that is smaller than 1/256 of them.

    Args:
        algorithm: any algorithm.
        dtype: "bfloat16" or "float16", or as a framework has it, `torch.bfloat16`; for gradients in float64 "float32" too. Payloads that are
            no wider travel as they are.

    Raises:
        TypeError: `algorithm` is none.
        ValueError: for any other dtype. Sums are formed in it, so integers will not do.
    """

    algorithm: Algorithm
    dtype: Any

    biased = True  # what is rounded off is nowhere remembered

    def __post_init__(self) -> None:
        require_algorithm(self.algorithm)
        object.__setattr__(self, "dtype", name_of_dtype(self.dtype))
        if self.dtype not in ITEMSIZE:
            raise ValueError(
                f"dtype={self.dtype!r} is no dtype to send in: give 'bfloat16' or 'float16' ('float32' for gradients in float64). Sums are "
                "formed in it, so integers, which need a scale for each block, are no cast"
            )

    @property
    def per_replica(self) -> frozenset[str]:
        return self.algorithm.per_replica

    @property
    def start_step(self) -> int:
        return self.algorithm.start_step

    @property
    def cycle(self) -> int:
        return self.algorithm.cycle

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        return self.algorithm.init(ops, specs)

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> tuple[dict[str, A], State[A]]:
        return await self._with_cast_payloads(ops, self.algorithm.step(ops, gradients, state, step))

    async def _with_cast_payloads(self, ops: Ops[A], program: Program[T], *, in_branch: bool = False) -> T:
        casts = True

        async def answer(request: Request) -> tuple[Any, ...]:
            nonlocal casts
            if request.updates:
                if in_branch:
                    raise ValueError(
                        f"{self!r} cannot tell whether payloads hold gradients or parameters where the optimizer's update stands in a branch; "
                        "give WireDtype to the algorithm that averages the gradients"
                    )
                casts = False
            if not casts:
                return await ask(request)
            if isinstance(request, Fusable) and not request.local:
                return await self._ask_cast(ops, request)
            return await ask(request.wrapped(partial(self._with_cast_payloads, ops, in_branch=True)))

        return await relayed(program, answer)

    async def _ask_cast(self, ops: Ops[A], request: Fusable[A]) -> tuple[A, ...]:
        dtypes = [ops.dtype_of(x) for x in request.arrays]
        # What is no float is not in the table, and travels as it is.
        wider = [ITEMSIZE.get(dtype, 0) > ITEMSIZE[self.dtype] for dtype in dtypes]
        sent = tuple(ops.cast(x, self.dtype) if w else x for x, w in zip(request.arrays, wider, strict=True))
        answers = await ask(request.carrying(sent, wider))
        return tuple(ops.cast(y, dtype) for y, dtype in zip(answers, dtypes, strict=True))
