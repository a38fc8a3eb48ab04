"""Which method, and why: predicted steps side by side, and one recommendation."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradwire.core.advise.cost import Cost
from gradwire.core.advise.losses import LIMITS, LossDifference, Losses, known_losses
from gradwire.core.advise.probe import ALL, BETWEEN, Probe
from gradwire.core.advise.timeline import Compute, exposed, seconds_of, waiting
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.algorithms.quantize import Quantize
from gradwire.core.algorithms.sign import Sign
from gradwire.core.algorithms.top_k import TopK
from gradwire.core.algorithms.two_level import TwoLevel
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.local_sgd.algorithm import LocalSGD, diloco
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import size_of
from gradwire.core.plan.traffic import Message
from gradwire.core.text.units import time_of

#: Characters of a line, and of a name that stands beside its figures.
WIDTH, SHORT_NAME = 80, 20
#: Steps that differ by less are called equally long.
EQUAL = 1.05
#: Averages as they are.
PLAIN = AllReduce()


def default_methods(per_node: int = 1) -> list[Any]:
    """What is compared unless others are asked for, where so many replicas share a node (of
    several): methods whose losses were measured (docs/frontier.md)."""
    int8, factors = WireDtype(PLAIN, "int8"), WireDtype(PowerSGD(16), "int8")
    levels = [TwoLevel(method, per_node) for method in (PLAIN, int8, factors) if per_node > 1]
    return [
        PLAIN,
        WireDtype(PLAIN, "bfloat16"),
        int8,
        Quantize("int4"),
        factors,
        WireDtype(PowerSGD(16), "int4"),
        WireDtype(PowerSGD(4), "int8"),
        *levels,
        TopK(64, per=(64, 64)),
        Sign(),
        LocalSGD(30),
        diloco(30, fragments=3, overlap=5),
        diloco(30, compressor=WireDtype(PLAIN, "e3m0")),
    ]


@dataclass(frozen=True)
class MethodAdvice:
    """What is expected of a method; times in seconds per step.

    Attributes:
        algorithm: how it is written; of uncompressed averages "plain".
        step: compute + compression + exposed.
        compute: the step of one replica alone.
        compression: what the method computes, measured on this device.
        exposed: communication for which the step waits.
        hidden: communication that overlaps with computing.
        wire_bytes: what is sent, in the unit of a plan.
        memory_bytes: what the method keeps from step to step.
        loss: how its held-out loss differs from that of uncompressed averages, where that is known.
    """

    algorithm: str
    step: float
    compute: float
    compression: float
    exposed: float
    hidden: float
    wire_bytes: float
    memory_bytes: int
    loss: LossDifference | None = None


@dataclass(frozen=True)
class Choice:
    """What to take if the loss may be higher by so much.

    Attributes:
        loss: in parts of that of uncompressed averages.
        recommended: the algorithm of a method.
        reason: why, in a sentence or two.
    """

    loss: float
    recommended: str
    reason: str


@dataclass(frozen=True)
class Advice:
    """What `gradwire.advise` returns: plain data that prints as a table with its recommendation
    below.

    Examples:
        >>> from gradwire import Advice
        >>> from gradwire.core.advise.advice import Choice, MethodAdvice
        >>> plain = MethodAdvice("plain", 0.9, 0.2, 0.0, 0.7, 0.0, 1e8, 0)
        >>> choice = Choice(0.01, "plain", "nothing is faster.")
        >>> advice = Advice(10**8, "2 replicas", (plain,), (choice,), "one small model")
        >>> advice.method("plain").step, advice.recommended
        (0.9, 'plain')

    Attributes:
        model_bytes: of all gradients of a replica.
        network: the first line of the probe.
        methods: in the order in which they were asked for, uncompressed averages first.
        choices: what to take, for each limit of the loss, the least first.
        losses: where the losses come from by which methods were weighed.
    """

    model_bytes: int
    network: str
    methods: tuple[MethodAdvice, ...]
    choices: tuple[Choice, ...]
    losses: str

    @property
    def recommended(self) -> str:
        """The method to take at the least of the limits."""
        return self.choices[0].recommended

    @property
    def reason(self) -> str:
        """Why that one."""
        return self.choices[0].reason

    def method(self, algorithm: str) -> MethodAdvice:
        """What is expected of one method, by its name in the table: "plain", "PowerSGD(rank=4)".
        Raises KeyError if it was not compared."""
        for method in self.methods:
            if method.algorithm == algorithm:
                return method
        raise KeyError(algorithm)

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, numbers and strings, for JSON; times in seconds, sizes in
        bytes."""
        return asdict(self) | {"recommended": self.recommended, "reason": self.reason}

    def __str__(self) -> str:
        """The table, and the recommendation below. The step alone is the same for all methods, and
        stands above. Long names have lines of their own."""
        above = (
            f"{size_of(self.model_bytes)} of gradients, {self.network}; a step alone takes"
            f" {time_of(self.methods[0].compute)}"
        )
        above += f". Loss to uncompressed averages: {self.losses}"
        rows = [["", "step", "compress", "wait", "overlap", "sent", "memory", "loss"]]
        for m in self.methods:
            times = map(time_of, (m.step, m.compression, m.exposed, m.hidden))
            mark = "→ " if m.algorithm == self.recommended else "  "
            loss = "" if m.algorithm == "plain" else str(m.loss or "unknown")
            rows.append(
                [mark + m.algorithm, *times, size_of(m.wire_bytes), size_of(m.memory_bytes), loss]
            )
        widths = [max(len(row[i]) for row in rows) for i in range(1, 7)]
        table = []
        for name, *cells in rows:
            if len(name) > SHORT_NAME:
                table += textwrap.wrap(
                    name, WIDTH, subsequent_indent=" " * 4, break_on_hyphens=False
                )
                name = ""
            numbers = " ".join(map(str.rjust, cells, widths))
            table.append(f"{name:<{SHORT_NAME}} {numbers} {cells[-1]}".rstrip())
        return "\n".join([textwrap.fill(above, WIDTH), *table, "", *self._said()])

    def _said(self) -> list[str]:
        """The choices as they are printed. Those that are equal have one reason."""
        lines, several = [], len({choice.recommended for choice in self.choices}) > 1
        for before, choice in zip([None, *self.choices], self.choices, strict=False):
            within = f"Within {100 * choice.loss:g} %"
            if before is None or before.recommended != choice.recommended:
                take = "leave it" if choice.recommended == "plain" else f"take {choice.recommended}"
                heading = f"{within} of the loss {take}" if several else take[0].upper() + take[1:]
                lines.append(textwrap.fill(f"{heading}: {choice.reason}", WIDTH))
            elif several:
                lines.append(f"{within}: the same.")
        return lines


