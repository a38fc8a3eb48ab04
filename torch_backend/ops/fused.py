"""Operations on a CUDA device that read and write what is large once, where torch's take several passes, in Triton.

`gradwire.torch_backend.ops.kernels.TorchOps` overrides with each the composite of `gradwire.core.ops.Ops` whose passes it
spares. None needs the others.

Each is an operator of torch, `torch.ops.gradwire.*`, whose schema says what is read and what is written; so tracing, graph capture and what counts traffic see it as one.
What follows `*` is only written to, but what `add_at` adds to. Triton itself is imported, and a kernel compiled, at the first launch.
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
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from gradwire.core.kernels.arrays import group_by
from gradwire.core.kernels.payloads import Coded, LowRank, Payload
from gradwire.torch_backend.ops.adjacent import side_by_side
from gradwire.torch_backend.ops.tables import are_aligned, table_of, with_programs

#: Elements of a program that goes over a vector, and of one that goes over rows.
VECTOR, ROWS_OF = 1024, 2048
#: Rows and columns of a tile of a product.
TILE = 32, 64
#: The first GPUs for which Triton compiles: Ampere.
OLDEST = (8, 0)
#: Of all: each product is rounded before it is added, as by NumPy, torch and JAX. Codes come out bit for bit, and sums
#: that overflow as inf or NaN where theirs do: in one operation -1e76 added to inf is inf, rounded before it is NaN.
EXACT = {"enable_fp_fusion": False}

_LIBRARY: Any = torch.library.Library("gradwire", "DEF")  # type: ignore[no-untyped-call]


def operator(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes an operator that returns nothing of a function that launches a kernel: on CUDA, and under Triton's interpreter on the CPU."""

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
    """Run so many programs of a kernel of `triton_kernels`, or of the file that is named before it, on the device's current stream."""
    if not programs:
        return
    file, _, function = name.rpartition(".")
    module = importlib.import_module(f"gradwire.torch_backend.ops.{file or 'triton_kernels'}")
    kernel = getattr(module, function)[programs,]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # which users need not have set
        kernel(*args, **(EXACT | options))


def _launch_on_all(
    name: str, rows: Sequence[tuple[int, ...]], out: Tensor, ok: Tensor, *likes: Tensor, **options: Any
) -> None:
    """One launch of a kernel that is told of many tensors, of which each row says first how many programs it takes."""
    programs, told = with_programs(rows)
    if programs:
        launch(name, programs, out.device, ok, *likes, table_of(told, out.device), len(told), **options)


