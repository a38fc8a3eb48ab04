"""Operations on a CUDA device that read and write what is large once, where torch's take several
passes, in Triton.

`gradwire.torch_backend.ops.kernels.TorchOps` overrides with each the composite of
`gradwire.core.ops.Ops` whose passes it spares. None needs the others.

Each is an operator of torch, `torch.ops.gradwire.*`, whose schema says what is read and what is
written; so tracing, graph capture and what counts traffic see it as one. What follows `*` is only
written to, but what `add_at` adds to. Triton itself is imported, and a kernel compiled, at the
first launch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from gradwire.core.kernels.arrays import group_by
from gradwire.core.kernels.payloads import Coded, LowRank, Payload
from gradwire.torch_backend.ops.addresses import are_aligned, side_by_side, table_of, with_programs

#: Elements of a program that goes over a vector, and of one that goes over rows.
VECTOR, ROWS_OF = 1024, 2048
#: Of one that only looks at a vector.
SEEN = 16 * VECTOR
#: Bytes of one that packs integers, each of which takes a bit of eight of them.
PACKED = 256
#: Rows and columns of a tile of a product, and how many rows of its factors are multiplied at a
#: time: few, or more.
TILE, DEPTH = (64, 128), (16, 32)
#: The first GPUs for which Triton compiles: Ampere.
OLDEST = (8, 0)
#: Of all but tiles of products: each product is rounded before it is added, as by NumPy, torch and
#: JAX. Codes come out bit for bit, and sums that overflow as inf or NaN where theirs do: in one
#: operation -1e76 added to inf is inf, rounded before it is NaN.
EXACT = {"enable_fp_fusion": False}

_LIBRARY: Any = torch.library.Library("gradwire", "DEF")  # type: ignore[no-untyped-call]


def operator(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes an operator that returns nothing of a function that launches a kernel: on CUDA, and
    under Triton's interpreter on the CPU."""

    def define(start: Callable[..., None]) -> Callable[..., None]:
        name = start.__name__
        _LIBRARY.define(f"{name}({schema}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CUDA", "CPU"):
            _LIBRARY.impl(name, start, key)
        _LIBRARY.impl(name, lambda *args, **kwargs: None, "Meta")
        operator: Callable[..., None] = getattr(torch.ops.gradwire, name).default
        return operator

    return define


def launch(name: str, programs: int, device: torch.device, *args: Any, **options: Any) -> None:
    """Run so many programs of a kernel of `triton_kernels`, or of the file that is named before it,
    on the device's current stream."""
    if not programs:
        return
    file, _, function = name.rpartition(".")
    module = importlib.import_module(f"gradwire.torch_backend.ops.{file or 'triton_kernels'}")
    kernel = getattr(module, function)[programs,]
    # which users need not have set
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel(*args, **(EXACT | options))


def _launch_on_all(
    name: str,
    rows: Sequence[tuple[int, ...]],
    out: Tensor,
    *likes: Tensor,
    after: Sequence[Any] = (),
    **options: Any,
) -> None:
    """One launch of a kernel that is told of many tensors, of which each row says first how many
    programs it takes. `likes` come before the table, `after` after it."""
    programs, told = with_programs(rows)
    if programs:
        launch(
            name,
            programs,
            out.device,
            *likes,
            table_of(told, out.device),
            len(told),
            *after,
            **options,
        )