def name_of(algorithm: Any) -> str:
    """What an advice calls it: "plain", or as one writes it."""
    return "plain" if algorithm == PLAIN else written(algorithm)


def written(algorithm: Any) -> str:
    """The expression of a method, which `gradwire.core.plan.expressions.parse_algorithm` reads."""
    if isinstance(algorithm, WireDtype) and algorithm == WireDtype(
        algorithm.algorithm, algorithm.dtype
    ):
        return f"WireDtype({algorithm.algorithm!r}, {algorithm.dtype!r})"
    if (
        isinstance(algorithm, LocalSGD)
        and isinstance(algorithm.period, int)
        and algorithm == diloco(algorithm.period)
    ):
        return f"diloco({algorithm.period})"
    return repr(algorithm)


def predict(algorithm: Any, cost: Cost, compute: Compute, probe: Probe, total: int) -> MethodAdvice:
    """The step of a method, on average over its cycle, for gradients of so many bytes in all."""

    def seconds(message: Message) -> float:
        return seconds_of(message, probe)

    wire = cost.per_step(sum(map(seconds, cost.messages)))
    arrivals = compute if cost.overlaps else compute.at_once()
    waits = sum(exposed(step, arrivals, seconds, total) for step in cost.steps)
    if cost.averages:
        waits += waiting(cost.averages, len(cost.steps) * cost.every, compute.seconds, seconds)
    # The measured overlap of the slowest level that is used.
    slowest = probe.level(ALL if any(m.groups is None for m in cost.messages) else BETWEEN)
    hidden = max(0.0, wire - cost.per_step(waits)) * slowest.overlap
    return MethodAdvice(
        name_of(algorithm),
        compute.seconds + cost.compute + wire - hidden,
        compute.seconds,
        cost.compute,
        wire - hidden,
        hidden,
        cost.per_step(sum(message.nbytes for message in cost.messages)),
        cost.memory_bytes,
    )


def weigh(
    costs: Sequence[tuple[Any, Cost]],
    specs: Mapping[str, Spec],
    probe: Probe,
    compute: Compute,
    limits: Sequence[float] = LIMITS,
    losses: Losses | None = None,
) -> Advice:
    """Predict a step of each method, and recommend one for each limit.

    Of the methods whose loss is surely within the limit it is the one of least loss within 5 % of
    the fastest. So uncompressed averages stay where they are as fast as anything.

    Args:
        costs: algorithms and what they cost, uncompressed averages among them.
        specs: of the gradients.
        probe: the network.
        compute: a step of one replica alone.
        limits: by how much the loss may be higher than that of uncompressed averages, in parts of
            it, the least first.
        losses: of methods. None: those that are known, see
            `gradwire.core.advise.losses.known_losses`.

    Raises:
        ValueError: no cost of uncompressed averages.
    """
    total = sum(spec.nbytes for spec in specs.values())
    if losses is None:
        losses = known_losses({name_of(algorithm): algorithm for algorithm, _ in costs})
    predicted = [predict(algorithm, cost, compute, probe, total) for algorithm, cost in costs]
    if not any(method.algorithm == "plain" for method in predicted):
        raise ValueError("costs lack AllReduce(), with which all others are compared")
    return choose(predicted, total, probe.network, limits, losses)


