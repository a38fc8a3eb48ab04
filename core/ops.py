"""What an algorithm may do to arrays: the `Array` and `Ops` protocols.

An algorithm never imports a framework. It receives `ops` (the kernels of NumPy, torch or JAX) and arrays of that
framework, and uses the operators below and nothing else.

**`out=` is a donation.** `z = ops.add(x, y, out=x)` allows the kernel to write the result into `x`. torch and NumPy do,
JAX cannot. After the call only the *returned* array may be used; the donated one is gone. Written this way a program
means the same in both worlds, and `gradwire.core.simulate.PoisonOps` fails a program that peeks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Self, TypeVar

from gradwire.core.text.options import AtLeast0, Names, check_options


class Array(Protocol):
    """What NumPy arrays, torch tensors, JAX arrays and JAX tracers have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def mT(self) -> Self: ...  # noqa: N802  (the array API's name)

    def reshape(self, shape: tuple[int, ...], /) -> Self: ...
    def __getitem__(self, index: Any, /) -> Self: ...
    def __add__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __truediv__(self, other: Any, /) -> Self: ...
    def __xor__(self, other: Any, /) -> Self: ...
    def __and__(self, other: Any, /) -> Self: ...
    def __rshift__(self, other: Any, /) -> Self: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __rtruediv__(self, other: Any, /) -> Self: ...


