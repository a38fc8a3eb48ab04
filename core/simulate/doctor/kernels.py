"""Known answers of kernels and codecs: what a backend's arithmetic has to give, on hostile values
and sizes, beside NumPy's.

for name, check in checks().items():
    right = check.right                                  # of NumPy
    found = check.call(ops, arrays)      # arrays of the backend, made of check.given
    check.require(found)                                 # raises Fault
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.core.codecs import CODECS
from gradwire.core.codecs.codec import BlockCodec, Codec
from gradwire.core.kernels import random
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.kernels.payloads import LowRank, Residual
from gradwire.core.ops import Ops
from gradwire.core.simulate.doctor.report import Fault

NDArray = npt.NDArray[Any]
Arrays = dict[str, Any]
#: Rows of blocks: a shape that compilers cut into tiles, and sizes that fit no tile.
SHAPES = ((1024, 128), (67, 24), (1, 128), (3, 16))
#: Of the norm of a product, or of a sum of squares. Float32 is some 2**-22 off, ten bits of
#: mantissa are 2**-12.
NEAR = 2.0**-17
#: Of codes so many may be one step apart, for rounding that falls between two of them.
STRAYS = 500
#: What is smaller may be zero: many devices have no smaller numbers.
SMALLEST = 1e-37


@dataclass(frozen=True)
class Check:
    """A call, and what it ought to give.

    Attributes:
        given: name → array in NumPy.
        call: (ops, arrays) → arrays.
        near: how far each may be, relative to its norm; 0: the same bits.
        strays: as `near`, but for one element in so many, which may be anywhere within `stride`; 0:
            none.
        stride: relative to the largest element of its row.
    """

    given: dict[str, NDArray]
    call: Callable[[Any, Arrays], list[Any]]
    near: float = 0.0
    strays: int = 0
    stride: float = 0.0

    @cached_property
    def right(self) -> list[NDArray]:
        """What NumPy makes of it."""
        with np.errstate(all="ignore"):
            return [
                np.asarray(x)
                for x in self.call(NumpyOps(), {name: x.copy() for name, x in self.given.items()})
            ]

    def require(self, found: list[NDArray]) -> None:
        """Raises Fault: which of the arrays is wrong, and by how much."""
        for i, (mine, right) in enumerate(zip(found, self.right, strict=True)):
            which = (
                f"array {i} of {len(self.right)}, {right.dtype.name}{list(right.shape)},"
                if len(self.right) > 1
                else "it"
            )
            if mine.shape != right.shape:
                raise Fault(f"{which} has shape {list(mine.shape)}, not {list(right.shape)}")
            if self.near or self.strays:
                self._require_near(
                    which, np.asarray(mine, np.float64), np.asarray(right, np.float64)
                )
            elif not np.array_equal(mine, right, equal_nan=right.dtype.kind == "f"):
                wrong = ~((mine == right) | ((mine != mine) & (right != right)))
                at = tuple(int(n) for n in np.argwhere(wrong)[0])
                raise Fault(
                    f"{which} differs in {np.count_nonzero(wrong)} of {right.size} elements:"
                    f" {mine[at]} at {list(at)}, not {right[at]}"
                )

    def _require_near(self, which: str, mine: NDArray, right: NDArray) -> None:
        swallowed = ~np.isfinite(right) & np.isfinite(mine)
        if swallowed.any():
            raise Fault(f"{which} swallows inf or NaN in {np.count_nonzero(swallowed)} elements")
        clear = np.isfinite(right)
        if not np.isfinite(mine[clear]).all():
            raise Fault(
                f"{which} is not finite in {np.count_nonzero(~np.isfinite(mine[clear]))} elements"
                " that ought to be"
            )
        off = np.where(clear, mine - np.where(clear, right, 0), 0)
        if self.strays:
            x = np.broadcast_to(
                (
                    self.given["x"][: right.shape[0]]
                    if right.ndim == self.given["x"].ndim
                    else self.given["x"][0]
                ),
                right.shape,
            )
            size = np.abs(np.where(np.isfinite(x), x, 0)).max(-1, keepdims=True)
            apart = np.abs(off) > NEAR * size + SMALLEST
            if (
                np.count_nonzero(apart) > max(2, off.size // self.strays)
                or (np.abs(off) > self.stride * size + SMALLEST).any()
            ):
                raise Fault(
                    f"{which} is another number in {np.count_nonzero(apart)} of {off.size}"
                    f" elements, by up to {np.abs(off).max():.3g}"
                )
            return
        norm = float(np.linalg.norm(np.where(clear, right, 0))) or 1.0
        if np.linalg.norm(off) > self.near * norm + SMALLEST:
            raise Fault(
                f"{which} is {np.linalg.norm(off) / norm:.2g} of its norm off; {self.near:.2g} is"
                " allowed"
            )


def checks(*, quick: bool = False) -> dict[str, Check]:
    """All of them, by name; if `quick`, of each kind the first shape, and of codecs those that most
    are made of."""
    found = dict([*_arithmetic(), *_selection(), *_codecs()])
    return {name: check for name, check in found.items() if not quick or _is_first(name)}


def _is_first(name: str) -> bool:
    kind, _, shape = name.partition(" [") if " [" in name else name.partition(" (")
    return shape in ("", "256, 512), rank 4", "64, 1024)", "256, 512]") or kind in (
        "codec int8",
        "codec int4",
    )


def hostile(shape: tuple[int, int], seed: int = 0) -> NDArray:
    """float32 rows: most of them normally distributed at sizes from 2**-60 to 2**60, and, where
    there is room, one of zeros, one of equal numbers, one of whole and half steps, one of the
    smallest numbers, one with a NaN, one with an inf, one of 1e38."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-60, 61, (shape[0], 1)))
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: 0.0,
        lambda: 3.1,
        lambda: rng.integers(-254, 255, shape[1]) / 2,
        lambda: rng.standard_normal(shape[1]) * 1e-40,
        lambda: np.where(np.arange(shape[1]) == shape[1] // 2, math.nan, 1.0),
        lambda: np.where(np.arange(shape[1]) == shape[1] - 1, -math.inf, 1.0),
        lambda: rng.choice([-1e38, 1e38], shape[1]),
    )
    if shape[0] > 3 * len(kinds):
        for i, kind in enumerate(kinds):
            x[2 + 3 * i] = kind()
    return x.astype(np.float32)


