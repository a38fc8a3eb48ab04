"""Loops as they are compiled, where numba is installed: once for each machine, kept on disk where
there is a place for that."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from gradwire.core.algorithm import Algorithm, nested
from gradwire.core.algorithms.sign import Sign
from gradwire.core.algorithms.top_k import TopK
from gradwire.core.codecs import CODECS, Codec
from gradwire.core.codecs.e3m0 import E3M0
from gradwire.core.codecs.float8 import Float8
from gradwire.core.codecs.integers import Integers
from gradwire.core.codecs.options import Quantizer
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec

logger = logging.getLogger("gradwire")

#: Dtypes that loops compute in.
DTYPES = {torch.float32: "float32", torch.float64: "float64"}
#: Loops, and what each takes before the range of its rows: matrices of its dtype "x", of codes "c",
#: of numbers "n", and integers "i".
ARGUMENTS = {
    "add_and_project": "xxxx",
    "settle": "xxxxxx",
    "encode": "xcxi",
    "encode_sum": "xxcxi",
    "decode_mean": "cxxi",
    "encode_mean": "cxcxxi",
    "settle_codes": "xxcxxicxcxi",
    "sum_of_signs": "cxxnxi",
    "largest": "xnx",
}
#: Loops of PowerSGD, of all that sends codes, of signs and of `TopK`: all but the first compute in
#: float32 alone, what torch's operations come to, so that no rank need know whether another has
#: them.
THIN, CODES = (
    ("add_and_project", "settle"),
    ("encode", "encode_sum", "decode_mean", "encode_mean", "settle_codes"),
)
SIGNS, LARGEST = ("sum_of_signs",), ("largest",)
#: How loops know codecs, see `gradwire.torch_backend.cpu.loops`.
KINDS = {(Integers, 8): 0, (Integers, 4): 1, (Float8, 8): 2, (E3M0, 4): 3}
#: Numbers of a model with fewer than so many parameters are in a processor's cache, and what is
#: compiled pays for nothing.
LEAST = 1 << 20
#: Elements of a tensor from which a pass over memory costs more than a call.
LARGE = 1 << 14

_compiling = threading.Lock()


def _begin_anew() -> None:
    """A process that was forked while another thread compiled would wait for it for ever."""
    global _compiling
    _compiling = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


@functools.cache
def _numba() -> Any:
    """The module; None where it is not installed, cannot be imported, or is told to compile
    nothing."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        numba: Any = importlib.import_module("numba")
    except Exception as error:  # made for another NumPy, say
        logger.warning(
            "gradwire runs without its compiled loops, with more passes over memory: %r", error
        )
        return None
    return None if numba.config.DISABLE_JIT else numba


@functools.cache
def compiled(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """A loop of `gradwire.torch_backend.cpu.loops` for arrays of a dtype. There must be numba."""
    from gradwire.torch_backend.cpu import loops

    numba = _numba()
    kinds = {
        "x": getattr(numba, DTYPES[dtype])[:, ::1],
        "c": numba.uint8[:, ::1],
        "n": numba.int32[:, ::1],
        "i": numba.intp,
    }
    signature = numba.void(*(kinds[each] for each in ARGUMENTS[name] + "ii"))
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    loop = getattr(loops, name)
    with _compiling:
        try:
            made = numba.njit(signature, cache=True, **options)(loop)
        # neither beside the source nor in the user's folder may anything be written, or what is
        # there is of no use
        except Exception:
            made = numba.njit(signature, **options)(loop)
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Loops:
    """What is compiled: names of loops, each with a dtype. `card` says it to other ranks; "" if
    there is nothing. Tensors of fewer elements than `large` get no loop of their own."""

    made: frozenset[tuple[str, torch.dtype]] = frozenset()
    card: str = ""
    large: int = LARGE

    def __bool__(self) -> bool:
        return bool(self.card)

    def have(self, name: str, dtype: torch.dtype) -> bool:
        """Whether there is a loop for a dtype."""
        return (name, dtype) in self.made


def prepare(wanted: Iterable[tuple[str, torch.dtype]], large: int | None = None) -> Loops:
    """Compile loops, each for a dtype. It takes seconds where nothing is kept on disk, in which
    nobody should wait for a message."""
    made = sorted(set(wanted), key=str)
    numba = _numba() if made else None
    if numba is None:
        return Loops()
    try:
        for name, dtype in made:
            compiled(name, dtype)
    except Exception as error:  # of numba itself, or of what it compiles with
        logger.warning(
            "gradwire runs without its compiled loops, with more passes over memory: %r", error
        )
        return Loops()
    source = Path(__file__).with_name("loops.py").read_bytes()
    names = ", ".join(f"{name} of {DTYPES[dtype]}" for name, dtype in made)
    card = f"numba {numba.__version__}, loops {hashlib.sha256(source).hexdigest()[:8]}: {names}"
    return Loops(frozenset(made), card, LARGE if large is None else large)


def loops_for(
    algorithm: Algorithm | LocalSGD | None,
    specs: Mapping[str, Spec],
    device: torch.device,
    names: Collection[str] = THIN + CODES + SIGNS + LARGEST,
    *,
    least: int | None = None,
) -> Loops:
    """What of these loops an algorithm can use on a device: nothing but on a processor, for a model
    of so many numbers, and there for tensors of any size. None: of `LEAST`."""
    if device.type != "cpu" or sum(spec.size for spec in specs.values()) < (
        LEAST if least is None else least
    ):
        return Loops()
    dtypes = {getattr(torch, spec.dtype) for spec in specs.values()}
    wanted: list[tuple[str, torch.dtype]] = []
    for each in nested(algorithm):
        if (hints := getattr(each, "hints", None)) is not None and hints.linear:
            wanted += product(THIN, dtypes & DTYPES.keys())
        coded = isinstance(each, Quantizer) and kind_of(CODECS[each.dtype]) is not None
        used = (coded, CODES), (isinstance(each, Sign), SIGNS), (isinstance(each, TopK), LARGEST)
        for applies, loops in used:
            if applies:
                wanted += product(loops, dtypes & {torch.float32})
    kept = [(name, dtype) for name, dtype in wanted if name in names]
    return prepare(kept, None if least is None else 1)


def kind_of(codec: Codec) -> int | None:
    """How loops know a codec; None: they do not."""
    return KINDS.get((type(codec), getattr(codec, "bits", 0)))
