"""Gradients in 8 bits or 4, with a memory of the rounding error: `Quantize("int8")`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.core.algorithm import State
from gradwire.core.algorithms.compressor import ERROR, Compressor, Hints, StepContext
from gradwire.core.codecs.options import Quantizer
from gradwire.core.codecs.packs import LARGE
from gradwire.core.codecs.shares import Extent, deal
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.protocol import mean_each, together, world_size
from gradwire.core.protocol.programs import Program


@dataclass(frozen=True, kw_only=True, repr=False)
class Quantize(Quantizer, Compressor):
    """Average quantized gradients, summed in float32, and add the rounding error to the gradients
    of the next step.

        codes = encode(gradient + error)                       # to all replicas, a part to each
        part = encode(mean of the codes of this replica's part)   # to all replicas
        error = gradient + error - decode(codes), and less W · (mean - decode(part)) where the part
                is this replica's

    Both roundings are remembered: the first by each replica, the second by the one that has done
    it. So the mean of what replicas have sent is what they receive, and nothing is lost for good.
    The bytes of a step are those of `gradwire.WireDtype`, with any number of replicas: rows that
    are left when each has as many of a tensor are dealt on over the model. Tensors whose codes
    would be longer are sent as they are. The error takes as much memory as the gradients. With
    "int8" `WireDtype(AllReduce(), "int8")`, which remembers nothing, is as good as a rule; with 4
    bits and less the memory pays (Karimireddy et al. 2019, arXiv 1901.09847; both roundings: Tang
    et al. 2019, "DoubleSqueeze", arXiv 1905.05957, Algorithm 1).

    Examples:
        >>> from gradwire import Quantize, plan
        >>> round(plan({"w": (512, 512)}, Quantize("int4")).compression_ratio, 1)
        7.5

    Args:
        dtype: "int8", "float8_e4m3fn", "int4", "e3m0" (powers of two in 4 bits), "int2", "bfloat16"
            or "float16"; also `torch.int8`. "float32" for gradients in float64.
        block: how many elements share a scale; a multiple of 8. None: 128. A cast to a shorter
            float has no scale.
        stochastic: round up or down by chance, so that the mean of the rounding error is 0. For
            "int8" and "int4" alone.
        seed: of these chances.

    `start_step`, `error_feedback`, `state_dtype` and `max_norm` are those of `Compressor`.

    Raises:
        ValueError: naming the option, its value and the fix.
    """

    hints = Hints(elementwise=True)

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        Quantizer.__post_init__(self)

    @property
    def _only_codes(self) -> bool:
        # What is drawn by chance is added to gradients as they are; and a method made of this one
        # may look at them.
        return type(self) is Quantize and not self.stochastic

    @property
    def _overshoots(self) -> bool:
        return True  # the second rounding counts for all replicas

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """{}, for every tensor: all are quantized, and nothing but the error is remembered.

        Arguments are those of `Compressor.memory`.
        """
        return {}

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A, A, dict[str, A]]:
        """Average one tensor, quantized: two messages, an all-to-all and an all-gather.

        Returns:
            What this replica sent, with its rounding of the average counted; the average as all
            decode it; `memory` as it was.
        """
        ((sent, mean, _),) = await self._all(ops, {name: x}, {name: memory}, context)
        return sent, mean, memory

    def compress_together(
        self,
        ops: Ops[A],
        x: Mapping[str, A],
        memory: Mapping[str, dict[str, A]],
        context: StepContext,
    ) -> Program[list[tuple[Any, Any, dict[str, A]]]] | None:
        """All tensors in a few kernels."""
        return self._all(ops, x, memory, context, late=self.error_feedback is True) if x else None

    def alike(self, name: str, shape: tuple[int, ...], memory: Mapping[str, A]) -> int | None:
        """The length of the tensor's rows, where it fills them and draws nothing by its name: then
        rows of several are those of one."""
        n, codec = math.prod(shape), self._codec
        rows, width = codec.layout(n)
        filled = rows * width == n < LARGE and codec.layout(2 * n) == (2 * rows, width)
        return width if filled and self.error_feedback and not self.stochastic else None

    async def _all(
        self,
        ops: Ops[A],
        x: Mapping[str, A],
        memory: Mapping[str, dict[str, A]],
        context: StepContext,
        *,
        late: bool = False,
    ) -> list[tuple[Any, Any, dict[str, A]]]:
        names = list(x)
        if not self.error_feedback:
            coder = self._coder_of(ops, names, context.step)
            return list(
                zip(x.values(), await coder.mean(list(x.values())), memory.values(), strict=True)
            )
        replicas, codec = await world_size(assumed=1), self._codec
        dealt = context.state.of_model(
            (codec, replicas), lambda state: deal(_extents(ops, state), codec, replicas)
        )
        coded = [name for name in names if name not in dealt.dense]
        # As arrays: what is only coded may be a sum that nobody has added up yet.
        dense = {
            name: ops.rows([x[name]], 1).reshape(tuple(x[name].shape))
            for name in names
            if name in dealt.dense
        }

        async def of_codes() -> tuple[dict[str, Any], dict[str, Any]]:
            arrays, members = (
                [x[name] for name in coded],
                [context.stacks.get(name, (name,)) for name in coded],
            )
            firsts = [tuple(dealt.first.get(name, 0) for name in own) for own in members]
            coder = self._coder_of(ops, coded, context.step)
            means, sent = await coder.mean_and_sent(arrays, firsts, late=late)
            return dict(zip(coded, means, strict=True)), dict(zip(coded, sent, strict=True))

        async def as_they_are() -> tuple[dict[str, Any], dict[str, Any]]:
            return await mean_each(dense, donated=False), dense

        programs = [of_codes()] if coded else []
        answers = await together([*programs, as_they_are()] if dense else programs)
        means = {name: mean for own, _ in answers for name, mean in own.items()}
        sent = {name: each for _, own in answers for name, each in own.items()}
        return [(sent[name], means[name], memory[name]) for name in names]


def _extents(ops: Ops[A], state: State[A]) -> list[Extent]:
    """The extents of what is compressed of a model."""
    errors = {name: memory[ERROR] for name, memory in state.tensors.items()}
    return [Extent(name, math.prod(x.shape), ops.dtype_of(x)) for name, x in errors.items()]
