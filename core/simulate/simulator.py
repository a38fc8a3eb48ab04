"""N replicas in one process, in lock step, in NumPy: the reference driver, and how to test an
algorithm on a laptop.

    sim = Simulator(PowerSGD(rank=2), {"w": (64, 32), "b": (64,)}, replicas=4)
    averages = sim.step([{"w": ..., "b": ...} for each replica])   # one dictionary, or it raises

In float64 it is the oracle of the parity tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from gradwire.core.algorithm import Algorithm, State, require_algorithm
from gradwire.core.algorithms.two_level import require_nodes
from gradwire.core.algorithms.weighted import checked_weights, weighted
from gradwire.core.kernels.numpy import NumpyOps, dtype_named
from gradwire.core.ops import FloatDtype, Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.plan.traffic import Traffic, traffic_of
from gradwire.core.protocol.programs import ReplicaMismatch, Request
from gradwire.core.protocol.settings import require_settings, with_settings
from gradwire.core.simulate.lock_step import (
    NDArray,
    Optimizer,
    lock_step,
    require_equal,
    require_same_memory,
)
from gradwire.core.text.options import AtLeast0, Replicas, checked


class Simulator:
    """An algorithm on N replicas.

    Examples:
        >>> import numpy as np
        >>> from gradwire import Simulator, TopK
        >>> replicas = Simulator(TopK(1, per=4), {"w": (8,)}, replicas=2, dtype="float32")
        >>> one, two = np.arange(8.0), -np.arange(8.0)
        >>> replicas.step([{"w": one}, {"w": two}])["w"].tolist()
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        >>> replicas.states[0].tensors["w"]["error"].tolist()
        [0.0, 1.0, 2.0, 0.0, 4.0, 5.0, 6.0, 0.0]

    Args:
        algorithm: what to run.
        shapes: parameter name → shape.
        replicas: world size, 1 or more.
        dtype: of gradients and memory, by name or as a framework has it. "bfloat16" needs
            ml_dtypes, as what is sent in it does, or in floats of 8 bits: `pip install ml_dtypes`.
        ops: kernels; `PoisonOps()` to find uses of donated arrays.
        optimizer: of an algorithm that has one (`Zero`): `optimizer(replica, gradients of its
            pieces)` returns new pieces; with `Zero(skip_non_finite=True)` it is `optimizer(replica,
            gradients of its pieces, ok)`.

    Attributes:
        states: the state of each replica.
        steps: steps taken.
        traffic: what each replica handed to the network in the last step.
        requests: the requests of the last step (of replica 0), in order.
    """

    @checked
    def __init__(
        self,
        algorithm: Annotated[Algorithm, require_algorithm],
        shapes: Mapping[str, tuple[AtLeast0, ...]],
        replicas: Replicas,
        *,
        dtype: FloatDtype = "float64",
        ops: NumpyOps | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        require_nodes(algorithm, replicas)
        self.algorithm = algorithm
        self.specs = {name: Spec(tuple(shape), dtype) for name, shape in shapes.items()}
        self.ops = ops or NumpyOps()
        self.optimizer = optimizer
        self.states: list[State[NDArray]] = [
            algorithm.init(self.ops, self.specs) for _ in range(replicas)
        ]
        self.steps = 0
        self.requests: list[Request] = []

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes of the last step, as replica 0 handed them to the network. Zeros
        before there was one."""
        return traffic_of(self.ops, self.requests, len(self.states))

    def step(
        self,
        gradients: Sequence[Mapping[str, npt.ArrayLike]],
        *,
        weights: Sequence[float] | None = None,
        settings: Mapping[str, float] | None = None,
    ) -> dict[str, NDArray]:
        """Average one gradient per replica.

        Args:
            gradients: for each replica, parameter name → array. Not modified.
            weights: what each replica counts for, 0 if it is absent; see `Weighted`. None: all the
                same.
            settings: name → what the algorithm is told in this step where it awaits `setting`.

        Returns:
            Parameter name → averaged gradient, identical on all replicas.

        Raises:
            ValueError: gradients that do not fit the shapes, weights that are no weights, settings
                that it does not ask for.
            NobodyCounts: all weights are 0. Nothing has changed then.
            ReplicaMismatch: the replicas disagree about a request, a result, or a memory that must
                be equal.
        """
        if len(gradients) != len(self.states):
            raise ValueError(f"{len(gradients)} gradients for {len(self.states)} replicas")
        if settings:
            dry = dry_run(self.algorithm, self.specs, len(self.states))
            require_settings(self.algorithm, settings, dry.settings)
        local = [self._copy(replica, g) for replica, g in enumerate(gradients)]
        names = list(local[0])
        for replica, g in enumerate(local):
            if g.keys() != local[0].keys():
                raise ReplicaMismatch(
                    f"replica 0 has gradients for {names}, but replica {replica} for {list(g)}"
                )
        states = [state.map(np.array).of(local[0]) for state in self.states]
        self.requests = []
        algorithm: Any = self.algorithm if weights is None else weighted(self.algorithm)
        each = (
            [()] * len(states)
            if weights is None
            else [(w,) for w in checked_weights(weights, len(states))]
        )
        programs = [
            algorithm.step(self.ops, g, s, self.steps, *w)
            for g, s, w in zip(local, states, each, strict=True)
        ]
        results = lock_step(
            [with_settings(program, settings or {}) for program in programs],
            self.ops,
            self.requests,
            self.optimizer,
        )
        averages: list[dict[str, NDArray]] = [r[0] for r in results]
        after = [r[1] for r in results]
        for name in names:
            require_equal(f"the averaged gradient of {name!r}", [a[name] for a in averages])
        require_same_memory(after, self.algorithm.per_replica)
        for state, new in zip(self.states, after, strict=True):
            state.shared = new.shared
            state.tensors |= new.tensors
        self.steps += 1
        return averages[0]

    def _copy(self, replica: int, gradients: Mapping[str, npt.ArrayLike]) -> dict[str, NDArray]:
        unknown = gradients.keys() - self.specs.keys()
        if unknown:
            raise ValueError(
                f"replica {replica} has gradients for unknown parameters {sorted(unknown)}"
            )
        copies = {}
        # In the order of the model, whatever the order of the mapping: what is averaged together is
        # decided by position.
        for name, spec in self.specs.items():
            if name not in gradients:
                continue
            copies[name] = np.array(gradients[name], dtype=dtype_named(spec.dtype))
            if copies[name].shape != spec.shape:
                raise ValueError(
                    f"replica {replica}: gradient of {name!r} has shape {copies[name].shape}, not"
                    f" {spec.shape}"
                )
        return copies
