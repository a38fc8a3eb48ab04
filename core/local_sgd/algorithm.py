"""Local SGD: replicas train by themselves and average their parameters now and then, plainly or by an outer optimizer (DiLoCo).

    LocalSGD(period=8)                                    # average the parameters after every 8th step
    LocalSGD(period=8, start_step=1000, subgroup="node")  # post-local SGD (Lin et al. 2018, arXiv 1808.07217)
    LocalSGD(period={8: 4, "all": 32})                    # hierarchical
    diloco(period=500)                                    # DiLoCo (Douillard et al. 2023, arXiv 2311.08105)
    diloco(period=500, fragments=5)                       # its parameters in five parts, one after every 100th step

A driver runs two coroutines in each step: that of `gradients(replicas)` on the gradients, an `Algorithm` like any other, and after the
optimizer's update `average` on the parameters. Both count the same steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from gradwire.core.algorithm import Algorithm, State, Stepped, check_specs, require_algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.two_level import require_nodes
from gradwire.core.kernels.abstract import AbstractOps
from gradwire.core.local_sgd.outer import OuterSGD
from gradwire.core.local_sgd.schedule import Level, Schedule
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec
from gradwire.core.protocol import branch, mean_each, together
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import Program

ANCHOR = "anchor"
VELOCITY = "velocity"

#: Averaged along with parameters, as it is: owner → name → array. What a parameter owns (its optimizer's moments) goes with its
#: fragment, everything else (buffers, under any name) with the first.
Extras = Mapping[str, Mapping[str, A]]


@dataclass(frozen=True)
class LocalGradients:
    """The gradients' half of local SGD, an `Algorithm`: averaged over all replicas until the schedule's start, then over its subgroups,
    or left as they are. Afterwards gradients differ between replicas, or between subgroups."""

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

    async def step(self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any) -> Stepped[A]:
        subgroups = self.schedule.subgroups(self.replicas)

        async def everywhere(g: dict[str, A]) -> dict[str, A]:
            return await mean_each(g, watched=False)

        async def in_subgroups(g: dict[str, A]) -> dict[str, A]:
            if subgroups is None:
                return g
            return await mean_each(g, watched=False, groups=subgroups if len(subgroups) > 1 else None)

        warming_up = False if self.start_step == 0 else step < self.start_step
        return await branch(warming_up, everywhere, in_subgroups, dict(gradients)), state


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSGD(Schedule):
    """Local SGD in all its forms. See `Schedule` for who averages what and when.

    With an outer optimizer or a compressor, what all replicas average is not their parameters but how far these have come from an *anchor*,
    the parameters of the last such average, and the result moves the anchor. Smaller groups of a hierarchy always average parameters
    as they are: the anchor belongs to all replicas, so only what all of them agree on can move it.

    If a difference holds inf or NaN on one replica, all replicas return to the anchor, and nothing else changes. Without an anchor there
    is nothing to return to: plain averaging makes all replicas non-finite.

    Examples:
        >>> from gradwire import AllReduce, LocalSGD, plan
        >>> plan({"w": (512, 512)}, LocalSGD(8)).compression_ratio
        8.0
        >>> LocalSGD({2: 4, 8: 16}, start_step=1000, subgroup=2)
        LocalSGD(period={2: 4, 8: 16}, start_step=1000, subgroup=2)

    Args:
        period: H, steps from one average of the parameters to the next; or a hierarchy, `{2: 2, 8: 16}`. See `Schedule`.
        start_step: K, number of steps that average gradients over all replicas first.
        subgroup: who averages gradients from step K on. None: each replica steps on its own gradient.
        fragments: cut the parameters in so many parts, which are averaged at evenly spaced steps of a period.
        outer: what is made of the averaged difference; None: it is subtracted, which is plain averaging.
        compressor: how differences are averaged: any algorithm, with its error feedback. Its own `start_step` counts averages, and each
            fragment has its own. None: as they are.
        state_dtype: dtype of anchor, velocity and differences (and so of what is sent, see `WireDtype`). None: that of the parameter.

    Raises:
        ValueError: naming the option, its value and the fix.
    """

    outer: OuterSGD | None = None
    compressor: Algorithm | None = None
    state_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_dtype is not None and self.state_dtype not in ITEMSIZE:
            raise ValueError(f"state_dtype={self.state_dtype!r} is not one of {', '.join(ITEMSIZE)}, or None")
        if self.state_dtype is not None and not self.anchored:
            raise ValueError(
                f"state_dtype={self.state_dtype!r}, but plain averaging keeps no state; leave it out, or give an outer optimizer"
            )
        if self.outer is not None and not isinstance(self.outer, OuterSGD):
            raise TypeError(
                f"outer is a {type(self.outer).__name__}: give OuterSGD(lr, momentum, nesterov), which works on averaged differences in every "
                "framework, in place of an optimizer of one of them"
            )
        if self.compressor is not None and not isinstance(self.compressor, Schedule):
            require_algorithm(self.compressor, "compressor")
        if isinstance(self.compressor, Schedule):
            raise TypeError(
                f"compressor={self.compressor!r} must average what it is given at once; PowerSGD(rank=4) does"
            )

    @property
    def mentions_nodes(self) -> bool:
        """Whether "node" is to be replaced, in the schedule or in the compressor; see `on_nodes_of`."""
        return super().mentions_nodes or bool(getattr(self.compressor, "mentions_nodes", False))

    def on_nodes_of(self, size: int) -> Self:
        """The same with "node" replaced by `size`, the number of replicas on each machine. Raises ValueError as the class does."""
        on_nodes = super().on_nodes_of(size)
        replaced = getattr(self.compressor, "on_nodes_of", None)
        return on_nodes if replaced is None else replace(on_nodes, compressor=replaced(size))

    @property
    def anchored(self) -> bool:
        """Whether differences from an anchor are averaged, and not the parameters themselves."""
        return self.outer is not None or self.compressor is not None

    @property
    def per_replica(self) -> frozenset[str]:
        """Names of the memories that differ between replicas; anchor and velocity do not."""
        return frozenset() if self.compressor is None else self.compressor.per_replica

    def gradients(self, replicas: int) -> LocalGradients:
        """What to do with gradients. Raises ValueError if the schedule does not fit so many replicas."""
        self.levels(replicas), self.subgroups(replicas)
        return LocalGradients(self, replicas)

    def init(self, ops: Ops[A], params: Mapping[str, A], replicas: int) -> State[A]:
        """The memory before the first step.

        Args:
            ops: kernels.
            params: parameter name → array, equal on all replicas. Not donated.
            replicas: how many there are.

        Returns:
            Of each parameter the `anchor` (a copy of it), the `velocity` if the outer optimizer has momentum, and what the compressor
            keeps; of the whole, the compressor's shared state, `{fragment}/{name}`. Empty for plain averaging.

        Raises:
            ValueError: a schedule that does not fit so many replicas or parameters, or whatever the compressor refuses, by name.
        """
        self.gradients(replicas)
        require_nodes(self.compressor, replicas)
        specs = self._specs(ops, params)
        check_specs(specs)
        parts = self.parts(specs)
        if not self.anchored:
            return State()
        algorithm = self._algorithm
        memory = algorithm.init(ops, specs)
        state: State[A] = State()
        for number in range(len(parts)):
            # Each fragment's steps are its own, so none shares a counter with another.
            own = memory if number == 0 else algorithm.init(ops, specs)
            state.shared |= {f"{number}/{key}": x for key, x in own.shared.items()}
        for name, x in params.items():
            kept = memory.tensors.get(name, {})
            if taken := kept.keys() & {ANCHOR, VELOCITY}:
                raise ValueError(
                    f"compressor {algorithm!r} keeps a memory called {min(taken)!r}, as local SGD does; rename it"
                )
            state.tensors[name] = {ANCHOR: self._copied(ops, x), **kept}
            if self.outer is not None and self.outer.momentum:
                state.tensors[name][VELOCITY] = ops.zeros(specs[name].shape, specs[name].dtype)
        state.tensors |= {name: kept for name, kept in memory.tensors.items() if name not in params}
        return state

    def acts(self, step: int, replicas: int) -> bool:
        """Whether `average` does anything at this step, for drivers that know the number and can save themselves the call."""
        if self.anchored and step == self.start_step - 1:
            return True
        periods = [level.period for level in self.levels(replicas)]
        return any(self.due(step, period, fragment) for period in periods for fragment in range(self.fragments))

    async def average(
        self,
        ops: Ops[A],
        params: Mapping[str, A],
        state: State[A],
        step: Any,
        replicas: int,
        extras: Extras[A] | None = None,
    ) -> tuple[dict[str, A], State[A], dict[str, dict[str, A]]]:
        """What happens to the parameters after the optimizer's update of one step.

        Args:
            ops: kernels of the arrays' framework.
            params: name → this replica's parameter, of the whole model, donated.
            state: from `init` or the step before, donated.
            step: number of steps before this one, an int or a traced int32 scalar. The same for the gradients of this step.
            replicas: how many there are.
            extras: averaged with the parameters, as they are; donated.

        Returns:
            Parameters, state and extras after the step. Where nothing was due they are the given ones. A parameter may be the very array
            of its anchor: copy it before the state is donated again. Replicas that averaged together hold the same bits.
        """
        specs = self._specs(ops, params)
        parts = self.parts(specs)
        levels = self.levels(replicas)
        owned = extras or {}
        memory = {n: dict(m) for n, m in state.tensors.items()}
        after: dict[str, Any] = {"params": {}, "shared": {}, "extras": {}}
        for number, names in enumerate(parts):
            prefix = f"{number}/"
            tensors = {n: memory[n] for n in names if n in memory}
            mine: dict[str, Any] = {
                "params": {n: params[n] for n in names},
                "tensors": tensors,
                "shared": {k: x for k, x in state.shared.items() if k.startswith(prefix)},
                "extras": {o: dict(x) for o, x in owned.items() if o in names or (number == 0 and o not in params)},
            }
            fragment = _Fragment(self, ops, number, levels, step, specs)
            done = await fragment.run(mine)
            for name, changed in done["tensors"].items():
                memory[name] = memory[name] | changed
            for kind, values in after.items():
                values |= done[kind]
        return (
            {name: after["params"][name] for name in params},
            State(after["shared"], memory),
            {owner: after["extras"][owner] for owner in owned},
        )

    @property
    def _algorithm(self) -> Algorithm:
        return AllReduce() if self.compressor is None else self.compressor

    @functools.cached_property
    def _compressed_of(self) -> dict[tuple[tuple[str, Spec], ...], frozenset[str]]:
        return {}

    def _compressed(self, specs: Mapping[str, Spec]) -> frozenset[str]:
        """Of which parameters the compressor has a memory, be it empty. Found once for a model: it takes as long as a small step."""
        key = tuple(specs.items())
        if key not in self._compressed_of:
            self._compressed_of[key] = frozenset(self._algorithm.init(AbstractOps(), specs).tensors)
        return self._compressed_of[key]

    def _specs(self, ops: Ops[A], params: Mapping[str, A]) -> dict[str, Spec]:
        return {n: Spec(tuple(x.shape), self.state_dtype or ops.dtype_of(x)) for n, x in params.items()}

    def _copied(self, ops: Ops[A], x: A) -> A:
        dtype = self.state_dtype or ops.dtype_of(x)
        return ops.add(ops.zeros(tuple(x.shape), dtype), ops.cast(x, dtype))


def diloco(
    period: int, *, lr: float = 0.7, momentum: float = 0.9, nesterov: bool | None = None, **options: Any
) -> LocalSGD:
    """DiLoCo: local steps with an optimizer of one's own (AdamW in the paper), and an outer one on the averaged difference.

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
        **options: of `LocalSGD`: `start_step`, `fragments` (Streaming DiLoCo), `compressor`, …

    Raises:
        TypeError: for `outer`, which the other arguments describe.
        ValueError: see `OuterSGD` and `LocalSGD`.
    """
    if "outer" in options:
        raise TypeError(
            f"outer={options['outer']!r}: diloco makes its outer optimizer from lr=, momentum= and nesterov=. With another one it is "
            "LocalSGD(period, outer=OuterSGD(…))"
        )
    return LocalSGD(period, outer=OuterSGD(lr, momentum, bool(momentum) if nesterov is None else nesterov), **options)


@dataclass(frozen=True)
class _Fragment:
    """Some parameters that are averaged at the same steps. `values` are nested dictionaries, as both sides of a branch must return."""

    local: LocalSGD
    ops: Ops[Any]
    number: int
    levels: tuple[Level, ...]
    step: Any
    specs: Mapping[str, Spec]

    async def run(self, values: dict[str, Any]) -> dict[str, Any]:
        local = self.local

        async def capture(v: dict[str, Any]) -> dict[str, Any]:
            # The last step in which all replicas did the same: what they have now is where their own ways begin.
            copies = {n: v["tensors"][n] | {ANCHOR: local._copied(self.ops, x)} for n, x in v["params"].items()}
            return v | {"tensors": v["tensors"] | copies}

        if not (local.anchored and local.start_step):
            return await self._from_level(0)(values)
        return await branch(self.step == local.start_step - 1, capture, self._from_level(0), values)

    def _from_level(self, i: int) -> Callable[[dict[str, Any]], Program[dict[str, Any]]]:
        """What this level does if it is due, else the smaller ones."""

        async def this(v: dict[str, Any]) -> dict[str, Any]:
            if i == 0 and self.local.anchored:
                return await self._outer_step(v)
            return await self._plain(v, self.levels[i].groups)

        async def ask_each(v: dict[str, Any]) -> dict[str, Any]:
            if i == len(self.levels):
                return v
            due = self.local.due(self.step, self.levels[i].period, self.number)
            return await branch(due, this, self._from_level(i + 1), v)

        return ask_each

    async def _plain(self, v: dict[str, Any], groups: Groups | None) -> dict[str, Any]:
        flat = {("params", n, ""): x for n, x in v["params"].items()}
        flat |= {("extras", owner, key): x for owner, owned in v["extras"].items() for key, x in owned.items()}
        averages = await mean_each(flat, watched=False, groups=groups)
        return v | {
            "params": {n: averages["params", n, ""] for n in v["params"]},
            "extras": {o: {k: averages["extras", o, k] for k in owned} for o, owned in v["extras"].items()},
        }

    async def _outer_step(self, v: dict[str, Any]) -> dict[str, Any]:
        local, ops, prefix = self.local, self.ops, f"{self.number}/"
        tensors: dict[str, dict[str, Any]] = v["tensors"]
        differences = {}
        for name, x in v["params"].items():
            anchor = tensors[name][ANCHOR]
            differences[name] = ops.add(anchor, ops.cast(x, ops.dtype_of(anchor)) * -1.0)
        compressed = local._compressed(self.specs)
        memory: State[Any] = State(
            {key.removeprefix(prefix): x for key, x in v["shared"].items()},
            {n: _compressors(m) for n, m in tensors.items() if n in compressed},
        )
        index = local.round(self.step, self.levels[0].period, self.number)
        together_with: list[Program[Any]] = [local._algorithm.step(ops, differences, memory, index)]
        together_with.append(self._plain({"params": {}, "extras": v["extras"]}, None))
        (averages, memory), rest = cast(Any, await together(together_with))

        # Of averages, so every replica finds the same.
        finite = [ops.all_finite(x) for x in averages.values()]
        ok = functools.reduce(lambda a, b: a & b, finite) if finite else None
        params, after = {}, {n: memory.tensors.get(n, m) for n, m in tensors.items() if n not in averages}
        for name, average in averages.items():
            anchor, velocity = tensors[name][ANCHOR], tensors[name].get(VELOCITY)
            new, speed = (local.outer or OuterSGD()).update(ops, anchor, average, velocity)
            after[name] = {ANCHOR: ops.where(ok, new, anchor, out=anchor), **memory.tensors.get(name, {})}
            if velocity is not None:
                after[name][VELOCITY] = ops.where(ok, speed, velocity, out=velocity)
            params[name] = ops.cast(after[name][ANCHOR], ops.dtype_of(v["params"][name]))
        shared = {f"{prefix}{key}": x for key, x in memory.shared.items()}
        return {"params": params, "tensors": after, "shared": shared, "extras": rest["extras"]}


def _compressors(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Without what local SGD itself remembers."""
    return {key: x for key, x in memory.items() if key not in (ANCHOR, VELOCITY)}
