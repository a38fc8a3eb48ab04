"""What is compared: a line for each method."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire import AllReduce, LocalSGD, PowerSGD, Quantize, Sign, TopK, WireDtype, diloco
from gradwire.core.algorithm import Algorithm

#: Steps between two averages of parameters.
PERIOD = 30


@dataclass(frozen=True)
class Subject:
    """A method, the name under which it is shown, and the kind that gives it its colour."""

    name: str
    kind: str
    algorithm: Algorithm | LocalSGD


TILES = (64, 64)

SUBJECTS = (
    Subject("dense", "dense", AllReduce()),
    Subject("bf16", "codes", WireDtype(AllReduce(), "bfloat16")),
    Subject("int8", "codes", WireDtype(AllReduce(), "int8")),
    Subject("4 bits", "codes", Quantize("int4")),
    Subject("PowerSGD 16", "low rank", PowerSGD(16)),
    Subject("PowerSGD 4", "low rank", PowerSGD(4)),
    Subject("PowerSGD 1", "low rank", PowerSGD(1)),
    Subject("PowerSGD 4, half-step", "low rank", PowerSGD(4, half_step=True)),
    Subject("TopK", "sparse", TopK(64, per=TILES)),
    Subject("TopK, 2 bits", "sparse", TopK(64, per=TILES, bits=2)),
    Subject("Sign", "codes", Sign()),
    Subject("local SGD", "local", LocalSGD(PERIOD)),
    Subject("DiLoCo", "local", diloco(PERIOD)),
    Subject("DiLoCo, 4 bits", "local", diloco(PERIOD, compressor=WireDtype(AllReduce(), "e3m0"))),
    Subject("DiLoCo, 2 bits", "local", diloco(PERIOD, lr=0.8, compressor=Quantize("int2", error_feedback=0.9))),
    Subject(
        "SparseLoCo",
        "local",
        diloco(
            PERIOD,
            lr=1.0,
            momentum=0,
            compressor=TopK(64, per=TILES, bits=2, mean="senders", error_feedback=0.95),
        ),
    ),
)

BY_NAME = {subject.name: subject for subject in SUBJECTS}
