"""Buckets against the C++ of torch itself; and the reducer, what it refuses, and says. Its order, with whatever may come between, is `tests.soak.arrival`."""

import itertools
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import assign_buckets
from gradwire.core.buckets.assignment import bucket_limits
from gradwire.core.buckets.reducer import Reducer

DTYPES = [torch.uint8, torch.float16, torch.float32, torch.float64]
KEYS = list(itertools.product(DTYPES, ["cpu", "meta"]))
#: numbers of elements, keys: mostly small ones that fill small limits often, some larger than every limit
TENSORS = st.lists(st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 5000)), st.sampled_from(KEYS)), min_size=1)
LIMITS = st.lists(st.one_of(st.integers(1, 200), st.integers(1, 20_000), st.just(sys.maxsize)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def memory():
    return {key: torch.empty(5000, dtype=key[0], device=key[1]) for key in KEYS}


def sizes_of(tensors):
    return [n * key[0].itemsize for n, key in tensors]


@settings(max_examples=100)
@given(tensors=TENSORS, limits=LIMITS)
def test_buckets_are_those_of_c10d(memory, tensors, limits):
    theirs, _ = dist._compute_bucket_assignment_by_size([memory[key][:n] for n, key in tensors], limits)
    assert assign_buckets(sizes_of(tensors), limits, [key for _, key in tensors]) == theirs


@settings(max_examples=100)
@given(tensors=TENSORS, limits=LIMITS, data=st.data())
def test_buckets_in_arrival_order_are_those_of_c10d(memory, tensors, limits, data):
    order = data.draw(st.permutations(range(len(tensors))))
    walked = [memory[tensors[i][1]][: tensors[i][0]] for i in order]
    theirs, their_limits = dist._compute_bucket_assignment_by_size(walked, limits, [], order)
    sizes = sizes_of(tensors)
    ours = assign_buckets(sizes, limits, [key for _, key in tensors], order)
    closed = [b for b, limit in zip(theirs, their_limits, strict=True) if sum(sizes[i] for i in b) >= limit]
    assert ours[: len(closed)] == theirs[: len(closed)] == closed
    # C++ lists what is left over in the order of a hash table.
    assert sorted(ours[len(closed) :]) == sorted(theirs[len(closed) :])
    assert [b[0] for b in ours[len(closed) :]] == sorted((b[0] for b in ours[len(closed) :]), key=order.index)


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
