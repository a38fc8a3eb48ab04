"""Local SGD under `jax.pmap` and `jax.shard_map` against the float64 oracle, after every step."""

import functools
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import gradwire
from gradwire import TwoLevel
from gradwire.jax_backend import (
    collective_traffic,
    distribute,
    local_sgd,
    partition_specs,
    replicate,
    stack_replicas,
    this_replica,
    total_traffic,
    unreplicate,
)
from tests.bounds import noting
from tests.parity import local_sgd_cases as table

#: Compiling is what takes the time: every case once, in which of the maps the programs differ in
#: kind. What the others contain is in tests/torch alone.
ELSEWHERE = {
    "diloco_hierarchical": "shard_map",
    "power_sgd": "shard_map",
    "everything": "shard_map_vma",
    "hierarchical": "shard_map_vma",
    "two_levels": "shard_map_vma",
    "weighted_overlap": "shard_map_vma",
}
CONTAINED = ["every_step", "period", "outer_sgd"]
SLOW = [
    ("weighted_overlap", "shard_map_vma"),
    ("weighted_eager", "pmap"),
    ("overlap", "told"),
    ("one_node", "pmap"),
]
#: Under "told" the host says which turn a step has.
RUNS = [(case, ELSEWHERE.get(case, "pmap")) for case in table.CASES if case not in CONTAINED]
ROWS = [
    pytest.param(*row, marks=pytest.mark.slow if row in SLOW else ())
    for row in [*RUNS, ("overlap", "told"), ("eager", "told")]
]


@dataclass
class Result:
    """Parameters [name][replica, step] after every step, and the state in the end, each array with
    a row for every replica."""

    parameters: dict[str, np.ndarray[Any, Any]]
    state: Any


def stacked(of_replica):
    return {
        name: np.stack([of_replica(r)[name] for r in range(table.REPLICAS)])
        for name in table.SHAPES
    }


@cache
def run(case, driver, outer=None):
    """All steps, as one compiled program. Under "shard_map_vma" the replicas span two axes of two.
    `outer`: in place of the outer optimizer."""
    axis, local = ("node", "data") if driver == "shard_map_vma" else "data", table.CASES[case]
    local = local if outer is None else replace(local, outer=outer)
    if isinstance(axis, tuple) and isinstance(local.compressor, TwoLevel):
        local = replace(local, compressor=replace(local.compressor, within="data"))
    tx = local_sgd(optax.sgd(table.RATE), local, axis_name=axis)
    params = {name: jnp.asarray(x) for name, x in table.initial().items()}
    shape = (2, 2) if isinstance(axis, tuple) else (table.REPLICAS,)
    mesh = Mesh(
        np.array(jax.devices()[: table.REPLICAS]).reshape(shape),
        axis if isinstance(axis, tuple) else (axis,),
    )
    with jax.set_mesh(mesh):
        start = stack_replicas({"params": params, "opt_state": tx.init(params)})
    data = (
        stacked(table.target),
        {
            name: np.stack(
                [
                    [table.noise(r, s)[name] for s in range(table.STEPS)]
                    for r in range(table.REPLICAS)
                ]
            )
            for name in table.SHAPES
        },
        np.asarray(table.CURVATURE, np.float32),
        np.array(
            [[table.weight(r, s) for s in range(table.STEPS)] for r in range(table.REPLICAS)],
            np.float32,
        ),
    )

    traced = []

    def train(state, goal, noises, curvature, weights, turn=None):
        traced.append(turn)

        def loss(p, z):
            return sum(
                0.5 * curvature * ((p[n] - goal[n]) ** 2).sum() + (z[n] * p[n]).sum()
                for n in table.SHAPES
            )

        def one(mine, given):
            z, weight = given
            counts = {"weight": weight} if local.weighted else {}
            updates, opt_state = tx.update(
                jax.grad(loss)(mine["params"], z), mine["opt_state"], mine["params"], **counts
            )
            params, opt_state = tx.average_params(
                optax.apply_updates(mine["params"], updates), opt_state, turn=turn, **counts
            )
            return {"params": params, "opt_state": opt_state}, params

        after, trace = lax.scan(one, this_replica(state), (noises, weights))
        return stack_replicas(after), trace

    if driver in ("pmap", "told"):
        devices = jax.devices()[: table.REPLICAS]
        mapped = jax.pmap(train, axis_name="data", devices=devices, static_broadcasted_argnums=5)
        state, goal, noises, curvature, weights = replicate(start, devices, axis_name="data"), *data
        if driver == "pmap":
            state, trace = mapped(state, *data, None)
        else:
            traces, turns = [], [tx.turn(n) for n in range(table.STEPS)]
            for n, turn in enumerate(turns):
                z = {name: x[:, n : n + 1] for name, x in noises.items()}
                state, after = mapped(state, goal, z, curvature, weights[:, n : n + 1], turn)
                traces.append(after)
            trace = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *traces)
            # As many programs as there are kinds of steps, whatever their number.
            assert len(traced) == len({*turns}) <= 2 * local.fragments + 3
            assert {*turns} <= {*tx.all_turns()}
            assert next(tx.turns(state)) == tx.turn(table.STEPS)
        return Result(
            jax.tree.map(np.asarray, trace),
            jax.tree.map(np.asarray, unreplicate(state).per_replica),
        )

    def body(state, *rows):
        state, trace = train(state, *jax.tree.map(lambda x: x[0], rows))
        return state, jax.tree.map(lambda x: x[None], trace)

    specs, rows = partition_specs(start, axis), jax.P(axis)
    shards = {"in_specs": (specs, rows, rows, rows, rows), "out_specs": (specs, rows)}
    mapped = jax.shard_map(body, mesh=mesh, **shards, check_vma=driver == "shard_map_vma")
    state, trace = jax.jit(mapped)(distribute(start, mesh, axis), *data)
    return Result(jax.tree.map(np.asarray, trace), jax.tree.map(np.asarray, state).per_replica)


