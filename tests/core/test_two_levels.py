"""Dense inside nodes, any algorithm between them, divided among the replicas of each: against the algorithm on the averages of the nodes."""

import numpy as np
import pytest

from gradwire import (
    AllReduce,
    LocalSimulator,
    PowerSGD,
    Quantize,
    Simulator,
    Spec,
    TopK,
    TwoLevel,
    WireDtype,
    diloco,
    plan,
)
from gradwire.core.algorithm import on_replica
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.division import divide
from gradwire.core.requests import AllGather, Reduce, ReduceScatter, mean_each
from gradwire.testing import check

SHAPES = {"a": (24, 16), "b": (24,), "c": (12, 4, 3, 3), "d": (3, 8, 10), "e": (), "f": (30, 20), "none": (0, 4)}
#: One tensor is most of the model.
UNEVEN = {"large": (96, 24), "small": (12, 10), "bias": (12,)}


def gradients(replicas, step=0, shapes=SHAPES):
    return [
        {n: np.random.default_rng([r, step, *n.encode()]).normal(size=s) for n, s in shapes.items()}
        for r in range(replicas)
    ]


def of_nodes(given, near):
    return [{n: np.mean([given[r][n] for r in members], axis=0) for n in given[0]} for members in near]


@pytest.mark.parametrize(("nodes", "within"), [(2, 2), (2, 3), (1, 2), (3, 1)])
def test_a_hierarchical_all_reduce_is_the_mean(nodes, within):
    given = gradients(nodes * within)
    averages = Simulator(TwoLevel(AllReduce(), within), SHAPES, nodes * within).step(given)
    for name, x in averages.items():
        np.testing.assert_allclose(x, np.mean([g[name] for g in given], axis=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        PowerSGD(2),
        PowerSGD(2, half_step=True, start_step=1),
        PowerSGD(2, warm_start=False, max_norm=20.0),
        TopK(8, per=64),
        TopK(8, per=64, mean="senders"),
        Quantize("int8", block=8),
        WireDtype(PowerSGD(2), "bfloat16"),
    ],
    ids=repr,
)
def test_is_the_algorithm_on_the_averages_of_the_nodes(algorithm):
    two, one = Simulator(TwoLevel(algorithm, ((0, 2), (3, 1))), SHAPES, 4), Simulator(algorithm, SHAPES, 2)
    assert all(len(blocks) == 1 for blocks in two.placed[0].division.blocks)
    for step in range(4):
        given = gradients(4, step)
        mine, theirs = two.step(given), one.step(of_nodes(given, two.placed[0].groups))
        for name in SHAPES:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-9, atol=1e-9)


def test_each_replica_remembers_what_it_owns_and_nothing_else():
    sim = Simulator(TwoLevel(PowerSGD(2), 3), SHAPES, 6)
    sim.step(gradients(6))
    flat = Simulator(PowerSGD(2), SHAPES, 2)
    for members in sim.placed[0].groups:
        owned = [set(sim.states[m].tensors) for m in members]
        assert sum(map(len, owned)) == len(flat.states[0].tensors)
        assert set.union(*owned) == set(flat.states[0].tensors)


def test_a_tensor_larger_than_a_fair_share_is_cut_by_rows():
    sim = Simulator(TwoLevel(PowerSGD(2), 3), UNEVEN, 6)
    blocks = sim.placed[0].division.by_name["large"][1]
    assert [(b.start, b.stop) for b in blocks] == [(0, 32), (32, 64), (64, 96)]
    parts = [Simulator(PowerSGD(2), {"large": (32, 24)}, 2) for _ in blocks]
    for step in range(3):
        given = gradients(6, step, UNEVEN)
        average = sim.step(given)["large"]
        nodes = of_nodes(given, sim.placed[0].groups)
        own = [
            part.step([{"large": g["large"][b.start : b.stop]} for g in nodes])["large"]
            for part, b in zip(parts, blocks, strict=True)
        ]
        np.testing.assert_allclose(average, np.concatenate(own), rtol=1e-9, atol=1e-9)
    for members, block in zip(sim.placed[0].peers, blocks, strict=True):
        assert sim.states[members[0]].tensors["large"]["error"].shape == (block.stop - block.start, 24)


@pytest.mark.parametrize(
    ("algorithm", "in_factors"),
    [
        (PowerSGD(2, start_step=2), (False, False, True)),
        (WireDtype(PowerSGD(2, half_step=True), "bfloat16"), (True, True, True)),
        (TopK(8, per=64), (False, False, False)),
    ],
    ids=repr,
)
def test_averages_that_are_known_as_factors_travel_as_factors_inside_a_node(algorithm, in_factors):
    sim = Simulator(TwoLevel(algorithm, 2), UNEVEN, 4)
    elements = sum(np.prod(shape, dtype=int) for shape in UNEVEN.values())
    factors = 2 * ((48 + 24) + (48 + 24) + (12 + 10)) + 12  # the large one in two blocks
    sent = []
    for step in range(3):
        sim.step(gradients(4, step, UNEVEN))
        sent.append([r for r in sim.requests if isinstance(r, AllGather)][-1])
    flags = 2
    assert [sum(map(sum, r.counts)) - flags for r in sent] == [factors if so else elements for so in in_factors]


