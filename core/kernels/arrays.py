"""What arrays of all frameworks have in common: operators, shapes, dtypes by name, and what may be
shared.

| share | have the same | key |
|---|---|---|
| a message | dtype | `message_key` |
| a call of a kernel, as one batch | shape and dtype | `call_key` |
| an array | kind: the dtype, and in JAX the mapped axes along which they vary | `array_key` |

Whoever groups arrays asks for one of these keys, and adds what else has to be equal for his
purpose: the length of rows, say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from operator import attrgetter
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
T = TypeVar("T")


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


def reshape_if_needed(x: A, shape: tuple[int, ...]) -> A:
    """`x.reshape(shape)`; `x` itself if it has that shape, which is quicker to see than it is to
    make a view."""
    return x if tuple(x.shape) == shape else x.reshape(shape)


def group_by(items: Iterable[T], keys: Iterable[Hashable]) -> list[list[T]]:
    """The items of each key, in the order in which keys come first. There is one key for each
    item."""
    groups: dict[Hashable, list[T]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return list(groups.values())


#: The same for arrays, or specs, that may travel in one message. Not a function of Python: one asks
#: it of each array of a step.
message_key: Callable[[Any], Hashable] = attrgetter("dtype")
#: The same for arrays that a kernel may compute with as one batch.
call_key: Callable[[Any], Hashable] = attrgetter("shape", "dtype")


def array_key(ops: Any, x: Any) -> Hashable:
    """The same for arrays that may be joined in one array: `Ops.kind_of`."""
    return ops.kind_of(x)  # type: ignore[no-any-return]


#: Bytes per element of the dtypes that gradients may have, and averages.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
#: And of those that may be sent besides. Floats of 8 bits are gathered, and not summed.
WIRE_ITEMSIZE = {
    **ITEMSIZE,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
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
#: What is larger is nearer to what would come after the largest number of float8_e4m3fn, 448, than
#: to that.
LARGEST_E4M3 = 464


def name_of_dtype(dtype: Any) -> Any:
    """The name of a framework's dtype: "bfloat16" for `torch.bfloat16`, `jnp.bfloat16` and
    `np.dtype("bfloat16")`. Whatever is no dtype, names and None included, comes back as it is, for
    its user to refuse."""
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
    """The dtype in which arrays of these dtypes are summed: "float64" if one of them is, else
    "float32"."""
    return "float64" if "float64" in dtypes else "float32"
