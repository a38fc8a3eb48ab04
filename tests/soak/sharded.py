"""Random sharded optimizers: whoever owns what, the parameters are those of the optimizer that was not divided, and replicas may come and go."""

import random
from typing import Any

import numpy as np

from gradwire import AllReduce, Simulator, Spec
from gradwire.core.simulate import PoisonOps
from gradwire.core.zero.sharded_step import Zero
from gradwire.core.zero.sharding import shard_by_bucket, shard_by_element, shard_by_parameter
from tests.soak import draw
from tests.soak.checks import close

NDArray = np.ndarray[Any, Any]
Tensors = dict[str, NDArray]
STEPS = 20
LR, MOMENTUM = 0.1, 0.9


def run(seed):
    """One history. Returns the number of steps; raises AssertionError or ReplicaMismatch if something does not hold."""
    rng = random.Random(seed)
    shapes = draw.shapes(rng)
    stream = draw.Gradients(shapes, seed)
    start = stream.of(1, list(shapes))[0]
    whole = Momentum({n: x.copy() for n, x in start.items()}, {n: np.zeros_like(x) for n, x in start.items()})
    sharded = Sharded(rng, whole)
    for _ in range(STEPS):
        if rng.random() < 0.15:
            sharded = Sharded(rng, sharded.consolidated())
        gradients = stream.of(sharded.replicas, list(shapes))
        bad = rng.random() < 0.15 and stream.spoil(rng, gradients)
        found = sharded.step(gradients)
        if not bad:
            whole.step(clipped({n: sum(g[n] / len(gradients) for g in gradients) for n in shapes}, sharded.max_norm))
        for name, right in whole.parameters.items():
            assert np.isfinite(right).all()
            close(name, found[name], right)
    return STEPS


class Momentum:
    """SGD with momentum on some arrays, whole or not."""

    def __init__(self, parameters, velocities):
        self.parameters, self.velocities = parameters, velocities

    def step(self, gradients):
        for name, g in gradients.items():
            self.velocities[name] = MOMENTUM * self.velocities[name] + g
            self.parameters[name] = self.parameters[name] - LR * self.velocities[name]


class Sharded:
    """The same optimizer, divided at random among a random number of replicas."""

    def __init__(self, rng, whole):
        self.replicas = draw.replicas(rng)
        self.max_norm = rng.choice([None, 0.5, 100.0])
        self.shapes = {name: x.shape for name, x in whole.parameters.items()}
        self.shards = shards(rng, {n: Spec(s, "float64") for n, s in self.shapes.items()}, self.replicas)
        averaging = AllReduce(bucket_bytes=rng.choice([None, 1, 300, 1 << 20]))
        self.simulator = Simulator(
            Zero(self.shards, averaging, max_norm=self.max_norm, skip_non_finite=True),
            self.shapes,
            self.replicas,
            ops=PoisonOps() if rng.random() < 0.2 else None,
            optimizer=self._update,
        )
        cuts = ((self._cut(whole.parameters, r), self._cut(whole.velocities, r)) for r in range(self.replicas))
        self.parts = [Momentum(*cut) for cut in cuts]

    def step(self, gradients):
        """The new parameters, as all replicas receive them."""
        return self.simulator.step(gradients)

    def consolidated(self):
        """The whole optimizer again."""
        return Momentum(*(self._joined(kind) for kind in ("parameters", "velocities")))

    def _update(self, replica, pieces, ok):
        part = self.parts[replica]
        owned = {name: self._owned(piece, name, replica) for name, piece in pieces.items()}
        if ok:
            part.step(owned)
        return {name: part.parameters[name].copy() for name in pieces}

    def _owned(self, piece, name, replica):
        first, last = self.shards.owned(name, replica)
        return piece.reshape(-1)[: last - first]

    def _cut(self, arrays, replica):
        return {n: x.reshape(-1)[slice(*self.shards.owned(n, replica))].copy() for n, x in arrays.items()}

    def _joined(self, kind):
        joined = {}
        for name, shape in self.shapes.items():
            flat = np.full(int(np.prod(shape)), np.nan)
            for replica, part in enumerate(self.parts):
                flat[slice(*self.shards.owned(name, replica))] = getattr(part, kind)[name]
            joined[name] = flat.reshape(shape)
        return joined


def shards(rng, specs, replicas):
    kind = rng.choice(["element", "parameter", "bucket", "spread"])
    if kind == "element":
        return shard_by_element(specs, replicas)
    if kind == "parameter":
        return shard_by_parameter(specs, replicas)
    names = rng.sample(list(specs), len(specs))
    cut = rng.randint(1, len(names))
    buckets = [part for part in (names[:cut], names[cut:]) if part]
    return shard_by_bucket(specs, replicas, buckets, spread=kind == "spread")


def clipped(gradients, max_norm):
    norm = float(np.sqrt(sum(float((g * g).sum()) for g in gradients.values())))
    if max_norm is None or norm <= max_norm:
        return gradients
    return {name: g * (max_norm / norm) for name, g in gradients.items()}
