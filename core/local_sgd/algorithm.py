"""Local SGD: replicas train by themselves and average their parameters now and then, plainly or by
an outer optimizer (DiLoCo).

    LocalSGD(period=8)                                    # average after every 8th step
    LocalSGD(period=8, start_step=1000, subgroup="node")  # post-local SGD (Lin et al. 2018)
    LocalSGD(period={8: 4, "all": 32})                    # hierarchical
    diloco(period=500)                                    # DiLoCo (Douillard et al. 2023)
    diloco(period=500, fragments=5)                       # in five parts, one each 100 steps
    diloco(period=500, fragments=5, overlap=10)           # Streaming DiLoCo: 10 steps to travel

A driver runs two coroutines in each step: that of `gradients(replicas)` on the gradients, an
`Algorithm` like any other, and after the optimizer's update `average` on the parameters. Both count
the same steps.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, cast

from gradwire.core.algorithm import Algorithm, State, Stepped, check_specs
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.shared.weighing import Weighing
from gradwire.core.algorithms.two_level import require_nodes
from gradwire.core.algorithms.weighted import weighed
from gradwire.core.algorithms.wrapper import require_inner
from gradwire.core.kernels.abstract import AbstractOps
from gradwire.core.local_sgd.alongside import Extras, mean_alongside
from gradwire.core.local_sgd.outer import (
    OuterFactory,
    OuterOptimizer,
    OuterSGD,
    is_optimizers,
    times,
)
from gradwire.core.local_sgd.radial import Step, averaged_by_direction, split_by_direction
from gradwire.core.local_sgd.schedule import Level, Schedule, Turn
from gradwire.core.ops import FLOATS, A, FloatDtype, Ops, Spec, wide_dtype
from gradwire.core.protocol import branch, mean_each, together
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import Program
from gradwire.core.protocol.weights import weight_of
from gradwire.core.text.options import AtLeast0, share

OUTER = "outer"
#: How far this replica had come from the outer parameters when a message left that is on its way;
#: zeros if none is.
DIFFERENCE = "difference"
#: And what it counts for.
WEIGHT = "weight"
#: What an eager replica has added of its own to the last average that it took, and takes back from
#: the next one.
ADDED = "added"
#: What all replicas together count for, beside what `message` returns for eager ones.
TOTAL = "total"
#: In the shared state, where a driver has put them there, int32 scalars: how many averages of a
#: fragment among all replicas have arrived, and how many of them this replica has refused, since
#: they, or what it has itself, were not finite.
ARRIVED, REFUSED = COUNTS = "arrived", "refused"


@dataclass(frozen=True)
class LocalGradients:
    """The gradients' half of local SGD, an `Algorithm`: averaged over all replicas until the
    schedule's start, then over its subgroups, or left as they are. Afterwards gradients differ
    between replicas, or between subgroups."""

    schedule: Schedule
    replicas: int

    per_replica = frozenset[str]()
    cycle = 1

    @property
    def start_step(self) -> int:
        return self.schedule.start_step

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        check_specs(specs)
        return State()

    @property
    def weighted(self) -> bool:
        """Whether `step` takes a weight, as that of `Weighted` does."""
        return bool(getattr(self.schedule, "weighted", False))

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any, weight: Any = 1.0
    ) -> Stepped[A]:
        subgroups = self.schedule.subgroups(self.replicas)

        async def everywhere(g: dict[str, A]) -> dict[str, A]:
            return await mean_each(g, watched=False)

        async def in_subgroups(g: dict[str, A]) -> dict[str, A]:
            if subgroups is None:
                return g
            return await mean_each(
                g, watched=False, groups=subgroups if len(subgroups) > 1 else None
            )

        warming_up = False if self.start_step == 0 else step < self.start_step
        averages = branch(warming_up, everywhere, in_subgroups, dict(gradients))
        return await (Weighing(ops, weight).run(averages) if self.weighted else averages), state


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSGD(Schedule):
    """Local SGD in all its forms. See `Schedule` for who averages what and when.

    With an outer optimizer or a compressor, what all replicas average is not their parameters but
    how far these have come from the *outer parameters*, the parameters of the last such average,
    and the result moves the outer parameters. Smaller groups of a hierarchy always average
    parameters as they are: these belong to all replicas, so only what all of them agree on can move
    them.

    If a difference holds inf or NaN on one replica, or the outer optimizer would make one of their
    average, all replicas return to the outer parameters, and nothing else changes. Of several
    fragments that one is meant which is averaged, on all replicas; a replica of which any parameter
    is not finite then returns with all of them. Without outer parameters there is nothing to return
    to: plain averaging makes all replicas non-finite.

    With `overlap` a difference leaves after the step that is due, and its average is taken so many
    steps later: training goes on while the message travels. The difference is kept in the memory
    until then, so a run that is interrupted sends it again, and goes on with the same bits.

    Examples:
        >>> from gradwire import AllReduce, LocalSGD, plan
        >>> plan({"w": (512, 512)}, LocalSGD(8)).compression_ratio
        8.0
        >>> LocalSGD({2: 4, 8: 16}, start_step=1000, subgroup=2)
        LocalSGD(period={2: 4, 8: 16}, start_step=1000, subgroup=2)

    Args:
        period: H, steps from one average of the parameters to the next; or a hierarchy, `{2: 2, 8:
            16}`. See `Schedule`.
        start_step: K, number of steps that average gradients over all replicas first.
        subgroup: who averages gradients from step K on. None: each replica steps on its own
            gradient.
        fragments: cut the parameters in so many parts, which are averaged at evenly spaced steps of
            a period.
        outer: what is made of the averaged difference; None: it is subtracted, which is plain
            averaging. `OuterSGD(…)`, or what makes another optimizer in one of the backends:
            `functools.partial(torch.optim.AdamW, lr=0.1)`, called with outer parameters, or
            `functools.partial(optax.adamw, 0.1)`, called without. Such a one acts on the parameters
            of a fragment at a time, and of a sharded model on blocks of them.
        compressor: how differences are averaged: any algorithm, with its error feedback. Its own
            `start_step` counts averages, and each fragment has its own. None: as they are.
        state_dtype: dtype of outer parameters, velocity and differences (and so of what is sent,
            see `WireDtype`). None: that of the parameter.
        overlap: τ, steps from the one after which a difference leaves to the one after which its
            average is taken; less than the period.
        merge: a replica's parameters θ after an average has moved the outer parameters. A number α
            from 0 to 1: α·θ + (1 - α)·θ_outer (Streaming DiLoCo, section 2.2). "progress": θ_outer
            + (θ - what they were when the difference left), which keeps what the steps since have
            learned (LOSCAR, arXiv 2605.20866). None: 0, the outer parameters themselves; 0.5 where
            there is an `overlap`.
        eager: a message may last from one average to the next (Kale et al. 2025, "Eager updates",
            arXiv 2502.12996): each replica has outer parameters of its own by the average of the
            differences before, corrected by what it has itself done since, D̄' + (D - D') /
            replicas.
        weighted: each average counts a replica by its weight, see `gradwire.Weighted`: that given
            with the step after which the average, or the difference, leaves. What others compute is
            that of a run without the replicas of weight 0, which receive the averages as all do.
        radial: average directions and lengths of differences apart, `(Σ w‖D‖ / Σ w) · φ(Σ w φ(D))`
            with φ(x) = x / ‖x‖ ("Decoupled DiLoCo", arXiv 2604.21428): where replicas part, the
            mean of their differences shrinks, and this does not. One number more for each tensor
            travels along. True: of all tensors with two and more axes; or patterns of names
            (`fnmatch`). The paper leaves embeddings, heads and vectors out, and weighs by tokens² /
            steps.

    Raises:
        ValueError: naming the option, its value and the fix.
    """

    outer: OuterOptimizer | Callable[..., Any] | None = None
    compressor: Annotated[Algorithm, require_inner] | None = None
    state_dtype: FloatDtype | None = None
    overlap: AtLeast0 = 0
    merge: Annotated[float, share()] | Literal["progress"] | None = None
    eager: bool = False
    weighted: bool = False
    radial: bool | tuple[str, ...] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.outer, type) and self.outer.__module__ == "builtins":
            raise TypeError(
                f"outer={self.outer.__name__} makes no optimizer; give OuterSGD(…), or what makes"
                " one of torch or Optax"
            )
        if self.outer is not None and not isinstance(self.outer, OuterOptimizer):
            object.__setattr__(self, "outer", OuterFactory(self.outer))
        self._check_overlap()
        if self.state_dtype is not None and not self.has_outer:
            raise ValueError(
                f"state_dtype={self.state_dtype!r}, but plain averaging keeps no state; leave it"
                " out, or give an outer optimizer"
            )
        if self.radial and not self.has_outer:
            raise ValueError(
                f"radial={self.radial!r} is of averaged differences, and plain averaging has none;"
                " give an outer optimizer, as diloco does"
            )

    def _check_overlap(self) -> None:
        longest = self.longest
        if self.overlap >= longest:
            raise ValueError(
                f"overlap={self.overlap} does not fit in a period of {longest} steps: a difference"
                f" arrives before the next one leaves; use {longest - 1} at most, or eager=True,"
                " which gives it the whole period"
            )
        for option, default in (("overlap", 0), ("merge", None), ("eager", False)):
            value = getattr(self, option)
            if value != default and not self.has_outer:
                raise ValueError(
                    f"{option}={value!r} is of averaged differences, and plain averaging has none;"
                    " give an outer optimizer, as diloco does"
                )
            if value != default and self.eager and option != "eager":
                raise ValueError(
                    f"{option}={value!r} with eager=True, where each replica goes on from its own"
                    " outer parameters, and a message may last the whole period; leave it out"
                )

    @property
    def delayed(self) -> bool:
        """Whether averages are taken later than their differences leave, so that these are
        remembered."""
        return self.overlap > 0 or self.eager

    def at_once(self) -> Self:
        """The same without overlap: what is sent, and how often, is the same."""
        return replace(self, overlap=0, merge=None, eager=False) if self.has_outer else self

    def without_factory(self) -> Self:
        """The same with an outer optimizer that acts everywhere, in place of one that a backend has
        still to make: what is sent is the same."""
        return replace(self, outer=OuterSGD()) if type(self.outer) is OuterFactory else self

    @property
    def optimizer(self) -> OuterOptimizer:
        """That moves the outer parameters."""
        return self.outer if isinstance(self.outer, OuterOptimizer) else OuterSGD()

    @property
    def mentions_nodes(self) -> bool:
        """Whether "node" is to be replaced, in the schedule or in the compressor; see
        `on_nodes_of`."""
        return super().mentions_nodes or bool(getattr(self.compressor, "mentions_nodes", False))

    def on_nodes_of(self, near: int | Groups) -> Self:
        """The same with "node" replaced, by the number of replicas on each machine, or by a
        partition of the replicas. Raises ValueError as the class does."""
        on_nodes = super().on_nodes_of(near)
        replaced = getattr(self.compressor, "on_nodes_of", None)
        return on_nodes if replaced is None else replace(on_nodes, compressor=replaced(near))

    @property
    def has_outer(self) -> bool:
        """Whether differences from outer parameters are averaged, and not the parameters
        themselves."""
        return self.outer is not None or self.compressor is not None

    @property
    def per_replica(self) -> frozenset[str]:
        """Names of the memories that differ between replicas; outer and velocity do not, but for
        eager ones."""
        own = frozenset() if self.compressor is None else self.compressor.per_replica
        if self.eager:
            return own | {OUTER, DIFFERENCE, WEIGHT, ADDED} | self.optimizer.memories
        return own | {DIFFERENCE, WEIGHT} if self.overlap else own

    def gradients(self, replicas: int) -> LocalGradients:
        """What to do with gradients. Raises ValueError if the schedule does not fit so many
        replicas."""
        self.levels(replicas), self.subgroups(replicas)
        return LocalGradients(self, replicas)

    def init(self, ops: Ops[A], params: Mapping[str, A], replicas: int) -> State[A]:
        """The memory before the first step.

        Args:
            ops: kernels.
            params: parameter name → array, equal on all replicas. Not donated.
            replicas: how many there are.

        Returns:
            Of each parameter its `outer` parameters (a copy), what the outer optimizer remembers
            (`velocity`), and what the compressor keeps; of the whole, the compressor's shared
            state, `{fragment}/{name}`. Empty for plain averaging.

        Raises:
            TypeError: `outer` is a factory, and this is neither of the backends.
            ValueError: a schedule that does not fit so many replicas or parameters, or whatever the
                compressor refuses, by name.
        """
        self.gradients(replicas)
        require_nodes(self.compressor, replicas)
        specs = self._specs(ops, params)
        check_specs(specs)
        parts = self.parts(specs)
        if not self.has_outer:
            return State()
        split_by_direction(self.radial, specs)
        algorithm = self._algorithm
        memory = algorithm.init(ops, specs)
        state: State[A] = State()
        for number in range(len(parts)):
            # Each fragment's steps are its own, so none shares a counter with another.
            own = memory if number == 0 else algorithm.init(ops, specs)
            state.shared |= {f"{number}/{key}": x for key, x in own.shared.items()}
        for name, x in params.items():
            kept = memory.tensors.get(name, {})
            if taken := sorted(filter(_is_own, kept)):
                raise ValueError(
                    f"compressor {algorithm!r} keeps a memory called {taken[0]!r}, as local SGD"
                    " does; rename it"
                )
            state.tensors[name] = {OUTER: self._copied(ops, x), **kept}
            if self.delayed:
                state.tensors[name][DIFFERENCE] = ops.zeros(specs[name].shape, specs[name].dtype)
                if self.weighted:
                    state.tensors[name][WEIGHT] = ops.zeros((), "float32")
                if self.eager:
                    state.tensors[name][ADDED] = ops.zeros(specs[name].shape, specs[name].dtype)
        for names in parts:
            for name, remembered in self.optimizer.init(
                ops, {n: state.tensors[n][OUTER] for n in names}
            ).items():
                state.tensors[name] |= remembered
        state.tensors |= {name: kept for name, kept in memory.tensors.items() if name not in params}
        return state

    def acts(self, step: int, replicas: int) -> bool:
        """Whether `average` does anything at this step, for drivers that know the number and can
        save themselves the call."""
        if self.has_outer and step == self.start_step - 1:
            return True
        levels = self.levels(replicas)
        for fragment in range(self.fragments):
            for level in levels:
                if self.due(step, level.period, fragment):
                    return True
            if self.overlap and self.due(step - self.overlap, levels[0].period, fragment):
                return True
        return False

    def turn(self, step: int) -> Turn:
        """What happens after the update of this step, for `average`. There are few different ones,
        whatever the number of steps."""
        each = {f: self.happens(step, f) for f in range(self.fragments)}
        return Turn(
            step == self.start_step - 1,
            frozenset(
                (period, f)
                for f, (due, _, _) in each.items()
                for period in self.periods
                if due[period]
            ),
            frozenset(f for f, (_, arrives, _) in each.items() if arrives),
            frozenset(f for f, (_, _, later) in each.items() if later),
        )

    def happens(self, step: Any, fragment: Any) -> tuple[dict[int, Any], Any, Any]:
        """What happens to a fragment after the update of a step: whether it is due, by period;
        whether its average arrives, which left before; and whether it leaves as an eager one that
        has been averaged before. Of an array of fragments arrays, traced if `step` is."""
        due = {period: self.due(step, period, fragment) for period in self.periods}
        arrives = bool(self.overlap) & self.due(step - self.overlap, self.longest, fragment)
        return (
            due,
            arrives,
            self.eager & due[self.longest] & (self.round(step, self.longest, fragment) > 0),
        )

    def leaving(self, step: int, replicas: int) -> list[int]:
        """The fragments whose differences leave after this step, to be taken later."""
        period = self.levels(replicas)[0].period
        return [f for f in range(self.fragments) if self.delayed and self.due(step, period, f)]

    async def message(
        self, ops: Ops[A], specs: Mapping[str, Spec], state: State[A], fragment: int, index: Any
    ) -> Stepped[A]:
        """The message of a fragment that has left: what `average` would send when it is taken, for
        a driver that sends it before.

        Args:
            ops: kernels.
            specs: of all parameters, as `average` is given them.
            state: after the step in which it left. Differences and factors are not donated, errors
                are.
            fragment: its number.
            index: how often the fragment has been averaged before, see `round`.

        Returns:
            What `average` takes as `arrived[fragment]`.
        """
        kept = self.kept(specs)
        names = self.parts(kept)[fragment]
        tensors = {n: state.tensors[n] for n in names if n in state.tensors}
        return await _exchange(self, ops, kept, fragment, tensors, state.shared, index)

    async def average(
        self,
        ops: Ops[A],
        params: Mapping[str, A],
        state: State[A],
        step: Any,
        replicas: int,
        extras: Extras[A] | None = None,
        arrived: Mapping[int, Stepped[A]] | None = None,
        turn: Turn | None = None,
        weight: Any = 1.0,
        finite: list[A] | None = None,
    ) -> tuple[dict[str, A], State[A], dict[str, dict[str, A]]]:
        """What happens to the parameters after the optimizer's update of one step.

        Args:
            ops: kernels of the arrays' framework.
            params: name → this replica's parameter, of the whole model, donated.
            state: from `init` or the step before, donated.
            step: number of steps before this one, an int or a traced int32 scalar. The same for the
                gradients of this step.
            replicas: how many there are.
            extras: averaged with the parameters, as they are, when these leave; donated.
            arrived: what `message` returned for fragments that are taken now. Others are sent now.
            turn: what happens after this step, where `step` is traced and the host knows it. None:
                each decision is a branch.
            weight: of this replica, in what leaves now, if the schedule is `weighted`: a number or
                a scalar array.
            finite: to which a boolean scalar is added for each outer step: whether it was taken,
                since all in it was finite. For drivers whose branches are Python's.

        Returns:
            Parameters, state and extras after the step. Where nothing was due they are the given
            ones. A parameter may be the very array
            of its outer parameters: copy it before the state is donated again. Replicas that
                averaged together hold the same bits.
        """
        specs = self._specs(ops, params)
        parts = self.parts(specs)
        levels = self.levels(replicas)
        owned = extras or {}
        weight = weight_of(ops, weight) if self.weighted else None
        memory = {n: dict(m) for n, m in state.tensors.items()}
        after: dict[str, Any] = {"params": {}, "shared": {}, "extras": {}}
        for number, names in enumerate(parts):
            prefix = f"{number}/"
            tensors = {n: memory[n] for n in names if n in memory}
            mine: dict[str, Any] = {
                "params": {n: params[n] for n in names},
                "tensors": tensors,
                "shared": {
                    k: x
                    for k, x in (state.shared | after["shared"]).items()
                    if k in COUNTS or k.startswith(prefix)
                },
                "extras": {
                    o: dict(x)
                    for o, x in owned.items()
                    if o in names or (number == 0 and o not in params)
                },
            }
            came = (arrived or {}).get(number)
            fragment = _Fragment(
                self, ops, number, levels, step, specs, replicas, came, turn, weight, finite
            )
            done = await fragment.run(mine)
            for name, changed in done["tensors"].items():
                memory[name] = memory[name] | changed
            for kind, values in after.items():
                values |= done[kind]  # counts among them, which go on from fragment to fragment
        moved = {name: after["params"][name] for name in params}
        if self.has_outer and len(parts) > 1:
            outer = {n: memory[n][OUTER] for n in params}
            moved = await self._whole_again(ops, moved, outer, step, levels[0].period, turn)
        return (
            moved,
            State(after["shared"], memory),
            {owner: after["extras"][owner] for owner in owned},
        )

    async def _whole_again(
        self,
        ops: Ops[A],
        params: dict[str, A],
        outer: dict[str, A],
        step: Any,
        period: int,
        turn: Turn | None,
    ) -> dict[str, A]:
        """Make a replica that has broken, where a fragment has its turn among all, go back to its
        outer parameters with all of them: with those alone that are averaged now the next gradient
        would break them again."""

        async def looked_at(v: dict[str, dict[str, A]]) -> dict[str, A]:
            ok: Any = ops.all_finite(*v["params"].values())
            return {
                n: ops.where(ok, x, ops.cast(v["outer"][n], ops.dtype_of(x)))
                for n, x in v["params"].items()
            }

        async def as_they_are(v: dict[str, dict[str, A]]) -> dict[str, A]:
            return v["params"]

        if turn is None:
            due = functools.reduce(
                operator.or_, [self.due(step, period, f) for f in range(self.fragments)]
            )
        else:
            due = any(of == period for of, _ in turn.due)
        return await branch(due, looked_at, as_they_are, {"params": params, "outer": outer})

    @property
    def _algorithm(self) -> Algorithm:
        return AllReduce() if self.compressor is None else self.compressor

    @functools.cached_property
    def _compressed_of(self) -> dict[tuple[tuple[str, Spec], ...], frozenset[str]]:
        return {}

    def _compressed(self, specs: Mapping[str, Spec]) -> frozenset[str]:
        """Names of compressed parameters, including those with empty memory. Found once for a
        model: it takes as long as a small step."""
        key = tuple(specs.items())
        if key not in self._compressed_of:
            self._compressed_of[key] = frozenset(self._algorithm.init(AbstractOps(), specs).tensors)
        return self._compressed_of[key]

    def outer_parameters(self, state: State[A]) -> dict[str, A]:
        """The outer parameters in a memory, by name. Raises ValueError: plain averaging has
        none."""
        if not self.has_outer:
            raise ValueError(
                f"{self!r} averages parameters themselves, and has no outer parameters: evaluate"
                " their mean, after an average of all replicas"
            )
        return {name: kept[OUTER] for name, kept in state.tensors.items() if OUTER in kept}

    def kept(self, specs: Mapping[str, Spec]) -> dict[str, Spec]:
        """Parameters as their differences are kept, and given to the compressor: as plain shapes,
        in `state_dtype`."""
        return {n: Spec(tuple(s.shape), self.state_dtype or s.dtype) for n, s in specs.items()}

    def _specs(self, ops: Ops[A], params: Mapping[str, A]) -> dict[str, Spec]:
        return self.kept({n: Spec(tuple(x.shape), ops.dtype_of(x)) for n, x in params.items()})

    def _copied(self, ops: Ops[A], x: A) -> A:
        dtype = self.state_dtype or ops.dtype_of(x)
        return ops.add(ops.zeros(tuple(x.shape), dtype), ops.cast(x, dtype))


def diloco(
    period: int,
    *,
    lr: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool | None = None,
    outer: OuterOptimizer | Callable[..., Any] | None = None,
    **options: Any,
) -> LocalSGD:
    """DiLoCo: local steps with an optimizer of one's own (AdamW in the paper), and an outer one on
    the averaged difference.

    Examples:
        >>> from gradwire import diloco
        >>> diloco(500)
        LocalSGD(period=500, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True))
        >>> diloco(500, momentum=0.0).outer
        OuterSGD(lr=0.7, momentum=0.0, nesterov=False)

    Args:
        period: H, 500 in the paper.
        lr: learning rate of the outer optimizer, see `OuterSGD`.
        momentum: of the outer optimizer; 0 keeps no velocity.
        nesterov: look ahead. None: True where there is momentum.
        outer: another outer optimizer in place of these three, see `LocalSGD`.
        **options: of `LocalSGD`: `start_step`, `fragments` (Streaming DiLoCo), `compressor`, …

    Raises:
        TypeError: for `outer` and what describes an outer optimizer as well.
        ValueError: see `OuterSGD` and `LocalSGD`.
    """
    if outer is not None:
        if (lr, momentum, nesterov) != (0.7, 0.9, None):
            raise TypeError(
                f"outer={outer!r} with lr=, momentum= or nesterov=, which describe another outer"
                " optimizer; leave one of them out"
            )
        return LocalSGD(period, outer=outer, **options)
    sgd = OuterSGD(lr, momentum)
    return LocalSGD(
        period,
        outer=replace(sgd, nesterov=sgd.momentum > 0 if nesterov is None else nesterov),
        **options,
    )


@dataclass(frozen=True)
class _Fragment:
    """Some parameters that are averaged at the same steps. `values` are nested dictionaries, as
    both sides of a branch must return."""

    local: LocalSGD
    ops: Ops[Any]
    number: int
    levels: tuple[Level, ...]
    step: Any
    specs: Mapping[str, Spec]
    replicas: int
    arrived: Stepped[Any] | None
    turn: Turn | None
    weight: Any
    finite: list[Any] | None = None

    async def run(self, values: dict[str, Any]) -> dict[str, Any]:
        local = self.local

        async def capture(v: dict[str, Any]) -> dict[str, Any]:
            # The last step in which all replicas did the same: what they have now is where their
            # own ways begin.
            copies = {
                n: v["tensors"][n] | {OUTER: local._copied(self.ops, x)}
                for n, x in v["params"].items()
            }
            return v | {"tensors": v["tensors"] | copies}

        if local.overlap:
            arrives = (
                local.due(self.step - local.overlap, self.levels[0].period, self.number)
                if self.turn is None
                else self.number in self.turn.arrives
            )
            values = await branch(arrives, self._arrive, _unchanged, values)
        if not (local.has_outer and local.start_step):
            return await self._from_level(0)(values)
        begins = self.step == local.start_step - 1 if self.turn is None else self.turn.begins
        return await branch(begins, capture, self._from_level(0), values)

    def _from_level(self, i: int) -> Callable[[dict[str, Any]], Program[dict[str, Any]]]:
        """What this level does if it is due, else the smaller ones."""

        async def this(v: dict[str, Any]) -> dict[str, Any]:
            if i or not self.local.has_outer:
                return await self._plain(v, self.levels[i].groups)
            if self.local.eager:
                return await self._eager(v)
            return await (self._leave(v) if self.local.overlap else self._outer_step(v))

        async def ask_each(v: dict[str, Any]) -> dict[str, Any]:
            if i == len(self.levels):
                return v
            period = self.levels[i].period
            due = (
                self.local.due(self.step, period, self.number)
                if self.turn is None
                else (period, self.number) in self.turn.due
            )
            return await branch(due, this, self._from_level(i + 1), v)

        return ask_each

    async def _plain(self, v: dict[str, Any], groups: Groups | None) -> dict[str, Any]:
        sent: Program[Any] = mean_alongside(self.ops, v["params"], v["extras"], groups)
        params, extras = await (
            Weighing(self.ops, self.weight, keeps=True).run(sent) if self.local.weighted else sent
        )
        return v | {"params": params, "extras": extras}

    async def _extras(self, v: dict[str, Any]) -> Any:
        return (await self._plain({"params": {}, "extras": v["extras"]}, None))["extras"]

    # ---- averages of differences from the outer parameters

    async def _outer_step(self, v: dict[str, Any]) -> dict[str, Any]:
        """All of it after one step."""
        differences = self._differences(v)
        tensors = {
            n: m | self._sent(differences[n]) if n in differences else m
            for n, m in v["tensors"].items()
        }
        sent = self._exchange(tensors, v["shared"], self._round())
        averaged, extras = cast(Any, await together([sent, self._extras(v)]))
        return self._applied(v, averaged) | {"extras": extras}

    async def _leave(self, v: dict[str, Any]) -> dict[str, Any]:
        """The difference is kept, and is on its way from now on."""
        kept = {
            n: v["tensors"][n] | self._sent(x)
            for n, x in self._looked_at(self._differences(v)).items()
        }
        return v | {"tensors": v["tensors"] | kept, "extras": await self._extras(v)}

    async def _arrive(self, v: dict[str, Any]) -> dict[str, Any]:
        averaged = self.arrived
        if averaged is None:
            averaged = await self._exchange(
                v["tensors"], v["shared"], self._round(self.local.overlap)
            )
        applied = self._applied(v, averaged)
        # Nothing is on its way any more, and a difference that was not finite stays in no state.
        none = {
            n: {DIFFERENCE: _zeros_like(self.ops, applied["tensors"][n][DIFFERENCE])}
            for n in v["params"]
        }
        return applied | {
            "tensors": {n: m | none.get(n, {}) for n, m in applied["tensors"].items()}
        }

    async def _eager(self, v: dict[str, Any]) -> dict[str, Any]:
        """The average of the last differences arrives, and the new ones leave. Each replica knows
        its own already."""
        ops, index = self.ops, self._round()
        differences = self._differences(v)
        own = ops.all_finite(*differences.values())
        now = {n: ops.where(own, x, _zeros_like(ops, x)) for n, x in differences.items()}
        before = {
            n: {k: v["tensors"][n][k] for k in (DIFFERENCE, WEIGHT) if k in v["tensors"][n]}
            for n in now
        }
        memory = {n: _compressors(m) for n, m in v["tensors"].items()}

        async def nothing(kept: Any) -> Any:
            total = await Weighing(ops, self.weight).whole() if self.local.weighted else None
            return (
                {n: _zeros_like(ops, m[DIFFERENCE]) for n, m in before.items()},
                kept,
                (self.weight, total),
            )

        async def received(kept: Any) -> Any:
            if self.arrived is not None:
                averages, state = self.arrived
            else:
                tensors = {n: m | before.get(n, {}) for n, m in kept["tensors"].items()}
                averages, state = await self._exchange(tensors, kept["shared"], index - 1)
            shared = {f"{self.number}/{key}": x for key, x in state.shared.items() if key != TOTAL}
            counted = (
                next((m[WEIGHT] for m in before.values() if WEIGHT in m), None),
                state.shared.get(TOTAL),
            )
            return averages, {"tensors": kept["tensors"] | state.tensors, "shared": shared}, counted

        given = {
            "tensors": memory,
            "shared": {k: x for k, x in v["shared"].items() if k not in COUNTS},
        }
        first = index == 0 if self.turn is None else self.number not in self.turn.later
        (averages, kept, counted), extras = cast(
            Any, await together([branch(first, nothing, received, given), self._extras(v)])
        )
        added = {n: self._own_share(x, *counted) for n, x in now.items()}
        corrected = {
            n: ops.add(x, ops.add(added[n], times(ops, v["tensors"][n][ADDED], -1.0)))
            for n, x in averages.items()
        }
        shared = {key.removeprefix(f"{self.number}/"): x for key, x in kept["shared"].items()}
        applied = self._applied(v, (corrected, State(shared, kept["tensors"])), own, added)
        after = {
            n: m | (self._sent(now[n]) if n in now else {}) for n, m in applied["tensors"].items()
        }
        return applied | {"tensors": after, "extras": extras}

    def _own_share(self, x: Any, weight: Any, total: Any) -> Any:
        """What `x` of this replica, of so much of the total weight, adds to an average."""
        ops, dtype = self.ops, self.ops.dtype_of(x)
        if total is None:
            return times(ops, x, 1.0 / self.replicas)
        wide = wide_dtype(dtype)
        share = ops.divide(ops.cast(weight, wide), ops.cast(total, wide))
        return ops.cast(ops.multiply(ops.cast(x, wide), share), dtype)

    def _sent(self, difference: Any) -> dict[str, Any]:
        """What is remembered of a difference that leaves."""
        return {DIFFERENCE: difference} | ({WEIGHT: self.weight} if self.local.weighted else {})

    def _looked_at(self, differences: dict[str, Any]) -> dict[str, Any]:
        """Zeros in place of what an absent replica has, if that is not finite: nobody is told of
        it, and a state that holds it would be refused."""
        if not self.local.weighted:
            return differences
        ops, finite = self.ops, self.ops.all_finite(*differences.values())
        return {
            n: ops.where(self.weight > 0, x, ops.where(finite, x, _zeros_like(ops, x)))
            for n, x in differences.items()
        }

    def _round(self, ago: int = 0) -> Any:
        return self.local.round(self.step - ago, self.levels[0].period, self.number)

    def _differences(self, v: dict[str, Any]) -> dict[str, Any]:
        ops = self.ops
        outers = {n: v["tensors"][n][OUTER] for n in v["params"]}
        return {
            n: ops.add(outers[n], ops.cast(x, ops.dtype_of(outers[n])) * -1.0)
            for n, x in v["params"].items()
        }

    async def _exchange(
        self, tensors: Mapping[str, Any], shared: Mapping[str, Any], index: Any
    ) -> Stepped[Any]:
        return await _exchange(
            self.local, self.ops, self.specs, self.number, tensors, shared, index
        )

    def _applied(
        self,
        v: dict[str, Any],
        averaged: Stepped[Any],
        own: Any = None,
        added: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What averaged differences make of outer and own parameters; nothing where they are not
        finite. Where this replica's `own` are not, it goes on from the outer parameters. `added`:
        what averages hold of an eager one's own."""
        local, ops = self.local, self.ops
        tensors: dict[str, dict[str, Any]] = v["tensors"]
        averages, memory = averaged
        params, after = (
            {},
            {n: m | memory.tensors.get(n, {}) for n, m in tensors.items() if n not in averages},
        )
        outers = {n: tensors[n][OUTER] for n in averages}
        remembered = {
            n: {key: x for key, x in tensors[n].items() if is_optimizers(key)} for n in averages
        }
        moved, remembers = local.optimizer.step(ops, outers, averages, remembered)
        # Of averages and what comes of them, so every replica finds the same. What is finite may
        # overflow where it is added up, or as a parameter.
        results = [
            *averages.values(),
            *(ops.cast(x, ops.dtype_of(v["params"][n])) for n, x in moved.items()),
        ]
        results += [
            x
            for m in remembers.values()
            for key, x in m.items()
            if key not in local.optimizer.infinite and ops.dtype_of(x) in FLOATS
        ]
        ok = ops.all_finite(*results)
        if self.finite is not None:
            self.finite.append(ok)
        mine = ok if own is None else ok & own
        for name, outer in outers.items():
            kept, x, new = tensors[name], v["params"][name], moved[name]
            merged = self._merged(x, new, outer, kept.get(DIFFERENCE))
            after[name] = (
                kept | memory.tensors.get(name, {}) | {OUTER: ops.where(ok, new, outer, out=outer)}
            )
            if added is not None:
                after[name][ADDED] = ops.where(ok, added[name], kept[ADDED], out=kept[ADDED])
            for key, old in remembered[name].items():
                after[name][key] = ops.where(ok, remembers[name][key], old, out=old)
            back = ops.cast(after[name][OUTER], ops.dtype_of(x))
            if (
                merged is not None and local.weighted
            ):  # the others have not heard of what is not finite on an absent replica
                back = ops.where(
                    mine & ops.all_finite(merged), ops.cast(merged, ops.dtype_of(x)), back
                )
            elif merged is not None:
                back = ops.where(mine, ops.cast(merged, ops.dtype_of(x)), back)
            params[name] = back
        shared = {f"{self.number}/{key}": x for key, x in memory.shared.items()}
        if counts := {key: x for key, x in v["shared"].items() if key in COUNTS}:
            shared[ARRIVED] = counts[ARRIVED] + 1
            shared[REFUSED] = ops.where(mine, counts[REFUSED], counts[REFUSED] + 1)
        return v | {"params": params, "tensors": after, "shared": shared}

    def _merged(self, x: Any, new: Any, outer: Any, difference: Any) -> Any:
        """The parameters that go on from new outer parameters; None: these themselves."""
        local, ops = self.local, self.ops
        merge = (0.5 if local.overlap else 0.0) if local.merge is None else local.merge
        if merge == 0 or (merge == "progress" and not local.overlap):
            return None
        mine = ops.cast(x, ops.dtype_of(new))
        if merge == "progress":
            return ops.add(new, ops.add(ops.add(mine, difference), times(ops, outer, -1.0)))
        return ops.add(times(ops, mine, float(merge)), times(ops, new, 1.0 - float(merge)))