A = TypeVar("A", bound=Array)


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor, with no data: `Spec((512, 128), "float32")`.

    Examples:
        >>> from gradwire import Spec
        >>> spec = Spec((512, 128), "float16")
        >>> spec.size, spec.nbytes
        (65536, 131072)
    """

    shape: tuple[AtLeast0, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        # Steps make some of them, for each parameter: what is right is seen at a glance.
        right = isinstance(self.shape, tuple) and all(type(n) is int and n >= 0 for n in self.shape)
        if not right or type(self.dtype) is not str:
            check_options(self)

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * WIRE_ITEMSIZE[self.dtype]


def shaped(x: A, shape: tuple[int, ...]) -> A:
    """`x.reshape(shape)`; `x` itself if it has that shape, which is quicker to see than it is to make a view."""
    return x if tuple(x.shape) == shape else x.reshape(shape)


#: Bytes per element of the dtypes that gradients may have, and averages.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
#: And of those that may be sent besides. Floats of 8 bits are gathered, and not summed.
WIRE_ITEMSIZE = {**ITEMSIZE, "int32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
#: The two kinds of those.
FLOATS = frozenset(dtype for dtype in WIRE_ITEMSIZE if "float" in dtype)
INTEGERS = frozenset(WIRE_ITEMSIZE) - FLOATS
#: Their largest numbers.
LARGEST = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
}
#: Sums and products of a float16 error that is shorter do not overflow.
LONGEST_FLOAT16 = LARGEST["float16"] / 4
#: What is larger is nearer to what would come after the largest number of float8_e4m3fn, 448, than to that.
LARGEST_E4M3 = 464


def name_of_dtype(dtype: Any) -> Any:
    """The name of a framework's dtype: "bfloat16" for `torch.bfloat16`, `jnp.bfloat16` and `np.dtype("bfloat16")`. Whatever is no dtype, names
    and None included, comes back as it is, for its user to refuse."""
    if dtype is None or isinstance(dtype, (str, int, float)):
        return dtype
    if isinstance(dtype, type):  # `np.float16`, and those of ml_dtypes and JAX
        return dtype.__name__
    if isinstance(name := getattr(dtype, "name", None), str):  # `np.dtype`
        return name
    module, _, name = str(dtype).rpartition(".")
    return name if module == "torch" else dtype


#: An option: a dtype of gradients, by name or as a framework has it; what is kept is the name.
FloatDtype = Annotated[Any, Names(tuple(ITEMSIZE), name_of_dtype)]


def wide_dtype(*dtypes: str) -> str:
    """In which arrays of these dtypes are summed: "float64" if one of them is, else "float32"."""
    return "float64" if "float64" in dtypes else "float32"


def largest_error(ops: Ops[A], error: A) -> float:
    """The largest element that a compression error keeps in a step that is not finite.

    Such a step leaves memory as it is, and if the error itself is what overflows, in a product or in the sum over the replicas, no later step would be
    finite either. Below this number neither squares nor 2-norms of the whole error overflow; an error that can be sent is seldom above it.
    In float16 it often is, in units of a loss scale: kernels leave an error alone whose 2-norm is less than `LONGEST_FLOAT16`.
    """
    largest = LARGEST[ops.dtype_of(error)]
    return min(math.sqrt(largest), largest / 4 / math.sqrt(max(math.prod(error.shape), 1)))


class Bundled(Protocol[A]):
    """Tensors of a step, some of them in stacks: what `Ops.bundled` returns.

    Attributes:
        names: of each stack, the name that stands for it → the names of its members, in order.
        gradients: name → gradient; of a stack, all of them with a leading axis, or what behaves as that.
        tensors: name → memory, in the same way.
    """

    @property
    def names(self) -> Mapping[str, tuple[str, ...]]: ...

    @property
    def gradients(self) -> dict[str, A]: ...

    @property
    def tensors(self) -> dict[str, dict[str, A]]: ...

    def apart(
        self, averages: Mapping[str, Any], tensors: Mapping[str, Mapping[str, A]]
    ) -> tuple[dict[str, Any], dict[str, dict[str, A]]]:
        """Averages and memory after the step, of every single tensor."""


class Fused(Protocol[A]):
    """Kernels that do in one pass over memory what others do in several, and the same to rounding: those with codes bit for bit. `ok` is a boolean scalar; where
    it does not hold, what is called `y` is neither read nor written.

    Attributes:
        widest: rows of codes have at most so many elements.
    """

    widest: int

    def subtract_product_if(self, ok: A, x: A, p: A, q: A, y: A) -> A:
        """`y`, which becomes `x - p.mT @ q` if `ok` holds: see `Ops.subtract_product`. `x` may have any shape of so many elements; `y` has its shape and dtype,
        and is donated."""

    def quantized(self, x: A, largest: float) -> tuple[A, A]:
        """Codes uint8 (R, B) and scales float32 (R, 1) of floats (R, B), cast to float32: `nearest_bytes` of `x` times the reciprocal of its `scales`."""

    def mean_quantized(self, codes: A, scales: A, largest: float, *, keeps: bool) -> tuple[A, A, A | None]:
        """Likewise of the mean of what codes uint8 (W, R, B) and scales (W, R, 1) stand for, in order of replicas; and, if it `keeps` that, float32 (R, B),
        what rounding takes from it, times -W."""

    def subtract_decoded_if(self, ok: A, x: A, codes: A, scales: A, lost: A, first: int, y: A) -> A:
        """`y`, which becomes, if `ok` holds, `x` less what codes uint8 (R, B) and scales (R, 1) stand for and, from row `first` on, less the rows `lost`, float32
        (some, B). `y` has the shape and dtype of `x`, no more elements than the codes, and is donated."""

    def decoded_each(self, ok: A, codes: Sequence[A], scales: Sequence[A], out: Sequence[A]) -> list[A]:
        """What each (R, B) of codes stands for if `ok` holds, else NaN throughout, in `out`, whose arrays have no more elements than the codes."""


class Ops(Protocol[A]):
    """The kernels of one framework. dtypes are named by strings: `"float32"`, `"bfloat16"`, `"int32"`, `"bool"`."""

    @property
    def joined(self) -> int:
        """Up to how many elements arrays that are computed with alike are better joined, since a compiler takes its time for each; 0: they are not."""

    @property
    def fused(self) -> Fused[A] | None:
        """Kernels for several operations at a time; None where there are none, or compilers fuse by themselves."""

    def dtype_of(self, x: A) -> str:
        """The name of `x`'s dtype."""

    def kind_of(self, x: A) -> Hashable:
        """Arrays are only joined with others of their kind: of one dtype, and in JAX varying along the same mapped axes."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> A:
        """A new array of zeros."""

    def iota(self, n: int) -> A:
        """0, 1, …, n-1 as int32."""

    def cast(self, x: A, dtype: str, *, out: A | None = None) -> A:
        """`x` in another dtype; `x` itself if it has that dtype already.

        Floats become integers towards zero: NaN is 0, and what lies beyond the dtype is the nearest that it has. Integers wrap round. Floats beyond
        a dtype become inf, or NaN in "float8_e4m3fn", which has no inf. All that is done to floats of 8 bits is to cast and to send them.
        """

    def asarray(self, numbers: Any, dtype: str) -> A:
        """A new array with these numbers: a NumPy array, a number, or nested sequences of them. A table, say, in `constant`."""

    def add(self, x: A, y: A | float, *, out: A | None = None) -> A:
        """`x + y`."""

    def multiply(self, x: A, y: A | float, *, out: A | None = None) -> A:
        """`x * y`, element by element."""

    def divide(self, x: A, y: A, *, out: A | None = None) -> A:
        """`x / y`."""

    def matmul(self, x: A, y: A, *, out: A | None = None) -> A:
        """`x @ y`, at the full precision of the dtype (no TF32, no bfloat16 passes). Of a sum that `add_each` left unadded, and where the result is as large as
        a gradient, JAX takes three products of bfloat16 on a TPU."""

    def subtract_product(self, x: A, p: A, q: A, *, out: A | None = None) -> A:
        """`x - p.mT @ q` for `x` (n, m), `p` (r, n), `q` (r, m); or for batches of them."""

    def where(self, ok: A, x: A, y: A | float, *, out: A | None = None) -> A:
        """`x` where the scalar (or broadcastable) boolean `ok` holds, else `y`."""

    def add_each(self, xs: Sequence[A], ys: Sequence[A], *, multiplied: bool = False) -> list[A]:
        """`x + y` for each pair of equal shapes and dtypes. `xs` are donated.

        `multiplied` promises that the sums are only seen in other shapes (`reshape`, `mT`, `pad`), multiplied from the left by thin factors
        (`matmul`), and subtracted from (`subtract_product`, inside `where_lazy` with `y`). A kernel may then leave them unadded.
        """

    def where_each(self, ok: A, xs: Sequence[A], ys: Sequence[A], *, limits: Sequence[float] = ()) -> list[A]:
        """`x` if the boolean scalar `ok` holds, else `y`, for each pair of equal shapes and dtypes. `ys` are donated. `limits`: as `limit` of
        `where_lazy`, one for each pair."""

    def subtract_each(self, xs: Sequence[A], ys: Sequence[A]) -> list[A] | None:
        """`x - y` for each pair of equal shapes and dtypes, of which `xs` are donated. None, and nothing is done, where one by one in `where_lazy` is better:
        when that computes what it needs, where it needs it."""

    def nan_unless(self, ok: A, xs: Sequence[A], *, out: Sequence[A] | None = None) -> list[A]:
        """`x` if the boolean scalar `ok` holds, else NaN throughout, for each array. `out`: of the same shapes and dtypes."""

    def where_lazy(self, ok: A, x: Callable[[A | None], A], y: A, *, limit: float = math.inf) -> A:
        """`x(out)` if the boolean scalar `ok` holds, else `y`, which is donated, with its elements brought into [-limit, limit].

        For a large `x`: where the truth is known on the host at no cost, `x` is computed straight into `y`'s memory (`out`
        is `y`), or not at all; elsewhere it is computed anew (`out` is None) and selected. A kernel for which the limit would be another pass over
        memory in every step leaves it out.
        """

    def sum_again(self, ok: A, sums: Sequence[A], xs: Sequence[A], ys: Sequence[A]) -> list[A]:
        """`sums`, which `add_each` has made of `xs` and `ys`, for what counts only if `ok` holds: computed once more where they would lie in memory all
        the time."""

    def truth(self, ok: A) -> bool | None:
        """A boolean scalar, if the host knows it at no cost; None while it is traced, or where it lies on an accelerator."""

    def all_finite(self, *arrays: A) -> A:
        """Boolean scalar: no element of these is inf or NaN."""

    def orthonormalize(self, x: A, epsilon: float) -> A:
        """Orthonormal rows for a batch (k, r, n), which is donated: `gradwire.core.kernels.gram_schmidt.gram_schmidt`, or to rounding the same."""

    def orthonormalize_each(self, arrays: Sequence[A], fresh: Sequence[A], epsilon: float) -> list[A]:
        """Orthonormal rows for each matrix (r, n) or stack of them (b, r, n), of any shapes: `gradwire.core.kernels.gram_schmidt.each_shape`, or to rounding the same.

        `fresh` holds, for each matrix, the rows that replace its negligible ones (`gradwire.core.kernels.gram_schmidt.refresh`), or is empty.
        """

    def sqrt(self, x: A) -> A:
        """Square root of each element."""

    def abs(self, x: A) -> A:
        """Magnitude of each element."""

    def sign(self, x: A) -> A:
        """-1, 0 or 1 for each element, in its dtype; NaN for NaN."""

    def round(self, x: A, *, out: A | None = None) -> A:
        """The nearest integer to each element of an array of floats, in its dtype; halves to the even one."""

    def top_k(self, x: A, k: int) -> A:
        """Positions, as int32, of the `k` largest elements of each row, the largest first: (…, n) → (…, k). Of equal elements the first counts as
        larger; NaN is as large as inf."""

    def take(self, x: A, index: A) -> A:
        """Elements of each row at positions of its own: (…, n) and int32 (…, k) → (…, k). Positions lie in 0, …, n-1."""

    def take_each(self, xs: Sequence[A], indices: Sequence[A]) -> A:
        """What `take` takes of several matrices, one below the other."""

    def computed_once(self, arrays: Sequence[A]) -> list[A]:
        """These arrays, which a compiler had better compute once than where they are used."""

    def scatter_add(self, x: A, index: A, values: A) -> A:
        """`x` (…, n), donated, with `values` (…, k) of its dtype added at the positions `index` (…, k) of each row.

        A position may occur several times. On a GPU JAX then adds in any order, so replicas may come to different last bits: what has to be
        equal on all of them takes a call for each replica's values, whose positions are distinct.
        """

    def scatter_sum(
        self,
        n: int,
        of: Callable[..., tuple[A, A]],
        *every: A,
        tiles: tuple[int, int] | None = None,
        after: A | None = None,
    ) -> A:
        """Rows (…, n): the sum of what all replicas have sent of them. `of(*(x[i] for x in every))` are positions (…, k), distinct in each row, and values
        (…, k) of replica i, for arrays (W, …). They are added one replica after the other, or in one product that is the same
        on all replicas, so that no order is left to chance.

        With `tiles`, (a, c), rows are tiles of a matrix, of a rows, column by column, c of them side by side: that matrix is the result.
        `after`: what a kernel that makes zeros first may wait for, so that these arrays need not lie in memory at a time."""

    def pack_bits(self, x: A, *, of: A | None = None) -> A:
        """Eight booleans in each byte: n of any shape → uint8 (⌈n / 8⌉,). To pack signs: `pack_bits(x > 0)`.

        Of 8k rows along the last axis, row i·k + j is in bit i, counted from the lowest, of the bytes of row j; a vector has rows of one element. The
        elements of up to seven rows that are left follow likewise: element i·l + j of 8l is bit i of byte j. Bits that stand for nothing are 0. On a
        TPU those bytes of whole eights are in the order in which they lie there.
        `of`: what is above 0 where `x` holds, and only there; a kernel may look at that instead.
        """

    def unpack_bits(self, x: A, shape: tuple[int, ...]) -> A:
        """The booleans of this shape, n elements, that `pack_bits` packed, of the same kernel: uint8 (⌈n / 8⌉,) → `shape`."""

    def pack_integers(self, x: A, bits: int) -> A:
        """Integers below 2**bits, at most 24 bits, int32 of any shape, as bytes: the lowest bits of all, then the next, as `pack_bits` packs such rows. Only
        the last byte may have bits to spare."""

    def unpack_integers(self, data: A, bits: int, shape: tuple[int, ...]) -> A:
        """The integers of this shape, int32, that `pack_integers` packed."""

    def view_as(self, x: A, dtype: str) -> A:
        """The same bits as elements of another dtype: (…, n) → (…, n · size of the old / size of the new), the lowest byte first."""

    def to_bytes(self, x: A) -> A:
        """float32 (n, k) → uint8 (n, 4k), in an order that `from_bytes` knows: for what is sent."""

    def from_bytes(self, x: A, dtype: str) -> A:
        """What `to_bytes` made bytes of."""

    def to_blocks(self, x: A, rows: int, width: int) -> A:
        """An array in rows (rows, width), filled up with zeros. Each row has elements that lie side by side; the order of rows is the kernel's own."""

    def from_blocks(self, x: A, shape: tuple[int, ...]) -> A:
        """The array of this shape of which `to_blocks` made the rows."""

    def read_again(self, codes: A, sent: A, cut: Callable[[A], A]) -> A:
        """`codes`, which are `cut(sent)` as well: a kernel may read them again there, so that they need no other place."""

    def laid_out(self, codes: A, scales: A, shape: tuple[int, ...]) -> tuple[A, A]:
        """Codes (R, m) and scales (R, 1) of the rows of an array of this shape, which an accelerator may store as it likes to decode them."""

    def add_part(self, x: A, part: A, n: int, i: Any, shape: tuple[int, ...]) -> A:
        """Rows (n·k, B) with a `part` (k, B) added to the i-th of n equal parts of them. `i` may be traced; `shape` is that of the array whose rows
        they are, or ()."""

    def by_rows(self, f: Callable[..., A], *arrays: A, out: A | None = None) -> A:
        """`f(*arrays)`, for a function that makes of the n rows of each of its arguments, (…, n, B), a matrix of n rows, each row by itself; or,
        without `out`, a tuple of such matrices.

        A kernel may call it on a few rows at a time, whose intermediate results stay in a processor's cache; what kernels make in there is gone
        when it returns. `out` takes the result if it has its dtype and its number of elements. It may be one of the arrays. `f` is called with
        `out=`, where the kernel has a place for those rows, and may ignore it.
        """

    def max_abs(self, x: A) -> A:
        """Largest magnitude along the last axis, which is kept with length 1. Zero on an empty axis."""

    def scales(self, x: A, largest: float, *, signed: bool = False) -> tuple[A, A]:
        """`gradwire.core.kernels.rounding.scales`, bit for bit."""

    def nearest_bytes(self, x: A, *, out: A | None = None) -> A:
        """`gradwire.core.kernels.rounding.nearest_bytes`, bit for bit, of `x`, which is donated. Of what is no number between -128 and 127: any byte."""

    def mean_abs(self, x: A) -> A:
        """Mean magnitude along the last axis, which is not empty and is kept with length 1: in float32, or float64 if `x` is."""

    def norm(self, x: A) -> A:
        """2-norm along the last axis, which is kept with length 1."""

    def norm_of_all(self, xs: Sequence[A]) -> A:
        """2-norm of all these arrays together, as if they were one vector: a scalar of the widest of their dtypes, float32 at least."""

    def scale_each(self, xs: Sequence[A], factor: A) -> list[A]:
        """`x * factor` for each array, in its own dtype, computed in that of the scalar `factor` at least. `xs` are donated."""

    def sum_of_each(self, f: Callable[..., A], *arrays: A) -> A:
        """`f(*(x[0] for x in arrays)) + f(*(x[1] for x in arrays)) + …`, for arrays (W, n, B) and an `f` that makes rows of rows, whatever
        lies before them. An accelerator may add in another order: what has to be equal on all replicas is formed by one of them."""

    def joining(self, arrays: Sequence[A]) -> list[int] | None:
        """In which order arrays are better joined (`rows`) than computed with one by one. None: they are not. Replicas may differ in it."""

    def loop(self, n: int, body: Callable[[Any, A], A], start: A, *, fused: bool = False) -> A:
        """`x = body(i, x)` for i in 0, …, n-1. `i` may be traced.

        `fused`: `x` is large, and `body` goes over it element by element. A kernel may compile several turns into one.
        """

    def rows_before(self, x: A, i: Any) -> A:
        """Rows 0, …, i-1 of each matrix of a batch (k, r, n). If `i` is traced: all rows, of which those from `i` on must be zero."""

    def row(self, x: A, i: Any) -> A:
        """Row `i` of each matrix of a batch: (k, r, n) → (k, 1, n). `i` may be traced."""

    def set_row(self, x: A, i: Any, row: A) -> A:
        """`x` with row `i` of each matrix replaced; `x` is donated."""

    def stack(self, arrays: Sequence[A]) -> A:
        """Arrays of one shape, along a new first axis."""

    def pad(self, x: A, n: int) -> A:
        """The vector `x`, followed by zeros up to length `n`."""

    def rows(self, arrays: Sequence[A], n: int, *, out: A | None = None, donated: bool = False) -> A:
        """Arrays of one dtype as one matrix (n, k): each flattened, padded with zeros to a multiple of `n` and cut into `n` rows, which
        lie side by side. `n=1` joins them. Of a single array the matrix may be a view; of several, if they are `donated`, the memory in which they lie
        side by side already."""

    def from_rows(self, matrix: A, shapes: Sequence[tuple[int, ...]], *, out: Sequence[A] | None = None) -> list[A]:
        """The arrays of these shapes of which `rows` made the matrix."""

    def row_of(self, x: A, n: int, i: Any) -> A:
        """Row `i` of `rows([x], n)`, shape (k,). `i` may be traced."""

    def constant(self, key: Hashable, make: Callable[[], A]) -> A:
        """`make()`, which depends on `key` alone: computed once where arrays outlive the step, in the program in JAX."""

    def bundled(
        self, gradients: dict[str, A], tensors: Mapping[str, Mapping[str, A]], alike: Callable[[str], Hashable | None]
    ) -> Bundled[A] | None:
        """Tensors that are better computed with as stacks, where `alike` gives them the same, joined. None: there are none.

        For programs that do to gradients and errors what `add_each` calls multiplied.
        """

    def unbundled(self) -> Ops[A]:
        """The same, but `bundled` joins nothing: for what is sent in blocks, which begin anew with each tensor."""
