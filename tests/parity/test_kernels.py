"""Every kernel of `core/ops.py` means the same in NumPy, torch and JAX."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (bfloat16 in NumPy)
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import PowerSGD, Quantize, Sign, Simulator, TopK
from gradwire.core.codecs import CODECS
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps
from gradwire.core.kernels.gram_schmidt import gram_schmidt, refresh
from gradwire.core.kernels.payloads import Coded, Dense, LowRank, Residual
from gradwire.core.kernels.rows import RowNumbers
from gradwire.core.kernels.storage import Storage
from gradwire.core.ops import Ops
from gradwire.core.simulate import NumpyOps, PoisonOps
from gradwire.jax_backend.ops.kernels import JaxOps
from gradwire.torch_backend.cpu import thin
from gradwire.torch_backend.cpu.compiled import ARGUMENTS, prepare
from gradwire.torch_backend.ops import workspace
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.workspace import Scratch
from tests.toy import PRIMITIVES, ToyOps, toy

Run = Callable[[Callable[..., Any], dict[str, np.ndarray]], np.ndarray]


def _copies(arrays):
    return {k: v.copy() for k, v in arrays.items()}


def in_numpy(kernel, arrays):
    return np.asarray(kernel(NumpyOps(), **_copies(arrays)))


def in_toy(kernel, arrays):
    """In the bodies in core, of which every override is one way to compute the same."""
    return np.asarray(kernel(ToyOps(), **_copies(arrays)))


def in_poison(kernel, arrays):
    return np.asarray(kernel(PoisonOps(), **_copies(arrays)))


def _tensor(x):
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def _from_tensor(x):
    return x.view(torch.int16).numpy().view("bfloat16") if x.dtype == torch.bfloat16 else x.numpy()


def in_torch(kernel, arrays):
    return _from_tensor(
        kernel(TorchOps(torch.device("cpu")), **{k: _tensor(v) for k, v in arrays.items()})
    )


def in_torch_scratch(kernel, arrays):
    """Twice in the same memory: the second time it is dirty."""
    ops, memory = TorchOps(torch.device("cpu")), Scratch()
    for _ in range(2):
        memory.rewind()
        with ops.scratch(memory):
            result = kernel(ops, **{k: _tensor(v) for k, v in arrays.items()})
    return _from_tensor(result)


def in_torch_by_few_rows(kernel, arrays):
    """As large arrays are: in the memory of one processor's cache, which is used again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "IN_CACHE", 8)
        return in_torch_scratch(kernel, arrays)


def in_torch_loops(kernel, arrays):
    """With what numba compiles for processors."""
    ops = TorchOps(torch.device("cpu"))
    ops.loops = prepare(((name, torch.float32) for name in ARGUMENTS), large=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thin, "PER_THREAD", 1)
        return _from_tensor(kernel(ops, **{k: _tensor(v) for k, v in arrays.items()}))


def in_torch_unseen(kernel, arrays):
    """As on an accelerator, where the host does not look at what is computed."""
    ops = TorchOps(torch.device("cpu"))
    ops.host_knows = False
    return _from_tensor(kernel(ops, **{k: _tensor(v) for k, v in arrays.items()}))


@cache
def compiled(kernel):
    return jax.jit(lambda arrays: kernel(JaxOps(), **arrays))


def in_jit(kernel, arrays):
    return jax.tree.map(np.asarray, compiled(kernel)(arrays))


def in_jax(kernel, arrays):
    """For what is called with many shapes: each step of it is compiled by itself, once."""
    return np.asarray(kernel(JaxOps(), **{k: jnp.asarray(v) for k, v in arrays.items()}))


EAGER = [
    in_toy,
    in_poison,
    in_torch,
    in_torch_scratch,
    in_torch_by_few_rows,
    in_torch_loops,
    in_torch_unseen,
]
#: Where half precision makes a difference.
HALF = [in_toy, in_poison, in_torch, in_torch_unseen]
DTYPES = ["float32", "bfloat16", "float16"]
#: Codecs whose scales are the same bits too.
EXACT = ["int8", "int4", "float8_e4m3fn", "e3m0"]
EIGHT_BITS = ["float8_e4m3fn", "float8_e5m2"]
NAN, INF = float("nan"), float("inf")
#: What algorithms do to what they send.
COMPRESSING = (
    "abs",
    "mean_abs",
    "view_as",
    "by_rows",
    "sign",
    "round",
    "scales",
    "nearest_bytes",
    "top_k",
    "take",
    "scatter_add",
    "scatter_sum",
    "pack_bits",
    "unpack_bits",
    "pack_integers",
    "unpack_integers",
    "take_each",
    "largest_each",
    "scatter_sum_each",
    "elementwise_each",
    "mean_abs_each",
    "unstack",
    "pack_signs",
    "signed",
    "sum_of_signs",
    "asarray",
    "cast",
)
#: What a matrix of six rows holds.
FIVE_COLUMNS = [(2, 3), (), (3, 0), (2, 1, 2), (11,)]
#: May be views, or an argument itself.
VIEWS = (
    "reuse_sent",
    "materialize",
    "unstack",
    "where, true",
    "where, false",
    "nan_unless, true",
    "rows_before",
    "rows of one",
    "row_of",
    "row_of, padded",
    "take, of none",
    "view_as, from the middle",
    "to_bytes",
)
#: Payloads of a tensor (6, 5): what it is, what is padded, and what counts more as sent than its
#: codes.
PAYLOADS = {
    "dense": lambda ops, y, p, q, **_: Dense(y),
    "low rank": lambda ops, y, p, q, **_: LowRank(p, q),
    "low rank, padded": lambda ops, y, p, q, **_: LowRank(p, ops.rows([q, q[:, :1]], 2)),
    "coded": lambda ops, y, **_: Coded(CODECS["int8"], *ops.quantize(y.reshape((2, 15)), 127.0)),
    "coded, with what is lost": lambda ops, y, q, **_: Coded(CODECS["int8"], *ops.quantize(y.reshape((6, 5)), 127.0), ops.cast(q, "float32"), 3),
}  # fmt: skip
#: What becomes of rows of codes, of two replicas.
CODED = ("encode_rows", "decode_rows", "decode_mean", "encode_mean", "encode_mean, lost")
#: How a step ends.
ENDS = ("", ", not finite", ", decay")
#: By contract; the others donate what they are given as `out`.
DONATE = (
    *("set_row", "orthonormalize", "orthonormalize, epsilon", "add_each, first", "add_each, last"),
    *("where_each, true", "where_each, false", "where_each, neighbours"),
    *("scale_each, first", "scale_each, last"),
    *(
        f"{name}, {kind}{how}"
        for name in ("errors_after", "dense_or_nan")
        for kind in PAYLOADS
        for how in ENDS
    ),
    "errors_after, computed before",
    *("cast_each, arrays", "cast_each, errors"),
    *(f"settle, {kind}" for kind in (*PAYLOADS, "not finite")),
    "add_each, multiplied",
    "add_to_slice",
    "elementwise_each",
    *("scatter_add", "scatter_add, several", "scatter_add, columns", "scatter_add, nothing"),
)