async def _exchange(
    local: LocalSGD,
    ops: Ops[Any],
    specs: Mapping[str, Spec],
    number: int,
    tensors: Mapping[str, Mapping[str, Any]],
    shared: Mapping[str, Any],
    index: Any,
) -> Stepped[Any]:
    """The average of a fragment's differences, and the compressor's memory after it."""
    compressed, prefix = local._compressed(specs), f"{number}/"
    # What has left may have to be sent again, by a run that goes on from a checkpoint: the
    # compressor is given a copy.
    differences = {n: m[DIFFERENCE] for n, m in tensors.items() if DIFFERENCE in m}
    if local.delayed:
        differences = dict(zip(differences, ops.copies(list(differences.values())), strict=True))
    memory: State[Any] = State(
        {key.removeprefix(prefix): x for key, x in shared.items() if key.startswith(prefix)},
        {n: _compressors(m) for n, m in tensors.items() if n in compressed},
    )
    program: Step = local._algorithm.step
    if apart := [n for n in split_by_direction(local.radial, specs) if n in differences]:
        program = averaged_by_direction(program, apart)
    if not local.weighted:
        return await program(ops, differences, memory, index)
    weight = next(m[WEIGHT] for m in tensors.values() if WEIGHT in m)
    weighing = Weighing(ops, weight, name=repr(local._algorithm))
    averages, after = await weighed(
        weighing,
        lambda own: program(ops, differences, own, index),
        memory,
        local._algorithm.per_replica,
    )
    if local.eager:
        after.shared[TOTAL] = await weighing.whole()
    return averages, after


async def _unchanged(v: dict[str, Any]) -> dict[str, Any]:
    return v


def _compressors(memory: Mapping[str, Any]) -> dict[str, Any]:
    """The compressors' state, without what local SGD itself remembers."""
    return {key: x for key, x in memory.items() if not _is_own(key)}


def _is_own(key: str) -> bool:
    return key in (OUTER, DIFFERENCE, WEIGHT, ADDED) or is_optimizers(key)


def _zeros_like(ops: Ops[A], x: A) -> A:
    return ops.zeros(tuple(x.shape), ops.dtype_of(x))
