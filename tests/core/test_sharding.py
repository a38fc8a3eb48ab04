"""Shard plans: every element has one owner, owners have about as much, and what is cut apart can be put together again."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradwire import Spec
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.zero.sharding import MixedShards, shard_by_bucket, shard_by_element, shard_by_parameter
from gradwire.core.zero.stacks import StackShards

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
        return MixedShards(specs, world, (shard_by_element(parts[0], world), shard_by_parameter(parts[1], world)))
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
    """In a stack, and of what is kept, every replica has the work, also of padding; of a ragged slot its owner alone."""
    world, specs = shards.world_size, shards.specs
    names = [name for own in shards.stacks.values() for name in own if name]
    assert sorted([*names, *shards.cut, *filter(shards.is_kept, specs)]) == sorted(specs)
    whole = {
        n: math.prod(s.shape) * min(s.shape[-2:]) for n, s in specs.items() if len(s.shape) > 1 and n not in shards.cut
    }
    of_all = [n for n in whole if shards.is_kept(n) or (n in shards.stacks and n not in shards.ragged)]
    owned = [
        sum(whole[own[r]] for s, own in shards.stacks.items() if s in shards.ragged and own[r]) for r in range(world)
    ]
    if shards.pooled and whole:
        assert sum(whole[n] for n in of_all) + max(owned) <= sum(whole.values()) / world + max(whole.values())
    for stack, own in shards.stacks.items():
        assert stack in shards.ragged or {specs[name] for name in own} == {specs[stack]}
    for together in shards.together(list(specs)):
        if not (shards.is_kept(together[0]) or shards.is_sparse(together[0])):
            assert sum(shards.counts(together)) <= 2 * sum(specs[name].size for name in together)


@given(shapes=SHAPES, world=WORLDS, data=st.data())
def test_no_replica_has_more_work_than_the_average_and_one_parameter(shapes, world, data):
    specs = {f"p{i}": Spec(shape) for i, shape in enumerate(shapes)}
    work = {name: data.draw(st.integers(0, 1000)) for name in specs}
    owners = shard_by_parameter(specs, world, work).owners
    each = [sum(work[n] for n, owner in owners.items() if owner == r) for r in range(world)]
    assert max(each) <= sum(each) / world + max(work.values())


@given(shards=plans(["parameter", "spread"]))
def test_no_replica_has_more_than_the_average_and_one_parameter(shards):
    largest = max(spec.size for spec in shards.specs.values())
    assert max(loads(shards)) <= total(shards) / shards.world_size + largest


@given(shards=plans(["parameter"]))
def test_a_free_replica_is_used(shards):
    sizes = [spec.size for spec in shards.specs.values() if spec.size]
    assert sum(load > 0 for load in loads(shards)) == min(len(sizes), shards.world_size)


@given(shape=SHAPES, world=WORLDS, data=st.data())
def test_a_bucket_has_one_owner(shape, world, data):
    specs = {f"p{i}": Spec(s) for i, s in enumerate(shape)}
    buckets = data.draw(buckets_of(specs))
    shards = shard_by_bucket(specs, world, buckets)
    sizes = [sum(specs[name].size for name in bucket) for bucket in buckets]
    assert all(len({shards.owners[name] for name in bucket}) == 1 for bucket in buckets)
    assert max(loads(shards)) <= sum(sizes) / world + max(sizes)


@given(shape=SHAPES, world=WORLDS, data=st.data())
def test_a_spread_bucket_is_cut_in_order(shape, world, data):
    specs = {f"p{i}": Spec(s) for i, s in enumerate(shape)}
    buckets = data.draw(buckets_of(specs))
    shards = shard_by_bucket(specs, world, buckets, spread=True)
    owners = [shards.owners[name] for bucket in buckets for name in bucket]
    assert owners == sorted(owners)


def test_known_owners():
    specs = {"a": Spec((6,)), "b": Spec((5,)), "c": Spec((4,)), "d": Spec((2,)), "e": Spec((1,))}
    assert shard_by_parameter(specs, 2).owners == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0}
    assert shard_by_bucket(specs, 2, [["a", "e"], ["b", "c"], ["d"]]).owners == {"b": 0, "c": 0, "a": 1, "e": 1, "d": 1}
    spread = shard_by_bucket(specs, 2, [["a", "b"], ["c", "d", "e"]], spread=True)
    assert spread.owners == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1}
    shards = shard_by_element({"x": Spec((2, 5))}, 4)
    assert [shards.owned("x", r) for r in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]


@given(shards=plans(), data=st.data())
def test_messages_and_pieces_come_back(shards, data):
    names = data.draw(st.lists(st.sampled_from(list(shards.specs)), unique=True, min_size=1))
    numbers = iter(range(1, 10**6))
    arrays = {
        n: np.array([float(next(numbers)) for _ in range(s.size)]).reshape(s.shape) for n, s in shards.specs.items()
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
            np.testing.assert_array_equal(piece.reshape(-1), np.pad(flat, (0, piece.size - flat.size)))
        np.testing.assert_array_equal(shards.shard(OPS, own, names, replica), part)


def test_what_is_sparse_is_the_sum_of_what_its_owners_have():
    """Three layers of one array, and matrices of two shapes, on eight replicas."""
    shapes = {"layers": (3, 4), "wide": (2, 5), "square": (3, 3)}
    arrays = {name: np.random.default_rng(i).normal(size=shape) for i, (name, shape) in enumerate(shapes.items())}
    shards = StackShards({n: Spec(s, "float64") for n, s in shapes.items()}, 8, frozenset({"layers"}))
    assert all(map(shards.is_sparse, shapes))
    assert shards.ragged == {"square"}
    parts_sum_to_the_whole(shards, arrays)


def parts_sum_to_the_whole(shards, arrays):
    own = [shards.own(OPS, arrays, replica) for replica in range(shards.world_size)]
    parts = [shards.alone(OPS, pieces, list(arrays), replica) for replica, pieces in enumerate(own)]
    for name, x in arrays.items():
        np.testing.assert_array_equal(sum(part[name] for part in parts), x)


def test_pieces_without_their_padding_are_padded():
    shards = shard_by_element({"x": Spec((5,)), "y": Spec((3,))}, 2)
    shard = shards.shard(OPS, {"x": np.array([4.0, 5.0]), "y": np.array([6.0])}, ["x", "y"], 1)
    np.testing.assert_array_equal(shard, [4, 5, 0, 6, 0])


def test_a_replica_that_owns_nothing_has_an_empty_shard_of_the_right_dtype():
    shards = shard_by_parameter({"x": Spec((5,), "float32")}, 3)
    assert shards.counts(["x"]) == (5, 0, 0)
    shard = shards.shard(OPS, {}, ["x"], 2)
    assert (shard.shape, shard.dtype) == ((0,), np.float32)
    assert shards.pieces(shard, ["x"], 2) == {}
