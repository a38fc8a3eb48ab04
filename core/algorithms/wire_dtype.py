"""Payloads in fewer bits, of any algorithm: `WireDtype(AllReduce(), "int8")`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gradwire.core.algorithm import State
from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.codecs.cast import Cast
from gradwire.core.codecs.coder import Coder
from gradwire.core.codecs.options import Quantizer
from gradwire.core.ops import A, Ops
from gradwire.core.protocol import branch, watch
from gradwire.core.protocol.programs import Collective, Program, Request, ask, relay
from gradwire.core.text.wording import configured

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class WireDtype(Quantizer, Wrapper):
    """Another algorithm, with its payloads in fewer bits: `WireDtype(AllReduce(), "int8")`,
    `WireDtype(PowerSGD(rank=4), "bfloat16")`.

    What is averaged, summed or reduced and scattered travels quantized, and is summed in float32:
    all replicas send each other their parts, each averages one, and all gather these. Two
    roundings, however many replicas there are, and the bytes of an all-reduce of quantized values:
    of float32 0.258 with 8 bits, 0.133 with 4, 0.5 with "bfloat16". Local arithmetic and memory
    keep their dtype. Maxima, and the sum of a scalar (`sum_scalar`), travel as they are; what is
    gathered or exchanged is cast to a shorter float, and not quantized.

    Of a sharded optimizer, `WireDtype(Zero(shards), "int8")`, gradients are quantized. What is
    gathered after the update travels as it is: those are the new parameters, and rounded to 8 bits
    they would lose every update that is smaller than 1/256 of them.

    Round two levels, `WireDtype(TwoLevel(PowerSGD(rank=4)), "bfloat16")`, it quantizes what is
    averaged in a node as well as what travels between nodes; `TwoLevel(WireDtype(PowerSGD(rank=4),
    "bfloat16"))` quantizes the latter alone.

    Nothing remembers what is rounded off, so it is biased: what an algorithm remembers is no longer
    all that is still to be sent. `gradwire.Quantize` remembers it, for gradients.

    Examples:
        >>> from gradwire import PowerSGD, WireDtype, plan
        >>> WireDtype(PowerSGD(rank=4), "bfloat16")
        WireDtype(algorithm=PowerSGD(rank=4), dtype='bfloat16')
        >>> plan({"w": (512, 512)}, WireDtype(PowerSGD(rank=4), "bfloat16")).compression_ratio
        128.0

    Args:
        algorithm: any algorithm.
        dtype: "int8", "float8_e4m3fn", "int4", "e3m0" (powers of two in 4 bits), "int2", "bfloat16"
            or "float16"; also `torch.int8`. "float32" for gradients in float64. Payloads that are
            no wider travel as they are.
        block: how many elements share a scale; a multiple of 8. None: 128. A cast to a shorter
            float has no scale.
        stochastic: round up or down by chance, so that the mean of the rounding error is 0. For
            "int8" and "int4" alone.
        seed: of these chances.

    Raises:
        TypeError: `algorithm` is none.
        ValueError: naming the option, its value and the fix.
    """

    biased = True  # what is rounded off is nowhere remembered

    def __repr__(self) -> str:
        return configured(self)

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> tuple[dict[str, A], State[A]]:
        """A step of the inner algorithm, with quantized payloads. Arguments and results are those
        of `Algorithm.step`."""
        program = self.algorithm.step(self._kernels(ops), gradients, state, step)
        averages, after = await self.carried(ops, program, next(iter(gradients), ""), step)
        if levels_of(self.algorithm) is not None and (not state.tensors or self.start_step):
            # Codes of a part of the replicas differ between parts, and an average without them has
            # nobody look at them.
            plain = True if not state.tensors else step < self.start_step
            known = plain if isinstance(plain, bool) else ops.truth(plain)
            await branch(
                plain if known is None else known,
                partial(_looked_at, tuple(averages.values())),
                _nothing,
            )
        return averages, after

    def _kernels(self, ops: Ops[A]) -> Ops[A]:
        return ops if isinstance(self._codec, Cast) else ops.unbundle()

    async def carried(self, ops: Ops[A], program: Program[T], name: str, step: Any) -> T:
        """Run a program of the algorithm's with quantized payloads, and return what it returns.
        `name`, of its first tensor, and `step` decide what stochastic rounding draws."""
        return await self._coded(self._coder(ops, name, step), program)

    async def _coded(self, coder: Coder[A], program: Program[T], *, in_branch: bool = False) -> T:
        codes = True

        async def answer(request: Request) -> tuple[Any, ...]:
            nonlocal codes
            if request.updates:
                if in_branch:
                    raise ValueError(
                        f"{self!r} cannot tell whether payloads hold gradients or parameters where"
                        " the optimizer's update is in a branch; give WireDtype to the algorithm"
                        " that averages the gradients"
                    )
                codes = False
            if not codes:
                return await ask(request)
            if isinstance(request, Collective):
                return await request.coded(coder)
            return await ask(request.wrapped(partial(self._coded, coder, in_branch=True)))

        return await relay(program, answer)


async def _looked_at(averages: tuple[A, ...]) -> tuple[()]:
    await watch(*averages)
    return ()


async def _nothing() -> tuple[()]:
    return ()
