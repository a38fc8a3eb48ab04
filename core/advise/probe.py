"""What a probe has measured of a network, and the measuring itself, which the backends share.

probe = Probe.load("probe.json")
print(probe)
probe.level("between nodes").bandwidth
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gradwire.core.advise.curve import Curve
from gradwire.core.files import whole_file
from gradwire.core.ops import A
from gradwire.core.protocol import all_to_all, reduce_sum
from gradwire.core.protocol.groups import Groups
from gradwire.core.units import rate_of, time_of

#: The level of all replicas, whatever lies between them.
ALL = "all"
WITHIN = "within a node"
BETWEEN = "between nodes"
#: Bytes of the messages, in the unit of a plan.
SIZES = tuple(1 << k for k in (8, 10, 12, 14, 16, 18, 20, 21, 22, 23, 24, 26))
#: Seconds of a message after which no larger one is tried, and for which each size is repeated.
LONG, REPEATED = 0.3, 0.15
#: What `as_dict` says it is.
FORMAT = 1
#: How often a size is tried, at least and at most.
LEAST, MOST = 2, 15
#: Bytes of an element, a float32.
ITEM = 4
#: Rows of the matrices that are multiplied while a message is on its way, and so many products are timed to know how long one takes.
ROWS, PRODUCTS = 256, 20


@dataclass(frozen=True)
class Level:
    """Replicas that send each other messages.

    Attributes:
        name: `ALL`, `WITHIN` or `BETWEEN`.
        replicas: how many send each other.
        all_reduce: all-reduces of so many bytes.
        exchange: halves of all-reduces: all-to-alls of twice so many bytes on each replica, and what else sends as much.
        overlap: what part of a message costs no time where something else is computed meanwhile, from 0 to 1.
    """

    name: str
    replicas: int
    all_reduce: Curve
    exchange: Curve
    overlap: float

    @property
    def latency(self) -> float:
        """α of a ring all-reduce: seconds of one of its 2(W-1) hops."""
        return self.all_reduce.fixed / max(1, 2 * (self.replicas - 1))

    @property
    def bandwidth(self) -> float:
        """1/β of a ring all-reduce: bytes per second of each link in each direction. inf: too much to be seen with these messages."""
        per_byte = self.all_reduce.per_byte
        share = 2 * (self.replicas - 1) / self.replicas
        return share / per_byte if per_byte else math.inf

    def seconds(self, nbytes: float, *, exchange: bool) -> float:
        """Of one message."""
        return (self.exchange if exchange else self.all_reduce).seconds(nbytes)


@dataclass(frozen=True)
class Probe:
    """What `gradwire.torch_backend.probe` and `gradwire.jax_backend.probe` return.

    Attributes:
        framework: "torch" or "jax".
        device: what the replicas are.
        replicas, nodes: how many, on how many machines.
        levels: all replicas together; on several nodes with several replicas each, also those of a node, and those of different nodes.
    """

    framework: str
    device: str
    replicas: int
    nodes: int
    levels: tuple[Level, ...]

    def level(self, name: str) -> Level:
        """The replicas called "all", "within a node" or "between nodes". Where there is no such level: all."""
        return next((level for level in self.levels if level.name == name), self.levels[0])

    def __str__(self) -> str:
        rows = [("replicas", "per hop", "rate", "largest all-reduce", "hides", "fit is off by")]
        for level in self.levels:
            fit, (nbytes, seconds) = level.all_reduce, level.all_reduce.samples[-1]
            rate = "too fast to see" if math.isinf(level.bandwidth) else rate_of(level.bandwidth)
            largest = f"{nbytes / 2**20:.3g} MiB in {time_of(seconds)}"
            off = f"{fit.error:.0%}, at most {max(fit.errors):.0%}"
            rows.append((level.name, time_of(level.latency), rate, largest, f"{level.overlap:.0%}", off))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join([self.network, *table])

    @property
    def network(self) -> str:
        """Who was measured, in a line."""
        on = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.replicas} replicas on {on} ({self.framework}, {self.device})"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: messages as [bytes, seconds], and what follows from them, latency in seconds and bandwidth in bytes per second."""
        return {
            "format": FORMAT,
            "framework": self.framework,
            "device": self.device,
            "replicas": self.replicas,
            "nodes": self.nodes,
            "levels": [
                {
                    "name": level.name,
                    "replicas": level.replicas,
                    "overlap": level.overlap,
                    "latency_seconds": level.latency,
                    "bytes_per_second": None if math.isinf(level.bandwidth) else level.bandwidth,
                    "fit_error": level.all_reduce.error,
                    "all_reduce": [list(sample) for sample in level.all_reduce.samples],
                    "exchange": [list(sample) for sample in level.exchange.samples],
                }
                for level in self.levels
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Probe:
        """The probe that `as_dict` gave; α and β are fitted anew. Raises ValueError, naming what is missing or wrong, or the version that has written it."""
        given = data.get("format") if isinstance(data, Mapping) else None
        if given is not None and given != FORMAT:
            raise ValueError(
                f"this is a probe of format {given!r}, of another version of gradwire, which reads format {FORMAT}; make one anew with `gradwire probe`"
            )
        try:
            levels = tuple(
                Level(
                    level["name"],
                    int(level["replicas"]),
                    Curve.fitted([(n, t) for n, t in level["all_reduce"]]),
                    Curve.fitted([(n, t) for n, t in level["exchange"]]),
                    float(level["overlap"]),
                )
                for level in data["levels"]
            )
            probe = cls(data["framework"], data["device"], int(data["replicas"]), int(data["nodes"]), levels)
        except KeyError as error:
            raise ValueError(
                f"this is no probe, or of another version: it has no {error}; make one with `gradwire probe`"
            ) from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"this is no probe ({error}); make one with `gradwire probe`") from error
        if not levels:
            raise ValueError("this probe has no levels; make one with `gradwire probe`")
        return probe

    def save(self, path: str | Path) -> None:
        """Write it to a file as JSON, which `load` and `gradwire advise --probe` read; what was there before stays until it is done. Raises OSError."""
        with whole_file(path) as file:
            file.write((json.dumps(self.as_dict(), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Probe:
        """Read what `save` or `gradwire probe` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is no JSON, or no probe, with what is missing.
        """
        try:
            data = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path} is no JSON ({error}); make a probe with `gradwire probe`") from error
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


class Prober(Protocol):
    """How a backend sends messages. All replicas make the same calls, and are told the same."""

    def all_reduce(self, nbytes: int, groups: Groups | None, repeats: int) -> float:
        """Median seconds of an all-reduce of so many bytes, on the slowest replica."""

    def exchange(self, nbytes: int, groups: Groups | None, repeats: int) -> float:
        """The same of an all-to-all of twice so many."""

    def overlap(self, nbytes: int, groups: Groups | None) -> float:
        """What part of an all-reduce costs nothing if something else is computed meanwhile."""


def measure(prober: Prober, framework: str, device: str, replicas: int, nodes: int) -> Probe:
    """Measure all levels. Replicas are on nodes in order, equally many on each.

    Raises:
        ValueError: a single replica, or nodes of different sizes.
    """
    if replicas < 2:
        raise ValueError("a probe needs two replicas at least: one alone sends nothing")
    if replicas % nodes:
        raise ValueError(f"{replicas} replicas on {nodes} nodes: there must be equally many on each")
    levels = [_level(prober, ALL, replicas, None)]
    if 1 < nodes < replicas:
        each = replicas // nodes
        within, between = partition(replicas, nodes)
        levels += [_level(prober, WITHIN, each, within), _level(prober, BETWEEN, nodes, between)]
    return Probe(framework, device, replicas, nodes, tuple(levels))


def partition(replicas: int, nodes: int) -> tuple[Groups, Groups]:
    """The replicas of each node, and those of equal place on all nodes."""
    each = replicas // nodes
    within = tuple(tuple(range(node * each, (node + 1) * each)) for node in range(nodes))
    return within, tuple(zip(*within, strict=True))


def all_reduce_shape(nbytes: int) -> tuple[int]:
    """Of the array whose sum is a message of so many bytes."""
    return (max(1, nbytes // ITEM),)


def exchange_shape(nbytes: int, replicas: int) -> tuple[int, int]:
    """Of the array of which so many replicas exchange rows, in an all-to-all of twice so many bytes."""
    return replicas, max(1, 2 * nbytes // ITEM // replicas)


async def all_reduced(x: A, groups: Groups | None) -> A:
    """The sum over the replicas of each group. `x` is donated."""
    return await reduce_sum(x, out=x, watched=False, groups=groups)


async def exchanged(x: A, groups: Groups | None) -> A:
    """Row i of all replicas of a group, on its replica i."""
    (received,) = await all_to_all(x, groups=groups)
    return received


def overlap_of(alone: float, computing: Callable[[int], float], together: Callable[[int], float]) -> float:
    """What part of a message costs nothing if something else is computed meanwhile.

    Args:
        alone: seconds of the message.
        computing: seconds of so many products.
        together: seconds of the message and so many products at once.
    """
    times = max(1, int(alone / (computing(PRODUCTS) / PRODUCTS)))
    computed = computing(times)
    return (alone + computed - together(times)) / min(alone, computed)


def _level(prober: Prober, name: str, replicas: int, groups: Groups | None) -> Level:
    curves = [_curve(send, groups) for send in (prober.all_reduce, prober.exchange)]
    # Long enough that what is begun and ended does not count.
    nbytes = next((n for n, t in curves[0].samples if t > LONG / 10), curves[0].samples[-1][0])
    return Level(name, replicas, curves[0], curves[1], min(1.0, max(0.0, prober.overlap(nbytes, groups))))


def _curve(send: Any, groups: Groups | None) -> Curve:
    samples = []
    for nbytes in SIZES:
        first = send(nbytes, groups, 1)
        seconds = send(nbytes, groups, min(MOST, max(LEAST, int(REPEATED / first)))) if first < 2 * LONG else first
        samples.append((nbytes, seconds))
        if seconds > LONG:
            break
    return Curve.fitted(samples)
