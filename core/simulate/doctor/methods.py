"""The algorithms that a doctor tries: for everyone, for a quick look, or as named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.core.algorithm import Algorithm, require_algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.algorithms.quantize import Quantize
from gradwire.core.algorithms.sign import Sign
from gradwire.core.algorithms.top_k import TopK
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.ops import Spec
from gradwire.core.simulate.doctor.report import LeftOut
from gradwire.core.simulate.known_answers import KnownStep, known_specs, known_steps

QUICK: tuple[Algorithm, ...] = (WireDtype(AllReduce(), "int8"), PowerSGD(rank=4), Sign())
WHOLE: tuple[Algorithm, ...] = (
    *QUICK,
    AllReduce(),
    WireDtype(PowerSGD(rank=16), "int8"),
    Quantize("int8"),
    Quantize("int4"),
    TopK(8, per=64),
    PowerSGD(rank=4, half_step=True),
    WireDtype(PowerSGD(rank=4), "bfloat16"),
    Quantize("int2"),
    Quantize("float8_e4m3fn"),
    Quantize("e3m0"),
    Quantize("int4", stochastic=True),
    TopK(8, per=64, bits=2),
    Sign(per="column", magnitudes=2),
    PowerSGD(rank=32),
    PowerSGD(rank=2, warm_start=False),
    WireDtype(AllReduce(), "float8_e4m3fn"),
)
#: Shared seconds of a whole run and of a quick one.
SECONDS = {True: 60.0, False: 360.0}


def chosen(algorithms: Sequence[Any] | None, quick: bool) -> tuple[Algorithm, ...]:
    """Those that are named, with one level in place of two; or the list.

    Raises:
        TypeError: one of them is no algorithm, as a schedule of local SGD.
    """
    if algorithms is None:
        return QUICK if quick else WHOLE
    for algorithm in algorithms:
        require_algorithm(algorithm, "algorithms")
    return tuple(map(without_levels, algorithms))


def known(algorithm: Algorithm, replicas: int) -> tuple[Mapping[str, Spec], Sequence[KnownStep]]:
    """Parameters, and the steps that an algorithm is to take with them. Raises `LeftOut` where
    NumPy cannot take them: the same on all ranks, before any has sent anything."""
    try:
        specs = known_specs(algorithm, "float32")
        return specs, list(known_steps(algorithm, specs, replicas))
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise LeftOut(f"it cannot be tried without your model: {said}") from error
