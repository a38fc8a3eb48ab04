"""What a probe has measured of a network, and the measuring itself, which the backends share.

probe = Probe.load("probe.json")
print(probe)
probe.level("between nodes").bandwidth
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np

from gradwire.core.ops import A
from gradwire.core.protocol import all_to_all, reduce_sum
from gradwire.core.protocol.groups import Groups
from gradwire.core.state.files import whole_file
from gradwire.core.text.options import (
    AtLeast0,
    AtLeast1,
    Names,
    Positive,
    Replicas,
    at_least,
    check_options,
    share,
)
from gradwire.core.text.units import rate_of, time_of
from gradwire.core.text.wording import many

#: Bytes and seconds of messages.
Samples = tuple[tuple[AtLeast1, Positive], ...]
#: The level of all replicas, whatever lies between them.
ALL = "all"
WITHIN = "within a node"
BETWEEN = "between nodes"
#: Bytes of the messages, in the unit of a plan.
SIZES = tuple(1 << k for k in (8, 10, 12, 14, 16, 18, 20, 21, 22, 23, 24, 26))
#: Seconds of a message after which no larger one is tried, and for which each size is repeated.
LONG, REPEATED = 0.3, 0.15
#: How often a size is tried, at least and at most; and what is computed meanwhile.
LEAST, MOST, MEANWHILE = 2, 15, 5
#: Bytes of an element, a float32.
ITEM = 4
#: Rows of the matrices that are multiplied while a message is on its way, and so many products are
#: timed to know how long one takes.
ROWS, PRODUCTS = 256, 20


@dataclass(frozen=True)
class Level:
    """Replicas that send each other messages. Raises TypeError or ValueError, by name, for what
    none can be: no samples, or sizes and times that are not positive, or sizes that fall.

    Attributes:
        name: `ALL`, `WITHIN` or `BETWEEN`.
        replicas: how many send each other.
        all_reduce: bytes and seconds of all-reduces, by rising bytes.
        exchange: the same of halves of all-reduces: all-to-alls of twice so many bytes on each
            replica, and what else sends as much.
        overlap: what part of a message costs no time where something else is computed meanwhile,
            from 0 to 1.
    """

    name: str
    replicas: Replicas
    all_reduce: Samples
    exchange: Samples
    overlap: Annotated[float, share()]

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("all_reduce", "exchange"):
            samples: Samples = getattr(self, name)
            sizes = [n for n, _ in samples]
            if (
                not samples
                or sizes != sorted(sizes)
                or not all(n > 0 and t > 0 for n, t in samples)
            ):
                raise ValueError(
                    f"{name}={samples}: give (bytes, seconds), one at least, all of them more than"
                    " 0, by rising bytes"
                )

    @property
    def latency(self) -> float:
        """α of a ring all-reduce, by the smallest message: seconds of one of its 2(W-1) hops."""
        return self.all_reduce[0][1] / max(1, 2 * (self.replicas - 1))

    @property
    def bandwidth(self) -> float:
        """1/β of a ring all-reduce, by the largest message: bytes per second of each link in each
        direction."""
        nbytes, seconds = self.all_reduce[-1]
        return 2 * (self.replicas - 1) / self.replicas * nbytes / seconds

    def seconds(self, nbytes: float, *, exchange: bool) -> float:
        """Seconds of one message: between what was measured on both sides of it. A larger one never
        takes less. Beyond the largest sample time grows in proportion; nothing takes no time."""
        if nbytes <= 0:
            return 0.0
        samples = self.exchange if exchange else self.all_reduce
        sizes, times = [n for n, _ in samples], list(accumulate((t for _, t in samples), max))
        return float(np.interp(nbytes, sizes, times)) * max(1.0, nbytes / sizes[-1])


@dataclass(frozen=True)
class Probe:
    """What `gradwire.torch_backend.probe` and `gradwire.jax_backend.probe` return. Raises TypeError
    or ValueError, by name, for what no probe can be.

    Attributes:
        framework: "torch" or "jax".
        device: what the replicas are.
        replicas, nodes: how many, on how many machines.
        levels: all replicas together; on several nodes with several replicas each, also those of a
            node, and those of different nodes.
        threads: that torch has for each replica on a CPU. 0: nobody says.
    """

    framework: Annotated[str, Names(("torch", "jax"))]
    device: str
    replicas: Annotated[int, at_least(2)]
    nodes: AtLeast1
    levels: tuple[Level, ...]
    threads: AtLeast0 = 0

    def __post_init__(self) -> None:
        check_options(self)
        if self.replicas % self.nodes:
            raise ValueError(
                f"nodes={self.nodes}: there must be equally many of {self.replicas} replicas on"
                " each"
            )
        if not self.levels or any(level.replicas > self.replicas for level in self.levels):
            raise ValueError(
                f"levels={self.levels}: give one at least, of no more than {self.replicas} replicas"
            )

    def level(self, name: str) -> Level:
        """The replicas called "all", "within a node" or "between nodes". Where there is no such
        level: all."""
        return next((level for level in self.levels if level.name == name), self.levels[0])

    def __str__(self) -> str:
        rows = [("replicas", "per hop", "rate", "largest all-reduce", "overlaps")]
        for level in self.levels:
            nbytes, seconds = level.all_reduce[-1]
            largest = f"{nbytes / 2**20:.3g} MiB in {time_of(seconds)}"
            rows.append(
                (
                    level.name,
                    time_of(level.latency),
                    rate_of(level.bandwidth),
                    largest,
                    f"{level.overlap:.0%}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            [self.network, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]
        )

    @property
    def network(self) -> str:
        """Who was measured, in a line."""
        return (
            f"{many(self.replicas, 'replica')} on {many(self.nodes, 'node')} ({self.framework},"
            f" {self.device})"
        )

    def save(self, path: str | Path) -> None:
        """Write it to a file as JSON, which `load` and `gradwire advise --probe` read; what was
        there before stays until it is done. Raises OSError."""
        with whole_file(path) as file:
            file.write((json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Probe:
        """Read what `save` or `gradwire probe` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is no JSON, or no probe, with what is missing.
        """
        try:
            data: dict[str, Any] = json.loads(Path(path).read_text())
            levels = tuple(
                Level(
                    level["name"],
                    level["replicas"],
                    tuple((n, t) for n, t in level["all_reduce"]),
                    tuple((n, t) for n, t in level["exchange"]),
                    level["overlap"],
                )
                for level in data["levels"]
            )
            given = {key: data[key] for key in ("framework", "device", "replicas", "nodes")}
            return cls(**given, levels=levels, threads=data["threads"])
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"{path} is no probe: {why}; make one with `gradwire probe`"
            ) from error


class Prober(Protocol):
    """How a backend sends messages. All replicas make the same calls, and are told the same."""

    def __call__(
        self,
        nbytes: int,
        groups: Groups | None,
        *,
        exchange: bool = False,
        products: int = 0,
        repeats: int = 1,
    ) -> float:
        """Median seconds, on the slowest replica, of an all-reduce of so many bytes, or an
        all-to-all of twice so many; 0: of none. Meanwhile so many products of two matrices of
        `ROWS` are computed."""


def measure(
    prober: Prober, framework: str, device: str, replicas: int, nodes: int, threads: int = 0
) -> Probe:
    """Measure all levels. Replicas are on nodes in order, equally many on each.

    Raises:
        ValueError: a single replica, or nodes of different sizes.
    """
    if replicas < 2:
        raise ValueError("a probe needs two replicas at least: one alone sends nothing")
    if replicas % nodes:
        raise ValueError(
            f"{replicas} replicas on {nodes} nodes: there must be equally many on each"
        )
    levels = [_level(prober, ALL, replicas, None)]
    if 1 < nodes < replicas:
        within, between = partition(replicas, nodes)
        levels += [
            _level(prober, WITHIN, replicas // nodes, within),
            _level(prober, BETWEEN, nodes, between),
        ]
    return Probe(framework, device, replicas, nodes, tuple(levels), threads)


def partition(replicas: int, nodes: int) -> tuple[Groups, Groups]:
    """The replicas of each node, and the inter-node groups."""
    each = replicas // nodes
    within = tuple(tuple(range(node * each, (node + 1) * each)) for node in range(nodes))
    return within, tuple(zip(*within, strict=True))


def message_shape(nbytes: int, replicas: int, *, exchange: bool) -> tuple[int, ...]:
    """The shape of the array that so many replicas sum, in a message of so many bytes; or of which
    they exchange rows, in an all-to-all of twice so many."""
    return (
        (replicas, max(1, 2 * nbytes // ITEM // replicas))
        if exchange
        else (max(1, nbytes // ITEM),)
    )


async def message(x: A, groups: Groups | None, *, exchange: bool) -> A:
    """The sum over the replicas of each group; or row i of all of them, on the replica i. `x` is
    donated."""
    if not exchange:
        return await reduce_sum(x, out=x, watched=False, groups=groups)
    (received,) = await all_to_all(x, groups=groups)
    return received


def _level(prober: Prober, name: str, replicas: int, groups: Groups | None) -> Level:
    sums, exchanges = (_curve(prober, groups, exchange) for exchange in (False, True))
    # Long enough that what is begun and ended does not count.
    nbytes = next((n for n, t in sums if t > LONG / 10), sums[-1][0])
    return Level(name, replicas, sums, exchanges, _overlap(prober, nbytes, groups))


def _curve(prober: Prober, groups: Groups | None, exchange: bool) -> Samples:
    samples = []
    for nbytes in SIZES:
        seconds = prober(nbytes, groups, exchange=exchange)
        if seconds < 2 * LONG:
            repeats = min(MOST, max(LEAST, int(REPEATED / seconds)))
            seconds = prober(nbytes, groups, exchange=exchange, repeats=repeats)
        samples.append((nbytes, seconds))
        if seconds > LONG:
            break
    return tuple(samples)


def _overlap(prober: Prober, nbytes: int, groups: Groups | None) -> float:
    """What part of a message costs nothing if something else is computed meanwhile that takes as
    long."""
    alone = prober(nbytes, groups, repeats=MEANWHILE)
    product = prober(0, groups, products=PRODUCTS, repeats=MEANWHILE) / PRODUCTS
    products = max(1, int(alone / product))
    computed = prober(0, groups, products=products, repeats=MEANWHILE)
    together = prober(nbytes, groups, products=products, repeats=MEANWHILE)
    return min(1.0, max(0.0, (alone + computed - together) / min(alone, computed)))
