"""Gradients in 8 bits or 4, with a memory of the rounding error: `Quantize("int8")`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.core.algorithms.compressor import Compressor, Hints, StepContext
from gradwire.core.codecs.options import Quantizer
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.protocol.programs import Program


@dataclass(frozen=True, kw_only=True, repr=False)
class Quantize(Quantizer, Compressor):
    """Average quantized gradients, summed in float32, and add the rounding error to the gradients of the next step.

        codes = encode(gradient + error)                       # to all replicas, a part to each
        part = encode(mean of the codes of this replica's part)   # to all replicas
        error = gradient + error - decode(codes), and less W · (mean - decode(part)) where the part is this replica's

    Both roundings are remembered: the first by each replica, the second by the one that has done it. So the mean of what replicas have sent is what they
    receive, and nothing is lost for good. The bytes of a step are those of `gradwire.WireDtype`; the error takes as much memory as the gradients.
    With "int8" `WireDtype(AllReduce(), "int8")`, which remembers nothing, is as good as a rule; with 4 bits and less the memory pays
    (Karimireddy et al. 2019, arXiv 1901.09847; both roundings: Tang et al. 2019, "DoubleSqueeze", arXiv 1905.05957, Algorithm 1).

    Examples:
        >>> from gradwire import Quantize, plan
        >>> round(plan({"w": (512, 512)}, Quantize("int4")).compression_ratio, 1)
        7.5

    Args:
        dtype: "int8", "float8_e4m3fn", "int4", "e3m0" (powers of two in 4 bits), "int2", "bfloat16" or "float16"; also `torch.int8`. "float32" for
            gradients in float64.
        block: how many elements share a scale; a multiple of 8. None: 128. A cast to a shorter float has no scale.
        stochastic: round up or down by chance, so that the mean of the rounding error is 0. For "int8" and "int4" alone.
        seed: of these chances.

    `start_step`, `error_feedback`, `state_dtype` and `max_norm` are those of `Compressor`.

    Raises:
        ValueError: naming the option, its value and the fix.
    """

    hints = Hints(elementwise=True)

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        Quantizer.__post_init__(self)

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
            What this replica sent, with its rounding of the average counted; the average as all decode it; `memory` as it was.
        """
        coder = self._coder(ops, name, context.step)
        if not self.error_feedback:
            (mean,) = await coder.mean([x])
            return x, mean, memory
        (mean,), (sent,) = await coder.mean_and_sent([x])
        return sent, mean, memory

    def compress_together(
        self, ops: Ops[A], x: Mapping[str, A], memory: Mapping[str, dict[str, A]], step: Any
    ) -> Program[list[tuple[Any, Any, dict[str, A]]]] | None:
        """All tensors in a few kernels. Rounded by chance, each draws numbers of its own: one by one."""
        return None if self.stochastic or not x else self._all(ops, x, memory, step)

    async def _all(
        self, ops: Ops[A], x: Mapping[str, A], memory: Mapping[str, dict[str, A]], step: Any
    ) -> list[tuple[Any, Any, dict[str, A]]]:
        arrays, coder = list(x.values()), self._coder(ops, next(iter(x)), step)
        if self.error_feedback:
            means, sent = await coder.mean_and_sent(arrays, late=self.error_feedback is True)
        else:
            means, sent = await coder.mean(arrays), arrays
        return list(zip(sent, means, memory.values(), strict=True))
