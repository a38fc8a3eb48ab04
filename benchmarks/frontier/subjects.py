"""What is compared: a line for each method."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradwire import (
    AllReduce,
    LocalSGD,
    OuterSGD,
    PowerSGD,
    Quantize,
    Sign,
    TopK,
    WireDtype,
    diloco,
)
from gradwire.core.algorithm import Algorithm

#: Steps between two averages of parameters.
PERIOD = 30
#: Of the outer optimizer, tried for each method that has one, besides the method's own.
OUTER_RATES = (0.4, 0.7, 1.0)


@dataclass(frozen=True)
class Subject:
    """A method, the name under which it is shown, the kind that gives it its colour, and the
    optimizer that trains: AdamW, or Muon for the matrices of blocks and AdamW for the rest."""

    name: str
    kind: str
    algorithm: Algorithm | LocalSGD
    muon: bool = False

    @property
    def outer_rate(self) -> float | None:
        """The outer learning rate; None: there is none."""
        outer = self.algorithm.outer if isinstance(self.algorithm, LocalSGD) else None
        return outer.lr if isinstance(outer, OuterSGD) else None

    def at(self, outer_rate: float | None) -> Subject:
        """The same with another outer learning rate; None: with its own."""
        if outer_rate is None or outer_rate == self.outer_rate:
            return self
        assert isinstance(self.algorithm, LocalSGD)
        assert isinstance(self.algorithm.outer, OuterSGD)
        return replace(
            self,
            algorithm=replace(self.algorithm, outer=replace(self.algorithm.outer, lr=outer_rate)),
        )


TILES = (64, 64)
#: After the name of a method that trains by Muon.
MUON = ", Muon"

SUBJECTS: tuple[Subject, ...] = (
    Subject("uncompressed", "uncompressed", AllReduce()),
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
    Subject("DiLoCo, streaming", "local", diloco(PERIOD, fragments=3)),
    Subject("DiLoCo, overlap", "local", diloco(PERIOD, fragments=3, overlap=5)),
    Subject("DiLoCo, eager", "local", diloco(PERIOD, eager=True)),
    Subject("DiLoCo, 4 bits", "local", diloco(PERIOD, compressor=WireDtype(AllReduce(), "e3m0"))),
    Subject(
        "DiLoCo, 2 bits",
        "local",
        diloco(PERIOD, lr=0.8, compressor=Quantize("int2", error_feedback=0.9)),
    ),
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
    Subject("PowerSGD 16, int8", "low rank", WireDtype(PowerSGD(16), "int8")),
    Subject("PowerSGD 16, int4", "low rank", WireDtype(PowerSGD(16), "int4")),
    Subject("PowerSGD 4, int8", "low rank", WireDtype(PowerSGD(4), "int8")),
)

_NAMED = (
    "uncompressed",
    "int8",
    "4 bits",
    "PowerSGD 16, int8",
    "PowerSGD 16, int4",
    "PowerSGD 4, int8",
)
_BY_ADAMW = tuple(subject for subject in SUBJECTS if subject.name in _NAMED)
_BY_MUON = tuple(replace(subject, name=subject.name + MUON, muon=True) for subject in _BY_ADAMW)
#: What the first screen is about, by either optimizer. They are trained with more seeds: some
#: differ by less than two seeds do.
FIRST = _BY_ADAMW + _BY_MUON
SUBJECTS += _BY_MUON

BY_NAME = {subject.name: subject for subject in SUBJECTS}
