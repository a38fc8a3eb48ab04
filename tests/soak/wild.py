"""Histories of training with gradients as they should not be: inf, NaN, outliers, zeros, of low rank, sparse, tiny.

What is bad comes in the first steps, and usual gradients follow until all is finite again. Memory is all the time.
"""

import copy
import random
import warnings
from dataclasses import replace

import numpy as np

from gradwire import AllReduce, LocalSGD, LocalSimulator, OuterSGD, Simulator, Spec, TwoLevel
from gradwire.core.algorithms.compressor import ERROR
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.local_sgd.algorithm import DIFFERENCE, OUTER
from gradwire.core.local_sgd.outer import VELOCITY
from gradwire.core.ops import largest_error
from tests.methods import METHODS, Int8
from tests.soak import draw

#: Steps that may be bad, usual ones by which all has to be well, and how many of these one after the other.
BAD, USUAL, LAST = 14, 150, 3
ODD = ("all zero", "zero", "all rank one", "all sparse", "all tiny", "outlier")
#: Of all replicas, as of none else, the sum may be inf: it is in their average, and so in a parameter.
ANY = (*ODD, "inf", "nan", "all nan", "all outliers", "large", "all large")


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


class History:
    """One that is under way: where it is, and what has been done to its gradients."""

    def __init__(self, rng, shapes, replicas, dtype):
        self.rng, self.shapes, self.replicas, self.dtype = rng, shapes, replicas, dtype
        self.step, self.faults = 0, []

    def gradients(self, faults):
        """Of each replica, for the next step."""
        numbers = np.random.default_rng(self.rng.randrange(1 << 40))
        given = [
            {name: np.asarray(numbers.standard_normal(shape)).astype(self.dtype) for name, shape in self.shapes.items()}
            for _ in range(self.replicas)
        ]
        if self.step < BAD and self.rng.random() < 0.4:
            fault = self.rng.choice(faults)
            harm(self.rng, fault, given)
            self.faults.append(f"{fault} in step {self.step}")
        return given

    def run(self, one, last=LAST):
        """Steps until so many usual ones were well, which is what one returns. Returns how many."""
        well = 0
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                while well < last:
                    assert self.step < BAD + USUAL, "usual gradients have not helped"
                    well = well + 1 if one() and self.step >= BAD else 0
                    self.step += 1
        except Exception as error:
            error.add_note(f"step {self.step} of {self.dtype} after {', '.join(self.faults[-3:]) or 'nothing'}")
            raise
        return self.step


def finite(*arrays):
    return all(bool(np.isfinite(np.asarray(x, np.float64)).all()) for x in arrays)


def memories(simulator):
    """Of each replica: name → key → array."""
    return [state.map(np.array).tensors for state in simulator.states]


def require_finite(memories, but=()):
    for memory in memories:
        for name, own in memory.items():
            for key, x in own.items():
                assert key in but or finite(x), f"{key} of {name} is not finite"


def require_same(before, after, names=None, keys=None):
    """Of memories; an error that overflows may have been brought into its bounds."""
    for was, now in zip(before, after, strict=True):
        for name, key, x in ((n, k, x) for n in names or was for k, x in was[n].items()):
            limit = largest_error(NumpyOps(), x) if key == ERROR else np.inf
            same = any(np.array_equal(y, now[name][key]) for y in (x, np.clip(x, -limit, limit)))
            assert same or (keys and key not in keys), f"an average that is not finite has changed {key} of {name}"


def averages(seed):
    """A step with an inf or NaN is one on all replicas, and leaves memory alone; no other lets anything into it that is not finite."""
    rng = random.Random(f"averages {seed}")
    replicas, dtype = rng.choice([1, 2, 2, 3, 4, 6]), rng.choice(["float32", "float32", "float64", "float16"])
    history = History(rng, model(rng), replicas, dtype)
    simulator = Simulator(method(rng, replicas), history.shapes, replicas, dtype=dtype)

    def one():
        given, before = history.gradients(ANY), memories(simulator)
        averages, after = simulator.step(given), memories(simulator)
        for name, average in averages.items():
            assert not finite(average) or finite(*(own[name] for own in given)), f"the average of {name} is finite"
        require_finite(after)
        if not (well := finite(*averages.values())):
            require_same(before, after)
        return well

    return history.run(one)