class LooksAtData(PowerSGD):
    """Cannot be tried without data, so nobody knows its factors before."""

    def compress(self, ops, name, x, memory, context):
        float(x.reshape((-1,))[0])
        return super().compress(ops, name, x, memory, context)


def test_factors_that_nobody_knows_of_travel_multiplied_out():
    two, known = (Simulator(TwoLevel(kind(2), 2), SHAPES, 4) for kind in (LooksAtData, PowerSGD))
    assert two.placed[0].forms == ()
    for step in range(2):
        mine, theirs = two.step(gradients(4, step)), known.step(gradients(4, step))
        for name in SHAPES:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-9, atol=1e-9)


class Doubled(PowerSGD):
    """A step of its own, which knows nothing of factors."""

    async def step(self, ops, gradients, state, step):
        averages, after = await super().step(ops, gradients, state, step)
        return {name: 2 * x for name, x in averages.items()}, after


def test_a_step_that_was_written_anew_is_what_runs():
    given = gradients(4)
    once, twice = (Simulator(TwoLevel(kind(2), 2), SHAPES, 4).step(given) for kind in (PowerSGD, Doubled))
    for name, x in once.items():
        np.testing.assert_allclose(twice[name], 2 * x)


def test_owners_do_not_depend_on_the_order_of_the_parameters():
    specs = {f"layers.{i}.{n}": Spec(s) for i in range(6) for n, s in (("w", (64, 64)), ("v", (64, 256)), ("b", (64,)))}
    division = divide(PowerSGD(4), specs, 4)
    again = divide(PowerSGD(4), dict(reversed(specs.items())), 4)
    assert {n: own for n, (_, own) in division.by_name.items()} == {n: own for n, (_, own) in again.by_name.items()}
    sizes = [sum(s.size for s in division.specs_of(place).values()) for place in range(4)]
    assert max(sizes) < 1.1 * sum(sizes) / 4


class StoresEarly(Wrapper):
    """Sends something after it has stored its memory."""

    async def step(self, ops, gradients, state, step):
        averages, after = await self.algorithm.step(ops, gradients, state, step)
        return await mean_each(averages), after