def _arithmetic() -> Iterator[tuple[str, Check]]:
    rng = np.random.default_rng(1)
    for n, m, r in ((256, 512, 4), (256, 512, 32), (67, 129, 3), (1, 1, 1)):
        given = {
            name: rng.standard_normal(s).astype(np.float32)
            for name, s in {"x": (n, m), "p": (r, n), "q": (r, m)}.items()
        }
        shape = f"({n}, {m}), rank {r}"
        yield (
            f"matmul {shape}",
            Check(
                given,
                lambda ops, a: [ops.matmul(a["p"], a["x"]), ops.matmul(a["q"], a["x"].mT)],
                NEAR,
            ),
        )
        yield (
            f"subtract_product {shape}",
            Check(given, lambda ops, a: [ops.subtract_product(a["x"], a["p"], a["q"])], NEAR),
        )
        yield f"subtract_product, if finite {shape}", Check(given, _subtracted, NEAR)
        yield f"orthonormalize {shape}", Check(given, _projected, 64 * NEAR)
    x = hostile((64, 512))
    clear = x[(np.abs(x) < 1e18).all(1)]
    clear = np.where(np.abs(clear) < SMALLEST, 0, clear).astype(np.float32)
    yield (
        "norms",
        Check(
            {"x": clear},
            lambda ops, a: [
                ops.norm(a["x"]),
                ops.mean_abs(a["x"]),
                ops.norm_of_all([a["x"], a["x"][0]]),
            ],
            NEAR,
        ),
    )
    yield "max_abs, NaN and inf", Check({"x": x}, lambda ops, a: [ops.max_abs(a["x"])])
    yield (
        "all_finite",
        Check(
            {"x": x},
            lambda ops, a: [
                ops.all_finite(a["x"]),
                ops.all_finite(a["x"][:2]),
                ops.all_finite(a["x"][0], a["x"][14:15]),
            ],
        ),
    )
    yield "sums and choices", Check({"x": clear, "y": clear[::-1].copy()}, _sums)
    yield (
        "conversions",
        Check(
            {
                "x": np.array(
                    [
                        0.5,
                        1.5,
                        -2.5,
                        126.5,
                        -127.5,
                        300.0,
                        -300.0,
                        3e9,
                        -3e9,
                        math.inf,
                        -math.inf,
                        math.nan,
                    ],
                    np.float32,
                )
            },
            _conversions,
        ),
    )
    yield (
        "random numbers",
        Check(
            {},
            lambda ops, a: [
                random.uniform(ops, random.key(7, "weight"), (999,), 3),
                random.dither(ops, 123, ops.iota(999), 5),
            ],
        ),
    )


