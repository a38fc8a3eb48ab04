"""The reducer: what it refuses, and says. Its order, on several ranks at once and with whatever may come between, is `tests.soak.arrival`."""

import pytest

from gradwire.core.buckets.reducer import Reducer


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
