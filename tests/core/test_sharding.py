"""Shards, the sharded step, buckets against the C++ of torch, and what the reducer refuses; its
order is `tests.soak.arrival`."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from gradwire import (
    AllReduce,
    Spec,
    Zero,
    assign_buckets,
    shard_by_bucket,
    shard_by_element,
    shard_by_parameter,
)
from gradwire.core.buckets.assignment import bucket_limits
from gradwire.core.buckets.reducer import Reducer
from gradwire.core.simulate import NumpyOps, PoisonOps, lock_step
from gradwire.core.zero.sharded_step import clip_by_norm
from gradwire.core.zero.sharding import MixedShards
from gradwire.core.zero.stacks import StackShards
from tests.executed import executed
from tests.parity import zero_cases
from tests.parity.zero_cases import ZERO_CASES

OPS = NumpyOps()
SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=12)
#: Also many more replicas than parameters, and than elements.
WORLDS = st.one_of(st.integers(1, 5), st.integers(6, 200))


@st.composite
def plans(draw, kinds=("element", "parameter", "bucket", "spread", "mixed", "stacks")):
    """Shards of any kind."""
    specs = {f"p{i}": Spec(shape, "float64") for i, shape in enumerate(draw(SHAPES))}
    world, kind = draw(WORLDS), draw(st.sampled_from(kinds))
    if kind == "element":
        return shard_by_element(specs, world)
    if kind == "parameter":
        return shard_by_parameter(specs, world)
    if kind == "stacks":
        layers = {n for n in draw(st.sets(st.sampled_from(list(specs)))) if specs[n].shape}
        return StackShards(specs, world, frozenset(layers), pooled=draw(st.booleans()))
    if kind == "mixed":
        cut = draw(st.sets(st.sampled_from(list(specs))))
        parts = [{n: s for n, s in specs.items() if (n in cut) == own} for own in (True, False)]
        return MixedShards(
            specs, world, (shard_by_element(parts[0], world), shard_by_parameter(parts[1], world))
        )
    return shard_by_bucket(specs, world, draw(buckets_of(specs)), spread=kind == "spread")


@st.composite
def buckets_of(draw, specs):
    names = draw(st.permutations(list(specs)))
    cuts = sorted(draw(st.sets(st.integers(1, len(names)))) - {len(names)})
    return [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]


def loads(shards):
    """Elements that each replica owns."""
    ranges = [[shards.owned(name, r) for name in shards.specs] for r in range(shards.world_size)]
    return [sum(stop - start for start, stop in own) for own in ranges]


def total(shards):
    return sum(spec.size for spec in shards.specs.values())


@given(shards=plans())
def test_every_element_has_one_owner(shards):
    for name, spec in shards.specs.items():
        owners = np.zeros(spec.size, int)
        for replica in range(shards.world_size):
            start, stop = shards.owned(name, replica)
            assert 0 <= start <= stop <= spec.size
            owners[start:stop] += 1
        assert (owners == (shards.world_size if shards.is_kept(name) else 1)).all()


@given(shards=plans())
def test_a_message_has_what_each_replica_has(shards):
    for names in shards.together(list(shards.specs)):
        layouts = [shards.layout(names, replica) for replica in range(shards.world_size)]
        assert shards.counts(names) == tuple(
            sum(map(math.prod, layout.values())) for layout in layouts
        )
        assert shards.elements(names) == sum(shards.counts(names))


def test_what_replicas_have_is_counted_in_one_pass_and_once():
    specs = {f"p{i}": Spec((4, 2)) for i in range(100)}
    few, many = (shard_by_parameter(specs, world) for world in (100, 3200))
    names = list(specs)
    once = [executed(lambda s=s: s.counts(names)) for s in (few, many)]
    assert once[1] < 4 * once[0]  # and not 32 times; a Python counts as it likes
    assert executed(lambda: many.counts(names)) < once[0] / 10
    for i in range(200):
        many.counts(names[i % 100 :])
    assert len(many._counted) <= 64


@given(shards=plans(["element"]))
def test_pieces_are_alike_and_padding_is_small(shards):
    counts = shards.counts(list(shards.specs))
    assert len(set(counts)) == 1
    assert sum(counts) - total(shards) <= len(shards.specs) * (shards.world_size - 1)
    for name, spec in shards.specs.items():
        assert shards.length(name) == math.ceil(spec.size / shards.world_size)
        assert len(shards.piece_shape(name)) == len(spec.shape)
        assert math.prod(shards.piece_shape(name)) == shards.length(name)


@given(shards=plans(["stacks"]))
def test_slots_bound_the_work_of_a_replica_and_the_wire(shards):
    """In a stack, and of what is kept, every replica has the work, also of padding; of a ragged
    slot its owner alone."""
    world, specs, stacks = shards.world_size, shards.specs, shards.stacks
    names = [name for own in stacks.values() for name in own if name]
    assert sorted([*names, *shards.cut, *filter(shards.is_kept, specs)]) == sorted(specs)
    matrices = {n: s.shape for n, s in specs.items() if len(s.shape) > 1 and n not in shards.cut}
    work = {n: math.prod(shape) * min(shape[-2:]) for n, shape in matrices.items()}
    of_all = [n for n in work if shards.is_kept(n) or (n in stacks and n not in shards.ragged)]
    owned = [
        sum(work[own[r]] for s, own in stacks.items() if s in shards.ragged and own[r])
        for r in range(world)
    ]
    if shards.pooled and work:
        assert sum(work[n] for n in of_all) + max(owned) <= sum(work.values()) / world + max(
            work.values()
        )
    for stack, own in stacks.items():
        assert stack in shards.ragged or {specs[name] for name in own} == {specs[stack]}
    for together in shards.together(list(specs)):
        if not (shards.is_kept(together[0]) or shards.is_sparse(together[0])):
            assert sum(shards.counts(together)) <= 2 * sum(specs[name].size for name in together)


@given(shards=plans(["parameter", "spread"]), data=st.data())
def test_no_replica_has_more_than_the_average_and_one_parameter(shards, data):
    specs, world = shards.specs, shards.world_size
    assert max(loads(shards)) <= total(shards) / world + max(spec.size for spec in specs.values())
    work = {name: data.draw(st.integers(0, 1000)) for name in specs}
    owners = shard_by_parameter(specs, world, work).owners
    each = [sum(work[n] for n, owner in owners.items() if owner == r) for r in range(world)]
    assert max(each) <= sum(each) / world + max(work.values())


@given(shape=SHAPES, world=WORLDS, data=st.data())
def test_a_bucket_has_one_owner_and_a_spread_one_is_cut_in_order(shape, world, data):
    specs = {f"p{i}": Spec(s) for i, s in enumerate(shape)}
    buckets = data.draw(buckets_of(specs))
    shards = shard_by_bucket(specs, world, buckets)
    sizes = [sum(specs[name].size for name in bucket) for bucket in buckets]
    assert all(len({shards.owners[name] for name in bucket}) == 1 for bucket in buckets)
    assert max(loads(shards)) <= sum(sizes) / world + max(sizes)
    spread = shard_by_bucket(specs, world, buckets, spread=True)
    owners = [spread.owners[name] for bucket in buckets for name in bucket]
    assert owners == sorted(owners)


def test_known_owners():
    specs = {"a": Spec((6,)), "b": Spec((5,)), "c": Spec((4,)), "d": Spec((2,)), "e": Spec((1,))}
    assert shard_by_parameter(specs, 2).owners == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0}
    assert shard_by_bucket(specs, 2, [["a", "e"], ["b", "c"], ["d"]]).owners == {
        "b": 0,
        "c": 0,
        "a": 1,
        "e": 1,
        "d": 1,
    }
    spread = shard_by_bucket(specs, 2, [["a", "b"], ["c", "d", "e"]], spread=True)
    assert spread.owners == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1}
    shards = shard_by_element({"x": Spec((2, 5))}, 4)
    assert [shards.owned("x", r) for r in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]


@given(shards=plans(), data=st.data())
def test_messages_and_pieces_come_back(shards, data):
    names = data.draw(st.lists(st.sampled_from(list(shards.specs)), unique=True, min_size=1))
    numbers = iter(np.arange(1.0, 10**5))
    arrays = {
        n: np.array([next(numbers) for _ in range(s.size)]).reshape(s.shape)
        for n, s in shards.specs.items()
    }
    for together in shards.together(names):
        if not shards.is_kept(together[0]):
            message_and_pieces_come_back(shards, {name: arrays[name] for name in together})
        if shards.is_sparse(together[0]):
            parts_sum_to_the_whole(shards, {name: arrays[name] for name in together})


def message_and_pieces_come_back(shards, arrays):
    names = list(arrays)
    message = shards.message(OPS, arrays)
    counts = shards.counts(names)
    assert message.shape == (sum(counts),)
    out = {name: np.full_like(x, np.nan) for name, x in arrays.items()}
    for back in (shards.whole(OPS, message, names), shards.whole(OPS, message, names, out=out)):
        assert list(back) == names
        for name, x in arrays.items():
            np.testing.assert_array_equal(back[name], x)
    for replica, part in enumerate(np.split(message, np.cumsum(counts)[:-1])):
        own = shards.own(OPS, arrays, replica)
        pieces = shards.pieces(part, names, replica)
        assert own.keys() == pieces.keys()
        for name, piece in own.items():
            np.testing.assert_array_equal(pieces[name], piece)
            if isinstance(shards, StackShards):  # by the name of the first
                name = dict(enumerate(shards.stacks.get(name, [name] * len(counts)))).get(replica)
            start, stop = shards.owned(name, replica) if name in arrays else (0, 0)
            flat = arrays[name].reshape(-1)[start:stop] if name in arrays else np.zeros(0)
            np.testing.assert_array_equal(
                piece.reshape(-1), np.pad(flat, (0, piece.size - flat.size))
            )
        np.testing.assert_array_equal(shards.shard(OPS, own, names, replica), part)


def test_what_is_sparse_is_the_sum_of_what_its_owners_have():
    """Three layers of one array, and matrices of two shapes, on eight replicas."""
    shapes = {"layers": (3, 4), "wide": (2, 5), "square": (3, 3)}
    arrays = {
        name: np.random.default_rng(i).normal(size=shape)
        for i, (name, shape) in enumerate(shapes.items())
    }
    shards = StackShards(
        {n: Spec(s, "float64") for n, s in shapes.items()}, 8, frozenset({"layers"})
    )
    assert all(map(shards.is_sparse, shapes))
    assert shards.ragged == {"square"}
    parts_sum_to_the_whole(shards, arrays)


def parts_sum_to_the_whole(shards, arrays):
    own = [shards.own(OPS, arrays, replica) for replica in range(shards.world_size)]
    parts = [shards.alone(OPS, pieces, list(arrays), replica) for replica, pieces in enumerate(own)]
    for name, x in arrays.items():
        np.testing.assert_array_equal(sum(part[name] for part in parts), x)


def test_pieces_without_their_padding_are_padded_and_who_owns_nothing_has_an_empty_shard_of_the_dtype():
    shards = shard_by_element({"x": Spec((5,)), "y": Spec((3,))}, 2)
    shard = shards.shard(OPS, {"x": np.array([4.0, 5.0]), "y": np.array([6.0])}, ["x", "y"], 1)
    np.testing.assert_array_equal(shard, [4, 5, 0, 6, 0])
    shard = shard_by_parameter({"x": Spec((5,), "float32")}, 3).shard(OPS, {}, ["x"], 2)
    assert (shard.shape, shard.dtype) == ((0,), np.float32)


#: Of three shapes there are several.
ZERO_SHAPES = (
    {"w": (5, 7), "b": (3,), "s": (), "empty": (0, 4), "v": (16, 4)}
    | {f"{n}2": (5, 7) for n in "abcd"}
    | {"b2": (3,)}
)
ZERO_SPECS = {name: Spec(shape, "float64") for name, shape in ZERO_SHAPES.items()}
BUCKETS = [["w", "b", "a2", "b2", "c2"], ["s", "empty", "v", "d2"]]
MAKERS = {
    "element": shard_by_element,
    "parameter": shard_by_parameter,
    "bucket": lambda specs, world: shard_by_bucket(specs, world, BUCKETS),
    "mixed": lambda specs, world: mixed(specs, world),
    "stacks": StackShards,
    "spread": lambda specs, world: shard_by_bucket(specs, world, BUCKETS, spread=True),
}


def mixed(specs, world):
    cut, whole = (
        {n: s for n, s in specs.items() if (len(s.shape) == 2) == matrix}
        for matrix in (False, True)
    )
    return MixedShards(
        specs, world, (shard_by_element(cut, world), shard_by_parameter(whole, world))
    )


EVERY_KIND = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
#: The last is more than there are parameters, and more than most have elements.
ZERO_WORLDS = (1, 2, 3, 17)


def given_gradients(world, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {name: rng.standard_normal(shape) for name, shape in ZERO_SHAPES.items()}
        for _ in range(world)
    ]


def mean(gradients):
    return {name: np.mean([g[name] for g in gradients], axis=0) for name in ZERO_SHAPES}


def norm(gradients):
    return np.sqrt(sum((g**2).sum() for g in gradients.values()))


def twice(replica, pieces):
    return {name: 2 * x for name, x in pieces.items()}


def assert_equal(result, expected, rtol=1e-12):
    assert result.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(result[name], expected[name], rtol=rtol, atol=1e-15)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    "case", [c for c in ZERO_CASES if not isinstance(ZERO_CASES[c].algorithm, gw.PowerSGD)]
)
def test_the_oracle_of_the_parity_table_is_the_optimizer_that_is_not_sharded(case, replicas):
    sharded, plain = zero_cases.oracle(case, replicas).params, zero_cases.plain(case, replicas)
    for mine, theirs in zip(sharded, plain, strict=True):
        assert_equal(mine, theirs, rtol=1e-11)
    changed = [
        n for n in zero_cases.SHAPES if not np.array_equal(sharded[-1][n], zero_cases.initial(n))
    ]
    assert changed == [n for n in zero_cases.SHAPES if n != "empty"]


@EVERY_KIND
@pytest.mark.parametrize(
    ("algorithm", "max_norm"),
    [
        (AllReduce(), None),
        (AllReduce(bucket_bytes=64), 1.0),
        (gw.PowerSGD(2, min_compression_rate=0.5), 1.0),
        (None, 1.0),
    ],
    ids=repr,
)
def test_each_replica_takes_its_part_of_the_average_clipped_by_the_norm_of_all_as_planned(
    make, algorithm, max_norm
):
    """Without an algorithm gradients are averages already. A step may bring some of the
    parameters."""
    if make is StackShards and algorithm == AllReduce(bucket_bytes=64):
        with pytest.raises(ValueError, match="bucket_bytes=64"):
            Zero(make(ZERO_SPECS, 2), algorithm)
        return
    for world in ZERO_WORLDS[1:]:
        zero = Zero(make(ZERO_SPECS, world), algorithm, max_norm, unscale=lambda: 0.25)
        sim = gw.Simulator(zero, ZERO_SHAPES, world, ops=PoisonOps(), optimizer=twice)
        alone, predicted = (
            gw.Simulator(algorithm or AllReduce(), ZERO_SHAPES, world),
            gw.plan(ZERO_SHAPES, zero, itemsize=8),
        )
        for step, names in enumerate([ZERO_SHAPES, ZERO_SHAPES, ["b", "v", "empty"]]):
            local = [{n: g[n] for n in names} for g in given_gradients(world, step)]
            averages = alone.step(local)
            scaled = [
                {n: 4 * x for n, x in g.items()}
                for g in (local if algorithm else [averages] * world)
            ]
            result, length = sim.step(scaled), norm(averages)
            assert length > 1
            assert_equal(
                result,
                {n: 2 * x / (length if max_norm else 1) for n, x in averages.items()},
                rtol=1e-9,
            )
            if step < 2:
                assert (predicted.collectives, predicted.wire_bytes) == (
                    sim.traffic.collectives,
                    sim.traffic.nbytes,
                )


@settings(deadline=None)
@given(
    world=st.integers(1, 9),
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    clipped=st.booleans(),
)
def test_bytes_by_hand(world, sizes, clipped):
    """Half of the message there and half of it back: an all-reduce of the padded parameters. The
    norm is one number more."""
    shapes = {f"p{i}": (n,) for i, n in enumerate(sizes)}
    shards = shard_by_element({name: Spec(shape) for name, shape in shapes.items()}, world)
    padded = sum(world * -(-n // world) for n in sizes)
    step = gw.plan(shapes, Zero(shards, max_norm=1.0 if clipped else None)).steps[0]
    assert step.nbytes == 2 * -(-4 * padded // 2) + 4 * clipped
    assert step.collectives == (2 if padded else 0) + clipped


def test_clipping_of_half_precision_does_not_overflow_and_keeps_the_dtype():
    pieces = [{"x": np.full(n, 60000.0, np.float16)} for n in (4, 3)]
    for clipped, norm_squared in lock_step([clip_by_norm(OPS, p, 1.0) for p in pieces]):
        assert (clipped["x"].dtype, norm_squared.dtype) == (np.float16, np.float32)
        np.testing.assert_allclose(clipped["x"], 7**-0.5, rtol=1e-3)


def test_a_norm_that_is_not_finite_spoils_every_update():
    local, found = given_gradients(2), []
    for local[1]["s"][...] in (np.inf, np.nan):
        sim = gw.Simulator(
            Zero(shard_by_element(ZERO_SPECS, 2), max_norm=1.0), ZERO_SHAPES, 2, optimizer=twice
        )
        found.append(sim.step(local))
    # Every factor is max_norm / inf = 0: optimizers are given zeros, as torch's clipping gives
    # them.
    assert all((~np.isfinite(x) if name == "s" else x == 0).all() for name, x in found[0].items())
    assert all(np.isnan(x).all() for x in found[1].values())


@EVERY_KIND
def test_results_are_written_where_they_may_be(make):
    old = [{name: np.full(shape, 7.0) for name, shape in ZERO_SHAPES.items()} for _ in range(3)]
    given, zero = (
        given_gradients(3),
        Zero(make(ZERO_SPECS, 3), AllReduce(None if make is StackShards else 64)),
    )
    expected = {name: 2 * x for name, x in mean(given).items()}
    programs = [
        zero.step(OPS, dict(g), gw.State(), 0, out=o) for g, o in zip(given, old, strict=True)
    ]
    for (result, _), mine in zip(lock_step(programs, OPS, optimizer=twice), old, strict=True):
        assert_equal(result, expected)
        if make is not StackShards:
            assert all(result[name] is mine[name] for name in ZERO_SHAPES)


def test_dtypes_do_not_share_a_message():
    specs = {"a": Spec((3,), "float32"), "b": Spec((4,), "float64"), "c": Spec((5,), "float32")}
    assert Zero(shard_by_element(specs, 2)).buckets(specs) == [["a", "c"], ["b"]]
    assert Zero(shard_by_element(specs, 2), AllReduce(bucket_bytes=1)).buckets(specs) == [
        ["c"],
        ["b"],
        ["a"],
    ]


DTYPES = [torch.uint8, torch.float16, torch.float32, torch.float64]
KEYS = list(itertools.product(DTYPES, ["cpu", "meta"]))
#: numbers of elements, keys: mostly small ones that fill small limits often, some larger than every
#: limit
TENSORS = st.lists(
    st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 5000)), st.sampled_from(KEYS)),
    min_size=1,
)
LIMITS = st.lists(
    st.one_of(st.integers(1, 200), st.integers(1, 20_000), st.just(sys.maxsize)),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def memory():
    return {key: torch.empty(5000, dtype=key[0], device=key[1]) for key in KEYS}


def sizes_of(tensors):
    return [n * key[0].itemsize for n, key in tensors]


@settings(max_examples=100)
@given(tensors=TENSORS, limits=LIMITS)
def test_buckets_are_those_of_c10d(memory, tensors, limits):
    theirs, _ = dist._compute_bucket_assignment_by_size(
        [memory[key][:n] for n, key in tensors], limits
    )
    assert assign_buckets(sizes_of(tensors), limits, [key for _, key in tensors]) == theirs


@settings(max_examples=100)
@given(tensors=TENSORS, limits=LIMITS, data=st.data())
def test_buckets_in_arrival_order_are_those_of_c10d(memory, tensors, limits, data):
    order = data.draw(st.permutations(range(len(tensors))))
    walked = [memory[tensors[i][1]][: tensors[i][0]] for i in order]
    theirs, their_limits = dist._compute_bucket_assignment_by_size(walked, limits, [], order)
    sizes = sizes_of(tensors)
    ours = assign_buckets(sizes, limits, [key for _, key in tensors], order)
    closed = [
        b
        for b, limit in zip(theirs, their_limits, strict=True)
        if sum(sizes[i] for i in b) >= limit
    ]
    assert ours[: len(closed)] == theirs[: len(closed)] == closed
    # C++ lists what is left over in the order of a hash table.
    assert sorted(ours[len(closed) :]) == sorted(theirs[len(closed) :])
    assert [b[0] for b in ours[len(closed) :]] == sorted(
        (b[0] for b in ours[len(closed) :]), key=order.index
    )


def test_no_tensors_need_no_buckets():
    assert assign_buckets([], [1]) == []
    assert assign_buckets([], [1], [], []) == []


def test_limits_are_those_of_ddp():
    assert bucket_limits(25, 1) == [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 1024 * 1024]
    assert bucket_limits(0.5, 1) == [1 << 19, 1 << 19]


def test_those_that_did_not_arrive_keep_the_order_of_the_buckets():
    reducer = Reducer("abcd", [[3], [1, 2], [0]])
    reducer.begin(unused=[0, 3])
    reducer.ready(2)
    reducer.end(missing_are_unused=True)
    assert reducer.arrival_order() == [2, 3, 1, 0]


def test_the_error_names_what_is_missing_and_what_to_do():
    reducer = Reducer(["head.weight", "body.weight", "body.bias"], [[0], [1, 2]])
    reducer.begin()
    reducer.ready(1)
    with pytest.raises(RuntimeError) as raised:
        reducer.end()
    fixes = ("find_unused_parameters=True", "requires_grad=False")
    for part in ("'head.weight', 'body.bias' are", "2 of 2 buckets", *fixes):
        assert part in str(raised.value)
    assert "body.weight" not in str(raised.value)
    assert reducer.begin() == []  # the next pass is a new one
    assert reducer.ready(0) == [0]
    with pytest.raises(RuntimeError, match=r"'head.weight' .*second gradient.*use_reentrant=False"):
        reducer.ready(0)
    unused = Reducer("ab", [[0], [1]])
    assert unused.begin(unused=[1]) == []
    with pytest.raises(RuntimeError, match=r"parameter 'b' .*do not depend on it"):
        unused.ready(1)
    many = Reducer([f"p{i}" for i in range(100)], [list(range(100))])
    many.begin()
    with pytest.raises(RuntimeError, match=r"'p0', .*'p7' and 92 more are without"):
        many.end()


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([[0]], "parameter 'b' is in no bucket"),
        ([], "parameters 'a', 'b' are in no bucket"),
        ([[0, 1], [0]], "parameter 'a' is in buckets 0 and 1"),
        ([[0, 1], []], "bucket 1 is empty"),
        ([[0, 1, 2]], "bucket 0 holds parameter 2 of 2"),
    ],
)
def test_buckets_that_cannot_be(buckets, message):
    with pytest.raises(ValueError, match=message):
        Reducer("ab", buckets)
    reducer = Reducer("ab", [[0], [1]])
    with pytest.raises(ValueError, match=message):
        reducer.rebuild(buckets)
    assert reducer.buckets == [[0], [1]]


def test_calls_out_of_turn():
    reducer = Reducer("a", [[0]])
    with pytest.raises(RuntimeError, match="'a' is ready, but no backward pass"):
        reducer.ready(0)
    with pytest.raises(RuntimeError, match="never began"):
        reducer.end()
    reducer.begin()
    with pytest.raises(RuntimeError, match="before the last one ended"):
        reducer.begin()
    with pytest.raises(RuntimeError, match="during a backward pass"):
        reducer.rebuild([[0]])
