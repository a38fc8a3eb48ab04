"""N replicas that train by themselves and meet now and then, in one process: the reference driver
of local SGD.

    sim = LocalSimulator(diloco(period=10), {"w": np.zeros((64, 32))}, replicas=4)
    for _ in range(100):
        gradients = [gradient(r, sim.parameters[r]) for r in range(4)]
        sim.step(gradients, lambda replica, p, g: {n: p[n] - 0.1 * g[n] for n in p})

In float64 it is the oracle of the parity tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.core.algorithm import State
from gradwire.core.algorithms.weighted import checked_weights
from gradwire.core.kernels.numpy import NumpyOps, dtype_named
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import FloatDtype, Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.plan.traffic import Traffic, traffic_of
from gradwire.core.protocol.programs import Request
from gradwire.core.protocol.settings import require_settings, with_settings
from gradwire.core.simulate.lock_step import NDArray, lock_step, require_equal, require_same_memory
from gradwire.core.text.options import Replicas, checked, short

Tensors = dict[str, NDArray]


class LocalSimulator:
    """Local SGD on N replicas.

    Examples:
        >>> from gradwire import LocalSGD, LocalSimulator
        >>> replicas = LocalSimulator(LocalSGD(2), {"w": [0.0]}, replicas=2)
        >>> def update(replica, parameters, gradients):
        ...     return {"w": parameters["w"] - gradients["w"]}
        >>> for _ in range(2):
        ...     applied = replicas.step([{"w": [1.0]}, {"w": [3.0]}], update)
        ...     print([float(own["w"][0]) for own in replicas.parameters])
        [-1.0, -3.0]
        [-4.0, -4.0]

    Args:
        local: what to run; or one for each replica, to see what is said when they differ.
        parameters: name → array, where all replicas begin.
        replicas: how many there are, 1 or more.
        extras: averaged along with the parameters, see `LocalSGD.average`; the same on all replicas
            at first.
        dtype: of parameters, gradients and memory.
        ops: kernels; `PoisonOps()` to find uses of donated arrays.

    Attributes:
        parameters, extras, states: of each replica. Parameters and extras may be changed between
            steps.
        steps: steps taken.
        traffic: what replica 0 handed to the network in the last step, for gradients and
            parameters.
        requests: the requests of the last step (of replica 0), in order.

    Raises:
        ValueError: a schedule that does not fit, by name.
    """

    @checked
    def __init__(
        self,
        local: LocalSGD | Sequence[LocalSGD],
        parameters: Mapping[str, Any],
        replicas: Replicas,
        *,
        extras: Mapping[str, Mapping[str, Any]] | None = None,
        dtype: FloatDtype = "float64",
        ops: NumpyOps | None = None,
    ) -> None:
        self.local = [local] * replicas if isinstance(local, LocalSGD) else list(local)
        if len(self.local) != replicas:
            raise ValueError(f"local has {len(self.local)} configurations for {replicas} replicas")
        self.ops = ops or NumpyOps()
        self.parameters: list[Tensors] = [_copied(parameters, dtype) for _ in range(replicas)]
        self.extras: list[dict[str, Tensors]] = [
            {owner: _copied(owned, dtype) for owner, owned in (extras or {}).items()}
            for _ in range(replicas)
        ]
        self.states: list[State[NDArray]] = [
            own.init(self.ops, p, replicas)
            for own, p in zip(self.local, self.parameters, strict=True)
        ]
        self.steps = 0
        self.requests: list[Request] = []

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes of the last step, of gradients and parameters, as replica 0 handed
        them to the network."""
        return traffic_of(self.ops, self.requests, len(self.parameters))

    def step(
        self,
        gradients: Sequence[Mapping[str, npt.ArrayLike]],
        update: Callable[[int, Tensors, Tensors], Mapping[str, npt.ArrayLike]],
        *,
        weights: Sequence[float] | None = None,
        settings: Mapping[str, float] | None = None,
    ) -> list[Tensors]:
        """One step of training.

        Args:
            gradients: of each replica, parameter name → array. Not modified.
            update: the optimizer: (replica, its parameters, its gradients) → its parameters.
            weights: what each replica counts for in what leaves after this step, 0 if it is absent;
                of a `weighted` schedule. None: 1 each.
            settings: name → what the compressor is told in this step where it awaits `setting`.

        Returns:
            The gradients that each replica's optimizer was given.

        Raises:
            ReplicaMismatch: the replicas disagree about a request, about parameters that were
                averaged together, or about a memory that must be equal.
        """
        replicas = len(self.parameters)
        if len(gradients) != replicas:
            raise ValueError(f"{len(gradients)} gradients for {replicas} replicas")
        if weights is not None and not all(own.weighted for own in self.local):
            raise ValueError(
                f"weights={weights} for {self.local[0]!r}, whose replicas count alike; give it"
                " weighted=True"
            )
        if settings:
            self._require(settings)
        each = [1.0] * replicas if weights is None else checked_weights(weights, replicas)
        self.requests = []
        given = [
            _of_shapes(g, p, f"replica {r}: gradient")
            for r, (g, p) in enumerate(zip(gradients, self.parameters, strict=True))
        ]
        programs = [
            own.gradients(replicas).step(self.ops, g, State(), self.steps, w)
            for own, g, w in zip(self.local, given, each, strict=True)
        ]
        used = [g for g, _ in lock_step(programs, self.ops, self.requests)]
        updated: list[Tensors] = []
        for replica, (p, g) in enumerate(zip(self.parameters, used, strict=True)):
            new = update(replica, _copied(p), _copied(g))
            if lacking := sorted(p.keys() - new.keys()):
                raise ValueError(
                    f"replica {replica}: update returns no {lacking[0]!r}; return all parameters"
                )
            updated.append(_of_shapes({n: new[n] for n in p}, p, f"replica {replica}: update"))
        self._average(updated, each, settings or {})
        self.steps += 1
        return used

    def _require(self, settings: Mapping[str, float]) -> None:
        """Raise ValueError for settings that the compressor does not ask for."""
        local, p = self.local[0], self.parameters[0]
        known: Mapping[str, float] = {}
        if local.compressor is not None:
            specs = local.kept({n: Spec(x.shape, x.dtype.name) for n, x in p.items()})
            known = dry_run(local.compressor, specs, len(self.parameters)).settings
        require_settings(local, settings, known)

    def _average(
        self, updated: Sequence[Tensors], weights: Sequence[float], settings: Mapping[str, float]
    ) -> None:
        replicas = len(updated)
        after = lock_step(
            [
                with_settings(
                    own.average(
                        self.ops,
                        p,
                        s.map(np.array),
                        self.steps,
                        replicas,
                        {o: _copied(x) for o, x in e.items()},
                        weight=w,
                    ),
                    settings,
                )
                for own, p, s, e, w in zip(
                    self.local, updated, self.states, self.extras, weights, strict=True
                )
            ],
            self.ops,
            self.requests,
        )
        self._require_agreement([a[0] for a in after], [a[1] for a in after], weights)
        self.parameters = [_copied(p) for p, _, _ in after]
        self.states = [s for _, s, _ in after]
        self.extras = [e for _, _, e in after]

    def _require_agreement(
        self,
        parameters: Sequence[Tensors],
        states: Sequence[State[NDArray]],
        weights: Sequence[float],
    ) -> None:
        local, replicas = self.local[0], len(parameters)
        require_same_memory(states, local.per_replica)
        if local.delayed or local.merge:
            return  # each replica goes on from its own
        for number, names in enumerate(local.parts(local._specs(self.ops, parameters[0]))):
            due = [v for v in local.levels(replicas) if local.due(self.steps, v.period, number)]
            for members in (due[0].groups or (tuple(range(replicas)),)) if due else ():
                # else each keeps its own
                for name in names if any(weights[m] for m in members) else ():
                    require_equal(
                        f"{name!r} after averaging in {members}",
                        [parameters[m][name] for m in members],
                    )


def _of_shapes(arrays: Mapping[str, Any], parameters: Tensors, what: str) -> Tensors:
    """Copies, in the dtypes of the parameters. Raises ValueError for other names and shapes."""
    if unknown := sorted(arrays.keys() - parameters.keys()):
        raise ValueError(f"{what} of {unknown[0]!r}, which is no parameter")
    copies = {}
    for name, x in arrays.items():
        like = parameters[name]
        copies.update(_copied({name: x}, like.dtype))
        if copies[name].shape != like.shape:
            raise ValueError(
                f"{what} of {name!r} has shape {copies[name].shape}; the parameter has {like.shape}"
            )
    return copies


def _copied(arrays: Mapping[str, Any], dtype: Any = None) -> Tensors:
    wanted = dtype_named(dtype) if isinstance(dtype, str) else dtype
    copies = {}
    for name, x in arrays.items():
        try:
            copies[name] = np.array(x, wanted)
        except (TypeError, ValueError) as error:
            raise ValueError(f"parameters[{name!r}]={short(x)} is no array of numbers") from error
    return copies
