"""Clipping of what one replica contributes, before it is averaged (Lin et al. 2018, "Deep Gradient
Compression", section 3.2).

A method with error feedback keeps of an outlier whatever it does not send, and sends it later:
clipping the average does not undo that. So each replica clips its own gradient, before the error is
added. Nothing is communicated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gradwire.core.ops import A, Ops
from gradwire.core.protocol import local_norm


async def clipped(ops: Ops[A], gradients: Mapping[str, A], max_norm: float) -> dict[str, A]:
    """Scale a replica's gradients, which are donated, so that the 2-norm of all of them together is
    at most `max_norm`.

    The norm is that of the whole model, also where a driver runs a step as several programs. It
    could be taken for each tensor alone, and then messages would not have to wait for the last
    gradient. But that turns the gradient, and a limit would have to be found for each tensor. It
    cannot be taken for each message: what shares a message depends on the driver.

    If the norm is not finite all gradients come out as NaN, so that the step is skipped on all
    replicas.
    """
    norm = await local_norm(ops, gradients)
    too_long = norm > max_norm
    # which divides by no zero
    factor = ops.where(too_long, max_norm / ops.where(too_long, norm, max_norm), 1.0)
    (factor,) = ops.nan_unless(norm < math.inf, [factor])
    return dict(zip(gradients, ops.scale_each(list(gradients.values()), factor), strict=True))