def arrays(dtype):
    rng = np.random.default_rng(0)
    shapes = {"x": (6, 5), "y": (6, 5), "p": (2, 6), "q": (2, 5), "batch": (3, 4, 7), "v": (9,)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def batch_of_pairs(x, y):
    """(3, 4, 2), of those two (6, 5)."""
    return (x + y).reshape((30,))[:24].reshape((3, 4, 2))


def of_codes(name, codec, ops, batch, **_):
    """Codes, scales and numbers of rows of eight, in one row each."""
    codec, name, *kept = CODECS[codec], *name.split(", ")
    x = ops.rows([batch[0], batch[1][:, :1]], 4)
    fields = ops.encode_rows(codec, x)
    both = [ops.stack([y, y]) for y in fields]
    if name == "decode_rows":
        return ops.decode_rows(codec, *fields)
    if name == "decode_mean":
        return ops.decode_mean(codec, *both)
    lost = None
    if name == "encode_mean":
        fields, lost = ops.encode_mean(codec, *both, keeps=bool(kept))
    return lost if kept else ops.rows([ops.cast(y, "float32") for y in fields], 4)


def left_of(kind, ok, decay=1.0, *, early=False):
    """The error of a tensor of which such a payload was sent, beside that of another one."""

    def kernel(ops, x, y, p, q, batch, v, **rest):
        sent = PAYLOADS[kind](ops, y=ops.multiply(y, 0.5), p=p, q=q)
        residuals = [Residual(ops, v), Residual(ops, x)]
        if early:
            residuals[1].sent = sent
            residuals[1].compute()
        errors = [ops.add(v, 1.0), y]
        return ops.errors_after(
            ok(ops, batch), residuals, [Dense(ops.multiply(v, 0.5)), sent], errors, decay=decay
        )[1]

    return kernel


def received(kind, ok):
    def kernel(ops, x, y, p, q, batch, v, **rest):
        payloads = [Dense(v), PAYLOADS[kind](ops, y=ops.multiply(y, 0.5), p=p, q=q)]
        return ops.dense_or_nan(ok(ops, batch), payloads, [ops.add(v, 0.0), x])[1]

    return kernel


def settled(kind, ok):
    """What is left of a tensor of which such a payload was sent, and one received; beside those of
    another tensor."""

    def kernel(ops, x, y, p, q, batch, v, **rest):
        sent, received = (
            [
                Dense(ops.multiply(v, c)),
                PAYLOADS[kind](ops, y=ops.multiply(y, c), p=p, q=ops.multiply(q, c)),
            ]
            for c in (0.5, 2.0)
        )
        finite = ok(ops, batch)
        after, dense = ops.settle(
            finite,
            finite,
            [Residual(ops, v), Residual(ops, x)],
            sent,
            [ops.add(v, 1.0), y],
            received,
        )
        return ops.stack([after[1], dense[1]])

    return kernel


def in_16_bits(ops, x, y, v, **rest):
    """Two float32 arrays, of which one overflows in some places, and their errors, with a decay."""
    xs, errors = (
        [ops.cast(v, "float32") * 1.001, ops.cast(x, "float32") * 1e5],
        [ops.cast(v, "float32"), ops.cast(y, "float32")],
    )
    with np.errstate(over="ignore"):
        return ops.cast_each(
            xs, ["bfloat16", "float16"], [ops.add(each, 1.0) for each in errors], decay=0.5
        )


#: Of four rows, some of them twice; and different ones.
ROWS_TAKEN = RowNumbers("taken", 5, lambda: np.array([3, 0, 0, 2, 3], np.int32))
ROWS_ADDED = RowNumbers("added", 2, lambda: np.array([3, 1], np.int32))


def no_positions(ops):
    return ops.asarray(np.zeros((6, 0)), "int32")


def true(ops, x):
    return ops.all_finite(x)


def false(ops, x):
    return ops.all_finite(x * float("nan"))


def magnitude_plus(ops):
    """Of what it computes, the second array has to be taken apart from the first."""

    def rows(x, y, out=None):
        size = ops.multiply(x, ops.sign(x))
        return ops.add(ops.multiply(size, 1.0), y, out=out)

    return rows


def total(ops):
    """The sum of the matrices of a batch, row by row, and one more of them."""

    def rows(batch, out=None):
        def added(i, so_far):
            return ops.by_rows(
                lambda x, y, out=None: ops.add(ops.multiply(x, 1.0), y, out=out),
                batch[i],
                so_far,
                out=so_far,
            )

        return ops.loop(batch.shape[0], added, ops.multiply(batch[0], 1.0))

    return rows


def there_and_back(ops):
    """As codes and their scale, in bytes side by side."""

    def rows(x, out=None):
        x = ops.cast(x, "float32")
        largest = ops.max_abs(x)
        codes = ops.rows(
            [ops.view_as(each, "uint8") for each in (ops.divide(x, largest), largest)], x.shape[0]
        )
        width = codes.shape[1] - 4
        scales = ops.view_as(codes[:, width:], "float32")
        return ops.multiply(ops.view_as(codes[:, :width], "float32"), scales, out=out)

    return rows


def positions_in(ops, batch):
    """Of the values (W, 4, 7) each at a position below 8, for one replica or for several."""
    index = ops.asarray((3 * np.arange(4)[:, None] + np.arange(7)) % 8, "int32")
    return lambda values: (
        ops.add(ops.cast(ops.cast(values * 0.0, "float32"), "int32"), index),
        values,
    )


def placed(ops, matrices, k):
    """The largest of each row of several matrices, at their places: in which order they were found
    does not matter."""
    index, values = ops.largest_each(matrices, k)
    rows, width = index.shape[0], max(x.shape[1] for x in matrices)
    values = ops.where(ops.abs(values) < 99.0, values, 99.0)  # those that are not finite too
    return ops.scatter_add(ops.zeros((rows, width), ops.dtype_of(values)), index, values)


def signs_there_and_back(ops, per, x, y, batch, v, **_):
    """Bits, which are as few as can be; what they stand for here; and what those of three replicas
    do."""
    arrays = [batch[0], batch[1], v.reshape((1, 9)), x, y]
    shapes = [tuple(each.shape) for each in arrays]
    sharing = [{"tensor": (1, 1), "row": (n, 1), "column": (1, m)}[per] for n, m in shapes]
    count = sum(n * m for n, m in sharing)
    above, below = (
        ops.cast(ops.iota(count), "float32") * 0.5 + 1.0,
        ops.cast(ops.iota(count), "float32") * -0.25,
    )
    bits = ops.pack_signs(arrays, sharing)
    assert (
        sum(each.size if isinstance(each, np.ndarray) else math.prod(each.shape) for each in bits)
        == 4 + 4 + 2 + 4 + 4
    )
    own = ops.signed(arrays, bits, [above], [below], sharing)
    other = ops.pack_signs([each * -1.0 for each in arrays], sharing)
    every = [ops.stack([one, two, one]) for one, two in zip(bits, other, strict=True)]
    high, low = (ops.stack([each, each * 3.0, each * 0.125]) for each in (above, below))
    total = ops.sum_of_signs(every, [high], [low], shapes, sharing)
    flags = ops.signed(arrays, bits, [above * 0.0 + 1.0], [below * 0.0], sharing)
    return ops.rows(flags, 1), ops.rows(own, 1), ops.rows(total, 1)


KERNELS = {
    "add": lambda ops, x, y, **_: ops.add(x, y),
    "add, out": lambda ops, x, y, **_: ops.add(x, y, out=x),
    "add, a number": lambda ops, x, **_: ops.add(x, 1.5),
    "multiply": lambda ops, x, y, **_: ops.multiply(x, y),
    "multiply, out": lambda ops, batch, **_: ops.multiply(batch, ops.max_abs(batch), out=batch),
    "multiply, a number": lambda ops, x, **_: ops.multiply(x, 1.5),
    "view_as, bytes": lambda ops, batch, **_: ops.view_as(ops.cast(batch, "float32"), "uint8"),
    "view_as, integers": lambda ops, batch, **_: ops.view_as(ops.cast(batch, "float32"), "int32"),
    "view_as, from the middle": lambda ops, batch, **_: ops.view_as(ops.view_as(ops.cast(batch[0], "float32"), "uint8")[:, 4:], "float32"),
    "view_as, one row from an odd place": lambda ops, v, **_: ops.view_as(ops.view_as(ops.cast(v, "float32").reshape((1, 9)), "uint8")[:, 3:7], "int32"),
    "view_as, nothing": lambda ops, v, **_: ops.view_as(ops.cast(v[:0], "float32").reshape((1, 0)), "uint8"),
    "by_rows": lambda ops, x, y, **_: ops.by_rows(magnitude_plus(ops), x, y),
    "by_rows, narrower": lambda ops, x, **_: ops.by_rows(lambda x, out=None: ops.norm(x), x),
    "by_rows, out": lambda ops, x, y, **_: ops.by_rows(magnitude_plus(ops), x, y, out=y),
    "by_rows, of a batch": lambda ops, batch, **_: ops.by_rows(total(ops), batch),
    "by_rows, in bytes": lambda ops, x, **_: ops.by_rows(there_and_back(ops), x),
    "abs": lambda ops, x, **_: ops.abs(x),
    "sign": lambda ops, x, **_: ops.sign(ops.where(x > -0.5, x, 0.0)),
    "sign, not finite": lambda ops, x, **_: ops.sign(ops.asarray([NAN, INF, -INF, -0.0], ops.dtype_of(x))),
    "round": lambda ops, x, **_: ops.round(x),
    "round, out": lambda ops, x, **_: ops.round(x, out=x),
    "round, halves": lambda ops, x, **_: ops.round(ops.asarray([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5, NAN, INF], ops.dtype_of(x))),
    "scales": lambda ops, batch, **_: ops.view_as(ops.stack(list(ops.scales(ops.cast(batch.reshape((-1, batch.shape[2])), "float32"), 127.0))), "int32"),
    "scales, tiny and not finite": lambda ops, **_: ops.view_as(ops.stack(list(ops.scales(ops.asarray([[0, -0.0], [1e-38, 0], [NAN, 1], [1, -INF]], "float32"), 7.0))), "int32"),
    "scales, signed": lambda ops, batch, **_: ops.view_as(ops.stack(list(ops.scales(ops.cast(batch.reshape((-1, batch.shape[2])), "float32"), 8.0, signed=True))), "int32"),
    "scales, signed, ties and not finite": lambda ops, **_: ops.view_as(ops.stack(list(ops.scales(ops.asarray([[1, -1], [0, -0.0], [-2, 1], [NAN, 1], [1, INF], [1, -INF]], "float32"), 8.0, signed=True))), "int32"),
    "nearest_bytes": lambda ops, x, **_: ops.nearest_bytes(ops.multiply(ops.cast(x, "float32"), 9.7)),
    "nearest_bytes, out": lambda ops, x, **_: ops.nearest_bytes(ops.cast(x, "float32") * 9.7, out=ops.cast(x, "uint8")),
    "nearest_bytes, halves": lambda ops, **_: ops.nearest_bytes(ops.asarray([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -127.5, 127, -128, -0.0], "float32")),
    "top_k": lambda ops, batch, **_: ops.top_k(batch, 3),
    "top_k, ties": lambda ops, x, **_: ops.top_k(ops.asarray([1, -0.0, 0.0, -0.0, NAN, 2, INF, -NAN, 2, -INF, -2], ops.dtype_of(x)), 11),
    "take": lambda ops, batch, **_: ops.take(batch, ops.top_k(batch, 3)),
    "take, vector": lambda ops, v, **_: ops.take(v, ops.asarray([8, 0, 0, 3], "int32")),
    "take, of none": lambda ops, x, **_: ops.take(x, no_positions(ops)),
    "scatter_add": lambda ops, batch, x, y, **_: ops.scatter_add(batch, ops.asarray(np.arange(24).reshape(3, 4, 2) % 7, "int32"), batch_of_pairs(x, y)),
    "scatter_add, several": lambda ops, v, x, **_: ops.scatter_add(v, ops.asarray([8, 0, 8, 8, 1], "int32"), x[2]),
    "scatter_add, columns": lambda ops, x, y, **_: ops.scatter_add(x.mT, ops.asarray([[5]] * 5, "int32"), ops.take(y.mT, ops.asarray([[2]] * 5, "int32"))),
    "scatter_add, nothing": lambda ops, x, y, **_: ops.scatter_add(x, no_positions(ops), ops.take(y, no_positions(ops))),
    "scatter_add, integers": lambda ops, **_: ops.scatter_add(ops.iota(5), ops.asarray([2, 2], "int32"), ops.asarray([10, 20], "int32")),
    "scatter_sum": lambda ops, batch, **_: ops.scatter_sum(6, lambda index, values: (index, values[:4, :2]), ops.asarray(np.arange(24).reshape(3, 4, 2) % 5, "int32"), batch),
    "scatter_sum, tiles": lambda ops, batch, **_: ops.scatter_sum(6, lambda index, values: (index, values[:4, :2]), ops.asarray(np.arange(24).reshape(3, 4, 2) % 5, "int32"), batch, tiles=(3, 2), after=batch),
    "add_to_slice": lambda ops, batch, x, **_: ops.add_to_slice(batch.reshape((-1, batch.shape[2])), batch[2] * 3.0, 3, 1, ()),
    "with_layout": lambda ops, batch, **_: ops.storage.with_layout(batch[0], batch[0][:, :1], (4, batch.shape[2]))[1],
    "reuse_sent": lambda ops, batch, **_: ops.storage.reuse_sent(batch[1:2], batch, lambda sent: sent[1:2]),
    "scatter_sum_each": lambda ops, batch, **_: ops.rows(ops.scatter_sum_each([(1, 8, None), (3, 9, None)], positions_in(ops, batch), batch, order=[1, 0]), 1),
    "scatter_sum_each, tiles": lambda ops, batch, **_: ops.rows(ops.scatter_sum_each([(2, 8, (4, 2)), (2, 8, None)], positions_in(ops, batch), batch), 1),
    "scatter_sum_each, of one": lambda ops, batch, **_: ops.rows(ops.scatter_sum_each([(3, 9, None), (1, 8, None)], None, positions_in(ops, batch)(batch[1])[0], batch[1], finish=lambda x: ops.cast(x / 3, ops.dtype_of(x))), 1),
    "largest_each": lambda ops, batch, x, **_: placed(ops, [batch[0], x, batch[2]], 4),
    "largest_each, ties": lambda ops, x, **_: placed(ops, [ops.asarray([[1, -0.0, 0.0, -0.0, NAN, 2, INF, -NAN, 2, -INF, -2]], ops.dtype_of(x)), x], 5),
    "elementwise_each": lambda ops, x, y, batch, **_: ops.elementwise_each(lambda x, y: ops.multiply(x, y, out=x), [batch[0], x], [batch[2], y])[1],
    "elementwise_each, neighbours": lambda ops, x, batch, **_: ops.rows(ops.elementwise_each(lambda x: ops.cast(x * 2.0, "float32"), [batch[1], batch[0], batch[2]]), 1),
    "elementwise_each, far apart": lambda ops, x, y, p, q, v, **_: ops.rows(ops.elementwise_each(lambda x: ops.multiply(x, 2.0), [x, y, p, q, v]), 1),
    "unstack": lambda ops, batch, **_: ops.unstack(batch)[1],
    "mean_abs_each": lambda ops, x, batch, **_: ops.mean_abs_each([batch[0], x]),
    "mean_abs_each, of rows": lambda ops, x, v, **_: ops.mean_abs_each([v.reshape((1, 9)), x.reshape((1, 30))]),
    **{f"pack_signs, {per}": lambda ops, per=per, **given: signs_there_and_back(ops, per, **given)[0] for per in ("tensor", "row", "column")},
    **{f"signed, {per}": lambda ops, per=per, **given: signs_there_and_back(ops, per, **given)[1] for per in ("tensor", "row", "column")},
    **{f"sum_of_signs, {per}": lambda ops, per=per, **given: signs_there_and_back(ops, per, **given)[2] for per in ("tensor", "row", "column")},
    "take_each": lambda ops, batch, **_: ops.take_each([batch[0], batch[1]], [ops.top_k(batch[0], 3), ops.top_k(batch[2], 3)]),
    "take_rows": lambda ops, batch, **_: ops.take_rows(batch[1], ROWS_TAKEN),
    "take_rows, of words": lambda ops, batch, **_: ops.take_rows(ops.view_as(ops.cast(batch[0], "float32"), "uint8").reshape((14, 8)), ROWS_TAKEN),
    "take_rows, of several": lambda ops, batch, **_: ops.take_rows(batch[:, 1:3, 2:], ROWS_TAKEN),
    "add_rows": lambda ops, batch, x, **_: ops.add_rows(ops.multiply(batch[1], 2.0), ROWS_ADDED, batch[0][:2]),
    "pack_integers": lambda ops, **_: ops.pack_integers(ops.asarray(np.arange(256).reshape(2, 128) * 37 % 4096, "int32"), 12),
    "pack_integers, not whole bytes": lambda ops, **_: ops.pack_integers(ops.asarray(np.arange(21) * 37 % 512, "int32"), 9),
    "unpack_integers": lambda ops, **_: ops.unpack_integers(ops.asarray(np.arange(384) % 256, "uint8"), 12, (2, 128)),
    "unpack_integers, of several": lambda ops, **_: ops.unpack_integers(ops.asarray(np.arange(768).reshape(2, 384) % 251, "uint8"), 12, (2, 128)),
    "unpack_integers, 16 bits": lambda ops, **_: ops.unpack_integers(ops.asarray(np.arange(32).reshape(2, 16) * 7, "uint8"), 16, (8,)),
    "unpack_integers, three bits": lambda ops, **_: ops.unpack_integers(ops.asarray(np.arange(33) * 7, "uint8"), 11, (24,)),
    "pack_bits": lambda ops, batch, **_: ops.pack_bits(batch > 0),
    "pack_bits, two bytes": lambda ops, v, **_: ops.pack_bits(v > 0),
    "pack_bits, nothing": lambda ops, x, **_: ops.pack_bits(ops.unpack_bits(ops.pack_bits((x > 0)[:0]), (0,))),
    "pack_bits, no rows": lambda ops, x, **_: ops.pack_bits((x > 0)[:0]),
    "unpack_bits": lambda ops, batch, **_: ops.unpack_bits(ops.pack_bits(batch > 0), tuple(batch.shape)),
    "unpack_bits, two bytes": lambda ops, v, **_: ops.unpack_bits(ops.pack_bits(v > 0), tuple(v.shape)),
    "unpack_bits, nothing": lambda ops, x, **_: ops.unpack_bits(ops.pack_bits((x > 0)[:0]), (0, 5)),
    "asarray": lambda ops, x, **_: ops.asarray([[0.1, 2], [NAN, -INF]], ops.dtype_of(x)),
    "asarray, of NumPy": lambda ops, x, **_: ops.asarray(np.linspace(0, 1, 7), ops.dtype_of(x)),
    "asarray, of ml_dtypes": lambda ops, x, **_: ops.asarray(np.linspace(0, 1, 7).astype("bfloat16"), ops.dtype_of(x)),
    "asarray, integers": lambda ops, **_: ops.asarray([1.9, -1.9, 300.0, NAN], "int8"),
    "asarray, a number": lambda ops, x, **_: ops.asarray(3, ops.dtype_of(x)),
    "asarray, nothing": lambda ops, x, **_: ops.asarray([], ops.dtype_of(x)),
    "divide": lambda ops, x, y, **_: ops.divide(x, ops.where(y > 0, y, 2.0)),
    "divide, out": lambda ops, batch, **_: ops.divide(batch, ops.norm(batch), out=batch),
    "matmul": lambda ops, x, q, **_: ops.matmul(q, x.mT),
    "matmul, out": lambda ops, x, y, p, q, **_: ops.matmul(p.mT, q, out=x),
    "matmul, batch": lambda ops, batch, **_: ops.matmul(batch, batch.mT),
    "subtract_product": lambda ops, x, p, q, **_: ops.subtract_product(x, p, q),
    "subtract_product, out": lambda ops, x, y, p, q, **_: ops.subtract_product(x, p, q, out=y),
    "subtract_product, batch": lambda ops, batch, **_: ops.subtract_product(
        batch[:, :3], ops.row(batch, 3)[:, :, :3], ops.row(batch, 2)
    ),
    "where, true": lambda ops, x, y, **_: ops.where(true(ops, x), x, y),
    "where, false": lambda ops, x, y, **_: ops.where(false(ops, x), x, y),
    "where, false, number": lambda ops, x, **_: ops.where(false(ops, x), x, float("nan")),
    "where, false, out": lambda ops, x, y, **_: ops.where(false(ops, x), y, x, out=x),
    "where, each, number, out": lambda ops, x, y, **_: ops.where(y > 0, x, 0.0, out=x),
    "where, each, out": lambda ops, x, y, **_: ops.where(y > 0, x, y, out=y),
    "where_lazy, true": lambda ops, x, y, **_: ops.where_lazy(true(ops, x), lambda out: ops.add(x, x, out=out), y),
    "where_lazy, false": lambda ops, x, y, **_: ops.where_lazy(false(ops, x), lambda out: ops.add(x, x, out=out), y),
    "add_each, first": lambda ops, x, y, p, q, **_: ops.add_each([x, p], [y, p * 2.0])[0],
    "add_each, last": lambda ops, x, y, p, q, **_: ops.add_each([x, p], [y, p * 2.0])[1],
    "add_each, of nothing": lambda ops, x, **_: ops.stack([x, *ops.add_each([], [])]),
    "materialize": lambda ops, x, batch, **_: ops.storage.materialize([batch, x])[0],
    "copies": lambda ops, x, y, p, **_: ops.add_each(ops.copies([p, x]), [p, y])[1],
    "copies, of nothing": lambda ops, x, **_: ops.stack([x, *ops.copies([])]),
    "where_each, true": lambda ops, x, y, p, **_: ops.where_each(true(ops, x), [p, x], [p * 2.0, y])[1],
    "where_each, false": lambda ops, x, y, p, **_: ops.where_each(false(ops, x), [p, x], [p * 2.0, y])[1],
    "where_each, neighbours": lambda ops, batch, x, **_: ops.stack(
        ops.where_each(true(ops, x), [batch[0], batch[1], batch[2]], list(ops.stack([batch[2]] * 3)))
    ),
    "nan_unless, true": lambda ops, x, y, **_: ops.nan_unless(true(ops, x), [x, y])[1],
    "nan_unless, false": lambda ops, x, y, **_: ops.nan_unless(false(ops, x), [x, y])[1],
    "all_finite, true": lambda ops, x, **_: ops.all_finite(x),
    "all_finite, false": lambda ops, x, **_: ops.all_finite(ops.stack([x[2] * INF, x[3]])),
    "all_finite, NaN": lambda ops, x, **_: ops.all_finite(ops.stack([x[2], x[3] * NAN])),
    "all_finite, of several": lambda ops, x, batch, v, **_: ops.all_finite(x, batch, v, v[:0], x[0, 0], x[1]),
    "all_finite, all but the last": lambda ops, x, batch, v, **_: ops.all_finite(x, batch, x[1], ops.stack([x[2], x[3] * NAN])),
    "all_finite, all but a scalar": lambda ops, x, v, **_: ops.all_finite(x, v, x[0, 0] * INF, x[1, 0]),
    "all_finite, empty": lambda ops, v, **_: ops.all_finite(v[:0]),
    "max_abs": lambda ops, batch, **_: ops.max_abs(batch),
    "max_abs, not finite": lambda ops, x, **_: ops.max_abs(ops.asarray([[*row[:j], NAN, *row[j + 1:]] for row in np.arange(48 * 128.0).reshape(48, 128) % 9 for j in (0, 77, 127)], ops.dtype_of(x))),
    "max_abs, empty": lambda ops, v, **_: ops.max_abs(v[:0].reshape((1, 0))),
    "mean_abs": lambda ops, batch, **_: ops.mean_abs(batch),
    "mean_abs, long": lambda ops, x, **_: ops.mean_abs(ops.asarray(np.full((1, 9999), 60000.0), ops.dtype_of(x))),
    "norm": lambda ops, batch, **_: ops.norm(batch),
    "norm_of_all": lambda ops, x, v, batch, **_: ops.norm_of_all([x, v, batch, v[:0]]),
    "norm_of_all, of nothing": lambda ops, **_: ops.norm_of_all([]),
    "scale_each, first": lambda ops, x, v, **_: ops.scale_each([x, v], ops.norm_of_all([v]))[0],
    "scale_each, last": lambda ops, x, v, **_: ops.scale_each([x, v], ops.norm_of_all([v]))[1],
    "loop": lambda ops, x, **_: ops.loop(6, lambda i, z: ops.add(z, ops.row(x, i)), x),
    "rows_before": lambda ops, batch, **_: ops.rows_before(batch, 2)[:, :2],
    "set_row": lambda ops, batch, **_: ops.set_row(batch, 1, ops.row(batch, 3) * 2.0),
    "stack": lambda ops, x, y, **_: ops.stack([x, y, x]),
    "stack of one": lambda ops, x, **_: ops.stack([x]),
    "pad": lambda ops, v, **_: ops.pad(v, 12),
    "rows": lambda ops, x, v, q, **_: ops.rows([x, v, q[:0], q[1]], 4),
    "rows of one": lambda ops, x, **_: ops.rows([x], 2),
    "rows, join": lambda ops, x, v, **_: ops.rows([v, x], 1),
    "rows, out": lambda ops, x, y, v, **_: ops.rows([x, v[:6]], 6, out=ops.rows([y, v[3:]], 6)),
    "rows, of nothing": lambda ops, v, **_: ops.rows([v[:0]], 3),
    "from_rows, first": lambda ops, x, **_: ops.from_rows(x, FIVE_COLUMNS)[0],
    "from_rows, scalar": lambda ops, x, **_: ops.from_rows(x, FIVE_COLUMNS)[1],
    "from_rows, nothing": lambda ops, x, **_: ops.from_rows(x, FIVE_COLUMNS)[2],
    "from_rows, last": lambda ops, x, **_: ops.from_rows(x, FIVE_COLUMNS)[3],
    "from_rows, out": lambda ops, x, y, p, v, **_: ops.from_rows(x, [(9,), (2, 6), (1, 5)], out=[v, p, y[:1]])[0],
    "from_rows, last out": lambda ops, x, y, p, v, **_: ops.from_rows(x, [(9,), (2, 6), (1, 5)], out=[v, p, y[:1]])[2],
    "from_rows, many": lambda ops, batch, **_: ops.stack(
        ops.from_rows(ops.rows([batch[0], batch[1], batch[2]] * 4, 3), [batch[0].shape] * 12)
    ),
    "row_of": lambda ops, x, **_: ops.row_of(x, 3, 1),
    "row_of, padded": lambda ops, v, **_: ops.row_of(v, 4, 2),
    "row_of, padding alone": lambda ops, v, **_: ops.row_of(v[:2], 4, 3),
    "row_of, nothing": lambda ops, v, **_: ops.row_of(v[:0], 4, 1),
    "zeros": lambda ops, x, **_: ops.zeros((2, 3), ops.dtype_of(x)),
    "cast": lambda ops, x, **_: ops.cast(ops.cast(x, "float32"), "bfloat16"),
    "cast, out": lambda ops, x, y, **_: ops.cast(ops.cast(x, "float32"), "bfloat16", out=ops.cast(y, "bfloat16")),
    "constant": lambda ops, x, **_: ops.constant(("k",), lambda: ops.zeros((2,), "float32")),
    "refresh": lambda ops, x, p, q, v, **_: refresh(ops, ops.set_row(ops.stack([x, x]), 1, ops.zeros((2, 1, 5), ops.dtype_of(x))), ops.stack([x, x])),
    "gram_schmidt": lambda ops, batch, **_: gram_schmidt(ops, batch),
    "gram_schmidt, out": lambda ops, batch, **_: gram_schmidt(ops, batch, out=batch),
    "matmul_each, first": lambda ops, x, p, q, **_: ops.matmul_each([p, q], [x, x.mT])[0],
    "matmul_each, second": lambda ops, x, p, q, **_: ops.matmul_each([p, q], [x, x.mT])[1],
    "matmul_each, stack": lambda ops, batch, p, **_: ops.matmul_each([batch.mT, p], [batch, p.mT])[0],
    "orthonormalize": lambda ops, batch, **_: ops.orthonormalize(batch, 0.0),
    "orthonormalize_each, first": lambda ops, batch, p, **_: ops.orthonormalize_each([batch[0], p, batch[2]], [], 0.0)[0],
    "orthonormalize_each, second": lambda ops, batch, p, **_: ops.orthonormalize_each([batch[0], p, batch[2]], [], 0.0)[1],
    "orthonormalize_each, last": lambda ops, batch, p, **_: ops.orthonormalize_each([batch[0], p, batch[2]], [], 0.0)[2],
    "orthonormalize_each, stack": lambda ops, batch, p, **_: ops.orthonormalize_each([batch[1], batch, p], [], 0.0)[1],
    "orthonormalize_each, beside a stack": lambda ops, batch, **_: ops.orthonormalize_each([batch, batch[1]], [], 0.0)[1],
    "orthonormalize_each, stack and fresh": lambda ops, x, batch, **_: ops.orthonormalize_each(
        [ops.set_row(ops.stack([batch[0], batch[1], batch[2]]), 1, ops.zeros((3, 1, 7), ops.dtype_of(x)))], [ops.stack([batch[1], batch[2], batch[0]])], 0.0
    )[0],
    "orthonormalize_each, fresh": lambda ops, x, p, q, **_: ops.orthonormalize_each(
        [ops.set_row(ops.stack([p]), 1, ops.zeros((1, 1, 6), ops.dtype_of(x)))[0], q], [x.mT[3:], x[4:]], 0.0
    )[0],
    "orthonormalize_each, not finite": lambda ops, x, p, q, **_: ops.orthonormalize_each(
        [ops.cast(p * float("nan"), ops.dtype_of(p)), q], [x.mT[3:], x[4:]], 0.0
    )[0],
    "orthonormalize_each, epsilon": lambda ops, batch, p, **_: ops.orthonormalize_each([batch[0], p], [], 0.5)[1],
    "orthonormalize, epsilon": lambda ops, batch, **_: ops.orthonormalize(batch, 0.5),
    "to_bytes": lambda ops, batch, **_: ops.storage.from_bytes(ops, ops.storage.to_bytes(ops, ops.cast(batch[0], "float32")), "float32"),
    "to_blocks": lambda ops, x, **_: ops.storage.from_blocks(ops.storage.to_blocks(ops, x, 5, 8), tuple(x.shape)),
    "sum_of_each": lambda ops, batch, **_: ops.sum_of_each(lambda x: ops.multiply(x, 2.0), batch),
    "sum_in_order": lambda ops, v, **_: ops.sum_in_order(ops.cast(v, "float32")),
    "quantize, codes": lambda ops, x, **_: ops.quantize(x, 127.0)[0],
    "quantize, scales": lambda ops, x, **_: ops.quantize(x, 127.0)[1],
    **{f"{name}, {codec}": partial(of_codes, name, codec) for name in CODED for codec in ("int8", "int4")},
    **{f"errors_after, {kind}": left_of(kind, true) for kind in PAYLOADS},
    **{f"errors_after, {kind}, not finite": left_of(kind, false) for kind in ("dense", "low rank", "coded")},
    **{f"errors_after, {kind}, decay": left_of(kind, true, 0.5) for kind in PAYLOADS},
    **{f"settle, {kind}": settled(kind, true) for kind in PAYLOADS},
    "settle, not finite": settled("low rank", false),
    "add_each, multiplied": lambda ops, x, y, q, **_: ops.matmul(q, ops.add_each([x], [y], multiplied=True)[0].mT),
    "errors_after, computed before": left_of("low rank", true, 0.5, early=True),
    "cast_each, arrays": lambda ops, **given: in_16_bits(ops, **given)[0][1],
    "cast_each, errors": lambda ops, **given: in_16_bits(ops, **given)[1][1],
    **{f"dense_or_nan, {kind}": received(kind, true) for kind in PAYLOADS},
    **{f"dense_or_nan, {kind}, not finite": received(kind, false) for kind in PAYLOADS},
}  # fmt: skip
#: Composites that have nothing to compute where a row could see it: what to join, and where.
PLANS = {
    "truth",
    "kind_of",
    "storage",
    "max_joined",
    "join_order",
    "bundles",
    "multiplies_together",
    "bundle",
    "unbundle",
    "codes_stay",
    "late_residuals",
}


def compare(result, expected, which):
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), which
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}.get(expected.dtype.name, 0)
    np.testing.assert_allclose(
        result.astype(float), expected.astype(float), tolerance, tolerance, err_msg=which
    )


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_agree_with_numpy(name, dtype):
    expected = in_numpy(KERNELS[name], arrays(dtype))
    for run in EAGER if dtype == "float32" else HALF:
        compare(run(KERNELS[name], arrays(dtype)), expected, run.__name__)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_kernels_agree_with_numpy(request, dtype):
    """In one program: compiling is what takes the time."""
    if dtype == "float16":
        request.getfixturevalue("float16_in_jax")
    found = in_jit(
        lambda ops, **given: {n: kernel(ops, **given) for n, kernel in KERNELS.items()},
        arrays(dtype),
    )
    for name, result in found.items():
        compare(result, in_numpy(KERNELS[name], arrays(dtype)), name)


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if not k.endswith("out") and "lazy" not in k and k not in DONATE]
)
def test_without_out_nothing_is_overwritten(kernel):
    """In torch, where it could be."""
    given = {k: _tensor(v) for k, v in arrays("float32").items()}
    result = KERNELS[kernel](TorchOps(torch.device("cpu")), **given)
    if result.dtype == torch.float32 and kernel not in VIEWS:
        result.fill_(7.0)  # nor is the result a view of an argument
    for name, value in arrays("float32").items():
        np.testing.assert_array_equal(given[name].numpy(), value)