def _subtracted(ops: Ops[Any], a: Arrays) -> list[Any]:
    """Subtract as the error of a step is made: if the step is finite, and if it is not."""
    results: list[Any] = []
    for ok in (ops.all_finite(a["p"]), ops.all_finite(a["p"] * math.nan)):
        residual, error = Residual(ops, ops.add(a["x"], 0.0)), ops.add(a["x"], 0.0)
        results += ops.errors_after(ok, [residual], [LowRank(a["p"], a["q"])], [error])
    return results


def _projected(ops: Ops[Any], a: Arrays) -> list[Any]:
    """The product with the projection on the rows, in which signs and the order of directions do
    not count."""
    (q,) = ops.orthonormalize_each([ops.add(a["q"], 0.0)], [], 0.0)
    return [ops.matmul(ops.matmul(a["x"], q.mT), q)]


def _sums(ops: Ops[Any], a: Arrays) -> list[Any]:
    x, y = a["x"], a["y"]
    bad = ops.all_finite(x * math.nan)
    return [
        *ops.add_each([ops.add(x, 0.0)], [y]),
        ops.where(x > 0, x, y),
        *ops.nan_unless(bad, [x]),
        *ops.where_each(bad, [x], [ops.add(y, 0.0)]),
        ops.where(ops.sign(x) < 0, ops.abs(x), 0.0),
    ]


def _conversions(ops: Ops[Any], a: Arrays) -> list[Any]:
    x = a["x"]
    return [
        ops.cast(x, "int8"),
        ops.cast(x, "uint8"),
        ops.cast(x, "int32"),
        ops.round(x),
        ops.nearest_bytes(ops.add(x[:5], 0.0)),
    ]