def _rows_of(*lists: Sequence[Tensor]) -> tuple[list[tuple[int, ...]], bool]:
    """The table rows of vectors that are as long in each list: how many programs they take, how
    long they are and where; and whether all of that is aligned."""
    rows = [
        (-(-own[0].numel() // VECTOR), own[0].numel(), *(x.data_ptr() for x in own))
        for own in zip(*lists, strict=True)
    ]
    return rows, are_aligned(chain(*lists), [row[1] for row in rows])


@operator("Tensor ok, Tensor[] x, *, Tensor(a!)[] out")
def copy_if(ok: Tensor, x: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
    rows, aligned = _rows_of(x, out)
    _launch_on_all("copy_if", rows, out[0], ok, out[0], aligned=aligned, block=VECTOR)


@operator("Tensor(a!)[] x, Tensor[] y")
def add_to(x: Sequence[Tensor], y: Sequence[Tensor]) -> None:
    rows, aligned = _rows_of(x, y)
    _launch_on_all("add_to", rows, x[0], x[0], aligned=aligned, block=VECTOR)


@operator("Tensor[] x, float factor, *, Tensor(a!)[] out")
def multiplied_copy(x: Sequence[Tensor], factor: float, *, out: Sequence[Tensor]) -> None:
    rows, aligned = _rows_of(x, out)
    _launch_on_all(
        "multiplied_copy", rows, out[0], out[0], after=[factor], aligned=aligned, block=VECTOR
    )


@operator("Tensor[] x, *, Tensor(a!) found")
def finite(x: Sequence[Tensor], *, found: Tensor) -> None:
    rows = []
    for each in x:
        number, n, apart = _vectors(each)
        across = -(-n // SEEN)
        rows.append((number * across, across, n, apart, each.data_ptr()))
    aligned = are_aligned(x, [n for row in rows for n in row[2:4]])
    cut: dict[str, Any] = {"block": VECTOR, "blocks": SEEN // VECTOR}
    _launch_on_all("finite", rows, found, x[0], after=[found], aligned=aligned, **cut)


def _vectors(x: Tensor) -> tuple[int, int, int]:
    """How many vectors a tensor is that are equally far apart, how long they are, and how far it is
    from one to the next: all of it, or what its first axis counts; no element in a vector, if it is
    neither."""
    if x.is_contiguous():
        return 1, x.numel(), x.numel()
    n = 1
    for size, stride in zip(x.shape[:0:-1], x.stride()[:0:-1], strict=True):
        if stride != n:
            return 1, 0, 0
        n *= size
    return x.shape[0], n, x.stride(0)


@operator("Tensor ok, Tensor[] x, Tensor[] p, Tensor[] q, *, Tensor(a!)[] out")
def subtract_product_if(
    ok: Tensor,
    x: Sequence[Tensor],
    p: Sequence[Tensor],
    q: Sequence[Tensor],
    *,
    out: Sequence[Tensor],
) -> None:
    _products(ok, x, p, q, out, subtracts=True)


@operator("Tensor ok, Tensor[] p, Tensor[] q, *, Tensor(a!)[] out")
def product_or_nan(
    ok: Tensor, p: Sequence[Tensor], q: Sequence[Tensor], *, out: Sequence[Tensor]
) -> None:
    _products(ok, out, p, q, out, subtracts=False)


def _products(
    ok: Tensor,
    x: Sequence[Tensor],
    p: Sequence[Tensor],
    q: Sequence[Tensor],
    out: Sequence[Tensor],
    *,
    subtracts: bool,
) -> None:
    rows, (some, columns) = [], TILE
    longest = max(b.shape[-2] for b in p)
    depth = DEPTH[longest > DEPTH[0]]
    for a, b, c, y in zip(x, p, q, out, strict=True):
        r, n, m = *b.shape[-2:], c.shape[-1]
        batch, *strides = b.shape[0] if b.ndim == 3 else 1, *_between(b), *_between(c)
        programs = batch * -(-n // some) * -(-m // columns)
        rows.append(
            (programs, n, m, r, *strides, a.data_ptr(), b.data_ptr(), c.data_ptr(), y.data_ptr())
        )
    aligned = are_aligned([*x, *out], [row[2] for row in rows])
    # On the CPU Triton's interpreter would multiply the bits of bfloat16.
    halves = out[0].is_cuda and out[0].dtype == p[0].dtype and out[0].dtype.itemsize == 2
    options: dict[str, Any] = {
        "subtracts": subtracts,
        "double": out[0].dtype == torch.float64,
        "aligned": aligned,
    }
    options |= {"halves": halves, "depth": depth, "num_stages": 1}
    _launch_on_all(
        "product_if", rows, out[0], ok, out[0], p[0], some=some, columns=columns, **options
    )


def _between(factor: Tensor) -> tuple[int, int]:
    """Elements from a matrix of a factor to the next, and from a row."""
    return (0, factor.stride(0)) if factor.ndim == 2 else (factor.stride(0), factor.stride(1))


def _blocks(rows: int, width: int) -> tuple[int, dict[str, int]]:
    """How many programs go over so many rows, and what they are told."""
    padded = 1 << (width - 1).bit_length()
    some = max(1, ROWS_OF // padded)
    return -(-rows // some), {"width": width, "padded": padded, "some": some}


@operator("Tensor x, float largest, *, Tensor(a!) codes, Tensor(b!) scales")
def quantize(x: Tensor, largest: float, *, codes: Tensor, scales: Tensor) -> None:
    rows, width = x.shape
    programs, blocks = _blocks(rows, width)
    launch("quantize", programs, x.device, x, codes, scales, rows, 1.0 / largest, **blocks)


@operator(
    "Tensor codes, Tensor scales, float largest, *, Tensor(a!) mean_codes, Tensor(b!) mean_scales,"
    " Tensor(c!)? lost"
)
def quantize_mean(
    codes: Tensor,
    scales: Tensor,
    largest: float,
    *,
    mean_codes: Tensor,
    mean_scales: Tensor,
    lost: Tensor | None,
) -> None:
    replicas, rows, width = codes.shape
    programs, blocks = _blocks(rows, width)
    numbers = (
        rows,
        replicas,
        codes.stride(0),
        scales.stride(0),
        1.0 / replicas,
        -float(replicas),
        1.0 / largest,
    )
    place = mean_scales if lost is None else lost  # which is not written to
    tensors = codes, scales, place, mean_codes, mean_scales
    launch(
        "quantize_mean",
        programs,
        codes.device,
        *tensors,
        *numbers,
        keeps=lost is not None,
        **blocks,
    )


@operator(
    "Tensor ok, Tensor[] x, Tensor[] codes, Tensor[] scales, Tensor[] lost, int[] first, *,"
    " Tensor(a!)[] out"
)
def subtract_decoded_if(
    ok: Tensor,
    x: Sequence[Tensor],
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    lost: Sequence[Tensor],
    first: Sequence[int],
    *,
    out: Sequence[Tensor],
) -> None:
    rows, width = [], codes[0].shape[-1]
    for begin, y, *tensors in zip(first, out, x, codes, scales, lost, out, strict=True):
        n, start = y.numel(), begin * width
        sizes = -(-n // VECTOR), n, start, start + tensors[3].numel()
        rows.append((*sizes, *(each.data_ptr() for each in tensors)))
    aligned = are_aligned([*x, *codes, *lost, *out], [n for row in rows for n in row[1:4]])
    _launch_on_all(
        "subtract_decoded_if", rows, out[0], ok, out[0], aligned=aligned, width=width, block=VECTOR
    )


@operator("Tensor ok, Tensor codes, Tensor scales, *, Tensor(a!) out")
def decode_or_nan(ok: Tensor, codes: Tensor, scales: Tensor, *, out: Tensor) -> None:
    n, width = out.numel(), codes.shape[-1]
    launch(
        "decode_or_nan",
        -(-n // VECTOR),
        out.device,
        ok,
        codes,
        scales,
        out,
        n,
        width=width,
        block=VECTOR,
    )


@operator(
    "Tensor bits, Tensor above, Tensor below, Tensor of_run, int run, int block, *, Tensor(a!) out"
)
def sum_of_signs(
    bits: Tensor, above: Tensor, below: Tensor, of_run: Tensor, run: int, block: int, *, out: Tensor
) -> None:
    n, (replicas, numbers) = out.numel(), above.shape
    whole = n // block * block
    sizes = n, whole, max(1, (n - whole) // 8), replicas, bits.stride(0), numbers
    cut = {"run": run, "bits_of": block, "block": VECTOR}
    launch(
        "sum_of_signs", -(-n // VECTOR), out.device, bits, above, below, of_run, out, *sizes, **cut
    )


@operator("Tensor x, Tensor index, *, Tensor(a!) out")
def take_rows(x: Tensor, index: Tensor, *, out: Tensor) -> None:
    programs, blocks = _blocks(*out.shape)
    batch = x.stride(0) if x.ndim == 3 else 0
    launch(
        "take_rows",
        programs,
        x.device,
        x,
        index,
        out,
        len(out),
        x.shape[-2],
        batch,
        x.stride(-2),
        **blocks,
    )


@operator("Tensor x, *, Tensor(a!) keys")
def search_keys(x: Tensor, *, keys: Tensor) -> None:
    launch(
        "search_keys",
        -(-x.numel() // VECTOR),
        x.device,
        x,
        keys,
        x.numel(),
        x.shape[1],
        block=VECTOR,
    )


@operator("Tensor index, Tensor rows, Tensor values, *, Tensor(a!) out")
def add_at(index: Tensor, rows: Tensor, values: Tensor, *, out: Tensor) -> None:
    replicas, count, k = index.shape
    padded = 1 << (k - 1).bit_length()
    launch("add_at", count, out.device, index, rows, values, out, replicas, count, k, padded=padded)


def _bytes_of(n: int, bits: int) -> tuple[int, int]:
    """The bytes of so many integers, of less than 16 bits: those that hold eight bits of one, and
    those that hold the bits that remain."""
    return bits // 8 * n, -(-(bits % 8 * n) // 8)


@operator("Tensor x, int bits, *, Tensor(a!) out")
def pack_integers(x: Tensor, bits: int, *, out: Tensor) -> None:
    sizes, programs = _bytes_of(x.numel(), bits), -(-out.numel() // PACKED)
    launch("pack_integers", programs, x.device, x, out, x.numel(), *sizes, bits=bits, block=PACKED)


@operator("Tensor data, int bits, *, Tensor(a!) out")
def unpack_integers(data: Tensor, bits: int, *, out: Tensor) -> None:
    rows, n = out.shape
    across = -(-n // VECTOR)
    numbers = n, *_bytes_of(n, bits), data.stride(0), across
    launch(
        "unpack_integers", rows * across, out.device, data, out, *numbers, bits=bits, block=VECTOR
    )


class Memory(Protocol):
    """Who hands out memory: `gradwire.torch_backend.ops.kernels.TorchOps`."""

    def temporary(
        self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor: ...


class TorchFused:
    """The kernels, for tensors on one device. `ok` are boolean scalars on it, which the host does
    not read: where one does not hold, what is called `y` is neither read nor written.

    Attributes:
        widest: rows of codes have at most so many elements.
    """

    widest = 4096

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def copy_if(self, ok: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        """Each of `ys` becomes that of `xs`, of its shape, if `ok` holds."""
        pairs = [(x.contiguous(), y) for x, y in zip(xs, ys, strict=True)]
        for some in group_by(
            pairs, [(x.dtype, y.dtype, are_aligned([x, y], [y.numel()])) for x, y in pairs]
        ):
            if some[0][0].dtype == some[0][1].dtype:
                _into([y for _, y in some], partial(copy_if, ok, [x for x, _ in some]))
            else:
                for x, y in some:
                    torch.where(ok, x, y, out=y)

    def add_each(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        """Add to each of `xs`, whose elements lie side by side, that of `ys`, of its shape and
        dtype."""
        for some in group_by(zip(xs, ys, strict=True), [x.dtype for x in xs]):
            add_to([x for x, _ in some], [y.contiguous() for _, y in some])

    def multiplied_copies(
        self, places: Sequence[Tensor], xs: Sequence[Tensor], factor: float
    ) -> None:
        """Each of `xs`, of one dtype that is no float64, times a factor in float32, in its
        place."""
        multiplied_copy([x.contiguous() for x in xs], factor, out=places)

    def are_finite(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Whether all elements of these are finite: vectors of booleans, all of which are true
        then."""
        answers = []
        own = [x if _vectors(x)[1] else x.contiguous() for x in xs if x.numel()]
        for some in group_by(own, [x.dtype for x in own]):
            programs = sum(number * -(-n // SEEN) for number, n, _ in map(_vectors, some))
            answers.append(self._memory.temporary((programs,), some[0], torch.bool))
            finite(some, found=answers[-1])
        return answers

    def subtract_products_if(
        self,
        ok: Tensor,
        xs: Sequence[Tensor],
        sent: Sequence[LowRank[Tensor]],
        ys: Sequence[Tensor],
    ) -> None:
        """Each of `ys` becomes `x - p.mT @ q` if `ok` holds; an `x` has any shape of so many
        elements. Of `x` and `y`, and of both factors, dtypes are equal."""
        own = [
            (x.contiguous(), _by_rows(p), _by_rows(q), y)
            for x, (p, q), y in zip(xs, sent, ys, strict=True)
        ]
        for some in group_by(
            own, [(p.dtype, y.dtype, are_aligned([x, y], [q.shape[-1]])) for x, p, q, y in own]
        ):
            x, p, q, y = zip(*some, strict=True)
            _into(y, partial(subtract_product_if, ok, x, p, q))

    def products_or_nan(
        self, ok: Tensor, factors: Sequence[LowRank[Tensor]], ys: Sequence[Tensor]
    ) -> None:
        """Each of `ys` becomes `p.mT @ q`, in any shape of so many elements, if `ok` holds, else
        NaN throughout. Of both factors dtypes are equal."""
        own = [(_by_rows(p), _by_rows(q), y) for (p, q), y in zip(factors, ys, strict=True)]
        for some in group_by(
            own, [(p.dtype, y.dtype, are_aligned([y], [q.shape[-1]])) for p, q, y in own]
        ):
            p, q, y = zip(*some, strict=True)
            _into(y, partial(product_or_nan, ok, p, q))

    def errors_after(
        self,
        ok: Tensor,
        xs: Sequence[Tensor],
        sent: Sequence[Payload[Tensor]],
        errors: Sequence[Tensor],
    ) -> list[int]:
        """Each error becomes `x - sent` if `ok` holds. Returns the numbers of those to which no
        kernel does that, and nothing is done."""
        thin: dict[int, LowRank[Tensor]] = {}
        coded: dict[int, Coded[Tensor]] = {}
        for i, (x, own, y) in enumerate(zip(xs, sent, errors, strict=True)):
            if x.dtype == y.dtype and is_product(own, x):
                thin[i] = own
            elif x.dtype == y.dtype and isinstance(own, Coded) and own.lost is not None:
                coded[i] = own
        self.subtract_products_if(
            ok, [xs[i] for i in thin], list(thin.values()), [errors[i] for i in thin]
        )
        self.subtract_decoded_if(
            ok, [xs[i] for i in coded], list(coded.values()), [errors[i] for i in coded]
        )
        return [i for i in range(len(xs)) if i not in thin and i not in coded]

    def subtract_decoded_if(
        self, ok: Tensor, xs: Sequence[Tensor], sent: Sequence[Coded[Tensor]], ys: Sequence[Tensor]
    ) -> None:
        """Each of `ys` becomes, if `ok` holds, `x` less what codes (R, B) and scales (R, 1) stand
        for and, from row `first` on, less the rows `lost`, float32 (some, B). It has no more
        elements than the codes."""
        own = [(x.contiguous(), coded, y) for x, coded, y in zip(xs, sent, ys, strict=True)]
        keys = [
            (y.dtype, each.codes.shape[-1], are_aligned([x, each.codes, y], [y.numel()]))
            for x, each, y in own
        ]
        for some in group_by(own, keys):
            x, coded, y = zip(*some, strict=True)
            _, codes, scales, lost, first = zip(*coded, strict=True)
            _into(list(y), partial(subtract_decoded_if, ok, x, codes, scales, lost, first))

    def quantized(self, x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
        """`Ops.quantize`."""
        codes, scales = self._coded(tuple(x.shape), x)
        quantize(x.contiguous(), largest, codes=codes, scales=scales)
        return codes, scales

    def quantize_mean_of_codes(
        self, codes: Tensor, scales: Tensor, largest: float, *, keeps: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`Ops.encode_mean`, of `gradwire.core.codecs.integers.Integers` of 8 bits."""
        shape = tuple(codes.shape[1:])
        mean_codes, mean_scales = self._coded(shape, scales)
        lost = self._memory.temporary(shape, mean_scales) if keeps else None
        codes, scales = (x if x[0].is_contiguous() else x.contiguous() for x in (codes, scales))
        quantize_mean(
            codes, scales, largest, mean_codes=mean_codes, mean_scales=mean_scales, lost=lost
        )
        return mean_codes, mean_scales, lost

    def _coded(self, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        rows = shape[0]
        codes = self._memory.temporary(shape, like, torch.uint8)
        return codes, self._memory.temporary((rows, 1), like, torch.float32)

    def sum_of_signs(
        self,
        bits: Tensor,
        above: Tensor,
        below: Tensor,
        of_run: Tensor,
        run: int,
        block: int,
        out: Tensor,
    ) -> Tensor:
        """`out` (T,), which becomes what bits (W, T / 8) stand for: a number of `above` (W, N) or
        `below` (W, N) for each element, that of its run of so many elements (`of_run`); added one
        replica after the other. See `gradwire.torch_backend.ops.signs`."""
        bits = bits if bits.stride(1) == 1 else bits.contiguous()
        sum_of_signs(bits, above.contiguous(), below.contiguous(), of_run, run, block, out=out)
        return out

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Rows (n, m) of a matrix, or of several (…, R, m), whose elements lie side by side."""
        out = self._memory.temporary((len(index), x.shape[-1]), x)
        take_rows(x, index, out=out)
        return out

    def search_keys(self, x: Tensor) -> Tensor:
        """int64 (R, m): of each element of rows a number that says how large it is, and of equal
        ones which comes first; no two of a row are equal."""
        keys = self._memory.temporary(tuple(x.shape), x, torch.int64)
        search_keys(x.contiguous(), keys=keys)
        return keys

    def add_at(self, out: Tensor, index: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """`out`, a vector, to which values (W, R, k) are added one replica after the other: at
        positions `index` (W, R, k), distinct of each replica, of rows that begin at `rows` (R,
        1)."""
        add_at(index.contiguous(), rows, values.contiguous(), out=out)
        return out

    def pack_integers(self, x: Tensor, bits: int) -> Tensor:
        """`Ops.pack_integers`, of less than 16 bits."""
        out = self._memory.temporary((sum(_bytes_of(x.numel(), bits)),), x, torch.uint8)
        pack_integers(x.contiguous(), bits, out=out)
        return out

    def unpack_integers(self, data: Tensor, bits: int, n: int) -> Tensor:
        """`Ops.unpack_integers`, of bytes (…, b) integers (…, n)."""
        rows = (
            data
            if data.ndim == 2 and data.stride(1) == 1
            else data.reshape(-1, data.shape[-1]).contiguous()
        )
        out = self._memory.temporary((len(rows), n), data, torch.int32)
        unpack_integers(rows, bits, out=out)
        return out.view(*data.shape[:-1], n)

    def decoded_each(
        self, ok: Tensor, codes: Sequence[Tensor], scales: Sequence[Tensor], out: Sequence[Tensor]
    ) -> list[Tensor]:
        """What each (R, B) of codes stands for if `ok` holds, else NaN throughout, in `out`, whose
        arrays have no more elements than the codes."""
        for place, own_codes, own_scales in _joined(out, codes, scales):
            dense = place.contiguous()
            decode_or_nan(ok, own_codes, own_scales, out=dense)
            _returned(dense, place)
        return list(out)


def is_product(sent: Payload[Tensor], x: Tensor) -> TypeGuard[LowRank[Tensor]]:
    """Whether these are factors of a matrix of as many elements as `x`."""
    return (
        isinstance(sent, LowRank)
        and math.prod(sent.matrix_shape) == x.numel()
        and sent.p.dtype == sent.q.dtype
    )


def _by_rows(factor: Tensor) -> Tensor:
    """Its rows may be apart, elements of one are side by side."""
    return factor if factor.stride(-1) == 1 else factor.contiguous()


def _into(ys: Sequence[Tensor], start: Callable[..., None]) -> None:
    """Start what writes to memory that is side by side, as that of `ys` is as a rule."""
    places = [y.contiguous() for y in ys]
    start(out=places)
    for place, y in zip(places, ys, strict=True):
        _returned(place, y)


def _returned(dense: Tensor, y: Tensor) -> Tensor:
    """`y`, with the elements that were written side by side: there, as a rule."""
    return y if dense is y or dense.data_ptr() == y.data_ptr() else y.copy_(dense)


def _joined(
    out: Sequence[Tensor], codes: Sequence[Tensor], scales: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """The same triples, such as lie side by side in memory in all three as one: places are in DDP's
    buckets."""
    run: list[int] = []
    for i in sorted(range(len(out)), key=lambda i: out[i].data_ptr()):
        if run and not (
            # else codes stand for elements that there are not
            codes[run[-1]].numel() == out[run[-1]].numel()
            and out[run[-1]].dtype == out[i].dtype
            and all(
                xs[run[-1]].data_ptr() + xs[run[-1]].nbytes == xs[i].data_ptr()
                for xs in (out, codes, scales)
            )
        ):
            yield from _as_one(run, out, codes, scales)
            run = []
        run.append(i)
    if run:
        yield from _as_one(run, out, codes, scales)


def _as_one(run: Sequence[int], *lists: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    each = [[xs[i] for xs in lists] for i in run]
    wholes = [side_by_side(column) for column in zip(*each, strict=True)] if len(run) > 1 else []
    out, codes, scales = wholes or [None] * 3
    if out is None or codes is None or scales is None:
        yield from map(tuple, each)
    else:
        yield out, codes.view(-1, each[0][1].shape[1]), scales.view(-1, 1)


@functools.cache
def available(device: torch.device) -> bool:
    """Whether these operations run on a device: one of NVIDIA's that Triton knows, with Triton and
    the C compiler that it starts kernels with. Said once if not."""
    if (
        device.type != "cuda"
        or torch.version.cuda is None
        or importlib.util.find_spec("triton") is None
    ):
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        ok, x = (
            torch.ones((), dtype=torch.bool, device=device),
            torch.zeros(1, dtype=torch.float32, device=device),
        )
        copy_if(ok, [x], out=[x])
    except Exception as error:
        warnings.warn(
            f"gradwire runs without its kernels in Triton on {device}, with more passes over"
            f" memory: {error!r}",
            stacklevel=2,
        )
        return False
    return True
