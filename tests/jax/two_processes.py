"""Run as `two_processes.py PORT PROCESS COUNT FOLDER FLAGS`: some steps on one device of each
process; the results go to a file."""

import contextlib
import logging
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

ADAM = optax.adam(0.1)
SHAPES = {"w": (32, 24), "b": (24,)}
STEPS = 4


def main(port, process, count, folder, flags):
    # Those of the process that compares, whose bits are expected.
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ['XLA_FLAGS']}"
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=process)
    from gradwire.jax_backend import (
        distribute,
        partition_specs,
        power_sgd,
        replicate,
        reshard,
        set_replicas,
        stats,
        unreplicate,
        zero1,
    )
    from tests.jax.replicas import AXIS, gradients

    tx = power_sgd(2, axis_name=AXIS, half_step=True)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    given = [gradients(SHAPES, step, count) for step in range(STEPS)]

    state = replicate(tx.init(params), axis_name=AXIS)
    step = jax.pmap(tx.update, axis_name=AXIS)
    for g in given[: STEPS // 2]:
        updates, state = step({k: x[None] for k, x in g[process].items()}, state)
    # Half-way by way of a checkpoint: rows of all processes in one array, and spread again.
    whole = unreplicate(state)
    state = replicate(whole, axis_name=AXIS)
    for g in given[STEPS // 2 :]:
        updates, state = step({k: x[None] for k, x in g[process].items()}, state)
    mine = {f"pmap/{k}": np.asarray(x)[0] for k, x in updates.items()}
    mine["pmap/error"] = gathered(unreplicate(state))

    # The second half again, under shard_map.
    mesh = jax.make_mesh((count,), (AXIS,))
    refuses_what_differs(process, mesh)
    chooses(process, mesh, Path(folder))
    specs = partition_specs(whole, AXIS)
    state = distribute(whole, mesh, AXIS)
    if process == 0:  # as one logs; nothing waits for the others
        assert stats(state).scalars()["local_error_norm"] > 0

    def body(stacked, state):
        return tx.update(jax.tree.map(lambda x: x[0], stacked), state)

    shards = {"in_specs": (jax.P(AXIS), specs), "out_specs": (jax.P(), specs), "check_vma": False}
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, **shards))
    rows = jax.NamedSharding(mesh, jax.P(AXIS))
    for g in given[STEPS // 2 :]:
        stacked = {
            k: jax.make_array_from_process_local_data(rows, x[None]) for k, x in g[process].items()
        }
        updates, state = mapped(stacked, state)
    mine |= {f"shard_map/{k}": np.asarray(x.addressable_data(0)) for k, x in updates.items()}
    # A state that no process holds whole is spread anew.
    mine["shard_map/error"] = gathered(unreplicate(replicate(state, axis_name=AXIS)))
    assert jax.random.key_data(
        distribute({"k": jax.random.key(3)}, mesh, AXIS)["k"]
    ).is_fully_replicated
    again = distribute(state, mesh, AXIS)
    assert gathered(again).shape == (count, *SHAPES["w"])
    # Its mean, for another number of replicas: everywhere one row, and nowhere all.
    one = set_replicas(again, count + 1).local.per_replica["error"]["w"]
    assert {shard.data.shape for shard in one.addressable_shards} == {(1, *SHAPES["w"])}
    mine["mean"] = np.asarray(one.addressable_data(0))

    # A sharded optimizer: its pieces lie in both processes, and its consolidated state comes to
    # each.
    sharded = zero1(ADAM, axis_name=AXIS, replicas=count)
    state = replicate(sharded.init(params), axis_name=AXIS)
    step, own = (
        jax.pmap(sharded.update, axis_name=AXIS),
        {k: x[None] for k, x in given[0][process].items()},
    )
    text = step.lower(own, state).as_text()
    updates, state = step(own, state)
    mine |= {f"zero/{k}": np.asarray(x)[0] for k, x in updates.items()}
    assert "all_to_all" in text
    assert "reduce_scatter" not in text  # Gloo's takes longer
    placed = distribute(unreplicate(state), mesh, AXIS)
    mine["zero/moment"] = reshard(placed, jax.eval_shape(ADAM.init, params))[0].mu["w"]

    stays_in_the_memory_of_the_host(mesh, again, placed)
    says_who_is_missing(process, mesh, again, placed)
    np.savez(Path(folder) / f"{process}.npz", **mine)


def refuses_what_differs(process, mesh):
    """A common slip: parameters from the index of the process. Each process refuses them, of any
    kind of array."""
    from gradwire.jax_backend import diloco, distribute, power_sgd, replicate, stack_replicas
    from tests.jax.replicas import AXIS, refused

    def place(state, *words):
        for call in (
            lambda: replicate(state, axis_name=AXIS),
            lambda: distribute(state, mesh, AXIS),
        ):
            with (
                refused(*words, "differs between processes") if words else contextlib.nullcontext()
            ):
                call()

    same = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    params = same | {"w": jax.random.normal(jax.random.key(process), SHAPES["w"])}
    tx = power_sgd(2, axis_name=AXIS)
    place((params, tx.init(params)), "0.w")
    place((jax.device_get(params), tx.init(params)), "0.w")
    place({"rng": jax.random.key(process)}, "rng")
    place(same | {"more": jnp.ones(process)} if process else same, "the number of arrays")
    place(
        stack_replicas((params, diloco(optax.sgd(0.1), 2, axis_name=AXIS).init(params))),
        "outer",
        "w",
    )
    # What replicas may have of their own, and what is the same.
    place(stack_replicas((params, optax.adam(0.1).init(params))))
    place((same, tx.init(params)))


def training(mesh):
    """What makes a training of an average, for `AutoStep`."""
    from gradwire.jax_backend import mark_varying, partition_specs
    from tests.jax.replicas import AXIS

    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

    def build(average):
        tx = optax.chain(average, optax.sgd(0.1))
        state = params, tx.init(params)
        specs = partition_specs(state, AXIS)

        def train_step(state, x):
            gradients = jax.grad(lambda p: jnp.square(x @ p["w"] + p["b"] - 1).mean())(
                mark_varying(state[0], AXIS)
            )
            updates, opt_state = tx.update(gradients, state[1], state[0])
            return optax.apply_updates(state[0], updates), opt_state

        mapped = jax.shard_map(
            train_step, mesh=mesh, in_specs=(specs, jax.P(AXIS)), out_specs=specs
        )
        return state, jax.jit(mapped, donate_argnums=0)

    return build


def chooses(process, mesh, folder):
    """Both go by the slower one, in the same step, and the log of the first repeats the run on
    both."""
    from gradwire import Auto
    from gradwire.jax_backend import AutoStep, stats
    from gradwire.jax_backend.choosing import auto_step
    from tests.jax.replicas import AXIS, refused

    build = training(mesh)

    def run(auto, steps):
        state, rows, now = auto.init(), jax.NamedSharding(mesh, jax.P(AXIS)), [0.0]

        # uncompressed averages, int8 and bfloat16: the first is slowest on process 0 alone
        def after(array):
            now[0] += ((1.0, 1.4, 0.5), (1.0, 0.3, 0.6))[process][auto._number]
            return lambda end=now[0]: end

        auto._ends.after = after
        ready = 0
        while auto._at < steps if steps else (auto._chooser is None or auto._at < ready + 60):
            ready = auto._at if auto._chooser is None else ready
            x = (
                np.random.default_rng([auto._at, process])
                .standard_normal((1, 32))
                .astype(np.float32)
            )
            state = auto.step(state, jax.make_array_from_process_local_data(rows, x))
        return state, auto._at

    with refused("among different methods"):
        AutoStep(Auto(loss="5%" if process else None), build, axis_name=AXIS, mesh=mesh)
    path, clock = (
        folder / f"{'decisions' if process == 0 else 'none'}.jsonl",
        auto_step.perf_counter,
    )
    auto_step.perf_counter = lambda: 0.0
    auto = AutoStep(Auto(decisions=path), build, axis_name=AXIS, mesh=mesh)
    state, steps = run(auto, 0)
    assert [c.number for c in auto.choices] in ([0, 2], [0, 1, 2]), auto.choices
    assert [c.number for c in auto.choices][-1] == 2
    same = multihost_utils.process_allgather(np.asarray([c[:2] for c in auto.choices]))
    assert (same == same[0]).all()
    repeated, _ = run(AutoStep(Auto(decisions=path), build, axis_name=AXIS, mesh=mesh), steps)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(
            *map(jax.tree.leaves, (jax.device_get(state[0]), jax.device_get(repeated[0]))),
            strict=True,
        )
    )
    assert stats(state).scalars()["steps"] == steps
    auto_step.perf_counter = clock
    chooses_under_pmap(process)