def choose(
    predicted: Sequence[MethodAdvice],
    model_bytes: int,
    network: str,
    limits: Sequence[float],
    losses: Losses,
) -> Advice:
    """The advice for methods whose steps are predicted, uncompressed averages among them: what each
    loses is looked up, and one recommended for each limit."""
    found = tuple(
        (
            method
            if method.algorithm == "plain"
            else replace(method, loss=losses.methods.get(method.algorithm))
        )
        for method in predicted
    )
    choices = tuple(_recommend(found, limit, losses) for limit in limits)
    return Advice(model_bytes, network, found, choices, losses.source)


def _recommend(methods: Sequence[MethodAdvice], limit: float, losses: Losses) -> Choice:
    plain = next(method for method in methods if method.algorithm == "plain")
    eligible = [m for m in methods if m is plain or (m.loss is not None and m.loss.bound <= limit)]
    fastest = min(eligible, key=lambda method: method.step)
    near = [method for method in eligible if method.step <= EQUAL * fastest.step]
    chosen = min(near, key=lambda method: (_rank(method), method.step))
    if chosen is plain:
        which = f"whose loss is surely within {100 * limit:g} % of theirs"
        known = {method.algorithm for method in eligible}
        left_out = [method for method in methods if method.algorithm not in known]
        said = _leave_it(plain, fastest, which, alone=len(eligible) == 1)
        return Choice(limit, "plain", said + _faster(left_out, plain.step))
    reason = (
        f"a step takes {time_of(chosen.step)}, and {time_of(plain.step)} with uncompressed"
        f" averages, {plain.step / chosen.step:.1f} times as long. They wait"
        f" {time_of(plain.exposed)} for {size_of(plain.wire_bytes)}; this waits"
        f" {time_of(chosen.exposed)} for {size_of(chosen.wire_bytes)} and computes"
        f" {time_of(chosen.compression)}."
    )
    further = (
        ""
        if fastest is chosen
        else f" {fastest.algorithm} is as fast, and further from uncompressed averages."
    )
    loss = chosen.loss
    assert loss is not None  # or it would not be eligible
    if loss.by_kind:
        return Choice(
            limit,
            chosen.algorithm,
            f"{reason} It only rounds, which counts as no loss, and has nothing to tune.{further}",
        )
    rate = "" if loss.rate == 1 else f", with {loss.rate:g} times your learning rate"
    where = (
        "" if losses.own else " there. Yours may differ: `gradwire compare`, for as long as you can"
    )
    return Choice(limit, chosen.algorithm, f"{reason} {_said_of(loss)}{rate}{where}.{further}")


def _said_of(loss: LossDifference) -> str:
    return (
        f"Its loss was {100 * loss.difference:+.1f} % from theirs, at most {100 * loss.bound:+.1f}"
    )


def _rank(method: MethodAdvice) -> float:
    """What does least to the loss comes first. Uncompressed averages stay before a loss that is no
    worse than theirs."""
    return -1.0 if method.loss is None else max(0.0, method.loss.difference)


def _faster(left_out: Sequence[MethodAdvice], step: float) -> str:
    """What the quickest of those that were left out for their loss would take, if it is less."""
    quickest = min(left_out, key=lambda method: method.step, default=None)
    if quickest is None or EQUAL * quickest.step > step:
        return ""
    but = "nobody has measured its loss" if quickest.loss is None else "loses more"
    return f" {quickest.algorithm} would take {time_of(quickest.step)}, but {but}."


def _leave_it(plain: MethodAdvice, fastest: MethodAdvice, which: str, *, alone: bool) -> str:
    if plain.exposed < (EQUAL - 1) * plain.step:
        return (
            f"communication costs {time_of(plain.exposed)} of a step of {time_of(plain.step)};"
            " there is nothing to gain."
        )
    if fastest is plain:
        others = "; the others save less than they take to compute and to send more messages"
        return (
            f"no method {which} is faster. Uncompressed averages wait {time_of(plain.exposed)} of"
            f" {time_of(plain.step)}{'' if alone else others}."
        )
    return (
        f"uncompressed averages are within 5 % of the fastest, {fastest.algorithm}"
        f" ({time_of(fastest.step)} and {time_of(plain.step)})."
    )
