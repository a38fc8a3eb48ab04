"""The reducer on several ranks at once, against a model that knows only the rule."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gradwire.core.buckets.assignment import assign_buckets
from gradwire.core.buckets.reducer import Reducer


def can(phase):
    return precondition(lambda self: phase in getattr(self, "phase", []))


class Ranks(RuleBasedStateMachine):
    """Any arrival order, any unused set, on each rank; accumulation, failures and rebuilds between.

    The rule: bucket k may be launched when every parameter of buckets 0…k is settled. What has been launched is always all that may be.
    """

    @initialize(
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9), limit=st.integers(1, 20), ranks=st.integers(1, 3)
    )
    def wrap(self, sizes, limit, ranks):
        self.sizes, self.limit = sizes, limit
        self.names = [f"p{i}" for i in range(len(sizes))]
        buckets = assign_buckets(sizes, [limit])[::-1]
        self.ranks = [Reducer(self.names, buckets) for _ in range(ranks)]
        self.passes = [0] * ranks  # finished synchronized passes
        self.fresh()

    def fresh(self):
        self.settled = [set() for _ in self.ranks]
        self.unused = [set() for _ in self.ranks]
        self.launched = [[] for _ in self.ranks]
        self.came = [[] for _ in self.ranks]
        self.phase = ["idle"] * len(self.ranks)  # idle, summing, adding (accumulating), done

    def some(self, data, phase):
        return data.draw(st.sampled_from([r for r, p in enumerate(self.phase) if p == phase]))

    @can("idle")
    @rule(data=st.data())
    def begin(self, data):
        rank = self.some(data, "idle")
        unused = data.draw(st.sets(st.integers(0, len(self.names) - 1)))
        self.unused[rank], self.settled[rank] = unused, set(unused)
        self.launched[rank] = self.ranks[rank].begin(unused)
        self.phase[rank] = "summing"

    @can("idle")
    @rule(data=st.data())
    def begin_to_accumulate(self, data):
        rank = self.some(data, "idle")
        assert self.ranks[rank].begin(accumulating=True) == []
        self.phase[rank] = "adding"

    @can("adding")
    @rule(data=st.data(), i=st.integers(0, 8), times=st.integers(0, 2))
    def accumulate(self, data, i, times):
        rank = self.some(data, "adding")
        for _ in range(times):
            assert self.ranks[rank].ready(i % len(self.names)) == []
        assert self.ranks[rank].missing() == []
        assert self.ranks[rank].end() == []
        self.phase[rank] = "idle"

    @can("summing")
    @rule(data=st.data(), count=st.integers(1, 9))
    def gradients_arrive(self, data, count):
        rank = self.some(data, "summing")
        left = sorted(set(range(len(self.names))) - self.settled[rank])
        for i in data.draw(st.permutations(left))[:count]:
            self.settled[rank].add(i)
            self.came[rank].append(i)
            self.launched[rank] += self.ranks[rank].ready(i)

    @can("summing")
    @rule(data=st.data())
    def one_arrives_again(self, data):
        rank = self.some(data, "summing")
        if self.settled[rank]:
            i = data.draw(st.sampled_from(sorted(self.settled[rank])))
            why = "do not depend on it" if i in self.unused[rank] else "second gradient"
            with pytest.raises(RuntimeError, match=f"parameter 'p{i}' .*{why}"):
                self.ranks[rank].ready(i)

    @can("summing")
    @rule(data=st.data(), lenient=st.booleans())
    def finish(self, data, lenient):
        rank = self.some(data, "summing")
        missing = set(range(len(self.names))) - self.settled[rank]
        assert set(self.ranks[rank].missing()) == missing
        if missing and not lenient:
            first = self.ranks[rank].missing()[0]  # of many, the message names those that are due first
            with pytest.raises(RuntimeError, match="without a gradient") as raised:
                self.ranks[rank].end()
            assert repr(self.names[first]) in str(raised.value)
            assert not any(repr(self.names[i]) in str(raised.value) for i in self.settled[rank])
            self.start_over(rank)
            return
        self.launched[rank] += self.ranks[rank].end(missing_are_unused=lenient)
        self.settled[rank] = set(range(len(self.names)))
        self.phase[rank] = "done"

    @can("summing")
    @rule(data=st.data())
    def fail(self, data):
        rank = self.some(data, "summing")
        self.ranks[rank].abandon()
        self.start_over(rank)

    def start_over(self, rank):
        self.settled[rank], self.launched[rank], self.came[rank] = set(), [], []
        self.phase[rank] = "idle"

    @precondition(lambda self: all(p == "done" for p in getattr(self, "phase", ["no"])))
    @rule(rebuild=st.booleans())
    def step(self, rebuild):
        for rank, reducer in enumerate(self.ranks):
            assert reducer.arrived == self.came[rank]
            order = reducer.arrival_order()
            assert sorted(order) == list(range(len(self.names)))
            assert order[: len(self.came[rank])] == self.came[rank]
        if rebuild:
            buckets = assign_buckets(self.sizes, [self.limit], order=self.ranks[0].arrival_order())
            for reducer in self.ranks:
                reducer.rebuild(buckets)
        self.fresh()

    @invariant()
    def launched_is_what_may_be(self):
        for rank, reducer in enumerate(getattr(self, "ranks", [])):
            assert reducer.buckets == self.ranks[0].buckets
            if self.phase[rank] in ("summing", "done"):
                full = 0
                while full < len(reducer.buckets) and set(reducer.buckets[full]) <= self.settled[rank]:
                    full += 1
                assert self.launched[rank] == list(range(full))
                assert self.phase[rank] == "summing" or full == len(reducer.buckets)


TestRanks = Ranks.TestCase
TestRanks.settings = settings(max_examples=60, stateful_step_count=60)


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
    with pytest.raises(RuntimeError, match=r"'head.weight' .*use_reentrant=False"):
        reducer.ready(0)
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
