"""Saved states that are damaged, of something else, or of another number of replicas, in torch and
JAX: what loads them refuses by name and changes nothing, or trains on with finite numbers. Whole
ones of the same thing are taken."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire.jax_backend as gwj
import gradwire.torch_backend as gw
from gradwire import PowerSGD, Quantize, Simulator, Spec, TopK, diloco, shard_by_element
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.state import checkpoint
from tests.fuzz.engine import CHANGED, GARBAGE, LATE, REFUSALS, WRONG_CLASS, Found, shown
from tests.jax.replicas import AXIS, Replicas
from tests.torch.compare import same_bits
from tests.torch.models import mlp

#: In place of something in a state.
WRONG = (None, "x", -1, 0, 1.5, math.nan, math.inf, True, [], {}, 2**70, b"x", {"a": 1}, [1, 2])
TENSORS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: x.reshape(*x.shape, 1).expand(*x.shape, 2),
    lambda x: x.reshape(-1)[1:],
    lambda x: x.to(torch.int64),
    lambda x: x.to(torch.complex64),
    lambda x: x.bool(),
    lambda x: torch.zeros(0),
    lambda x: x.tolist(),
    lambda x: torch.empty_like(x, device="meta"),
    lambda x: torch.full_like(x, math.nan) if x.is_floating_point() else None,
    lambda x: torch.full_like(x, -math.inf) if x.is_floating_point() else None,
)


@dataclass
class Trained:
    """Something that trains, and keeps a state. One that only asks for `wrong` is to refuse
    these."""

    step: Callable[[], object]
    load: Callable[[Any], object]
    now: Callable[[], Any]
    forms: Mapping[str, Callable[[], Any]]
    wrong: Callable[[], Mapping[str, Any]] = dict


def _gradients(shapes: Mapping[str, tuple[int, ...]], replicas: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {n: rng.standard_normal(s).astype("float32") for n, s in shapes.items()}
        for _ in range(replicas)
    ]


def of_three(algorithm: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What three replicas have saved together."""
    simulator = Simulator(algorithm, shapes, 3, dtype="float32")
    for _ in range(3):
        simulator.step(_gradients(shapes, 3))
    head = checkpoint.head("compressor", repr(algorithm), simulator.steps)
    states = [head | {"shared": s.shared, "tensors": s.tensors} for s in simulator.states]
    return checkpoint.gather(NumpyOps(), states, algorithm.per_replica)


def _module() -> tuple[Any, Callable[[Any], None]]:
    torch.manual_seed(0)
    module = mlp(16, 16, 8)
    return module, lambda called: called(torch.randn(4, 16)).square().mean().backward()


def hook(algorithm: Any) -> Trained:
    module, backward = _module()
    ddp = DistributedDataParallel(module)
    handle = gw.register_comm_hook(ddp, algorithm)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    forms = {
        "mean": handle.state_dict,
        "all": partial(handle.gathered_state_dict, "all"),
        "rank": handle.rank_state_dict,
        "three": partial(of_three, algorithm, shapes),
    }
    return Trained(partial(backward, ddp), handle.load_state_dict, handle.rank_state_dict, forms)


