"""Operations on a CUDA device that read and write what is large once, where torch's take several passes, in Triton.

`gradwire.torch_backend.ops.kernels.TorchOps` overrides with each the composite of `gradwire.core.ops.Ops` whose passes it
spares. None needs the others.

Each is an operator of torch, `torch.ops.gradwire.*`, whose schema says what is read and what is written; so tracing, graph capture and what counts traffic see it as one.
What follows `*` is only written to, but what `add_at` adds to. Triton itself is imported, and a kernel compiled, at the first launch.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.core.kernels.payloads import Coded, LowRank, Payload
from gradwire.torch_backend.ops.adjacent import side_by_side

#: Elements of a program that goes over a vector, and of one that goes over rows.
VECTOR, ROWS_OF = 1024, 2048
#: Rows and columns of a tile of a product.
TILE = 32, 128
#: The first GPUs for which Triton compiles: Ampere.
OLDEST = (8, 0)
#: Of all: each product is rounded before it is added, as by NumPy, torch and JAX. Codes come out bit for bit, and sums
#: that overflow as inf or NaN where theirs do: in one operation -1e76 added to inf is inf, rounded before it is NaN.
EXACT = {"enable_fp_fusion": False}

_LIBRARY: Any = torch.library.Library("gradwire", "DEF")  # type: ignore[no-untyped-call]


def _operator(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes an operator that returns nothing of a function that launches a kernel: on CUDA, and under Triton's interpreter on the CPU."""

    def define(launch: Callable[..., None]) -> Callable[..., None]:
        name = launch.__name__
        _LIBRARY.define(f"{name}({schema}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CUDA", "CPU"):
            _LIBRARY.impl(name, launch, key)
        _LIBRARY.impl(name, lambda *args, **kwargs: None, "Meta")
        operator: Callable[..., None] = getattr(torch.ops.gradwire, name).default
        return operator

    return define


def _launch(name: str, programs: int, device: torch.device, *args: Any, **options: Any) -> None:
    """Run so many programs of a kernel on the device's current stream."""
    if not programs:
        return
    from gradwire.torch_backend.ops import triton_kernels

    kernel = getattr(triton_kernels, name)[programs,]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # which users need not have set
        kernel(*args, **options, **EXACT)


