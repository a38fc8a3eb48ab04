"""States saved by so many replicas and loaded by others, whole and damaged, by torch and JAX.

A whole one is taken: the mean of what each replica had for itself is kept. A damaged one is refused by name, or what goes on from it is finite.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import gradwire.jax_backend as gwj
import gradwire.torch_backend as gw
from gradwire import PowerSGD, Quantize, Simulator, Spec, TopK, shard_by_element
from gradwire.core.algorithm import Algorithm
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.state import checkpoint
from tests.fuzz.engine import CHANGED, GARBAGE, LATE, NOT_NAMED, REFUSALS, WRONG_CLASS, Found, shown
from tests.fuzz.states import Trained, begun, damaged
from tests.fuzz.states import tried as load
from tests.jax.replicas import AXIS, Replicas
from tests.torch.compare import same_bits

OPS, SHAPES = NumpyOps(), {"w": (16, 12), "b": (16,)}
ALGORITHMS: tuple[Algorithm, ...] = (PowerSGD(2), TopK(4, per=64), Quantize("int4", block=32, stochastic=True))
WORLDS = (1, 2, 3, 4)
#: Goes on from a state as this many replicas: the mean of their errors before, and what is to be finite after a step.
GoOn = Callable[[Any, Algorithm, int], tuple[Any, list[Any]]]


def gradients(replicas: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{n: rng.standard_normal(s).astype("float32") for n, s in SHAPES.items()} for _ in range(replicas)]


@functools.cache
def saved(algorithm: Algorithm, replicas: int) -> dict[str, Any]:
    """What so many replicas have saved together after three steps."""
    simulator = Simulator(algorithm, SHAPES, replicas, dtype="float32")
    for step in range(3):
        simulator.step(gradients(replicas, step))
    head = checkpoint.head("compressor", repr(algorithm), simulator.steps)
    states = [head | {"shared": s.shared, "tensors": s.tensors} for s in simulator.states]
    return checkpoint.gather(OPS, states, algorithm.per_replica)


@functools.cache
def _averager(algorithm: Algorithm) -> Any:
    return gw.Averager(algorithm, {name: torch.zeros(shape) for name, shape in SHAPES.items()})


def in_torch(state: Any, algorithm: Algorithm, replicas: int) -> tuple[Any, list[Any]]:
    """On the one rank that there is."""
    averager = _averager(algorithm)
    before = averager.rank_state_dict()
    try:
        averager.load_state_dict(state)
    except Exception:
        if not same_bits(averager.rank_state_dict(), before):
            raise AssertionError(CHANGED) from None
        raise
    error = averager.rank_state_dict()["tensors"]["w"]["error"].numpy().copy()
    averages = averager({name: torch.from_numpy(x) for name, x in gradients(1)[0].items()})
    after = [x.numpy() for x in averages.values()] + [averager.rank_state_dict()["tensors"]["w"]["error"].numpy()]
    averager.load_state_dict(before)
    return error, after


@functools.cache
def _replicas(algorithm: Algorithm, replicas: int) -> tuple[Any, Any]:
    tx = gwj.average_gradients(algorithm, axis_name=AXIS)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    return tx.init(params), Replicas(tx, params, replicas)


def in_jax(state: Any, algorithm: Algorithm, replicas: int) -> tuple[Any, list[Any]]:
    like, run = _replicas(algorithm, replicas)
    given = gwj.set_replicas(gwj.from_portable(state, algorithm, like, replicas=replicas), replicas)
    error = np.mean(np.asarray(given.local.per_replica["error"]["w"], np.float64), axis=0)

    def rows(x: Any) -> Any:
        x = np.asarray(x)
        return (
            np.repeat(x, replicas if len(x) == 1 else 1, 0)[:, None]
            if len(x)
            else np.zeros((replicas, *x.shape), x.dtype)
        )

    marked = jax.tree.map(lambda spec: spec == jax.sharding.PartitionSpec(AXIS), run.specs)
    run.state = jax.tree.map(lambda x, mine: rows(x) if mine else x, given, marked)
    averages = run.update(gradients(replicas))
    return error, [*averages.values(), run.global_state().local.per_replica["error"]["w"]]


FORMS: dict[str, GoOn] = {"torch": in_torch, "jax": in_jax}


def tried(what: str, attempt: Callable[[], tuple[Any, list[Any]]], found: Found, mean: Any = None) -> None:
    """Of a whole state the mean of the errors is known, and it has to be taken."""
    found.tried += 1
    try:
        error, after = attempt()
    except AssertionError as error:
        found.add(CHANGED, f"{what}: {shown(error, 150)}")
    except Exception as error:
        if mean is not None or not isinstance(error, REFUSALS):
            found.add(WRONG_CLASS if mean is None else LATE, f"{what}: {type(error).__name__}: {shown(error, 150)}")
        elif not str(error):
            found.add(NOT_NAMED, what)
    else:
        if mean is not None and not np.allclose(error, mean, rtol=1e-5, atol=1e-6):
            found.add(GARBAGE, f"{what}: another mean of errors")
        if not all(np.isfinite(x).all() for x in after):
            found.add(GARBAGE, f"{what}: not finite")


def compressors(seed: int, found: Found, each: int, forms: tuple[str, ...] = tuple(FORMS)) -> None:
    """So many damaged states for each form, and each whole one once."""
    rng = random.Random(f"worlds {seed}")
    for form in forms:
        go_on, here = FORMS[form], (1,) if form == "torch" else WORLDS
        for _ in range(each):
            algorithm, owner, before, after = *rng.choices(ALGORITHMS, k=2), rng.choice(WORLDS), rng.choice(here)
            what = f"{form}, {algorithm!r}, {before} → {after} replicas"
            state = copy.deepcopy(saved(algorithm, before))
            mean = np.mean(state["local"]["w"]["error"], axis=0, dtype=np.float64)
            tried(what, functools.partial(go_on, state, algorithm, after), found, mean)
            bad, how = damaged(saved(algorithm, before), rng)
            tried(f"{what}: {how}", functools.partial(go_on, bad, algorithm, after), found)
            if owner != algorithm:
                other = copy.deepcopy(saved(owner, before))
                tried(f"{what}, of {owner!r}", functools.partial(go_on, other, algorithm, after), found)


# --- sharded optimizers ----------------------------------------------------------------------------------------------------------


def _trained() -> Trained:
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    optimizer = gw.ZeroOptimizer(parameters.items(), torch.optim.AdamW, lr=1e-3, average_gradients=True)

    def step() -> None:
        for name, x in gradients(1)[0].items():
            parameters[name].grad = torch.from_numpy(x)
        optimizer.step()

    forms = {"whole": optimizer.consolidated_state_dict}
    return Trained(step, optimizer.load_state_dict, optimizer.rank_state_dict, forms)


def cut(state: Any, ranks: int) -> list[dict[str, Any]]:
    """What each of so many ranks would have saved of this one's state."""
    shards = shard_by_element({name: Spec(shape) for name, shape in SHAPES.items()}, ranks)
    states = []
    for rank in range(ranks):
        own = copy.deepcopy(state)
        own |= {"rank": rank, "replicas": ranks}
        for name, memory in own["tensors"].items():
            piece = slice(*shards.owned(name, rank))
            own["tensors"][name] = {k: x.reshape(-1)[piece] if x.ndim else x for k, x in memory.items()}
        states.append(own)
    return states