def memory_of(state, replica):
    """Parameter → memory → array, of one replica."""
    averages, memory = state["opt_state"].averages, {}
    for key, tree in averages.memory.items():
        for name, x in tree.items():
            if not isinstance(x, optax.MaskedNode):
                memory.setdefault(name, {})[key] = x[replica]
    return memory


def averaged_together(local):
    """Step, names, and the groups that average them after it; nobody where each goes on from its
    own."""
    if local.delayed:
        return
    specs = {name: gradwire.Spec(shape, "float32") for name, shape in table.SHAPES.items()}
    for step in range(table.STEPS):
        for number, names in enumerate(local.parts(specs)):
            due = [
                level
                for level in local.levels(table.REPLICAS)
                if local.due(step, level.period, number)
            ]
            if due:
                yield step, names, due[0].groups or (tuple(range(table.REPLICAS)),)


@pytest.mark.parametrize(("case", "driver"), ROWS)
def test_equals_the_oracle(case, driver):
    result = run(case, driver)
    parameters = [
        [{n: x[r, step] for n, x in result.parameters.items()} for r in range(table.REPLICAS)]
        for step in range(table.STEPS)
    ]
    table.assert_same(case, parameters, [memory_of(result.state, r) for r in range(table.REPLICAS)])
    assert (result.state["opt_state"].averages.step == table.STEPS).all()

    for step, names, groups in averaged_together(table.CASES[case]):
        for name in names:
            rows = result.parameters[name][:, step]
            for members in groups:  # the same bits
                assert all(np.array_equal(rows[m], rows[members[0]]) for m in members), (step, name)
    if case in (
        "post_local",
        "subgroups",
        "diloco",
    ):  # the switch happens once on all replicas: until then they have the same bits
        local = table.CASES[case]
        together = min(step for step, *_ in averaged_together(local))
        for x in result.parameters.values():
            equal = [
                all(np.array_equal(row, x[0, step]) for row in x[:, step])
                for step in range(together + 1)
            ]
            assert equal == [s < local.start_step or s == together for s in range(together + 1)]


def test_sgd_of_optax_is_ours():
    case, driver = "overlap", "shard_map_vma"
    ours = table.CASES[case].outer
    factory = functools.partial(optax.sgd, ours.lr, ours.momentum, nesterov=ours.nesterov)
    found, expected = run(case, driver, factory).parameters, table.oracle(case).parameters
    for step in range(table.STEPS):
        for r in range(table.REPLICAS):
            for name in table.SHAPES:
                scale = np.linalg.norm(table.target(0)[name])
                off = np.abs(found[name][r, step] - expected[step][r][name]).max() / scale
                assert noting(float(off)) <= table.TOLERANCE


def one_step(case):
    """Everything that a replica may send in a step."""
    tx = local_sgd(optax.sgd(table.RATE), table.CASES[case], axis_name="data")

    def step(params):
        updates, state = tx.update(params, tx.init(params), params)
        return tx.average_params(optax.apply_updates(params, updates), state)

    ones = {n: jnp.ones(s) for n, s in table.SHAPES.items()}
    return collective_traffic(step, ones, axis_env=[("data", table.REPLICAS)])


def taken(local, step, conds):
    """Number of each cond → branch. In order: the gradients' warm-up, then for every fragment the
    end of that, and its levels."""
    chosen = [] if local.start_step == 0 else [int(step < local.start_step)]
    for number in range(local.fragments):
        if local.has_outer and local.start_step:
            chosen.append(int(step == local.start_step - 1))
        chosen.extend(
            int(local.due(step, level.period, number)) for level in local.levels(table.REPLICAS)
        )
    assert len(chosen) == conds
    return dict(enumerate(chosen))


@pytest.mark.parametrize(
    "case",
    [
        c
        for c, x in table.CASES.items()
        if c == "power_sgd" or (x.compressor is None and not x.delayed)
    ],
)
def test_what_is_sent_is_what_the_simulator_sends(case):
    sent = one_step(case)
    conds = 1 + max(cond for c in sent for cond, _ in c.branches)
    for step in range(table.STEPS):
        traffic = total_traffic(sent, taken(table.CASES[case], step, conds))
        expected = table.oracle(case)
        assert (traffic.nbytes, traffic.collectives) == (
            expected.nbytes[step],
            expected.collectives[step],
        )