def test_every_composite_has_a_row_in_which_its_body_runs():
    """So a body that is broken fails: it is the toy backend's, beside all overrides."""
    composites = {name for name in dir(Ops) if not name.startswith("_")} - {*PRIMITIVES} - PLANS
    stored = {name for name in dir(Storage) if not name.startswith("_")} - PLANS
    ran = set()

    def noted(of, name):
        def method(self, *args, **kwargs):
            ran.add(name)
            return getattr(of, name)(self, *args, **kwargs)

        return method

    storage = type("NotedStorage", (Storage,), {name: noted(Storage, name) for name in stored})()
    ops = toy(**{name: noted(Ops, name) for name in composites}, storage=storage)()
    for kernel in KERNELS.values():
        kernel(ops, **arrays("float32"))
    assert ran == composites | stored


def test_a_backend_without_a_primitive_is_refused_when_it_is_made():
    for name in PRIMITIVES:
        with pytest.raises(TypeError, match=f"abstract.*'?{name}'?"):
            toy(without=name)()


@pytest.mark.parametrize(
    "method",
    [
        PowerSGD(2, error_feedback=0.9),
        PowerSGD(2, half_step=True),
        Quantize("int4"),
        TopK(8, per=64, bits=4),
        Sign(),
    ],
    ids=repr,
)
def test_methods_run_on_primitives_alone(method):
    shapes = {"w": (24, 16), "stack": (3, 8, 8), "b": (7,)}
    toys, reference = (Simulator(method, shapes, 3, dtype="float32") for _ in range(2))
    toys.ops = ToyOps()
    toys.states = [method.init(toys.ops, toys.specs) for _ in range(3)]
    for step in range(3):
        rng = np.random.default_rng(step)
        gradients = [
            {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()} for _ in range(3)
        ]
        if step == 1:
            gradients[2]["w"][3, 3] = INF
        found, expected = toys.step(gradients), reference.step(gradients)
        for name in shapes:
            np.testing.assert_array_equal(found[name], expected[name])
        for mine, other in zip(toys.states, reference.states, strict=True):
            for name, memory in mine.tensors.items():
                for key, x in memory.items():
                    np.testing.assert_array_equal(x, other.tensors[name][key])