@_operator("Tensor ok, Tensor x, *, Tensor(a!) out")
def copy_if(ok: Tensor, x: Tensor, *, out: Tensor) -> None:
    n = out.numel()
    _launch("copy_if", -(-n // VECTOR), out.device, ok, x, out, n, block=VECTOR)


@_operator("Tensor ok, Tensor x, Tensor p, Tensor q, *, Tensor(a!) out")
def subtract_product_if(ok: Tensor, x: Tensor, p: Tensor, q: Tensor, *, out: Tensor) -> None:
    r, n, m = *p.shape[-2:], q.shape[-1]
    batch, strides = (p.shape[0], (*p.stride(), *q.stride())) if p.ndim == 3 else (1, (0, *p.stride(), 0, *q.stride()))
    rows, columns = TILE
    programs = batch * -(-n // rows) * -(-m // columns)
    tile = {"double": out.dtype == torch.float64, "some": rows, "columns": columns}
    _launch("subtract_product_if", programs, out.device, ok, x, p, q, out, n, m, r, *strides, **tile)


def _blocks(rows: int, width: int) -> tuple[int, dict[str, int]]:
    """How many programs go over so many rows, and what they are told."""
    padded = 1 << (width - 1).bit_length()
    some = max(1, ROWS_OF // padded)
    return -(-rows // some), {"width": width, "padded": padded, "some": some}


@_operator("Tensor x, float largest, *, Tensor(a!) codes, Tensor(b!) scales")
def quantize(x: Tensor, largest: float, *, codes: Tensor, scales: Tensor) -> None:
    rows, width = x.shape
    programs, blocks = _blocks(rows, width)
    _launch("quantize", programs, x.device, x, codes, scales, rows, 1.0 / largest, **blocks)


@_operator(
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
    _launch("quantize_mean", programs, codes.device, *tensors, *numbers, keeps=lost is not None, **blocks)


@_operator("Tensor ok, Tensor x, Tensor codes, Tensor scales, Tensor lost, int first, *, Tensor(a!) out")
def subtract_decoded_if(
    ok: Tensor, x: Tensor, codes: Tensor, scales: Tensor, lost: Tensor, first: int, *, out: Tensor
) -> None:
    n, width = out.numel(), codes.shape[-1]
    programs, begin = -(-n // VECTOR), first * width
    numbers = n, begin, begin + lost.numel()
    tensors = ok, x, codes, scales, lost, out
    _launch("subtract_decoded_if", programs, out.device, *tensors, *numbers, width=width, block=VECTOR)


@_operator("Tensor ok, Tensor codes, Tensor scales, *, Tensor(a!) out")
def decode_or_nan(ok: Tensor, codes: Tensor, scales: Tensor, *, out: Tensor) -> None:
    n, width = out.numel(), codes.shape[-1]
    _launch("decode_or_nan", -(-n // VECTOR), out.device, ok, codes, scales, out, n, width=width, block=VECTOR)


@_operator("Tensor bits, Tensor above, Tensor below, Tensor of_run, int run, int block, *, Tensor(a!) out")
def sum_of_signs(
    bits: Tensor, above: Tensor, below: Tensor, of_run: Tensor, run: int, block: int, *, out: Tensor
) -> None:
    n, (replicas, numbers) = out.numel(), above.shape
    whole = n // block * block
    sizes = n, whole, max(1, (n - whole) // 8), replicas, bits.stride(0), numbers
    cut = {"run": run, "bits_of": block, "block": VECTOR}
    _launch("sum_of_signs", -(-n // VECTOR), out.device, bits, above, below, of_run, out, *sizes, **cut)


@_operator("Tensor index, Tensor rows, Tensor values, *, Tensor(a!) out")
def add_at(index: Tensor, rows: Tensor, values: Tensor, *, out: Tensor) -> None:
    replicas, count, k = index.shape
    padded = 1 << (k - 1).bit_length()
    _launch("add_at", count, out.device, index, rows, values, out, replicas, count, k, padded=padded)


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

    def copy_if(self, ok: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """`y`, which becomes `x`, of its shape, if `ok` holds."""
        if y.is_contiguous() and x.dtype == y.dtype:
            copy_if(ok, x.contiguous(), out=y)
            return y
        return torch.where(ok, x, y, out=y)

    def subtract_product_if(self, ok: Tensor, x: Tensor, p: Tensor, q: Tensor, y: Tensor) -> Tensor:
        """`y`, which becomes `x - p.mT @ q` if `ok` holds. `x` may have any shape of so many elements."""
        out = y.contiguous()
        subtract_product_if(ok, x.contiguous(), p, q, out=out)
        return _returned(out, y)

    def error_after(self, ok: Tensor, x: Tensor, sent: Payload[Tensor], error: Tensor) -> bool:
        """`error` becomes `x - sent` if `ok` holds; False, and nothing is done, where no kernel does that."""
        if isinstance(sent, LowRank) and math.prod(sent.matrix_shape) == x.numel():
            self.subtract_product_if(ok, x, *sent, error)
            return True
        if isinstance(sent, Coded) and sent.lost is not None:
            self.subtract_decoded_if(ok, x, sent.codes, sent.scales, sent.lost, sent.first, error)
            return True
        return False

    def quantized(self, x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
        """`Ops.quantize`."""
        codes, scales = self._coded(tuple(x.shape), x)
        quantize(x.contiguous(), largest, codes=codes, scales=scales)
        return codes, scales

    def mean_quantized(
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

    def subtract_decoded_if(
        self, ok: Tensor, x: Tensor, codes: Tensor, scales: Tensor, lost: Tensor, first: int, y: Tensor
    ) -> Tensor:
        """`y`, which becomes, if `ok` holds, `x` less what codes (R, B) and scales (R, 1) stand for and, from row `first` on,
        less the rows `lost`, float32 (some, B). `y` has no more elements than the codes."""
        out = y.contiguous()
        subtract_decoded_if(ok, x.contiguous(), codes, scales, lost, first, out=out)
        return _returned(out, y)

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
        copy_if(ok, x, out=x)
    except Exception as error:
        warnings.warn(
            f"gradwire runs without its kernels in Triton on {device}, with more passes over memory: {error!r}",
            stacklevel=2,
        )
        return False
    return True
