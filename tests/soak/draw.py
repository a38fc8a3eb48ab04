"""Random models, gradients and algorithms: what every simulation draws from its seed, so that the
seed alone repeats it."""

from __future__ import annotations

import contextlib
import functools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradwire import AllReduce, Compressor, PowerSGD, Spec
from gradwire.core.kernels import random as hashed
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.protocol import branch, mean, orthonormalize
from tests.methods import METHODS

NDArray = np.ndarray[Any, Any]
BAD = (np.inf, -np.inf, np.nan)


def shapes(rng):
    """A model of two to five parameters: at least one matrix, perhaps another like it, a vector, a
    scalar, nothing at all, a kernel of a convolution.

    Small ones are drawn more often: they hold every pair of kinds, and more of them can be
    simulated.
    """
    matrix = (rng.randint(4, 12), rng.randint(4, 12))

    def one():
        n, m = rng.randint(1, 12), rng.randint(1, 12)
        return rng.choice([matrix, (n, m), (n,), (), (0, m), (n, 2, rng.randint(1, 4))])

    return {
        f"p{i}": shape
        for i, shape in enumerate([matrix, *(one() for _ in range(rng.choice([1, 1, 1, 1, 2, 4])))])
    }


def replicas(rng, least=1):
    """Up to four, two more often than the others."""
    return rng.choice([n for n in (1, 2, 2, 2, 3, 4) if n >= least])


@dataclass(frozen=True, kw_only=True, repr=False)
class RandomProgram(Compressor):
    """A compressor nobody would want: for each tensor another sequence of rounds, each of which
    sends a random linear part of what is left.

    All of them are linear in `x`, so error feedback has to conserve what they leave out, to the
    last bits of float64. Some branch on an average.
    """

    seed: int = 0

    def memory(self, ops, name, spec):
        drawn = random.Random(f"{self.seed}/{name}")
        if drawn.random() < 0.2:
            return None
        return {"count": ops.zeros((), spec.dtype)} if drawn.random() < 0.5 else {}

    async def compress(self, ops, name, x, memory, context):
        shape = tuple(x.shape)
        sent, received = ops.zeros(shape, ops.dtype_of(x)), ops.zeros(shape, ops.dtype_of(x))
        for number, (kind, factor) in enumerate(_rounds(f"{self.seed}/{name}/rounds")):
            rest = x - sent
            if kind == "low rank" and len(shape) == 2:
                key = hashed.key(self.seed, f"{name}/{number}")
                q = ops.cast(hashed.uniform(ops, key, (1, shape[1]), context.step), ops.dtype_of(x))
                q = await orthonormalize(ops, q)
                local = ops.matmul(q, rest.mT)
                p = await mean(local)
                mine, all_ = ops.matmul(local.mT, q), ops.matmul(p.mT, q)
            elif kind == "perhaps":
                size = await mean(ops.max_abs(x.reshape((1, -1))).reshape(()))
                mine, all_ = await branch(size > 1.0, self._whole, self._nothing, rest)
            else:
                mine = rest * factor
                if kind == "masked" and shape:
                    key = hashed.key(self.seed, f"{name}/{number}")
                    mask = hashed.uniform(ops, key, (shape[0],), context.step) > 0.0
                    ones = ops.where(mask, ops.zeros((shape[0],), ops.dtype_of(x)) + 1.0, 0.0)
                    # A product, so that an inf or NaN in a masked row is not lost.
                    mine = mine * ones.reshape((shape[0],) + (1,) * (len(shape) - 1))
                all_ = await mean(mine)
            sent, received = sent + mine, received + all_
        return sent, received, {key: value + 1.0 for key, value in memory.items()}

    async def _whole(self, rest):
        return rest, await mean(rest)

    async def _nothing(self, rest):
        return rest * 0.0, rest * 0.0


@functools.lru_cache(1000)
def _rounds(seed):
    """What a random program does with a tensor, and how much of it."""
    drawn = random.Random(seed)
    kinds = ["damped", "low rank", "masked", "perhaps"]
    return [
        (drawn.choice(kinds), drawn.uniform(0.2, 1.0)) for _ in range(drawn.choice([1, 1, 2, 3]))
    ]


def fits(algorithm):
    """Whether it is for any model: options by name are for the models whose names they hold."""
    with contextlib.suppress(ValueError):
        return bool(algorithm.init(NumpyOps(), {"p0": Spec((24, 24), "float64")}).tensors)
    return False


#: Of the methods that compress, those that remember what they leave out: all simulations rely on
#: it.
METHODS_THAT_CONSERVE = [
    m.algorithm for m in METHODS.values() if fits(m.algorithm) and not m.algorithm.biased
]


def compressor(rng):
    """A method, with random options if it is PowerSGD, or a random program. With error feedback."""
    start_step = rng.choice([0, 0, 1, 4])
    if rng.random() < 0.2:
        return RandomProgram(seed=rng.randrange(1 << 30), start_step=start_step)
    method = replace(rng.choice(METHODS_THAT_CONSERVE), start_step=start_step)
    if not isinstance(method, PowerSGD):
        return method
    rank = rng.choice([method.rank, 3, {"p0": 2, "*": 1}, {"p1": 0, "*": 2}])
    square, rate = method.square or rng.random() < 0.1, rng.choice([0.5, 1.0, 2.0])
    return replace(
        method, rank=rank, square=square, min_compression_rate=rate, seed=rng.randrange(1 << 30)
    )


def algorithm(rng):
    """A compressor, or now and then no compression."""
    return AllReduce() if rng.random() < 0.1 else compressor(rng)


class Gradients:
    """A stream of gradients, of all scales and ranks, some of them zero."""

    def __init__(self, shapes, seed):
        self.shapes = shapes
        self._numbers = np.random.default_rng(seed)

    def of(self, replicas, names):
        """For each replica, a gradient of each of these parameters."""
        # Two draws for all of them: a draw takes longer than all else that is done with a small
        # tensor.
        kinds = iter(self._numbers.integers(8 * 7, size=replicas * len(names)).tolist())
        flat = self._numbers.standard_normal(
            replicas * sum(math.prod(self.shapes[name]) for name in names)
        )
        gradients, start = [], 0
        for _ in range(replicas):
            own = {}
            for name in names:
                shape = self.shapes[name]
                end = start + math.prod(shape)
                own[name] = x = flat[start:end].reshape(shape)
                kind, exponent = divmod(next(kinds), 7)
                start, scale = end, 10.0 ** (exponent - 3)
                if kind == 0:
                    x.fill(0.0)
                elif kind == 1 and len(shape) == 2:
                    x[...] = x[:, :1] * (x[:1] * scale)  # of rank one
                else:
                    x *= scale
            gradients.append(own)
        return gradients

    def spoil(self, rng, gradients):
        """Put an inf or NaN into one element of one replica's gradient. False if there is no
        element."""
        places = [(r, n) for r, g in enumerate(gradients) for n, x in g.items() if x.size]
        if not places:
            return False
        replica, name = rng.choice(places)
        x = gradients[replica][name]
        x.reshape(-1)[rng.randrange(x.size)] = rng.choice(BAD)
        return True