@operator("Tensor ok, Tensor[] x, *, Tensor(a!)[] out")
def copy_if(ok: Tensor, x: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
    rows = [(-(-y.numel() // VECTOR), y.numel(), a.data_ptr(), y.data_ptr()) for a, y in zip(x, out, strict=True)]
    aligned = are_aligned([*x, *out], [y.numel() for y in out])
    _launch_on_all("copy_if", rows, out[0], ok, out[0], aligned=aligned, block=VECTOR)


@operator("Tensor ok, Tensor[] x, Tensor[] p, Tensor[] q, *, Tensor(a!)[] out")
def subtract_product_if(
    ok: Tensor, x: Sequence[Tensor], p: Sequence[Tensor], q: Sequence[Tensor], *, out: Sequence[Tensor]
) -> None:
    _products(ok, x, p, q, out, subtracts=True)


@operator("Tensor ok, Tensor[] p, Tensor[] q, *, Tensor(a!)[] out")
def product_or_nan(ok: Tensor, p: Sequence[Tensor], q: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
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
    for a, b, c, y in zip(x, p, q, out, strict=True):
        r, n, m = *b.shape[-2:], c.shape[-1]
        batch, *strides = b.shape[0] if b.ndim == 3 else 1, *_between(b), *_between(c)
        programs = batch * -(-n // some) * -(-m // columns)
        rows.append((programs, n, m, r, *strides, a.data_ptr(), b.data_ptr(), c.data_ptr(), y.data_ptr()))
    aligned = are_aligned([*x, *out], [row[2] for row in rows])
    options = {"subtracts": subtracts, "double": out[0].dtype == torch.float64, "aligned": aligned}
    _launch_on_all("product_if", rows, out[0], ok, out[0], p[0], some=some, columns=columns, **options)


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
    "Tensor codes, Tensor scales, float largest, *, Tensor(a!) mean_codes, Tensor(b!) mean_scales, Tensor(c!)? lost"
)
def quantize_mean(
    codes: Tensor, scales: Tensor, largest: float, *, mean_codes: Tensor, mean_scales: Tensor, lost: Tensor | None
) -> None:
    replicas, rows, width = codes.shape
    programs, blocks = _blocks(rows, width)
    numbers = rows, replicas, codes.stride(0), scales.stride(0), 1.0 / replicas, -float(replicas), 1.0 / largest
    place = mean_scales if lost is None else lost  # which is not written to
    tensors = codes, scales, place, mean_codes, mean_scales
    launch("quantize_mean", programs, codes.device, *tensors, *numbers, keeps=lost is not None, **blocks)


@operator("Tensor ok, Tensor[] x, Tensor[] codes, Tensor[] scales, Tensor[] lost, int[] first, *, Tensor(a!)[] out")
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
    _launch_on_all("subtract_decoded_if", rows, out[0], ok, out[0], aligned=aligned, width=width, block=VECTOR)


@operator("Tensor ok, Tensor codes, Tensor scales, *, Tensor(a!) out")
def decode_or_nan(ok: Tensor, codes: Tensor, scales: Tensor, *, out: Tensor) -> None:
    n, width = out.numel(), codes.shape[-1]
    launch("decode_or_nan", -(-n // VECTOR), out.device, ok, codes, scales, out, n, width=width, block=VECTOR)


@operator("Tensor bits, Tensor above, Tensor below, Tensor of_run, int run, int block, *, Tensor(a!) out")
def sum_of_signs(
    bits: Tensor, above: Tensor, below: Tensor, of_run: Tensor, run: int, block: int, *, out: Tensor
) -> None:
    n, (replicas, numbers) = out.numel(), above.shape
    whole = n // block * block
    sizes = n, whole, max(1, (n - whole) // 8), replicas, bits.stride(0), numbers
    cut = {"run": run, "bits_of": block, "block": VECTOR}
    launch("sum_of_signs", -(-n // VECTOR), out.device, bits, above, below, of_run, out, *sizes, **cut)


@operator("Tensor index, Tensor rows, Tensor values, *, Tensor(a!) out")
def add_at(index: Tensor, rows: Tensor, values: Tensor, *, out: Tensor) -> None:
    replicas, count, k = index.shape
    padded = 1 << (k - 1).bit_length()
    launch("add_at", count, out.device, index, rows, values, out, replicas, count, k, padded=padded)


class Memory(Protocol):
    """Who hands out memory: `gradwire.torch_backend.ops.kernels.TorchOps`."""

    def temporary(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor: ...


class TorchFused:
    """The kernels, for tensors on one device. `ok` are boolean scalars on it, which the host does not read: where one does not hold, what is
    called `y` is neither read nor written.

    Attributes:
        widest: rows of codes have at most so many elements.
    """

    widest = 4096

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def copy_if(self, ok: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        """Each of `ys` becomes that of `xs`, of its shape, if `ok` holds."""
        pairs = [(x.contiguous(), y) for x, y in zip(xs, ys, strict=True)]
        for some in group_by(pairs, [(x.dtype, y.dtype, are_aligned([x, y], [y.numel()])) for x, y in pairs]):
            if some[0][0].dtype == some[0][1].dtype:
                _into([y for _, y in some], partial(copy_if, ok, [x for x, _ in some]))
            else:
                for x, y in some:
                    torch.where(ok, x, y, out=y)

    def subtract_products_if(
        self, ok: Tensor, xs: Sequence[Tensor], sent: Sequence[LowRank[Tensor]], ys: Sequence[Tensor]
    ) -> None:
        """Each of `ys` becomes `x - p.mT @ q` if `ok` holds; an `x` has any shape of so many elements. Of `x` and `y`, and of both factors, dtypes are equal."""
        own = [(x.contiguous(), _by_rows(p), _by_rows(q), y) for x, (p, q), y in zip(xs, sent, ys, strict=True)]
        for some in group_by(own, [(p.dtype, y.dtype, are_aligned([x, y], [q.shape[-1]])) for x, p, q, y in own]):
            x, p, q, y = zip(*some, strict=True)
            _into(y, partial(subtract_product_if, ok, x, p, q))

    def products_or_nan(self, ok: Tensor, factors: Sequence[LowRank[Tensor]], ys: Sequence[Tensor]) -> None:
        """Each of `ys` becomes `p.mT @ q`, in any shape of so many elements, if `ok` holds, else NaN throughout. Of both factors dtypes are equal."""
        own = [(_by_rows(p), _by_rows(q), y) for (p, q), y in zip(factors, ys, strict=True)]
        for some in group_by(own, [(p.dtype, y.dtype, are_aligned([y], [q.shape[-1]])) for p, q, y in own]):
            p, q, y = zip(*some, strict=True)
            _into(y, partial(product_or_nan, ok, p, q))

    def errors_after(
        self, ok: Tensor, xs: Sequence[Tensor], sent: Sequence[Payload[Tensor]], errors: Sequence[Tensor]
    ) -> list[int]:
        """Each error becomes `x - sent` if `ok` holds. Returns the numbers of those to which no kernel does that, and nothing is done."""
        thin: dict[int, LowRank[Tensor]] = {}
        coded: dict[int, Coded[Tensor]] = {}
        for i, (x, own, y) in enumerate(zip(xs, sent, errors, strict=True)):
            if x.dtype == y.dtype and is_product(own, x):
                thin[i] = own
            elif x.dtype == y.dtype and isinstance(own, Coded) and own.lost is not None:
                coded[i] = own
        self.subtract_products_if(ok, [xs[i] for i in thin], list(thin.values()), [errors[i] for i in thin])
        self.subtract_decoded_if(ok, [xs[i] for i in coded], list(coded.values()), [errors[i] for i in coded])
        return [i for i in range(len(xs)) if i not in thin and i not in coded]

    def subtract_decoded_if(
        self, ok: Tensor, xs: Sequence[Tensor], sent: Sequence[Coded[Tensor]], ys: Sequence[Tensor]
    ) -> None:
        """Each of `ys` becomes, if `ok` holds, `x` less what codes (R, B) and scales (R, 1) stand for and, from row `first` on, less the rows `lost`, float32
        (some, B). It has no more elements than the codes."""
        own = [(x.contiguous(), coded, y) for x, coded, y in zip(xs, sent, ys, strict=True)]
        keys = [(y.dtype, each.codes.shape[-1], are_aligned([x, each.codes, y], [y.numel()])) for x, each, y in own]
        for some in group_by(own, keys):
            x, coded, y = zip(*some, strict=True)
            codes, scales, lost, first = zip(*coded, strict=True)
            _into(list(y), partial(subtract_decoded_if, ok, x, codes, scales, lost, first))

    def quantized(self, x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
        """`Ops.quantize`."""
        codes, scales = self._coded(tuple(x.shape), x)
        quantize(x.contiguous(), largest, codes=codes, scales=scales)
        return codes, scales

    def quantize_mean_of_codes(
        self, codes: Tensor, scales: Tensor, largest: float, *, keeps: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`Ops.quantize_mean`."""
        shape = tuple(codes.shape[1:])
        mean_codes, mean_scales = self._coded(shape, scales)
        lost = self._memory.temporary(shape, mean_scales) if keeps else None
        codes, scales = (x if x[0].is_contiguous() else x.contiguous() for x in (codes, scales))
        quantize_mean(codes, scales, largest, mean_codes=mean_codes, mean_scales=mean_scales, lost=lost)
        return mean_codes, mean_scales, lost

    def _coded(self, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        rows = shape[0]
        codes = self._memory.temporary(shape, like, torch.uint8)
        return codes, self._memory.temporary((rows, 1), like, torch.float32)

    def sum_of_signs(
        self, bits: Tensor, above: Tensor, below: Tensor, of_run: Tensor, run: int, block: int, out: Tensor
    ) -> Tensor:
        """`out` (T,), which becomes what bits (W, T / 8) stand for: a number of `above` (W, N) or `below` (W, N) for each element, that of its run of so many
        elements (`of_run`); added one replica after the other. See `gradwire.torch_backend.ops.signs`."""
        bits = bits if bits.stride(1) == 1 else bits.contiguous()
        sum_of_signs(bits, above.contiguous(), below.contiguous(), of_run, run, block, out=out)
        return out

    def add_at(self, out: Tensor, index: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """`out`, a vector, to which values (W, R, k) are added one replica after the other: at positions `index` (W, R, k), distinct of each replica, of rows that
        begin at `rows` (R, 1)."""
        add_at(index.contiguous(), rows, values.contiguous(), out=out)
        return out

    def decoded_each(
        self, ok: Tensor, codes: Sequence[Tensor], scales: Sequence[Tensor], out: Sequence[Tensor]
    ) -> list[Tensor]:
        """What each (R, B) of codes stands for if `ok` holds, else NaN throughout, in `out`, whose arrays have no more elements
        than the codes."""
        for place, own_codes, own_scales in _joined(out, codes, scales):
            dense = place.contiguous()
            decode_or_nan(ok, own_codes, own_scales, out=dense)
            _returned(dense, place)
        return list(out)


def is_product(sent: Payload[Tensor], x: Tensor) -> TypeGuard[LowRank[Tensor]]:
    """Whether these are factors of a matrix of as many elements as `x`."""
    return isinstance(sent, LowRank) and math.prod(sent.matrix_shape) == x.numel() and sent.p.dtype == sent.q.dtype


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


def _joined(out: Sequence[Tensor], codes: Sequence[Tensor], scales: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The same triples, such as lie side by side in memory in all three as one: places are in DDP's buckets."""
    run: list[int] = []
    for i in sorted(range(len(out)), key=lambda i: out[i].data_ptr()):
        if run and not (
            codes[run[-1]].numel() == out[run[-1]].numel()  # else codes stand for elements that there are not
            and out[run[-1]].dtype == out[i].dtype
            and all(xs[run[-1]].data_ptr() + xs[run[-1]].nbytes == xs[i].data_ptr() for xs in (out, codes, scales))
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
    """Whether these operations run on a device: one of NVIDIA's that Triton knows, with Triton and the C compiler that it starts kernels with. Said once if not."""
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        ok, x = torch.ones((), dtype=torch.bool, device=device), torch.zeros(1, dtype=torch.float32, device=device)
        copy_if(ok, [x], out=[x])
    except Exception as error:
        warnings.warn(
            f"gradwire runs without its kernels in Triton on {device}, with more passes over memory: {error!r}",
            stacklevel=2,
        )
        return False
    return True
