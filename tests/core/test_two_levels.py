"""Dense inside nodes, any algorithm between them: against the algorithm on the averages of the nodes."""

import numpy as np
import pytest
from hypothesis import example
from hypothesis import given as drawn
from hypothesis import strategies as st

import gradwire as gw
import gradwire.core.protocol as rq
from gradwire import AllReduce, LocalSGD, LocalSimulator, PowerSGD, Simulator, TopK, TwoLevel, WireDtype, diloco, plan
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.kernels.numpy import PoisonOps
from gradwire.core.protocol import together
from gradwire.core.protocol.collective_requests import AllGather, Reduce

SHAPES = {"a": (24, 16), "b": (24,), "c": (12, 4, 3, 3), "d": (3, 8, 10), "e": (), "f": (30, 20), "none": (0, 4)}


def gradients(replicas, step=0, shapes=SHAPES):
    return [
        {n: np.random.default_rng([r, step, *n.encode()]).normal(size=s) for n, s in shapes.items()}
        for r in range(replicas)
    ]


def of_nodes(given, near):
    return [{n: np.mean([given[r][n] for r in members], axis=0) for n in given[0]} for members in near]


def close(mine, theirs, tolerance=1e-9):
    assert mine.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_allclose(mine[name], x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "algorithm",
    [
        PowerSGD(2),
        PowerSGD(2, half_step=True, start_step=1),
        PowerSGD(2, warm_start=False, max_norm=20.0),
        TopK(8, per=64, mean="senders"),
        gw.Quantize("int8", block=8),
        WireDtype(PowerSGD(2), "bfloat16"),
        WireDtype(AllReduce(), "int8"),
    ],
    ids=repr,
)
def test_is_the_algorithm_on_the_averages_of_the_nodes(algorithm):
    """And so is the memory, whole on each replica of a node; and local SGD whose gradients are averaged in the node, its differences between nodes."""
    near, local = (
        ((0, 2), (3, 1)),
        diloco(2, subgroup=((0, 2), (3, 1)), compressor=TwoLevel(algorithm, ((0, 2), (3, 1)))),
    )
    two, one = Simulator(TwoLevel(algorithm, near), SHAPES, 4), Simulator(algorithm, SHAPES, 2)
    start = {n: np.ones(s) for n, s in SHAPES.items()}
    two_locals, one_local = LocalSimulator(local, start, 4), LocalSimulator(diloco(2, compressor=algorithm), start, 2)
    for step in range(4):
        given = gradients(4, step)
        nodes = of_nodes(given, near)
        close(two.step(given), one.step(nodes))
        for simulator, own in ((two_locals, given), (one_local, nodes)):
            simulator.step(own, lambda _, p, g: {n: p[n] - 0.1 * g[n] for n in p})
    for node, members in enumerate(near):
        for member in members:
            close(two_locals.parameters[member], one_local.parameters[node], 1e-8)
            for name, memory in one.states[node].tensors.items():
                close(two.states[member].tensors[name], memory)


class Everything(Wrapper):
    """Asks for all that a message can be, and returns what is equal on all replicas."""

    async def step(self, ops, gradients, state, step):
        replicas, index = await rq.world_size(), await rq.replica_index()
        alone = tuple((i,) for i in range(replicas))

        async def asked(name, x):
            before = await rq.mean(x)  # of which something is still wanted
            rows = ops.stack([x * (i + 1.0) for i in range(replicas)])
            (received,) = await rq.all_to_all(rows)
            of_all, whole = await rq.gather(x, ops.iota(7), watched=False)
            mine = ops.asarray(np.full(x.shape, index + 1), "int32")
            sums = await rq.reduce_sum(mine, out=mine)
            largest = await rq.reduce_max(x)
            (same,) = await rq.all_to_all(x.reshape((1, *x.shape)), groups=alone)
            own = await rq.mean(received.reshape((-1,)), groups=alone, watched=False)
            summed = await rq.reduce_sum(own.reshape(rows.shape), watched=False)
            total = await rq.mean(same.reshape(x.shape), watched=False)
            total = total + before + largest + ops.cast(sums, "float64") + (await rq.mean(x, out=x))
            for i in range(replicas):
                total = total + of_all[i] * (i + 2.0) + summed[i] + ops.cast(whole[i], "float64")[:1].reshape(()) * 0.5
            return total

        found = await together([asked(n, x) for n, x in gradients.items()])
        scale = await rq.sum_scalar(ops.asarray(2.0, "float64"))
        assert await rq.step_is_finite()
        return {n: x * scale for n, x in zip(gradients, found, strict=True)}, state


