"""Which share of the time computes, over a link: "which link do I need?", answered from shapes
alone.

    streaming = diloco(100, fragments=8, overlap=1)
    utilization(model, streaming, step=0.1, link="10Gbit", replicas=2)        # 0.95
    link_for(model, diloco(100), step=0.1, utilization=0.9, replicas=2)       # bits per second

A step is a forward pass through the layers and a backward pass, a third and two thirds of its time,
divided among the layers by size. What a method sends of a layer leaves when backward has come to
it, one message after the other. The forward pass of that layer waits for it: in the next step, or
as many steps later as the method allows. What counts is a period that takes as long as the one
before: no message of an earlier one is forgotten, and no link is busy for longer than there is
time. (The model of Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512, section 3.4, whose
Table 4 this gives.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from gradwire.core.algorithm import Algorithm
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.local_sgd.fragments import layer_of
from gradwire.core.ops import FloatDtype
from gradwire.core.plan.links import Library, Links, links_of
from gradwire.core.plan.local_sgd import leaving_in_cycle
from gradwire.core.plan.parameters import specs_of
from gradwire.core.plan.plan import plan
from gradwire.core.plan.steady import Sent, Times, period_seconds
from gradwire.core.plan.traffic import Traffic
from gradwire.core.text.options import AtLeast1, Positive, Replicas, Seconds, checked, share, short
from gradwire.core.text.units import rate


@checked
def utilization(
    model: Any,
    algorithm: Algorithm | LocalSGD,
    *,
    step: Positive,
    link: str | Positive,
    replicas: Replicas,
    nodes: AtLeast1 | None = None,
    latency: Seconds = 0.0,
    dtype: FloatDtype | None = None,
    library: Library = "nccl",
) -> float:
    """The share of the time in which a replica computes; the rest it waits for messages.

    Examples:
        >>> from gradwire import AllReduce, diloco, utilization
        >>> model = {f"layers.{i}.weight": (4096, 4096) for i in range(24)}
        >>> for algorithm in (AllReduce(), diloco(100), diloco(100, fragments=8, overlap=5)):
        ...     print(f"{utilization(model, algorithm, step=0.3, link='1Gbit', replicas=4):.2f}")
        0.02
        0.61
        0.84

    Args:
        model: as for `plan`. Parameters whose names agree up to the first number are a layer;
            layers follow each other in the order of the parameters.
        algorithm: any algorithm, or `LocalSGD` in all its forms. What compressing takes is not in
            it, see `gradwire.advise`.
        step: seconds of a training step of one replica alone.
        link: of each node, to the others, "10Gbit" or bits per second. Its replicas share it.
        replicas: how many there are.
        nodes: on how many nodes they are, equally many on each, in order. 1: the link is that
            between the replicas of it. None: each is on a node of its own; of an algorithm with two
            levels these say.
        latency: seconds for each hop of a message.
        dtype: of the model, instead of its own.
        library: what carries messages, "nccl" or "gloo", where a node has several replicas: the
            bytes that cross its link are those that were counted of Gloo, and computed by the
            formulas of NCCL.

    Returns:
        More than 0, at most 1.

    Raises:
        ValueError: a step, link, latency or number of replicas or nodes that cannot be, by name; or
            as `plan` raises.
    """
    links = links_of(algorithm, replicas, nodes, library)
    shape = _Shape.of(model, algorithm, step, replicas, latency, dtype, links)
    return float(shape.shares(np.array([_bits(link)]))[0])


@checked
def link_for(
    model: Any,
    algorithm: Algorithm | LocalSGD,
    *,
    step: Positive,
    utilization: Annotated[float, share(least_open=True, most_open=True)] = 0.9,
    replicas: Replicas,
    nodes: AtLeast1 | None = None,
    latency: Seconds = 0.0,
    dtype: FloatDtype | None = None,
    library: Library = "nccl",
) -> float:
    """The slowest link, in bits per second, with which a replica computes for this share of the
    time: the inverse of `utilization`, whose arguments it takes.

    Examples:
        >>> from gradwire import AllReduce, diloco, link_for
        >>> model = {f"layers.{i}.weight": (4096, 4096) for i in range(24)}
        >>> for algorithm in (AllReduce(), diloco(100), diloco(100, fragments=8, overlap=5)):
        ...     print(f"{link_for(model, algorithm, step=0.3, replicas=4) / 1e9:.1f} Gbit/s")
        85.9 Gbit/s
        5.5 Gbit/s
        1.2 Gbit/s

    Raises:
        ValueError: as `utilization`; or no link is fast enough, since latency alone takes more.
    """
    links = links_of(algorithm, replicas, nodes, library)
    shape = _Shape.of(model, algorithm, step, replicas, latency, dtype, links)
    low, high = 0.0, 24.0
    if shape.shares(np.array([10**high]))[0] < utilization:
        raise ValueError(
            f"utilization={utilization} is out of reach: with step={step} s and latency={latency} s"
            f" for each hop among {replicas} replicas no link is fast enough"
        )
    for _ in range(4):
        exponents = np.linspace(low, high, 50)
        first = int(np.argmax(shape.shares(10**exponents) >= utilization))
        low, high = exponents[max(first - 1, 0)], exponents[first]
    return float(10**high)


def _bits(link: str | float) -> float:
    if not isinstance(link, str):
        return link
    try:
        return 8 * rate(link)
    except ValueError as error:
        raise ValueError(f"link={short(link)}: {error}") from error


@dataclass(frozen=True)
class _Message:
    """What leaves after a step of a period, on the link.

    Attributes:
        step: numbered from 1.
        late: steps more between leaving and being needed.
        layers: which part of it is of each layer.
        links: which it takes.
        kinds: of all of it, one or the other, each so many times.
    """

    step: int
    late: int
    layers: Mapping[int, float]
    links: Links
    kinds: Sequence[tuple[Traffic, int]]

    @property
    def leaves(self) -> bool:
        """Whether any of it is on a link."""
        return any(self.links.nbytes(sent) for sent, _ in self.kinds)

    def sent(self, latency: float, bits: Times) -> Sent:
        waits, sends = np.zeros_like(bits), np.zeros_like(bits)
        for traffic, n in self.kinds:
            own = self.links.seconds_over(traffic, latency, bits / 8)
            waits, sends = waits + n * own[0], sends + n * own[1]
        times = sum(n for _, n in self.kinds)
        each = waits / times / len(self.layers)
        return Sent({i: each + part * sends / times for i, part in self.layers.items()}, self.late)


@dataclass(frozen=True)
class _Shape:
    """A model's layers and what is sent of them.

    Attributes:
        seconds: of each layer's forward and backward pass.
        period: steps after which everything repeats.
        messages: of a period.
        latency: seconds for each hop.
    """

    seconds: Sequence[float]
    period: int
    messages: Sequence[_Message]
    latency: float

    @classmethod
    def of(
        cls,
        model: Any,
        algorithm: Algorithm | LocalSGD,
        step: float,
        replicas: int,
        latency: float,
        dtype: str | None,
        links: Links,
    ) -> _Shape:
        specs = specs_of(model, dtype, "model")
        if not specs:
            raise ValueError("model has no parameters, so nothing is sent")
        found: dict[tuple[str, int, str], int] = {}
        number = {name: found.setdefault(layer_of(name), len(found)) for name in specs}
        sizes = [0] * len(found)
        for name, spec in specs.items():
            sizes[number[name]] += max(spec.size, 1)
        seconds = [step * size / sum(sizes) for size in sizes]
        planned = plan(specs, algorithm, world_size=replicas)
        own = {t.name: t.wire_bytes for t in planned.tensors}

        def message(
            step: int, late: int, names: Iterable[str], kinds: Iterable[tuple[Traffic, int]]
        ) -> _Message:
            layers: dict[int, float] = {}
            for name in names:
                layers[number[name]] = layers.get(number[name], 0.0) + own[name]
            total = sum(layers.values()) or 1.0
            return _Message(
                step, late, {i: part / total for i, part in layers.items()}, links, list(kinds)
            )

        if not isinstance(algorithm, LocalSGD):
            return cls(seconds, 1, [message(1, 0, specs, planned.kinds)], latency)
        period, leaving = leaving_in_cycle(algorithm, specs, replicas)
        each = [message(one.step, one.late, one.names, [(one.sent.traffic, 1)]) for one in leaving]
        return cls(seconds, period, each, latency)

    def shares(self, bits: Times) -> Times:
        """The utilization for each of these links."""
        sent: dict[int, list[Sent]] = {}
        for message in self.messages:
            if message.leaves:
                sent.setdefault(message.step, []).append(message.sent(self.latency, bits))
        share: Times = (
            self.period * sum(self.seconds) / period_seconds(self.seconds, sent, self.period)
        )
        return np.minimum(share, 1.0) + np.zeros_like(bits)  # which rounding may exceed