def _selection() -> Iterator[tuple[str, Check]]:
    rng = np.random.default_rng(2)
    for n, m, k in ((64, 1024, 16), (64, 64, 8), (9, 67, 3)):
        given = {"x": rng.integers(-20, 20, (n, m)).astype(np.float32)}

        def chosen(ops: Ops[Any], a: Arrays, k: int = k) -> list[Any]:
            index = ops.top_k(ops.abs(a["x"]), k)
            values = ops.take(a["x"], index)
            return [index, values, ops.scatter_add(a["x"] * 0.0, index, values)]

        yield f"top_k, take, scatter_add ({n}, {m})", Check(given, chosen)
    for shape in ((256, 512), (67, 129), (9,), (1,)):
        given = {"x": rng.standard_normal(shape).astype(np.float32)}
        bits = Check(
            given, lambda ops, a: [ops.unpack_bits(ops.pack_bits(a["x"] > 0), tuple(a["x"].shape))]
        )
        yield f"bits there and back {list(shape)}", bits
    given = {
        "x": rng.standard_normal((256, 512)).astype(np.float32),
        "y": rng.standard_normal((3, 67)).astype(np.float32),
    }
    yield "signs of several tensors there and back", Check(given, signs)
    yield "the largest of several tensors, added up", Check(given, sparse)
    integers = {"x": rng.integers(0, 1 << 12, (64, 128)).astype(np.int32)}
    yield (
        "integers of 12 bits there and back",
        Check(
            integers,
            lambda ops, a: [ops.unpack_integers(ops.pack_integers(a["x"], 12), 12, (64, 128))],
        ),
    )
    yield (
        "bytes there and back",
        Check(
            {"x": hostile((64, 1))},
            lambda ops, a: [
                ops.storage.from_bytes(ops, ops.storage.to_bytes(ops, a["x"]), "float32")
            ],
        ),
    )


def signs(ops: Ops[Any], a: Arrays) -> list[Any]:
    """Signs of several tensors of three replicas, with one number for all of a tensor, or for each
    row."""
    arrays = list(a.values())
    shapes = [tuple(x.shape) for x in arrays]
    found: list[Any] = []
    for sharing in ([(1, 1)] * 2, [(n, 1) for n, _ in shapes]):
        count = sum(n for n, _ in sharing)
        above = ops.cast(ops.iota(3 * count), "float32").reshape((3, count)) + 1.0
        bits = ops.pack_signs(arrays, sharing)
        every = [ops.stack([x] * 3) for x in bits]
        found += ops.sum_of_signs(every, [above], [above * -0.5], shapes, sharing)
        found += ops.signed(arrays, bits, [above[0]], [above[1]], sharing)
    return found


def sparse(ops: Ops[Any], a: Arrays) -> list[Any]:
    """What three replicas send of rows of two lengths."""
    arrays = list(a.values())
    index, values = ops.largest_each(arrays, 8)
    every = [ops.stack([x] * 3) for x in (index, values)]
    parts = [(*x.shape, None) for x in arrays]
    return ops.scatter_sum_each(parts, lambda *own: own, *every)


def _codecs() -> Iterator[tuple[str, Check]]:
    for name, codec in CODECS.items():
        if name == "float32":
            continue
        for shape in SHAPES:
            step = 1.0 if name in ("int2", "e3m0") else 2.0 / (1 << (getattr(codec, "bits", 8) - 1))
            strays = STRAYS if isinstance(codec, BlockCodec) else 0
            call = _coded(codec)
            yield (
                f"codec {name} {list(shape)}",
                Check({"x": hostile(shape)}, call, NEAR, strays, step),
            )
    given = {"x": np.stack([hostile((128, 128), seed) for seed in range(3)])}
    yield "codec int8, mean of 3", Check(given, _mean_of_codes, NEAR, STRAYS, 4 / 127)


def _coded(codec: Codec) -> Callable[[Any, Arrays], list[Any]]:
    """What comes back of encoded rows, and what is lost, as one computation."""

    def call(ops: Ops[Any], a: Arrays) -> list[Any]:
        fields = codec.encode(ops, ops.add(a["x"], 0.0))
        back = codec.decode(ops, *fields)
        return [back, ops.add(a["x"], back * -1.0)]

    return call


def _mean_of_codes(ops: Ops[Any], a: Arrays) -> list[Any]:
    """Average as each replica does its part: codes of several replicas, decoded, summed, and
    encoded."""
    codec, replicas = CODECS["int8"], a["x"].shape[0]
    coded = [codec.encode(ops, ops.add(a["x"][i], 0.0)) for i in range(replicas)]
    codes, scales = (ops.stack([own[j] for own in coded]) for j in range(2))
    fields, _ = ops.encode_mean(codec, codes, scales, keeps=True)
    return [codec.decode(ops, *fields)]