def chooses_under_pmap(process):
    """All methods are compiled there too, of arrays: it takes no shapes in several processes."""
    from gradwire import Auto
    from gradwire.jax_backend import AutoStep
    from tests.jax.replicas import AXIS

    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

    def build(average):
        tx = optax.chain(average, optax.sgd(0.1))

        def train_step(state, x):
            loss = lambda p: jnp.square(x @ p["w"] + p["b"] - 1).mean()  # noqa: E731
            updates, opt_state = tx.update(jax.grad(loss)(state[0]), state[1], state[0])
            return optax.apply_updates(state[0], updates), opt_state

        return (params, tx.init(params)), jax.pmap(train_step, axis_name=AXIS, donate_argnums=0)

    auto = AutoStep(Auto(), build, axis_name=AXIS)
    state = auto.init()
    while auto._chooser is None:
        state = auto.step(state, np.full((1, 1, 32), process + auto._at % 3, np.float32))
    assert len(auto._order) == len(auto._methods) > 1
    for _ in range(20):
        state = auto.step(state, np.full((1, 1, 32), process + auto._at % 3, np.float32))


def stays_in_the_memory_of_the_host(mesh, state, sharded):
    """What begins on the host of each process, and what lies there in rows of several, comes to the
    same as on the devices."""
    from gradwire import PowerSGD
    from gradwire.jax_backend import (
        distribute,
        power_sgd,
        replicate,
        reshard,
        set_replicas,
        to_portable,
        zero1,
    )
    from tests.jax.replicas import AXIS

    def moved(tree, kind):
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree)

    def lying(tree, kind="pinned_host"):
        assert {x.sharding.memory_kind for x in jax.tree.leaves(tree)} == {kind}
        return tree

    def same(found, expected):
        jax.tree.map(np.testing.assert_array_equal, found, expected)

    count, algorithm = mesh.size, PowerSGD(2, half_step=True)
    hosted, zeros = moved(state, "pinned_host"), {n: jnp.zeros(s) for n, s in SHAPES.items()}
    local = {
        name: jax.device_put(x + 2, x.sharding.with_memory_kind("pinned_host"))
        for name, x in zeros.items()
    }
    same(*(to_portable(x, algorithm, errors="all") for x in (hosted, state)))
    for found, of_devices in (
        (distribute(hosted, mesh, AXIS), state),
        (set_replicas(hosted, count + 1), set_replicas(state, count + 1)),
    ):
        same(*(to_portable(x, algorithm, errors="all") for x in (lying(found), of_devices)))
    lying(replicate(hosted, axis_name=AXIS), "device")
    w = lying(distribute((local, power_sgd(2, axis_name=AXIS).init(local).local), mesh, AXIS))[0][
        "w"
    ]
    assert [np.asarray(shard.data).tolist() for shard in w.addressable_shards] == [
        np.full(SHAPES["w"], 2.0).tolist()
    ]
    for shard in ("element", "parameter"):
        zero = zero1(ADAM, axis_name=AXIS, replicas=count, shard=shard)
        same(
            *(
                reshard(distribute(zero.init(x), mesh, AXIS), ADAM.init(zeros))
                for x in (local, zeros)
            )
        )
    same(*(reshard(x, ADAM.init(zeros)) for x in (moved(sharded, "pinned_host"), sharded)))