def schedule(rng, replicas, parameters):
    """Local SGD in any of its forms. Raises ValueError for options that do not go together."""
    period = rng.randint(1, 6)
    sizes = [n for n in (2, 3) if replicas % n == 0 and n < replicas]
    hierarchy = {rng.choice(sizes): period, "all": period * 2} if sizes and rng.random() < 0.3 else period
    momentum = rng.choice([0.0, 0.9])
    outer = OuterSGD(rng.choice([0.7, 1.0]), momentum, momentum > 0 and rng.random() < 0.5)
    outer = outer if rng.random() < 0.7 else None
    compressor = method(rng, replicas) if rng.random() < 0.6 else None
    options = {}
    if outer is not None or compressor is not None:
        longest = period * 2 if isinstance(hierarchy, dict) else period
        late = {"overlap": rng.randint(0, longest - 1), "merge": rng.choice([None, 0.3, "progress"])}
        options = {"eager": True} if rng.random() < 0.3 else late
        options |= {"radial": rng.random() < 0.2, "state_dtype": rng.choice([None, None, "float64"])}
    options["weighted"] = not isinstance(getattr(compressor, "algorithm", compressor), Int8) and rng.random() < 0.3
    options |= {"start_step": rng.choice([0, 0, 3]), "fragments": rng.randint(1, min(period, parameters))}
    return LocalSGD(hierarchy, outer=outer, compressor=compressor, **options)


def locally(seed):
    """What is not finite on a replica never reaches what all of them go back to."""
    rng = random.Random(f"locally {seed}")
    shapes, replicas = model(rng), rng.choice([1, 2, 2, 3, 4])
    dtype = rng.choice(["float32", "float32", "float64"])
    try:
        local = schedule(rng, replicas, len(shapes))
        ones = {name: np.ones(shape, dtype) for name, shape in shapes.items()}
        simulator = LocalSimulator(local, ones, replicas, dtype=dtype)
    except ValueError:
        return 0  # options that do not go together, which `make fuzz` tries
    lr, history, met = rng.choice([0.1, 1.0]), History(rng, shapes, replicas, dtype), []
    fragments = local.parts({name: Spec(shape, dtype) for name, shape in shapes.items()})

    def returns():
        """Whether there is something to return to: outer parameters, since each goes its own way."""
        return local.has_outer and history.step >= local.start_step

    def update(_, p, g):
        size = lr if returns() else 1e-3  # or the optimizer itself may make an inf of outliers
        met.append({name: p[name] - np.asarray(size * g[name], dtype) for name in p})
        return copy.deepcopy(met[-1])

    def one():
        weights = [rng.choice([0, 1, 2.5]) for _ in range(replicas)] if local.weighted else [1.0] * replicas
        weights[rng.randrange(replicas)] = 1.0
        before = memories(simulator)
        met.clear()
        given = history.gradients(ANY if returns() else ODD)
        simulator.step(given, update, **({"weights": weights} if local.weighted else {}))
        after = [state.tensors for state in simulator.states]
        require_finite(after, () if local.eager else (DIFFERENCE,))
        for number, names in enumerate(fragments if local.has_outer and not local.delayed else ()):
            come = [own[name] for own, weight in zip(met, weights, strict=True) if weight for name in names]
            if local.due(simulator.steps - 1, local.longest, number) and not finite(*come):
                require_same(before, after, names, (OUTER, VELOCITY, ERROR))
        return finite(*(x for p in simulator.parameters for x in p.values()))

    return history.run(one, LAST + 2 * local.longest)
