"""Which share of the time computes, over a link: "which link do I need?", answered from shapes alone.

    utilization(model, diloco(100, fragments=8, overlap=1), step=0.1, link="10Gbit", replicas=2)    # 0.95
    link_for(model, diloco(100), step=0.1, utilization=0.9, replicas=2)                             # bits per second

A step is a forward pass through the layers and a backward pass, a third and two thirds of its time, divided among the layers by size. What a method sends of a layer
leaves when backward has come to it, one message after the other. The forward pass of that layer waits for it: in the next step, or as many steps later as the
method allows. (The model of Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512, section 3.4, whose Table 4 this gives.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.local_sgd.fragments import layer_of
from gradwire.core.ops import FloatDtype
from gradwire.core.plan.cost import ring_seconds
from gradwire.core.plan.parameters import specs_of
from gradwire.core.plan.plan import plan
from gradwire.core.text.options import Positive, Replicas, Seconds, checked, share, short
from gradwire.core.text.units import rate

#: Of a step's time, that of the forward pass: backward has twice as many products.
FORWARD = 1 / 3
#: Steps in which a method that sends in every step has come to its pace.
STEADY = 6

Times = npt.NDArray[np.float64]


@checked
def utilization(
    model: Any,
    algorithm: Algorithm | LocalSGD,
    *,
    step: Positive,
    link: str | Positive,
    replicas: Replicas,
    latency: Seconds = 0.0,
    dtype: FloatDtype | None = None,
) -> float:
    """The share of the time in which a replica computes; the rest it waits for messages.

    Examples:
        >>> from gradwire import AllReduce, diloco, utilization
        >>> model = {f"layers.{i}.weight": (4096, 4096) for i in range(24)}
        >>> for algorithm in (AllReduce(), diloco(100), diloco(100, fragments=8, overlap=5)):
        ...     print(f"{utilization(model, algorithm, step=0.3, link='1Gbit', replicas=4):.2f}")
        0.02
        0.61
        0.85

    Args:
        model: as for `plan`. Parameters whose names agree up to the first number are a layer; layers follow each other in the order of the parameters.
        algorithm: any algorithm, or `LocalSGD` in all its forms. What compressing takes is not in it, see `gradwire.advise`.
        step: seconds of a training step of one replica alone.
        link: of each replica, "10Gbit" or bits per second; of an algorithm with two levels that of each node, to other nodes.
        replicas: how many there are.
        latency: seconds for each hop of a ring.
        dtype: of the model, instead of its own.

    Returns:
        More than 0, at most 1.

    Raises:
        ValueError: a step, link, latency or number of replicas that cannot be, by name; or as `plan` raises.
    """
    shape = _Shape.of(model, algorithm, step, replicas, latency, dtype)
    return float(shape.shares(np.array([_bits(link)]))[0])


@checked
def link_for(
    model: Any,
    algorithm: Algorithm | LocalSGD,
    *,
    step: Positive,
    utilization: Annotated[float, share(least_open=True, most_open=True)] = 0.9,
    replicas: Replicas,
    latency: Seconds = 0.0,
    dtype: FloatDtype | None = None,
) -> float:
    """The slowest link, in bits per second, with which a replica computes for this share of the time: the inverse of `utilization`, whose arguments it takes.

    Examples:
        >>> from gradwire import AllReduce, diloco, link_for
        >>> model = {f"layers.{i}.weight": (4096, 4096) for i in range(24)}
        >>> for algorithm in (AllReduce(), diloco(100), diloco(100, fragments=8, overlap=5)):
        ...     print(f"{link_for(model, algorithm, step=0.3, replicas=4) / 1e9:.1f} Gbit/s")
        85.9 Gbit/s
        5.5 Gbit/s
        1.1 Gbit/s

    Raises:
        ValueError: as `utilization`; or no link is fast enough, since latency alone takes more.
    """
    shape = _Shape.of(model, algorithm, step, replicas, latency, dtype)
    low, high = 0.0, 24.0
    if shape.shares(np.array([10**high]))[0] < utilization:
        raise ValueError(
            f"utilization={utilization} is out of reach: with step={step} s and latency={latency} s for each hop among {replicas} replicas no link is fast enough"
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
class _Shape:
    """A model's layers and what is sent of them.

    Attributes:
        seconds: of each layer's forward and backward pass.
        leaving: the bytes of each layer's message, of those that leave after a step (numbered from 1), and how many messages these are for a network.
        steps: how many to look at.
        late: steps between leaving and being needed.
        ring: replicas, or nodes, that average.
        latency: seconds for each hop.
    """

    seconds: Sequence[float]
    leaving: Callable[[int], tuple[Mapping[int, float], float]]
    steps: int
    late: int
    ring: int
    latency: float

    @classmethod
    def of(
        cls, model: Any, algorithm: Algorithm | LocalSGD, step: float, replicas: int, latency: float, dtype: str | None
    ) -> _Shape:
        specs = specs_of(model, dtype, "model")
        if not specs:
            raise ValueError("model has no parameters, so nothing is sent")
        found: dict[tuple[str, int], int] = {}
        number = {name: found.setdefault(layer_of(name), len(found)) for name in specs}
        sizes = [0] * len(found)
        for name, spec in specs.items():
            sizes[number[name]] += max(spec.size, 1)
        seconds = [step * size / sum(sizes) for size in sizes]
        local = algorithm if isinstance(algorithm, LocalSGD) else None
        sent = algorithm if local is None else local.compressor or AllReduce()
        kept = specs if local is None or local.state_dtype is None else local.kept(specs)
        planned = plan(kept, sent, world_size=replicas)
        far = planned.levels[1] if planned.levels else None
        ring = replicas if far is None else far.replicas
        collectives = planned.collectives if far is None else far.collectives
        nbytes = {t.name: t.wire_bytes for t in planned.tensors}

        def messages(names: Sequence[str]) -> tuple[dict[int, float], float]:
            by_layer: dict[int, float] = {}
            for name in names:
                by_layer[number[name]] = by_layer.get(number[name], 0.0) + nbytes[name]
            return by_layer, collectives

        if local is None:
            everything = messages(list(specs))
            return cls(seconds, lambda _: everything, STEADY, 0, ring, latency)
        period = local.levels(replicas)[0].period
        fragments = [messages(names) for names in local.parts(kept)]
        turns = {local._offset(period, f): f for f in range(local.fragments)}

        def leaving(t: int) -> tuple[Mapping[int, float], float]:
            turn = turns.get((t - 1) % period + 1)
            return ({}, 0.0) if turn is None else fragments[turn]

        late = period if local.eager else local.overlap
        return cls(seconds, leaving, 3 * period if local.eager else period, late, ring, latency)

    def shares(self, bits: Times) -> Times:
        """The utilization for each of these links."""
        n = len(self.seconds)
        now, link = np.zeros_like(bits), np.zeros_like(bits)
        need = np.zeros((n, len(bits)))  # when forward may begin
        on_their_way: dict[int, dict[int, Times]] = {}
        for t in range(1, self.steps + 1):
            messages, collectives = self.leaving(t)
            if not messages and (need <= now).all():
                now = now + sum(self.seconds)
            else:
                for i, seconds in enumerate(self.seconds):
                    now = np.maximum(now, need[i]) + seconds * FORWARD
                sent = {}
                for i in reversed(range(n)):
                    now = now + self.seconds[i] * (1 - FORWARD)
                    if i in messages:
                        link = np.maximum(link, now) + self._travels(messages[i], collectives / len(messages), bits)
                        sent[i] = link
                if sent:
                    on_their_way[t + self.late] = sent
            for i, arrived in on_their_way.pop(t, {}).items():
                need[i] = np.maximum(need[i], arrived)
        share: Times = self.steps * sum(self.seconds) / np.maximum(now, need.max(axis=0))
        return share

    def _travels(self, nbytes: float, collectives: float, bits: Times) -> Times:
        waits = ring_seconds(collectives, 0, self.ring, self.latency, 1.0)
        per_byte = ring_seconds(0, 1, self.ring, 0.0, 1.0)
        travels: Times = waits + per_byte * nbytes * 8 / bits
        return travels