def says_who_is_missing(process, mesh, state, sharded):
    """A call that all must make, by a process that is late for it: the other says so, and goes on
    when it comes."""
    from gradwire import Auto, PowerSGD
    from gradwire.jax_backend import (
        AutoStep,
        distribute,
        replicate,
        reshard,
        set_replicas,
        to_portable,
        unreplicate,
    )
    from gradwire.jax_backend.engine import barrier
    from gradwire.jax_backend.jax_internals import coordination_client
    from tests.jax.replicas import AXIS, refused

    service, said = coordination_client(), []
    handler = logging.Handler()
    # On a busy machine process 1 may have to wait, too, and says so.
    handler.emit = lambda record: (
        process
        or (
            said.append(record.getMessage()),
            service.key_value_set(f"said/{len(said)}", "-"),
        )
    )
    logging.getLogger(barrier.__name__).addHandler(handler)
    barrier.PATIENCE = 0.1
    algorithm, of_pmap = PowerSGD(2, half_step=True), replicate(state, axis_name=AXIS)
    calls = {
        "distribute": lambda: distribute(state, mesh, AXIS),
        "replicate": lambda: replicate(state, axis_name=AXIS),
        "unreplicate": lambda: unreplicate(of_pmap),
        "set_replicas": lambda: set_replicas(state, 1),
        "to_portable": lambda: to_portable(state, algorithm),
        "reshard": lambda: reshard(
            sharded, jax.eval_shape(ADAM.init, {n: jnp.zeros(s) for n, s in SHAPES.items()})
        ),
    }
    for n, (name, call) in enumerate(calls.items(), 1):
        if process:
            service.blocking_key_value_get(f"said/{n}", 100_000)
        call()
        assert len(said) == (0 if process else n), said
        assert process or f"{name}: process 0 waits for processes [1]" in said[-1], said

    # Each another one: both are told, and go on.
    with refused("process 0 set_replicas, process 1 to_portable", error=RuntimeError):
        calls["to_portable" if process else "set_replicas"]()
    alone(process, "set_replicas", calls["set_replicas"])
    calls["to_portable"]()

    # Of `AutoStep` each call in which processes wait for each other: it is made, has its state
    # placed, and meets another method.
    def made():
        return AutoStep(Auto(), training(mesh), axis_name=AXIS, mesh=mesh)

    alone(process, "AutoStep", made)
    auto = made()
    alone(process, "AutoStep.init", auto.init)
    auto.init()
    alone(process, "AutoStep.step", lambda: auto._part(1))
    auto._part(1)

    # And a step, which waits in its own program, or for what it is told. The first one compiles:
    # there, on a busy machine, one of them is late by itself.
    state, rows = auto.init(), jax.NamedSharding(mesh, jax.P(AXIS))
    batch = jax.make_array_from_process_local_data(rows, np.ones((1, 32), np.float32))
    state = jax.block_until_ready(auto.step(state, batch))
    heard = len(said)
    if process:
        number = int(service.blocking_key_value_get("heard", 100_000))
        service.blocking_key_value_get(f"said/{number + 1}", 100_000)
    else:
        service.key_value_set("heard", str(heard))
    jax.block_until_ready(auto.step(state, batch))
    # Said again after ten times as long, which a busy machine may take as well.
    sentence = "AutoStep.step: process 0 waits for processes [1]. All processes must call"
    assert process or ({*said[heard:]} == {said[heard]} and sentence in said[heard]), said


def alone(process, name, call):
    """Process 0 gives up a call that the other does not make. Whoever comes later finds nobody
    waiting."""
    from gradwire.jax_backend.engine import barrier
    from gradwire.jax_backend.jax_internals import coordination_client
    from tests.jax.replicas import refused

    if process == 0:
        barrier.LONGEST = 0.2
        with refused(f"{name}: process 0 has waited in vain for processes [1]", error=RuntimeError):
            call()
        coordination_client().key_value_set(f"given up/{name}", "-")
        barrier.LONGEST = 100
    coordination_client().blocking_key_value_get(f"given up/{name}", 100_000)


def gathered(state):
    """The errors of all replicas, of which each process has its own row."""
    rows = state.local.per_replica["error"]["w"]
    assert not rows.is_fully_addressable
    assert [shard.data.shape for shard in rows.addressable_shards] == [(1, *SHAPES["w"])]
    return multihost_utils.process_allgather(rows, tiled=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
