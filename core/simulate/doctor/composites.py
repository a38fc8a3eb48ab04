"""Known answers of what steps are made of, where a backend may have one loop for several kernels:
sums that are projected, codes and their means, and the end of a step.

for name, check in composites().items():
    found = check.call(ops, arrays)    # see `gradwire.core.simulate.doctor.kernels`
    check.require(found)                                 # raises Fault
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradwire.core.codecs import CODECS
from gradwire.core.kernels.payloads import Coded, LowRank, Payload, Residual
from gradwire.core.ops import Ops
from gradwire.core.simulate.doctor.kernels import (
    NEAR,
    STRAYS,
    Arrays,
    Check,
    hostile,
    signs,
    sparse,
)

#: Codecs of which a backend may have loops.
CODES = ("int8", "int4", "float8_e4m3fn", "e3m0")
#: Rows of blocks: of a length for which loops are written, and of one that leaves something over.
SHAPES = ((1024, 128), (67, 24))
#: A matrix that is large enough for a loop of its own; its last rows and columns fill no tile.
MATRIX = (131, 261)


def composites() -> dict[str, Check]:
    """All of them, by name. Those that have `strays` are the same bits by any loops of one
    backend."""
    of_several = ("signs of several tensors", _signed()), ("largest of several", _largest())
    return dict([*_factors(), *_codes(), *of_several])


def _factors() -> Iterator[tuple[str, Check]]:
    rng, (n, m) = np.random.default_rng(3), MATRIX
    for r in (1, 2, 3, 4, 7):
        shapes = {"x": (n, m), "y": (n, m), "p": (r, n), "q": (r, m), "s": (r, n), "t": (r, m)}
        given = {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }
        yield f"sum, projected ({n}, {m}), rank {r}", Check(given, _projected_sum, NEAR)
        yield f"end of a step ({n}, {m}), rank {r}", Check(given, _settled_factors, NEAR)


def _projected_sum(ops: Ops[Any], a: Arrays) -> list[Any]:
    """Gradient and error, added where they are first multiplied; then what is sent is taken from
    the sum."""
    (total,) = ops.add_each([ops.add(a["x"], 0.0)], [a["y"]], multiplied=True)
    p = ops.matmul(a["q"], total.mT)
    return [p, ops.matmul(a["p"], total), ops.subtract_product(total, a["s"], a["t"])]


def _settled(ops: Ops[Any], x: Any, sent: Payload[Any], received: Payload[Any]) -> list[Any]:
    """The new error, and the average, of a step that is finite."""
    ok = ops.all_finite(x)
    after, dense = ops.settle(
        ok, ok, [Residual(ops, ops.add(x, 0.0))], [sent], [ops.add(x, 1.0)], [received]
    )
    return [*after, *dense]


def _settled_factors(ops: Ops[Any], a: Arrays) -> list[Any]:
    return _settled(ops, a["x"], LowRank(a["p"], a["q"]), LowRank(a["s"], a["t"]))


def _codes() -> Iterator[tuple[str, Check]]:
    for name in CODES:
        bits = int(getattr(CODECS[name], "bits", 8))
        step = 1.0 if name == "e3m0" else 4.0 / (1 << (bits - 1))
        for shape in SHAPES:
            given = {"x": hostile(shape)}
            yield f"rows of {name} {list(shape)}", Check(given, _rows_of(name), NEAR, STRAYS, step)
            clear = _clear(shape)
            # Of numbers that cancel, a code that is one apart changes the mean by a step of the
            # largest of them.
            several = {"x": np.stack([clear, 0.5 * clear, 0.25 * clear[:, ::-1]])}
            yield (
                f"mean of 3, {name} {list(shape)}",
                Check(several, _mean_of(name), NEAR, STRAYS, 4 * step),
            )
            end, one = f"end of a step, {name} {list(shape)}", {"x": clear}
            yield end, Check(one, _settled_codes(name), NEAR, STRAYS, 4 * step)
            # In which order these are taken away is not said, so the last bit is not either.
            yield (
                f"{end}, some rows rounded twice",
                Check(one, _settled_codes(name, twice=True), 64 * NEAR),
            )


def _signed() -> Check:
    """There and back, to the same bits everywhere."""
    rng = np.random.default_rng(4)
    shapes = {"x": (128, 512), "y": (3, 67)}
    return Check(
        {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
        signs,
    )


def _largest() -> Check:
    """The largest of rows of two lengths, at their places: equal and hostile ones too."""
    rng = np.random.default_rng(5)
    equal = rng.integers(-2, 3, (40, 67)).astype(np.float32)
    return Check({"x": _clear((64, 256)), "y": equal}, sparse)


def _clear(shape: tuple[int, int]) -> Any:
    """Hostile rows, without those that are not finite and those that a sum or a device may lose."""
    x = hostile(shape, 1)
    return np.where(
        (np.isfinite(x) & (np.abs(x) < 1e30) & (np.abs(x) > 1e-30)).all(1, keepdims=True),
        x,
        np.float32(0),
    )


def _rows_of(name: str) -> Callable[[Any, Arrays], list[Any]]:
    """The rows of an array, and of a sum that is added as it is coded."""
    codec = CODECS[name]

    def call(ops: Ops[Any], a: Arrays) -> list[Any]:
        x = a["x"]
        back = ops.decode_rows(codec, *ops.encode_rows(codec, x))
        (total,) = ops.add_each([ops.add(x, 0.0)], [x * 0.125], coded=True)
        return [
            back,
            ops.add(x, back * -1.0),
            ops.decode_rows(codec, *ops.encode_rows(codec, total)),
        ]

    return call


def _mean_of(name: str) -> Callable[[Any, Arrays], list[Any]]:
    codec = CODECS[name]

    def call(ops: Ops[Any], a: Arrays) -> list[Any]:
        of_each = [ops.encode_rows(codec, a["x"][i]) for i in range(len(a["x"]))]
        codes, scales = (ops.stack([own[j] for own in of_each]) for j in range(2))
        fields, lost = ops.encode_mean(codec, codes, scales, keeps=True)
        return [ops.decode_mean(codec, codes, scales), ops.decode_rows(codec, *fields), lost]

    return call


def _settled_codes(name: str, *, twice: bool = False) -> Callable[[Any, Arrays], list[Any]]:
    """Received as an average, and from two replicas; or `twice`: of a replica that has rounded some
    rows of the mean."""
    codec = CODECS[name]

    def call(ops: Ops[Any], a: Arrays) -> list[Any]:
        x = a["x"]
        (codes, scales), mean, other = (
            ops.encode_rows(codec, x * factor) for factor in (1.0, 0.5, 0.25)
        )
        if twice:
            return _settled(
                ops, x, Coded(codec, codes, scales, x[3:9] * 0.125, 3), Coded(codec, *mean)
            )
        both = [ops.stack([y, z]) for y, z in zip(mean, other, strict=True)]
        sent = Coded(codec, codes, scales)
        return [
            *_settled(ops, x, sent, Coded(codec, *mean)),
            *_settled(ops, x, sent, Coded(codec, *both)),
        ]

    return call