def _step(module: torch.nn.Module, backward: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(module)
    optimizer.step()


def locally(compressor: Any) -> Trained:
    module, backward = _module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    handle = gw.local_sgd(module, optimizer, diloco(2, compressor=compressor))
    forms = {"whole": handle.state_dict, "rank": handle.rank_state_dict}
    return Trained(
        partial(_step, module, backward, optimizer),
        handle.load_state_dict,
        handle.rank_state_dict,
        forms,
    )


def zero() -> Trained:
    """Whose state is also in the shards of three ranks."""
    module, backward = _module()
    optimizer = gw.ZeroOptimizer(module.named_parameters(), torch.optim.AdamW, lr=1e-3)
    owned = shard_by_element(
        {n: Spec(tuple(p.shape)) for n, p in module.named_parameters()}, 3
    ).owned

    def cut() -> list[dict[str, Any]]:
        shards = [
            copy.deepcopy(optimizer.rank_state_dict()) | {"rank": rank, "replicas": 3}
            for rank in range(3)
        ]
        for rank, own in enumerate(shards):
            for name, memory in own["tensors"].items():
                piece = slice(*owned(name, rank))
                own["tensors"][name] = {
                    k: x.reshape(-1)[piece] if x.ndim else x for k, x in memory.items()
                }
        return shards

    def load(state: Any) -> None:
        optimizer.load_state_dict(gw.consolidate(state) if isinstance(state, list) else state)

    def wrong() -> dict[str, Any]:
        first, second, third = cut()
        return {"one twice": [first, second, first], "one missing": [first, third]}

    forms = {
        "whole": optimizer.consolidated_state_dict,
        "rank": optimizer.rank_state_dict,
        "shards": cut,
    }
    return Trained(
        partial(_step, module, backward, optimizer), load, optimizer.rank_state_dict, forms, wrong
    )


def torchs() -> Trained:
    module, backward = _module()
    ddp, state = DistributedDataParallel(module), gw.PowerSGDState(None, 1, 2)
    ddp.register_comm_hook(state, gw.powerSGD_hook)
    return Trained(
        partial(backward, ddp), state.load_state_dict, state.state_dict, {"own": state.state_dict}
    )


def in_jax(algorithm: Any) -> Trained:
    """Two replicas."""
    shapes = {"w": (16, 12), "b": (16,)}
    tx, params = (
        gwj.average_gradients(algorithm, axis_name=AXIS),
        {n: jnp.zeros(s) for n, s in shapes.items()},
    )
    like, run = tx.init(params), Replicas(tx, params, 2)
    mine = jax.tree.map(lambda spec: spec == jax.sharding.PartitionSpec(AXIS), run.specs)

    def portable() -> Any:
        return gwj.to_portable(run.global_state(), algorithm, errors="all")

    def rows(x: Any, own: bool) -> Any:
        """A row for each replica, of what is its own."""
        x = np.asarray(x)
        return (
            x
            if not own
            else np.repeat(x, 2 // len(x), 0)[:, None]
            if len(x)
            else np.zeros((2, *x.shape), x.dtype)
        )

    def load(state: Any) -> None:
        given = gwj.set_replicas(gwj.from_portable(state, algorithm, like, replicas=2), 2)
        run.state = jax.tree.map(rows, given, mine)

    def now() -> Any:
        return jax.tree.map(
            lambda x: torch.from_numpy(np.array(x)) if hasattr(x, "dtype") else x, portable()
        )

    forms = {"all": portable, "three": partial(of_three, algorithm, shapes)}
    return Trained(lambda: run.update(_gradients(shapes, 2)), load, now, forms)


ROUNDED = Quantize("int4", block=32, stochastic=True)
KINDS: dict[str, Callable[[], Trained]] = {
    "hook, PowerSGD": lambda: hook(PowerSGD(2)),
    "hook, half-steps": lambda: hook(PowerSGD(2, half_step=True)),
    "hook, Quantize": lambda: hook(ROUNDED),
    "hook, TopK": lambda: hook(TopK(4, per=64)),
    "local_sgd": lambda: locally(None),
    "local_sgd, PowerSGD": lambda: locally(PowerSGD(1)),
    "ZeroOptimizer": zero,
    "PowerSGDState": torchs,
    "JAX, PowerSGD": lambda: in_jax(PowerSGD(2)),
    "JAX, Quantize": lambda: in_jax(ROUNDED),
}


def places(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = (
        state.keys()
        if isinstance(state, dict)
        else range(len(state))
        if isinstance(state, list)
        else ()
    )
    return [each for key in keys for each in [(*path, key), *places(state[key], (*path, key))]]


def damaged(state: Any, rng: random.Random) -> tuple[Any, str]:
    """A copy in which one thing is missing, renamed, doubled, or another."""
    state = copy.deepcopy(state)
    *parents, last = rng.choice(places(state))
    around = state
    for key in parents:
        around = around[key]
    value, where = around[last], "/".join(map(str, [*parents, last]))
    match rng.randrange(4):
        case 0:
            around.pop(last)
            return state, f"without {where}"
        case 1 if isinstance(around, dict):
            around[rng.choice(["x", "", 5, None, f"{last}z"])] = around.pop(last)
            return state, f"{where} under another name"
        case 2 if isinstance(around, dict):
            other = rng.choice(list(around))
            around[last], around[other] = around[other], around[last]
            return state, f"{where} swapped with {other}"
    changed = _altered(value, rng)
    around[last] = rng.choice(WRONG) if changed is None else changed
    if last == "lr" and isinstance(around[last], int):  # any number is a learning rate
        around[last] = "x"
    return state, f"{where} is {shown(around[last])}"


def _altered(x: Any, rng: random.Random) -> Any:
    """Another array in place of one; None where there is none."""
    if isinstance(x, torch.Tensor):
        return rng.choice(TENSORS)(x)
    changed = rng.choice(TENSORS)(torch.from_numpy(x)) if isinstance(x, np.ndarray) else None
    return changed.numpy() if isinstance(changed, torch.Tensor) and not changed.is_meta else changed


def finite(x: Any) -> bool:
    if isinstance(x, dict):
        return all(map(finite, x.values()))
    if isinstance(x, torch.Tensor):
        return bool(x.isfinite().all()) if x.is_floating_point() else True
    return not isinstance(x, float) or math.isfinite(x)


def tried(
    what: str,
    kind: Callable[[], Trained],
    target: Trained,
    state: Any,
    found: Found,
    right: bool | None = None,
) -> Trained:
    """Load a state, of which may be known whether it is right. Returns what is to be loaded into
    next: a new one, where this one has been changed."""
    found.tried += 1
    before = copy.deepcopy(target.now())
    try:
        target.load(state)
    except Exception as error:
        said = f"{what}: {type(error).__name__}: {shown(error, 150)}"
        if right or not isinstance(error, REFUSALS):
            found.add(LATE if right else WRONG_CLASS, said)
        if same_bits(target.now(), before):
            return target
        found.add(CHANGED, said)
        return begun(kind)
    try:
        for _ in range(4):
            target.step()
        after = target.now()
    except Exception as error:
        found.add(LATE, f"{what}: {type(error).__name__}: {shown(error, 150)}")
    else:
        if right is False or not finite(after):
            found.add(GARBAGE, what)
    return begun(kind)


def begun(kind: Callable[[], Trained]) -> Trained:
    target = kind()
    for _ in range(4):
        target.step()
    return target


def histories(seed: int, found: Found, each: int) -> None:
    """So many damaged states of each form of each kind, the whole one, and the states of all other
    kinds."""
    rng = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = {name: begun(kind) for name, kind in KINDS.items()}
        good = {
            (n, form): copy.deepcopy(give())
            for n, own in made.items()
            for form, give in own.forms.items()
        }
        for name, kind in KINDS.items():
            target = begun(kind)
            for how, state in target.wrong().items():
                target = tried(f"{name}, {how}", kind, target, state, found, right=False)
            for (owner, form), state in good.items():
                what = f"{name} given the state of {owner}, {form}"
                whole = True if owner == name else None
                target = tried(what, kind, target, copy.deepcopy(state), found, whole)
                for _ in range(each if owner == name else 0):
                    bad, how = damaged(state, rng)
                    target = tried(f"{name}, {form}: {how}", kind, target, bad, found)
