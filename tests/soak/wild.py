"""Histories of training with gradients as they should not be: inf, NaN, outliers, zeros, of low rank, sparse, tiny.

What is bad comes in the first steps, and usual gradients follow until all is finite again. Memory is all the time.
"""

import random
import warnings
from dataclasses import replace

import numpy as np

from gradwire import AllReduce, Simulator, TwoLevel
from gradwire.core.algorithms.compressor import ERROR
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.ops import largest_error
from tests.methods import METHODS
from tests.soak import draw

#: Steps that may be bad, usual ones by which all has to be well, and how many of these one after the other.
BAD, USUAL, LAST = 14, 150, 3
FAULTS = ("inf", "nan", "all nan", "all zero", "zero", "all rank one", "all sparse", "all tiny")
FAULTS += ("outlier", "all outliers", "large", "all large")


def model(rng):
    """Shapes, of which every method compresses the first."""
    return {**draw.shapes(rng), "p0": (rng.choice([16, 24]), rng.choice([12, 16]))}


def method(rng, replicas):
    """One that is for any model, now and then between nodes."""
    found = rng.choice([m.algorithm for m in METHODS.values() if m.algorithm == AllReduce() or draw.fits(m.algorithm)])
    if hasattr(found, "max_norm"):
        found = replace(found, start_step=rng.choice([0, 0, 5]), max_norm=rng.choice([None, None, 0.5, 50.0]))
    nodes = [n for n in (2, 3) if replicas % n == 0]
    return TwoLevel(found, within=rng.choice(nodes)) if nodes and rng.random() < 0.5 else found


def harm(rng, fault, given):
    """Do this to gradients, in place: to those of one replica, or of all."""
    one = rng.choice(given)
    name = rng.choice([n for n, x in one.items() if x.size])
    size = rng.choice([0.99, 0.3, 0.01, 1e-4]) * rng.choice([1, -1])
    for own in given if fault.startswith("all") else [one]:
        x = own[name]
        limits = np.finfo(x.dtype)
        place = tuple(rng.randrange(n) for n in x.shape)
        match fault.removeprefix("all "):
            case "inf":
                x[place] = rng.choice([np.inf, -np.inf])
            case "nan":
                x[place] = np.nan
            case "outlier" | "outliers":
                x[place] = size * float(limits.max)
            case "large":  # of full rank, so that much of it is left
                x[...] = x * (size / 8 * float(limits.max))
            case "zero":
                for each in own.values():
                    each[...] = 0
            case "rank one" if x.ndim == 2:
                x[...] = x[:, :1] * x[:1]
            case "sparse" if x.ndim:
                x[rng.randrange(len(x)) :] = 0
            case "tiny":
                x[...] = x * (3 * float(limits.smallest_subnormal))


def finite(*arrays):
    return all(bool(np.isfinite(np.asarray(x, np.float64)).all()) for x in arrays)


def memories(simulator):
    """Of each replica: name → key → array."""
    return [state.map(np.array).tensors for state in simulator.states]


def require_finite(memories):
    for memory in memories:
        for name, own in memory.items():
            for key, x in own.items():
                assert finite(x), f"{key} of {name} is not finite"


def require_same(before, after):
    """Of memories; an error that overflows may have been brought into its bounds."""
    for was, now in zip(before, after, strict=True):
        for name, key, x in ((name, key, x) for name, own in was.items() for key, x in own.items()):
            limit = largest_error(NumpyOps(), x) if key == ERROR else np.inf
            same = any(np.array_equal(y, now[name][key]) for y in (x, np.clip(x, -limit, limit)))
            assert same, f"an average that is not finite has changed {key} of {name}"


def averages(seed):
    """A step with an inf or NaN is one on all replicas, and leaves memory alone; no other lets anything into it that is not finite."""
    rng = random.Random(f"averages {seed}")
    replicas, dtype = rng.choice([1, 2, 2, 3, 4, 6]), rng.choice(["float32", "float32", "float64", "float16"])
    shapes, faults, well = model(rng), [], 0
    simulator = Simulator(method(rng, replicas), shapes, replicas, dtype=dtype)
    for step in range(BAD + USUAL):
        numbers = np.random.default_rng(rng.randrange(1 << 40))
        given = [
            {name: np.asarray(numbers.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
            for _ in range(replicas)
        ]
        if step < BAD and rng.random() < 0.4:
            faults.append(f"{(fault := rng.choice(FAULTS))} in step {step}")
            harm(rng, fault, given)
        try:
            good = one_step(simulator, given)
        except Exception as error:
            error.add_note(f"step {step} of {dtype} after {', '.join(faults[-3:]) or 'nothing'}")
            raise
        well = well + 1 if good and step >= BAD else 0
        if well == LAST:
            return step
    raise AssertionError(f"usual gradients have not helped after {faults[-3:]}")


def one_step(simulator, given):
    """Whether what comes out is finite."""
    before = memories(simulator)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        averages = simulator.step(given)
    after = memories(simulator)
    for name, average in averages.items():
        assert not finite(average) or finite(*(own[name] for own in given)), f"the average of {name} is finite"
    require_finite(after)
    if not (good := finite(*averages.values())):
        require_same(before, after)
    return good