def sharded(seed: int, found: Found, each: int) -> None:
    """Shards of several ranks, of which one is damaged, is there twice, or missing, joined and loaded."""
    rng = random.Random(f"shards {seed}")
    target = begun(_trained)
    whole, state = copy.deepcopy(target.forms["whole"]()), copy.deepcopy(target.now())
    for _ in range(each):
        ranks = rng.choice(WORLDS)
        shards, how = cut(state, ranks), "whole"
        kind = rng.choice(["damaged", "damaged", "damaged", "twice", "whole"])
        if kind == "damaged":
            one = rng.randrange(ranks)
            shards[one], how = damaged(shards[one], rng)
        elif ranks > 1 and kind == "twice":
            how = rng.choice(["one twice", "one missing"])
            shards = [*shards[:-1], shards[0]] if how == "one twice" else shards[:-1]
        what = f"shards of {ranks} ranks, {how}"
        found.tried += 1
        try:
            joined = gw.consolidate(shards)
        except REFUSALS as error:
            if how == "whole":
                found.add(LATE, f"{what}: {type(error).__name__}: {shown(error, 150)}")
            continue
        except Exception as error:
            found.add(WRONG_CLASS, f"{what}: {type(error).__name__}: {shown(error, 150)}")
            continue
        if how == "whole" and not same_bits(joined["state"], whole["state"]):
            found.add(GARBAGE, f"{what}: other memory")
        if how in ("one twice", "one missing"):
            found.add(GARBAGE, f"{what}: accepted")
        target = load(f"{what}, loaded", _trained, target, joined, found)


def resharded(seed: int, found: Found, each: int) -> None:
    """JAX's state of so many replicas for others, with leaves of other shapes."""
    rng = random.Random(f"reshard {seed}")
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

    def made(replicas: int) -> Any:
        tx = gwj.zero1(optax.adam(0.1), axis_name=AXIS, replicas=replicas)
        return jax.tree.map(np.array, tx.init(params))

    for _ in range(each):
        before, after = rng.choice(WORLDS), rng.choice(WORLDS)
        state, found.tried = made(before), found.tried + 1
        what = f"reshard, {before} → {after} replicas"
        leaves, structure = jax.tree.flatten(state)
        place = rng.randrange(len(leaves))
        leaves[place] = rng.choice(
            [np.zeros(3), leaves[place][..., None], np.zeros(0), leaves[place].reshape(-1)[1:], "x", None]
        )
        try:
            given = gwj.reshard(structure.unflatten(leaves), made(after))
        except REFUSALS:
            continue
        except Exception as error:
            found.add(WRONG_CLASS, f"{what}, leaf {place}: {type(error).__name__}: {shown(error, 150)}")
            continue
        wanted = [np.shape(x) for x in jax.tree.leaves(made(after))]
        if [np.shape(x) for x in jax.tree.leaves(given)] != wanted:
            found.add(GARBAGE, f"{what}, leaf {place}: {shown(leaves[place])} is taken")


def histories(seed: int, found: Found, each: int) -> None:
    """So many of each form, of compressors and of sharded optimizers."""
    compressors(seed, found, each)
    sharded(seed, found, each)
    resharded(seed, found, max(1, each // 4))
