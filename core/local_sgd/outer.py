"""What is made of the averaged difference after some local steps: the outer optimizer of DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

difference = outer - parameters        # what the replica's own steps have done, as if it were a gradient
outer = outer - update(mean(difference))
parameters = outer                     # the same on all replicas
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gradwire.core.ops import A, Ops
from gradwire.core.text.options import check_options, more_than, share


@dataclass(frozen=True)
class OuterSGD:
    """SGD on averaged differences.

        v = momentum · v + difference
        outer = outer - lr · (difference + momentum · v)     # with nesterov
        outer = outer - lr · v                               # without

    The default, lr 1 and no momentum, is plain averaging. The paper of DiLoCo uses lr 0.7, momentum 0.9, Nesterov.

    Examples:
        >>> import numpy as np
        >>> from gradwire import OuterSGD
        >>> from gradwire.core.kernels.numpy import NumpyOps
        >>> outer, velocity = OuterSGD(lr=0.5, momentum=0.9).update(NumpyOps(), np.ones(2), np.full(2, 0.2), np.zeros(2))
        >>> outer.tolist(), velocity.tolist()
        ([0.9, 0.9], [0.2, 0.2])

    Args:
        lr: learning rate.
        momentum: 0 keeps no velocity.
        nesterov: look ahead.

    Raises:
        TypeError: for what is no number, such as a schedule.
        ValueError: naming the option, its value and the fix.
    """

    lr: Annotated[
        float, more_than(0), "1.0 is plain averaging, DiLoCo uses 0.7; schedules belong to the inner optimizer"
    ] = 1.0
    momentum: Annotated[float, share(most_open=True), "DiLoCo uses 0.9"] = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs momentum; DiLoCo uses 0.9")

    def update(self, ops: Ops[A], outer: A, difference: A, velocity: A | None) -> tuple[A, A | None]:
        """The new outer parameters and velocity, as new arrays of the same shape and dtype. `velocity` is None without momentum."""
        if velocity is not None:
            velocity = ops.add(times(ops, velocity, self.momentum), difference)
            difference = ops.add(times(ops, velocity, self.momentum), difference) if self.nesterov else velocity
        return ops.add(times(ops, difference, -self.lr), outer), velocity


def times(ops: Ops[A], x: A, factor: float) -> A:
    """`factor · x`, a new array. bfloat16 times a float is wider in NumPy."""
    return ops.cast(x * factor, ops.dtype_of(x))