def hard_matrices():
    rng = np.random.default_rng(1)
    usual = rng.normal(size=(2, 6, 20))
    dependent = usual.copy()
    dependent[:, 3:] = dependent[:, :3] + dependent[:, 1:2]
    bad = usual.copy()
    bad[0, 2, 5], bad[1, 0, 0] = np.nan, np.inf
    zeros = usual.copy()
    zeros[:, 4] = 0
    ill = usual * np.geomspace(1, 1e-5, 6)[:, None]
    near = usual.copy()
    near[:, 5] = near[:, 0] + 1e-3 * near[:, 5]
    return {
        "usual": usual, "zero rows": zeros, "all zero": usual * 0, "dependent": dependent, "not finite": bad, "ill scaled": ill,
        "nearly dependent": near, "1e-30": usual * 1e-30, "1e30": usual * 1e30, "dependent, 1e-30": dependent * 1e-30,
        "dependent, 1e30": dependent * 1e30, "more rows than columns": usual[:, :, :4], "one column": usual[:, :, :1],
    }  # fmt: skip


def orthonormalized(ops, x):
    return ops.stack(ops.orthonormalize_each([x[0], x[1]], [], 0.0))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", hard_matrices())
def test_orthonormal_rows_agree_on_hard_input(name):
    given = {"x": hard_matrices()[name].astype(np.float32)}
    expected = in_numpy(orthonormalized, given)
    for run in (*EAGER, in_jit):
        rows = run(orthonormalized, given)
        assert np.isfinite(rows).all(), run.__name__
        # Which rows are dependent is decided alike, and the others are the same up to the
        # conditioning.
        np.testing.assert_array_equal(
            np.abs(rows).max(-1) > 0, np.abs(expected).max(-1) > 0, run.__name__
        )
        tolerance = 1e-3 if name == "nearly dependent" else 1e-5
        np.testing.assert_allclose(rows, expected, rtol=0, atol=tolerance, err_msg=run.__name__)


