"""`gradwire plan`: several plans side by side."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from gradwire.cli.models import BadArgument, Model
from gradwire.cli.tables import NAME, in_lines, plain_table, say, show
from gradwire.core.advise.advice import written
from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.kernels.abstract import NotPortable
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.plan.advice import CompressionWarning, advice
from gradwire.core.plan.dry_run import size_of
from gradwire.core.plan.links import Library, Way
from gradwire.core.plan.plan import plan as make_plan
from gradwire.core.plan.result import Plan
from gradwire.core.plan.utilization import link_for, utilization
from gradwire.core.text.units import rate_of, time_of
from gradwire.core.text.wording import many

#: The share of the time that computes, for which a link is named.
ENOUGH = 0.9
#: What algorithms are compared with.
DENSE = AllReduce()
#: Where what leaves a node comes from.
SHARED: dict[Library, str] = {
    "gloo": "What leaves a node is what Gloo was counted to send.",
    "nccl": "What leaves a node is computed, not measured, by the formulas of NCCL.",
}

#: How messages go for whose hops latency is charged.
CHARGED: dict[Way, str] = {"ring": "round a ring", "tree": "in a tree", "direct": "sent directly"}


@dataclass(frozen=True)
class Link:
    """The slowest link between replicas: bytes per second, seconds per hop; how many replicas there
    are, on how many nodes; what carries their messages."""

    bandwidth: float
    latency: float
    replicas: int
    nodes: int
    library: Library = "nccl"

    def __post_init__(self) -> None:
        if self.replicas % self.nodes:
            raise BadArgument(
                f"--nodes {self.nodes}: {self.replicas} replicas cannot be divided among so many"
                " machines"
            )

    @property
    def shared(self) -> bool:
        """Whether several replicas share the link of a node to the others."""
        return 1 < self.nodes < self.replicas

    def seconds(self, plan: Plan) -> float:
        """How long the link takes for a step, by the α-β model. What stays on a node is not on the
        link."""
        return plan.seconds(
            self.replicas, self.latency, self.bandwidth, nodes=self.nodes, library=self.library
        )

    def hops(self, plan: Plan) -> dict[Way, float]:
        """The hops of a step for which `seconds` charges the latency, by the way of their
        messages."""
        return plan.hops(
            self.replicas, self.latency, self.bandwidth, nodes=self.nodes, library=self.library
        )

    def nbytes(self, plan: Plan) -> float:
        """What leaves a node in a step."""
        return plan.link_bytes(self.replicas, nodes=self.nodes, library=self.library)


def print_plans(
    model: Model,
    algorithms: Sequence[Algorithm | LocalSGD],
    link: Link,
    step: float | None = None,
    *,
    summary: bool = False,
    as_json: bool,
) -> None:
    """Print the plans of these algorithms for a model, of a `summary` the totals alone; with the
    seconds of a step, also for which share of the time replicas compute. Raises BadArgument for
    what an algorithm refuses."""
    plans = [_planned(model, algorithm, link) for algorithm in algorithms]
    if as_json:
        print(
            json.dumps(
                {
                    "replicas": link.replicas,
                    "nodes": link.nodes,
                    "library": link.library,
                    "plans": [_data(p, link) | _used(p, model, link, step) for p in plans],
                },
                indent=1,
            )
        )
        return
    if not summary:
        show(_tensors(plans))
    dense = [] if any(plan.algorithm == DENSE for plan in plans) else [_planned(model, DENSE, link)]
    rate, latency = rate_of(link.bandwidth), time_of(link.latency)
    say(
        f"{'' if summary else chr(10)}A step of {many(link.replicas, 'replica')} on"
        f" {many(link.nodes, 'node')}, {rate}, {latency}:\n"
    )
    if link.shared:
        say(f"{SHARED[link.library]}\n")
    show(_totals([*dense, *plans], link))
    say(f"\nHops in the link time: {_hops([*dense, *plans], link)}")
    if step is not None:
        say(f"\nThe share of the time that computes, of steps of {time_of(step)}:\n")
        show(_shares([*dense, *plans], model, link, step))
    for plan in plans:
        for note in (*plan.notes, *advice(plan.algorithm, model.specs)):
            say(f"{written(plan.algorithm)}: {note}")


def _planned(model: Model, algorithm: Algorithm | LocalSGD, link: Link) -> Plan:
    per_node = link.replicas // link.nodes
    try:
        own: Any = (
            algorithm.on_nodes_of(per_node) if hasattr(algorithm, "on_nodes_of") else algorithm
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CompressionWarning)  # it is printed below the tables
            return make_plan(model.specs, own, world_size=link.replicas)
    except (ValueError, NotPortable) as error:
        raise BadArgument(f"--algorithm {algorithm!r}: {error}") from error


def _tensors(plans: Sequence[Plan]) -> Table:
    headings = [escape(in_lines(written(plan.algorithm))) for plan in plans]
    table = plain_table(
        "tensor",
        ("shape", "right"),
        ("dense", "right"),
        *((heading, "right") for heading in headings),
    )
    for i, tensor in enumerate(plans[0].tensors):
        sent = [plan.tensors[i] for plan in plans]
        table.add_row(
            escape(tensor.name),
            "×".join(map(str, tensor.shape)) or "scalar",
            size_of(tensor.dense_bytes),
            *(
                size_of(t.wire_bytes) if t.compressed else f"[dim]{size_of(t.wire_bytes)}[/dim]"
                for t in sent
            ),
        )
    return table


def _totals(plans: Sequence[Plan], link: Link) -> Table:
    """ "sent" is what a replica hands over. Where replicas share a link, what leaves their node
    stands beside it, and "fewer" is of that."""
    shared = ["off node"] if link.shared else []
    columns = ["sent", *shared, "fewer", "messages", "link time", "memory"]
    table = plain_table("algorithm", *((column, "right") for column in columns))
    dense = next(link.nbytes(plan) for plan in plans if plan.algorithm == DENSE)
    for plan in plans:
        leaves = link.nbytes(plan)
        fewer = plan.dense_bytes / plan.wire_bytes if plan.wire_bytes else 1.0
        table.add_row(
            escape(in_lines(written(plan.algorithm), NAME)),
            size_of(plan.wire_bytes),
            *(size_of(leaves) for _ in shared),
            f"{dense / leaves if leaves and shared else fewer:,.1f}×",
            f"{plan.collectives:g}",
            time_of(link.seconds(plan)),
            size_of(plan.memory_bytes),
        )
    return table


def _hops(plans: Sequence[Plan], link: Link) -> str:
    """What the latency is charged for, plan by plan."""
    found = []
    for plan in plans:
        by_way = [f"{hops:g} {CHARGED[way]}" for way, hops in link.hops(plan).items()]
        found.append(f"{written(plan.algorithm)} {' and '.join(by_way) or 'none'}")
    return f"{', '.join(found)}."


def _shares(plans: Sequence[Plan], model: Model, link: Link, step: float) -> Table:
    over = f"over {rate_of(link.bandwidth)}"
    table = plain_table("algorithm", (over, "right"), (f"link for {ENOUGH:.0%}", "right"))
    for plan in plans:
        used = _used(plan, model, link, step)
        needed = used["link_for_90"]
        table.add_row(
            escape(in_lines(written(plan.algorithm), NAME)),
            f"{used['utilization']:.1%}",
            "none" if needed is None else rate_of(needed / 8),
        )
    return table


def _used(plan: Plan, model: Model, link: Link, step: float | None) -> dict[str, Any]:
    """The share of the time that computes, and the bits per second for 90 %, None if latency alone
    takes more. A step that nobody knows: nothing."""
    if step is None:
        return {}
    given: dict[str, Any] = {"step": step, "latency": link.latency}
    given |= {"replicas": link.replicas, "nodes": link.nodes, "library": link.library}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressionWarning)  # it is printed below the tables
        share = utilization(model.specs, plan.algorithm, link=8 * link.bandwidth, **given)
        try:
            needed: float | None = link_for(
                model.specs, plan.algorithm, utilization=ENOUGH, **given
            )
        except ValueError:
            needed = None
    return {"utilization": share, "link_for_90": needed}


def _data(plan: Plan, link: Link) -> dict[str, Any]:
    return {
        "algorithm": repr(plan.algorithm),
        "dense_bytes": plan.dense_bytes,
        "wire_bytes": plan.wire_bytes,
        "within_node_bytes": plan.levels[0].nbytes if plan.levels else None,
        "between_nodes_bytes": plan.levels[1].node_bytes if plan.levels else None,
        "link_bytes": link.nbytes(plan),
        "messages": plan.collectives,
        "seconds": link.seconds(plan),
        "hops": link.hops(plan),
        "memory_bytes": plan.memory_bytes,
        "outgrown_at": plan.outgrown_at,
        "tensors": [
            {
                "name": t.name,
                "shape": list(t.shape),
                "compressed": t.compressed,
                "rank": t.rank,
                "view": t.view,
                "dense_bytes": t.dense_bytes,
                "wire_bytes": t.wire_bytes,
            }
            for t in plan.tensors
        ],
    }
