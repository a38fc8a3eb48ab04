"""Histories of training with gradients as they should not be: inf, NaN, outliers, zeros, of low rank, sparse, tiny.

Each is drawn from its seed. What is bad comes in the first steps, and usual gradients follow until all is finite again. Memory is all the time.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradwire import AllReduce, LocalSGD, LocalSimulator, OuterSGD, Simulator, Spec, TwoLevel
from gradwire.core.algorithms.compressor import ERROR
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.local_sgd.algorithm import DIFFERENCE, OUTER
from gradwire.core.local_sgd.outer import VELOCITY
from gradwire.core.ops import largest_error
from gradwire.core.simulate import ReplicaMismatch
from tests.fuzz.engine import CHANGED, DIFFERENT, GARBAGE, STUCK, WRONG_CLASS, Found, shown
from tests.methods import METHODS, Int8
from tests.soak import draw

Tensors = dict[str, Any]
#: Of a replica, or of all in one form: name → key → array.
Memory = Mapping[str, Mapping[str, Any]]
#: Steps that may be bad, usual ones by which all has to be well, and how many of these one after the other.
BAD, USUAL, LAST = 14, 150, 3
NOT_FINITE = ("inf", "nan", "all nan")
ODD = ("all zero", "zero", "all rank one", "all sparse", "all tiny")
#: Of all replicas, as of none else, the sum may be inf: it is in their average, and so in a parameter.
ANY = (*NOT_FINITE, *ODD, "outlier", "all outliers", "large", "all large")


# --- what is drawn ---------------------------------------------------------------------------------------------------------------


def model(rng: random.Random) -> dict[str, tuple[int, ...]]:
    """Shapes, of which every method compresses the first."""
    return {**draw.shapes(rng), "p0": (rng.choice([16, 24]), rng.choice([12, 16]))}


def method(rng: random.Random, replicas: int = 1) -> Any:
    """One that is for any model, now and then between nodes."""
    found = rng.choice([m.algorithm for m in METHODS.values() if m.algorithm == AllReduce() or draw.fits(m.algorithm)])
    if hasattr(found, "max_norm"):
        found = replace(found, start_step=rng.choice([0, 0, 5]), max_norm=rng.choice([None, None, 0.5, 50.0]))
    nodes = [n for n in (2, 3) if replicas % n == 0]
    return TwoLevel(found, within=rng.choice(nodes)) if nodes and rng.random() < 0.5 else found


def harm(rng: random.Random, fault: str, given: Sequence[Tensors]) -> None:
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


@dataclass
class History:
    """One that is under way: where it is, and what has been done to its gradients."""

    what: str
    found: Found
    rng: random.Random
    model: Mapping[str, tuple[int, ...]]
    replicas: int
    dtype: str
    step: int = 0
    faults: list[str] = field(default_factory=list)

    def gradients(self, faults: Sequence[str]) -> list[Tensors]:
        """Of each replica, for the next step."""
        numbers = np.random.default_rng(self.rng.randrange(1 << 40))
        given = [
            {name: np.asarray(numbers.standard_normal(shape)).astype(self.dtype) for name, shape in self.model.items()}
            for _ in range(self.replicas)
        ]
        if self.step < BAD and self.rng.random() < 0.4:
            fault = self.rng.choice(faults)
            harm(self.rng, fault, given)
            self.faults.append(f"{fault} in step {self.step}")
        return given

    def add(self, kind: str, words: str) -> None:
        after = ", ".join(self.faults[-3:]) or "nothing"
        self.found.add(
            kind, f"{self.what} of {self.dtype}, {self.replicas} replicas, step {self.step} after {after}: {words}"
        )

    def run(self, one: Callable[[], bool], last: int = LAST) -> None:
        """Steps until so many usual ones were well, which is what one returns. None after one that raises."""
        self.found.tried += 1
        well = 0
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                while well < last and self.step < BAD + USUAL:
                    well = well + 1 if one() and self.step >= BAD else 0
                    self.step += 1
        except ReplicaMismatch as error:
            self.add(DIFFERENT, shown(error, 150))
        except Exception as error:
            self.add(WRONG_CLASS, f"{type(error).__name__}: {shown(error, 150)}")
        else:
            if well < last:
                self.add(STUCK, "usual gradients have not helped")


def finite(*arrays: Any) -> bool:
    return all(bool(np.isfinite(np.asarray(x, np.float64)).all()) for x in arrays)


def unfinite(memories: Sequence[Memory], but: Sequence[str] = ()) -> list[str]:
    """Names of memories that hold inf or NaN."""
    return [
        f"{key} of {name}"
        for memory in memories
        for name, own in memory.items()
        for key, x in own.items()
        if key not in but and not finite(x)
    ]


def changed(before: Sequence[Memory], after: Sequence[Memory]) -> list[str]:
    """Names of memories that are not as they were; an error that overflows may have been brought into its bounds."""
    found = []
    for was, now in zip(before, after, strict=True):
        for name, own in was.items():
            for key, x in own.items():
                limit = largest_error(NumpyOps(), x) if key == ERROR else np.inf
                if not np.array_equal(x, now[name][key]) and not np.array_equal(
                    np.clip(x, -limit, limit), now[name][key]
                ):
                    found.append(f"{key} of {name}")
    return found


def memories(simulator: Simulator) -> list[Memory]:
    return [state.map(np.array).tensors for state in simulator.states]


# --- averages of gradients -------------------------------------------------------------------------------------------------------


def averages(seed: int, found: Found) -> None:
    """A step with an inf or NaN is one on all replicas, and leaves memory alone; no other lets anything into it that is not finite."""
    rng = random.Random(f"averages {seed}")
    replicas, dtype = rng.choice([1, 2, 2, 3, 4, 6]), rng.choice(["float32", "float32", "float64", "float16"])
    algorithm = method(rng, replicas)
    history = History(f"averages, seed {seed}, {algorithm!r}", found, rng, model(rng), replicas, dtype)
    made: list[Simulator] = []  # where what it raises is a finding

    def one() -> bool:
        trained = made[0] if made else Simulator(algorithm, history.model, replicas, dtype=dtype)  # type: ignore[arg-type]
        made[:] = [trained]
        given, before = history.gradients(ANY), memories(trained)
        averages, after = trained.step(given), memories(trained)
        for name, average in averages.items():
            if finite(average) and not finite(*(own[name] for own in given)):
                history.add(GARBAGE, f"the average of {name} is finite")
        if bad := unfinite(after):
            history.add(GARBAGE, f"not finite: {bad}")
        well = finite(*averages.values())
        if not well and (names := changed(before, after)):
            history.add(CHANGED, f"a step that is not finite: {names}")
        return well

    history.run(one)


# --- local SGD -------------------------------------------------------------------------------------------------------------------


def schedule(rng: random.Random, replicas: int, parameters: int) -> LocalSGD:
    """Local SGD in any of its forms. Raises ValueError for options that do not go together."""
    period = rng.randint(1, 6)
    sizes = [n for n in (2, 3) if replicas % n == 0 and n < replicas]
    hierarchy = {rng.choice(sizes): period, "all": period * 2} if sizes and rng.random() < 0.3 else period
    momentum = rng.choice([0.0, 0.9])
    outer = (
        OuterSGD(rng.choice([0.7, 1.0]), momentum, momentum > 0 and rng.random() < 0.5) if rng.random() < 0.7 else None
    )
    compressor = method(rng, replicas) if rng.random() < 0.6 else None
    options: dict[str, Any] = {}
    if outer is not None or compressor is not None:
        longest = period * 2 if isinstance(hierarchy, dict) else period
        late = {"overlap": rng.randint(0, longest - 1), "merge": rng.choice([None, 0.3, "progress"])}
        options = {"eager": True} if rng.random() < 0.3 else late
        options |= {"radial": rng.random() < 0.2, "state_dtype": rng.choice([None, None, "float64"])}
    return LocalSGD(
        hierarchy,
        start_step=rng.choice([0, 0, 3]),
        fragments=rng.randint(1, min(period, parameters)),
        outer=outer,
        compressor=compressor,
        weighted=not isinstance(getattr(compressor, "algorithm", compressor), Int8) and rng.random() < 0.3,
        **options,
    )


def locally(seed: int, found: Found) -> None:
    """What is not finite on a replica never reaches what all of them go back to."""
    rng = random.Random(f"locally {seed}")
    shapes, replicas = model(rng), rng.choice([1, 2, 2, 3, 4])
    dtype = rng.choice(["float32", "float32", "float64"])
    parameters = {name: np.ones(shape, dtype) for name, shape in shapes.items()}
    try:
        local = schedule(rng, replicas, len(shapes))
        simulator = LocalSimulator(local, parameters, replicas, dtype=dtype)  # type: ignore[arg-type]
    except ValueError:
        return  # options that do not go together, which other targets try
    lr = rng.choice([0.1, 1.0])
    history = History(f"locally, seed {seed}, {local!r}", found, rng, shapes, replicas, dtype)
    fragments = local.parts({name: Spec(shape, dtype) for name, shape in shapes.items()})  # type: ignore[arg-type]
    met: list[Tensors] = []

    def returns() -> bool:
        """Whether there is something to return to: outer parameters, since each goes its own way."""
        return local.has_outer and history.step >= local.start_step

    def update(_: int, p: Tensors, g: Tensors) -> Tensors:
        size = lr if returns() else 1e-3  # or the optimizer itself may make an inf of outliers
        met.append({name: p[name] - np.asarray(size * g[name], dtype) for name in p})
        return copy.deepcopy(met[-1])

    def one() -> bool:
        weights = [rng.choice([0, 1, 2.5]) for _ in range(replicas)] if local.weighted else [1.0] * replicas
        weights[rng.randrange(replicas)] = 1.0
        before = memories(simulator)
        met.clear()
        given = history.gradients(ANY if returns() else (*ODD, "outlier"))
        simulator.step(given, update, **({"weights": weights} if local.weighted else {}))
        after = [state.tensors for state in simulator.states]
        if bad := unfinite(after, [] if local.eager else [DIFFERENCE]):
            history.add(GARBAGE, f"not finite: {bad}")
        if local.has_outer and not local.delayed:
            for number, names in enumerate(fragments):
                come = [own[name] for own, weight in zip(met, weights, strict=True) if weight for name in names]
                if local.due(simulator.steps - 1, local.longest, number) and not finite(*come):
                    returned(before, after, names)
        return finite(*(x for p in simulator.parameters for x in p.values()))

    def returned(before: Sequence[Memory], after: Sequence[Memory], names: Sequence[str]) -> None:
        kept = [{n: {k: x for k, x in m[n].items() if k in (OUTER, VELOCITY, ERROR)} for n in names} for m in before]
        if wrong := changed(kept, after):
            history.add(CHANGED, f"an average that is not finite: {wrong}")

    history.run(one, LAST + 2 * local.longest)


def histories(seed: int, found: Found, each: int) -> None:
    """So many of each kind."""
    for number in range(seed * each, (seed + 1) * each):
        averages(number, found)
        locally(number, found)
