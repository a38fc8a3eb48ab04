"""Random histories in the simulators: what must hold after every step, whoever came and went.
Everything is drawn from the seed.

    compression   compressors conserve what they leave out, a bad step leaves no trace, and replicas may come and go
    local         local SGD: replicas that train apart and meet, in random groups; averaging moves nothing on average
    averages      gradients as they should not be: what is bad comes in the first steps, and usual ones follow until all is finite again

Each returns the number of steps, and raises AssertionError or ReplicaMismatch if something does not
hold.
"""

import math
import random
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from gradwire import (
    AllReduce,
    Compressor,
    LocalSGD,
    LocalSimulator,
    OuterSGD,
    Simulator,
    State,
    TwoLevel,
)
from gradwire.core.algorithms.compressor import ERROR
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.kernels.payloads import largest_error
from gradwire.core.simulate import PoisonOps
from gradwire.core.state import checkpoint
from tests.methods import METHODS
from tests.soak import draw

NDArray = np.ndarray[Any, Any]
STEPS = 20
LR = 0.1


# --- what is compared, and quickly: with tensors this small a careless check takes longer than the
# step --------------------------------


class Flat:
    """Tensors by name as one vector, so that a check is a few operations for all of them."""

    def __init__(self, shapes):
        self.place, self.size = {}, 0
        for name, shape in shapes.items():
            self.place[name] = slice(self.size, self.size + math.prod(shape))
            self.size += math.prod(shape)
        filled = [place for place in self.place.values() if place.start < place.stop]
        self._starts = np.array([place.start for place in filled], np.intp)
        self._sizes = [place.stop - place.start for place in filled]

    def of(self, tensors):
        """A row for each of these models; what it lacks is zero."""
        models = list(tensors)
        rows = np.zeros((len(models), self.size))
        for row, model in zip(rows, models, strict=True):
            for name, x in model.items():
                row[self.place[name]] = x.reshape(-1)
        return rows

    def errors(self, states):
        """The mean of what replicas have for themselves."""
        memories = (state.tensors.items() for state in states)
        rows = self.of({n: m["error"] for n, m in memory if "error" in m} for memory in memories)
        return np.add.reduce(rows) / len(rows)

    def largest(self, rows):
        """Of each tensor the largest magnitude in any of the rows, in all its places."""
        if not self._sizes:
            return np.zeros(self.size)
        return np.repeat(
            np.maximum.reduceat(np.maximum.reduce(np.abs(rows)), self._starts), self._sizes
        )

    def require(self, wrong, largest, what):
        """Raise AssertionError unless each magnitude of `wrong` is rounding of these. `what` says
        it with {name} and {wrong}."""
        held = np.abs(wrong) <= 1e-11 * largest
        i = int(held.argmin()) if held.size else 0
        if held.size and not held[i]:
            name = next(name for name, place in self.place.items() if place.start <= i < place.stop)
            raise AssertionError(
                f"{what.format(name=name, wrong=abs(wrong[i]))}, and {1e-11 * largest[i]} is rounding"
            )


def close(what, found, right):
    """Equal but for rounding, at the scale of the largest element; inf and NaN in the same
    places."""
    if found.shape == right.shape and found.tobytes() == right.tobytes():
        return
    scale = np.abs(right[np.isfinite(right)]).max(initial=1e-3)
    assert np.allclose(found, right, rtol=1e-9, atol=1e-9 * scale, equal_nan=True), (
        f"{what} is {found} and not {right}"
    )


def same_bits(a, b):
    return a.map(lambda x: x.tobytes()) == b.map(lambda x: x.tobytes())


# --- compression --------------------------------------------------------------------------------