#: What top-k, casts and signs meet in gradients: ties, zeros of either sign, what is not finite;
#: and whatever hypothesis thinks of.
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, NAN, -NAN, INF, -INF]) | st.floats(width=16)
SHAPES = [(0,), (1,), (7,), (33,), (3, 5), (2, 0), (0, 4), (2, 3, 9)]
RUNS = [in_numpy, in_torch, in_torch_unseen, in_jax]


@st.composite
def arrays_with_ties(draw, shapes=tuple(SHAPES)):
    shape, dtype = (
        draw(st.sampled_from(shapes)),
        draw(st.sampled_from(["float32", "bfloat16", "float16", "int32", "int8", "uint8"])),
    )
    size = math.prod(shape)
    numbers = (
        NUMBERS
        if "float" in dtype
        else st.integers(0, 3) | st.integers(0 if dtype == "uint8" else -128, 127)
    )
    return (
        np.array(draw(st.lists(numbers, min_size=size, max_size=size)), np.float64)
        .astype(dtype)
        .reshape(shape)
    )


@given(arrays_with_ties(), st.sampled_from([0.0, 0.3, 1.0]))
@pytest.mark.usefixtures("float16_in_jax")
def test_top_k_is_the_same_everywhere_and_so_are_ties(x, part):
    k = round(part * x.shape[-1])
    rows = (
        np.where(np.isnan(x.astype(float)), INF, x.astype(float)).reshape(-1, x.shape[-1])
        if x.size
        else []
    )
    expected = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in rows]
    for run in RUNS:
        positions = run(lambda ops, x: ops.top_k(x, k), {"x": x})
        assert positions.dtype == np.int32
        np.testing.assert_array_equal(
            positions, np.reshape(expected, (*x.shape[:-1], k)), run.__name__
        )