SIZES = st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=4)


@example(2, 2, [[4]])  # of a single array, what is cut may be the array itself
@example(2, 2, [[96, 24], [12, 10], [12]])  # one tensor is most of the model
@drawn(st.integers(1, 3), st.integers(1, 5), SIZES)
def test_a_message_of_any_size_is_cut_in_any_number_of_parts(nodes, within, sizes):
    """As many elements as there are parts, fewer, and one more."""
    shapes = {f"{i}": tuple(shape) for i, shape in enumerate(sizes)}
    given = gradients(nodes * within, 0, shapes)
    near = [range(first, first + within) for first in range(0, nodes * within, within)]
    two = Simulator(TwoLevel(Everything(AllReduce()), within), shapes, nodes * within, ops=PoisonOps())
    one = Simulator(Everything(AllReduce()), shapes, nodes)
    close(two.step(given), one.step(of_nodes(given, near)))


class StoresEarly(Wrapper):
    """Sends something after it has stored its memory."""

    async def step(self, ops, gradients, state, step):
        averages, after = await self.algorithm.step(ops, gradients, state, step)
        return await rq.mean_each(averages), after


@pytest.mark.parametrize(("name", "bad"), [("a", np.inf), ("c", np.nan), ("f", np.inf)])
@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_is_not_finite_leaves_no_trace_on_any_replica(name, bad, early):
    algorithm = PowerSGD(2, half_step=True)
    sim = Simulator(TwoLevel(StoresEarly(algorithm) if early else algorithm, 2), SHAPES, 4)
    sim.step(gradients(4))
    before = [state.map(np.array) for state in sim.states]
    given = gradients(4, 1)
    given[3][name].flat[0] = bad
    assert not np.isfinite(sim.step(given)[name]).all()
    for mine, theirs in zip(sim.states, before, strict=True):
        np.testing.assert_equal(mine.shared, theirs.shared)
        np.testing.assert_equal(mine.tensors, theirs.tensors)


def test_each_message_goes_once_between_nodes_and_once_inside():
    sim, one = Simulator(TwoLevel(PowerSGD(2), 2), SHAPES, 4), Simulator(PowerSGD(2), SHAPES, 2)
    sim.step(gradients(4))
    one.step(gradients(2))
    near, between = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    sent = [(type(r), r.groups) for r in sim.requests if r.payloads(sim.ops, 4)]
    assert sent == [(Reduce, near), *[(Reduce, between), (AllGather, near)] * 2]
    parts = [r for r in sim.requests if r.groups == between and isinstance(r, Reduce)]
    for part, message in zip(parts, [r for r in one.requests if isinstance(r, Reduce)], strict=True):
        (elements,) = (x.shape[-1] for x in part.arrays)
        assert 0 <= 2 * elements - sum(x.size for x in message.arrays) < 2


def test_nodes_of_one_replica_are_one_level_and_a_single_node_sends_nothing_between():
    one, alone = (Simulator(TwoLevel(PowerSGD(2), within), SHAPES, 3) for within in (1, 3))
    for simulator in (one, alone):
        simulator.step(gradients(3))
    assert {r.groups for r in one.requests} == {None}
    inside = [r for r in alone.requests if r.payloads(alone.ops, 3) and r.groups == ((0, 1, 2),)]
    assert [type(r) for r in inside] == [Reduce]
    assert {r.groups for r in alone.requests if r.groups} == {((0, 1, 2),), ((0,), (1,), (2,))}


