"""Local SGD in JAX: an optimizer of which every replica has its own, and parameters that are
averaged now and then.

    tx = local_sgd(optax.sgd(0.1), LocalSGD(8, start_step=1000), axis_name="data")
    state = per_replica(TrainState.create(apply_fn=model.apply, params=params, tx=tx))
    state = replicate(state, axis_name="data")

    def train_step(state, batch):
        mine = this_replica(state)
        loss, gradients = jax.value_and_grad(loss_fn)(mine.params, batch)
        mine = mine.apply_gradients(grads=gradients)
        params, opt_state = tx.average_params(mine.params, mine.opt_state)
        mine = mine.replace(params=params, opt_state=opt_state)
        return stack_replicas(mine), jax.lax.pmean(loss, "data")

    train_step = jax.pmap(train_step, axis_name="data", donate_argnums=0)
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, cast

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import lax

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.two_level import levels_of, without_levels
from gradwire.core.local_sgd.algorithm import ARRIVED, COUNTS, OUTER, REFUSED, LocalSGD
from gradwire.core.local_sgd.algorithm import diloco as diloco_of
from gradwire.core.local_sgd.outer import OuterFactory
from gradwire.core.local_sgd.schedule import Turn
from gradwire.core.local_sgd.turns import acts, all_turns, is_of_another_step
from gradwire.core.ops import Spec
from gradwire.core.plan.advice import warn, warn_of_few_rounds
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.plan.local_sgd import local_stages, stage_starts
from gradwire.core.plan.traffic import LevelBytes
from gradwire.core.protocol.settings import require_settings, with_settings
from gradwire.core.protocol.weights import weight_of
from gradwire.core.text.options import OWN_CHECK, AtLeast1, checked
from gradwire.core.text.wording import some
from gradwire.jax_backend.axes.auto_axes import left_to_the_compiler, whole_memory
from gradwire.jax_backend.axes.mapped_axis import (
    AxisName,
    agreed,
    axes_of,
    check_local,
    is_bound,
    require_axis,
    tracked,
    vary_if_tracked,
    varying_axes,
)
from gradwire.jax_backend.axes.outside_meshes import outside_meshes
from gradwire.jax_backend.axes.replica_groups import node_size
from gradwire.jax_backend.axes.two_levels import with_near_axis, with_numbers
from gradwire.jax_backend.checks import (
    check_configuration,
    check_leaves,
    check_requests,
    configuration_of,
    scalar_weight,
    transformation,
    warn_of_gathers,
)
from gradwire.jax_backend.engine.driver import drive
from gradwire.jax_backend.engine.pieces import in_pieces
from gradwire.jax_backend.engine.self_check import check_here
from gradwire.jax_backend.local_sgd import non_finite
from gradwire.jax_backend.local_sgd.forms import is_nnx, is_train_state, parts, with_parts
from gradwire.jax_backend.local_sgd.moments import Extra, Moments
from gradwire.jax_backend.local_sgd.outer import in_jax
from gradwire.jax_backend.ops.kernels import JaxOps
from gradwire.jax_backend.state.names import NamedTree, flatten, pure, specs_of, stacks_of
from gradwire.jax_backend.state.survey import survey
from gradwire.jax_backend.state.trees import pack, repack, shardings_like, unpack
from gradwire.jax_backend.state.types import (
    UNSAID,
    DataParallelState,
    LocalSGDState,
    PerReplica,
    Record,
    is_placed,
    on_devices,
    place_mark,
)
from gradwire.jax_backend.zero.state import ZeroState

OPS = JaxOps()

WhatOfMoments = Literal["keep", "average", "reset"]


class LocalOptimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """What `local_sgd` returns: an optax transformation, and the other half of a step,
    `average_params`."""

    @property
    def _halves(self) -> _Halves:
        """What these are methods of: a copy, a pickle and `_replace` have both or one of them, and
        nothing else."""
        for half in self:
            if isinstance(halves := getattr(half, "__self__", None), _Halves):
                return halves
        raise TypeError(
            f"{self!r} has neither the init nor the update of local_sgd; make it by local_sgd or"
            " diloco, and keep one of them"
        )

    def average_params(
        self,
        params: Any,
        state: Any,
        *extras: Any,
        turn: Turn | None = None,
        weight: Any = None,
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """Count a step, and average if it is time to: to be called in every training step, after
        the update, inside the map.

            params, opt_state = tx.average_params(params, opt_state)
            params, opt_state, batch_stats = tx.average_params(params, opt_state, batch_stats)

        Whether anything is sent is a `lax.cond` on the count, one for each fragment and level of
        the hierarchy. A message in a `lax.cond` overlaps with nothing, so a schedule with `overlap`
        is told its `turn`:

            step = jax.pmap(train_step, axis_name="data", static_broadcasted_argnums=0)
            for turn, batch in zip(tx.turns(state), batches):
                state, loss = step(turn, state, batch)

        Args:
            params: this replica's parameters, after `optax.apply_updates`.
            state: that `update` returned, or any tree that holds it (of an `optax.chain`, of
                `optax.MultiSteps`).
            *extras: trees whose floating arrays are averaged with the parameters, as they are:
                BatchNorm's statistics. Others stay.
            turn: that of this step, from `turns`, static: what is due is then decided while the
                step is compiled, once for each kind of step. A message stands in no branch, and
                nothing in the forward and backward pass waits for it. The turn of another step is
                taken as it is, counted in the state, and refused by `stats` and by what places or
                takes a state. None: decided in the program, by the count.
            weight: what this replica counts for in what leaves now, of a `weighted` schedule: a
                number or a scalar array, its tokens since the last average, 0 if it is absent.
                None: 1. Where all are 0, parameters that are averaged as they are stay so, and of
                differences all replicas return to the outer parameters.
            settings: name → what the compressor is told in this step where it awaits `setting`:
                numbers or scalar arrays, the same on every replica.

        Returns:
            The arguments after the step. Parameters that were averaged together have the same bits
            on all replicas that did so.

        Raises:
            NameError: outside any map over the axis.
            TypeError: `turn` is none.
            ValueError: the schedule does not fit the number of replicas; the state is in no tree
                given, or was not made for these parameters; parameters or state are not per
                replica; or `turn` is of another schedule.
            NotImplementedError: groups that JAX cannot sum in, see `local_sgd`.
        """
        after: tuple[Any, ...] = self._halves.average_params(
            params, state, extras, turn, weight, settings or {}
        )
        return after

    def step(
        self,
        gradients: Any,
        training: Any,
        *extras: Any,
        turn: Turn | None = None,
        weight: Any = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Any:
        """Both halves of a training step, so that none is forgotten: the optimizer's update, then
        `average_params`. Inside the map.

            params, opt_state = tx.step(gradients, (params, opt_state))
            state = tx.step(gradients, state)                              # a Flax TrainState
            model, optimizer = tx.step(gradients, (model, optimizer))      # of Flax nnx, in place
            state, batch_stats = tx.step(gradients, state, batch_stats)

        Args:
            gradients: of this replica, like the parameters.
            training: this replica's parameters and state; a `flax.training.train_state.TrainState`
                whose optimizer is this one, or an `optax.chain` with it; or an `nnx.Module` and its
                `nnx.Optimizer`.
            *extras: see `average_params`.
            turn: see `average_params`.
            weight: see `average_params`; of a schedule that averages gradients, theirs too.
            settings: see `average_params`.

        Returns:
            `training` after the step, and the extras if there are any.

        Raises:
            TypeError: `training` is none of these. Else as `update` and `average_params`.
        """
        told = {} if weight is None else {"weight": weight}
        if is_train_state(training):
            local = self._halves.local
            if told and (local.start_step or local.subgroup is not None):
                raise ValueError(
                    f"weight= with {local!r}, which averages gradients too, and a TrainState, whose"
                    " apply_gradients takes none; call tx.update(…, weight=…) and"
                    " tx.average_params(…, weight=…)"
                )
            training = training.apply_gradients(grads=gradients)
        elif not (isinstance(training, tuple) and len(training) == 2):
            raise TypeError(
                f"training is a {type(training).__name__}; give (params, opt_state), a TrainState,"
                " or (model, optimizer) of nnx"
            )
        elif is_nnx(training):
            model, optimizer = training
            optimizer.update(model, gradients, **told)
        else:
            params, opt_state = training
            updates, opt_state = self.update(gradients, opt_state, params, **told)
            training = optax.apply_updates(params, updates), opt_state
        params, opt_state, *others = self.average_params(
            *parts(training), *extras, turn=turn, weight=weight, settings=settings
        )
        after = with_parts(training, params, opt_state)
        return (after, *others) if extras else after

    def turn(self, step: int) -> Turn:
        """What the n-th call of `average_params` does, numbered from 0 in the first run of a
        training: hashable, and of few kinds. See `turns`."""
        turn: Turn = self._halves.local.turn(operator.index(step))
        return turn

    def turns(self, state: Any) -> Iterator[Turn]:
        """The turns of the steps to come, without end: what `average_params` is told. They begin
        where the state is, so a resumed run goes on as it would have.

        Args:
            state: any tree that holds the state, in any form, of arrays. The host waits for the
                count in it, once.

        Raises:
            TypeError: the state is traced, or shapes alone.
            ValueError: there is not one state of `local_sgd` in the tree, or it has lost an average
                or was told a wrong turn.
        """
        found = survey(state)
        found.refuse_missed_averages()
        counts = found.counts_of_local_sgd()
        if len(counts) != 1:
            raise ValueError(
                f"turns needs the state of one local_sgd, and there are {len(counts)} in what was"
                " given"
            )
        if (done := counts[0].averages) is None:
            raise TypeError(
                "turns needs a state of arrays, outside of jax.jit: the number of its step is in it"
            )
        return map(self.turn, itertools.count(done))

    def all_turns(self) -> list[Turn]:
        """Each turn that `turns` ever gives, once: so many times a step that is told its turn is
        compiled. With them the programs can be made before training:

        programs = {turn: step.lower(turn, state, batch).compile() for turn in tx.all_turns()}
        for turn, batch in zip(tx.turns(state), batches):
            program = programs[turn]
            state, loss = program(state, batch)
        """
        return all_turns(self._halves.local)

    def outer_params(self, state: Any) -> Any:
        """The outer parameters, a tree like the parameters, which is what the papers of DiLoCo
        evaluate: inside the map those of this replica, outside with a row for each, which are equal
        but for `eager` ones. In `state_dtype`.

        Raises:
            ValueError: plain averaging has none; there is no state of one `local_sgd` in the tree;
                or it has lost an average or was told a wrong turn.
        """
        if not self._halves.local.has_outer:
            raise ValueError(
                f"state is of {self._halves.local!r}, which averages parameters themselves:"
                " evaluate their mean"
            )
        survey(state).refuse_missed_averages()
        return _only_state(state)[2].averages.memory[OUTER]


@checked
def local_sgd(
    inner: Annotated[optax.GradientTransformation, OWN_CHECK],
    local: Annotated[LocalSGD, "LocalSGD(…) or gradwire.diloco(…)"],
    *,
    axis_name: AxisName,
    moments: WhatOfMoments = "keep",
    steps: AtLeast1 | None = None,
) -> LocalOptimizer:
    """Local SGD in all its forms (see `gradwire.LocalSGD`), round any optimizer.

    `update` averages gradients while the schedule says so, over all replicas or subgroups, and
    hands them to `inner`. `average_params` averages parameters. Both look at one count, which the
    latter advances, so their warm-ups cannot disagree.

    Everything differs between replicas: parameters, state, statistics. Mark the whole training
    state with `stack_replicas`; the helpers `replicate`, `distribute`, `partition_specs` and
    `unreplicate` then give each replica its own row of all of it. A checkpoint is what
    `unreplicate` returns. For an evaluation average its rows.

    "node" in a schedule is the replicas with the same index on the first axis, if `axis_name` is
    several. Along one axis it is those of a process. Groups that lie along some of several axes
    work everywhere; any others under `pmap` and `shard_map(check_vma=False)`.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from gradwire import LocalSGD
        >>> from gradwire.jax_backend import local_sgd
        >>> tx = local_sgd(optax.sgd(1.0), LocalSGD(1), axis_name="data")
        >>> def step(params, gradients):
        ...     updates, state = tx.update(gradients, tx.init(params), params)
        ...     return tx.average_params(optax.apply_updates(params, updates), state)[0]
        >>> steps = jax.jit(jax.vmap(step, axis_name="data"))
        >>> steps(jnp.zeros((2, 1)), jnp.array([[1.0], [3.0]])).tolist()
        [[-2.0], [-2.0]]

    Args:
        inner: any optimizer. `optax.MultiSteps` belongs inside; steps are then micro-steps.
        local: what to do. A compressor may have two levels: `diloco(100, subgroup="node",
            compressor=TwoLevel(WireDtype(AllReduce(), "bfloat16"), within="ici"))`.
        axis_name: the axis of the replicas, see `power_sgd`. Of several, the first is the slowest
            in the numbering of replicas. The axis that two levels name in `within` is the last of
            them, given here or not.
        moments: those arrays of `inner`'s state that look like parameters are kept as each replica
            has them; averaged with the parameter; or as `inner.init` makes them when it has been
            averaged, along with counters that stand beside them.
        steps: how many there will be, if that is known: a warning where they have few outer steps.

    Returns:
        A transformation with a method `average_params`. Its `init` runs outside the map or inside;
        `update` only inside, and raises what that of `average_gradients` does, what
        `average_params` does, and ValueError for a state that is not per replica.

        `init` raises ValueError for parameters that cannot be averaged, for fewer of them than
        fragments, and for an `inner` that averages gradients or is sharded by itself; and for
        `moments` of an `inner` whose state holds arrays, none of them like a parameter.

    Raises:
        TypeError: for what is no transformation, no `LocalSGD`, or no name of an axis; or an outer
            optimizer that is not of Optax.
        ValueError: for an unknown `moments`, or moments that cannot be reset in fragments, whose
            counters they share.
    """
    axes_of(axis_name)
    inner = transformation(inner, "local_sgd(optax.sgd(0.1), LocalSGD(8), axis_name='data')")
    if moments == "reset" and local.delayed:
        raise ValueError(
            f"moments='reset' with {local!r}: parameters are merged, and not replaced, when an"
            " average is taken; use 'average' or 'keep'"
        )
    if moments == "reset" and local.fragments > 1:
        raise ValueError(
            f"moments='reset' with fragments={local.fragments}: an optimizer's step count is shared"
            " by all fragments and cannot begin anew for one of them; use 'average' or 'keep'"
        )
    warn_of_few_rounds(local, steps)
    local = in_jax(local)
    halves = _Halves(inner, local, with_near_axis(local, axis_name), moments)
    return LocalOptimizer(halves.init, halves.update)


def diloco(
    inner: optax.GradientTransformation,
    period: int,
    *,
    axis_name: AxisName,
    moments: WhatOfMoments = "keep",
    steps: int | None = None,
    **options: Any,
) -> LocalOptimizer:
    """DiLoCo (Douillard et al. 2023, arXiv 2311.08105): `local_sgd(inner, gradwire.diloco(period,
    **options), ...)`.

        tx = diloco(optax.adamw(3e-4), 500, axis_name="data")

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from gradwire.jax_backend import diloco
        >>> tx = diloco(optax.adamw(3e-4), 500, axis_name="data")
        >>> sorted(tx.init({"w": jnp.zeros(3)}).averages.memory)
        ['outer', 'velocity']

    Args:
        inner: the inner optimizer, AdamW in the paper.
        period: H, steps from one average to the next.
        axis_name: the axis of the replicas, see `power_sgd`.
        moments: what happens to the arrays of `inner`'s state, see `local_sgd`.
        steps: how many there will be, see `local_sgd`.
        **options: of `gradwire.diloco`: `lr`, `momentum`, `nesterov` of the outer optimizer,
            `start_step`, `fragments`, `compressor`, …
    """
    return local_sgd(
        inner, diloco_of(period, **options), axis_name=axis_name, moments=moments, steps=steps
    )


@dataclass(frozen=True, eq=False)
class _Halves:
    inner: optax.GradientTransformationExtraArgs
    local: LocalSGD
    axis_name: AxisName
    moments: WhatOfMoments
    _found: dict[Any, list[LevelBytes]] = field(default_factory=dict)

    @outside_meshes
    def init(self, params: optax.Params) -> LocalSGDState:
        inside = is_bound(self.axis_name)
        if inside:
            self._fitted()
        # Memory does not depend on who averages, and how many replicas there are is not known yet.
        memory = replace(
            self.local, period=max(self.local.fragments, self.local.overlap + 1), subgroup=None
        )
        named = flatten(params)
        check_leaves(named, self.axis_name)
        specs = specs_of(named.leaves, stacks_of(params))
        if self.local.compressor is not None:
            replicas: int | None = lax.axis_size(self.axis_name) if inside else None
            memory = without_levels(memory)
            run = with_numbers(self.local, self.axis_name) if inside else memory
            check_requests(cast(Algorithm, run.compressor), self.local.kept(specs), replicas)
            if not inside:
                check_here(cast(Algorithm, run.compressor), self.local.kept(specs), params)
        warn(self.local, specs)
        stages = stage_starts(self.local)
        sent = self._sent(specs) if inside and specs else [UNSAID] * len(stages)
        record = Record(None, self.axis_name, stages)
        dense_bytes = sum(s.nbytes for s in specs.values())

        def averages(leaves: dict[str, jax.Array]) -> DataParallelState:
            made = memory.init(OPS, leaves, 1) if leaves else State[jax.Array]()
            return pack(params, made, frozenset(), self._configuration, record, sent, dense_bytes)

        if any(isinstance(x, jax.ShapeDtypeStruct) for x in named.leaves.values()):
            raise TypeError(
                "init of local_sgd copies the parameters and needs arrays; for shapes alone use"
                " jax.eval_shape(tx.init, params)"
            )
        arrays = {name: on_devices(jnp.asarray(x)) for name, x in named.leaves.items()}
        shardings = None if inside else shardings_like(params, lambda: averages(arrays))
        state = LocalSGDState(
            self.inner.init(params),
            # Compiled as a whole: op by op, every shape would compile its own little kernels.
            averages(arrays) if inside else jax.jit(averages, out_shardings=shardings)(arrays),
            PerReplica(place_mark(placed=inside)),
            *(jnp.zeros((), jnp.int32) for _ in range(3)),
        )
        _refuse_data_parallel(state.inner)
        if self.moments != "keep" and arrays:
            Moments(state.inner, arrays).require_any(self.moments)
        varying: LocalSGDState = vary_if_tracked(state, self.axis_name)
        return varying

    def update(
        self,
        updates: optax.Updates,
        state: LocalSGDState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, LocalSGDState]:
        require_axis(self.axis_name, "local_sgd")
        _check_placed(state)
        check_configuration(state.averages, self._configuration)
        gradients = flatten(updates)
        check_leaves(gradients, self.axis_name)
        check_local(gradients.leaves, self.axis_name)
        program = self._fitted().gradients(lax.axis_size(self.axis_name))
        weight = self._weight(extra.pop("weight", None))
        if said := extra.pop("settings", None):
            raise ValueError(
                f"settings={said} are for the compressor of averages; give them to average_params,"
                " or to step"
            )
        arrays = {name: jnp.asarray(g) for name, g in gradients.leaves.items()}
        step = agreed(state.averages.step, self.axis_name)

        def exchange(arrays: Any, step: Any, weight: Any) -> Any:
            return drive(
                program.step(OPS, arrays, State(), step, weight), self.axis_name, given=arrays
            )[0]

        averages = left_to_the_compiler(exchange, arrays, step, weight, like=arrays)
        # In a loop over steps inside shard_map what varies before a step must vary after it,
        # whatever `inner` does.
        new, inner = self.inner.update(
            gradients.rebuild(vary_if_tracked(averages, self.axis_name)),
            state.inner,
            params,
            **extra,
        )
        return new, state._replace(inner=inner, updates=optax.safe_increment(state.updates))

    def _weight(self, weight: Any) -> jax.Array:
        """What this replica counts for. Raises ValueError where all count alike."""
        if weight is not None and not self.local.weighted:
            raise ValueError(
                f"weight={weight} for {self.local!r}, whose replicas all count alike; give it"
                " weighted=True"
            )
        return scalar_weight(1.0 if weight is None else weight)

    def average_params(
        self,
        params: Any,
        state: Any,
        extras: tuple[Any, ...],
        turn: Turn | None,
        weight: Any,
        settings: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        require_axis(self.axis_name, "average_params")
        warn_of_gathers(self.axis_name)
        leaves, structure, mine, place = _only_state(state)
        _check_placed(mine)
        check_configuration(mine.averages, self._configuration)
        named, others = flatten(params), [Extra(i, tree) for i, tree in enumerate(extras)]
        self._check_varying(named)
        check_leaves(named, self.axis_name)
        step, before = agreed(mine.averages.step, self.axis_name), unpack(mine.averages)
        if turn is not None:
            wrong = jnp.asarray(is_of_another_step(self.local, turn, step), jnp.int32)
            mine = mine._replace(wrong_turns=mine.wrong_turns + wrong)
        before.shared = agreed(before.shared, self.axis_name)
        before.shared |= {ARRIVED: mine.arrived, REFUSED: mine.averages.account.skipped}
        known = {name for name, kept in before.tensors.items() if OUTER in kept}
        if self.local.has_outer and named.leaves.keys() != known:
            different = sorted(named.leaves.keys() ^ known)
            raise ValueError(
                f"the parameters are not those given to init: {some(different)} in one of them only"
            )
        after, averages, inner = self._averaged(
            named, mine, before, step, others, turn, self._weight(weight), settings
        )
        arrived, refused = (averages.shared.pop(key) for key in COUNTS)
        kept = self._accounted(repack(mine.averages, averages), named)
        kept = kept._replace(account=kept.account._replace(skipped=refused))
        leaves[place] = mine._replace(inner=inner, averages=kept, arrived=arrived)
        return (
            named.rebuild(after),
            jax.tree.unflatten(structure, leaves),
            *(extra.rebuilt() for extra in others),
        )

    def _averaged(
        self,
        named: NamedTree,
        state: LocalSGDState,
        before: State[jax.Array],
        step: jax.Array,
        others: list[Extra],
        turn: Turn | None,
        weight: jax.Array,
        settings: Mapping[str, Any],
    ) -> tuple[Mapping[str, jax.Array], State[jax.Array], Any]:
        """Parameters, memory, and the state of the inner optimizer."""
        if not named.leaves:
            return {}, before, state.inner
        local, replicas = self._fitted(), lax.axis_size(self.axis_name)
        local = with_numbers(local, self.axis_name)
        values = self._said(local, settings, named, replicas)
        if local.compressor is not None and not local.weighted:
            local = replace(local, compressor=in_pieces(local.compressor, self.axis_name))
        arrays = {name: jnp.asarray(x) for name, x in named.leaves.items()}
        moments = Moments(state.inner, arrays)
        owned = moments.by_parameter() if self.moments == "average" else {}
        extras = owned | {key: x for extra in others for key, x in extra.arrays.items()}
        happens = acts(local, turn, step)

        def exchange(
            arrays: Any, shared: Any, tensors: Any, extras: Any, step: Any, weight: Any, values: Any
        ) -> Any:
            memory = State(shared, whole_memory(tensors, arrays))
            program = local.average(
                OPS, arrays, memory, step, replicas, extras, turn=turn, weight=weight
            )
            after, averages, averaged = drive(
                with_settings(program, values), self.axis_name, given=arrays
            )
            return after, averages.shared, whole_memory(averages.tensors, arrays), averaged

        given = (arrays, before.shared, before.tensors, extras)
        after, shared, tensors, averages = left_to_the_compiler(
            exchange, *given, step, weight, values, like=given
        )
        inner = state.inner
        if self.moments == "reset":
            # the same, where `turn` says it
            due = [local.due(step, level.period) for level in local.levels(replicas)]
            inner = moments.restarted(
                self.inner.init(named.rebuild(after)),
                functools.reduce(operator.or_, due),
                self.axis_name,
            )

        if self.moments == "average":
            inner = moments.replaced(averages)

        def mended() -> Any:
            """The state of a replica that has come back."""
            fresh = self.inner.init(named.rebuild(after))
            return Moments(inner, arrays).mended(fresh, non_finite.all_finite(after.values()))

        if local.has_outer:
            inner = non_finite.chosen(happens, mended, lambda: inner, self.axis_name)
        for extra in others:
            extra.arrays = {key: averages[key] for key in extra.arrays}
        return after, State(shared, tensors), inner

    def _said(
        self, local: LocalSGD, settings: Mapping[str, Any], named: NamedTree, replicas: int
    ) -> dict[str, jax.Array]:
        """Settings as scalar arrays. Raises ValueError for what the compressor does not ask for."""
        if settings:
            asked: Mapping[str, float] = {}
            if local.compressor is not None:
                specs = local.kept(specs_of(named.leaves))
                asked = dry_run(local.compressor, specs, replicas).settings
            require_settings(self.local, settings, asked)
        return {name: weight_of(OPS, value) for name, value in settings.items()}

    def _accounted(self, averages: DataParallelState, params: NamedTree) -> DataParallelState:
        """The state with what a step sends: in one of `init`, or of a checkpoint, it may be that of
        another number of replicas, wire dtype or schedule."""
        if not params.leaves:
            return averages
        sent = vary_if_tracked(
            jnp.asarray(self._sent(specs_of(params.leaves)), jnp.float32), self.axis_name
        )
        return averages._replace(account=averages.account._replace(sent=sent))

    def _sent(self, specs: Mapping[str, Spec]) -> list[LevelBytes]:
        """Bytes of a step in each stage. Found once for a model: it takes as long as tracing a step
        does."""
        local, replicas = (
            with_numbers(self._fitted(), self.axis_name),
            lax.axis_size(self.axis_name),
        )
        plain = {name: Spec(tuple(spec.shape), spec.dtype) for name, spec in specs.items()}
        levels = levels_of(local)
        key = (
            local.levels(replicas),
            local.subgroups(replicas),
            levels and levels.within,
            tuple(plain.items()),
        )
        if key not in self._found:
            self._found[key] = local_stages(local, plain, replicas)
        return self._found[key]

    @property
    def _configuration(self) -> str:
        """What the memory depends on. Schedules and learning rates may change any time."""
        local = self.local
        if not local.has_outer:
            return "LocalSGD()"
        compressor = None if local.compressor is None else configuration_of(local.compressor)
        delayed = ", eager=True" if local.eager else ", overlap" if local.overlap else ""
        delayed += ", weighted" if delayed and local.weighted else ""
        outer = f"momentum={bool(local.optimizer.memories)}"
        if isinstance(local.outer, OuterFactory):
            outer = f"outer={local.outer.called}, {', '.join(sorted(local.outer.memories))}"
        return (
            f"LocalSGD(fragments={local.fragments}, {outer}, compressor={compressor},"
            f" state_dtype={local.state_dtype}{delayed})"
        )

    def _fitted(self) -> LocalSGD:
        """The schedule for as many replicas as there are. Raises ValueError if it does not fit."""
        local = (
            self.local.on_nodes_of(node_size(self.axis_name))
            if self.local.mentions_nodes
            else self.local
        )
        local.gradients(lax.axis_size(self.axis_name))
        return local

    def _check_varying(self, params: NamedTree) -> None:
        axes = frozenset(axes_of(self.axis_name))
        if self.local.radial and (
            parted := [n for n, x in params.leaves.items() if varying_axes(x) - axes]
        ):
            raise ValueError(
                f"radial={self.local.radial!r} takes lengths of whole tensors, and {parted[0]!r} is"
                " divided along another axis; leave it out"
            )
        same = (
            [n for n, x in params.leaves.items() if not axes <= varying_axes(x)]
            if tracked(self.axis_name)
            else []
        )
        if same:
            raise ValueError(
                f"average_params: parameter {same[0]!r} does not vary over {self.axis_name!r}, so"
                " there is nothing to average. Mark the training state: stack_replicas(state)"
                " before training, this_replica(state) in the training step"
            )


def _only_state(tree: Any) -> tuple[list[Any], Any, LocalSGDState, int]:
    """The leaves of a tree that holds one state of `local_sgd`, its structure, that state, and
    which leaf it is."""
    leaves, structure = jax.tree.flatten(pure(tree), is_leaf=_is_local)
    found = [i for i, leaf in enumerate(leaves) if _is_local(leaf)]
    if len(found) != 1:
        raise ValueError(
            "average_params and outer_params need the state of one local_sgd, and there are"
            f" {len(found)} in what was given"
        )
    return leaves, structure, leaves[found[0]], found[0]


def _is_local(x: Any) -> bool:
    return isinstance(x, LocalSGDState)


def _check_placed(state: LocalSGDState) -> None:
    mark = state.placed.per_replica
    shape = jnp.shape(mark) if is_placed(mark) else ()
    if shape != (1,):
        raise ValueError(
            "local_sgd: every replica must be given its own row of parameters and state, and"
            f" `placed` says that it was given {shape[0] if shape else 'none'} of the state's."
            " Before training: state = stack_replicas(state), and then replicate(state,"
            " axis_name=…) for jax.pmap, or distribute(state, mesh, axis_name) and"
            " partition_specs(state, axis_name) for jax.shard_map. In the training step: mine ="
            " this_replica(state)"
        )


def _refuse_data_parallel(inner: Any) -> None:
    def is_one(x: Any) -> bool:
        return isinstance(x, (DataParallelState, ZeroState, LocalSGDState))

    for x in jax.tree.leaves(inner, is_leaf=is_one):
        if is_one(x):
            raise ValueError(
                f"inner holds a {type(x).__name__}: a transformation that needs all replicas in"
                " every step, while local SGD lets each step by itself. Take it out; gradients are"
                " averaged as the schedule says, and LocalSGD(compressor=…) compresses averages"
            )
