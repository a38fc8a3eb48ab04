"""Buckets against the C++ of torch itself, and layouts against what they promise."""

import itertools
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import assign_buckets
from gradwire.core.buckets.assignment import bucket_limits

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