def test_plan_shows_both_levels_and_what_two_links_take():
    p = plan(SHAPES, TwoLevel(PowerSGD(2), 2), world_size=6, dtype="float32")
    flat = plan(SHAPES, PowerSGD(2), dtype="float32")
    near, far = p.levels
    assert (near.groups, near.replicas, far.groups, far.replicas) == (3, 2, 2, 3)
    assert far.node_bytes == pytest.approx(flat.wire_bytes, abs=16)  # filled up to two parts
    assert far.collectives == 2
    # Gradients are averaged, and messages put together: half an all-reduce of those.
    assert near.nbytes == pytest.approx(p.dense_bytes + flat.wire_bytes / 2, abs=16)
    assert p.memory_bytes == flat.memory_bytes
    assert p.compression_ratio == pytest.approx(flat.compression_ratio, rel=1e-2)
    slow = p.seconds(6, 0.0, 1e6)
    assert slow == pytest.approx(4 / 3 * far.node_bytes / 1e6)
    assert p.seconds(6, 0.0, 1e6, within=(0.0, 1e9)) == pytest.approx(slow + near.nbytes / 1e9)
    assert "between 3 nodes" in str(p)
    with pytest.raises(ValueError, match="made for 3 nodes of 2"):
        p.seconds(4, 0.0, 1e6)
    with pytest.raises(ValueError, match="has one level"):
        flat.seconds(6, 0.0, 1e6, within=(0.0, 1e9))


def test_plan_of_local_sgd_shows_both_levels():
    p = plan(SHAPES, diloco(5, subgroup=2, compressor=TwoLevel(PowerSGD(2), 2)), world_size=6, dtype="float32")
    flat = plan(SHAPES, PowerSGD(2), dtype="float32")
    assert p.levels[1].node_bytes == pytest.approx(flat.wire_bytes / 5, abs=4)
    # Gradients in each step; in each fifth differences, and messages between nodes.
    assert p.levels[0].nbytes == pytest.approx(1.2 * p.dense_bytes + 0.1 * flat.wire_bytes, abs=16)
    one = plan(SHAPES, diloco(5, compressor=PowerSGD(2)), world_size=6, dtype="float32")
    assert p.memory_bytes == one.memory_bytes
    assert "between 3 nodes" in str(p)
    # A partition says how many replicas there are.
    two = TwoLevel(TopK(8), ((0, 2), (1, 3)))
    for algorithm in (two, diloco(2, compressor=two)):
        assert plan(SHAPES, algorithm) == plan(SHAPES, algorithm, world_size=4)
        with pytest.raises(ValueError, match="no partition"):
            plan(SHAPES, algorithm, world_size=8)


def test_node_is_replaced_by_those_who_know():
    groups = ((0, 2), (1, 3))
    assert TwoLevel(AllReduce()).on_nodes_of(4) == TwoLevel(AllReduce(), 4)
    local = diloco(4, compressor=TwoLevel(AllReduce(), "node"))
    assert local.mentions_nodes
    assert local.on_nodes_of(2).compressor.within == 2
    for around in (gw.Weighted, lambda two: WireDtype(two, "bfloat16")):
        assert around(TwoLevel(AllReduce())).on_nodes_of(groups) == around(TwoLevel(AllReduce(), groups))
        assert around(TwoLevel(AllReduce())).mentions_nodes > around(TwoLevel(AllReduce(), 2)).mentions_nodes
    assert LocalSGD(4, subgroup="node").on_nodes_of(groups).subgroups(4) == groups
    assert LocalSGD({"node": 2, "all": 8}, subgroup="node").on_nodes_of(2) == LocalSGD({2: 2, "all": 8}, subgroup=2)
    assert LocalSGD(8).on_nodes_of(2) == LocalSGD(8)
    assert LocalSGD(4, subgroup=1).subgroups(4) is None
