"""The JAX process: it trains run after run under `pmap` on two CPU devices, and prints a line of
JSON for each thing it knows.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python worker_jax.py JOBS

Parameters have torch's names and shapes, and become those of the Flax model inside the step. So
every method is given the same matrices as in torch, under the same names, of which random positions
and factors are a hash: both backends do the same, up to rounding.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax.traverse_util import unflatten_dict
from model_flax import Transformer
from text import VOCABULARY

from frontier.runs import (
    BETAS,
    MAX_NORM,
    MUON_RATE,
    REPLICAS,
    WEIGHT_DECAY,
    Run,
    Settings,
    by_muon,
    weights,
)
from frontier.subjects import Subject
from gradwire import FlaxNames, LocalSGD
from gradwire.jax_backend import (
    average_gradients,
    local_sgd,
    replicate,
    stack_replicas,
    this_replica,
)

AXIS = "batch"


def model_of(settings: Settings) -> tuple[Transformer, FlaxNames]:
    """The model, and how its parameters are called in torch."""
    model = Transformer(
        VOCABULARY, settings.context, settings.width, settings.layers, settings.heads
    )
    params = jax.eval_shape(
        model.init, jax.random.key(0), jnp.zeros((1, settings.context), jnp.int32)
    )["params"]
    return model, FlaxNames(weights(settings, 0), params)


def muon() -> optax.GradientTransformation:
    """As torch's, for matrices whose rows are outputs, times the rate below."""
    outputs_first = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    descent = optax.contrib.muon(
        1.0,
        weight_decay=WEIGHT_DECAY,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: outputs_first, params),
    )
    return optax.chain(descent, optax.scale(-MUON_RATE))


class Steps:
    """A method's training step and evaluation, compiled once for all seeds and learning rates."""

    def __init__(self, run: Run) -> None:
        algorithm = run.subject.algorithm
        model, names = model_of(run.settings)
        adamw = optax.chain(
            optax.scale_by_adam(*BETAS), optax.add_decayed_weights(WEIGHT_DECAY)
        )  # times the rate below
        inner = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
        if run.subject.muon:
            inner = optax.partition(
                {True: muon(), False: inner},
                lambda p: {n: by_muon(n, x.ndim) for n, x in p.items()},
            )
        local = isinstance(algorithm, LocalSGD)
        tx: Any
        if isinstance(algorithm, LocalSGD):
            tx = local_sgd(inner, algorithm, axis_name=AXIS)
        else:
            tx = optax.chain(average_gradients(algorithm, axis_name=AXIS), inner)

        def loss_of(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            logits = model.apply({"params": unflatten_dict(names.to_flax(params), sep="/")}, inputs)
            losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return losses.mean()

        @functools.partial(jax.pmap, axis_name=AXIS, donate_argnums=0, in_axes=(0, 0, 0, None))
        def step(
            state: Any, inputs: jax.Array, targets: jax.Array, rate: jax.Array
        ) -> tuple[Any, jax.Array]:
            params, memory = this_replica(state) if local else state
            loss, gradients = jax.value_and_grad(loss_of)(params, inputs, targets)
            updates, memory = tx.update(gradients, memory, params)
            params = optax.apply_updates(params, jax.tree.map(lambda u: -rate * u, updates))
            if not local:
                return (params, memory), loss
            return stack_replicas(tx.average_params(params, memory)), loss

        @functools.partial(jax.pmap, axis_name=AXIS)
        def evaluate(state: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            params, memory = this_replica(state) if local else state
            params = (
                tx.outer_params(memory)
                if isinstance(algorithm, LocalSGD) and algorithm.has_outer
                else params
            )
            mean: jax.Array = jax.lax.pmean(loss_of(params, inputs, targets), AXIS)
            return mean

        self.step, self.evaluate, self._local, self._tx = step, evaluate, local, tx

    def begin(self, run: Run) -> Any:
        params = jax.tree.map(jnp.asarray, weights(run.settings, run.seed))
        state = params, self._tx.init(params)
        return replicate(stack_replicas(state) if self._local else state, axis_name=AXIS)


class Training:
    """A run that has begun."""

    def __init__(self, run: Run, steps: Steps) -> None:
        self.run, self.steps, self.state = run, steps, steps.begin(run)

    def step(self, step: int) -> None:
        batches = _stacked(self.run.batch(step, replica) for replica in range(REPLICAS))
        rate = jnp.float32(self.run.settings.rate(step, self.run.rate))
        self.state, loss = self.steps.step(self.state, *batches, rate)
        jax.block_until_ready((self.state, loss))

    def validation_loss(self) -> float:
        batches = _stacked(self.run.held_out(replica) for replica in range(REPLICAS))
        return float(self.steps.evaluate(self.state, *batches)[0])


def _stacked(batches: Any) -> tuple[Any, ...]:
    return tuple(np.stack(both) for both in zip(*batches, strict=True))


def train(run: Run, steps: Steps, tell: Callable[..., None]) -> None:
    training = Training(run, steps)
    for step in range(run.settings.steps):
        training.step(step)
        if run.evaluated(step):
            tell(step=step + 1, loss=training.validation_loss())
    tell(done=True)


def time_steps(runs: list[Run], steps: int, tell: Callable[..., None]) -> None:
    """Seconds of each of so many steps of each run, one step of all of them in turn, after one that
    compiles."""
    trainings = []
    for run in runs:
        compiled = Steps(run)
        Training(run, compiled).step(0)
        trainings.append(Training(run, compiled))
        tell(step=0)
    seconds: list[list[float]] = [[] for _ in runs]
    for step in range(steps):
        for training, of in zip(trainings, seconds, strict=True):
            began = time.perf_counter()
            training.step(step)
            of.append(time.perf_counter() - began)
        tell(step=step + 1)
    tell(seconds=seconds)


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    runs = [Run.of(job) for job in jobs["runs"]]

    def tell(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    if jobs["timed_steps"]:
        time_steps(runs, jobs["timed_steps"], tell)
        return
    latest: tuple[Subject, Steps] | None = None  # runs of a method follow each other
    for number, run in enumerate(runs):
        if latest is None or latest[0] != run.subject:
            latest = run.subject, Steps(run)
        train(run, latest[1], functools.partial(tell, run=number))


if __name__ == "__main__":
    main()