@given(arrays_with_ties(((7,), (2, 3, 9))), st.data())
@pytest.mark.usefixtures("float16_in_jax")
def test_what_is_taken_can_be_added_where_it_was(x, data):
    """At positions that may be the same."""
    x = np.where(np.isfinite(x.astype(float)), x, np.ones((), x.dtype))
    count, n = x.size // x.shape[-1], x.shape[-1]
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=5 * count, max_size=5 * count))
    index = np.array(positions, np.int32).reshape(*x.shape[:-1], 5)
    sums, values = x.astype(np.float64).reshape(count, n), np.zeros((count, 5))
    for row, (place, at) in enumerate(
        zip(x.reshape(count, n), index.reshape(count, 5), strict=True)
    ):
        for i, position in enumerate(at):
            values[row, i] = place[position]
            sums[row, position] += place[position]
    if "int" in x.dtype.name:  # which wrap round
        sums = sums.astype(np.int64).astype(x.dtype)
    tolerance = {"float16": 1e-2, "bfloat16": 1e-1, "float32": 1e-5}.get(x.dtype.name, 0)
    for run in RUNS:
        taken = run(lambda ops, x, index: ops.take(x, index), {"x": x, "index": index})
        assert taken.dtype == x.dtype
        np.testing.assert_array_equal(taken.astype(float).reshape(count, 5), values, run.__name__)
        given = {"x": x, "index": index, "values": taken}
        added = run(lambda ops, x, index, values: ops.scatter_add(x, index, values), given)
        assert added.dtype == x.dtype
        np.testing.assert_allclose(
            added.astype(float).reshape(count, n), sums, rtol=tolerance, atol=tolerance
        )


