"""Loops as they are compiled, where numba is installed: once for each machine, kept on disk where there is a place for that."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradwire.core.algorithm import Algorithm, innermost
from gradwire.core.ops import Spec

logger = logging.getLogger("gradwire")

#: Dtypes that loops compute in.
DTYPES = {torch.float32: "float32", torch.float64: "float64"}
#: Loops, and how many matrices each takes.
MATRICES = {"add_and_project": 4, "settle": 6}
#: Numbers of a model with fewer than so many parameters are in a processor's cache, and what is compiled pays for nothing.
LEAST = 1 << 20

_compiling = threading.Lock()


@functools.cache
def _numba() -> Any:
    """The module; None where it is not installed, cannot be imported, or is told to compile nothing."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        numba: Any = importlib.import_module("numba")
    except Exception as error:  # made for another NumPy, say
        logger.warning("gradwire runs without its compiled loops, with more passes over memory: %r", error)
        return None
    return None if numba.config.DISABLE_JIT else numba


@functools.cache
def compiled(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """A loop of `gradwire.torch_backend.cpu.loops` for arrays of a dtype. There must be numba."""
    from gradwire.torch_backend.cpu import loops

    numba = _numba()
    number = getattr(numba, DTYPES[dtype])
    signature = numba.void(*(number[:, ::1] for _ in range(MATRICES[name])), numba.intp, numba.intp)
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    loop = getattr(loops, name)
    with _compiling:
        try:
            made = numba.njit(signature, cache=True, **options)(loop)
        except (
            Exception
        ):  # neither beside the source nor in the user's folder may anything be written, or what is there is of no use
            made = numba.njit(signature, **options)(loop)
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Loops:
    """What is compiled: loops of these names, for these dtypes. `card` says it to other ranks; "" if there is nothing."""

    names: frozenset[str] = frozenset()
    dtypes: frozenset[torch.dtype] = frozenset()
    card: str = ""

    def __bool__(self) -> bool:
        return bool(self.card)

    def have(self, name: str, dtype: torch.dtype) -> bool:
        """Whether there is a loop for a dtype."""
        return dtype in self.dtypes and name in self.names


def prepare(names: Iterable[str], dtypes: Iterable[torch.dtype]) -> Loops:
    """Compile loops, for those of these dtypes that they know. It takes seconds where nothing is kept on disk, in which nobody should wait for a message."""
    wanted, known = sorted(names), sorted((x for x in set(dtypes) if x in DTYPES), key=str)
    numba = _numba() if wanted and known else None
    if numba is None:
        return Loops()
    try:
        for name in wanted:
            for dtype in known:
                compiled(name, dtype)
    except Exception as error:  # of numba itself, or of what it compiles with
        logger.warning("gradwire runs without its compiled loops, with more passes over memory: %r", error)
        return Loops()
    source = Path(__file__).with_name("loops.py").read_bytes()
    kinds = ", ".join(DTYPES[dtype] for dtype in known)
    card = f"numba {numba.__version__}, loops {hashlib.sha256(source).hexdigest()[:8]}: {', '.join(wanted)} of {kinds}"
    return Loops(frozenset(wanted), frozenset(known), card)


def loops_for(algorithm: Algorithm, specs: Mapping[str, Spec], device: torch.device) -> Loops:
    """What an algorithm can use on a device: nothing but on a processor, for a model that fills more than its cache."""
    if device.type != "cpu" or sum(spec.size for spec in specs.values()) < LEAST:
        return Loops()
    hints = getattr(innermost(algorithm), "hints", None)
    names = ("add_and_project", "settle") if hints is not None and hints.linear else ()
    return prepare(names, [getattr(torch, spec.dtype) for spec in specs.values()])
