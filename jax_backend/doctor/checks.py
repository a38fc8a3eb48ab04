"""The checks of one process: its kernels, each compiled as one program, and every algorithm as a
transformation, mapped over replicas by `pmap` and `shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, PartitionSpec

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.simulate.doctor import kernels
from gradwire.core.simulate.doctor.messages import given, messages, require_right
from gradwire.core.simulate.doctor.methods import known
from gradwire.core.simulate.doctor.report import Fault, Section
from gradwire.core.simulate.known_answers import KnownStep
from gradwire.core.state import checkpoint
from gradwire.jax_backend.axes.mapped_axis import mark_varying
from gradwire.jax_backend.engine.driver import drive
from gradwire.jax_backend.ops.kernels import JaxOps
from gradwire.jax_backend.state.checkpoint import from_portable
from gradwire.jax_backend.state.placement import distribute, partition_specs, replicate
from gradwire.jax_backend.state.trees import NOTHING
from gradwire.jax_backend.transforms import average_gradients

AXIS = "replicas"
#: The maps under which a step runs.
MAPS = ("pmap", "shard_map")
ROWS: Any = PartitionSpec(AXIS)  # type: ignore[no-untyped-call]
NDArray = npt.NDArray[Any]


def check_kernels(section: Section, *, quick: bool) -> None:
    """Every kernel and codec on the default device."""
    ops = JaxOps()

    def checked(check: kernels.Check) -> None:
        found = jax.jit(lambda arrays: check.call(ops, arrays))(check.given)
        check.require([_in_numpy(x) for x in found])

    for name, check in kernels.checks(quick=quick).items():
        section.check(name, functools.partial(checked, check))


def check_messages(section: Section, driver: str, devices: Sequence[Any]) -> None:
    """What each kind of request brings between devices, which may be those of several processes."""
    replicas = len(devices)

    def body(x: dict[str, Any]) -> dict[str, Any]:
        return drive(messages(JaxOps(), x), AXIS)

    def checked() -> str:
        rows = [given(replica, replicas) for replica in range(replicas)]
        found = _mapped(body, driver, devices)(_placed(rows, devices, driver))
        own = {name: _rows(x) for name, x in found.items()}
        said = [
            require_right({name: x[replica] for name, x in own.items()}, replica, replicas)
            for replica in own["index"]
        ]
        return said[0]

    section.check("messages", checked)


def check_methods(
    section: Section, driver: str, devices: Sequence[Any], algorithms: Sequence[Algorithm]
) -> None:
    """Averages and memory of each algorithm, on the replicas of this process."""
    for algorithm in algorithms:
        section.check(repr(algorithm), functools.partial(_check_method, algorithm, driver, devices))


def _check_method(algorithm: Algorithm, driver: str, devices: Sequence[Any]) -> str:
    replicas = len(devices)
    specs, steps = known(algorithm, replicas)
    tx = average_gradients(algorithm, axis_name=AXIS)
    like = tx.init({name: np.zeros(spec.shape, np.float32) for name, spec in specs.items()})
    mesh = Mesh(np.array(devices), (AXIS,))

    def body(gradients: Mapping[str, Any], state: Any) -> Any:
        updates, state = tx.update(gradients, state)
        return {name: x[None] for name, x in updates.items()}, state

    if driver == "pmap":
        step: Callable[..., Any] = jax.pmap(tx.update, axis_name=AXIS, devices=devices)
    else:
        placed, rows = partition_specs(like, AXIS), ROWS

        def one(gradients: Mapping[str, Any], state: Any) -> Any:
            return body({name: mark_varying(x[0], AXIS) for name, x in gradients.items()}, state)

        specs_of = rows, placed
        step = jax.jit(
            jax.shard_map(one, mesh=mesh, in_specs=specs_of, out_specs=specs_of, check_vma=False)
        )
    for one_step in steps:
        state = _begun(algorithm, one_step, like, replicas)
        state = (
            replicate(state, devices, axis_name=AXIS)
            if driver == "pmap"
            else distribute(state, mesh, AXIS)
        )
        updates, state = step(_placed(one_step.gradients, devices, driver), state)
        averages = {name: _rows(x) for name, x in updates.items()}
        for replica in next(iter(averages.values())):
            after = _memory(state, driver, replica, one_step)
            if wrong := one_step.wrong_on(
                replica, {name: x[replica] for name, x in averages.items()}, after
            ):
                raise Fault(wrong)
    return f"{len(steps)} steps"


def _begun(algorithm: Algorithm, step: KnownStep, like: Any, replicas: int) -> Any:
    """The state before a step, of all replicas."""
    own = [
        {
            **checkpoint.head("compressor", repr(algorithm), step.number),
            "shared": state.shared,
            "tensors": state.tensors,
        }
        for state in step.before
    ]
    return from_portable(
        checkpoint.gather(NumpyOps(), own, algorithm.per_replica),
        algorithm,
        like,
        replicas=replicas,
    )


def _memory(state: Any, driver: str, replica: int, step: KnownStep) -> State[NDArray]:
    """What a replica of this process remembers after a step, by tensor."""
    tensors: dict[str, dict[str, NDArray]] = {}
    for trees, differs in ((state.memory, False), (state.local.per_replica, True)):
        for key, tree in trees.items():
            for name, x in tree.items() if key != NOTHING else ():
                right = step.after[replica].tensors.get(name, {}).get(key)
                if isinstance(x, tuple) or right is None:
                    continue
                everywhere = not differs and driver == "shard_map"
                row = _in_numpy(x.addressable_shards[0].data) if everywhere else _rows(x)[replica]
                tensors.setdefault(name, {})[key] = row.reshape(right.shape)
    return State(dict(step.after[replica].shared), tensors)


def _mapped(body: Callable[..., Any], driver: str, devices: Sequence[Any]) -> Callable[..., Any]:
    """A function of one replica's arrays on all of them, with a leading axis for replicas."""
    if driver == "pmap":
        mapped: Callable[..., Any] = jax.pmap(body, axis_name=AXIS, devices=devices)
        return mapped

    def one(x: Any) -> Any:
        return jax.tree.map(lambda y: y[None], body(jax.tree.map(lambda y: y[0], x)))

    return jax.jit(
        jax.shard_map(
            one,
            mesh=Mesh(np.array(devices), (AXIS,)),
            in_specs=ROWS,
            out_specs=ROWS,
            check_vma=False,
        )
    )


def _placed(
    rows: Sequence[Mapping[str, NDArray]], devices: Sequence[Any], driver: str
) -> dict[str, Any]:
    """Row i of each array on device i, of the devices of this process."""
    own = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
    stacked = {name: np.stack([rows[i][name] for i in own]) for name in rows[0]}
    if driver == "pmap":
        return stacked
    sharding = jax.NamedSharding(Mesh(np.array(devices), (AXIS,)), ROWS)
    place: Any = jax.make_array_from_process_local_data
    return {name: place(sharding, x) for name, x in stacked.items()}


def _rows(x: Any) -> dict[int, NDArray]:
    """Replica → its row, of the replicas of this process."""
    return {shard.index[0].start or 0: _in_numpy(shard.data)[0] for shard in x.addressable_shards}


def _in_numpy(x: Any) -> NDArray:
    found: NDArray = np.asarray(x)
    return found.astype(np.float32) if found.dtype.name == "bfloat16" else found