@given(
    st.sampled_from([*SHAPES, (19, 3)])
    | st.lists(st.integers(0, 20), min_size=1, max_size=3).map(tuple),
    st.integers(0, 2**32 - 1),
)
def test_bits_come_back(shape, seed):
    """In the bytes lie rows in eights, then what is left of them."""
    x = np.random.default_rng(seed).random(shape) < 0.5
    rows = x.reshape(
        math.prod(shape[:-1]) if len(shape) > 1 else -1, shape[-1] if len(shape) > 1 else 1
    )
    k = len(rows) // 8
    left = rows[8 * k :].reshape(-1)
    parts = rows[: 8 * k].reshape(8, -1), np.pad(left, (0, -len(left) % 8)).reshape(8, -1)
    expected = np.concatenate(
        [np.packbits(part, axis=0, bitorder="little").reshape(-1) for part in parts]
    )
    for run in RUNS if shape in (*SHAPES, (19, 3)) else RUNS[:-1]:  # JAX compiles for each shape
        packed = run(lambda ops, x: ops.pack_bits(x), {"x": x})
        assert packed.dtype == np.uint8
        np.testing.assert_array_equal(packed, expected)
        np.testing.assert_array_equal(
            run(lambda ops, x: ops.unpack_bits(x, shape), {"x": packed}), x
        )


def hard_to_cast():
    rng = np.random.default_rng(2)
    small = [
        0,
        0.5,
        1,
        1.5,
        126.5,
        127,
        127.5,
        128,
        129,
        254.5,
        255,
        256,
        448,
        463.9,
        464,
        464.1,
        480,
    ]
    edges = np.array([*small, 57344, 61440, 65504, 2**31, 1e38])
    tiny = 2.0 ** -np.arange(1, 30)
    spread = rng.normal(size=2000) * np.geomspace(1e-6, 1e6, 2000)
    x = np.concatenate([edges, -edges, tiny, 1.5 * tiny, [NAN, INF, -INF, 2147483520.0], spread])
    return x.astype(np.float32)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.usefixtures("float16_in_jax")
@pytest.mark.parametrize("run", [in_torch, in_torch_unseen, in_jit], ids=lambda f: f.__name__)
def test_casts_agree_on_every_edge(run):
    """To and from each dtype that can be sent: the same number, and not one that a processor
    happens to make of what is too large."""
    sources, targets = (
        ["float32", "bfloat16", "float16", *EIGHT_BITS],
        ["int8", "uint8", "int32", *EIGHT_BITS],
    )

    def cast(ops, x):
        each = [
            ops.cast(ops.cast(ops.cast(x, source), target), "float32")
            for source in sources
            for target in targets
            if source != target
        ]
        # An int32 as float32 shows too little.
        return ops.stack(
            [
                *each,
                *(ops.cast(ops.cast(ops.cast(x, s), "int32") & 255, "float32") for s in sources),
            ]
        )

    x = hard_to_cast()
    np.testing.assert_array_equal(run(cast, {"x": x}), in_numpy(cast, {"x": x}))


