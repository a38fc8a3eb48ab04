"""What is averaged along with parameters: buffers, and an optimizer's moments. A replica whose own
are not finite is left out, and is given the mean of the others.

    averages, extras = await mean_alongside(ops, parameters, extras)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire.core.ops import ITEMSIZE, A, Ops
from gradwire.core.protocol import mean_each
from gradwire.core.protocol.groups import Groups

#: Averaged along with parameters, as it is: owner → name → array. What a parameter owns (its
#: optimizer's moments) goes with its fragment, everything else (buffers, under any name) with the
#: first.
Extras = Mapping[str, Mapping[str, A]]
#: Beside the arrays of an owner: 1 where a replica's are not finite.
_LEFT_OUT = object()


async def mean_alongside(
    ops: Ops[A],
    arrays: Mapping[str, A],
    extras: Extras[A],
    groups: Groups | None = None,
) -> tuple[dict[str, A], dict[str, dict[str, A]]]:
    """Average these arrays, as they are, and with them what belongs to them, in one message.

    Args:
        ops: kernels of the arrays' framework.
        arrays: donated.
        extras: of floats, not donated.
        groups: as for `mean`.

    Returns:
        The averages; and those of `extras`, for each owner over the replicas whose arrays of it are
        all finite: with the bits of the mean where that is every one. Where it is none, or their
        mean is not finite, what this replica has.
    """
    sent: dict[Any, A] = {("", name): x for name, x in arrays.items()}
    for owner, owned in extras.items():
        ok: Any = ops.all_finite(*owned.values())
        dtype = max(map(ops.dtype_of, owned.values()), key=ITEMSIZE.__getitem__)
        zero: Any = ops.zeros((), dtype)
        sent |= {(owner, key): ops.where(ok, x, 0.0) for key, x in owned.items()}
        sent[owner, _LEFT_OUT] = ops.where(ok, zero, zero + 1.0)
    means: dict[Any, Any] = await mean_each(sent, watched=False, groups=groups)
    averages = {}
    for owner, owned in extras.items():
        counted = 1.0 - means[owner, _LEFT_OUT]
        of_these = {}
        for key, x in owned.items():
            mean = ops.cast(means[owner, key], ops.dtype_of(counted))
            of_these[key] = ops.cast(ops.divide(mean, counted), ops.dtype_of(x))
        ok = ops.all_finite(*of_these.values())
        averages[owner] = {key: ops.where(ok, x, owned[key]) for key, x in of_these.items()}
    return {name: means["", name] for name in arrays}, averages