@pytest.mark.parametrize("name", ["a", "c", "f"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_is_not_finite_leaves_no_trace_with_any_owner(name, bad, early):
    algorithm = PowerSGD(2, half_step=True)
    sim = Simulator(TwoLevel(StoresEarly(algorithm) if early else algorithm, 2), SHAPES, 4)
    assert sim.placed[0].agrees is not early
    sim.step(gradients(4))
    before = [state.map(np.array) for state in sim.states]
    given = gradients(4, 1)
    given[3][name].flat[0] = bad
    assert not np.isfinite(sim.step(given)[name]).all()
    for mine, theirs in zip(sim.states, before, strict=True):
        np.testing.assert_equal(mine.shared, theirs.shared)
        np.testing.assert_equal(mine.tensors, theirs.tensors)


def test_owners_agree_by_one_message_in_the_node():
    sim = Simulator(TwoLevel(PowerSGD(2), 2), SHAPES, 4)
    sim.step(gradients(4))
    sent = [r for r in sim.requests if r.payloads(sim.ops, 4)]
    assert [type(r) for r in sent] == [ReduceScatter, Reduce, Reduce, AllGather, AllGather]
    near, between = sim.placed[0].groups, sim.placed[0].peers
    assert [r.groups for r in sent] == [near, between, between, near, near]
    assert len(sent[-1].arrays) == len(sent[0].arrays)
    assert sent[-2].payloads(sim.ops, 4) == [4]


@pytest.mark.parametrize(
    "algorithm", [PowerSGD(2, start_step=2), AllReduce(), Quantize("int8"), TopK(8, per=64)], ids=repr
)
def test_keeps_the_promises_of_every_algorithm(algorithm):
    check(TwoLevel(algorithm, 2), UNEVEN, world_sizes=(2,))


def test_plan_shows_both_levels_and_what_two_links_take():
    p = plan(SHAPES, TwoLevel(PowerSGD(2), 2), world_size=6, dtype="float32")
    flat = plan(SHAPES, PowerSGD(2), dtype="float32")
    near, far = p.levels
    assert (near.groups, near.replicas, far.groups, far.replicas) == (3, 2, 2, 3)
    assert far.node_bytes == flat.wire_bytes
    assert far.collectives == 2
    # Gradients go to their owners, and what the owners know of the averages to all: half an all-reduce each.
    assert near.nbytes == pytest.approx((p.dense_bytes + flat.wire_bytes) / 2, abs=16)
    assert p.compression_ratio == flat.compression_ratio
    slow = p.seconds(6, 0.0, 1e6)
    assert slow == pytest.approx(4 / 3 * far.node_bytes / 1e6)
    assert p.seconds(6, 0.0, 1e6, within=(0.0, 1e9)) == pytest.approx(slow + near.nbytes / 1e9)
    assert "between 3 nodes" in str(p)
    with pytest.raises(ValueError, match="made for 3 nodes of 2"):
        p.seconds(4, 0.0, 1e6)
    with pytest.raises(ValueError, match="has one level"):
        flat.seconds(6, 0.0, 1e6, within=(0.0, 1e9))


def test_plan_of_local_sgd_shows_both_levels():
    local = diloco(5, subgroup=2, compressor=TwoLevel(PowerSGD(2), 2))
    p = plan(SHAPES, local, world_size=6, dtype="float32")
    flat = plan(SHAPES, PowerSGD(2), dtype="float32")
    assert p.levels[1].node_bytes == flat.wire_bytes / 5
    # Gradients in each step; in each fifth differences, and what is known of their averages.
    assert p.levels[0].nbytes == pytest.approx(1.1 * p.dense_bytes + 0.1 * flat.wire_bytes, abs=16)
    one = plan(SHAPES, diloco(5, compressor=PowerSGD(2)), world_size=6, dtype="float32")
    assert p.memory_bytes < one.memory_bytes
    assert "between 3 nodes" in str(p)


def test_says_what_does_not_fit():
    with pytest.raises(ValueError, match="within=4, but 6 replicas"):
        Simulator(TwoLevel(AllReduce(), 4), SHAPES, 6)
    with pytest.raises(ValueError, match="no partition of the replicas 0 to 3"):
        Simulator(TwoLevel(AllReduce(), ((0, 1), (2, 4))), SHAPES, 4)
    with pytest.raises(ValueError, match="differ in size"):
        TwoLevel(AllReduce(), ((0, 1), (2,)))
    with pytest.raises(ValueError, match="must be at least 1"):
        TwoLevel(AllReduce(), 0)
    with pytest.raises(TypeError, match="must be a number of replicas"):
        TwoLevel(AllReduce(), 1.5)
    with pytest.raises(TypeError, match="two levels already"):
        TwoLevel(WireDtype(TwoLevel(AllReduce(), 2), "int8"), 2)
    with pytest.raises(ValueError, match="does not say how many"):
        Simulator(TwoLevel(AllReduce()), SHAPES, 4)
    with pytest.raises(ValueError, match="world_size=8"):
        plan(SHAPES, TwoLevel(AllReduce(), 2))


def test_local_sgd_compresses_between_nodes_what_is_near_agrees_on():
    """Gradients averaged in the node at every step, and differences between nodes: as if each node were one replica."""
    start = {n: np.ones(s) for n, s in SHAPES.items()}
    local = diloco(2, compressor=PowerSGD(2))
    two = LocalSimulator(diloco(2, subgroup=2, compressor=TwoLevel(PowerSGD(2), 2)), start, 4)
    one = LocalSimulator(local, start, 2)

    def update(replica, parameters, given):
        return {n: parameters[n] - 0.1 * given[n] for n in parameters}

    for step in range(6):
        given = gradients(4, step)
        two.step(given, update)
        one.step(of_nodes(given, ((0, 1), (2, 3))), update)
    for name in SHAPES:
        np.testing.assert_allclose(two.parameters[3][name], one.parameters[1][name], rtol=1e-8, atol=1e-9)
    own = two.local[0].compressor
    assert {n for n, m in two.states[0].tensors.items() if "error" in m} == {
        n for n in own.division.specs_of(0) if n in one.states[0].tensors and "error" in one.states[0].tensors[n]
    }


def test_node_is_replaced_by_those_who_know():
    assert TwoLevel(AllReduce()).on_nodes_of(4) == TwoLevel(AllReduce(), 4)
    local = diloco(4, compressor=TwoLevel(AllReduce(), "node"))
    assert local.mentions_nodes
    assert local.on_nodes_of(2).compressor.within == 2
    placed = on_replica(WireDtype(TwoLevel(AllReduce(), 2), "bfloat16"), {"w": Spec((4, 4))}, 3, 4)
    assert placed.algorithm.place == 1
    assert repr(placed) == repr(WireDtype(TwoLevel(AllReduce(), 2), "bfloat16"))
