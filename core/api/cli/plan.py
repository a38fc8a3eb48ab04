"""`gradwire plan`: several plans side by side."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from gradwire.cli.models import BadArgument, Model
from gradwire.cli.tables import console, in_lines, plain_table, say
from gradwire.core.advise.advice import written
from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec
from gradwire.core.plan.advice import CompressionWarning, advice
from gradwire.core.plan.cost import step_seconds
from gradwire.core.plan.dry_run import size_of, summary
from gradwire.core.plan.messages import step_messages
from gradwire.core.plan.plan import Plan
from gradwire.core.plan.plan import plan as make_plan
from gradwire.core.plan.traffic import Traffic
from gradwire.core.units import rate_of, time_of

#: What algorithms are compared with.
DENSE = AllReduce()


@dataclass(frozen=True)
class Link:
    """The slowest link between replicas: bytes per second, seconds per hop; how many replicas there are, on how many nodes."""

    bandwidth: float
    latency: float
    replicas: int
    nodes: int

    def __post_init__(self) -> None:
        if self.replicas % self.nodes:
            raise BadArgument(
                f"--nodes {self.nodes}: {self.replicas} replicas cannot be divided among so many machines"
            )

    def seconds(self, plan: Plan, specs: Mapping[str, Spec]) -> float:
        """How long the link takes for a step, by the α-β model. What stays on a node is not on the link."""
        size = self.replicas // self.nodes
        if isinstance(plan.algorithm, LocalSGD):
            # What is averaged in groups is taken to stay on a node.
            sent = [step.nbytes - step.subgroup_bytes for step in plan.steps]
            counts = [step.collectives if n else 0 for step, n in zip(plan.steps, sent, strict=True)]
            steps = [Traffic(count, n) for count, n in zip(counts, sent, strict=True)]
        else:
            cycle = step_messages(plan.algorithm, specs, self.replicas)
            outside = [[message.nbytes for message in step if not message.within(size)] for step in cycle]
            steps = [Traffic(len(sizes), sum(sizes)) for sizes in outside]
        times = [step_seconds(step, self.replicas, self.latency, self.bandwidth) for step in steps]
        return sum(times) / len(times)


def print_plans(model: Model, algorithms: Sequence[Algorithm | LocalSGD], link: Link, *, as_json: bool) -> None:
    """Print the plans of these algorithms for a model. Raises BadArgument for what an algorithm refuses."""
    plans = [_planned(model, algorithm, link) for algorithm in algorithms]
    if as_json:
        print(
            json.dumps(
                {"replicas": link.replicas, "nodes": link.nodes, "plans": [_data(model, p, link) for p in plans]},
                indent=1,
            )
        )
        return
    out = console()
    out.print(_tensors(model, plans))
    dense = [] if any(plan.algorithm == DENSE for plan in plans) else [_planned(model, DENSE, link)]
    rate, latency = rate_of(link.bandwidth), time_of(link.latency)
    out.print(f"\nA step of {link.replicas} replicas on {link.nodes} nodes, {rate}, {latency}:\n")
    out.print(_totals(model, [*dense, *plans], link))
    for plan in plans:
        for note in (*plan.notes, *advice(plan.algorithm, model.specs)):
            say(f"{written(plan.algorithm)}: {note}")


def _planned(model: Model, algorithm: Algorithm | LocalSGD, link: Link) -> Plan:
    per_node = link.replicas // link.nodes
    try:
        own: Any = algorithm.on_nodes_of(per_node) if hasattr(algorithm, "on_nodes_of") else algorithm
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CompressionWarning)  # it is printed below the tables
            return make_plan(model.specs, own, world_size=link.replicas)
    except ValueError as error:
        raise BadArgument(f"--algorithm {algorithm!r}: {error}") from error


def _tensors(model: Model, plans: Sequence[Plan]) -> Table:
    headings = [escape(in_lines(written(plan.algorithm))) for plan in plans]
    table = plain_table("tensor", ("shape", "right"), ("dense", "right"), *((heading, "right") for heading in headings))
    for i, tensor in enumerate(plans[0].tensors):
        sent = [plan.tensors[i] for plan in plans]
        table.add_row(
            escape(tensor.name),
            "×".join(map(str, tensor.shape)) or "scalar",
            size_of(tensor.dense_bytes),
            *(size_of(t.wire_bytes) if t.compressed else f"[dim]{size_of(t.wire_bytes)}[/dim]" for t in sent),
        )
    return table


def _totals(model: Model, plans: Sequence[Plan], link: Link) -> Table:
    columns = ["sent", "fewer", "messages", "on the link", "error\nmemory"]
    table = plain_table("algorithm", *((column, "right") for column in columns))
    for plan in plans:
        table.add_row(
            escape(written(plan.algorithm)),
            size_of(plan.wire_bytes),
            f"{plan.compression_ratio:,.1f}×",
            f"{plan.collectives:g}",
            time_of(link.seconds(plan, model.specs)),
            size_of(_error_bytes(model, plan, link)),
        )
    return table


def _error_bytes(model: Model, plan: Plan, link: Link) -> int:
    if isinstance(plan.algorithm, LocalSGD):
        return 0
    return summary(plan.algorithm, model.specs, link.replicas).error_bytes


def _data(model: Model, plan: Plan, link: Link) -> dict[str, Any]:
    return {
        "algorithm": repr(plan.algorithm),
        "dense_bytes": plan.dense_bytes,
        "wire_bytes": plan.wire_bytes,
        "messages": plan.collectives,
        "seconds": link.seconds(plan, model.specs),
        "error_bytes": _error_bytes(model, plan, link),
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