def compression(seed):
    """Of float64, so that for all steps that were finite

    mean of the gradients so far  =  averages so far + mean of the errors
    """
    rng = random.Random(seed)
    shapes = draw.shapes(rng)
    algorithm, gradients, flat = draw.algorithm(rng), draw.Gradients(shapes, seed), Flat(shapes)
    simulator = Simulator(
        algorithm, shapes, draw.replicas(rng), ops=PoisonOps() if rng.random() < 0.2 else None
    )
    left_out, largest = np.zeros(flat.size), np.zeros(flat.size)
    for _ in range(STEPS):
        if rng.random() < 0.1:
            simulator = resized(simulator, draw.replicas(rng), shapes)
        # Now and then a layer is frozen.
        local = gradients.of(len(simulator.states), [name for name in shapes if rng.random() < 0.9])
        bad = rng.random() < 0.15 and gradients.spoil(rng, local)
        before, step = (
            [state.map(np.array) for state in simulator.states] if bad else [],
            simulator.steps,
        )
        given = simulator.step(local)  # raises if the replicas disagree about anything
        if bad:
            require_skipped(simulator, before, given, local, step)
            continue
        (averages,) = flat.of([given])
        assert np.isfinite(averages).all(), f"not finite, and all gradients were: {given}"
        rows = flat.of(local)
        left_out += np.add.reduce(rows) / len(local) - averages
        largest += flat.largest(rows)
        flat.require(
            left_out - flat.errors(simulator.states), largest, "{name} has lost or gained {wrong}"
        )
    return STEPS


def require_skipped(simulator, before, given, local, step):
    # What its memory does not hold, an uncompressed average hands on as it is.
    compressed = (
        isinstance(simulator.algorithm, Compressor) and step >= simulator.algorithm.start_step
    )
    for name, average in given.items():
        remembered = compressed and name in simulator.states[0].tensors and average.size
        if remembered or any(not np.isfinite(g[name]).all() for g in local):
            assert not np.isfinite(average).all(), (
                f"{name} came out finite from a step that was not"
            )
        if remembered:
            assert np.isnan(average).all(), (
                f"{name} came out in part from a step that was not finite"
            )
    for old, new in zip(before, simulator.states, strict=True):
        assert same_bits(old, new), "a step that was not finite has changed a memory"


def resized(simulator, replicas, shapes):
    """The same training with another number of replicas, through a checkpoint: everyone starts from
    the mean error, all else was equal anyway."""
    algorithm = simulator.algorithm
    other = Simulator(algorithm, shapes, replicas, ops=simulator.ops)
    head = checkpoint.head("compressor", repr(algorithm), simulator.steps)
    states = [head | {"shared": s.shared, "tensors": s.tensors} for s in simulator.states]
    portable = checkpoint.gather(simulator.ops, states, algorithm.per_replica)
    for replica in range(replicas):
        own = checkpoint.of_replica(simulator.ops, portable, replica, replicas)
        other.states[replica] = State(own["shared"], own["tensors"]).map(np.array)
    other.steps = simulator.steps
    return other


# --- local SGD ----------------------------------------------------------------------------------


def local(seed):
    """With a compressor, what it has not sent yet is in the errors, which are of differences from
    the outer parameters:

        mean of the parameters - mean of the errors    is what the optimizers alone have made of it

    Nor does an average that is taken later, if what was learned meanwhile is kept. Between any two
    steps the run may end, and another go on from its memory.
    """
    rng = random.Random(seed)
    shapes = draw.shapes(rng)
    stream, flat = draw.Gradients(shapes, seed), Flat(shapes)
    local, replicas = schedule(rng, len(shapes))
    (start,) = stream.of(1, list(shapes))
    simulator = LocalSimulator(
        local, start, replicas, ops=PoisonOps() if rng.random() < 0.2 else None
    )
    (expected,), used = flat.of([start]), []
    largest = np.maximum(flat.largest(flat.of([start])), 1.0)

    def update(replica, parameters, gradients):
        used.append(gradients)
        return {name: x - LR * gradients[name] for name, x in parameters.items()}

    for _ in range(STEPS):
        # from copies of parameters and memory alone: what is on its way is in these
        if rng.random() < 0.1:
            before, simulator = (
                simulator,
                LocalSimulator(local, simulator.parameters[0], replicas, ops=simulator.ops),
            )
            simulator.parameters = [{n: x.copy() for n, x in p.items()} for p in before.parameters]
            simulator.states, simulator.steps = (
                [s.map(np.array) for s in before.states],
                before.steps,
            )
        used.clear()
        # raises if those that met do not agree
        simulator.step(stream.of(replicas, list(shapes)), update)
        gradients = flat.of(used)
        expected -= LR * np.add.reduce(gradients) / replicas
        largest += flat.largest(gradients)
        now = np.add.reduce(flat.of(simulator.parameters)) / replicas - flat.errors(
            simulator.states
        )
        flat.require(now - expected, largest, "averaging has moved {name} by {wrong}")
    return STEPS