def test_casts_to_integers_and_floats_of_8_bits():
    ops = NumpyOps()
    x = np.array([NAN, INF, -INF, 1e9, -1e9, 1.9, -1.9], np.float32)
    assert ops.cast(x, "int8").tolist() == [0, 127, -128, 127, -128, 1, -1]
    assert ops.cast(x, "uint8").tolist() == [0, 255, 0, 255, 0, 1, 0]
    assert ops.cast(x, "int32").tolist() == [0, 2**31 - 1, -(2**31), 10**9, -(10**9), 1, -1]
    large = np.array([448, 464, 465, INF, NAN, -464, -465], np.float32)
    np.testing.assert_array_equal(
        ops.cast(large, "float8_e4m3fn").astype(float), [448, 448, NAN, NAN, NAN, -448, NAN]
    )
    small = ops.cast(np.float32([57344, 1e6, -INF, NAN]), "float8_e5m2").astype(float)
    np.testing.assert_array_equal(small, [57344, INF, -INF, NAN])


@pytest.mark.parametrize(
    "run", [in_torch, in_torch_by_few_rows, in_torch_unseen, in_jit], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", EXACT)
def test_codes_are_the_same_bits_next_to_halfway(run, name):
    """Where a division and a product with the reciprocal, or one rounding and two, come to codes
    that differ."""
    rng = np.random.default_rng(0)
    largest = np.zeros((512, 128), np.float32)
    largest[:, 0] = rng.uniform(0.5, 1, 512)
    scale = CODECS[name].encode(NumpyOps(), largest)[1]
    x = ((rng.integers(-6, 6, (512, 128)) + 0.5) / (1 / scale)).astype(np.float32)
    x[:, 0] = largest[:, 0]

    def codes(ops, x):
        return ops.rows([ops.view_as(y, "uint8") for y in CODECS[name].encode(ops, x)], x.shape[0])

    np.testing.assert_array_equal(run(codes, {"x": x}), in_numpy(codes, {"x": x}))


def rows_with_ties(block):
    """Whole numbers, of which many lie at a threshold or next to it, among rows that are zero, of
    one size, with an outlier, and not finite."""
    rng = np.random.default_rng(block)
    x = rng.integers(-3, 4, (48, block)) * 0.5
    x[0], x[1], x[2] = 0.0, -0.0, rng.choice([-1, 1], block) * 0.1
    x[3:24] = rng.standard_t(2, (21, block))
    x[24:28] = np.round(rng.normal(size=(4, block)) * 127.5)
    x[28, -1], x[29, 0], x[30, -1], x[31, 0] = 1e9, NAN, INF, -INF
    x[32:36] *= np.geomspace(1e-25, 1e25, 4)[:, None]
    return x.astype(np.float32)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("name", "block"),
    [*((name, 128) for name in (*EXACT, "int2")), ("int4", 8), ("int2", 8), ("int2", 1024)],
)
def test_codes_are_the_same_bits_wherever_they_are_made(name, block):
    """Also where a sum decides, whose last bit depends on the processor. What is not finite is seen
    by everyone."""
    codec, given = replace(CODECS[name], block=block), {"x": rows_with_ties(block)}
    finite, scales = np.isfinite(given["x"]).all(1), 4 * codec.scales

    def codes(ops, x):
        return ops.rows([ops.view_as(y, "uint8") for y in codec.encode(ops, x)], x.shape[0])

    def back(ops, x):
        return codec.decode(ops, *codec.encode(ops, x))

    expected = in_numpy(codes, given)
    for run in (*EAGER, in_jit):
        found = run(codes, given)
        np.testing.assert_array_equal(
            found[finite, :-scales], expected[finite, :-scales], run.__name__
        )
        decoded = run(back, given)
        assert not np.isfinite(decoded[~finite]).all(1).any(), run.__name__
        # A scale is a sum of as many float32 numbers as a block has, in any order.
        rounding = max(1e-5, block * 2.0**-24)
        np.testing.assert_allclose(
            decoded[finite], in_numpy(back, given)[finite], rtol=rounding, err_msg=run.__name__
        )


def test_rows_of_another_length_are_refused():
    for ops, x in (
        (NumpyOps(), np.ones((2, 3))),
        (AbstractOps(), AbstractArray((2, 3), "float32")),
    ):
        with pytest.raises(ValueError, match="top_k: there are no 4 largest of 3 elements"):
            ops.top_k(x, 4)
    ops, x = AbstractOps(), AbstractArray((2, 3), "float32")
    with pytest.raises(ValueError, match=r"take: positions \(3, 1\) for rows \(2, 3\)"):
        ops.take(x, AbstractArray((3, 1), "int32"))
    with pytest.raises(
        ValueError, match=r"float16 \(2, 1\) at \(2, 1\) cannot be added to float32 \(2, 3\)"
    ):
        ops.scatter_add(x, AbstractArray((2, 1), "int32"), AbstractArray((2, 1), "float16"))
    with pytest.raises(
        ValueError, match="pack_bits: float32 are no booleans; of signs, give x > 0"
    ):
        ops.pack_bits(x)
    with pytest.raises(
        ValueError, match=r"unpack_bits: uint8 \(2,\) do not hold the booleans of \(3, 6\)"
    ):
        ops.unpack_bits(AbstractArray((2,), "uint8"), (3, 6))


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.split(",")[0] in COMPRESSING])
def test_shapes_without_data_are_those_of_the_data(kernel):
    expected = in_numpy(KERNELS[kernel], arrays("float32"))
    given = {name: AbstractArray(x.shape, x.dtype.name) for name, x in arrays("float32").items()}
    abstract = KERNELS[kernel](AbstractOps(), **given)
    assert (abstract.shape, abstract.dtype) == (expected.shape, expected.dtype.name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "run", [in_numpy, in_poison, in_torch, in_jit], ids=lambda run: run.__name__
)
def test_what_is_kept_is_limited(run, dtype):
    """Where the host does not know whether a step counts, torch leaves the limit out: it would be a
    pass over memory in every step."""
    given = {"x": np.array([3.0, -0.25, -7.0, np.nan, -0.0], dtype), "y": np.ones(5, dtype)}
    kernels = (
        lambda ok: (
            lambda ops, x, y: ops.where_lazy(
                ok(ops, y), lambda out: ops.add(y, y, out=out), x, limit=2.0
            )
        ),
        lambda ok: (
            lambda ops, x, y: ops.where_each(
                ok(ops, y), [y, y * 2.0], [ops.cast(y * 1.0, dtype), x], limits=[1.0, 2.0]
            )[1]
        ),
    )
    for kernel in kernels:
        np.testing.assert_array_equal(
            run(kernel(false), given).astype(float), [2.0, -0.25, -2.0, np.nan, -0.0]
        )
        np.testing.assert_array_equal(run(kernel(true), given).astype(float), [2.0] * 5)
    # with a loss scale such an error is ordinary, and so is a step that is not finite
    if dtype == "float16":
        given["x"] = np.array([300.0, -0.25, -9000.0, 2.0, -0.0], dtype)
        np.testing.assert_array_equal(run(kernels[0](false), given), given["x"])