def schedule(rng, parameters):
    replicas = rng.choice([1, 2, 2, 3, 4, 6])
    period = rng.randint(1, 6)
    sizes = [n for n in (2, 3) if replicas % n == 0 and n < replicas]
    compressor = draw.compressor(rng) if rng.random() < 0.5 else None
    # Smaller groups average parameters as they are, and with outer parameters some of what they
    # came to is compressed later: still nothing is lost.
    grouped = sizes and rng.random() < 0.4
    hierarchy = (
        {rng.choice(sizes): period, "all": period * rng.randint(2, 3)} if grouped else period
    )
    longest = max(hierarchy.values()) if isinstance(hierarchy, dict) else hierarchy
    late = (
        {"outer": OuterSGD(), "overlap": rng.randint(1, longest - 1), "merge": "progress"}
        if longest > 1
        else {}
    )
    local = LocalSGD(
        hierarchy,
        start_step=rng.choice([0, 0, 1, 5]),
        subgroup=rng.choice([None, *sizes]),
        fragments=rng.randint(1, min(period, parameters)),
        compressor=compressor,
        **(late if rng.random() < 0.5 else {}),
    )
    return local, replicas


# --- gradients as they should not be ------------------------------------------------------------

#: Steps that may be bad, usual ones by which all has to be well, and how many of these one after
#: the other.
BAD, USUAL, LAST = 14, 150, 3
FAULTS = ("inf", "nan", "all nan", "all zero", "zero", "all rank one", "all sparse", "all tiny")
FAULTS += ("outlier", "all outliers", "large", "all large")


def model(rng):
    """Shapes, of which every method compresses the first."""
    return {**draw.shapes(rng), "p0": (rng.choice([16, 24]), rng.choice([12, 16]))}


def method(rng, replicas):
    """One that is for any model, now and then between nodes."""
    found = rng.choice(
        [
            m.algorithm
            for m in METHODS.values()
            if m.algorithm == AllReduce() or draw.fits(m.algorithm)
        ]
    )
    if hasattr(found, "max_norm"):
        found = replace(
            found, start_step=rng.choice([0, 0, 5]), max_norm=rng.choice([None, None, 0.5, 50.0])
        )
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


def memory(simulator):
    """Of all replicas: place → array."""
    tensors = (
        (r, name, own)
        for r, state in enumerate(simulator.states)
        for name, own in state.tensors.items()
    )
    return {(r, name, key): np.array(x) for r, name, own in tensors for key, x in own.items()}


def averages(seed):
    """A step with an inf or NaN is one on all replicas, and leaves memory alone; no other lets
    anything into it that is not finite."""
    rng = random.Random(f"averages {seed}")
    replicas, dtype = (
        rng.choice([1, 2, 2, 3, 4, 6]),
        rng.choice(["float32", "float32", "float64", "float16"]),
    )
    shapes, faults, well = model(rng), [], 0
    simulator = Simulator(method(rng, replicas), shapes, replicas, dtype=dtype)
    for step in range(BAD + USUAL):
        numbers = np.random.default_rng(rng.randrange(1 << 40))
        given = [
            {
                name: np.asarray(numbers.standard_normal(shape)).astype(dtype)
                for name, shape in shapes.items()
            }
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
    before = memory(simulator)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        averages = simulator.step(given)
    after, good = memory(simulator), finite(*averages.values())
    for name, average in averages.items():
        assert not finite(average) or finite(*(own[name] for own in given)), (
            f"the average of {name} is finite"
        )
    for place, x in after.items():
        assert finite(x), f"{place} is not finite"
        old = before[place]
        # where it overflows it may be clipped
        limit = largest_error(NumpyOps(), old) if ERROR in place else np.inf
        same = np.array_equal(old, x) or np.array_equal(np.clip(old, -limit, limit), x)
        assert good or same, f"an average that is not finite has changed {place}"
    return good
